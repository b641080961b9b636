/* NCCL: time limits, wakeups between ranks, and failures that end a communicator. */
#include "nccl.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

int64_t read_timeout_ms(void)
{
    enum { DEFAULT_TIMEOUT_S = 600 };
    const char *text = getenv("ACCELERATOR_SIM_NCCL_TIMEOUT");
    char *end;
    double seconds = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(seconds > 0 && seconds < 1e9))
        seconds = DEFAULT_TIMEOUT_S;
    return (int64_t)(seconds * 1000);
}

/* ---- Wakeups. ---- */

void wake(struct member *member)
{
    member->wakeups++;
    /* The sleeper counts itself before the kernel compares the futex, so one of the two notices the other. */
    if (member->sleepers)
        syscall(SYS_futex, &member->wakeups, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void wake_all(struct shared_state *shared)
{
    for (int rank = 0; rank < shared->ranks; rank++)
        wake(&shared->members[rank]);
}

void sleep_until_woken(struct member *member, uint32_t wakeups, int milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    member->sleepers++;
    syscall(SYS_futex, &member->wakeups, FUTEX_WAIT, wakeups, &time, NULL, 0);
    member->sleepers--;
}

/* ---- Failures. ---- */

const char *departure(enum member_state state)
{
    return state == MEMBER_ABORTED ? "aborted" : state == MEMBER_REVOKED ? "revoked" : "left";
}

ncclResult_t report_failure(struct comm *comm)
{
    uint64_t failure = comm->shared->failure;
    enum failure_reason reason = (enum failure_reason)(failure & 0xff);
    int culprit = (int)(failure >> 8 & 0xffff), witness = (int)(failure >> 24 & 0xffff);
    comm->asynchronous_error = reason == MISMATCH ? ncclInvalidUsage : ncclRemoteError;
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone (noticed by rank %d)", comm->rank, culprit,
                    witness);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d gave up waiting for rank %d (ACCELERATOR_SIM_NCCL_TIMEOUT)", comm->rank,
                    witness, culprit);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d left the communicator while rank %d waited for it", comm->rank, culprit,
                    witness);
    default:
        return fail(ncclInvalidUsage, "rank %d: ranks %d and %d did not make the same call", comm->rank, witness, culprit);
    }
}

ncclResult_t break_communicator(struct comm *comm, enum failure_reason reason, int culprit, const char *what)
{
    uint64_t none = 0, failure = (uint64_t)reason | (uint64_t)culprit << 8 | (uint64_t)comm->rank << 24;
    bool is_first = atomic_compare_exchange_strong(&comm->shared->failure, &none, failure);
    if (is_first)
        wake_all(comm->shared);
    if (!is_first && reason != MISMATCH)
        return report_failure(comm);
    comm->asynchronous_error = reason == MISMATCH ? ncclInvalidUsage : ncclRemoteError;
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone; %s waited for it", comm->rank, culprit, what);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d did not come to %s within %g s (ACCELERATOR_SIM_NCCL_TIMEOUT)",
                    comm->rank, culprit, what, (double)comm->timeout_ms / 1000);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d has %s the communicator; %s waited for it", comm->rank, culprit,
                    departure((enum member_state)comm->shared->members[culprit].state), what);
    default:
        return ncclInvalidUsage; /* the caller describes the mismatch */
    }
}
