/* Race detection: keeps accesses by address, and compares a new one with them.
 *
 * Memory is divided into segments; each has the accesses to all of it that a later access may race with. A dense write replaces
 * all accesses of its range. Another access is added, and replaces the earlier one that it repeats. */
#include "races.h"

enum { MOST_ACCESSES = 64 }; /* of a segment: the oldest is dropped */

struct segment {
    uintptr_t start, end;
    struct access **items;
    size_t count, capacity;
};

struct access *new_access(const struct race_access *given, size_t stream, uint32_t time, const char *name, int place)
{
    struct access *access = malloc(sizeof *access);
    if (!access)
        return NULL;
    *access = (struct access){.references = 1, .stream = (int)stream, .time = time, .flags = given->flags, .dtype = given->dtype,
                              .place = place, .name = name, .layout = given->layout};
    if (given->owner && (access->owner = malloc(sizeof *access->owner)))
        *access->owner = (struct owner){1, given->owner, race_storages->data(given->owner)};
    return access;
}

static void release_owner(struct owner *owner)
{
    if (owner && --owner->references == 0) {
        race_storages->release(owner->storage);
        free(owner);
    }
}

void release_access(struct access *access)
{
    if (--access->references > 0)
        return;
    release_owner(access->owner);
    free(access);
}

/* ---- Segments. ---- */

static struct segment *segment_at(struct world *world, size_t index)
{
    return world->segments.items[index].value;
}

/* The index of the first segment that ends after the address. */
static size_t first_segment(const struct world *world, uintptr_t address)
{
    const size_t index = sorted_index(&world->segments, address + 1);
    if (index > 0 && ((const struct segment *)world->segments.items[index - 1].value)->end > address)
        return index - 1;
    return index;
}

static struct segment *insert_segment(struct world *world, uintptr_t start, uintptr_t end)
{
    struct segment *segment = calloc(1, sizeof *segment);
    if (!segment || !sorted_insert(&world->segments, start, segment)) {
        free(segment);
        return NULL;
    }
    segment->start = start;
    segment->end = end;
    return segment;
}

static bool add_item(struct segment *segment, struct access *access)
{
    if (!array_reserve((void **)&segment->items, &segment->capacity, segment->count + 1, sizeof(struct access *)))
        return false;
    access->references++;
    segment->items[segment->count++] = access;
    return true;
}

static void remove_item(struct segment *segment, size_t index)
{
    release_access(segment->items[index]);
    segment->count--;
    memmove(&segment->items[index], &segment->items[index + 1], (segment->count - index) * sizeof *segment->items);
}

static void remove_items(struct segment *segment)
{
    for (size_t i = 0; i < segment->count; i++)
        release_access(segment->items[i]);
    segment->count = 0;
}

static void remove_segment(struct world *world, size_t index)
{
    struct segment *segment = sorted_remove(&world->segments, index).value;
    remove_items(segment);
    free(segment->items);
    free(segment);
}

/* Lets a segment begin at the address, if one contains it. */
static void split_at(struct world *world, uintptr_t address)
{
    const size_t index = first_segment(world, address);
    if (index == world->segments.count || segment_at(world, index)->start >= address)
        return;
    struct segment *lower = segment_at(world, index), *upper = insert_segment(world, address, lower->end);
    if (!upper)
        return;
    lower->end = address;
    for (size_t i = 0; i < lower->count; i++)
        add_item(upper, lower->items[i]);
}

void forget_accesses(uintptr_t start, uintptr_t end)
{
    if (start >= end || present.segments.count == 0)
        return;
    split_at(&present, start);
    split_at(&present, end);
    size_t index = first_segment(&present, start);
    while (index < present.segments.count && segment_at(&present, index)->start < end)
        remove_segment(&present, index);
}

void mark_freed(uintptr_t start, uintptr_t end)
{
    for (size_t i = first_segment(&present, start); i < present.segments.count && segment_at(&present, i)->start < end; i++)
        for (size_t k = 0; k < segment_at(&present, i)->count; k++)
            segment_at(&present, i)->items[k]->is_freed = true;
}

/* ---- Comparing and recording. ---- */

/* Whether the memory that an access used has been freed since: its storage is gone, or has other memory. */
static bool is_freed(const struct access *access)
{
    if (access->is_freed || !access->owner)
        return access->is_freed;
    return race_storages->data(access->owner->storage) != access->owner->data;
}

/* Collectives and some copies know no storage: an access to the same memory before or after them does. */
static void share_owner(struct access *first, struct access *second)
{
    struct access *without = !first->owner ? first : second;
    struct owner *owner = first->owner ? first->owner : second->owner;
    if (owner && !without->owner && !is_freed(first) && !is_freed(second) && without->launch == 0) {
        owner->references++;
        without->owner = owner;
    }
}

static void compare(const struct world *world, struct access *old, struct access *access, const struct clock *clock)
{
    if (old->flags & access->flags & RACE_ATOMIC)
        return;
    if (!((old->flags | access->flags) & RACE_WRITES) || old->stream == access->stream || old->compared == access)
        return;
    if (clock_covers(clock, (size_t)old->stream, old->time))
        return;
    const bool is_reuse = is_freed(old), may_be_reuse = is_reuse || (old->flags & RACE_UNOWNED && !old->owner);
    if (may_be_reuse && world == &present && clock_covers(&reuse_clock, (size_t)old->stream, old->time))
        return;
    old->compared = access;
    const size_t bytes = layout_overlap(&old->layout, &access->layout);
    if (bytes != 0)
        report_race(old, access, bytes, is_reuse);
}

/* Whether an access makes an older one of the same stream superfluous, within a segment. */
static bool repeats(const struct access *access, bool is_dense, const struct access *old)
{
    const bool is_weaker = old->flags & RACE_WRITES && !(access->flags & RACE_WRITES);
    if (access->stream != old->stream || is_weaker || old->flags & RACE_PART || (old->flags | access->flags) & RACE_ATOMIC)
        return access->stream == old->stream && access->flags == old->flags && layouts_are_equal(&access->layout, &old->layout);
    return !(access->flags & RACE_PART) && (is_dense || layouts_are_equal(&access->layout, &old->layout));
}

static void add_to_segment(const struct world *world, struct segment *segment, struct access *access, bool is_dense,
                           const struct clock *clock)
{
    for (size_t i = 0; i < segment->count; i++) {
        compare(world, segment->items[i], access, clock);
        share_owner(segment->items[i], access);
    }
    for (size_t i = segment->count; i-- > 0;)
        if (repeats(access, is_dense, segment->items[i]))
            remove_item(segment, i);
    if (segment->count >= MOST_ACCESSES)
        remove_item(segment, 0);
    add_item(segment, access);
}

/* Takes over the caller's reference to the access. */
void record_access(struct world *world, struct access *access, const struct clock *clock)
{
    const struct race_range range = layout_range(&access->layout);
    if (range.start >= range.end) {
        release_access(access);
        return;
    }
    const bool is_dense = layout_is_dense(&access->layout);
    const bool replaces = is_dense && (access->flags & (RACE_WRITES | RACE_PART | RACE_ATOMIC)) == RACE_WRITES;
    split_at(world, range.start);
    split_at(world, range.end);
    size_t index = first_segment(world, range.start);
    uintptr_t address = range.start;
    while (address < range.end) {
        struct segment *segment = index < world->segments.count ? segment_at(world, index) : NULL;
        if (segment && segment->start == address) {
            add_to_segment(world, segment, access, is_dense, clock);
            address = segment->end;
            if (replaces) {
                remove_segment(world, index);
                continue;
            }
        } else {
            const uintptr_t end = segment && segment->start < range.end ? segment->start : range.end;
            if (!replaces) {
                if (!(segment = insert_segment(world, address, end)))
                    break;
                add_item(segment, access);
            } else {
                address = end;
                continue;
            }
            address = end;
        }
        index++;
    }
    if (replaces) {
        struct segment *segment = insert_segment(world, range.start, range.end);
        if (segment)
            add_item(segment, access);
    }
    release_access(access);
}

/* ---- Captures. ---- */

void list_access(struct world *world, struct access *access)
{
    if (!array_reserve((void **)&world->list, &world->list_capacity, world->count + 1, sizeof *world->list))
        return;
    access->references++;
    world->list[world->count++] = access;
}

void replay_accesses(struct world *captured, struct race_stream *stream, int place)
{
    size_t index = 0;
    const struct clock *clock = begin_work(&present, stream, &index);
    for (size_t i = 0; i < captured->count; i++) {
        struct access *access = malloc(sizeof *access);
        if (!access)
            return;
        *access = *captured->list[i];
        access->references = 1;
        access->stream = (int)index;
        access->time = clock->times[index];
        access->launch = place;
        access->owner = NULL;
        access->is_freed = false;
        access->compared = NULL;
        record_access(&present, access, clock);
    }
}

void world_free(struct world *world)
{
    while (world->segments.count > 0)
        remove_segment(world, world->segments.count - 1);
    for (size_t i = 0; i < world->count; i++)
        release_access(world->list[i]);
    for (size_t i = 0; i < world->clock_count; i++)
        clock_clear(&world->clocks[i]);
    free(world->segments.items);
    free(world->clocks);
    free(world->joined);
    free(world->list);
    free(world);
}
