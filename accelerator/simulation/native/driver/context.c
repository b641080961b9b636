/* libcuda.so.1: primary contexts, their limits, and each thread's stack of current contexts. */
#include "driver.h"
#include "api.h"

#include <pthread.h>

enum { MAX_STACK = 64 };

static _Thread_local struct {
    CUcontext contexts[MAX_STACK];
    int depth;
} stack;

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;

struct sim_device *current_context(void)
{
    return stack.depth > 0 ? stack.contexts[stack.depth - 1] : NULL;
}

static bool is_context(CUcontext context)
{
    return context >= devices && context < devices + device_count && context->context_users > 0;
}

SIM_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(context);
    pthread_mutex_lock(&context_lock);
    CUresult result = devices[device].context_users == 0 ? faults_new_context(devices[device].gpu) : SUCCESS;
    if (result == SUCCESS && devices[device].context_users++ == 0) {
        sim_state_add_context(driver_state, devices[device].gpu, devices[device].instance, 1);
        sim_log("context %d", device);
    }
    pthread_mutex_unlock(&context_lock);
    *context = &devices[device];
    return result;
}

SIM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    pthread_mutex_lock(&context_lock);
    CUresult result = devices[device].context_users > 0 ? SUCCESS : ERROR_INVALID_CONTEXT;
    if (result == SUCCESS && --devices[device].context_users == 0)
        sim_state_add_context(driver_state, devices[device].gpu, devices[device].instance, -1);
    pthread_mutex_unlock(&context_lock);
    return result;
}

SIM_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    enum { SCHEDULES = 7, BLOCKING_SYNC = 4, ALL_FLAGS = 0xff };
    RETURN_IF_ERROR(enter_device(__func__, device));
    const unsigned schedule = flags & SCHEDULES;
    REQUIRE(!(flags & ~ALL_FLAGS) && !(schedule & (schedule - 1)) && schedule <= BLOCKING_SYNC);
    devices[device].context_flags = flags;
    return SUCCESS;
}

SIM_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    if (flags)
        *flags = devices[device].context_flags;
    if (active)
        *active = devices[device].context_users > 0;
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(context);
    *context = current_context();
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(!context || is_context(context), ERROR_INVALID_CONTEXT);
    if (!context && stack.depth > 0)
        stack.depth--;
    else if (context) {
        stack.depth += stack.depth == 0;
        stack.contexts[stack.depth - 1] = context;
    }
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_UNLESS(is_context(context), ERROR_INVALID_CONTEXT);
    REQUIRE(stack.depth != MAX_STACK);
    stack.contexts[stack.depth++] = context;
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    RETURN_IF_ERROR(enter_any_context(__func__));
    if (context)
        *context = current_context();
    stack.depth--;
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    RETURN_IF_ERROR(enter_any_context(__func__));
    REQUIRE(device);
    *device = current_context()->ordinal;
    return SUCCESS;
}

/* Limits of what kernels may use. Kernels have those of the stack and of the heap; printf writes at once, and loses nothing. */
enum { LIMITS = 8 };
#define INITIAL_LIMITS {1024, 7340032, 8388608, 2, 2048, 128}
static _Atomic size_t limits[SIM_MAX_GPUS][LIMITS] = {[0 ... SIM_MAX_GPUS - 1] = INITIAL_LIMITS};

SIM_EXPORT CUresult cuCtxSetLimit(unsigned limit, size_t value)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_UNLESS(limit < LIMITS, ERROR_UNSUPPORTED_LIMIT);
    limits[current_context()->ordinal][limit] = value;
    return SUCCESS;
}

SIM_EXPORT CUresult cuCtxGetLimit(size_t *value, unsigned limit)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (!value || limit >= LIMITS)
        return value ? ERROR_UNSUPPORTED_LIMIT : ERROR_INVALID_VALUE;
    *value = limits[current_context()->ordinal][limit];
    return SUCCESS;
}

size_t limit_of(int device, unsigned limit)
{
    return limits[device][limit];
}

void end_context(int device)
{
    static const size_t initial[LIMITS] = INITIAL_LIMITS;
    pthread_mutex_lock(&context_lock);
    if (devices[device].context_users > 0)
        sim_state_add_context(driver_state, devices[device].gpu, devices[device].instance, -1);
    devices[device].context_users = 0;
    devices[device].context_flags = 0;
    devices[device].context_resets++;
    for (int i = 0; i < LIMITS; i++)
        limits[device][i] = initial[i];
    pthread_mutex_unlock(&context_lock);
    if (current_context() == &devices[device])
        stack.depth--;
}

SIM_EXPORT CUresult cuCtxSynchronize(void)
{
    RETURN_IF_ERROR(enter_context(__func__));
    RETURN_IF_ERROR(wait_for_pending_on_device(current_context()->ordinal));
    const struct sim_device *device = current_context();
    if (device->busy_until != 0)
        RETURN_IF_ERROR(faults_sleep(device->gpu, device->busy_until));
    return unless_failed();
}
