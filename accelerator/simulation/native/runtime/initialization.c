/* The CUDA runtime: initialization, also after a fork, and versions. */
#include "runtime.h"

#include <pthread.h>

#include "common/fork.h"
#include "interface/boundary.h"

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
EXPORT const char accelerator_simulation[] = "cudart";
EXPORT const char accelerator_simulation_boundary[] = SIM_BOUNDARY;

enum { NOT_TRIED = -1 };

const struct sim_runtime *runtime_table;
_Atomic bool is_ready_and_plain;

static _Atomic int status = NOT_TRIED; /* a failed initialization stays failed */
RENEWED_LOCK(lock)
static int device_count;

_Thread_local int thread_device;

static void disable_after_fork(void)
{
    status = ERROR_NOT_INITIALIZED;
    is_ready_and_plain = false;
    accelerator_simulation_needs_checks++; /* for ever: kernels that allocate nothing call no function of this library */
}

static cudaError_t initialize(cudaError_t error)
{
    int version;
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
        driver->use_runtime(runtime_table);
        is_ready_and_plain = !driver->has_injections();
        accelerator_simulation_fault_flag = driver->fault_flag();
    }
    return error;
}

cudaError_t enter_slowly(const char *function)
{
    if (status == NOT_TRIED) {
        cudaError_t loaded = load_driver(); /* before the lock: see there */
        pthread_mutex_lock(&lock);
        if (status == NOT_TRIED)
            status = initialize(loaded);
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

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
    REQUIRE(version);
    *version = CUDART == 12 ? 12040 : 13020;
    return SUCCESS;
}

/* Initializes nothing. The version is 0 without a driver. */
EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    REQUIRE(version);
    *version = 0;
    return load_driver() == SUCCESS ? finish(driver->cuDriverGetVersion(version)) : SUCCESS;
}
