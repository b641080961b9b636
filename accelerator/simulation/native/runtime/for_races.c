/* The CUDA runtime: what race detection asks the runtime: streams, captures, memory. */
#include "runtime.h"

#include <stddef.h>

static struct race_stream *find_race_stream(void *handle, int device)
{
    struct stream *stream = driver ? find_stream(handle, &driver->devices[device]) : NULL;
    return stream ? &stream->races : NULL;
}

static void **find_captured_world(struct race_stream *races)
{
    struct stream *stream = (struct stream *)((char *)races - offsetof(struct stream, races));
    return stream->capture ? captured_race_world(stream) : NULL;
}

static bool is_capturing(void)
{
    return active_captures != 0;
}

static int find_memory(const void *address, struct sim_memory *memory)
{
    return driver->find_memory(address, memory);
}

const struct race_runtime *use_race_hooks(const struct race_hooks *hooks)
{
    static const struct race_runtime functions = {find_race_stream, find_captured_world, is_capturing, find_memory};
    race_hooks = hooks;
    return &functions;
}
