/* NCCL: doing the work.
 *
 * A collective goes in steps, each as large as a slot: every rank writes its part into its own slot, and when all have,
 * takes what it needs out of the others'. One barrier a step is enough, for slots and announcements have two halves: who
 * writes step k has seen all ranks arrive at step k - 1, so all are done with k - 2. Messages go through the pair's mailbox.
 *
 * Whatever can move on does, of all operations of a batch together; a thread sleeps on its rank's wakeups only when nothing
 * can, and looks every 100 ms whether the ranks it waits for are still there. */
#define _GNU_SOURCE
#include "nccl.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CHECK_MS = 100, SEVERAL_BELLS_MS = 1, DEFAULT_TIMEOUT_S = 600 };

static const char *const code_names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll",
                                    "Gather",    "Scatter", "Send",      "Recv",      "Split"};

int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

int64_t timeout_ms(void)
{
    const char *text = getenv("ACCELERATOR_SIM_NCCL_TIMEOUT");
    char *end;
    double seconds = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !(seconds > 0 && seconds < 1e9))
        seconds = DEFAULT_TIMEOUT_S;
    return (int64_t)(seconds * 1000);
}

/* ---- Bells. ---- */

void wake(struct member *member)
{
    member->wakeups++;
    /* The sleeper says that it listens before the kernel looks at the wakeups, so one of the two sees the other. */
    if (member->sleepers)
        syscall(SYS_futex, &member->wakeups, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void wake_all(struct shared_state *shared)
{
    for (int rank = 0; rank < shared->ranks; rank++)
        wake(&shared->members[rank]);
}

static void sleep_until_woken(struct member *member, uint32_t wakeups, int milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    member->sleepers++;
    syscall(SYS_futex, &member->wakeups, FUTEX_WAIT, wakeups, &time, NULL, 0);
    member->sleepers--;
}

/* ---- Failures. ---- */

static struct member *own_member(const struct comm *comm)
{
    return &comm->shared->members[comm->rank];
}

const char *departure(enum member_state state)
{
    return state == MEMBER_ABORTED ? "aborted" : state == MEMBER_REVOKED ? "revoked" : "left";
}

ncclResult_t report_failure(struct comm *comm)
{
    uint64_t failure = comm->shared->failure;
    enum failure_reason reason = (enum failure_reason)(failure & 0xff);
    int culprit = (int)(failure >> 8 & 0xffff), witness = (int)(failure >> 24 & 0xffff);
    comm->asynchronous_error = ncclRemoteError;
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone (seen by rank %d)", comm->rank, culprit, witness);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d gave up waiting for rank %d (ACCELERATOR_SIM_NCCL_TIMEOUT)", comm->rank,
                    witness, culprit);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d left the communicator while rank %d waited for it", comm->rank, culprit,
                    witness);
    default:
        comm->asynchronous_error = ncclInvalidUsage;
        return fail(ncclInvalidUsage, "rank %d: ranks %d and %d did not call the same", comm->rank, witness, culprit);
    }
}

ncclResult_t break_communicator(struct comm *comm, enum failure_reason reason, int culprit, const char *what)
{
    uint64_t none = 0, failure = (uint64_t)reason | (uint64_t)culprit << 8 | (uint64_t)comm->rank << 24;
    if (!atomic_compare_exchange_strong(&comm->shared->failure, &none, failure))
        return report_failure(comm);
    wake_all(comm->shared);
    comm->asynchronous_error = reason == MISMATCH ? ncclInvalidUsage : ncclRemoteError;
    switch (reason) {
    case GONE:
        return fail(ncclRemoteError, "rank %d: the process of rank %d is gone; it was awaited in %s", comm->rank, culprit, what);
    case LATE:
        return fail(ncclRemoteError, "rank %d: rank %d did not come to %s within %g s (ACCELERATOR_SIM_NCCL_TIMEOUT)",
                    comm->rank, culprit, what, (double)timeout_ms() / 1000);
    case LEFT:
        return fail(ncclRemoteError, "rank %d: rank %d has %s the communicator; it was awaited in %s", comm->rank, culprit,
                    departure((enum member_state)comm->shared->members[culprit].state), what);
    default:
        return ncclInvalidUsage; /* the caller has told more about it */
    }
}

/* ---- Collectives. ---- */

static char *slot(const struct comm *comm, int rank)
{
    const struct shared_state *shared = comm->shared;
    return (char *)shared + shared->slots + (size_t)rank * shared->slot_size + (comm->steps % 2) * (shared->slot_size / 2);
}

/* Whether a rank writes a piece of its own for each other rank. */
static bool has_pieces(enum operation_code code)
{
    return code == REDUCE_SCATTER || code == ALL_TO_ALL || code == SCATTER;
}

static bool only_root_sends(enum operation_code code)
{
    return code == BROADCAST || code == SCATTER;
}

static bool only_root_receives(enum operation_code code)
{
    return code == REDUCE || code == GATHER;
}

static size_t elements_a_step(const struct operation *operation)
{
    const struct comm *comm = operation->comm;
    size_t pieces = has_pieces(operation->code) ? (size_t)comm->ranks : 1;
    size_t most = comm->shared->slot_size / 2 / pieces / type_size(operation->type), left = operation->count - operation->done;
    return left < most ? left : most;
}

static struct announcement announce(const struct operation *operation)
{
    int reduction = operation->reduction < FIRST_MULTIPLIED ? operation->reduction : FIRST_MULTIPLIED;
    return (struct announcement){operation->count, (int)operation->code, (int)operation->type, reduction, operation->root};
}

static void write_slot(const struct operation *operation, size_t elements)
{
    const struct comm *comm = operation->comm;
    if (only_root_sends(operation->code) && operation->root != comm->rank)
        return;
    size_t size = type_size(operation->type);
    char *target = slot(comm, comm->rank);
    const char *source = operation->source + operation->done * size;
    const struct factor *factor = &operation->factor;
    for (int i = 0; i < (has_pieces(operation->code) ? comm->ranks : 1); i++) {
        if (factor->is_used)
            multiply(target, source, elements, operation->type, factor->address ? factor->address : factor->value);
        else
            memcpy(target, source, elements * size);
        target += elements * size;
        source += operation->count * size;
    }
}

static void read_slots(const struct operation *operation, size_t elements)
{
    const struct comm *comm = operation->comm;
    if (only_root_receives(operation->code) && operation->root != comm->rank)
        return;
    size_t size = type_size(operation->type);
    size_t piece = has_pieces(operation->code) ? (size_t)comm->rank * elements * size : 0;
    char *target = operation->target + operation->done * size, *sources[MAX_RANKS];
    for (int rank = 0; rank < comm->ranks; rank++)
        sources[rank] = slot(comm, rank) + piece;
    switch (operation->code) {
    case ALL_REDUCE:
    case REDUCE:
    case REDUCE_SCATTER:
        reduce(target, sources, comm->ranks, elements, operation->type, operation->reduction);
        break;
    case BROADCAST:
    case SCATTER:
        memcpy(target, sources[operation->root], elements * size);
        break;
    default:
        for (int rank = 0; rank < comm->ranks; rank++)
            memcpy(target + (size_t)rank * operation->count * size, sources[rank], elements * size);
    }
}

static ncclResult_t compare_announcements(const struct operation *operation)
{
    const struct comm *comm = operation->comm;
    const struct announcement mine = announce(operation);
    for (int rank = 0; rank < comm->ranks; rank++) {
        const struct announcement *other = &comm->shared->members[rank].announced[comm->steps % 2];
        if (memcmp(other, &mine, sizeof mine) == 0)
            continue;
        const char *name = other->code >= 0 && other->code < COLLECTIVE_COUNT ? code_names[other->code] : "?";
        return fail(ncclInvalidUsage,
                    "the ranks do not call the same: rank %d %s(count %llu, type %d, op %d, root %d),"
                    " rank %d %s(count %llu, type %d, op %d, root %d)",
                    comm->rank, code_names[mine.code], (unsigned long long)mine.count, mine.type, mine.reduction, mine.root, rank,
                    name, (unsigned long long)other->count, other->type, other->reduction, other->root);
    }
    return ncclSuccess;
}

/* Says that this rank has arrived, to all that sleep if it is the last to. */
static void arrive(const struct comm *comm, _Atomic uint64_t *total, _Atomic uint64_t *own)
{
    bool is_last = (atomic_fetch_add(total, 1) + 1) % (uint64_t)comm->ranks == 0;
    ++*own;
    if (is_last)
        for (int rank = 0; rank < comm->ranks; rank++)
            if (rank != comm->rank)
                wake(&comm->shared->members[rank]);
}

static bool have_all_arrived(const struct comm *comm, _Atomic uint64_t *total, uint64_t step)
{
    return *total >= (uint64_t)comm->ranks * (step + 1);
}

static ncclResult_t advance_collective(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct member *member = own_member(comm);
    size_t elements = elements_a_step(operation);
    if (!operation->is_posted) {
        member->announced[comm->steps % 2] = announce(operation);
        write_slot(operation, elements);
        arrive(comm, &comm->shared->steps, &member->steps);
        operation->is_posted = *has_progressed = true;
    }
    if (!have_all_arrived(comm, &comm->shared->steps, comm->steps))
        return ncclSuccess;
    ncclResult_t result = operation->has_started ? ncclSuccess : compare_announcements(operation);
    if (result == ncclSuccess)
        read_slots(operation, elements);
    comm->steps++;
    operation->is_posted = false;
    operation->has_started = *has_progressed = true;
    operation->done += elements;
    *is_done = operation->done == operation->count;
    return result;
}

/* The ranks' words to each other that make a new communicator: steps of their own, which nothing that went wrong with the
 * data disturbs. */
static ncclResult_t advance_exchange(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct shared_state *shared = comm->shared;
    size_t half = comm->exchanges % 2;
    if (!operation->is_posted) {
        own_member(comm)->exchange[half] = *operation->mine;
        arrive(comm, &shared->exchanges, &own_member(comm)->exchanges);
        operation->is_posted = *has_progressed = true;
    }
    if (have_all_arrived(comm, &shared->exchanges, comm->exchanges)) {
        for (int rank = 0; rank < comm->ranks; rank++)
            operation->all[rank] = shared->members[rank].exchange[half];
        comm->exchanges++;
        *is_done = *has_progressed = true;
    }
    return ncclSuccess;
}

/* ---- Messages. ---- */

static struct mailbox *mailbox(const struct comm *comm, int from, int to)
{
    struct shared_state *shared = comm->shared;
    size_t size = sizeof(struct mailbox) + shared->mailbox_size;
    return (struct mailbox *)((char *)shared + shared->mailboxes + ((size_t)from * (size_t)comm->ranks + (size_t)to) * size);
}

/* Copies between a buffer and the ring, which the place may run over the end of. */
static void copy_in(struct mailbox *box, size_t capacity, uint64_t place, const char *source, size_t size)
{
    size_t at = place % capacity, first = size < capacity - at ? size : capacity - at;
    memcpy(box->data + at, source, first);
    memcpy(box->data, source + first, size - first);
}

static void copy_out(const struct mailbox *box, size_t capacity, uint64_t place, char *target, size_t size)
{
    size_t at = place % capacity, first = size < capacity - at ? size : capacity - at;
    memcpy(target, box->data + at, first);
    memcpy(target + first, box->data, size - first);
}

static void advance_send(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct mailbox *box = mailbox(comm, comm->rank, operation->root);
    size_t capacity = comm->shared->mailbox_size, total = operation->count * type_size(operation->type);
    uint64_t written = box->written;
    size_t space = capacity - (size_t)(written - box->read);
    if (!operation->has_started) {
        uint64_t header = total;
        if (space < sizeof header)
            return;
        copy_in(box, capacity, written, (const char *)&header, sizeof header);
        written += sizeof header;
        space -= sizeof header;
        operation->has_started = true;
    }
    size_t size = total - operation->done < space ? total - operation->done : space;
    if (size > 0)
        copy_in(box, capacity, written, operation->source + operation->done, size);
    operation->done += size;
    *is_done = operation->done == total;
    if (written + size == box->written)
        return;
    box->written = written + size;
    wake(&comm->shared->members[operation->root]);
    *has_progressed = true;
}

static ncclResult_t advance_receive(struct operation *operation, bool *has_progressed, bool *is_done)
{
    struct comm *comm = operation->comm;
    struct mailbox *box = mailbox(comm, operation->root, comm->rank);
    size_t capacity = comm->shared->mailbox_size, total = operation->count * type_size(operation->type);
    uint64_t read = box->read;
    size_t available = (size_t)(box->written - read);
    if (!operation->has_started) {
        uint64_t header;
        if (available < sizeof header)
            return ncclSuccess;
        copy_out(box, capacity, read, (char *)&header, sizeof header);
        if (header != total) {
            break_communicator(comm, MISMATCH, operation->root, "Recv");
            return fail(ncclInvalidUsage, "rank %d sends %llu bytes to rank %d, which receives %zu", operation->root,
                        (unsigned long long)header, comm->rank, total);
        }
        read += sizeof header;
        available -= sizeof header;
        operation->has_started = true;
    }
    size_t size = total - operation->done < available ? total - operation->done : available;
    if (size > 0)
        copy_out(box, capacity, read, operation->target + operation->done, size);
    operation->done += size;
    *is_done = operation->done == total;
    if (read + size == box->read)
        return ncclSuccess;
    box->read = read + size;
    wake(&comm->shared->members[operation->root]);
    *has_progressed = true;
    return ncclSuccess;
}

/* ---- Batches. ---- */

static struct queue *queue_of(struct operation *operation)
{
    struct comm *comm = operation->comm;
    switch (operation->code) {
    case SEND:
        return &comm->sends[operation->root];
    case RECEIVE:
        return &comm->receives[operation->root];
    case EXCHANGE:
        return &comm->exchanging;
    default:
        return &comm->collectives;
    }
}

static void append(struct queue *queue, struct operation *operation)
{
    operation->next = NULL;
    if (queue->first)
        queue->last->next = operation;
    else
        queue->first = operation;
    queue->last = operation;
}

static ncclResult_t advance_queue(struct queue *queue, bool *has_progressed)
{
    ncclResult_t result = ncclSuccess;
    bool is_done = true;
    while (queue->first && is_done && result == ncclSuccess) {
        struct operation *operation = queue->first;
        is_done = false;
        switch (operation->code) {
        case SEND:
            advance_send(operation, has_progressed, &is_done);
            break;
        case RECEIVE:
            result = advance_receive(operation, has_progressed, &is_done);
            break;
        case EXCHANGE:
            result = advance_exchange(operation, has_progressed, &is_done);
            break;
        default:
            result = advance_collective(operation, has_progressed, &is_done);
        }
        if (is_done)
            queue->first = operation->next;
    }
    return result;
}

static ncclResult_t advance(struct comm *comm, bool *has_progressed, bool *is_idle)
{
    ncclResult_t result = advance_queue(&comm->collectives, has_progressed);
    if (result == ncclSuccess)
        result = advance_queue(&comm->exchanging, has_progressed);
    *is_idle = *is_idle && !comm->collectives.first && !comm->exchanging.first;
    for (int peer = 0; peer < comm->ranks && result == ncclSuccess; peer++) {
        advance_queue(&comm->sends[peer], has_progressed);
        result = advance_queue(&comm->receives[peer], has_progressed);
        *is_idle = *is_idle && !comm->sends[peer].first && !comm->receives[peer].first;
    }
    return result;
}

/* What this rank waits for the other one in, or NULL. */
static const char *awaited_in(const struct comm *comm, int rank)
{
    struct member *member = &comm->shared->members[rank];
    if (rank == comm->rank)
        return NULL;
    if (comm->collectives.first && member->steps <= comm->steps)
        return code_names[comm->collectives.first->code];
    if (comm->exchanging.first && member->exchanges <= comm->exchanges)
        return code_names[EXCHANGE];
    struct mailbox *box = mailbox(comm, comm->rank, rank);
    if (comm->sends[rank].first && box->written - box->read >= comm->shared->mailbox_size - sizeof(uint64_t))
        return code_names[SEND];
    box = mailbox(comm, rank, comm->rank);
    if (comm->receives[rank].first && box->written == box->read)
        return code_names[RECEIVE];
    return NULL;
}

/* Ends the wait if one of those it is for cannot come any more. */
static ncclResult_t check_peers(struct comm *comm, bool with_processes, bool is_late)
{
    for (int rank = 0; rank < comm->ranks; rank++) {
        if (!awaited_in(comm, rank))
            continue;
        int state = comm->shared->members[rank].state;
        bool has_left = state != MEMBER_PRESENT && !(state == MEMBER_REVOKED && comm->exchanging.first);
        bool is_gone = !has_left && with_processes && is_process_gone(comm, rank);
        /* What it did before it went counts. */
        const char *what = awaited_in(comm, rank);
        if (what && (has_left || is_gone || is_late))
            return break_communicator(comm, has_left ? LEFT : is_gone ? GONE : LATE, rank, what);
    }
    return ncclSuccess;
}

/* A revoked communicator can still have children. */
static ncclResult_t check_while_running(struct comm *comm, bool is_exchange)
{
    if (comm->is_aborted)
        return fail(ncclInternalError, "rank %d: the communicator was aborted", comm->rank);
    if (comm->is_revoked && !is_exchange)
        return fail(ncclInvalidUsage, "rank %d: the communicator was revoked", comm->rank);
    return ncclSuccess;
}

static ncclResult_t work(struct comm *const *comms, int count)
{
    int64_t progressed_at = now_ms(), checked_at = progressed_at;
    const int64_t timeout = timeout_ms();
    for (;;) {
        /* Read before the queues are examined, so that no wakeup in between is missed. */
        uint32_t wakeups = own_member(comms[0])->wakeups;
        bool has_progressed = false, is_idle = true;
        for (int i = 0; i < count; i++) {
            ncclResult_t result = check_while_running(comms[i], comms[i]->exchanging.first);
            if (result == ncclSuccess)
                result = advance(comms[i], &has_progressed, &is_idle);
            if (result != ncclSuccess)
                return result;
        }
        if (is_idle)
            return ncclSuccess;
        int64_t now = now_ms();
        if (has_progressed) {
            progressed_at = now;
            continue;
        }
        bool with_processes = now - checked_at >= CHECK_MS;
        if (with_processes)
            checked_at = now;
        for (int i = 0; i < count; i++) {
            bool has_failed = comms[i]->shared->failure != 0 && !comms[i]->exchanging.first;
            ncclResult_t result = has_failed ? report_failure(comms[i]) : ncclSuccess;
            if (result == ncclSuccess)
                result = check_peers(comms[i], with_processes, now - progressed_at >= timeout);
            if (result != ncclSuccess)
                return result;
        }
        int64_t left = progressed_at + timeout - now;
        sleep_until_woken(own_member(comms[0]), wakeups, count > 1 ? SEVERAL_BELLS_MS : left < CHECK_MS ? (int)left + 1 : CHECK_MS);
    }
}

static void clear_queues(struct comm *comm)
{
    comm->collectives.first = comm->exchanging.first = NULL;
    for (int peer = 0; peer < comm->ranks; peer++)
        comm->sends[peer].first = comm->receives[peer].first = NULL;
}

/* The batch's communicators, each once, in the order of their addresses, in which everybody locks them. */
static int list_comms(const struct batch *batch, struct comm **comms)
{
    int count = 0;
    for (size_t i = 0; i < batch->count; i++) {
        struct comm *comm = batch->operations[i].comm;
        int at = count;
        while (at > 0 && comms[at - 1] > comm)
            at--;
        if (at > 0 && comms[at - 1] == comm)
            continue;
        memmove(comms + at + 1, comms + at, (size_t)(count - at) * sizeof *comms);
        comms[at] = comm;
        count++;
    }
    return count;
}

ncclResult_t run_batch(struct batch *batch)
{
    if (batch->count == 0)
        return ncclSuccess;
    struct comm *few[8], **comms = few;
    if (batch->count > sizeof few / sizeof *few && !(comms = malloc(batch->count * sizeof *comms)))
        return fail(ncclSystemError, "out of memory");
    int count = list_comms(batch, comms), entered = 0;
    ncclResult_t result = ncclSuccess;
    while (entered < count && result == ncclSuccess) {
        struct comm *comm = comms[entered++];
        comm->users++;
        if (!is_comm(comm)) {
            comm->users--;
            entered--;
            result = fail(ncclInvalidArgument, "the communicator was destroyed");
            break;
        }
        pthread_mutex_lock(&comm->lock);
        bool is_exchange = batch->operations[0].code == EXCHANGE;
        result = check_while_running(comm, is_exchange);
        if (result == ncclSuccess && !is_exchange && comm->shared->failure)
            result = report_failure(comm);
    }
    if (result == ncclSuccess) {
        for (size_t i = 0; i < batch->count; i++) {
            struct operation *operation = &batch->operations[i];
            operation->done = 0;
            operation->is_posted = operation->has_started = false;
            append(queue_of(operation), operation);
        }
        result = work(comms, count);
        for (int i = 0; i < count; i++) {
            /* What is left half done cannot be taken up again; a single call that did not fit was refused by all. */
            if (result == ncclInvalidUsage && batch->count > 1 && !comms[i]->is_revoked)
                break_communicator(comms[i], MISMATCH, comms[i]->rank, "a group");
            clear_queues(comms[i]);
        }
    }
    while (entered > 0) {
        pthread_mutex_unlock(&comms[--entered]->lock);
        comms[entered]->users--;
    }
    if (comms != few)
        free(comms);
    return result;
}
