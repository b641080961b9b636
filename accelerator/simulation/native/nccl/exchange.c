/* NCCL: records that the ranks of a communicator exchange to make others of it. */
#include "nccl.h"

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

/* Computes rank, size and id of the new communicator from the exchanged records. */
static ncclResult_t resolve_joining(struct joining *joining)
{
    struct comm *comm = joining->comm, *parent = joining->parent;
    if (!comm->ranks) { /* a split */
        if (joining->mine.color == SPLIT_NO_COLOR) {
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
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->parent)
            joinings[i]->parent->users++; /* keeps the communicator from being destroyed */
    for (size_t i = 0; i < count && result == ncclSuccess; i++)
        if (joinings[i]->parent)
            result = check_comm(joinings[i]->parent);
    if (result == ncclSuccess)
        result = exchange_all(joinings, count);
    for (size_t i = 0; i < count; i++) {
        struct comm *parent = joinings[i]->parent;
        if (parent && result == ncclSuccess)
            result = resolve_joining(joinings[i]);
        if (parent)
            parent->users--;
    }
    return result;
}
