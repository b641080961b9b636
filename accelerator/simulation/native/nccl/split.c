/* NCCL: communicators made of other communicators: split, shrink, grow. The calls; exchange.c, and for a rank that is rehearsed
 * alone rehearsal.c, decide which ranks belong to the new one. */
#include "nccl.h"

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
    if (color < SPLIT_NO_COLOR)
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
        RETURN_IF_ERROR(stop_operations(parent));
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
