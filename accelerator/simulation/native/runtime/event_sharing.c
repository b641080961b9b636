/* The CUDA runtime: events that processes share. */
#include "runtime.h"

#include <pthread.h>
#include <string.h>

enum { HANDLE_MAGIC = 0x53494d35, SHARED_SIZE = 4096 };

struct handle {
    uint32_t magic;
    struct memory_file_name file;
};
_Static_assert(sizeof(struct handle) <= sizeof(struct sim_ipc_handle), "a handle must fit into CUDA's IPC handle");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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
        if (memory_file_create(&file, "cuda-event") && memory_file_resize(&file, SHARED_SIZE))
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

void leave_sharing(struct event *event)
{
    memory_file_write_id(&event->file, 0, offsetof(struct shared_event, id));
    memory_file_close(&event->file);
    if (event->time != &event->own_time)
        munmap((void *)event->time, SHARED_SIZE);
}

EXPORT cudaError_t cudaIpcGetEventHandle(struct sim_ipc_handle *target, void *handle)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    struct event *event = find_event(handle);
    if (!target || !event || !(event->flags & INTERPROCESS))
        return fail(ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(finish(wait_for_pending(&event->pending, event->device))); /* other processes cannot wait for it */
    struct handle exported = {.magic = HANDLE_MAGIC};
    pthread_mutex_lock(&lock);
    bool is_shared = share(event, &exported.file);
    pthread_mutex_unlock(&lock);
    RETURN_UNLESS(is_shared, fail(ERROR_OPERATING_SYSTEM));
    memset(target, 0, sizeof *target);
    memcpy(target, &exported, sizeof exported);
    return SUCCESS;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(struct event **handle, struct sim_ipc_handle source)
{
    ENTER_CONTEXT(device);
    struct handle exported;
    memcpy(&exported, &source, sizeof exported);
    REQUIRE(handle && exported.magic == HANDLE_MAGIC);
    int file = memory_file_open(&exported.file);
    RETURN_UNLESS(file >= 0, fail(ERROR_INVALID_HANDLE));
    struct shared_event *shared = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    RETURN_UNLESS(shared != MAP_FAILED, fail(ERROR_MAP_FAILED));
    struct event *event = new_event(device->ordinal, DISABLE_TIMING | INTERPROCESS);
    if (!event) {
        munmap(shared, SHARED_SIZE);
        return fail(ERROR_OUT_OF_MEMORY);
    }
    event->time = &shared->time;
    *handle = event;
    return SUCCESS;
}
