/* The CUDA runtime: streams and their work. */
#include "runtime.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STREAM_MAGIC = 0x5354524d, NANOSECONDS = 1000000000 };

/* Streams are reused and never freed, so that the handle of a destroyed stream can be checked. */
static struct stream *free_streams;
static struct stream legacy_streams[SIM_MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * NANOSECONDS + time.tv_nsec;
}

void sleep_until(int64_t time)
{
    struct timespec end = {time / NANOSECONDS, time % NANOSECONDS};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR)
        ;
}

static void advance(_Atomic int64_t *time, int64_t to)
{
    int64_t current = *time;
    while (current < to && !atomic_compare_exchange_weak(time, &current, to))
        ;
}

void delay_stream(struct stream *stream, int64_t until)
{
    advance(&stream->idle_at, until);
    advance(&driver->devices[stream->device].busy_until, until);
}

__attribute__((constructor)) static void number_legacy_streams(void)
{
    for (int i = 0; i < SIM_MAX_GPUS; i++) {
        legacy_streams[i].device = i;
        legacy_streams[i].is_default = true;
    }
}

/* The handles 0, 1 and 2 are three names of the default stream. */
struct stream *find_stream(void *handle, const struct sim_device *device)
{
    if ((uintptr_t)handle <= 2)
        return &legacy_streams[device->ordinal];
    struct stream *stream = handle;
    return stream->magic == STREAM_MAGIC ? stream : NULL;
}

static void copy(const struct work *work)
{
    char *target = work->copy.target;
    const char *source = work->copy.source;
    for (size_t row = 0; row < work->copy.height; row++) {
        memmove(target, source, work->copy.width);
        target += work->copy.target_pitch;
        source += work->copy.source_pitch;
    }
}

static int64_t reached_at(const struct stream *stream)
{
    int64_t time = now();
    return stream->idle_at > time ? stream->idle_at : time;
}

static int64_t add_saturated(int64_t time, int64_t duration)
{
    int64_t sum;
    return __builtin_add_overflow(time, duration, &sum) ? INT64_MAX : sum;
}

cudaError_t run(struct stream *stream, const struct work *work)
{
    switch (work->type) {
    case WORK_KERNEL:
        if (work->kernel.duration > 0)
            delay_stream(stream, add_saturated(reached_at(stream), work->kernel.duration));
        break;
    case WORK_NAN_CHECK:
        return check_for_nan(work->nan_check.type, work->nan_check.data, work->nan_check.count);
    case WORK_BARRIER:
        return start_barrier(stream, work->barrier.value, work->barrier.timeout_ms);
    case WORK_COPY:
        copy(work);
        break;
    case WORK_FILL:
        if (work->fill.value == 0)
            driver->fill_with_zeros(work->fill.target, work->fill.size);
        else
            memset(work->fill.target, work->fill.value, work->fill.size);
        break;
    case WORK_HOST:
        call_host_function(stream, work);
        break;
    case WORK_RECORD:
        IF_RACES(race_at_record(stream, work->event));
        *work->event->time = reached_at(stream);
        break;
    case WORK_WAIT:
        IF_RACES(race_at_wait(stream, work->event));
        if (*work->event->time > stream->idle_at)
            delay_stream(stream, *work->event->time);
        break;
    case WORK_COMPUTATION:
        return work->computation.compute(work->computation.id) ? SUCCESS : ERROR_LAUNCH_FAILED;
    case WORK_TYPE_COUNT:
        break;
    }
    return SUCCESS;
}

cudaError_t submit(struct stream *stream, const struct work *work)
{
    if (__builtin_expect(stream->capture != NULL, 0))
        return capture_work(stream, work);
    cudaError_t error = __builtin_expect(waiting_count != 0, 0) ? prepare_work(stream, work) : SUCCESS;
    return error == SUCCESS ? run(stream, work) : error;
}

cudaError_t wait_for_stream(struct stream *stream)
{
    if (stream->capture)
        return refuse_captured_stream(stream);
    cudaError_t error = wait_for_pending(&stream->pending);
    if (error == SUCCESS && stream->idle_at != 0)
        sleep_until(stream->idle_at);
    if (error == SUCCESS)
        IF_RACES(race_at_stream_wait(stream));
    return error;
}

static struct stream *new_stream(void)
{
    pthread_mutex_lock(&lock);
    struct stream *stream = free_streams;
    if (stream)
        free_streams = stream->next;
    pthread_mutex_unlock(&lock);
    return stream ? stream : malloc(sizeof *stream);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(struct stream **handle, unsigned flags, int priority)
{
    enum { LOWEST = 0, HIGHEST = -5, NON_BLOCKING = 1 };
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!handle || flags > NON_BLOCKING)
        return fail(ERROR_INVALID_VALUE);
    struct stream *stream = new_stream();
    if (!stream)
        return fail(ERROR_OUT_OF_MEMORY);
    memset(stream, 0, sizeof *stream);
    stream->magic = STREAM_MAGIC;
    stream->device = device->ordinal;
    stream->is_blocking = !(flags & NON_BLOCKING);
    stream->priority = priority < HIGHEST ? HIGHEST : priority > LOWEST ? LOWEST : priority;
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
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    struct stream *stream = find_stream(handle, device);
    if (!stream || stream == &legacy_streams[device->ordinal])
        return fail(ERROR_INVALID_HANDLE);
    if (stream->capture)
        RETURN_IF_ERROR(finish(refuse_captured_stream(stream)));
    stream->magic = 0;
    drop_pending(&stream->pending);
    pthread_mutex_lock(&lock);
    stream->next = free_streams;
    free_streams = stream;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static cudaError_t enter_stream(const char *function, void *handle, struct stream **stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    *stream = find_stream(handle, device);
    return finish(*stream ? SUCCESS : ERROR_INVALID_HANDLE);
}

EXPORT cudaError_t cudaStreamGetPriority(void *handle, int *priority)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    if (!priority)
        return fail(ERROR_INVALID_VALUE);
    *priority = stream->priority;
    return SUCCESS;
}

EXPORT cudaError_t cudaStreamQuery(void *handle)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    if (stream->capture)
        return fail(refuse_captured_stream(stream));
    bool is_busy = stream->pending.count != 0 || (stream->idle_at != 0 && stream->idle_at > now());
    if (!is_busy)
        IF_RACES(is_busy = race_delays_stream(stream, __builtin_return_address(0)));
    return is_busy ? fail(ERROR_NOT_READY) : SUCCESS;
}

EXPORT cudaError_t cudaStreamSynchronize(void *handle)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    return finish(wait_for_stream(stream));
}

EXPORT cudaError_t cudaStreamWaitEvent(void *handle, void *event_handle, unsigned flags)
{
    enum { EXTERNAL = 1 };
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    struct event *event = find_event(event_handle);
    if (!event)
        return fail(ERROR_INVALID_HANDLE);
    if (!(flags & EXTERNAL) && (stream->capture || event->capture_id != 0))
        return finish(capture_wait(stream, event));
    return finish(submit(stream, &(struct work){.type = WORK_WAIT, .event = event}));
}

EXPORT cudaError_t cudaLaunchHostFunc(void *handle, void (*function)(void *argument), void *argument)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    if (!function)
        return fail(ERROR_INVALID_VALUE);
    return finish(submit(stream, &(struct work){.type = WORK_HOST, .host = {function, argument, false}}));
}

EXPORT cudaError_t cudaStreamAddCallback(void *handle, void (*callback)(void *stream, cudaError_t status, void *argument),
                                         void *argument, unsigned flags)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(__func__, handle, &stream));
    if (!callback || flags != 0)
        return fail(ERROR_INVALID_VALUE);
    if (stream->capture)
        return fail(refuse_captured_stream(stream));
    RETURN_IF_ERROR(finish(wait_for_pending(&stream->pending)));
    callback(handle, SUCCESS, argument);
    return SUCCESS;
}

static int create_stream(void **handle, unsigned flags, int priority)
{
    return cudaStreamCreateWithPriority((struct stream **)handle, flags, priority);
}

cudaError_t cudaStreamIsCapturing(void *handle, int *status);

EXPORT const struct sim_runtime *accelerator_sim_runtime(void)
{
    static const struct sim_runtime table = {
        .create_stream = create_stream,
        .destroy_stream = cudaStreamDestroy,
        .query_stream = cudaStreamQuery,
        .synchronize_stream = cudaStreamSynchronize,
        .is_capturing = cudaStreamIsCapturing,
        .wait_for_pending_on_device = wait_for_pending_on_device,
        .wait_for_pending_on_stream = wait_for_pending_on_stream,
        .free_to_pool = pool_free,
    };
    return &table;
}
