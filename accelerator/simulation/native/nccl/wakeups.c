/* NCCL: how ranks sleep until other ranks wake them. */
#include "nccl.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* Counts this rank as arrived; the last to arrive wakes the others. */
void arrive(const struct comm *comm, _Atomic uint64_t *total, _Atomic uint64_t *own)
{
    bool is_last = (atomic_fetch_add(total, 1) + 1) % (uint64_t)comm->ranks == 0;
    ++*own;
    if (is_last)
        for (int rank = 0; rank < comm->ranks; rank++)
            if (rank != comm->rank)
                wake(&comm->shared->members[rank]);
}

bool have_all_arrived(const struct comm *comm, _Atomic uint64_t *total, uint64_t step)
{
    return *total >= (uint64_t)comm->ranks * (step + 1);
}
