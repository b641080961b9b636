/* NCCL: failures that end a communicator (a rank died, left, or did not come in time), and the words of each. */
#include "nccl.h"

const char *departure(enum member_state state)
{
    return state == MEMBER_ABORTED ? "aborted" : state == MEMBER_REVOKED ? "revoked" : "left";
}

/* Sets the text of the error that this rank gets from the failure, and returns its code. */
static ncclResult_t describe_failure(const struct comm *comm)
{
    uint64_t failure = comm->shared->failure;
    enum failure_reason reason = (enum failure_reason)(failure & 0xff);
    int culprit = (int)(failure >> 8 & 0xffff), witness = (int)(failure >> 24 & 0xffff);
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone (noticed by rank %d)", comm->rank, culprit,
                    witness);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d gave up waiting for rank %d (" SETTING_NCCL_TIMEOUT ")", comm->rank,
                    witness, culprit);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d left the communicator while rank %d waited for it", comm->rank, culprit,
                    witness);
    default:
        return fail(ncclInvalidUsage, "rank %d: ranks %d and %d did not make the same call", comm->rank, witness, culprit);
    }
}

/* As describe_failure, for the rank that ends the communicator. The caller has described a mismatch. */
static ncclResult_t describe_own_failure(const struct comm *comm, enum failure_reason reason, int culprit, const char *what)
{
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone; %s waited for it", comm->rank, culprit, what);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d did not come to %s within %g s (" SETTING_NCCL_TIMEOUT ")",
                    comm->rank, culprit, what, (double)comm->timeout_ms / 1000);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d has %s the communicator; %s waited for it", comm->rank, culprit,
                    departure((enum member_state)comm->shared->members[culprit].state), what);
    default:
        return ncclInvalidUsage;
    }
}

/* Called after the error's text is set: a thread that polls the error reads the text as soon as there is one. */
static ncclResult_t publish(struct comm *comm, ncclResult_t error)
{
    comm->asynchronous_error = (int)error;
    return error;
}

ncclResult_t report_failure(struct comm *comm)
{
    return publish(comm, describe_failure(comm));
}

ncclResult_t break_communicator(struct comm *comm, enum failure_reason reason, int culprit, const char *what)
{
    uint64_t none = 0, failure = (uint64_t)reason | (uint64_t)culprit << 8 | (uint64_t)comm->rank << 24;
    bool is_first = atomic_compare_exchange_strong(&comm->shared->failure, &none, failure);
    if (is_first)
        wake_all(comm->shared);
    if (!is_first && reason != MISMATCH)
        return report_failure(comm);
    return publish(comm, describe_own_failure(comm, reason, culprit, what));
}
