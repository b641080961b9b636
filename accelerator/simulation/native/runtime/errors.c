/* The CUDA runtime: the last error of a thread, and the names and texts of errors. */
#include "runtime.h"

static _Thread_local int last_error;

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

cudaError_t read_failure(int device)
{
    struct sim_device *failed = &driver->devices[device];
    if (failed->failure != SUCCESS)
        failed->is_failure_known = true;
    return failed->failure;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    int error = last_error;
    const struct sim_device *device = driver ? driver->current() : NULL;
    last_error = device && device->is_failure_known ? device->failure : SUCCESS; /* a lost device stays lost */
    if (error == ERROR_NOT_SUPPORTED && driver)
        driver->read_refusal(NULL, 0);
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
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
