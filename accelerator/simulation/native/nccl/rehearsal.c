/* NCCL: rehearsals, in which kernels compute nothing and most memory is never written.
 *
 * Large collectives and messages therefore move no data; small ones do: the sizes and pickles of objects, norms, flags.
 *
 * A rank that is rehearsed without the other ranks of its world has communicators of as many ranks as the program says, but no
 * shared file and no worker. A collective is complete when its call returns, as if every rank had passed what this rank
 * passes. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

/* Whether this thread sends objects, whose pickles are moved whatever their size. */
static _Thread_local bool moves_objects;

EXPORT void accelerator_simulation_move_objects(bool moves)
{
    moves_objects = moves;
}

/* All ranks of a collective, and both of a message, give the same answer. */
bool leaves_data(const struct operation *operation)
{
    return operation->comm->is_rehearsed && !moves_objects && operation->count * type_size(operation->type) > SIM_MAX_COPY;
}

/* The number of ranks of the part of a communicator that the next split makes; 0: unknown. Nobody knows the other ranks' colors,
 * but torch.distributed knows the ranks of the new group. */
static _Atomic int next_split_ranks;

EXPORT void accelerator_simulation_next_split(int ranks)
{
    next_split_ranks = ranks;
}

ncclResult_t join_alone(struct joining *joining)
{
    struct comm *comm = joining->comm;
    if (comm->ranks == 0) { /* a split */
        if (joining->mine.color == SPLIT_NO_COLOR) {
            abandon_joining(joining);
            free(joining);
            return ncclSuccess;
        }
        comm->has_unknown_size = next_split_ranks == 0;
        comm->ranks = comm->has_unknown_size ? joining->parent->ranks : next_split_ranks;
        comm->rank = joining->mine.key >= 0 && joining->mine.key < comm->ranks ? joining->mine.key : 0;
    }
    comm->is_alone = true;
    open_comm(comm);
    free(joining);
    return ncclSuccess;
}

static ncclResult_t combine(const struct operation *operation, const char *source)
{
    int ranks = operation->comm->ranks;
    size_t bytes = operation->count * type_size(operation->type);
    char **sources = malloc((size_t)ranks * sizeof *sources), *input = malloc(bytes);
    if (!sources || !input) {
        free(sources);
        free(input);
        return fail(ncclSystemError, "out of memory");
    }
    memcpy(input, source, bytes); /* the target may be the source */
    const struct factor *factor = &operation->factor;
    if (factor->is_used)
        multiply(input, source, operation->count, operation->type, factor->address ? factor->address : factor->value);
    for (int rank = 0; rank < ranks; rank++)
        sources[rank] = input;
    reduce(operation->target, sources, ranks, operation->count, operation->type, operation->reduction);
    free(sources);
    free(input);
    return ncclSuccess;
}

/* Fills the pieces of the target that the ranks send with the same piece. */
static void repeat(const struct operation *operation, const char *piece, size_t bytes)
{
    const struct comm *comm = operation->comm;
    bool only_own = comm->has_unknown_size;
    for (int rank = only_own ? comm->rank : 0; rank < (only_own ? comm->rank + 1 : comm->ranks); rank++)
        memmove(operation->target + (size_t)rank * bytes, piece, bytes);
}

/* torch gathers lists of tensors by a group of broadcasts, one from each rank, and exchanges lists by sends and receives. What
 * another rank sends in such a group is what this rank broadcasts, or sends to itself. */
static const char *sent_by_other(const struct operation *received, const struct operation *group, size_t count)
{
    enum operation_code code = received->code == RECEIVE ? SEND : BROADCAST;
    for (size_t i = 0; i < count; i++)
        if (group[i].code == code && group[i].root == received->comm->rank && group[i].count == received->count &&
            group[i].type == received->type)
            return group[i].source;
    return NULL;
}

static ncclResult_t complete(const struct operation *operation, const struct operation *group, size_t count)
{
    const struct comm *comm = operation->comm;
    size_t bytes = operation->count * type_size(operation->type);
    const char *own = operation->source + (size_t)comm->rank * bytes;
    bool is_root = operation->root == comm->rank;
    if (bytes > SIM_MAX_COPY)
        return ncclSuccess;
    switch (operation->code) {
    case ALL_REDUCE:
        return combine(operation, operation->source);
    case REDUCE:
        return is_root ? combine(operation, operation->source) : ncclSuccess;
    case REDUCE_SCATTER:
        return combine(operation, own);
    case GATHER:
        if (!is_root)
            return ncclSuccess;
        repeat(operation, operation->source, bytes);
        break;
    case ALL_GATHER:
        repeat(operation, operation->source, bytes);
        break;
    case ALL_TO_ALL:
        repeat(operation, own, bytes);
        break;
    case BROADCAST:
    case RECEIVE: {
        const char *source = is_root && operation->code == BROADCAST ? operation->source : sent_by_other(operation, group, count);
        if (source)
            memmove(operation->target, source, bytes);
        break;
    }
    case SCATTER:
        if (is_root)
            memmove(operation->target, own, bytes);
        break;
    default: /* what is sent reaches nobody */
        break;
    }
    return ncclSuccess;
}

ncclResult_t complete_alone(const struct operation *operations, size_t count)
{
    for (size_t i = 0; i < count; i++)
        RETURN_IF_ERROR(complete(&operations[i], operations, count));
    return ncclSuccess;
}
