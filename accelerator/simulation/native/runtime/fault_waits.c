/* The CUDA runtime: waits for the times at which work ends, which faults of the GPU change. */
#include "runtime.h"

cudaError_t sleep_on_device(int64_t time, int ordinal)
{
    if (has_faults())
        return driver->faults_sleep(driver->devices[ordinal].gpu, time);
    sleep_until(time);
    return SUCCESS;
}

int64_t end_of(int64_t time)
{
    return is_while_hung(time) && has_faults() ? driver->faults_end_of(time) : time;
}

bool has_come(int64_t time)
{
    return end_of(time) <= now();
}

void end_hang(_Atomic int64_t *time)
{
    int64_t hung = *time;
    const int64_t end = end_of(hung);
    if (is_while_hung(hung) && end <= now())
        atomic_compare_exchange_strong(time, &hung, end);
}

void end_hang_of_stream(struct stream *stream)
{
    end_hang(&stream->idle_at);
    end_hang(&driver->devices[stream->device].busy_until);
}
