/* libcuda.so.1: what the driver knows about an address. */
#include "driver.h"

SIM_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    RETURN_IF_ERROR(enter(__func__));
    struct sim_memory memory;
    REQUIRE(find_memory((const void *)address, &memory));
    if (base)
        *base = (CUdeviceptr)memory.base;
    if (size)
        *size = memory.size;
    return SUCCESS;
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
        *(unsigned *)value = sim_is_on_host(&memory) ? HOST : DEVICE;
        return SUCCESS;
    case POINTER_DEVICE_ADDRESS:
        *(CUdeviceptr *)value = address;
        return SUCCESS;
    case POINTER_HOST_ADDRESS:
        REQUIRE(sim_is_on_host(&memory) || memory.type == SIM_MANAGED_MEMORY);
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
