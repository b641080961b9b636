/* NCCL: communicators made of other communicators: split, shrink, grow. */
#include "nccl.h"

#include <string.h>

enum { NO_COLOR = -1 };

/* ---- Records that the ranks of the parent exchange. ---- */

static ncclResult_t check_exchange(struct comm *comm, bool with_processes, bool is_late)
{
    static const char name[] = "the creation of a communicator";
    struct shared_state *shared = comm->shared;
    if (comm->is_aborted) /* a revoked communicator can still have children */
        return fail(ncclInternalError, "rank %d: the communicator was aborted", comm->rank);
    for (int rank = 0; rank < comm->ranks; rank++) {
        const struct member *member = &shared->members[rank];
        if (rank == comm->rank || member->exchanges > comm->exchanges)
            continue;
        bool has_left = member->state != MEMBER_PRESENT && member->state != MEMBER_REVOKED;
        bool is_gone = !has_left && with_processes && is_process_gone(comm, rank);
        if (member->exchanges <= comm->exchanges && (has_left || is_gone || is_late))
            return break_communicator(comm, has_left ? LEFT : is_gone ? GONE : LATE, rank, name);
    }
    return ncclSuccess;
}

static void post_record(struct joining *joining)
{
    struct comm *comm = joining->parent;
    struct member *member = &comm->shared->members[comm->rank];
    member->exchange[comm->exchanges % 2] = joining->mine;
    arrive(comm, &comm->shared->exchanges, &member->exchanges);
    joining->has_posted = true;
}

static ncclResult_t read_records(struct joining *joining)
{
    enum { CHECK_MS = 100 };
    struct comm *comm = joining->parent;
    struct shared_state *shared = comm->shared;
    const int64_t deadline = now_ms() + comm->timeout_ms;
    for (int64_t checked_at = now_ms();;) {
        uint32_t wakeups = shared->members[comm->rank].wakeups;
        if (have_all_arrived(comm, &shared->exchanges, comm->exchanges))
            break;
        int64_t now = now_ms();
        bool with_processes = now - checked_at >= CHECK_MS;
        if (with_processes)
            checked_at = now;
        RETURN_IF_ERROR(check_exchange(comm, with_processes, now >= deadline));
        int64_t left = deadline - now;
        sleep_until_woken(&shared->members[comm->rank], wakeups, left < CHECK_MS ? (int)left + 1 : CHECK_MS);
    }
    for (int rank = 0; rank < comm->ranks; rank++)
        joining->all[rank] = shared->members[rank].exchange[comm->exchanges % 2];
    joining->exchange_count = ++comm->exchanges;
    joining->has_exchanged = true;
    return ncclSuccess;
}

static bool has_posted_for(struct joining *const *joinings, size_t count, const struct comm *parent)
{
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->parent == parent && joinings[i]->has_posted && !joinings[i]->has_exchanged)
            return true;
    return false;
}

/* One thread may have several ranks, so it posts the records of all parents before it waits for any. A second record of the
 * same parent is posted in the next round. */
static ncclResult_t exchange_all(struct joining **joinings, size_t count)
{
    for (bool is_done = false; !is_done;) {
        is_done = true;
        for (size_t i = 0; i < count; i++)
            if (joinings[i]->parent && !joinings[i]->has_posted && !has_posted_for(joinings, count, joinings[i]->parent))
                post_record(joinings[i]);
        for (size_t i = 0; i < count; i++)
            if (joinings[i]->has_posted && !joinings[i]->has_exchanged) {
                RETURN_IF_ERROR(read_records(joinings[i]));
                is_done = false;
            }
    }
    return ncclSuccess;
}

static uint64_t mix(uint64_t state, uint64_t word)
{
    state = (state ^ word) + UINT64_C(0x9e3779b97f4a7c15);
    state = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    state = (state ^ state >> 27) * UINT64_C(0x94d049bb133111eb);
    return state ^ state >> 31;
}

/* The same words give the same id on every rank. */
static void derive_id(struct id_content *id, const struct comm *parent, const uint64_t *words, size_t count)
{
    uint64_t halves[2];
    memcpy(halves, parent->id.name, sizeof halves);
    for (size_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++)
            halves[half] = mix(halves[half] + (uint64_t)half, words[i]);
    memcpy(id->name, halves, sizeof halves);
}

/* Computes rank, size and id of the new communicator from the exchanged records. */
static ncclResult_t resolve_joining(struct joining *joining)
{
    struct comm *comm = joining->comm, *parent = joining->parent;
    if (!comm->ranks) { /* a split */
        if (joining->mine.color == NO_COLOR) {
            retire(comm);
            joining->comm = *joining->handle = NULL;
            return ncclSuccess;
        }
        for (int rank = 0; rank < parent->ranks; rank++) {
            const struct exchange_record *other = &joining->all[rank];
            if (other->color != joining->mine.color)
                continue;
            comm->ranks++;
            comm->rank += other->key < joining->mine.key || (other->key == joining->mine.key && rank < parent->rank);
        }
        const uint64_t words[] = {'s', joining->exchange_count, (uint64_t)joining->mine.color};
        derive_id(&comm->id, parent, words, 3);
        return ncclSuccess;
    }
    int root = 0;
    while (root < parent->ranks && !joining->all[root].has_id)
        root++;
    if (root == parent->ranks)
        return fail(ncclInvalidUsage, "no rank passed the unique id of the grown communicator");
    return read_id(&joining->all[root].id, &comm->id);
}

ncclResult_t exchange_records(struct joining **joinings, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->parent)
            RETURN_IF_ERROR(check_comm(joinings[i]->parent));
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->parent)
            joinings[i]->parent->users++; /* keeps the communicator from being destroyed */
    ncclResult_t result = exchange_all(joinings, count);
    for (size_t i = 0; i < count; i++) {
        struct comm *parent = joinings[i]->parent;
        if (parent && result == ncclSuccess)
            result = resolve_joining(joinings[i]);
        if (parent)
            parent->users--;
    }
    return result;
}

/* ---- Calls. ---- */

/* Checks the arguments that split, shrink and grow share. */
static ncclResult_t check_parent(struct comm *parent, struct comm **handle, const ncclConfig_t *config)
{
    RETURN_IF_ERROR(check_comm(parent));
    if (!handle)
        return fail(ncclInvalidArgument, "the argument for the new communicator is NULL");
    if (parent->is_suspended)
        return fail(ncclInvalidUsage, "the communicator is suspended");
    return check_config(config);
}

static ncclResult_t split(struct comm *parent, int color, int key, struct comm **handle, const ncclConfig_t *config)
{
    struct joining *joining;
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    if (color < NO_COLOR)
        return fail(ncclInvalidArgument, "color %d is negative", color);
    RETURN_IF_ERROR(new_joining(handle, 0, 0, parent, &joining));
    joining->parent = parent;
    joining->mine = (struct exchange_record){.color = color, .key = key};
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommSplit(struct comm *comm, int color, int key, struct comm **handle, ncclConfig_t *config)
{
    return note_group_error(split(comm, color, key, handle, config));
}

static ncclResult_t shrink(struct comm *parent, const int *excluded, int count, struct comm **handle,
                           const ncclConfig_t *config, int flags)
{
    enum { ABORT = 1 };
    bool is_excluded[MAX_RANKS] = {false};
    struct joining *joining;
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    if (parent->ranks > MAX_RANKS)
        return fail(ncclInvalidArgument, "%d ranks: a simulated communicator of more than %d cannot shrink", parent->ranks,
                    MAX_RANKS);
    if (count < 0 || (count > 0 && !excluded))
        return fail(ncclInvalidArgument, "%d excluded ranks, but no list of them", count);
    for (int i = 0; i < count; i++) {
        if (excluded[i] < 0 || excluded[i] >= parent->ranks)
            return fail(ncclInvalidArgument, "there is no rank %d to exclude", excluded[i]);
        is_excluded[excluded[i]] = true;
    }
    if (is_excluded[parent->rank])
        return fail(ncclInvalidUsage, "rank %d is excluded and must not take part", parent->rank);
    if (flags & ABORT)
        stop_operations(parent);
    RETURN_IF_ERROR(new_joining(handle, 0, 0, parent, &joining));
    /* Excluded ranks may be dead, so the ranks cannot exchange records; each computes the same id. */
    uint64_t words[MAX_RANKS + 2] = {'r', ++parent->children};
    for (int rank = 0; rank < parent->ranks; rank++) {
        words[rank + 2] = is_excluded[rank];
        joining->comm->ranks += !is_excluded[rank];
        joining->comm->rank += !is_excluded[rank] && rank < parent->rank;
    }
    derive_id(&joining->comm->id, parent, words, (size_t)parent->ranks + 2);
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommShrink(struct comm *comm, int *excluded, int count, struct comm **handle, ncclConfig_t *config,
                                   int flags)
{
    return note_group_error(shrink(comm, excluded, count, handle, config, flags));
}

EXPORT ncclResult_t ncclCommGetUniqueId(struct comm *comm, ncclUniqueId *id)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (comm->has_growth_id)
        return fail(ncclInvalidUsage, "the last unique id of this communicator was not used to grow it yet");
    RETURN_IF_ERROR(ncclGetUniqueId(id));
    comm->has_growth_id = true;
    return ncclSuccess;
}

static ncclResult_t grow(struct comm *parent, int ranks, const ncclUniqueId *id, int rank, struct comm **handle,
                         const ncclConfig_t *config)
{
    struct joining *joining;
    if (!parent) {
        if (!id || !handle)
            return fail(ncclInvalidArgument, "a new rank needs the unique id");
        return init_rank(handle, ranks, id, rank, config);
    }
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    RETURN_IF_ERROR(check_rank(parent->rank, ranks));
    if (rank != -1 && rank != parent->rank)
        return fail(ncclInvalidArgument, "rank %d stays rank %d; it cannot become %d", parent->rank, parent->rank, rank);
    if (ranks <= parent->ranks)
        return fail(ncclInvalidArgument, "a communicator of %d ranks can only grow to more, not to %d", parent->ranks, ranks);
    RETURN_IF_ERROR(new_joining(handle, parent->rank, ranks, parent, &joining));
    joining->parent = parent;
    joining->mine.has_id = id != NULL;
    if (id)
        joining->mine.id = *id;
    parent->has_growth_id = false;
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommGrow(struct comm *comm, int ranks, const ncclUniqueId *id, int rank, struct comm **handle,
                                 ncclConfig_t *config)
{
    return note_group_error(grow(comm, ranks, id, rank, handle, config));
}
