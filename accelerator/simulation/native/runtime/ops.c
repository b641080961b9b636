/* The CUDA runtime: what the kernels of torch's ops call: the start of an op (waits, errors, faults), and its node in a graph. */
#include "runtime.h"

#include <string.h>

#include "common/arrays.h"
#include "common/fork.h"
#include "interface/boundary.h"

/* Python loops over this call, so that Ctrl-C works; returns ERROR_NOT_READY when the time is over. */
EXPORT cudaError_t accelerator_simulation_wait(void *handle, int ordinal, int milliseconds)
{
    struct stream *stream = find_stream(handle, &driver->devices[ordinal]);
    RETURN_UNLESS(stream, ERROR_INVALID_HANDLE);
    RETURN_IF_ERROR(unless_broken(ordinal));
    if (!stream->capture)
        RETURN_IF_ERROR(unread_launch_error());
    if (stream->capture || stream->pending.count == 0)
        return stream->capture ? SUCCESS : unless_failed(ordinal);
    switch (pending_wait(&stream->pending, milliseconds)) {
    case PENDING_DONE:
        return unless_failed(ordinal);
    case PENDING_FAILED:
        return ERROR_LAUNCH_FAILED;
    default:
        return ERROR_NOT_READY;
    }
}

/* Copies the text of a refused launch whose error is pending, which then is no longer; returns false if there is none. */
EXPORT int accelerator_simulation_refusal(char *text, size_t size)
{
    return driver->read_refusal(text, size);
}

/* Notes the refused launches of this thread, as driver_table.h says. */
EXPORT char *accelerator_simulation_note_refusals(char *target)
{
    return driver->note_refusals(target);
}

/* The engine asks this before an op: whether the stream neither captures nor waits for work, and no error is pending. */
EXPORT int accelerator_simulation_is_stream_free(void *handle, int ordinal)
{
    struct stream *stream = find_stream(handle, &driver->devices[ordinal]);
    return stream && !stream->capture && stream->pending.count == 0 && unread_launch_error() == SUCCESS &&
           unless_failed(ordinal) == SUCCESS;
}

cudaError_t fail_or_delay(struct stream *stream)
{
    const struct fault_effect effect = driver->faults_at_op(driver->devices[stream->device].gpu);
    if (effect.error == SUCCESS && (effect.delay || effect.until)) {
        end_hang_of_stream(stream);
        const int64_t time = now(), begin = stream->idle_at > time ? stream->idle_at : time;
        const int64_t start = effect.until > begin ? effect.until : begin;
        delay_stream(stream, end_of_work(start, effect.delay));
    }
    return effect.error;
}

/* Counts an op for the faults, and applies those that are under way. See engine_runtime.h. */
EXPORT int accelerator_simulation_begin_op(void *handle, int ordinal)
{
    const int gpu = driver->devices[ordinal].gpu;
    struct stream *stream = find_stream(handle, &driver->devices[ordinal]);
    if (!has_faults() || !stream || stream->capture)
        return 0;
    return fail_or_delay(stream) == SUCCESS ? driver->faults_flip(gpu) + 1 : -1;
}

/* The bit that the result of an op is to have flipped, or -1. */
EXPORT int accelerator_simulation_flip(int ordinal)
{
    return driver->faults_flip(driver->devices[ordinal].gpu);
}

EXPORT void accelerator_simulation_flipped(int ordinal)
{
    driver->faults_flipped(driver->devices[ordinal].gpu);
}

/* An op has found what breaks a kernel on a GPU: from now on the context fails. Returns the error if ops wait for it. */
EXPORT cudaError_t accelerator_simulation_break_context(int ordinal, cudaError_t error)
{
    return driver->faults_break(driver->devices[ordinal].gpu, error);
}

/* What graphs do with computations, in order, until the kernel overrides collect it: the id for a node that begins to refer to it,
 * minus the id for one that is destroyed. A graph that another one's capture launches has its nodes copied. */
static int64_t *references;
static size_t reference_count, reference_capacity;
RENEWED_LOCK(lock)

static bool note(int64_t reference)
{
    pthread_mutex_lock(&lock);
    bool has_space = array_reserve((void **)&references, &reference_capacity, reference_count + 1, sizeof *references);
    if (has_space)
        references[reference_count++] = reference;
    pthread_mutex_unlock(&lock);
    return has_space;
}

static bool keep(struct work *work)
{
    return note((int64_t)work->computation.id);
}

static void release(const struct work *work)
{
    note(-(int64_t)work->computation.id);
}

EXPORT size_t accelerator_simulation_references(int64_t *target, size_t capacity)
{
    pthread_mutex_lock(&lock);
    size_t count = reference_count < capacity ? reference_count : capacity;
    reference_count -= count;
    if (count) {
        memcpy(target, references, count * sizeof *references);
        memmove(references, references + count, reference_count * sizeof *references);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static cudaError_t run(struct stream *stream, const struct work *work)
{
    if (has_faults())
        RETURN_IF_ERROR(fail_or_delay(stream));
    return work->computation.compute(work->computation.id) ? SUCCESS : ERROR_LAUNCH_FAILED;
}

/* Submits a computation to a stream that captures. */
EXPORT cudaError_t accelerator_simulation_compute(void *handle, bool (*compute)(uint64_t id), uint64_t id)
{
    static const struct work_type computation = {
        .node = "KERNEL", .run = run, .prepare = wait_for_earlier_work, .keep = keep, .release = release,
    };
    ENTER_STREAM(stream, handle);
    REQUIRE(compute);
    return finish(submit(stream, &(struct work){.type = &computation, .computation = {compute, id}}));
}

static void clear_memory(void *address, size_t size)
{
    driver->fill_with_zeros(address, size);
}

EXPORT const struct engine_runtime *accelerator_simulation_engine_runtime(void)
{
    static struct engine_runtime table = {
        .boundary = SIM_BOUNDARY,
        .needs_checks = &accelerator_simulation_needs_checks,
        .is_stream_free = accelerator_simulation_is_stream_free,
        .is_device_memory = is_device_memory,
        .clear_memory = clear_memory,
        .faults = &accelerator_simulation_fault_flag,
        .begin_op = accelerator_simulation_begin_op,
        .flipped = accelerator_simulation_flipped,
    };
    IF_RACES(table.races = race_hooks->functions);
    return &table;
}
