/* The CUDA runtime: the calls for memory of the device and of the host (cudaMalloc, cudaHostAlloc, IPC handles). The driver
 * records it. */
#include "runtime.h"

#include <string.h>

EXPORT cudaError_t cudaMalloc(void **address, size_t size)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    if (!address)
        return fail(ERROR_INVALID_VALUE);
    *address = NULL;
    return size == 0 ? SUCCESS : finish(driver->cuMemAlloc((uintptr_t *)address, size));
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return finish(driver->cuMemAllocManaged((uintptr_t *)address, size, flags));
}

static void note_free(const void *address)
{
    struct sim_memory memory;
    if (driver->find_memory(address, &memory))
        race_hooks->at_free(memory.base, memory.size);
}

/* Freeing waits for all work of the device, which may still use the memory. */
EXPORT cudaError_t cudaFree(void *address)
{
    struct sim_memory memory;
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!address)
        return SUCCESS;
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_device(device)));
    IF_RACES(note_free(address));
    if (driver->find_memory(address, &memory) && memory.pool)
        return finish(memory.base == address ? pool_free(&memory) : ERROR_INVALID_VALUE);
    return finish(driver->cuMemFree((uintptr_t)address));
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    if (!address)
        return fail(ERROR_INVALID_VALUE);
    *address = NULL;
    return size == 0 ? SUCCESS : finish(driver->cuMemHostAlloc(address, size, flags));
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t size)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaHostAlloc(address, size, 0);
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!address)
        return SUCCESS;
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_pending_on_device(device->ordinal)));
    IF_RACES(race_hooks->at_device_wait(device->ordinal));
    IF_RACES(note_free(address));
    return finish(driver->cuMemFreeHost(address));
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return finish(driver->cuMemHostRegister(address, size, flags));
}

EXPORT cudaError_t cudaHostUnregister(void *address)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return finish(driver->cuMemHostUnregister(address));
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **target, void *address, unsigned flags)
{
    struct sim_memory memory;
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    if (!target || flags != 0 || !driver->find_memory(address, &memory) || !sim_is_on_host(&memory))
        return fail(ERROR_INVALID_VALUE);
    *target = address;
    return SUCCESS;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    return finish(driver->cuMemGetInfo(free, total));
}

struct pointer_attributes {
    int type;
    int device;
    void *device_address, *host_address;
#if CUDART != 12
    long reserved[8];
#endif
};

enum { UNKNOWN = 0, HOST = 1, DEVICE = 2, MANAGED = 3, NO_DEVICE = -2 };

EXPORT cudaError_t cudaPointerGetAttributes(struct pointer_attributes *attributes, void *address)
{
    struct sim_memory memory;
    RETURN_IF_ERROR(enter(__func__));
    if (!attributes)
        return fail(ERROR_INVALID_VALUE);
    memset(attributes, 0, sizeof *attributes);
    if (!driver->find_memory(address, &memory)) {
        attributes->type = UNKNOWN;
        attributes->device = NO_DEVICE;
        attributes->host_address = address;
        return SUCCESS;
    }
    attributes->type = sim_is_on_host(&memory) ? HOST : memory.type == SIM_MANAGED_MEMORY ? MANAGED : DEVICE;
    attributes->device = memory.device;
    attributes->device_address = address;
    attributes->host_address = attributes->type == DEVICE ? NULL : address;
    return SUCCESS;
}

int is_device_memory(const void *address)
{
    struct pointer_attributes attributes;
    return cudaPointerGetAttributes(&attributes, (void *)address) == SUCCESS && attributes.type == DEVICE;
}

EXPORT cudaError_t cudaIpcGetMemHandle(struct sim_ipc_handle *handle, void *address)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    return finish(handle ? driver->export_memory(address, handle) : ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, struct sim_ipc_handle handle, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)flags;
    RETURN_IF_ERROR(unsafe_call());
    return finish(address ? driver->import_memory(&handle, address) : ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *address)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return finish(driver->close_imported(address));
}
