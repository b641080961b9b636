/* A program beside a command on a simulated machine: it ends the command and all processes that the command has started if the
 * process that started it is killed, and so could not end them.
 *
 * accelerator-guard TOKEN. Standard input is a pipe from the process that it watches: a byte means that the process ends as it
 * should, the end of the pipe that it was killed. The environment of the processes to end contains the token. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 200, QUIET_ROUNDS = 3, PAUSE_NS = 10 * 1000 * 1000, CHUNK = 1 << 16 };

/* Whether the file contains the text. */
static bool contains(int file, const char *text)
{
    char *content = NULL;
    size_t length = 0;
    ssize_t count = 0;
    do {
        char *grown = realloc(content, length + CHUNK);
        if (!grown)
            break;
        content = grown;
        count = read(file, content + length, CHUNK);
        length += count > 0 ? (size_t)count : 0;
    } while (count > 0 || (count < 0 && errno == EINTR));
    const bool is_found = content && memmem(content, length, text, strlen(text));
    free(content);
    return is_found;
}

/* Kills the processes with the token in their environment, and returns whether there were any. */
static bool kill_marked(const char *token)
{
    bool are_any = false;
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes && (entry = readdir(processes));) {
        char path[300];
        const pid_t pid = atoi(entry->d_name);
        snprintf(path, sizeof path, "/proc/%s/environ", entry->d_name);
        const int file = pid > 1 && pid != getpid() ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) /* no process, or another user's */
            continue;
        if (contains(file, token))
            are_any |= kill(pid, SIGKILL) == 0;
        close(file);
    }
    if (processes)
        closedir(processes);
    return are_any;
}

int main(int count, char **arguments)
{
    if (count != 2 || !*arguments[1])
        return 2;
    setsid(); /* the terminal's signals and those to a process group end the command, and not its guard */
    signal(SIGTERM, SIG_IGN);
    syscall(SYS_close_range, STDERR_FILENO + 1, ~0u, 0);
    char byte;
    ssize_t received;
    while ((received = read(STDIN_FILENO, &byte, 1)) < 0 && errno == EINTR)
        ;
    /* A killed process may have started another one just before. */
    for (int round = 0, quiet = 0; received == 0 && round < ROUNDS && quiet < QUIET_ROUNDS; round++) {
        quiet = kill_marked(arguments[1]) ? 0 : quiet + 1;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    return 0;
}
