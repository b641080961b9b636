/* Race detection: takes each access with its stream and the times of its clocks, and hands it to accesses.c. */
#include "races.h"

/* The tensors of the op that the calling thread runs: a copy or collective knows only addresses, the report names shapes. */
_Thread_local struct race_op race_op;

struct world *world_of(struct race_stream *stream)
{
    struct world **captured = (struct world **)race_runtime->captured_world(stream);
    if (!captured)
        return &present;
    if (!*captured)
        *captured = calloc(1, sizeof **captured);
    return *captured ? *captured : &present;
}

struct race_access describe(const void *address, size_t size, int flags)
{
    for (size_t i = 0; i < race_op.count; i++) {
        struct race_access *access = &race_op.accesses[i];
        if (access->layout.address == (uintptr_t)address && layout_bytes(&access->layout) == size && layout_is_dense(&access->layout)) {
            void *owner = access->owner;
            access->owner = NULL;
            return (struct race_access){access->layout, owner, access->dtype, flags};
        }
    }
    return (struct race_access){.layout = layout_of_bytes(address, size), .flags = flags};
}

void record(struct world *world, const struct race_access *given, size_t index, const struct clock *clock, const char *name,
            int place)
{
    struct access *access = new_access(given, index, clock->times[index], name, place);
    if (!access)
        return;
    if (world != &present)
        list_access(world, access);
    record_access(world, access, clock);
}

bool is_on_host(const void *address, bool *is_known)
{
    struct sim_memory memory;
    *is_known = race_runtime->find_memory(address, &memory);
    return !*is_known || sim_is_on_host(&memory);
}
