/* The clock of simulated GPUs: nanoseconds of CLOCK_MONOTONIC, which is the same in every process. */
#ifndef ACCELERATOR_SIM_CLOCK_H
#define ACCELERATOR_SIM_CLOCK_H

#include <errno.h>
#include <stdint.h>
#include <time.h>

enum { MILLISECOND = 1000000, SECOND = 1000000000 };

static inline struct timespec timespec_of(int64_t time)
{
    return (struct timespec){time / SECOND, time % SECOND};
}

static inline int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static inline void sleep_until(int64_t time)
{
    const struct timespec end = timespec_of(time);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR)
        ;
}

#endif
