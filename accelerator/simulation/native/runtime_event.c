/* The CUDA runtime: events, within a process and between processes. */
#define _GNU_SOURCE
#include "runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { EVENT_MAGIC = 0x45564e54, HANDLE_MAGIC = 0x53494d32, SHARED_SIZE = 4096 };
enum { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 };

struct handle {
    uint32_t magic;
    int pid;
    int file;
};

/* Events are reused and never freed, so that the handle of a destroyed event can be checked. */
static struct event *free_events;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct event *find_event(void *handle)
{
    struct event *event = handle;
    return event && event->magic == EVENT_MAGIC ? event : NULL;
}

static struct event *new_event(int device, unsigned flags)
{
    pthread_mutex_lock(&lock);
    struct event *event = free_events;
    if (event)
        free_events = event->next;
    pthread_mutex_unlock(&lock);
    if (!event && !(event = malloc(sizeof *event)))
        return NULL;
    memset(event, 0, sizeof *event);
    event->magic = EVENT_MAGIC;
    event->device = device;
    event->flags = flags;
    event->time = &event->own_time;
    event->file = -1;
    return event;
}

EXPORT cudaError_t cudaEventCreateWithFlags(struct event **handle, unsigned flags)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
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

static void leave_sharing(struct event *event)
{
    if (event->time != &event->own_time)
        munmap((void *)event->time, SHARED_SIZE);
    if (event->file >= 0)
        close(event->file);
}

EXPORT cudaError_t cudaEventDestroy(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    struct event *event = find_event(handle);
    if (!event)
        return fail(ERROR_INVALID_HANDLE);
    event->magic = 0;
    drop_pending(&event->pending);
    leave_sharing(event);
    pthread_mutex_lock(&lock);
    event->next = free_events;
    free_events = event;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT cudaError_t cudaEventRecordWithFlags(void *handle, void *stream_handle, unsigned flags)
{
    enum { EXTERNAL = 1 };
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    struct event *event = find_event(handle);
    struct stream *stream = find_stream(stream_handle, device);
    if (!event || !stream || event->device != stream->device)
        return fail(ERROR_INVALID_HANDLE);
    if (stream->capture && !(flags & EXTERNAL))
        return finish(capture_event(stream, event));
    event->capture_id = 0;
    return finish(submit(stream, &(struct work){.type = WORK_RECORD, .event = event}));
}

EXPORT cudaError_t cudaEventRecord(void *handle, void *stream_handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaEventRecordWithFlags(handle, stream_handle, 0);
}

/* Enters a call that waits for an event or queries it. An event has a context of its own, so that the call makes none on
 * the current device: torch's watchdog thread queries events of any device. */
static cudaError_t enter_event(const char *function, void *handle, struct event **event)
{
    RETURN_IF_ERROR(enter(function));
    *event = find_event(handle);
    if (!*event)
        return fail(ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(unsafe_call());
    return finish(refuse_captured_event(*event));
}

static bool is_reached(const struct event *event)
{
    return event->pending.count == 0 && (*event->time == 0 || *event->time <= now());
}

EXPORT cudaError_t cudaEventQuery(void *handle)
{
    struct event *event;
    RETURN_IF_ERROR(enter_event(__func__, handle, &event));
    return finish(is_reached(event) ? SUCCESS : ERROR_NOT_READY);
}

EXPORT cudaError_t cudaEventSynchronize(void *handle)
{
    struct event *event;
    RETURN_IF_ERROR(enter_event(__func__, handle, &event));
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending)));
    if (!is_reached(event))
        sleep_until(*event->time);
    return SUCCESS;
}

static bool is_timed(const struct event *event)
{
    return !(event->flags & DISABLE_TIMING) && *event->time != 0;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, void *start_handle, void *end_handle)
{
    RETURN_IF_ERROR(enter(__func__));
    struct event *start = find_event(start_handle), *end = find_event(end_handle);
    if (!milliseconds)
        return fail(ERROR_INVALID_VALUE);
    if (!start || !end || start->device != end->device)
        return fail(ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(finish(refuse_captured_event(start)));
    RETURN_IF_ERROR(finish(refuse_captured_event(end)));
    if (!is_timed(start) || !is_timed(end))
        return fail(ERROR_INVALID_HANDLE);
    if (!is_reached(start) || !is_reached(end))
        return fail(ERROR_NOT_READY);
    *milliseconds = (float)((double)(*end->time - *start->time) / 1e6);
    return SUCCESS;
}

/* Moves the time to an anonymous file. CLOCK_MONOTONIC is the same in every process. */
static cudaError_t share(struct event *event)
{
    if (event->file >= 0)
        return SUCCESS;
    int file = memfd_create("cuda-event", MFD_CLOEXEC);
    void *page = MAP_FAILED;
    if (file >= 0 && ftruncate(file, SHARED_SIZE) == 0)
        page = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) {
        if (file >= 0)
            close(file);
        return ERROR_OPERATING_SYSTEM;
    }
    _Atomic int64_t *time = page;
    *time = event->own_time;
    event->time = time;
    event->file = file;
    return SUCCESS;
}

EXPORT cudaError_t cudaIpcGetEventHandle(struct sim_ipc_handle *target, void *handle)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    struct event *event = find_event(handle);
    if (!target || !event || !(event->flags & INTERPROCESS))
        return fail(ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending))); /* other processes cannot wait for it */
    pthread_mutex_lock(&lock);
    cudaError_t error = share(event);
    pthread_mutex_unlock(&lock);
    RETURN_IF_ERROR(finish(error));
    struct handle exported = {HANDLE_MAGIC, getpid(), event->file};
    memset(target, 0, sizeof *target);
    memcpy(target, &exported, sizeof exported);
    return SUCCESS;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(struct event **handle, struct sim_ipc_handle source)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    struct handle exported;
    memcpy(&exported, &source, sizeof exported);
    if (!handle || exported.magic != HANDLE_MAGIC)
        return fail(ERROR_INVALID_VALUE);

    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", exported.pid, exported.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void *page = MAP_FAILED;
    if (file >= 0) {
        page = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    struct event *event = page == MAP_FAILED ? NULL : new_event(device->ordinal, DISABLE_TIMING | INTERPROCESS);
    if (!event)
        return fail(ERROR_MAP_FAILED);
    event->time = page;
    *handle = event;
    return SUCCESS;
}
