/* The CUDA runtime: the current device of a thread. */
#include "runtime.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int chosen_device(void)
{
    struct sim_device *device = driver->current();
    return device ? device->ordinal : thread_device;
}

static bool is_retained[SIM_MAX_GPUS];

/* The runtime holds one reference to each primary context. */
static cudaError_t retain(int ordinal, struct sim_device **device)
{
    cudaError_t error = SUCCESS;
    *device = &driver->devices[ordinal];
    pthread_mutex_lock(&lock);
    if (!is_retained[ordinal]) {
        error = driver->cuDevicePrimaryCtxRetain(device, ordinal);
        is_retained[ordinal] = error == SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static cudaError_t make_current(int ordinal)
{
    struct sim_device *device;
    RETURN_IF_ERROR(retain(ordinal, &device));
    return driver->cuCtxSetCurrent(device);
}

cudaError_t make_context(struct sim_device **device)
{
    RETURN_IF_ERROR(make_current(thread_device));
    *device = driver->current();
    return SUCCESS;
}

EXPORT cudaError_t cudaSetDevice(int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    struct sim_device *device = driver->current();
    if (device && device->ordinal == ordinal)
        return SUCCESS;
    RETURN_UNLESS(ordinal >= 0 && ordinal < visible_device_count(), fail(ERROR_INVALID_DEVICE));
    RETURN_IF_ERROR(finish(make_current(ordinal)));
    thread_device = ordinal;
    return SUCCESS;
}

EXPORT cudaError_t cudaGetDevice(int *ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(ordinal);
    *ordinal = chosen_device();
    return SUCCESS;
}

cudaError_t reset_context(int ordinal)
{
    pthread_mutex_lock(&lock);
    const cudaError_t error = driver->cuDevicePrimaryCtxReset(ordinal);
    is_retained[ordinal] = false;
    pthread_mutex_unlock(&lock);
    thread_device = ordinal;
    return error;
}

enum { MAPS_HOST_MEMORY = 8 }; /* always on */

EXPORT cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    RETURN_IF_ERROR(enter(__func__));
    return finish(driver->cuDevicePrimaryCtxSetFlags(chosen_device(), flags));
}

EXPORT cudaError_t cudaGetDeviceFlags(unsigned *flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    REQUIRE(flags);
    *flags = driver->current()->context_flags | MAPS_HOST_MEMORY;
    return SUCCESS;
}

EXPORT cudaError_t cudaInitDevice(int ordinal, unsigned device_flags, unsigned flags)
{
    enum { FLAGS_ARE_VALID = 1 };
    struct sim_device *device;
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(ordinal >= 0 && ordinal < visible_device_count(), fail(ERROR_INVALID_DEVICE));
    REQUIRE(!(flags & ~FLAGS_ARE_VALID));
    if (flags)
        RETURN_IF_ERROR(finish(driver->cuDevicePrimaryCtxSetFlags(ordinal, device_flags)));
    return finish(retain(ordinal, &device));
}

EXPORT cudaError_t cudaDeviceSetLimit(int limit, size_t value)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    return finish(driver->cuCtxSetLimit((unsigned)limit, value));
}

EXPORT cudaError_t cudaDeviceGetLimit(size_t *value, int limit)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    return finish(driver->cuCtxGetLimit(value, (unsigned)limit));
}

#if CUDART == 12
EXPORT cudaError_t cudaThreadSetLimit(int limit, size_t value)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaDeviceSetLimit(limit, value);
}

EXPORT cudaError_t cudaThreadGetLimit(size_t *value, int limit)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaDeviceGetLimit(value, limit);
}
#endif
