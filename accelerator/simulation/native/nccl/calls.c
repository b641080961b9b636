/* NCCL: the version, and the calls of collectives, messages and groups, which all pass `communicate`. */
#include "nccl.h"

enum { VERSION = 23007 };

EXPORT const char accelerator_simulation[] = "nccl";

EXPORT ncclResult_t ncclGetVersion(int *version)
{
    if (!version)
        return fail(ncclInvalidArgument, "ncclGetVersion: the argument is NULL");
    *version = VERSION;
    return ncclSuccess;
}

static ncclResult_t communicate(struct operation operation)
{
    ncclResult_t result = check_usable(operation.comm);
    if (result == ncclSuccess && (unsigned)operation.type >= TYPE_COUNT)
        result = fail(ncclInvalidArgument, "there is no type %d", (int)operation.type);
    if (result == ncclSuccess && (operation.root < 0 || operation.root >= operation.comm->ranks))
        result = fail(ncclInvalidArgument, "there is no rank %d among %d", operation.root, operation.comm->ranks);
    if (result == ncclSuccess && operation.reduction < 0)
        result = fail(ncclInvalidArgument, "there is no reduction %d", operation.reduction);
    if (result == ncclSuccess)
        result = use_factor(&operation);
    if (result == ncclSuccess && operation.count > SIZE_MAX / 8 / MAX_RANKS)
        result = fail(ncclInvalidArgument, "a count of %zu is too large", operation.count);
    if (result == ncclSuccess && operation.count > 0 &&
        ((has_source(&operation) && !operation.source) || (has_target(&operation) && !operation.target)))
        result = fail(ncclInvalidArgument, "a buffer is NULL");
    if (result == ncclSuccess && operation.count == 0)
        return ncclSuccess; /* NCCL does not wait for the other ranks either */
    if (result == ncclSuccess)
        result = submit(&operation);
    return note_group_error(result);
}

EXPORT ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, int type, int reduction, struct comm *comm,
                                  void *stream)
{
    return communicate((struct operation){.code = ALL_REDUCE, .comm = comm, .stream = stream, .source = source,
                                          .target = target, .count = count, .type = (enum data_type)type,
                                          .reduction = reduction});
}

EXPORT ncclResult_t ncclReduce(const void *source, void *target, size_t count, int type, int reduction, int root,
                               struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = REDUCE, .comm = comm, .stream = stream, .source = source, .target = target,
                                          .count = count, .type = (enum data_type)type, .reduction = reduction, .root = root});
}

EXPORT ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, int type, int reduction,
                                      struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = REDUCE_SCATTER, .comm = comm, .stream = stream, .source = source,
                                          .target = target, .count = count, .type = (enum data_type)type,
                                          .reduction = reduction});
}

/* Calls without a reduction. */
static ncclResult_t move(enum operation_code code, const void *source, void *target, size_t count, int type, int root,
                         struct comm *comm, void *stream)
{
    return communicate((struct operation){.code = code, .comm = comm, .stream = stream, .source = source, .target = target,
                                          .count = count, .type = (enum data_type)type, .root = root});
}

EXPORT ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                                  void *stream)
{
    return move(BROADCAST, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return move(BROADCAST, buffer, buffer, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAllGather(const void *source, void *target, size_t count, int type, struct comm *comm, void *stream)
{
    return move(ALL_GATHER, source, target, count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, int type, struct comm *comm, void *stream)
{
    return move(ALL_TO_ALL, source, target, count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclGather(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                               void *stream)
{
    return move(GATHER, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclScatter(const void *source, void *target, size_t count, int type, int root, struct comm *comm,
                                void *stream)
{
    return move(SCATTER, source, target, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void *source, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return move(SEND, source, NULL, count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclRecv(void *target, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return move(RECEIVE, NULL, target, count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclGroupStart(void)
{
    group_start();
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void)
{
    return group_end(true);
}

EXPORT ncclResult_t ncclGroupSimulateEnd(void *info)
{
    struct {
        size_t size;
        unsigned magic, version;
        float time;
    } *estimate = info;
    if (estimate)
        estimate->time = 0;
    return group_end(false);
}
