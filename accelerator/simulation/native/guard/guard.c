/* A program beside a command on a simulated machine: it ends the command and all processes that the command has started if the
 * process that started it is killed, and so could not end them.
 *
 * accelerator-guard TOKEN. Standard input is a pipe from the process that it watches: a byte means that the process ends as it
 * should, the end of the pipe that it was killed. The environment of the processes to end contains the token. */
#include "common/marked_processes.h"

#include <sys/syscall.h>
#include <time.h>

enum { ROUNDS = 200, QUIET_ROUNDS = 3, PAUSE_NS = 10 * 1000 * 1000 };

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
        quiet = kill_marked(arguments[1], strlen(arguments[1])) ? 0 : quiet + 1;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    return 0;
}
