/* The CUDA runtime: the kernel that torch's Work.block_current_stream launches.
 *
 * void c10d::cuda::detail::kernel_barrier(int *value, unsigned long timeout_ms) stops its stream until the host writes 1 to
 * value[0], or until the time is over; 0 means no timeout. It reports its state in value[1]. */
#include "runtime.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { RELEASED = 1 };                        /* what the host writes */
enum { RUNNING = 1, TIMED_OUT = 2, ABORTED = 3 }; /* what the kernel writes */

struct barrier {
    struct pending_queue queue; /* of this one piece of work */
    uint64_t sequence;
    struct pending before;
    int device;
    int64_t not_before;
    _Atomic int32_t *value;
    uint64_t timeout_ms;
};

static void wait_for_host(const struct barrier *barrier)
{
    const int64_t begin = now();
    barrier->value[1] = RUNNING;
    while (barrier->value[0] != RELEASED) {
        int64_t time = now();
        if (barrier->timeout_ms > 0 && (uint64_t)(time - begin) / MILLISECOND >= barrier->timeout_ms) {
            barrier->value[1] = TIMED_OUT;
            return;
        }
        sleep_until(time + MILLISECOND);
    }
    barrier->value[1] = ABORTED;
}

static void *run_barrier(void *argument)
{
    enum { CHECK_MS = 100 };
    struct barrier *barrier = argument;
    enum pending_status status;
    while ((status = pending_wait(&barrier->before, CHECK_MS)) != PENDING_DONE)
        if (status == PENDING_FAILED) /* until the program has aborted its communicator */
            sleep_until(now() + CHECK_MS * MILLISECOND);
    sleep_on_device(barrier->not_before, barrier->device); /* which the error of a fault ends; calls return that error */
    wait_for_host(barrier);
    pending_clear(&barrier->before);
    pending_complete(&barrier->queue, barrier->sequence);
    free(barrier); /* no holder refers to the queue any more */
    return NULL;
}

/* A program's signals are for its own threads. */
static bool start_thread(struct barrier *barrier)
{
    sigset_t all, previous;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    bool has_started = pthread_create(&thread, NULL, run_barrier, barrier) == 0;
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    if (has_started)
        pthread_detach(thread);
    return has_started;
}

static cudaError_t run(struct stream *stream, const struct work *work)
{
    struct barrier *barrier = calloc(1, sizeof *barrier);
    RETURN_UNLESS(barrier, ERROR_OUT_OF_MEMORY);
    barrier->device = stream->device;
    barrier->value = work->barrier.value;
    barrier->timeout_ms = work->barrier.timeout_ms;
    struct stream *outer = set_launching_stream(stream);
    barrier->sequence = pending_submit(&barrier->queue, stream->device, NULL, 0, &barrier->before, &barrier->not_before);
    set_launching_stream(outer);
    if (barrier->sequence != 0 && start_thread(barrier))
        return SUCCESS;
    pending_clear(&barrier->before);
    pending_complete(&barrier->queue, UINT64_MAX);
    free(barrier);
    return ERROR_OUT_OF_MEMORY;
}

const struct work_type barrier_kernel = {.node = "KERNEL", .run = run}; /* it only submits work */

bool is_barrier_kernel(const char *name)
{
    return strcmp(name, "_ZN4c10d4cuda6detail14kernel_barrierEPim") == 0;
}
