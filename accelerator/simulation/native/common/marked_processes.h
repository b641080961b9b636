/* The processes whose environment contains a text: those of a run, or of a simulated machine. */
#ifndef ACCELERATOR_SIM_MARKED_PROCESSES_H
#define ACCELERATOR_SIM_MARKED_PROCESSES_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether the file contains the bytes. */
static inline bool file_contains(int file, const char *bytes, size_t size)
{
    enum { CHUNK = 1 << 16 };
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
    const bool is_found = content && memmem(content, length, bytes, size);
    free(content);
    return is_found;
}

/* Kills the processes with these bytes in their environment but this one, and returns whether there were any. */
static inline bool kill_marked(const char *bytes, size_t size)
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
        if (file_contains(file, bytes, size))
            are_any |= kill(pid, SIGKILL) == 0;
        close(file);
    }
    if (processes)
        closedir(processes);
    return are_any;
}

#endif
