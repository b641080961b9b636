/* What /proc tells about a process. */
#ifndef ACCELERATOR_SIM_PROCESS_H
#define ACCELERATOR_SIM_PROCESS_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* A field is 0 if it is unknown. */
struct process {
    uint64_t start_time;              /* in clock ticks since the system started: tells it from others with the same id */
    uint64_t code_start, stack_start; /* addresses; tell it from the program before exec, which keeps id and start time */
};

/* Returns false if the process does not exist or is a zombie. */
static inline bool read_process(pid_t pid, struct process *process)
{
    enum { STATE = 3, START_TIME = 22, CODE_START = 26, STACK_START = 28 }; /* the fields' numbers in proc(5) */
    char path[32], text[1024];
    *process = (struct process){0};
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return errno != ENOENT;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return false;
    text[length] = '\0';
    const char *field = strrchr(text, ')'); /* the end of the second one */
    for (int number = STATE; number <= STACK_START && field && (field = strchr(field + 1, ' ')); number++) {
        if (number == STATE && (field[1] == 'Z' || field[1] == 'X'))
            return false;
        uint64_t value = strtoull(field, NULL, 10);
        process->start_time = number == START_TIME ? value : process->start_time;
        process->code_start = number == CODE_START ? value : process->code_start;
        process->stack_start = number == STACK_START ? value : process->stack_start;
    }
    return true;
}

#endif
