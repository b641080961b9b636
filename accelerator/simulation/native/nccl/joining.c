/* NCCL: joining of ranks, the end of each initialization and split: a communicator is complete when all of its ranks have
 * attached, or fails when they come too late. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

enum { CONFIG_MAGIC = (int)0xcafebeef };

void abandon_joining(struct joining *joining)
{
    if (!joining->comm)
        return;
    detach(joining->comm, MEMBER_LEFT);
    retire(joining->comm);
    joining->comm = NULL;
    *joining->handle = NULL;
}

static ncclResult_t check_gpus(const struct comm *comm)
{
    const struct member *members = comm->shared->members;
    for (int i = 0; i < comm->ranks; i++)
        for (int j = i + 1; j < comm->ranks; j++)
            if (memcmp(&members[i].gpu, &members[j].gpu, sizeof members[i].gpu) == 0) {
                char uuid[UUID_TEXT_SIZE];
                format_uuid(&members[i].gpu, uuid);
                return fail(ncclInvalidUsage, "two ranks, %d and %d, on %s; each rank needs a GPU of its own", i, j, uuid);
            }
    return ncclSuccess;
}

static ncclResult_t report_missing(const struct comm *comm)
{
    for (int rank = 0; comm->shared && rank < comm->ranks; rank++)
        if (comm->shared->members[rank].state == MEMBER_ABSENT)
            return break_communicator((struct comm *)comm, LATE, rank, "the communicator's start");
    return fail(ncclRemoteError, "rank %d: rank 0 did not start the communicator within %g s (" SETTING_NCCL_TIMEOUT ")",
                comm->rank, (double)comm->timeout_ms / 1000);
}

/* Attaches if possible, and checks whether all ranks are attached. */
static ncclResult_t try_to_join(struct joining *joining, bool with_check, bool *is_complete)
{
    struct comm *comm = joining->comm;
    if (!joining->is_attached)
        RETURN_IF_ERROR(attach(comm, &joining->is_attached));
    if (!joining->is_attached)
        return with_check ? check_creator(comm) : ncclSuccess;
    struct shared_state *shared = comm->shared;
    *is_complete = shared->attached == comm->ranks;
    if (*is_complete)
        return ncclSuccess;
    if (shared->failure)
        return report_failure(comm);
    for (int rank = 0; with_check && rank < comm->ranks; rank++) {
        int state = shared->members[rank].state;
        if (state > MEMBER_PRESENT)
            return break_communicator(comm, LEFT, rank, "the communicator's start");
        if (state == MEMBER_PRESENT && is_process_gone(comm, rank) && shared->members[rank].state == MEMBER_PRESENT)
            return break_communicator(comm, GONE, rank, "the communicator's start");
    }
    return with_check ? check_creator(comm) : ncclSuccess;
}

static ncclResult_t wait_for_members(struct joining **joinings, size_t count)
{
    enum { CHECK_MS = 50 };
    const int64_t begin = now_ms();
    for (int64_t checked_at = begin;;) {
        bool are_all_complete = true, with_check = now_ms() - checked_at >= CHECK_MS;
        if (with_check)
            checked_at = now_ms();
        for (size_t i = 0; i < count; i++) {
            bool is_complete = !joinings[i]->comm;
            if (!is_complete)
                RETURN_IF_ERROR(try_to_join(joinings[i], with_check, &is_complete));
            if (!is_complete && now_ms() - begin >= joinings[i]->comm->timeout_ms)
                return report_missing(joinings[i]->comm);
            are_all_complete = are_all_complete && is_complete;
        }
        if (are_all_complete)
            break;
        pause_briefly();
    }
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->comm)
            RETURN_IF_ERROR(check_gpus(joinings[i]->comm));
    return ncclSuccess;
}

ncclResult_t join_all(struct joining **joinings, size_t count)
{
    ncclResult_t result = exchange_records(joinings, count);
    if (result == ncclSuccess)
        result = wait_for_members(joinings, count);
    for (size_t i = 0; i < count; i++) {
        if (result != ncclSuccess)
            abandon_joining(joinings[i]);
        else if (joinings[i]->comm)
            open_comm(joinings[i]->comm);
    }
    return result;
}

ncclResult_t check_config(const ncclConfig_t *config)
{
    if (config && (config->size < sizeof *config || config->magic != (unsigned)CONFIG_MAGIC))
        return fail(ncclInvalidArgument, "the configuration was not initialized with NCCL_CONFIG_INITIALIZER");
    return ncclSuccess;
}

ncclResult_t check_rank(int rank, int ranks)
{
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return fail(ncclInvalidArgument, "rank %d is out of range for a communicator of %d ranks", rank, ranks);
    if (ranks > MAX_RANKS && !is_alone())
        return fail(ncclInvalidArgument, "%d ranks: a simulated communicator has at most %d", ranks, MAX_RANKS);
    return ncclSuccess;
}

/* Allocates a new communicator on the parent's device, or on the current device if there is no parent. */
ncclResult_t new_joining(struct comm **handle, int rank, int ranks, struct comm *parent, struct joining **joining)
{
    *handle = NULL;
    *joining = calloc(1, sizeof **joining);
    struct comm *comm = new_comm(rank, ranks);
    ncclResult_t result = *joining && comm ? ncclSuccess : fail(ncclSystemError, "out of memory");
    if (result == ncclSuccess && !parent)
        result = current_device(&comm->device, &comm->gpu);
    if (result != ncclSuccess) {
        free(comm);
        free(*joining);
        return result;
    }
    if (parent) {
        comm->device = parent->device;
        comm->gpu = parent->gpu;
    }
    (*joining)->comm = *handle = comm;
    (*joining)->handle = handle;
    return ncclSuccess;
}
