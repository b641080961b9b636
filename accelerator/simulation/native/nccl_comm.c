/* NCCL: communicators come and go. */
#define _GNU_SOURCE
#include "nccl.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COMM_MAGIC 0x6d6d6f63u
#define ID_MAGIC "accsim\n" /* with its final zero eight bytes */

enum { ID_MAGIC_SIZE = 8, NO_COLOR = -1, CONFIG_MAGIC = (int)0xcafebeef };

/* Communicators that are gone stay allocated, so that a late call with one is told so. */
static struct comm *retired_comms;
static pthread_mutex_t retired_lock = PTHREAD_MUTEX_INITIALIZER;

bool is_comm(const struct comm *comm)
{
    return comm && comm->magic == COMM_MAGIC && comm->fork_generation == fork_generation;
}

static ncclResult_t check_comm(const struct comm *comm)
{
    if (is_comm(comm))
        return ncclSuccess;
    if (comm && comm->magic == COMM_MAGIC)
        return fail(ncclInvalidUsage, "the communicator belongs to the process that this one was forked from");
    return fail(ncclInvalidArgument, "the communicator is NULL, was destroyed or is not ready yet");
}

#define RETURN_IF_ERROR(expression)                                                                                    \
    do {                                                                                                               \
        ncclResult_t error_ = (expression);                                                                            \
        if (error_ != ncclSuccess)                                                                                     \
            return error_;                                                                                             \
    } while (0)

#define NOT_NULL(pointer)                                                                                              \
    do {                                                                                                               \
        if (!(pointer))                                                                                                \
            return note_group_error(fail(ncclInvalidArgument, "%s: " #pointer " is NULL", __func__));                   \
    } while (0)

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static struct comm *new_comm(int rank, int ranks)
{
    struct comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return NULL;
    pthread_mutex_init(&comm->lock, NULL);
    comm->fork_generation = fork_generation;
    comm->rank = rank;
    comm->ranks = ranks;
    return comm;
}

static void retire(struct comm *comm)
{
    free(comm->factors);
    comm->factors = NULL;
    comm->factor_count = 0;
    pthread_mutex_lock(&retired_lock);
    comm->next = retired_comms;
    retired_comms = comm;
    pthread_mutex_unlock(&retired_lock);
}

/* ---- Names. ---- */

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    NOT_NULL(id);
    memset(id, 0, sizeof *id);
    memcpy(id->internal, ID_MAGIC, ID_MAGIC_SIZE);
    new_id((unsigned char *)id->internal + ID_MAGIC_SIZE);
    return ncclSuccess;
}

static ncclResult_t read_id(const ncclUniqueId *id, unsigned char bytes[ID_SIZE])
{
    if (memcmp(id->internal, ID_MAGIC, ID_MAGIC_SIZE) != 0)
        return fail(ncclInvalidArgument, "the unique id is not one of this library: did every rank get the same bytes?");
    memcpy(bytes, id->internal + ID_MAGIC_SIZE, ID_SIZE);
    return ncclSuccess;
}

static uint64_t mix(uint64_t state, uint64_t word)
{
    state = (state ^ word) + UINT64_C(0x9e3779b97f4a7c15);
    state = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    state = (state ^ state >> 27) * UINT64_C(0x94d049bb133111eb);
    return state ^ state >> 31;
}

/* The same words give the same id on every rank. */
static void derive_id(unsigned char id[ID_SIZE], const struct comm *parent, const uint64_t *words, size_t count)
{
    uint64_t halves[2];
    memcpy(halves, parent->id, sizeof halves);
    for (size_t i = 0; i < count; i++)
        for (int half = 0; half < 2; half++)
            halves[half] = mix(halves[half] + (uint64_t)half, words[i]);
    memcpy(id, halves, sizeof halves);
}

/* ---- Joining. ---- */

void abandon_joining(struct joining *joining)
{
    if (!joining->comm)
        return;
    detach(joining->comm, MEMBER_LEFT);
    retire(joining->comm);
    joining->comm = NULL;
    *joining->handle = NULL;
}

/* From what the parent's ranks said: who is in the new communicator, and under which name they meet. */
static ncclResult_t resolve_joining(struct joining *joining)
{
    struct comm *comm = joining->comm, *parent = joining->parent;
    if (!comm->ranks) { /* a split */
        if (joining->mine.color == NO_COLOR) {
            retire(comm);
            joining->comm = *joining->handle = NULL;
            return ncclSuccess;
        }
        for (int rank = 0; rank < parent->ranks; rank++) {
            const struct exchange_record *other = &joining->all[rank];
            if (other->color != joining->mine.color)
                continue;
            comm->ranks++;
            comm->rank += other->key < joining->mine.key || (other->key == joining->mine.key && rank < parent->rank);
        }
        const uint64_t words[] = {'s', parent->exchanges, (uint64_t)joining->mine.color};
        derive_id(comm->id, parent, words, 3);
        return ncclSuccess;
    }
    int root = 0;
    while (root < parent->ranks && !joining->all[root].has_id)
        root++;
    if (root == parent->ranks)
        return fail(ncclInvalidUsage, "no rank gave the unique id under which the communicator is to grow");
    return read_id(&joining->all[root].id, comm->id);
}

static ncclResult_t exchange(struct joining **joinings, size_t count)
{
    struct batch batch = {calloc(count, sizeof(struct operation)), 0, count};
    if (!batch.operations)
        return fail(ncclSystemError, "out of memory");
    for (size_t i = 0; i < count; i++)
        if (joinings[i]->parent)
            batch.operations[batch.count++] = (struct operation){
                .code = EXCHANGE, .comm = joinings[i]->parent, .mine = &joinings[i]->mine, .all = joinings[i]->all};
    ncclResult_t result = run_batch(&batch);
    free(batch.operations);
    for (size_t i = 0; i < count && result == ncclSuccess; i++)
        if (joinings[i]->parent)
            result = resolve_joining(joinings[i]);
    return result;
}

static ncclResult_t check_gpus(const struct comm *comm)
{
    const struct member *members = comm->shared->members;
    for (int i = 0; i < comm->ranks; i++)
        for (int j = i + 1; j < comm->ranks; j++)
            if (memcmp(members[i].gpu, members[j].gpu, UUID_SIZE) == 0)
                return fail(ncclInvalidUsage, "duplicate GPU: ranks %d and %d are on the same one; each rank needs its own", i, j);
    return ncclSuccess;
}

static ncclResult_t report_missing(const struct comm *comm)
{
    double seconds = (double)timeout_ms() / 1000;
    for (int rank = 0; comm->shared && rank < comm->ranks; rank++)
        if (comm->shared->members[rank].state == MEMBER_ABSENT)
            return break_communicator((struct comm *)comm, LATE, rank, "the communicator's start");
    return fail(ncclRemoteError, "rank %d: rank 0 did not start the communicator within %g s (ACCELERATOR_SIM_NCCL_TIMEOUT)",
                comm->rank, seconds);
}

/* Whether all ranks are there now. */
static ncclResult_t try_to_join(struct joining *joining, bool with_check, bool *is_complete)
{
    struct comm *comm = joining->comm;
    if (!joining->is_attached)
        RETURN_IF_ERROR(attach(comm, &joining->is_attached));
    if (!joining->is_attached)
        return ncclSuccess;
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
    return ncclSuccess;
}

static ncclResult_t wait_for_members(struct joining **joinings, size_t count)
{
    enum { CHECK_MS = 50 };
    const int64_t deadline = now_ms() + timeout_ms();
    for (int64_t checked_at = now_ms();;) {
        bool are_all_complete = true, with_check = now_ms() - checked_at >= CHECK_MS;
        if (with_check)
            checked_at = now_ms();
        for (size_t i = 0; i < count; i++) {
            bool is_complete = !joinings[i]->comm;
            if (!is_complete)
                RETURN_IF_ERROR(try_to_join(joinings[i], with_check, &is_complete));
            if (!is_complete && now_ms() >= deadline)
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
    ncclResult_t result = exchange(joinings, count);
    if (result == ncclSuccess)
        result = wait_for_members(joinings, count);
    for (size_t i = 0; i < count; i++) {
        if (result != ncclSuccess)
            abandon_joining(joinings[i]);
        else if (joinings[i]->comm)
            joinings[i]->comm->magic = COMM_MAGIC;
    }
    return result;
}

static ncclResult_t check_config(const ncclConfig_t *config)
{
    if (config && (config->size < sizeof *config || config->magic != (unsigned)CONFIG_MAGIC))
        return fail(ncclInvalidArgument, "the configuration was not initialized with NCCL_CONFIG_INITIALIZER");
    return ncclSuccess;
}

static ncclResult_t check_rank(int rank, int ranks)
{
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return fail(ncclInvalidArgument, "rank %d of %d ranks", rank, ranks);
    if (ranks > MAX_RANKS)
        return fail(ncclInvalidArgument, "%d ranks: a simulated communicator has at most %d", ranks, MAX_RANKS);
    return ncclSuccess;
}

/* Allocates a communicator-to-be on the parent's device, or without a parent on the current one. */
static ncclResult_t new_joining(struct comm **handle, int rank, int ranks, struct comm *parent, struct joining **joining)
{
    *handle = NULL;
    *joining = calloc(1, sizeof **joining);
    struct comm *comm = new_comm(rank, ranks);
    ncclResult_t result = *joining && comm ? ncclSuccess : fail(ncclSystemError, "out of memory");
    if (result == ncclSuccess && !parent)
        result = current_device(&comm->device, comm->gpu);
    if (result != ncclSuccess) {
        free(comm);
        free(*joining);
        return result;
    }
    if (parent) {
        comm->device = parent->device;
        memcpy(comm->gpu, parent->gpu, UUID_SIZE);
    }
    (*joining)->comm = *handle = comm;
    (*joining)->handle = handle;
    return ncclSuccess;
}

static ncclResult_t init_rank(struct comm **handle, int ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config)
{
    struct joining *joining;
    unsigned char bytes[ID_SIZE] = {0};
    RETURN_IF_ERROR(check_rank(rank, ranks));
    RETURN_IF_ERROR(check_config(config));
    RETURN_IF_ERROR(read_id(id, bytes));
    RETURN_IF_ERROR(new_joining(handle, rank, ranks, NULL, &joining));
    memcpy(joining->comm->id, bytes, ID_SIZE);
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommInitRankConfig(struct comm **comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    NOT_NULL(comm);
    return note_group_error(init_rank(comm, ranks, &id, rank, config));
}

EXPORT ncclResult_t ncclCommInitRank(struct comm **comm, int ranks, ncclUniqueId id, int rank)
{
    NOT_NULL(comm);
    return note_group_error(init_rank(comm, ranks, &id, rank, NULL));
}

EXPORT ncclResult_t ncclCommInitRankScalable(struct comm **comm, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                             ncclConfig_t *config)
{
    NOT_NULL(comm);
    NOT_NULL(ids);
    if (id_count < 1 || id_count > ranks)
        return note_group_error(fail(ncclInvalidArgument, "%d unique ids for %d ranks", id_count, ranks));
    return note_group_error(init_rank(comm, ranks, ids, rank, config));
}

EXPORT ncclResult_t ncclCommInitAll(struct comm **comms, int count, const int *devices)
{
    ncclUniqueId id;
    int device;
    unsigned char gpu[UUID_SIZE];
    NOT_NULL(comms);
    RETURN_IF_ERROR(check_rank(0, count));
    RETURN_IF_ERROR(current_device(&device, gpu));
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

/* Before a communicator is made of another one. */
static ncclResult_t check_parent(struct comm *parent, struct comm **handle, const ncclConfig_t *config)
{
    RETURN_IF_ERROR(check_comm(parent));
    if (!handle)
        return fail(ncclInvalidArgument, "there is no place for the new communicator");
    if (parent->is_suspended)
        return fail(ncclInvalidUsage, "the communicator is suspended");
    return check_config(config);
}

static ncclResult_t split(struct comm *parent, int color, int key, struct comm **handle, const ncclConfig_t *config)
{
    struct joining *joining;
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    if (color < NO_COLOR)
        return fail(ncclInvalidArgument, "color %d is negative", color);
    RETURN_IF_ERROR(new_joining(handle, 0, 0, parent, &joining));
    joining->parent = parent;
    joining->mine = (struct exchange_record){.color = color, .key = key};
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommSplit(struct comm *comm, int color, int key, struct comm **handle, ncclConfig_t *config)
{
    return note_group_error(split(comm, color, key, handle, config));
}

static void stop_operations(struct comm *comm)
{
    comm->is_revoked = true;
    comm->shared->members[comm->rank].state = MEMBER_REVOKED;
    wake_all(comm->shared);
    while (comm->users > 0)
        pause_briefly();
}

static ncclResult_t shrink(struct comm *parent, const int *excluded, int count, struct comm **handle,
                           const ncclConfig_t *config, int flags)
{
    enum { ABORT = 1 };
    bool is_excluded[MAX_RANKS] = {false};
    struct joining *joining;
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    if (count < 0 || (count > 0 && !excluded))
        return fail(ncclInvalidArgument, "the list of excluded ranks is missing");
    for (int i = 0; i < count; i++) {
        if (excluded[i] < 0 || excluded[i] >= parent->ranks)
            return fail(ncclInvalidArgument, "there is no rank %d to exclude", excluded[i]);
        is_excluded[excluded[i]] = true;
    }
    if (is_excluded[parent->rank])
        return fail(ncclInvalidUsage, "rank %d is excluded and must not take part", parent->rank);
    if (flags & ABORT)
        stop_operations(parent);
    RETURN_IF_ERROR(new_joining(handle, 0, 0, parent, &joining));
    /* The excluded may be dead, so nothing can be exchanged: each rank works out the same. */
    uint64_t words[MAX_RANKS + 2] = {'r', ++parent->children};
    for (int rank = 0; rank < parent->ranks; rank++) {
        words[rank + 2] = is_excluded[rank];
        joining->comm->ranks += !is_excluded[rank];
        joining->comm->rank += !is_excluded[rank] && rank < parent->rank;
    }
    derive_id(joining->comm->id, parent, words, (size_t)parent->ranks + 2);
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommShrink(struct comm *comm, int *excluded, int count, struct comm **handle, ncclConfig_t *config,
                                   int flags)
{
    return note_group_error(shrink(comm, excluded, count, handle, config, flags));
}

EXPORT ncclResult_t ncclCommGetUniqueId(struct comm *comm, ncclUniqueId *id)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (comm->has_growth_id)
        return fail(ncclInvalidUsage, "the communicator has not grown by its last unique id yet");
    RETURN_IF_ERROR(ncclGetUniqueId(id));
    comm->has_growth_id = true;
    return ncclSuccess;
}

static ncclResult_t grow(struct comm *parent, int ranks, const ncclUniqueId *id, int rank, struct comm **handle,
                         const ncclConfig_t *config)
{
    struct joining *joining;
    if (!parent) {
        if (!id || !handle)
            return fail(ncclInvalidArgument, "a new rank needs the unique id");
        return init_rank(handle, ranks, id, rank, config);
    }
    RETURN_IF_ERROR(check_parent(parent, handle, config));
    RETURN_IF_ERROR(check_rank(parent->rank, ranks));
    if (rank != -1 && rank != parent->rank)
        return fail(ncclInvalidArgument, "rank %d keeps its number, it cannot become %d", parent->rank, rank);
    if (ranks <= parent->ranks)
        return fail(ncclInvalidArgument, "%d ranks are no more than the %d there are", ranks, parent->ranks);
    RETURN_IF_ERROR(new_joining(handle, parent->rank, ranks, parent, &joining));
    joining->parent = parent;
    joining->mine.has_id = id != NULL;
    if (id)
        joining->mine.id = *id;
    parent->has_growth_id = false;
    return submit_joining(joining);
}

EXPORT ncclResult_t ncclCommGrow(struct comm *comm, int ranks, const ncclUniqueId *id, int rank, struct comm **handle,
                                 ncclConfig_t *config)
{
    return note_group_error(grow(comm, ranks, id, rank, handle, config));
}

/* ---- Leaving. ---- */

static ncclResult_t leave(struct comm *comm, enum member_state state)
{
    if (comm && comm->fork_generation != fork_generation)
        return ncclSuccess; /* a forked child tidies up what is its parent's */
    uint32_t live = COMM_MAGIC;
    if (!comm || !atomic_compare_exchange_strong(&comm->magic, &live, 0))
        return fail(ncclInvalidArgument, "the communicator is NULL or was destroyed");
    if (state == MEMBER_ABORTED) {
        comm->is_aborted = true;
        wake(&comm->shared->members[comm->rank]);
    }
    while (comm->users > 0)
        pause_briefly();
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
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommRevoke(struct comm *comm, int flags)
{
    RETURN_IF_ERROR(check_comm(comm));
    if (flags != 0)
        return fail(ncclInvalidArgument, "the flags of a revocation must be 0");
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

/* ---- Questions. ---- */

EXPORT ncclResult_t ncclCommGetAsyncError(struct comm *comm, ncclResult_t *error)
{
    NOT_NULL(error);
    NOT_NULL(comm);
    comm->users++; /* it cannot be taken down meanwhile */
    ncclResult_t result = check_comm(comm);
    if (result == ncclSuccess) {
        if (comm->asynchronous_error == ncclSuccess && comm->shared->failure)
            report_failure(comm);
        *error = (ncclResult_t)comm->asynchronous_error;
    }
    comm->users--;
    return result;
}

EXPORT ncclResult_t ncclCommCount(const struct comm *comm, int *count)
{
    NOT_NULL(count);
    RETURN_IF_ERROR(check_comm(comm));
    *count = comm->ranks;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const struct comm *comm, int *device)
{
    NOT_NULL(device);
    RETURN_IF_ERROR(check_comm(comm));
    *device = comm->device;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const struct comm *comm, int *rank)
{
    NOT_NULL(rank);
    RETURN_IF_ERROR(check_comm(comm));
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommMemStats(struct comm *comm, int statistic, uint64_t *value)
{
    enum { SUSPENDABLE, IS_SUSPENDED, PERSISTENT, TOTAL };
    NOT_NULL(value);
    RETURN_IF_ERROR(check_comm(comm));
    if (statistic < SUSPENDABLE || statistic > TOTAL)
        return fail(ncclInvalidArgument, "there is no statistic %d", statistic);
    *value = statistic == IS_SUSPENDED ? comm->is_suspended : 0; /* nothing is taken from the GPU */
    return ncclSuccess;
}
