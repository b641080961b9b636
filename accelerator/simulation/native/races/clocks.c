/* Race detection: the vector clocks of streams and of the host, the numbers of streams, and the worlds of captures. */
#include "races.h"

struct world present;
struct clock host_clock, reuse_clock;

static struct known_stream *streams;
static size_t stream_count, stream_capacity;

/* Memory for clocks is short only if the program's is, too; what is then not recorded is not reported. */
static bool reserve(struct clock *clock, size_t length)
{
    if (length <= clock->length)
        return true;
    if (!array_reserve((void **)&clock->times, &clock->capacity, length, sizeof *clock->times))
        return false;
    memset(clock->times + clock->length, 0, (length - clock->length) * sizeof *clock->times);
    clock->length = length;
    return true;
}

void clock_join(struct clock *clock, const struct clock *other)
{
    bool has_changed = false;
    if (clock == other || !reserve(clock, other->length))
        return;
    for (size_t i = 0; i < other->length; i++)
        if (clock->times[i] < other->times[i]) {
            clock->times[i] = other->times[i];
            has_changed = true;
        }
    clock->version += has_changed;
}

void clock_set(struct clock *clock, const struct clock *other)
{
    if (clock->length != 0)
        memset(clock->times, 0, clock->length * sizeof *clock->times);
    clock_join(clock, other);
}

uint32_t clock_advance(struct clock *clock, size_t stream)
{
    if (!reserve(clock, stream + 1))
        return 0;
    clock->version++;
    return ++clock->times[stream];
}

bool clock_covers(const struct clock *clock, size_t stream, uint32_t time)
{
    return time == 0 || (stream < clock->length && clock->times[stream] >= time);
}

void clock_clear(struct clock *clock)
{
    free(clock->times);
    *clock = (struct clock){0};
}

/* Returns the index of a stream plus one, which the stream keeps; 0 without memory. Reports call the streams of a device by the
 * numbers 1, 2, 3, in the order of their first use. */
static int add_stream(const struct race_stream *stream)
{
    if (!array_reserve((void **)&streams, &stream_capacity, stream_count + 1, sizeof *streams))
        return 0;
    int number = 0;
    for (size_t i = 0; i < stream_count && !stream->is_default; i++)
        number = streams[i].device == stream->device && streams[i].number > number ? streams[i].number : number;
    streams[stream_count++] = (struct known_stream){stream->device, stream->is_default ? 0 : number + 1, stream->is_blocking};
    return (int)stream_count;
}

const struct known_stream *stream_at(size_t index)
{
    return &streams[index];
}

struct clock *clock_of(struct world *world, struct race_stream *stream, size_t *index)
{
    static struct clock spare; /* without memory */
    if (stream->index == 0 && (stream->index = add_stream(stream)) == 0)
        return &spare;
    *index = (size_t)stream->index - 1;
    if (*index >= world->clock_count) {
        if (!array_reserve((void **)&world->clocks, &world->clock_capacity, *index + 1, sizeof *world->clocks) ||
            !array_reserve((void **)&world->joined, &world->joined_capacity, *index + 1, sizeof *world->joined))
            return &spare;
        const size_t added = *index + 1 - world->clock_count;
        memset(world->clocks + world->clock_count, 0, added * sizeof *world->clocks);
        memset(world->joined + world->clock_count, 0, added * sizeof *world->joined);
        world->clock_count = *index + 1;
    }
    return &world->clocks[*index];
}

/* The default stream waits for the device's blocking streams, and they wait for it. */
static void join_blocking_streams(struct clock *clock, const struct known_stream *own)
{
    for (size_t i = 0; i < present.clock_count; i++) {
        const struct known_stream *other = &streams[i];
        if (other->device == own->device && (own->number == 0 ? other->is_blocking : other->number == 0))
            clock_join(clock, &present.clocks[i]);
    }
}

struct clock *begin_work(struct world *world, struct race_stream *stream, size_t *index)
{
    struct clock *clock = clock_of(world, stream, index);
    if (world == &present) {
        if (world->joined[*index] != host_clock.version) {
            clock_join(clock, &host_clock);
            world->joined[*index] = host_clock.version;
        }
        const struct known_stream *own = &streams[*index];
        if (own->number == 0 || own->is_blocking)
            join_blocking_streams(clock, own);
    }
    clock_advance(clock, *index);
    return clock;
}

/* A negative device means all. */
void join_device(struct clock *clock, int device)
{
    for (size_t i = 0; i < present.clock_count; i++)
        if (device < 0 || streams[i].device == device)
            clock_join(clock, &present.clocks[i]);
}
