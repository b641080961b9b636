/* The CUDA runtime: streams, events and devices that wait for unfinished work (see pending.h). */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "common/arrays.h"

/* Captures under way plus holders of unfinished work, and one more in a child of a process that used the runtime. The kernels of
 * torch's ops read it before each op. */
_Atomic int accelerator_simulation_attention __attribute__((visibility("default")));

_Atomic int waiting_count;

static struct pending *waiting; /* all with items */
static struct pending devices[SIM_MAX_GPUS];
static pthread_mutex_t lock;
static pthread_cond_t changed;
static _Thread_local struct stream *launching_stream;

static void init_locks(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&lock, NULL);
}

/* The threads that finish the work do not exist in a child, nor do those that hold a lock. A child may load libraries, which
 * register kernels and symbols; other calls that take a lock are refused. */
static void reset_in_child(void)
{
    init_locks();
    reset_kernel_lock();
    reset_symbol_lock();
    while (waiting) {
        waiting->count = 0;
        waiting = waiting->next;
    }
    accelerator_simulation_attention -= waiting_count;
    waiting_count = 0;
}

__attribute__((constructor)) static void init_pending(void)
{
    init_locks();
    pthread_atfork(NULL, NULL, reset_in_child);
}

/* ---- Holders (struct pending). All functions are called with the lock held. ---- */

static void unlink_holder(struct pending *pending)
{
    for (struct pending **link = &waiting; *link; link = &(*link)->next)
        if (*link == pending) {
            *link = pending->next;
            waiting_count--;
            accelerator_simulation_attention--;
            return;
        }
}

static bool add_item(struct pending *pending, struct pending_item item)
{
    int count = pending->count;
    for (int i = 0; i < count; i++)
        if (pending->items[i].queue == item.queue) {
            if (pending->items[i].sequence < item.sequence)
                pending->items[i].sequence = item.sequence;
            return true;
        }
    if (!array_reserve((void **)&pending->items, &pending->capacity, (size_t)count + 1, sizeof *pending->items))
        return false;
    pending->items[count] = item;
    pending->count = count + 1;
    if (count == 0) {
        pending->next = waiting;
        waiting = pending;
        waiting_count++;
        accelerator_simulation_attention++;
    }
    return true;
}

static bool add_items(struct pending *pending, const struct pending *other)
{
    for (int i = 0; i < other->count; i++)
        if (!add_item(pending, other->items[i]))
            return false;
    return true;
}

static void clear(struct pending *pending)
{
    if (pending->count != 0)
        unlink_holder(pending);
    free(pending->items);
    pending->items = NULL;
    pending->count = 0;
    pending->capacity = 0;
}

static void remove_items(struct pending_queue *queue, uint64_t sequence)
{
    const int64_t time = now();
    for (struct pending *pending = waiting, *next; pending; pending = next) {
        next = pending->next;
        int left = 0;
        for (int i = 0; i < pending->count; i++)
            if (pending->items[i].queue != queue || pending->items[i].sequence > sequence)
                pending->items[left++] = pending->items[i];
        if (left == 0) {
            if (pending->reached_at && *pending->reached_at < time)
                *pending->reached_at = time;
            unlink_holder(pending);
        }
        pending->count = left;
    }
    pthread_cond_broadcast(&changed);
}

static bool has_failed(const struct pending *pending)
{
    for (int i = 0; i < pending->count; i++)
        if (pending->items[i].queue->has_failed)
            return true;
    return false;
}

/* Waits for one change; a negative deadline means no deadline. */
static bool wait_for_change(int64_t deadline)
{
    enum { SECOND = 1000000000 };
    if (deadline < 0)
        return pthread_cond_wait(&changed, &lock) == 0;
    struct timespec end = {deadline / SECOND, deadline % SECOND};
    return pthread_cond_timedwait(&changed, &lock, &end) == 0;
}

/* ---- The table that pending.h declares. ---- */

static void clear_pending(struct pending *pending)
{
    pthread_mutex_lock(&lock);
    clear(pending);
    pthread_mutex_unlock(&lock);
}

static uint64_t submit_work(struct pending_queue *queue, int device, void *const *handles, size_t count,
                            struct pending *before, int64_t *not_before)
{
    const struct pending_item item = {queue, queue->submitted + 1};
    bool is_valid = count > 0 || launching_stream;
    *not_before = 0;
    for (size_t i = 0; i < count && is_valid; i++)
        is_valid = find_stream(handles[i], &driver->devices[device]) != NULL;
    if (!is_valid)
        return 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < (count ? count : 1) && is_valid; i++) {
        struct stream *stream = count ? find_stream(handles[i], &driver->devices[device]) : launching_stream;
        is_valid = add_items(before, &stream->pending) && add_item(&stream->pending, item) &&
                   add_item(&devices[stream->device], item);
        if (is_valid && stream->idle_at > *not_before)
            *not_before = stream->idle_at;
    }
    /* Removes the queue's own item from `before`, because the queue keeps its order itself. */
    for (int i = 0; i < before->count; i++)
        if (before->items[i].queue == queue) {
            before->items[i] = before->items[before->count - 1];
            if (before->count == 1)
                clear(before);
            else
                before->count--;
            break;
        }
    if (is_valid)
        queue->submitted++;
    else
        clear(before);
    pthread_mutex_unlock(&lock);
    return is_valid ? item.sequence : 0;
}

uint64_t submit_to_stream(struct pending_queue *queue, struct stream *stream, struct pending *before, int64_t *not_before)
{
    struct stream *outer = launching_stream;
    launching_stream = stream;
    uint64_t sequence = submit_work(queue, stream->device, NULL, 0, before, not_before);
    launching_stream = outer;
    return sequence;
}

static enum pending_status wait_for_a_while(struct pending *pending, int milliseconds)
{
    enum { MILLISECOND = 1000000 };
    pthread_mutex_lock(&lock);
    if (pending->count != 0 && !has_failed(pending))
        wait_for_change(now() + (int64_t)milliseconds * MILLISECOND);
    enum pending_status status = pending->count == 0 ? PENDING_DONE : has_failed(pending) ? PENDING_FAILED : PENDING_WAITS;
    pthread_mutex_unlock(&lock);
    return status;
}

static void interrupt_waits(void)
{
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void complete_work(struct pending_queue *queue, uint64_t sequence)
{
    pthread_mutex_lock(&lock);
    remove_items(queue, sequence);
    pthread_mutex_unlock(&lock);
}

static void fail_work(struct pending_queue *queue)
{
    pthread_mutex_lock(&lock);
    queue->has_failed = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void release_queue(struct pending_queue *queue)
{
    complete_work(queue, UINT64_MAX);
}

static int capture_submission(void *handle, int device, void (*function)(void *argument), void *argument)
{
    struct stream *stream = find_stream(handle, &driver->devices[device]);
    if (!stream)
        return ERROR_INVALID_HANDLE;
    return submit(stream, &(struct work){.type = WORK_HOST, .host = {function, argument, true}});
}

EXPORT const struct sim_pending *accelerator_simulation_pending(void)
{
    static struct sim_pending table = {
        .submit = submit_work,
        .wait = wait_for_a_while,
        .interrupt = interrupt_waits,
        .clear = clear_pending,
        .complete = complete_work,
        .fail = fail_work,
        .release = release_queue,
        .capture = capture_submission,
    };
    if (races_on)
        table.note_accesses = race_at_collective;
    return &table;
}

/* ---- Hooks of the runtime's other files. ---- */

/* Blocks until the present items of the holder are finished; items that are added meanwhile do not count. */
cudaError_t wait_for_pending(struct pending *pending)
{
    struct pending before = {0};
    cudaError_t error = SUCCESS;
    if (pending->count == 0)
        return SUCCESS;
    pthread_mutex_lock(&lock);
    if (!add_items(&before, pending))
        error = ERROR_OUT_OF_MEMORY;
    while (error == SUCCESS && before.count != 0) {
        if (has_failed(&before))
            error = ERROR_LAUNCH_FAILED;
        else
            wait_for_change(-1);
    }
    clear(&before);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t wait_for_pending_on_device(int ordinal)
{
    return wait_for_pending(&devices[ordinal]);
}

/* For the driver, whose copies belong to streams as well. */
cudaError_t wait_for_pending_on_stream(void *handle)
{
    struct stream *stream = find_stream(handle, driver->current());
    return stream ? wait_for_pending(&stream->pending) : ERROR_INVALID_HANDLE;
}

void drop_pending(struct pending *pending)
{
    if (pending->items)
        clear_pending(pending);
}

/* Other processes cannot see the items of a shared event, so the host waits here. */
static cudaError_t record_pending(struct stream *stream, struct event *event)
{
    if (event->time != &event->own_time)
        return wait_for_pending(&stream->pending);
    pthread_mutex_lock(&lock);
    clear(&event->pending);
    event->pending.reached_at = event->time;
    *event->time = 0;
    bool is_recorded = add_items(&event->pending, &stream->pending);
    pthread_mutex_unlock(&lock);
    return is_recorded ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

static cudaError_t add_pending_of_event(struct stream *stream, struct event *event)
{
    pthread_mutex_lock(&lock);
    bool are_added = add_items(&stream->pending, &event->pending) && add_items(&devices[stream->device], &event->pending);
    pthread_mutex_unlock(&lock);
    return are_added ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

cudaError_t prepare_work(struct stream *stream, const struct work *work)
{
    if (work->type == WORK_RECORD)
        return record_pending(stream, work->event);
    if (work->type == WORK_WAIT)
        return add_pending_of_event(stream, work->event);
    if (work->type == WORK_KERNEL && work->kernel.duration == 0)
        return SUCCESS; /* it computes nothing */
    if (work->type == WORK_BARRIER || (work->type == WORK_HOST && work->host.submits_work))
        return SUCCESS; /* it only submits work */
    return wait_for_pending(&stream->pending);
}

void call_host_function(struct stream *stream, const struct work *work)
{
    struct stream *outer = launching_stream;
    launching_stream = stream;
    work->host.function(work->host.argument);
    launching_stream = outer;
}

/* Python loops over this call, so that Ctrl-C works; returns ERROR_NOT_READY when the time is over. */
EXPORT cudaError_t accelerator_simulation_wait(void *handle, int ordinal, int milliseconds)
{
    struct stream *stream = find_stream(handle, &driver->devices[ordinal]);
    if (!stream)
        return ERROR_INVALID_HANDLE;
    if (stream->capture || stream->pending.count == 0)
        return SUCCESS;
    switch (wait_for_a_while(&stream->pending, milliseconds)) {
    case PENDING_DONE:
        return SUCCESS;
    case PENDING_FAILED:
        return ERROR_LAUNCH_FAILED;
    default:
        return ERROR_NOT_READY;
    }
}

/* The engine asks this before an op: whether the stream neither captures nor waits for work. */
EXPORT int accelerator_simulation_is_stream_free(void *handle, int ordinal)
{
    struct stream *stream = find_stream(handle, &driver->devices[ordinal]);
    return stream && !stream->capture && stream->pending.count == 0;
}
