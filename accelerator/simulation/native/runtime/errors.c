/* The CUDA runtime: the last error of a thread, and the names and texts of errors. */
#include "runtime.h"

static _Thread_local int last_error;
static _Thread_local bool is_launch_error; /* whether the last error is of a launch */
static _Thread_local bool is_known[SIM_MAX_GPUS]; /* whether the thread has read the error of a broken context, which stays */

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

/* torch checks the last error after each launch of its own, and raises what a program has not read. Refusals have text. */
cudaError_t finish_launch(cudaError_t error)
{
    if (error != SUCCESS && error != ERROR_NOT_SUPPORTED && !is_launch_error) {
        is_launch_error = true;
        accelerator_simulation_needs_checks++;
    }
    return finish(error);
}

cudaError_t unread_launch_error(void)
{
    return is_launch_error ? last_error : SUCCESS;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    const struct sim_device *device = has_faults() ? driver->current() : NULL;
    const cudaError_t lasting = device ? unless_broken(device->ordinal) : SUCCESS;
    if (lasting == SUCCESS)
        return last_error;
    if (last_error == lasting)
        is_known[device->ordinal] = true;
    return last_error == SUCCESS && is_known[device->ordinal] ? lasting : last_error;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = cudaPeekAtLastError();
    last_error = SUCCESS;
    if (is_launch_error)
        accelerator_simulation_needs_checks--;
    is_launch_error = false;
    if (error == ERROR_NOT_SUPPORTED && driver)
        driver->read_refusal(NULL, 0);
    return error;
}

EXPORT const char *cudaGetErrorName(cudaError_t code)
{
    const struct sim_error *error = sim_find_error(code);
    return error ? error->runtime_name : "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t code)
{
    const struct sim_error *error = sim_find_error(code);
    return error ? error->text : "unrecognized error code";
}
