/* The CUDA runtime: streams, events and devices that wait for unfinished work (see pending.h). */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>

#include "common/arrays.h"
#include "common/fork.h"

_Atomic int waiting_count;

/* A copy between addresses of devices that is done when the work before it has ended. */
struct later_copy {
    struct pending_queue queue; /* of this copy alone */
    struct pending before;
    struct copy copy;
    bool is_dropped; /* work before it was aborted */
    struct later_copy *next;
};

static struct pending *waiting; /* all with items */
static struct later_copy *later_copies;
static struct pending devices[SIM_MAX_GPUS];
static pthread_mutex_t lock;
static pthread_cond_t changed;
static _Thread_local struct stream *launching_stream;

__attribute__((constructor)) static void init_locks(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&lock, NULL);
}

/* The threads that finish the work do not exist in a child. */
static void reset_in_child(void)
{
    init_locks();
    while (waiting) {
        waiting->count = 0;
        waiting = waiting->next;
    }
    accelerator_simulation_needs_checks -= waiting_count;
    waiting_count = 0;
    later_copies = NULL;
}

IN_FORKED_CHILD(reset_in_child)

/* ---- Holders (struct pending). All functions are called with the lock held. ---- */

static void unlink_holder(struct pending *pending)
{
    for (struct pending **link = &waiting; *link; link = &(*link)->next)
        if (*link == pending) {
            *link = pending->next;
            waiting_count--;
            accelerator_simulation_needs_checks--;
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
        accelerator_simulation_needs_checks++;
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

static bool waits_for(const struct pending *pending, const struct pending_queue *queue)
{
    for (int i = 0; i < pending->count; i++)
        if (pending->items[i].queue == queue)
            return true;
    return false;
}

/* The memory of a copy may be freed as soon as the work before it is aborted. */
static void drop_copies_after(const struct pending_queue *queue)
{
    for (struct later_copy *copy = later_copies; copy; copy = copy->next)
        if (!copy->is_dropped && waits_for(&copy->before, queue)) {
            copy->is_dropped = true;
            drop_copies_after(&copy->queue);
        }
}

static struct later_copy *take_next_copy(void)
{
    for (struct later_copy **link = &later_copies; *link; link = &(*link)->next)
        if ((*link)->before.count == 0) {
            struct later_copy *found = *link;
            *link = found->next;
            return found;
        }
    return NULL;
}

static void do_copies(void)
{
    for (struct later_copy *next; (next = take_next_copy());) {
        if (!next->is_dropped)
            copy_rows(&next->copy);
        remove_items(&next->queue, UINT64_MAX);
        clear(&next->before);
        free(next);
    }
}

static bool has_failed(const struct pending *pending)
{
    for (int i = 0; i < pending->count; i++)
        if (pending->items[i].queue->has_failed)
            return true;
    return false;
}

/* Waits for one change until a time. */
static bool wait_for_change(int64_t deadline)
{
    const struct timespec end = timespec_of(deadline);
    return pthread_cond_timedwait(&changed, &lock, &end) == 0;
}

/* ---- Functions of the table that pending.h declares. ---- */

void pending_clear(struct pending *pending)
{
    pthread_mutex_lock(&lock);
    clear(pending);
    pthread_mutex_unlock(&lock);
}

uint64_t pending_submit(struct pending_queue *queue, int device, void *const *handles, size_t count,
                        struct pending *before, int64_t *not_before)
{
    const struct pending_item item = {queue, queue->submitted + 1};
    bool is_valid = (count > 0 || launching_stream) && unless_failed(device) == SUCCESS; /* another rank would read it */
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

enum pending_status pending_wait(struct pending *pending, int milliseconds)
{
    pthread_mutex_lock(&lock);
    if (pending->count != 0 && !has_failed(pending))
        wait_for_change(now() + (int64_t)milliseconds * MILLISECOND);
    enum pending_status status = pending->count == 0 ? PENDING_DONE : has_failed(pending) ? PENDING_FAILED : PENDING_WAITS;
    pthread_mutex_unlock(&lock);
    return status;
}

void pending_interrupt(void)
{
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void pending_complete(struct pending_queue *queue, uint64_t sequence)
{
    pthread_mutex_lock(&lock);
    remove_items(queue, sequence);
    do_copies();
    pthread_mutex_unlock(&lock);
}

void pending_release(struct pending_queue *queue)
{
    pthread_mutex_lock(&lock);
    drop_copies_after(queue);
    remove_items(queue, UINT64_MAX);
    do_copies();
    pthread_mutex_unlock(&lock);
}

void pending_fail(struct pending_queue *queue)
{
    pthread_mutex_lock(&lock);
    queue->has_failed = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

struct stream *set_launching_stream(struct stream *stream)
{
    struct stream *outer = launching_stream;
    launching_stream = stream;
    return outer;
}

/* ---- For the runtime's other files. ---- */

/* Blocks until the present items of the holder are finished; items that are added meanwhile do not count. */
cudaError_t wait_for_pending(struct pending *pending, int ordinal)
{
    enum { SLICE = 50 * MILLISECOND }; /* nothing wakes the thread when a fault breaks the context */
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
        else if ((error = unless_broken(ordinal)) == SUCCESS)
            wait_for_change(now() + SLICE);
    }
    clear(&before);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t wait_for_pending_on_device(int ordinal)
{
    return wait_for_pending(&devices[ordinal], ordinal);
}

/* For the driver, whose copies belong to streams as well. */
cudaError_t wait_for_pending_on_stream(void *handle)
{
    struct stream *stream = find_stream(handle, driver->current());
    return stream ? wait_for_pending(&stream->pending, stream->device) : ERROR_INVALID_HANDLE;
}

void drop_pending(struct pending *pending)
{
    if (pending->items)
        pending_clear(pending);
}

/* torch copies results of a collective before its watchdog knows of the collective: a host that waited here would never see its
 * timeout. */
cudaError_t copy_later(struct stream *stream, const struct copy *copy)
{
    struct later_copy *later = calloc(1, sizeof *later);
    RETURN_UNLESS(later, ERROR_OUT_OF_MEMORY);
    later->copy = *copy;
    pthread_mutex_lock(&lock);
    const struct pending_item item = {&later->queue, ++later->queue.submitted};
    if (!add_items(&later->before, &stream->pending) || !add_item(&stream->pending, item) ||
        !add_item(&devices[stream->device], item)) {
        remove_items(&later->queue, UINT64_MAX);
        clear(&later->before);
        free(later);
        later = NULL;
    } else {
        later->next = later_copies;
        later_copies = later;
        do_copies(); /* the work before it may have ended meanwhile */
    }
    pthread_mutex_unlock(&lock);
    return later ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

/* Other processes cannot see the items of a shared event, so the host waits here. */
cudaError_t record_pending(struct stream *stream, const struct work *work)
{
    struct event *event = work->event;
    if (event->time != &event->own_time)
        return wait_for_pending(&stream->pending, stream->device);
    pthread_mutex_lock(&lock);
    clear(&event->pending);
    event->pending.reached_at = event->time;
    *event->time = 0;
    bool is_recorded = add_items(&event->pending, &stream->pending);
    pthread_mutex_unlock(&lock);
    return is_recorded ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

cudaError_t add_pending_of_event(struct stream *stream, const struct work *work)
{
    struct event *event = work->event;
    pthread_mutex_lock(&lock);
    bool are_added = add_items(&stream->pending, &event->pending) && add_items(&devices[stream->device], &event->pending);
    pthread_mutex_unlock(&lock);
    return are_added ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

cudaError_t wait_for_earlier_work(struct stream *stream, const struct work *work)
{
    (void)work;
    return wait_for_pending(&stream->pending, stream->device);
}
