/* The CUDA runtime: the objects behind handles of events. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { EVENT_MAGIC = 0x45564e54 };

/* Events are reused and never freed, so that the handle of a destroyed event can be checked. */
static struct event *free_events;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct event *find_event(void *handle)
{
    struct event *event = handle;
    return event && event->magic == EVENT_MAGIC ? event : NULL;
}

struct event *new_event(int device, unsigned flags)
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

void free_event(struct event *event)
{
    event->magic = 0;
    drop_pending(&event->pending);
    IF_RACES(race_hooks->at_event_end(&event->races));
    pthread_mutex_lock(&lock);
    event->next = free_events;
    free_events = event;
    pthread_mutex_unlock(&lock);
}
