/* The CUDA runtime: the table that pending.h declares. */
#include "runtime.h"

static void release_queue(struct pending_queue *queue)
{
    pending_complete(queue, UINT64_MAX);
}

static int capture_submission(void *handle, int device, void (*function)(void *argument), void *argument)
{
    struct stream *stream = find_stream(handle, &driver->devices[device]);
    return stream ? submit_host_function(stream, function, argument, true) : ERROR_INVALID_HANDLE;
}

EXPORT const struct sim_pending *accelerator_simulation_pending(void)
{
    static struct sim_pending table = {
        .submit = pending_submit,
        .wait = pending_wait,
        .interrupt = pending_interrupt,
        .clear = pending_clear,
        .complete = pending_complete,
        .fail = pending_fail,
        .release = release_queue,
        .capture = capture_submission,
    };
    IF_RACES(table.note_accesses = race_hooks->at_collective);
    return &table;
}
