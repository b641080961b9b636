/* NCCL: communicators: making, checking and closing them in this process. */
#include "nccl.h"

#include <stdlib.h>
#include <time.h>

#include "common/fork.h"

#define COMM_MAGIC 0x6d6d6f63u

/* Destroyed communicators stay allocated, so that a late call with one gets an error. */
static struct comm *retired_comms;
RENEWED_LOCK(retired_lock)

bool is_comm(const struct comm *comm)
{
    return comm && comm->magic == COMM_MAGIC && comm->fork_generation == fork_generation;
}

ncclResult_t check_comm(const struct comm *comm)
{
    if (is_comm(comm))
        return ncclSuccess;
    if (comm && comm->magic == COMM_MAGIC)
        return fail(ncclInvalidUsage, "the communicator belongs to the process that this one was forked from");
    return fail(ncclInvalidArgument, "the communicator is NULL, was destroyed or is not ready yet");
}

ncclResult_t check_usable(struct comm *comm)
{
    if (!is_comm(comm))
        return fail(ncclInvalidArgument, "the communicator is NULL, was destroyed or belongs to this process' parent");
    if (comm->is_finalized)
        return fail(ncclInvalidUsage, "the communicator was finalized");
    if (comm->is_suspended)
        return fail(ncclInvalidUsage, "the communicator is suspended");
    return ncclSuccess;
}

void pause_briefly(void)
{
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

struct comm *new_comm(int rank, int ranks)
{
    struct comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return NULL;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&comm->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&comm->lock, NULL);
    comm->fork_generation = fork_generation;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->timeout_ms = read_timeout_ms();
    comm->is_rehearsed = is_rehearsed();
    return comm;
}

void open_comm(struct comm *comm)
{
    comm->magic = COMM_MAGIC;
}

bool close_comm(struct comm *comm)
{
    uint32_t live = COMM_MAGIC;
    return atomic_compare_exchange_strong(&comm->magic, &live, 0);
}

void retire(struct comm *comm)
{
    free(comm->factors);
    comm->factors = NULL;
    comm->factor_count = 0;
    pthread_mutex_lock(&retired_lock);
    comm->next = retired_comms;
    retired_comms = comm;
    pthread_mutex_unlock(&retired_lock);
}
