/* Runs the lanes of warps, in turn, and lets them go on when what they wait for has happened. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "library.h"

/* The lanes that are at a point. */
static u32 lanes_at(const struct warp *warp, u32 point)
{
    u32 lanes = 0;
    for (u32 i = 0; i < LANES; i++)
        lanes |= (u32)(warp->point[i] == point) << i;
    return lanes;
}

static const struct point *point_of(const struct warp *warp, u32 lane)
{
    return &warp->block->launch->kernel->points[warp->point[lane]];
}

static u32 first_lane(u32 lanes)
{
    return (u32)__builtin_ctz(lanes);
}

void begin_lanes(struct block *block)
{
    memset(block->barriers, 0, BARRIERS * sizeof *block->barriers);
    for (u32 i = 0; i < block->warp_count; i++) {
        struct warp *warp = &block->warps[i];
        memset(warp->point, 0, sizeof warp->point);
        memset(warp->polls, 0, sizeof warp->polls);
        warp->ready = warp->alive;
        warp->waiting = warp->polite = 0;
    }
    if (block->fibers)
        begin_fibers(block);
}

/* Barriers. */

static void open_barrier(struct block *block, struct barrier *barrier)
{
    for (u32 i = 0; i < block->warp_count; i++) {
        struct warp *warp = &block->warps[i];
        for (u32 lanes = barrier->waiting[i]; lanes; lanes &= lanes - 1) {
            u32 lane = first_lane(lanes);
            switch (point_of(warp, lane)->operation) {
            case BARRIER_POPC:
                warp->result[lane] = barrier->true_count;
                break;
            case BARRIER_AND:
                warp->result[lane] = barrier->true_count == barrier->arrived_count;
                break;
            case BARRIER_OR:
                warp->result[lane] = barrier->true_count > 0;
                break;
            }
        }
        warp->ready |= barrier->waiting[i];
    }
    memset(barrier, 0, sizeof *barrier);
}

/* Of a warp of which all threads have come, those that have returned and those that never were count too. */
static u32 count_by_warps(const struct block *block, const struct barrier *barrier)
{
    u32 count = 0;
    for (u32 i = 0; i < block->warp_count; i++) {
        u32 arrived = barrier->arrived[i];
        bool is_whole = arrived && (block->warps[i].alive & ~arrived) == 0;
        count += is_whole ? LANES : (u32)__builtin_popcount(arrived);
    }
    return count;
}

static bool is_full(const struct block *block, const struct barrier *barrier)
{
    if (barrier->arrived_count == 0)
        return false;
    if (barrier->expected == 0)
        return barrier->arrived_count >= block->alive;
    return count_by_warps(block, barrier) >= barrier->expected;
}

/* Notes that lanes have come to a barrier; returns whether it has opened. */
static bool come(struct block *block, struct warp *warp, u32 lanes, u32 number, u32 count, bool waits)
{
    if (number >= BARRIERS)
        fail_kernel(block->worker, KERNEL_ILLEGAL_INSTRUCTION, "it waits at the barrier %u, of which there are %u", number, BARRIERS);
    struct barrier *barrier = &block->barriers[number];
    barrier->expected = count;
    barrier->arrived_count += (u32)__builtin_popcount(lanes & ~barrier->arrived[warp->number]);
    barrier->arrived[warp->number] |= lanes;
    if (waits)
        barrier->waiting[warp->number] |= lanes;
    if (!is_full(block, barrier))
        return false;
    open_barrier(block, barrier);
    return true;
}

void arrive(struct block *block, u32 thread, u32 number, u32 count)
{
    come(block, &block->warps[thread / LANES], 1u << thread % LANES, number, count, false);
}

/* Lanes of one point may wait at several barriers. */
static void come_to_barriers(struct warp *warp, u32 lanes)
{
    struct block *block = warp->block;
    bool has_predicate = point_of(warp, first_lane(lanes))->operation != BARRIER_SYNC;
    while (lanes) {
        u32 first = first_lane(lanes), group = 0, trues = 0;
        for (u32 rest = lanes; rest; rest &= rest - 1) {
            u32 lane = first_lane(rest);
            if (warp->a[lane] == warp->a[first] && warp->b[lane] == warp->b[first]) {
                group |= 1u << lane;
                trues += has_predicate && warp->c[lane];
            }
        }
        if (warp->a[first] < BARRIERS)
            block->barriers[warp->a[first]].true_count += trues;
        block->worker->thread = warp->first + first;
        come(block, warp, group, (u32)warp->a[first], warp->b[first], true);
        lanes &= ~group;
    }
}

static void leave(struct warp *warp, u32 lanes)
{
    struct block *block = warp->block;
    warp->alive &= ~lanes;
    block->alive -= (u32)__builtin_popcount(lanes);
    for (u32 i = 0; i < BARRIERS; i++)
        if (is_full(block, &block->barriers[i]))
            open_barrier(block, &block->barriers[i]);
}

/* Operations of a warp. */

/* What a lane does that its own mask lacks is undefined: here it is an illegal instruction, of all these operations. */
static void check_members(const struct warp *warp, u32 lanes, const struct point *point)
{
    struct block *block = warp->block;
    u32 lacking = 0;
    for (u32 i = 0; i < LANES; i++)
        lacking |= ~warp->members[i] & 1u << i;
    if (!(lacking & lanes))
        return;
    u32 lane = first_lane(lacking & lanes);
    block->worker->thread = warp->first + lane;
    fail_kernel(block->worker, KERNEL_ILLEGAL_INSTRUCTION, "%s is executed by lane %u, which its mask %#x lacks",
         block->launch->kernel->accesses[point->access].text, lane, warp->members[lane]);
}

/* The waiting lanes that do the same operation with the same members. */
static u32 find_group(const struct warp *warp, u32 first)
{
    const struct point *point = point_of(warp, first);
    u32 group = 0;
    for (u32 lanes = warp->waiting; lanes; lanes &= lanes - 1) {
        u32 lane = first_lane(lanes);
        const struct point *other = point_of(warp, lane);
        if (other->wait == WAIT_WARP && other->operation == point->operation && warp->members[lane] == warp->members[first])
            group |= 1u << lane;
    }
    return group;
}

static void do_operation(struct warp *warp, u32 group, const struct point *point)
{
    warp->block->worker->thread = warp->first + first_lane(group);
    operate_on_group(warp, group, point);
    warp->waiting &= ~group;
    warp->ready |= group;
}

static bool do_complete_operation(struct warp *warp)
{
    for (u32 lanes = warp->waiting; lanes;) {
        u32 first = first_lane(lanes);
        const struct point *point = point_of(warp, first);
        if (point->wait != WAIT_WARP) {
            lanes &= lanes - 1;
            continue;
        }
        u32 group = find_group(warp, first), members = warp->members[first];
        if (((members & warp->alive) & ~group) == 0) {
            do_operation(warp, group, point);
            return true;
        }
        lanes &= ~group;
    }
    return false;
}

/* Lanes that are together at a point are the active ones of what is not synchronized. */
static bool do_converged_operation(struct warp *warp)
{
    u32 lowest = POINT_EXITED;
    for (u32 lanes = warp->waiting; lanes; lanes &= lanes - 1) {
        u32 lane = first_lane(lanes);
        if (point_of(warp, lane)->wait == WAIT_CONVERGED && warp->point[lane] < lowest)
            lowest = warp->point[lane];
    }
    if (lowest == POINT_EXITED)
        return false;
    u32 group = lanes_at(warp, lowest) & warp->waiting;
    do_operation(warp, group, point_of(warp, first_lane(group)));
    return true;
}

/* Files lanes that have come to new points. */
static bool sort_lanes(struct warp *warp, u32 lanes)
{
    bool progress = false;
    while (lanes) {
        u32 first = first_lane(lanes), group = lanes_at(warp, warp->point[first]) & lanes;
        lanes &= ~group;
        if (warp->point[first] == POINT_EXITED) {
            leave(warp, group);
            progress = true;
            continue;
        }
        switch (point_of(warp, first)->wait) {
        case WAIT_POLITELY:
            warp->polite |= group;
            break;
        case WAIT_WARP:
            check_members(warp, group, point_of(warp, first));
            warp->waiting |= group;
            progress = true;
            break;
        case WAIT_BARRIER:
            come_to_barriers(warp, group);
            progress = true;
            break;
        default:
            warp->waiting |= group;
            progress = true;
        }
    }
    return progress;
}

static void run_lanes(struct warp *warp, u32 point, u32 lanes)
{
    const struct kernel *kernel = warp->block->launch->kernel;
    if (kernel->mode == MODE_FIBERS)
        run_fibers(warp, lanes);
    else
        kernel->run_lanes(warp, point, lanes);
}

/* Runs a warp until all its lanes wait. Lanes at one point run together; the lowest point comes first, where others may join. */
static bool run_warp(struct warp *warp)
{
    bool progress = false;
    warp->ready |= warp->polite;
    warp->polite = 0;
    do {
        while (warp->ready) {
            u32 point = warp->point[first_lane(warp->ready)], lanes = lanes_at(warp, point) & warp->ready;
            if (lanes != warp->ready) {
                for (u32 rest = warp->ready; rest; rest &= rest - 1)
                    point = warp->point[first_lane(rest)] < point ? warp->point[first_lane(rest)] : point;
                lanes = lanes_at(warp, point) & warp->ready;
            }
            warp->ready &= ~lanes;
            run_lanes(warp, point, lanes);
            progress |= sort_lanes(warp, lanes);
        }
    } while (warp->waiting && (do_complete_operation(warp) || do_converged_operation(warp)));
    return progress;
}

bool run_round(struct block *block)
{
    bool progress = false, is_polling = false;
    for (u32 i = 0; i < block->warp_count; i++) {
        progress |= run_warp(&block->warps[i]);
        is_polling |= block->warps[i].polite != 0;
    }
    block->polling_rounds += is_polling;
    for (u32 i = 0; i < block->warp_count; i++)
        is_polling |= block->warps[i].ready != 0;
    if (!progress && !is_polling && block->alive > 0)
        fail_because_stuck(block);
    return progress;
}

/* All threads of a block come to a barrier together. */
void operate(struct block *block, const struct point *point)
{
    u32 trues = 0;
    for (u32 i = 0; i < block->threads; i++)
        trues += block->warps[i / LANES].c[i % LANES] != 0;
    u64 result = point->operation == BARRIER_POPC ? trues : point->operation == BARRIER_AND ? trues == block->threads : trues > 0;
    for (u32 i = 0; i < block->threads; i++)
        block->warps[i / LANES].result[i % LANES] = result;
}

/* All threads of a warp do an operation together. */
void operate_warp(struct warp *warp, const struct point *point)
{
    struct worker *worker = warp->block->worker;
    u32 lanes = warp->alive;
    if (point->wait == WAIT_WARP)
        check_members(warp, lanes, point);
    while (lanes) {
        u32 first = first_lane(lanes), group = 0, members = point->wait == WAIT_WARP ? warp->members[first] : ~0u;
        for (u32 lane = 0; lane < LANES; lane++)
            group |= (u32)(point->wait != WAIT_WARP || warp->members[lane] == members) << lane;
        group &= lanes;
        worker->thread = warp->first + first;
        if (members & warp->alive & ~group)
            fail_kernel(worker, KERNEL_TIMEOUT, "%s waits for lanes of its mask %#x that execute it with another mask",
                        worker->launch->kernel->accesses[point->access].text, members);
        operate_on_group(warp, group, point);
        lanes &= ~group;
    }
}

/* Reports. */

__attribute__((format(printf, 4, 5)))
static void append(char *text, size_t size, size_t *length, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(text + *length, size - *length, format, arguments);
    va_end(arguments);
    *length += written < 0 ? 0 : (size_t)written < size - *length ? (size_t)written : size - *length - 1;
}

/* Says how many threads of a block wait at which instructions. */
void fail_because_stuck(struct block *block)
{
    const struct kernel *kernel = block->launch->kernel;
    char text[MESSAGE_SIZE / 2];
    size_t length = 0;
    u32 reported = 0;
    struct worker *worker = block->worker;
    text[0] = '\0';
    for (u32 point = 0; point < kernel->point_count && reported < 6; point++) {
        u32 count = 0, first = 0;
        for (u32 i = block->warp_count; i-- > 0;) {
            u32 lanes = lanes_at(&block->warps[i], point) & block->warps[i].alive;
            count += (u32)__builtin_popcount(lanes);
            first = lanes ? block->warps[i].first + first_lane(lanes) : first;
        }
        if (count == 0)
            continue;
        const struct access *access = &kernel->accesses[kernel->points[point].access];
        const char *file = access->line ? strrchr(access->file, '/') : NULL;
        append(text, sizeof text, &length, "%s%u at %s", reported++ ? ", " : "", count, access->text);
        if (access->line)
            append(text, sizeof text, &length, " (%s:%u)", file ? file + 1 : access->file, access->line);
        worker->thread = reported == 1 ? first : worker->thread;
    }
    fail_kernel(worker, KERNEL_TIMEOUT, "the block can make no progress: of its %u threads wait %s; %u have returned", block->threads,
         text, block->threads - block->alive);
}
