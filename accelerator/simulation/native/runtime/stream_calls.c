/* The CUDA runtime: the calls for streams (cudaStreamCreate, cudaStreamSynchronize, ...). */
#include "runtime.h"

EXPORT cudaError_t cudaStreamCreateWithPriority(struct stream **handle, unsigned flags, int priority)
{
    enum { LOWEST = 0, HIGHEST = -5, NON_BLOCKING = 1 };
    ENTER_CONTEXT(device);
    REQUIRE(handle && flags <= NON_BLOCKING);
    priority = priority < HIGHEST ? HIGHEST : priority > LOWEST ? LOWEST : priority;
    struct stream *stream = new_stream(device->ordinal, priority, !(flags & NON_BLOCKING));
    RETURN_UNLESS(stream, fail(ERROR_OUT_OF_MEMORY));
    *handle = stream;
    return SUCCESS;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(struct stream **handle, unsigned flags)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(struct stream **handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaStreamCreateWithPriority(handle, 0, 0);
}

EXPORT cudaError_t cudaStreamDestroy(void *handle)
{
    ENTER_STREAM(stream, handle);
    RETURN_UNLESS(!is_default_stream(stream), fail(ERROR_INVALID_HANDLE));
    if (stream->capture)
        RETURN_IF_ERROR(finish(refuse_captured_stream(stream)));
    drop_pending(&stream->pending);
    free_stream(stream);
    return SUCCESS;
}

/* Defines a function that writes a figure of a stream. */
#define FIGURE(function, type, figure)                                                                                 \
    EXPORT cudaError_t function(void *handle, type *result)                                                            \
    {                                                                                                                  \
        struct stream *stream;                                                                                         \
        RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));                                                      \
        if (!result)                                                                                                   \
            return fail(ERROR_INVALID_VALUE);                                                                          \
        *result = (figure);                                                                                            \
        return SUCCESS;                                                                                                \
    }

FIGURE(cudaStreamGetPriority, int, stream->priority)
FIGURE(cudaStreamGetFlags, unsigned, !is_default_stream(stream) && !stream->races.is_blocking)
FIGURE(cudaStreamGetDevice, int, stream->device)

EXPORT cudaError_t cudaStreamQuery(void *handle)
{
    ENTER_STREAM(stream, handle);
    RETURN_UNLESS(!stream->capture, fail(refuse_captured_stream(stream)));
    bool is_busy = stream->pending.count != 0 || (stream->idle_at != 0 && !has_come(stream->idle_at));
    if (!is_busy)
        IF_RACES(is_busy = race_hooks->delays_stream(&stream->races, __builtin_return_address(0)));
    return finish(is_busy ? ERROR_NOT_READY : unless_failed(stream->device));
}

EXPORT cudaError_t cudaStreamSynchronize(void *handle)
{
    ENTER_STREAM(stream, handle);
    RETURN_IF_ERROR(finish(wait_for_stream(stream)));
    return finish(unless_failed(stream->device));
}
