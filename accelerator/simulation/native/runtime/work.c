/* The CUDA runtime: submits work to streams: it is done at once, captured, or waited for. */
#include "runtime.h"

cudaError_t submit(struct stream *stream, const struct work *work)
{
    cudaError_t error;
    if (__builtin_expect(stream->capture != NULL, 0) && capture_work(stream, work, &error))
        return error;
    if (__builtin_expect(waiting_count != 0, 0) && work->type->prepare)
        RETURN_IF_ERROR(work->type->prepare(stream, work));
    return work->type->run(stream, work);
}

cudaError_t wait_for_stream(struct stream *stream)
{
    if (stream->capture)
        return refuse_captured_stream(stream);
    cudaError_t error = wait_for_pending(&stream->pending, stream->device);
    if (error == SUCCESS && stream->idle_at != 0)
        error = sleep_on_device(stream->idle_at, stream->device);
    if (error == SUCCESS)
        IF_RACES(race_hooks->at_stream_wait(&stream->races));
    return error;
}

cudaError_t wait_for_device(const struct sim_device *device)
{
    RETURN_IF_ERROR(wait_for_pending_on_device(device->ordinal));
    if (device->busy_until != 0)
        RETURN_IF_ERROR(sleep_on_device(device->busy_until, device->ordinal));
    IF_RACES(race_hooks->at_device_wait(device->ordinal));
    return SUCCESS;
}
