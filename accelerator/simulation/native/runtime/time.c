/* The CUDA runtime: time. */
#include "runtime.h"

#include <errno.h>
#include <time.h>

enum { SECOND = 1000000000 };

int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

void sleep_until(int64_t time)
{
    struct timespec end = {time / SECOND, time % SECOND};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR)
        ;
}
