/* The CUDA runtime: the objects behind handles of streams, and their clocks. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_MAGIC = 0x5354524d };

/* Streams are reused and never freed, so that the handle of a destroyed stream can be checked. */
static struct stream *free_streams;
static struct stream legacy_streams[SIM_MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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
        legacy_streams[i].races = (struct race_stream){.device = i, .is_default = true};
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

bool is_default_stream(const struct stream *stream)
{
    return stream >= legacy_streams && stream < legacy_streams + SIM_MAX_GPUS;
}

struct stream *new_stream(int device, int priority, bool is_blocking)
{
    pthread_mutex_lock(&lock);
    struct stream *stream = free_streams;
    if (stream)
        free_streams = stream->next;
    pthread_mutex_unlock(&lock);
    if (!stream && !(stream = malloc(sizeof *stream)))
        return NULL;
    memset(stream, 0, sizeof *stream);
    stream->magic = STREAM_MAGIC;
    stream->device = device;
    stream->priority = priority;
    stream->races = (struct race_stream){.device = device, .is_blocking = is_blocking};
    return stream;
}

void free_stream(struct stream *stream)
{
    stream->magic = 0;
    pthread_mutex_lock(&lock);
    stream->next = free_streams;
    free_streams = stream;
    pthread_mutex_unlock(&lock);
}

cudaError_t enter_stream(const char *function, void *handle, struct stream **stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(function, &device));
    *stream = find_stream(handle, device);
    return finish(*stream ? SUCCESS : ERROR_INVALID_HANDLE);
}
