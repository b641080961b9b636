/* The CUDA runtime: waits for the times at which work ends, which faults of the GPU change. */
#include "runtime.h"

cudaError_t sleep_on_device(int64_t time, int ordinal)
{
    if (has_faults())
        return driver->faults_sleep(driver->devices[ordinal].gpu, time);
    sleep_until(time);
    return SUCCESS;
}

static bool is_hang_over(int64_t time, int ordinal)
{
    return time == INT64_MAX && has_faults() && !driver->faults_hang(driver->devices[ordinal].gpu);
}

bool has_come(int64_t time, int ordinal)
{
    return time <= now() || is_hang_over(time, ordinal);
}

void end_hang(struct stream *stream)
{
    int64_t never = INT64_MAX;
    if (!is_hang_over(stream->idle_at, stream->device))
        return;
    atomic_compare_exchange_strong(&stream->idle_at, &never, now());
    never = INT64_MAX;
    atomic_compare_exchange_strong(&driver->devices[stream->device].busy_until, &never, now());
}
