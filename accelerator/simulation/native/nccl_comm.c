/* NCCL: communicators: initialization and destruction. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COMM_MAGIC 0x6d6d6f63u

enum { CONFIG_MAGIC = (int)0xcafebeef };

/* Destroyed communicators stay allocated, so that a late call with one gets an error. */
static struct comm *retired_comms;
static pthread_mutex_t retired_lock = PTHREAD_MUTEX_INITIALIZER;

void reset_retired_lock(void)
{
    pthread_mutex_init(&retired_lock, NULL);
}

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

ncclResult_t not_null(const void *pointer, const char *name)
{
    return pointer ? ncclSuccess : note_group_error(fail(ncclInvalidArgument, "the argument '%s' is NULL", name));
}

void pause_briefly(void)
{
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static struct comm *new_comm(int rank, int ranks)
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

/* ---- Initialization. ---- */

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

void open_comm(struct comm *comm)
{
    comm->magic = COMM_MAGIC;
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

ncclResult_t init_rank(struct comm **handle, int ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config)
{
    struct joining *joining;
    struct id_content content;
    RETURN_IF_ERROR(check_rank(rank, ranks));
    RETURN_IF_ERROR(check_config(config));
    RETURN_IF_ERROR(read_id(id, &content));
    RETURN_IF_ERROR(new_joining(handle, rank, ranks, NULL, &joining));
    joining->comm->id = content;
    ncclResult_t result = check_creator(joining->comm); /* first, because its file may still be there */
    if (result == ncclSuccess)
        return submit_joining(joining);
    abandon_joining(joining);
    free(joining);
    return result;
}

EXPORT ncclResult_t ncclCommInitRankConfig(struct comm **comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    return note_group_error(init_rank(comm, ranks, &id, rank, config));
}

EXPORT ncclResult_t ncclCommInitRank(struct comm **comm, int ranks, ncclUniqueId id, int rank)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    return note_group_error(init_rank(comm, ranks, &id, rank, NULL));
}

EXPORT ncclResult_t ncclCommInitRankScalable(struct comm **comm, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                             ncclConfig_t *config)
{
    RETURN_IF_ERROR(not_null(comm, "comm"));
    RETURN_IF_ERROR(not_null(ids, "ids"));
    if (id_count < 1 || id_count > ranks)
        return note_group_error(fail(ncclInvalidArgument, "%d unique ids for %d ranks; pass from 1 to %d", id_count, ranks,
                                     ranks));
    return note_group_error(init_rank(comm, ranks, ids, rank, config));
}

EXPORT ncclResult_t ncclCommInitAll(struct comm **comms, int count, const int *devices)
{
    ncclUniqueId id;
    int device;
    struct gpu_identity gpu;
    RETURN_IF_ERROR(not_null(comms, "comms"));
    RETURN_IF_ERROR(check_rank(0, count));
    RETURN_IF_ERROR(current_device(&device, &gpu));
    RETURN_IF_ERROR(ncclGetUniqueId(&id));
    group_start();
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < count && result == ncclSuccess; rank++) {
        result = use_device(devices ? devices[rank] : rank);
        if (result == ncclSuccess)
            result = init_rank(&comms[rank], count, &id, rank, NULL);
        note_group_error(result);
    }
    use_device(device);
    return group_end(true);
}

/* ---- Destruction. ---- */

void stop_operations(struct comm *comm)
{
    comm->is_revoked = true;
    if (comm->is_alone)
        return;
    comm->shared->members[comm->rank].state = MEMBER_REVOKED;
    wake_all(comm->shared);
    stop_worker(comm);
}

static ncclResult_t leave(struct comm *comm, enum member_state state)
{
    if (comm && comm->fork_generation != fork_generation)
        return ncclSuccess; /* a forked child must not touch its parent's communicators */
    uint32_t live = COMM_MAGIC;
    if (!comm || !atomic_compare_exchange_strong(&comm->magic, &live, 0))
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
    stop_operations(comm);
    return ncclSuccess;
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
