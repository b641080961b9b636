/* Race detection: accesses of the runtime's and NCCL's own work. */
#include "races.h"

static bool is_between_devices(const struct copy *copy)
{
    struct sim_memory target, source;
    return race_runtime->find_memory(copy->target, &target) && race_runtime->find_memory(copy->source, &source)
        && target.device != source.device;
}

static struct race_access describe_rows(const char *address, size_t pitch, const struct copy *copy, int flags)
{
    if (copy->height == 1)
        return describe(address, copy->width, flags);
    return (struct race_access){.layout = {.address = (uintptr_t)address, .item_size = 1, .dims = 2,
                                           .sizes = {(int64_t)copy->height, (int64_t)copy->width},
                                           .strides = {(int64_t)pitch, 1}},
                                .flags = flags};
}

void race_at_copy(struct race_stream *stream, const struct copy *copy, bool is_synchronous)
{
    bool knows_target, knows_source;
    const bool to_host = is_on_host(copy->target, &knows_target), from_host = is_on_host(copy->source, &knows_source);
    const bool is_peer_copy = !to_host && !from_host && is_between_devices(copy);
    const char *name = race_op.name ? race_op.name : is_peer_copy ? "cudaMemcpyPeerAsync" : "cudaMemcpyAsync";
    const int place = place_of_thread();
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    stream->queries = 0;
    if (races_are_reported && !from_host) {
        const struct race_access read = describe_rows(copy->source, copy->source_pitch, copy, 0);
        record(world, &read, index, clock, name, place);
    }
    if (races_are_reported && !to_host) {
        const struct race_access written = describe_rows(copy->target, copy->target_pitch, copy, RACE_WRITES);
        record(world, &written, index, clock, name, place);
    }
    const bool is_pinned = (to_host && knows_target) || (from_host && knows_source);
    if (is_pinned && !is_synchronous && world == &present) {
        const struct race_access host = describe_rows(to_host ? copy->target : copy->source,
                                                      to_host ? copy->target_pitch : copy->source_pitch, copy,
                                                      to_host ? RACE_WRITES : 0);
        prepare_guard(new_access(&host, index, clock->times[index], name, place));
    }
    is_in_copy = true;
    open_guards(copy->target, copy->target_pitch * (copy->height - 1) + copy->width);
    open_guards(copy->source, copy->source_pitch * (copy->height - 1) + copy->width);
    pthread_mutex_unlock(&race_lock);
}

/* When the call returns, the host has waited for a copy to pageable memory. After one from pageable memory it may use its memory
 * again, but has not waited for the stream. */
void race_after_copy(struct race_stream *stream, const struct copy *copy, bool is_synchronous)
{
    bool knows_target;
    const bool to_host = is_on_host(copy->target, &knows_target);
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    if (is_synchronous || (to_host && !knows_target))
        join_host(clock_of(&present, stream, &index));
    close_guards();
    is_in_copy = false;
    pthread_mutex_unlock(&race_lock);
}

/* The host's part in a copy that a rehearsal does not perform; the op has recorded the device's. The host's memory is at the address,
 * or NULL if it is not pinned. */
EXPORT void accelerator_simulation_race_host_copy(void *handle, int device, const char *name, const void *host, size_t size,
                                                  int writes_host, int is_synchronous)
{
    struct race_stream *stream = race_runtime->find_stream(handle, device);
    bool is_pinned;
    size_t index = 0;
    if (!stream || !is_on_host(host, &is_pinned))
        return;
    const int place = place_of_thread();
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    if (is_pinned && !is_synchronous && world == &present) {
        const struct race_access access = describe(host, size, writes_host ? RACE_WRITES : 0);
        prepare_guard(new_access(&access, index, clock->times[index], name, place));
        close_guards();
    }
    if (is_synchronous || (writes_host && !is_pinned))
        join_host(clock);
    pthread_mutex_unlock(&race_lock);
}

/* What a kernel or a host function accesses is unknown. Its stream orders it after copies, for which the host has not waited. */
void race_before_use(void)
{
    pthread_mutex_lock(&race_lock);
    lend_guards();
    pthread_mutex_unlock(&race_lock);
}

void race_after_use(void)
{
    pthread_mutex_lock(&race_lock);
    take_guards_back();
    pthread_mutex_unlock(&race_lock);
}

void race_at_fill(struct race_stream *stream, const struct copy *filled)
{
    bool is_known;
    const bool on_host = is_on_host(filled->target, &is_known);
    const int place = place_of_thread();
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    const struct race_access written = describe_rows(filled->target, filled->target_pitch, filled, RACE_WRITES);
    if (races_are_reported && !on_host)
        record(world, &written, index, clock, race_op.name ? race_op.name : "cudaMemsetAsync", place);
    pthread_mutex_unlock(&race_lock);
}

void race_at_launch(struct race_stream *stream, void *captured)
{
    if (!captured || !races_are_reported)
        return;
    const int place = place_of_thread();
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    if (world == &present)
        replay_accesses(captured, stream, place);
    pthread_mutex_unlock(&race_lock);
}

void race_at_graph_end(void *world)
{
    pthread_mutex_lock(&race_lock);
    world_free(world);
    pthread_mutex_unlock(&race_lock);
}

/* A collective reads and writes memory on its stream. */
void race_at_collective(void *handle, int device, const char *name, const void *source, size_t source_size,
                        const void *target, size_t target_size)
{
    struct race_stream *stream = race_runtime->find_stream(handle, device);
    if (!stream || !races_are_reported)
        return;
    const int place = place_of_thread();
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    const struct race_access read = describe(source, source_size, 0), written = describe(target, target_size, RACE_WRITES);
    if (source_size > 0)
        record(world, &read, index, clock, name, place);
    if (target_size > 0)
        record(world, &written, index, clock, name, place);
    pthread_mutex_unlock(&race_lock);
}
