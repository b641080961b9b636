/* libcuda.so.1: the driver's functions for streams, which belong to the CUDA runtime. */
#include "driver.h"

SIM_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    ENTER_RUNTIME(functions);
    return functions->create_stream(stream, flags, 0);
}

SIM_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    ENTER_RUNTIME(functions);
    return functions->create_stream(stream, flags, priority);
}

SIM_EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER_RUNTIME(functions);
    return functions->destroy_stream(stream);
}

SIM_EXPORT CUresult cuStreamQuery(CUstream stream)
{
    ENTER_RUNTIME(functions);
    return functions->query_stream(stream);
}

SIM_EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER_RUNTIME(functions);
    return functions->synchronize_stream(stream);
}

SIM_EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    ENTER_RUNTIME(functions);
    return functions->is_capturing(stream, status);
}

SIM_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}
