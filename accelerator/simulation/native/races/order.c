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

void race_at_free(const void *address, size_t size)
{
    pthread_mutex_lock(&race_lock);
    forget_allocation((uintptr_t)address);
    forget_accesses((uintptr_t)address, (uintptr_t)address + size);
    forget_guards((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&race_lock);
}
