/* libcuda.so.1: callbacks for the log of errors. */
#include "driver.h"

/* The simulation logs nothing, but PyTorch requires that registering its callback succeeds. */
SIM_EXPORT CUresult cuLogsRegisterCallback(void *callback, void *argument, void **handle)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)argument;
    REQUIRE(callback);
    if (handle)
        *handle = callback;
    return SUCCESS;
}

SIM_EXPORT CUresult cuLogsUnregisterCallback(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return handle ? SUCCESS : ERROR_INVALID_VALUE;
}
