/* NCCL: the thread that does a communicator's work.
 *
 * Calls return once their operations are in the communicator's list of jobs; a job is what one call or one group submits.
 * The worker runs the jobs in order. A job starts once its streams have finished their earlier work. All operations of a
 * job advance together. The worker sleeps only when none can advance, and then checks every 100 ms that the ranks it waits
 * for still exist. */
#include "nccl.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECK_MS = 100 };

/* ---- Operations of one job. ---- */

static struct queue *queue_of(struct operation *operation)
{
    struct comm *comm = operation->comm;
    switch (operation->code) {
    case SEND:
        return &comm->sends[operation->root];
    case RECEIVE:
        return &comm->receives[operation->root];
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
        if (operation->code == SEND)
            advance_send(operation, has_progressed, &is_done);
        else if (operation->code == RECEIVE)
            result = advance_receive(operation, has_progressed, &is_done);
        else
            result = advance_collective(operation, has_progressed, &is_done);
        if (is_done)
            queue->first = operation->next;
    }
    return result;
}

static ncclResult_t advance(struct comm *comm, bool *has_progressed, bool *is_idle)
{
    ncclResult_t result = advance_queue(&comm->collectives, has_progressed);
    *is_idle = !comm->collectives.first;
    for (int peer = 0; peer < comm->ranks && result == ncclSuccess; peer++) {
        advance_queue(&comm->sends[peer], has_progressed);
        result = advance_queue(&comm->receives[peer], has_progressed);
        *is_idle = *is_idle && !comm->sends[peer].first && !comm->receives[peer].first;
    }
    return result;
}

/* The name of the operation in which this rank waits for another one, or NULL. */
static const char *awaited_in(const struct comm *comm, int rank)
{
    if (rank == comm->rank)
        return NULL;
    if (comm->collectives.first && comm->shared->members[rank].steps <= comm->steps)
        return operation_kinds[comm->collectives.first->code].name;
    struct mailbox *box = mailbox(comm, comm->rank, rank);
    if (comm->sends[rank].first && box->written - box->read >= comm->shared->mailbox_size - sizeof(uint64_t))
        return operation_kinds[SEND].name;
    box = mailbox(comm, rank, comm->rank);
    if (comm->receives[rank].first && box->written == box->read)
        return operation_kinds[RECEIVE].name;
    return NULL;
}

/* Fails if a rank that this one waits for has left the communicator, has ended, or is late. */
static ncclResult_t check_peers(struct comm *comm, bool with_processes, bool is_late)
{
    for (int rank = 0; rank < comm->ranks; rank++) {
        if (!awaited_in(comm, rank))
            continue;
        bool has_left = comm->shared->members[rank].state != MEMBER_PRESENT;
        bool is_gone = !has_left && with_processes && is_process_gone(comm, rank);
        /* The rank may have arrived just before it left, so check again. */
        const char *what = awaited_in(comm, rank);
        if (what && (has_left || is_gone || is_late))
            return break_communicator(comm, has_left ? LEFT : is_gone ? GONE : LATE, rank, what);
    }
    return ncclSuccess;
}

ncclResult_t check_running(const struct comm *comm)
{
    if (comm->is_aborted)
        return fail(ncclInternalError, "rank %d: the communicator was aborted", comm->rank);
    if (comm->is_revoked)
        return fail(ncclInvalidUsage, "rank %d: the communicator was revoked", comm->rank);
    return ncclSuccess;
}

/* A fault has broken the context of the rank's GPU. Its peers wait until the process ends, or they do. */
static ncclResult_t leave_broken(struct comm *comm)
{
    comm->has_broken = true;
    return ncclUnhandledCudaError;
}

static ncclResult_t run_operations(struct comm *comm)
{
    struct member *member = &comm->shared->members[comm->rank];
    int64_t progressed_at = now_ms(), checked_at = progressed_at;
    for (;;) {
        /* Read before the queues are examined, so that no wakeup in between is lost. */
        uint32_t wakeups = member->wakeups;
        bool has_progressed = false, is_idle = false;
        RETURN_IF_ERROR(check_running(comm));
        const enum device_hold hold = pending_runtime()->hold(comm->device);
        if (hold == BROKEN)
            return leave_broken(comm);
        if (hold == HELD) {
            if (comm->shared->failure != 0)
                return report_failure(comm);
            sleep_until_woken(member, wakeups, CHECK_MS);
            continue;
        }
        RETURN_IF_ERROR(advance(comm, &has_progressed, &is_idle));
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
        if (comm->shared->failure != 0)
            return report_failure(comm);
        RETURN_IF_ERROR(check_peers(comm, with_processes, now - progressed_at >= comm->timeout_ms));
        int64_t left = progressed_at + comm->timeout_ms - now;
        sleep_until_woken(member, wakeups, left < CHECK_MS ? (int)left + 1 : CHECK_MS);
    }
}

/* ---- Jobs. ---- */

static void free_job(struct job *job)
{
    pending_runtime()->clear(&job->before);
    free(job->operations);
    free(job);
}

/* Sleeps until a time of CLOCK_MONOTONIC in nanoseconds. Returns false if the program ends the communicator before. */
static bool sleep_unless_stopped(struct comm *comm, int64_t time)
{
    const struct timespec end = timespec_of(time);
    bool is_over = false;
    pthread_mutex_lock(&comm->lock);
    while (!is_over && !comm->is_aborted && !comm->is_revoked && !comm->is_stopping)
        is_over = pthread_cond_timedwait(&comm->changed, &comm->lock, &end) == ETIMEDOUT;
    pthread_mutex_unlock(&comm->lock);
    return is_over;
}

/* Waits until the streams of a job have finished what was submitted to them before. */
static ncclResult_t wait_for_streams(struct comm *comm, struct job *job)
{
    for (;;) {
        enum pending_status status = pending_runtime()->wait(&job->before, CHECK_MS);
        RETURN_IF_ERROR(check_running(comm));
        if (status == PENDING_DONE)
            break;
        if (pending_runtime()->hold(comm->device) == BROKEN)
            return leave_broken(comm);
        if (comm->shared->failure != 0)
            return report_failure(comm);
        if (status == PENDING_FAILED) /* wait until the program has aborted the other communicator */
            sleep_unless_stopped(comm, (now_ms() + CHECK_MS) * MILLISECOND);
    }
    for (;;) {
        const enum device_hold hold = pending_runtime()->hold(comm->device);
        const int64_t time = now(), next = time + CHECK_MS * MILLISECOND, end = pending_runtime()->end_of(job->not_before);
        RETURN_IF_ERROR(check_running(comm));
        if (hold == BROKEN)
            return leave_broken(comm);
        if (end <= time || comm->is_stopping)
            return ncclSuccess;
        sleep_unless_stopped(comm, end < next ? end : next);
    }
}

static ncclResult_t run_job(struct comm *comm, struct job *job)
{
    RETURN_IF_ERROR(wait_for_streams(comm, job));
    for (size_t i = 0; i < job->count; i++) {
        if (job->operations[i].code < COLLECTIVE_COUNT)
            pending_runtime()->at_collective(comm->device);
        append(queue_of(&job->operations[i]), &job->operations[i]);
    }
    return run_operations(comm);
}

static void *run_worker(void *argument)
{
    struct comm *comm = argument;
    ncclResult_t result = ncclSuccess;
    pthread_mutex_lock(&comm->lock);
    while (result == ncclSuccess) {
        while (!comm->first_job && !comm->is_stopping)
            pthread_cond_wait(&comm->changed, &comm->lock);
        struct job *job = comm->first_job;
        if (!job)
            break;
        pthread_mutex_unlock(&comm->lock);
        result = run_job(comm, job);
        if (result == ncclSuccess)
            pending_runtime()->complete(&comm->work, job->sequence);
        pthread_mutex_lock(&comm->lock);
        if (result == ncclSuccess) {
            comm->first_job = job->next;
            free_job(job);
        }
        pthread_cond_broadcast(&comm->changed);
    }
    comm->has_stopped = true;
    bool has_failed = result != ncclSuccess && !comm->is_aborted && !comm->is_revoked && !comm->has_broken;
    if (has_failed && comm->asynchronous_error == ncclSuccess)
        comm->asynchronous_error = (int)result;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    if (!has_failed)
        return NULL;
    /* The call has returned, and not every program polls ncclCommGetAsyncError. */
    fprintf(stderr, "NCCL (simulated): %s\n", ncclGetLastError(comm));
    /* The streams stay busy until the communicator is aborted, as on a GPU, but here at most for the timeout. */
    if (sleep_unless_stopped(comm, (now_ms() + comm->timeout_ms) * MILLISECOND))
        pending_runtime()->fail(&comm->work);
    return NULL;
}

/* Called with the lock held. */
static ncclResult_t start_worker(struct comm *comm)
{
    sigset_t all, previous;
    if (comm->has_worker)
        return ncclSuccess;
    /* Signals are for the program's own threads; Python's main thread must be woken by Ctrl-C. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    int error = pthread_create(&comm->worker, NULL, run_worker, comm);
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    if (error != 0)
        return fail(ncclSystemError, "cannot start a thread: %s", strerror(error));
    comm->has_worker = true;
    return ncclSuccess;
}

static ncclResult_t add_job(struct comm *comm, struct job *job, void *const *streams, size_t stream_count)
{
    RETURN_IF_ERROR(check_running(comm));
    if (comm->shared->failure != 0)
        return report_failure(comm);
    if (comm->has_stopped)
        return fail(ncclInvalidUsage, "rank %d: the communicator has failed before", comm->rank);
    RETURN_IF_ERROR(start_worker(comm));
    job->sequence =
        pending_runtime()->submit(&comm->work, comm->device, streams, stream_count, &job->before, &job->not_before);
    if (job->sequence == 0)
        return fail(ncclUnhandledCudaError, "a stream is not valid, a kernel was refused, or memory is short");
    if (comm->first_job)
        comm->last_job->next = job;
    else
        comm->first_job = job;
    comm->last_job = job;
    pthread_cond_broadcast(&comm->changed);
    return ncclSuccess;
}

ncclResult_t submit_operations(const struct operation *operations, size_t count, bool in_graph)
{
    struct comm *comm = operations->comm;
    if (is_comm(comm) && comm->is_alone) {
        RETURN_IF_ERROR(check_running(comm));
        return complete_alone(operations, count);
    }
    struct job *job = calloc(1, sizeof *job);
    void **streams = malloc(count * sizeof *streams);
    if (job)
        job->operations = malloc(count * sizeof *operations);
    if (!job || !streams || !job->operations) {
        if (job)
            free(job->operations);
        free(job);
        free(streams);
        return fail(ncclSystemError, "out of memory");
    }
    memcpy(job->operations, operations, count * sizeof *operations);
    job->count = count;
    for (size_t i = 0; i < count; i++)
        streams[i] = operations[i].stream;
    comm->users++; /* keeps the communicator from being destroyed */
    ncclResult_t result = ncclInvalidArgument;
    if (is_comm(comm)) {
        for (size_t i = 0; i < count; i++)
            job->operations[i].is_without_data = leaves_data(&operations[i]);
        pthread_mutex_lock(&comm->lock);
        result = add_job(comm, job, streams, in_graph ? 0 : count);
        pthread_mutex_unlock(&comm->lock);
    } else
        fail(result, "the communicator was destroyed");
    comm->users--;
    if (result != ncclSuccess)
        free_job(job);
    free(streams);
    return result;
}

/* Waits until all jobs are done or one has failed. */
void drain(struct comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    while (comm->has_worker && comm->first_job && !comm->has_stopped)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

/* Ends the worker and releases everything that waits for its unfinished work. */
void stop_worker(struct comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool has_worker = comm->has_worker;
    comm->has_worker = false;
    comm->is_stopping = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    if (!has_worker)
        return;
    wake(&comm->shared->members[comm->rank]);
    pending_runtime()->interrupt();
    pthread_join(comm->worker, NULL);
    pending_runtime()->release(&comm->work);
    for (struct job *job = comm->first_job, *next; job; job = next) {
        next = job->next;
        free_job(job);
    }
    comm->first_job = NULL;
}
