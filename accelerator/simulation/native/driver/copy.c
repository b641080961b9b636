/* libcuda.so.1: copies, fills, and attributes of addresses. Work for a stream is done before the call returns. */
#include "driver.h"

#include <string.h>

static CUresult copy(void *target, const void *source, size_t size)
{
    if (!is_valid_range(target, size) || !is_valid_range(source, size))
        return ERROR_INVALID_VALUE;
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

SIM_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    RETURN_IF_ERROR(enter(__func__));
    struct sim_memory memory;
    if (!find_memory((const void *)address, &memory))
        return ERROR_INVALID_VALUE;
    if (base)
        *base = (CUdeviceptr)memory.base;
    if (size)
        *size = memory.size;
    return SUCCESS;
}

static bool is_on_host(const struct sim_memory *memory)
{
    return memory->type == SIM_PINNED_MEMORY || memory->type == SIM_REGISTERED_MEMORY;
}

enum pointer_attribute {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_ADDRESS = 3,
    POINTER_HOST_ADDRESS = 4,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_IS_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_IS_MAPPED = 13,
    POINTER_POOL = 17,
    POINTER_ATTRIBUTES = 25, /* the attributes end before it */
};

SIM_EXPORT CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    enum { HOST = 1, DEVICE = 2 };
    struct sim_memory memory;
    RETURN_IF_ERROR(enter(__func__));
    if (!value || attribute < POINTER_CONTEXT || attribute >= POINTER_ATTRIBUTES ||
        !find_memory((const void *)address, &memory))
        return ERROR_INVALID_VALUE;

    switch ((enum pointer_attribute)attribute) {
    case POINTER_CONTEXT:
        *(CUcontext *)value = &devices[memory.device];
        return SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned *)value = is_on_host(&memory) ? HOST : DEVICE;
        return SUCCESS;
    case POINTER_DEVICE_ADDRESS:
        *(CUdeviceptr *)value = address;
        return SUCCESS;
    case POINTER_HOST_ADDRESS:
        if (!is_on_host(&memory) && memory.type != SIM_MANAGED_MEMORY)
            return ERROR_INVALID_VALUE;
        *(CUdeviceptr *)value = address;
        return SUCCESS;
    case POINTER_BUFFER_ID:
        *(uint64_t *)value = memory.id;
        return SUCCESS;
    case POINTER_IS_MANAGED:
        *(unsigned *)value = memory.type == SIM_MANAGED_MEMORY;
        return SUCCESS;
    case POINTER_DEVICE_ORDINAL:
        *(int *)value = memory.device;
        return SUCCESS;
    case POINTER_IS_IPC_CAPABLE:
        *(unsigned *)value = memory.type == SIM_DEVICE_MEMORY;
        return SUCCESS;
    case POINTER_RANGE_START:
        *(CUdeviceptr *)value = (CUdeviceptr)memory.base;
        return SUCCESS;
    case POINTER_RANGE_SIZE:
        *(size_t *)value = memory.size;
        return SUCCESS;
    case POINTER_IS_MAPPED:
        *(unsigned *)value = 1;
        return SUCCESS;
    case POINTER_POOL:
        *(void **)value = memory.pool;
        return SUCCESS;
    case POINTER_ATTRIBUTES:
        break;
    }
    return ERROR_NOT_SUPPORTED;
}
