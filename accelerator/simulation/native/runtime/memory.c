/* The CUDA runtime: the calls for memory of the device and of the host (cudaMalloc, cudaHostAlloc, IPC handles). The driver
 * records it. */
#include "runtime.h"

#include <string.h>

EXPORT cudaError_t cudaMalloc(void **address, size_t size)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(unsafe_call());
    REQUIRE(address);
    *address = NULL;
    if (size == 0)
        return SUCCESS;
    RETURN_IF_ERROR(finish(driver->cuMemAlloc((uintptr_t *)address, size)));
    IF_RACES(race_hooks->at_allocation(*address, device->ordinal));
    return SUCCESS;
}

static cudaError_t allocate_rows(const char *function, struct pitched_pointer *made, struct extent extent)
{
    enum { PITCH_UNIT = 512 };
    size_t rows, size;
    RETURN_IF_ERROR(enter_context(function, NULL));
    RETURN_IF_ERROR(unsafe_call());
    *made = (struct pitched_pointer){NULL, 0, extent.width, extent.height};
    if (extent.width == 0 || extent.height == 0 || extent.depth == 0)
        return SUCCESS;
    REQUIRE(extent.width <= INT32_MAX);
    made->pitch = (extent.width + PITCH_UNIT - 1) / PITCH_UNIT * PITCH_UNIT;
    if (__builtin_mul_overflow(extent.height, extent.depth, &rows) || __builtin_mul_overflow(rows, made->pitch, &size))
        return fail(ERROR_OUT_OF_MEMORY);
    return finish(driver->cuMemAlloc((uintptr_t *)&made->address, size));
}

EXPORT cudaError_t cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height)
{
    struct pitched_pointer made = {0};
    REQUIRE(address && pitch);
    RETURN_IF_ERROR(allocate_rows(__func__, &made, (struct extent){width, height, 1}));
    *address = made.address;
    *pitch = made.pitch;
    return SUCCESS;
}

EXPORT cudaError_t cudaMalloc3D(struct pitched_pointer *pointer, struct extent extent)
{
    struct pitched_pointer made = {0};
    REQUIRE(pointer);
    RETURN_IF_ERROR(allocate_rows(__func__, &made, extent));
    *pointer = made;
    return SUCCESS;
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    return finish(driver->cuMemAllocManaged((uintptr_t *)address, size, flags));
}

/* The place that a hint for managed memory names: of CUDA 13 a location, of CUDA 12 a device or a location. */
struct location {
    int type, id;
};

enum { ON_DEVICE = 1, ON_HOST = 2, ON_HOST_NODE = 3, ON_CURRENT_HOST_NODE = 4, CPU_DEVICE = -1 };

/* The host and all GPUs see the same managed memory at all times, so that a hint about it does nothing. */
static cudaError_t check_hint(const void *address, size_t size, struct location location)
{
    struct sim_memory memory;
    RETURN_UNLESS(location.type >= ON_DEVICE && location.type <= ON_CURRENT_HOST_NODE, ERROR_INVALID_VALUE);
    if (location.type == ON_DEVICE && (location.id < 0 || location.id >= visible_device_count()))
        return ERROR_INVALID_DEVICE;
    if (size == 0 || !driver->find_memory(address, &memory) || memory.type != SIM_MANAGED_MEMORY)
        return ERROR_INVALID_VALUE;
    return size <= memory.size - (size_t)((const char *)address - memory.base) ? SUCCESS : ERROR_INVALID_VALUE;
}

static cudaError_t prefetch(const char *function, const void *address, size_t size, struct location location, unsigned flags,
                            void *handle)
{
    struct stream *stream;
    RETURN_IF_ERROR(enter_stream(function, handle, &stream));
    RETURN_IF_ERROR(finish(refuse_captured_stream(stream)));
    return finish(flags == 0 ? check_hint(address, size, location) : ERROR_INVALID_VALUE);
}

static cudaError_t advise(const char *function, const void *address, size_t size, int advice, struct location location)
{
    enum { FIRST_ADVICE = 1, LAST_ADVICE = 6 };
    RETURN_IF_ERROR(enter_context(function, NULL));
    bool is_known = advice >= FIRST_ADVICE && advice <= LAST_ADVICE;
    return finish(is_known ? check_hint(address, size, location) : ERROR_INVALID_VALUE);
}

#if CUDART == 12
static struct location location_of(int device)
{
    return (struct location){device == CPU_DEVICE ? ON_HOST : ON_DEVICE, device};
}

EXPORT cudaError_t cudaMemPrefetchAsync(const void *address, size_t size, int device, void *stream)
{
    return prefetch(__func__, address, size, location_of(device), 0, stream);
}

EXPORT cudaError_t cudaMemAdvise(const void *address, size_t size, int advice, int device)
{
    return advise(__func__, address, size, advice, location_of(device));
}

#define WITH_LOCATION(name) name##_v2
#else
#define WITH_LOCATION(name) name
#endif

EXPORT cudaError_t WITH_LOCATION(cudaMemPrefetchAsync)(const void *address, size_t size, struct location location, unsigned flags,
                                                        void *stream)
{
    return prefetch(__func__, address, size, location, flags, stream);
}

EXPORT cudaError_t WITH_LOCATION(cudaMemAdvise)(const void *address, size_t size, int advice, struct location location)
{
    return advise(__func__, address, size, advice, location);
}

void note_free(const void *address)
{
    struct sim_memory memory;
    if (race_hooks && driver->find_memory(address, &memory))
        race_hooks->at_free(memory.base, memory.size);
}

/* Freeing waits for all work of the device, which may still use the memory. */
EXPORT cudaError_t cudaFree(void *address)
{
    struct sim_memory memory;
    ENTER_CONTEXT(device);
    if (!address)
        return SUCCESS;
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_device(device)));
    note_free(address);
    if (driver->find_memory(address, &memory) && memory.pool)
        return finish(memory.base == address ? pool_free(&memory) : ERROR_INVALID_VALUE);
    return finish(driver->cuMemFree((uintptr_t)address));
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    RETURN_IF_ERROR(unsafe_call());
    REQUIRE(address);
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
    ENTER_CONTEXT(device);
    if (!address)
        return SUCCESS;
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_pending_on_device(device->ordinal)));
    IF_RACES(race_hooks->at_device_wait(device->ordinal));
    note_free(address);
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

EXPORT cudaError_t cudaHostGetFlags(unsigned *flags, void *address)
{
    struct sim_memory memory;
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    if (!flags || !driver->find_memory(address, &memory) || memory.type != SIM_PINNED_MEMORY)
        return fail(ERROR_INVALID_VALUE);
    *flags = memory.flags;
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
    REQUIRE(attributes);
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
