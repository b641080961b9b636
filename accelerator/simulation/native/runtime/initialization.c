/* The CUDA runtime: finding the driver, initialization, the last error. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
EXPORT const char accelerator_simulation[] = "cudart";

enum { NOT_TRIED = -1 };

const struct sim_driver *driver;
_Atomic bool is_ready_and_plain;

static _Atomic int status = NOT_TRIED; /* a failed initialization stays failed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int device_count;

static _Thread_local int last_error, thread_device;

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

static void disable_after_fork(void)
{
    status = ERROR_NOT_INITIALIZED;
    is_ready_and_plain = false;
    accelerator_simulation_attention++; /* for ever: kernels that allocate nothing call no function of this library */
}

/* The driver is missing if a wrapper replaces LD_LIBRARY_PATH instead of adding to it. */
static void hint_at_replaced_path(void)
{
    const char *path = getenv("LD_LIBRARY_PATH");
    if (getenv("ACCELERATOR_SIM_GPUS") && (!path || !strstr(path, "/accelerator/simulation-")))
        fprintf(stderr, "accelerator: the simulated driver was not found, because something has replaced LD_LIBRARY_PATH;"
                        " extend it instead: LD_LIBRARY_PATH=...:$LD_LIBRARY_PATH\n");
}

static cudaError_t load_driver(void)
{
    static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&loading);
    if (!driver) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        const struct sim_driver *(*table)(void) = NULL;
        if (library)
            *(void **)&table = dlsym(library, SIM_DRIVER_SYMBOL);
        if (table)
            driver = table();
        else
            hint_at_replaced_path();
    }
    pthread_mutex_unlock(&loading);
    return driver ? SUCCESS : ERROR_INSUFFICIENT_DRIVER;
}

static cudaError_t initialize(void)
{
    int version;
    cudaError_t error = load_driver();
    if (error == SUCCESS)
        error = driver->cuDriverGetVersion(&version);
    if (error == SUCCESS && version / 1000 < CUDART)
        error = ERROR_INSUFFICIENT_DRIVER;
    if (error == SUCCESS)
        error = driver->cuInit(0);
    if (error == SUCCESS)
        error = driver->cuDeviceGetCount(&device_count);
    if (error == SUCCESS) {
        pthread_atfork(NULL, NULL, disable_after_fork);
        driver->log("cudart");
        driver->use_runtime(accelerator_sim_runtime());
        is_ready_and_plain = !driver->has_injections();
    }
    return error;
}

cudaError_t enter_slowly(const char *function)
{
    if (status == NOT_TRIED) {
        pthread_mutex_lock(&lock);
        if (status == NOT_TRIED)
            status = initialize();
        pthread_mutex_unlock(&lock);
    }
    if (status != SUCCESS)
        return status;
    struct sim_device *device = driver->current();
    return driver->injected(function, (device ? device : &driver->devices[thread_device])->gpu);
}

/* For NCCL: both majors are in every process, and streams belong to the one in use. */
EXPORT bool accelerator_sim_runtime_is_used(void)
{
    return status != NOT_TRIED;
}

int visible_device_count(void)
{
    return device_count;
}

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
    if (ordinal < 0 || ordinal >= device_count)
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

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!count)
        return fail(ERROR_INVALID_VALUE);
    *count = device_count;
    return SUCCESS;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

EXPORT const char *cudaGetErrorName(cudaError_t code)
{
    const struct sim_error *error = sim_find_error(code);
    return error ? error->runtime_name : "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t code)
{
    const struct sim_error *error = sim_find_error(code);
    return error ? error->text : "unrecognized error code";
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
    if (!version)
        return fail(ERROR_INVALID_VALUE);
    *version = CUDART == 12 ? 12040 : 13020;
    return SUCCESS;
}

/* Initializes nothing. The version is 0 without a driver. */
EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    if (!version)
        return fail(ERROR_INVALID_VALUE);
    *version = 0;
    return load_driver() == SUCCESS ? finish(driver->cuDriverGetVersion(version)) : SUCCESS;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, int *status_out)
{
    enum { SYMBOL_NOT_FOUND = 1 };
    RETURN_IF_ERROR(enter(__func__));
    cudaError_t error = driver->cuGetProcAddress(name, function, (int)version, flags, status_out);
    /* A missing name is not an error here. */
    if (error == ERROR_NOT_FOUND && status_out)
        *status_out = SYMBOL_NOT_FOUND;
    return finish(error == ERROR_NOT_FOUND ? SUCCESS : error);
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status_out)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaGetDriverEntryPointByVersion(name, function, CUDART * 1000, flags, status_out);
}

EXPORT cudaError_t cudaProfilerStart(void)
{
    RETURN_IF_ERROR(enter(__func__));
    return SUCCESS;
}

EXPORT cudaError_t cudaProfilerStop(void)
{
    RETURN_IF_ERROR(enter(__func__));
    return SUCCESS;
}
