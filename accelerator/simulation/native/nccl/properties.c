/* NCCL: what a program can ask about a communicator. */
#include "nccl.h"

EXPORT ncclResult_t ncclCommGetAsyncError(struct comm *comm, ncclResult_t *error)
{
    RETURN_IF_ERROR(not_null(error, "error"));
    RETURN_IF_ERROR(not_null(comm, "comm"));
    comm->users++; /* keeps the communicator from being destroyed */
    ncclResult_t result = check_comm(comm);
    if (result == ncclSuccess)
        *error = (ncclResult_t)comm->asynchronous_error;
    comm->users--;
    return result;
}

EXPORT ncclResult_t ncclCommCount(const struct comm *comm, int *count)
{
    RETURN_IF_ERROR(not_null(count, "count"));
    RETURN_IF_ERROR(check_comm(comm));
    *count = comm->ranks;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const struct comm *comm, int *device)
{
    RETURN_IF_ERROR(not_null(device, "device"));
    RETURN_IF_ERROR(check_comm(comm));
    *device = comm->device;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const struct comm *comm, int *rank)
{
    RETURN_IF_ERROR(not_null(rank, "rank"));
    RETURN_IF_ERROR(check_comm(comm));
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommMemStats(struct comm *comm, int statistic, uint64_t *value)
{
    enum { SUSPENDABLE, IS_SUSPENDED, PERSISTENT, TOTAL };
    RETURN_IF_ERROR(not_null(value, "value"));
    RETURN_IF_ERROR(check_comm(comm));
    if (statistic < SUSPENDABLE || statistic > TOTAL)
        return fail(ncclInvalidArgument, "there is no statistic %d", statistic);
    *value = statistic == IS_SUSPENDED ? comm->is_suspended : 0; /* NCCL uses no device memory here */
    return ncclSuccess;
}
