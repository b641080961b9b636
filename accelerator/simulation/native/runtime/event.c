/* The CUDA runtime: events, within a process and between processes. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { EVENT_MAGIC = 0x45564e54, HANDLE_MAGIC = 0x53494d35, SHARED_SIZE = 4096 };
enum { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 };

struct handle {
    uint32_t magic;
    struct memory_file_name file;
};
_Static_assert(sizeof(struct handle) <= sizeof(struct sim_ipc_handle), "a handle must fit into CUDA's IPC handle");

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
    bool is_ready = is_reached(event);
    if (is_ready)
        IF_RACES(is_ready = !race_delays_event(event, __builtin_return_address(0)));
    return finish(is_ready ? SUCCESS : ERROR_NOT_READY);
}

EXPORT cudaError_t cudaEventSynchronize(void *handle)
{
    struct event *event;
    RETURN_IF_ERROR(enter_event(__func__, handle, &event));
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending)));
    if (!is_reached(event))
        sleep_until(*event->time);
    IF_RACES(race_at_event_wait(event));
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

/* What processes share of an event. CLOCK_MONOTONIC is the same in every process. */
struct shared_event {
    _Atomic int64_t time;
    uint64_t id; /* 0 once the event is destroyed */
};

/* Moves the time to an anonymous file, unless it is there already, and returns whether the file can be found. */
static bool share(struct event *event, struct memory_file_name *name)
{
    static uint64_t last_id;
    if (event->file.inode == 0) {
        struct memory_file file;
        struct shared_event *shared = MAP_FAILED;
        if (memory_file_create(&file, "cuda-event") && ftruncate(file.descriptor, SHARED_SIZE) == 0)
            shared = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor, 0);
        if (shared == MAP_FAILED) {
            memory_file_close(&file);
            return false;
        }
        shared->time = event->own_time;
        event->time = &shared->time;
        event->file = file;
        event->id = ++last_id;
    }
    return memory_file_export(&event->file, event->id, offsetof(struct shared_event, id), name);
}

static void leave_sharing(struct event *event)
{
    memory_file_write_id(&event->file, 0, offsetof(struct shared_event, id));
    memory_file_close(&event->file);
    if (event->time != &event->own_time)
        munmap((void *)event->time, SHARED_SIZE);
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
    IF_RACES(race_at_event_end(event));
    pthread_mutex_lock(&lock);
    event->next = free_events;
    free_events = event;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT cudaError_t cudaIpcGetEventHandle(struct sim_ipc_handle *target, void *handle)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    struct event *event = find_event(handle);
    if (!target || !event || !(event->flags & INTERPROCESS))
        return fail(ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending))); /* other processes cannot wait for it */
    struct handle exported = {.magic = HANDLE_MAGIC};
    pthread_mutex_lock(&lock);
    bool is_shared = share(event, &exported.file);
    pthread_mutex_unlock(&lock);
    if (!is_shared)
        return fail(ERROR_OPERATING_SYSTEM);
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
    int file = memory_file_open(&exported.file);
    if (file < 0)
        return fail(ERROR_INVALID_HANDLE);
    struct shared_event *shared = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED)
        return fail(ERROR_MAP_FAILED);
    struct event *event = new_event(device->ordinal, DISABLE_TIMING | INTERPROCESS);
    if (!event) {
        munmap(shared, SHARED_SIZE);
        return fail(ERROR_OUT_OF_MEMORY);
    }
    event->time = &shared->time;
    *handle = event;
    return SUCCESS;
}
