/* libcuda.so.1: copies and fills that the driver's own functions do (cuMemcpy, cuMemset). Work for a stream is done before
 * the call returns. */
#include "driver.h"

#include <string.h>

static CUresult copy(void *target, const void *source, size_t size)
{
    REQUIRE(is_valid_range(target, size) && is_valid_range(source, size));
    RETURN_IF_ERROR(unless_failed());
    memmove(target, source, size);
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_IF_ERROR(wait_for_pending_on_stream(NULL));
    return copy((void *)target, (const void *)source, size);
}

SIM_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_IF_ERROR(wait_for_pending_on_stream(NULL));
    return copy((void *)target, source, size);
}

SIM_EXPORT CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_IF_ERROR(wait_for_pending_on_stream(NULL));
    return copy(target, (const void *)source, size);
}

static CUresult fill(CUdeviceptr address, uint32_t value, size_t count)
{
    uint32_t *words = (uint32_t *)address;
    size_t size;
    if (address % sizeof *words != 0 || __builtin_mul_overflow(count, sizeof *words, &size) || !is_valid_range(words, size))
        return ERROR_INVALID_VALUE;
    if (value == 0) {
        accelerator_simulation_zero(words, size);
        return SUCCESS;
    }
    for (size_t i = 0; i < count; i++)
        words[i] = value;
    return SUCCESS;
}

SIM_EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_IF_ERROR(wait_for_pending_on_stream(stream));
    return fill(address, value, count);
}

SIM_EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__));
    (void)flags;
    RETURN_IF_ERROR(wait_for_pending_on_stream(stream));
    return fill(address, value, 1);
}

SIM_EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    RETURN_IF_ERROR(enter(__func__));
    return cuStreamWriteValue32_v2(stream, address, value, flags);
}
