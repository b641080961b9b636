/* The CUDA runtime: the table that pending.h declares. */
#include "runtime.h"

static int capture_submission(void *handle, int device, void (*function)(void *argument), void *argument)
{
    struct stream *stream = find_stream(handle, &driver->devices[device]);
    return stream ? submit_host_function(stream, function, argument, true) : ERROR_INVALID_HANDLE;
}

static void at_collective(int device)
{
    if (has_faults())
        driver->faults_at(CLOCK_COLLECTIVES, driver->devices[device].gpu);
}

static enum device_hold hold(int device)
{
    if (unless_broken(device) != SUCCESS)
        return BROKEN;
    return has_faults() && driver->faults_block(driver->devices[device].gpu) ? HELD : NOT_HELD;
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
        .release = pending_release,
        .capture = capture_submission,
        .at_collective = at_collective,
        .hold = hold,
        .end_of = end_of,
    };
    IF_RACES(table.note_accesses = race_hooks->at_collective);
    return &table;
}
