/* Race detection: takes the accesses of torch's ops, of the engine by the table of race_accesses.h. */
#include "races.h"

static _Thread_local bool is_in_graph_call;

/* Code that torch.compile generates for simulated GPUs gives the host's memory to some ops. */
static bool is_device_memory(const void *address)
{
    bool is_known;
    return !is_on_host(address, &is_known);
}

static void record_all(struct race_stream *stream, const char *name, struct race_access *accesses, size_t count, int place,
                       bool is_ignored)
{
    size_t index = 0;
    pthread_mutex_lock(&race_lock);
    struct world *world = world_of(stream);
    const struct clock *clock = begin_work(world, stream, &index);
    stream->queries = 0;
    for (size_t i = 0; i < count; i++)
        if (!is_ignored && is_device_memory((const void *)accesses[i].layout.address))
            record(world, &accesses[i], index, clock, name, place);
        else if (accesses[i].owner)
            race_storages->release(accesses[i].owner);
    pthread_mutex_unlock(&race_lock);
}

void race_at_kernel(struct race_stream *stream, const char *name, struct race_access *accesses, size_t count)
{
    record_all(stream, name, accesses, count, place_of_thread(), false);
}

static void op(void *handle, int device, const char *name, struct race_access *accesses, size_t count, int place, int is_transfer)
{
    struct race_stream *stream = race_runtime->find_stream(handle, device);
    if (is_transfer || !stream) {
        race_op = (struct race_op){accesses, count, name};
        return;
    }
    record_all(stream, name, accesses, count, place, is_in_graph_call);
}

/* Some versions of torch, such as 2.6, fill the seed and offset of random numbers when a capture starts and when a graph is
 * replayed, on streams that nothing orders. No program can order them. */
EXPORT void accelerator_simulation_race_graph_call(int is_running)
{
    is_in_graph_call = is_running;
}

static void op_ends(void)
{
    race_op = (struct race_op){0};
}

/* A storage gives memory back to its allocator, and lives on. */
EXPORT void accelerator_simulation_race_freed(const void *address, size_t size)
{
    pthread_mutex_lock(&race_lock);
    mark_freed((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&race_lock);
}

/* Lets the second stream wait for the first one. */
static void order(void *handle, int device, void *other_handle, int other_device)
{
    struct race_stream *first = race_runtime->find_stream(handle, device);
    struct race_stream *second = race_runtime->find_stream(other_handle, other_device);
    size_t index = 0;
    if (!first || !second)
        return;
    pthread_mutex_lock(&race_lock);
    clock_of(world_of(second), second, &index); /* a new stream may move the clocks */
    const struct clock *clock = begin_work(world_of(first), first, &index);
    clock_join(clock_of(world_of(second), second, &index), clock);
    pthread_mutex_unlock(&race_lock);
}

static void use_storages(const struct race_storages *storages)
{
    race_storages = storages;
}

const struct race_functions race_functions = {
    .op = op,
    .op_ends = op_ends,
    .place = race_place,
    .set_place = race_set_place,
    .code_owner = race_code_owner,
    .take = accelerator_simulation_race_take,
    .order = order,
    .use_storages = use_storages,
};
