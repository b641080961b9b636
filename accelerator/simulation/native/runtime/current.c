/* The CUDA runtime: the current device of a thread. */
#include "runtime.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int chosen_device(void)
{
    struct sim_device *device = driver->current();
    return device ? device->ordinal : thread_device;
}

/* Makes the device's primary context current. The runtime holds one reference to each. */
static cudaError_t make_current(int ordinal)
{
    static bool is_retained[SIM_MAX_GPUS];
    struct sim_device *device = &driver->devices[ordinal];
    cudaError_t error = SUCCESS;
    pthread_mutex_lock(&lock);
    if (!is_retained[ordinal]) {
        error = driver->cuDevicePrimaryCtxRetain(&device, ordinal);
        is_retained[ordinal] = error == SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return error == SUCCESS ? driver->cuCtxSetCurrent(device) : error;
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
    if (ordinal < 0 || ordinal >= visible_device_count())
        return fail(ERROR_INVALID_DEVICE);
    RETURN_IF_ERROR(finish(make_current(ordinal)));
    thread_device = ordinal;
    return SUCCESS;
}

EXPORT cudaError_t cudaGetDevice(int *ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!ordinal)
        return fail(ERROR_INVALID_VALUE);
    *ordinal = chosen_device();
    return SUCCESS;
}
