/* The CUDA runtime: host functions, which streams call (cudaLaunchHostFunc), at once or in each replay of a capture. */
#include "runtime.h"

static cudaError_t call(struct stream *stream, const struct work *work)
{
    struct stream *outer = set_launching_stream(stream);
    work->host.function(work->host.argument);
    set_launching_stream(outer);
    return SUCCESS;
}

static cudaError_t call_programs(struct stream *stream, const struct work *work)
{
    IF_RACES(race_hooks->before_use());
    const cudaError_t error = call(stream, work);
    IF_RACES(race_hooks->after_use());
    return error;
}

cudaError_t submit_host_function(struct stream *stream, void (*function)(void *argument), void *argument, bool submits_work)
{
    static const struct work_type waiting = {.node = "HOST", .run = call_programs, .prepare = wait_for_earlier_work};
    static const struct work_type submitting = {.node = "HOST", .run = call};
    return submit(stream, &(struct work){.type = submits_work ? &submitting : &waiting, .host = {function, argument}});
}

EXPORT cudaError_t cudaLaunchHostFunc(void *handle, void (*function)(void *argument), void *argument)
{
    ENTER_STREAM(stream, handle);
    REQUIRE(function);
    return finish(submit_host_function(stream, function, argument, false));
}

EXPORT cudaError_t cudaStreamAddCallback(void *handle, void (*callback)(void *stream, cudaError_t status, void *argument),
                                         void *argument, unsigned flags)
{
    ENTER_STREAM(stream, handle);
    REQUIRE(callback && flags == 0);
    RETURN_UNLESS(!stream->capture, fail(refuse_captured_stream(stream)));
    RETURN_IF_ERROR(finish(wait_for_pending(&stream->pending, stream->device)));
    IF_RACES(race_hooks->before_use());
    callback(handle, SUCCESS, argument);
    IF_RACES(race_hooks->after_use());
    return SUCCESS;
}
