/* Race detection: what orders the work of streams: events, waits, the host. */
#include "races.h"

void race_at_record(struct race_stream *stream, struct race_event *event)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct clock *clock = begin_work(world_of(stream), stream, &index);
    if (!event->clock)
        event->clock = calloc(1, sizeof *event->clock);
    if (event->clock)
        clock_set(event->clock, clock);
    event->queries = 0;
    event->is_waited_for = false;
    pthread_mutex_unlock(&race_lock);
}

void race_at_wait(struct race_stream *stream, struct race_event *event)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    if (event->clock)
        clock_join(clock_of(world_of(stream), stream, &index), event->clock);
    event->is_waited_for = true;
    pthread_mutex_unlock(&race_lock);
}

void race_at_event_end(struct race_event *event)
{
    if (event->clock) {
        clock_clear(event->clock);
        free(event->clock);
        event->clock = NULL;
    }
}

void race_at_event_wait(struct race_event *event)
{
    pthread_mutex_lock(&race_lock);
    if (event->clock)
        join_host(event->clock);
    pthread_mutex_unlock(&race_lock);
}

void race_at_stream_wait(struct race_stream *stream)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    join_host(clock_of(&present, stream, &index));
    pthread_mutex_unlock(&race_lock);
}

void race_at_device_wait(int device)
{
    pthread_mutex_lock(&race_lock);
    struct clock all = {0};
    join_device(&all, device);
    join_host(&all);
    clock_clear(&all);
    pthread_mutex_unlock(&race_lock);
}

static struct sorted allocations; /* by address: the index, plus 1, of torch's current stream */

/* torch's allocator takes memory for its current stream, and gives it to that stream alone. */
void race_at_allocation(const void *address, int device)
{
    struct race_stream *stream = race_storages ? race_runtime->find_stream(race_storages->current_stream(device), device) : NULL;
    size_t index = 0;
    if (!stream)
        return;
    pthread_mutex_lock(&race_lock);
    clock_of(&present, stream, &index);
    sorted_insert(&allocations, (uintptr_t)address, (void *)(index + 1));
    pthread_mutex_unlock(&race_lock);
}

int stream_of_memory(uintptr_t address)
{
    struct sim_memory memory;
    const struct sorted_item *found = sorted_at_or_below(&allocations, address);
    const bool is_found = found && race_runtime->find_memory((const void *)address, &memory) && (uintptr_t)memory.base == found->key;
    return is_found ? (int)(uintptr_t)found->value - 1 : -1;
}

void race_at_free(const void *address, size_t size)
{
    pthread_mutex_lock(&race_lock);
    const size_t index = sorted_index(&allocations, (uintptr_t)address);
    if (index < allocations.count && allocations.items[index].key == (uintptr_t)address)
        sorted_remove(&allocations, index);
    forget_accesses((uintptr_t)address, (uintptr_t)address + size);
    forget_guards((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&race_lock);
}
