/* The CUDA runtime: the driver's entry points. */
#include "runtime.h"

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, int *status_out)
{
    enum { SYMBOL_NOT_FOUND = 1 };
    RETURN_IF_ERROR(enter(__func__));
    cudaError_t error = driver->cuGetProcAddress(name, function, (int)version, flags, status_out);
    /* A missing name is not an error here. */
    if (error == ERROR_NOT_FOUND && status_out)
        *status_out = SYMBOL_NOT_FOUND;
    return finish(error == ERROR_NOT_FOUND ? SUCCESS : error);
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status_out)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaGetDriverEntryPointByVersion(name, function, CUDART * 1000, flags, status_out);
}
