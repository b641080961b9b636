/* What the lanes of a warp do together, except with matrices. */
#include "library.h"

#define EACH_LANE(lane, group) for (u32 rest_ = (group), lane; rest_ && (lane = (u32)__builtin_ctz(rest_), true); rest_ &= rest_ - 1)

/* The lane whose value a lane takes, as PTX computes it; `is_in_range` is the predicate. */
static inline __attribute__((always_inline)) u32 source_lane(enum operation operation, u32 lane, u32 b, u32 c, bool *is_in_range)
{
    u32 offset = b & 31, clamp = c & 31, segment = c >> 8 & 31;
    u32 last = (lane & segment) | (clamp & ~segment & 31), first = lane & segment;
    s32 source;
    switch (operation) {
    case SHUFFLE_UP:
        source = (s32)lane - (s32)offset;
        *is_in_range = source >= (s32)last;
        break;
    case SHUFFLE_DOWN:
        source = (s32)(lane + offset);
        *is_in_range = source <= (s32)last;
        break;
    case SHUFFLE_BUTTERFLY:
        source = (s32)(lane ^ offset);
        *is_in_range = source <= (s32)last;
        break;
    default:
        source = (s32)(first | (offset & ~segment & 31));
        *is_in_range = source <= (s32)last;
    }
    return *is_in_range ? (u32)source & 31 : lane;
}

static inline __attribute__((always_inline)) void shuffle(struct warp *warp, u32 group, enum operation operation)
{
    for (u32 lane = 0; lane < LANES; lane++) {
        if (!(group >> lane & 1))
            continue;
        bool is_in_range;
        u32 source = source_lane(operation, lane, warp->b[lane], warp->c[lane], &is_in_range);
        /* The value of a lane that does not take part is undefined: here it is the lane's own. */
        warp->result[lane] = (u32)warp->a[group >> source & 1 ? source : lane];
        warp->flag[lane] = is_in_range;
    }
}

static void vote(struct warp *warp, u32 group, enum operation operation)
{
    u32 ballot = 0;
    EACH_LANE(lane, group)
        ballot |= (u32)(warp->a[lane] != 0) << lane;
    u32 result = operation == VOTE_ALL ? ballot == group
                 : operation == VOTE_ANY ? ballot != 0
                 : operation == VOTE_UNIFORM ? ballot == 0 || ballot == group
                                             : ballot;
    EACH_LANE(lane, group)
        warp->result[lane] = result;
}

static void match(struct warp *warp, u32 group, enum operation operation)
{
    EACH_LANE(lane, group)
    {
        u32 equal = 0;
        EACH_LANE(other, group)
            equal |= (u32)(warp->a[other] == warp->a[lane]) << other;
        bool is_all = equal == group;
        warp->result[lane] = operation == MATCH_ANY || is_all ? equal : 0;
        warp->flag[lane] = is_all;
    }
}

static u32 combine(enum operation operation, u32 a, u32 b)
{
    switch (operation) {
    case REDUCE_ADD:
        return a + b;
    case REDUCE_MIN_U32:
        return a < b ? a : b;
    case REDUCE_MAX_U32:
        return a > b ? a : b;
    case REDUCE_MIN_S32:
        return (s32)a < (s32)b ? a : b;
    case REDUCE_MAX_S32:
        return (s32)a > (s32)b ? a : b;
    case REDUCE_AND:
        return a & b;
    case REDUCE_OR:
        return a | b;
    default:
        return a ^ b;
    }
}

static void reduce(struct warp *warp, u32 group, enum operation operation)
{
    u32 first = (u32)__builtin_ctz(group), result = (u32)warp->a[first];
    EACH_LANE(lane, group & (group - 1))
        result = combine(operation, result, (u32)warp->a[lane]);
    EACH_LANE(lane, group)
        warp->result[lane] = result;
}

/* The lowest lane is elected. */
static void elect(struct warp *warp, u32 group)
{
    EACH_LANE(lane, group)
    {
        warp->result[lane] = (u32)__builtin_ctz(group);
        warp->flag[lane] = lane == (u32)__builtin_ctz(group);
    }
}

void operate_on_group(struct warp *warp, u32 group, const struct point *point)
{
    enum operation operation = point->operation;
    switch (operation) {
    case SHUFFLE_UP: /* each alone, because the loop over lanes is shorter if the compiler knows which it is */
        shuffle(warp, group, SHUFFLE_UP);
        break;
    case SHUFFLE_DOWN:
        shuffle(warp, group, SHUFFLE_DOWN);
        break;
    case SHUFFLE_BUTTERFLY:
        shuffle(warp, group, SHUFFLE_BUTTERFLY);
        break;
    case SHUFFLE_INDEX:
        shuffle(warp, group, SHUFFLE_INDEX);
        break;
    case VOTE_ALL:
    case VOTE_ANY:
    case VOTE_UNIFORM:
    case VOTE_BALLOT:
        vote(warp, group, operation);
        break;
    case MATCH_ANY:
    case MATCH_ALL:
        match(warp, group, operation);
        break;
    case ELECT:
        elect(warp, group);
        break;
    case WARP_ACTIVE_MASK:
        EACH_LANE(lane, group)
            warp->result[lane] = group;
        break;
    case MATRIX_MULTIPLY:
        multiply_matrices(warp, point->detail);
        break;
    case MATRIX_LOAD:
    case MATRIX_STORE:
    case MATRIX_TRANSPOSE:
        move_matrices(warp, operation, point->detail);
        break;
    case WARP_SYNC:
        break;
    default:
        reduce(warp, group, operation);
    }
}
