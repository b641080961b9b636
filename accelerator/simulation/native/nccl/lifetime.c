/* NCCL: how a communicator is destroyed, aborted, finalized, revoked, suspended. */
#include "nccl.h"

ncclResult_t stop_operations(struct comm *comm)
{
    comm->users++; /* keeps the communicator from being destroyed */
    ncclResult_t result = check_comm(comm);
    if (result == ncclSuccess)
        comm->is_revoked = true;
    if (result == ncclSuccess && !comm->is_alone) {
        comm->shared->members[comm->rank].state = MEMBER_REVOKED;
        wake_all(comm->shared);
        stop_worker(comm);
    }
    comm->users--;
    return result;
}

static ncclResult_t leave(struct comm *comm, enum member_state state)
{
    if (comm && comm->fork_generation != fork_generation)
        return ncclSuccess; /* a forked child must not touch its parent's communicators */
    if (!comm || !close_comm(comm))
        return fail(ncclInvalidArgument, "the communicator is NULL or was destroyed");
    if (state == MEMBER_ABORTED) {
        comm->is_aborted = true;
        if (!comm->is_alone)
            wake(&comm->shared->members[comm->rank]);
    }
    while (comm->users > 0)
        pause_briefly();
    if (state == MEMBER_LEFT)
        drain(comm);
    stop_worker(comm);
    detach(comm, state);
    retire(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(struct comm *comm)
{
    return comm ? leave(comm, MEMBER_LEFT) : ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(struct comm *comm)
{
    return comm ? leave(comm, MEMBER_ABORTED) : ncclSuccess;
}

EXPORT ncclResult_t ncclCommFinalize(struct comm *comm)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (comm->is_revoked || comm->is_finalized)
        return fail(ncclInvalidUsage, "the communicator was %s before", comm->is_revoked ? "revoked" : "finalized");
    comm->is_finalized = true;
    drain(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommRevoke(struct comm *comm, int flags)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (flags != 0)
        return fail(ncclInvalidArgument, "the flags of ncclCommRevoke must be 0, not %d", flags);
    if (comm->is_revoked)
        return fail(ncclInvalidUsage, "the communicator was revoked before");
    return stop_operations(comm);
}

EXPORT ncclResult_t ncclCommSuspend(struct comm *comm, int flags)
{
    enum { MEMORY = 1 };
    RETURN_IF_ERROR(check_comm(comm));
    if (flags != MEMORY || comm->is_suspended)
        return fail(ncclInvalidUsage, comm->is_suspended ? "the communicator is suspended" : "unknown flags %d", flags);
    comm->is_suspended = true;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommResume(struct comm *comm)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (!comm->is_suspended)
        return fail(ncclInvalidUsage, "the communicator is not suspended");
    comm->is_suspended = false;
    return ncclSuccess;
}
