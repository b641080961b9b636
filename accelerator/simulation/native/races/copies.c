/* Race detection: what the runtime, the ops' kernels and NCCL tell it. */
#include "races.h"

#include <string.h>

bool races_on, races_raise;
pthread_mutex_t race_lock = PTHREAD_MUTEX_INITIALIZER;

static bool reports; /* else only late copies need the clocks */
static void (*owner_release)(void *owner);

__attribute__((constructor)) static void start(void)
{
    const char *races = getenv("ACCELERATOR_SIM_RACES"), *late = getenv("ACCELERATOR_SIM_LATE_COPIES");
    reports = races && (strcmp(races, "report") == 0 || strcmp(races, "raise") == 0);
    races_raise = reports && strcmp(races, "raise") == 0;
    copies_are_late = late && strcmp(late, "1") == 0;
    races_on = reports || copies_are_late;
}

EXPORT int accelerator_simulation_races(void)
{
    return reports;
}

/* ---- Events, streams and the host. ---- */

struct world *world_of(struct stream *stream)
{
    struct world **captured = stream->capture ? capture_world(stream) : NULL;
    if (!captured)
        return &present;
    if (!*captured)
        *captured = calloc(1, sizeof **captured);
    return *captured ? *captured : &present;
}

void race_at_record(struct stream *stream, struct event *event)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct clock *clock = begin_work(world_of(stream), stream, &index);
    if (!event->race_clock)
        event->race_clock = calloc(1, sizeof *event->race_clock);
    if (event->race_clock)
        clock_set(event->race_clock, clock);
    event->race_queries = 0;
    event->is_waited_for = false;
    pthread_mutex_unlock(&race_lock);
}

void race_at_wait(struct stream *stream, struct event *event)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    if (event->race_clock)
        clock_join(clock_of(world_of(stream), stream, &index), event->race_clock);
    event->is_waited_for = true;
    pthread_mutex_unlock(&race_lock);
}

void race_at_event_end(struct event *event)
{
    if (event->race_clock) {
        clock_clear(event->race_clock);
        free(event->race_clock);
        event->race_clock = NULL;
    }
}

void join_host(const struct clock *clock)
{
    const uint64_t version = host_clock.version;
    clock_join(&host_clock, clock);
    if (host_clock.version != version)
        release_guards();
}

/* An allocator or the watchdog of NCCL has seen that work has ended: memory may be used again, and nothing else is ordered. */
void join_reuse(const struct clock *clock)
{
    clock_join(&reuse_clock, clock);
    release_guards();
}

void race_at_event_wait(struct event *event)
{
    pthread_mutex_lock(&race_lock);
    if (event->race_clock)
        join_host(event->race_clock);
    pthread_mutex_unlock(&race_lock);
}

void race_at_stream_wait(struct stream *stream)
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
    forget_accesses((uintptr_t)address, (uintptr_t)address + size);
    forget_guards((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&race_lock);
}

/* ---- Accesses. ---- */

/* The tensors of the op that the calling thread runs: a copy or collective knows only addresses, the report names shapes. */
static _Thread_local struct race_access *op_accesses;
static _Thread_local size_t op_access_count;
static _Thread_local const char *op_name;
static _Thread_local bool is_in_graph_call;

static struct race_access describe(const void *address, size_t size, int flags)
{
    for (size_t i = 0; i < op_access_count; i++) {
        struct race_access *access = &op_accesses[i];
        if (access->layout.address == (uintptr_t)address && layout_bytes(&access->layout) == size && layout_is_dense(&access->layout)) {
            void *owner = access->owner;
            access->owner = NULL;
            return (struct race_access){access->layout, owner, flags, access->dtype};
        }
    }
    return (struct race_access){layout_of_bytes(address, size), NULL, flags, -1};
}

static void record(struct world *world, const struct race_access *given, size_t index, const struct clock *clock,
                   const char *name, int place)
{
    struct access *access = new_access(given, index, clock->times[index], name, place);
    if (!access)
        return;
    if (world != &present)
        list_access(world, access);
    record_access(world, access, clock);
}

static bool is_on_host(const void *address, bool *is_known)
{
    struct sim_memory memory;
    *is_known = driver->find_memory(address, &memory);
    return !*is_known || memory.type == SIM_PINNED_MEMORY || memory.type == SIM_REGISTERED_MEMORY;
}

static bool is_between_devices(const struct work *work)
{
    struct sim_memory target, source;
    return driver->find_memory(work->copy.target, &target) && driver->find_memory(work->copy.source, &source)
        && target.device != source.device;
}

/* Code that torch.compile generates for simulated GPUs gives the host's memory to some ops. */
static bool is_device_memory(const void *address)
{
    bool is_known;
    return !is_on_host(address, &is_known);
}

static struct race_access describe_rows(const char *address, size_t pitch, const struct work *work, int flags)
{
    if (work->copy.height == 1)
        return describe(address, work->copy.width, flags);
    return (struct race_access){{.address = (uintptr_t)address, .item_size = 1, .dims = 2,
                                 .sizes = {(int64_t)work->copy.height, (int64_t)work->copy.width}, .strides = {(int64_t)pitch, 1}},
                                NULL, flags, -1};
}

void race_at_copy(struct stream *stream, const struct work *work, bool is_synchronous)
{
    bool knows_target, knows_source;
    const bool to_host = is_on_host(work->copy.target, &knows_target), from_host = is_on_host(work->copy.source, &knows_source);
    const bool is_peer_copy = !to_host && !from_host && is_between_devices(work);
    const char *name = op_name ? op_name : is_peer_copy ? "cudaMemcpyPeerAsync" : "cudaMemcpyAsync";
    const int place = place_of_thread();
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    stream->race_queries = 0;
    if (reports && !from_host) {
        const struct race_access read = describe_rows(work->copy.source, work->copy.source_pitch, work, 0);
        record(world, &read, index, clock, name, place);
    }
    if (reports && !to_host) {
        const struct race_access written = describe_rows(work->copy.target, work->copy.target_pitch, work, RACE_WRITES);
        record(world, &written, index, clock, name, place);
    }
    const bool is_pinned = (to_host && knows_target) || (from_host && knows_source);
    if (is_pinned && !is_synchronous && world == &present) {
        const struct race_access host = describe_rows(to_host ? work->copy.target : work->copy.source,
                                                      to_host ? work->copy.target_pitch : work->copy.source_pitch, work,
                                                      to_host ? RACE_WRITES : 0);
        prepare_guard(new_access(&host, index, clock->times[index], name, place));
    }
    is_in_copy = true;
    open_guards(work->copy.target, work->copy.target_pitch * (work->copy.height - 1) + work->copy.width);
    open_guards(work->copy.source, work->copy.source_pitch * (work->copy.height - 1) + work->copy.width);
    pthread_mutex_unlock(&race_lock);
}

/* A copy to or from pageable memory is over when the call returns. */
void race_after_copy(struct stream *stream, const struct work *work, bool is_synchronous)
{
    bool knows_target;
    const bool to_host = is_on_host(work->copy.target, &knows_target);
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    if (is_synchronous || (to_host && !knows_target))
        join_host(clock_of(&present, stream, &index));
    close_guards();
    is_in_copy = false;
    pthread_mutex_unlock(&race_lock);
}

void race_at_fill(struct stream *stream, const void *target, size_t size)
{
    bool is_known;
    const bool on_host = is_on_host(target, &is_known);
    const int place = place_of_thread();
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    const struct race_access written = describe(target, size, RACE_WRITES);
    if (reports && !on_host)
        record(world, &written, index, clock, op_name ? op_name : "cudaMemsetAsync", place);
    pthread_mutex_unlock(&race_lock);
}

void race_at_launch(struct stream *stream, struct graph *graph)
{
    struct world *captured = *graph_world(graph);
    if (!captured || !reports)
        return;
    const int place = place_of_thread();
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    if (world == &present)
        replay_accesses(captured, stream, place);
    pthread_mutex_unlock(&race_lock);
}

void race_at_graph_end(struct world *world)
{
    pthread_mutex_lock(&race_lock);
    world_free(world);
    pthread_mutex_unlock(&race_lock);
}

/* Without the engine, Python releases owners later. Called with the lock held. */
static void **released_owners;
static size_t released_count, released_capacity;

void release_reference(void *reference)
{
    if (owner_release)
        owner_release(reference);
    else if (array_reserve((void **)&released_owners, &released_capacity, released_count + 1, sizeof *released_owners))
        released_owners[released_count++] = reference;
}

/* ---- The ops' kernels. ---- */

/* Fills in owners that Python has to release, and returns their number. */
EXPORT size_t accelerator_simulation_race_released(void **owners, size_t count)
{
    pthread_mutex_lock(&race_lock);
    count = released_count < count ? released_count : count;
    released_count -= count;
    if (count > 0)
        memcpy(owners, released_owners + released_count, count * sizeof *owners);
    pthread_mutex_unlock(&race_lock);
    return count;
}

EXPORT void accelerator_simulation_race_owners(void (*release)(void *owner))
{
    owner_release = release;
}

/* What an op accesses, with the stream on which it runs. If it `is_transfer`, the runtime records the op's copies itself: the
 * accesses must live until race_op_ends(), and the owners that the copies took are NULL then. */
EXPORT void accelerator_simulation_race_op(void *handle, int device, const char *name, struct race_access *accesses,
                                           size_t count, int place, int is_transfer)
{
    struct stream *stream = driver ? find_stream(handle, &driver->devices[device]) : NULL;
    if (is_transfer || !stream) {
        op_accesses = accesses;
        op_access_count = count;
        op_name = name;
        return;
    }
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    stream->race_queries = 0;
    for (size_t i = 0; i < count; i++)
        if (!is_in_graph_call && is_device_memory((const void *)accesses[i].layout.address))
            record(world, &accesses[i], index, clock, name, place);
        else if (accesses[i].owner)
            release_reference(accesses[i].owner);
    pthread_mutex_unlock(&race_lock);
}

/* Some versions of torch, such as 2.6, fill the seed and offset of random numbers when a capture starts and when a graph is
 * replayed, on streams that nothing orders. No program can order them. */
EXPORT void accelerator_simulation_race_graph_call(int is_running)
{
    is_in_graph_call = is_running;
}

EXPORT void accelerator_simulation_race_op_ends(void)
{
    op_accesses = NULL;
    op_access_count = 0;
    op_name = NULL;
}

/* A storage gives memory back to its allocator, and lives on. */
EXPORT void accelerator_simulation_race_freed(const void *address, size_t size)
{
    pthread_mutex_lock(&race_lock);
    mark_freed((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&race_lock);
}

/* Lets the second stream wait for the first one. */
EXPORT void accelerator_simulation_race_order(void *handle, int device, void *other_handle, int other_device)
{
    struct stream *first = driver ? find_stream(handle, &driver->devices[device]) : NULL;
    struct stream *second = driver ? find_stream(other_handle, &driver->devices[other_device]) : NULL;
    size_t index = 0;
    if (!first || !second)
        return;
    pthread_mutex_lock(&race_lock);
    const struct clock *clock = begin_work(world_of(first), first, &index);
    clock_join(clock_of(world_of(second), second, &index), clock);
    pthread_mutex_unlock(&race_lock);
}

/* A collective reads and writes memory on its stream. */
void race_at_collective(void *handle, int device, const char *name, const void *source, size_t source_size,
                        const void *target, size_t target_size)
{
    struct stream *stream = find_stream(handle, &driver->devices[device]);
    if (!stream || !reports)
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
