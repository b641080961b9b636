/* The CUDA runtime: errors. */
#include "runtime.h"

static _Thread_local int last_error;

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    int error = last_error;
    last_error = SUCCESS;
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
