/* The CUDA runtime: the calls for events (cudaEventRecord, cudaStreamWaitEvent, cudaEventQuery, ...). */
#include "runtime.h"

static int64_t reached_at(struct stream *stream)
{
    int64_t time = now();
    end_hang_of_stream(stream);
    return stream->idle_at > time ? stream->idle_at : time;
}

static cudaError_t record(struct stream *stream, const struct work *work)
{
    IF_RACES(race_hooks->at_record(&stream->races, &work->event->races));
    *work->event->time = reached_at(stream);
    work->event->refusal = *driver->pending_refusal;
    return SUCCESS;
}

static cudaError_t wait_for_event(struct stream *stream, const struct work *work)
{
    IF_RACES(race_hooks->at_wait(&stream->races, &work->event->races));
    if (*work->event->time > stream->idle_at)
        delay_stream(stream, *work->event->time);
    return SUCCESS;
}

EXPORT cudaError_t cudaEventCreateWithFlags(struct event **handle, unsigned flags)
{
    ENTER_CONTEXT(device);
    if (!handle || (flags & ~(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS)) ||
        ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING)))
        return fail(ERROR_INVALID_VALUE);
    *handle = new_event(device->ordinal, flags);
    return finish(*handle ? SUCCESS : ERROR_OUT_OF_MEMORY);
}

EXPORT cudaError_t cudaEventCreate(struct event **handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaEventCreateWithFlags(handle, 0);
}

EXPORT cudaError_t cudaEventRecordWithFlags(void *handle, void *stream_handle, unsigned flags)
{
    enum { EXTERNAL = 1 };
    static const struct work_type recording = {.node = "EVENT_RECORD", .run = record, .prepare = record_pending};
    ENTER_STREAM(stream, stream_handle);
    struct event *event = find_event(handle);
    RETURN_UNLESS(event && event->device == stream->device, fail(ERROR_INVALID_HANDLE));
    cudaError_t error;
    if (stream->capture && !(flags & EXTERNAL) && capture_event(stream, event, &error))
        return finish(error);
    event->capture_id = 0;
    return finish(submit(stream, &(struct work){.type = &recording, .event = event}));
}

EXPORT cudaError_t cudaEventRecord(void *handle, void *stream_handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaEventRecordWithFlags(handle, stream_handle, 0);
}

EXPORT cudaError_t cudaStreamWaitEvent(void *handle, void *event_handle, unsigned flags)
{
    enum { EXTERNAL = 1 };
    static const struct work_type waiting = {.node = "EVENT_WAIT", .run = wait_for_event, .prepare = add_pending_of_event};
    ENTER_STREAM(stream, handle);
    struct event *event = find_event(event_handle);
    RETURN_UNLESS(event, fail(ERROR_INVALID_HANDLE));
    cudaError_t error;
    if (!(flags & EXTERNAL) && (stream->capture || event->capture_id != 0) && capture_wait(stream, event, &error))
        return finish(error);
    return finish(submit(stream, &(struct work){.type = &waiting, .event = event}));
}

/* Enters a call that waits for an event or queries it. An event has a context of its own, so that the call makes none on
 * the current device: torch's watchdog thread queries events of any device. */
static cudaError_t enter_event(const char *function, void *handle, struct event **event)
{
    RETURN_IF_ERROR(enter(function));
    *event = find_event(handle);
    RETURN_UNLESS(*event, fail(ERROR_INVALID_HANDLE));
    RETURN_IF_ERROR(finish(unless_broken((*event)->device)));
    RETURN_IF_ERROR(unsafe_call());
    return finish(refuse_captured_event(*event));
}

static bool is_reached(const struct event *event)
{
    return event->pending.count == 0 && (*event->time == 0 || has_come(*event->time));
}

/* The error of a refused launch concerns the events that were recorded after it. Others must not have it: torch's watchdog
 * queries those of collectives, and would end the process before the program reads the error. */
static cudaError_t unless_refused_before(const struct event *event)
{
    RETURN_UNLESS(event->refusal == 0 || event->refusal != *driver->pending_refusal, ERROR_NOT_SUPPORTED);
    return unless_broken(event->device);
}

EXPORT cudaError_t cudaEventQuery(void *handle)
{
    struct event *event;
    RETURN_IF_ERROR(enter_event(__func__, handle, &event));
    bool is_ready = is_reached(event);
    if (is_ready)
        IF_RACES(is_ready = !race_hooks->delays_event(&event->races, __builtin_return_address(0)));
    return finish(is_ready ? unless_refused_before(event) : ERROR_NOT_READY);
}

EXPORT cudaError_t cudaEventSynchronize(void *handle)
{
    struct event *event;
    RETURN_IF_ERROR(enter_event(__func__, handle, &event));
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending, event->device)));
    if (!is_reached(event))
        RETURN_IF_ERROR(finish(sleep_on_device(*event->time, event->device)));
    IF_RACES(race_hooks->at_event_wait(&event->races));
    return finish(unless_refused_before(event));
}

static bool is_timed(const struct event *event)
{
    return !(event->flags & DISABLE_TIMING) && *event->time != 0;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, void *start_handle, void *end_handle)
{
    RETURN_IF_ERROR(enter(__func__));
    struct event *start = find_event(start_handle), *end = find_event(end_handle);
    REQUIRE(milliseconds);
    RETURN_UNLESS(start && end && start->device == end->device, fail(ERROR_INVALID_HANDLE));
    RETURN_IF_ERROR(finish(refuse_captured_event(start)));
    RETURN_IF_ERROR(finish(refuse_captured_event(end)));
    RETURN_UNLESS(is_timed(start) && is_timed(end), fail(ERROR_INVALID_HANDLE));
    RETURN_UNLESS(is_reached(start) && is_reached(end), fail(ERROR_NOT_READY));
    end_hang(start->time);
    end_hang(end->time);
    *milliseconds = (float)((double)(*end->time - *start->time) / 1e6);
    return SUCCESS;
}

EXPORT cudaError_t cudaEventDestroy(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    struct event *event = find_event(handle);
    RETURN_UNLESS(event, fail(ERROR_INVALID_HANDLE));
    leave_sharing(event);
    free_event(event);
    return SUCCESS;
}
