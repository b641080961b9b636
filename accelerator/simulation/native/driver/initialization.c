/* libcuda.so.1: initialization, and the version of the driver. */
#include "driver.h"

#include <pthread.h>

#include "api.h"
#include "interface/boundary.h"

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
SIM_EXPORT const char accelerator_simulation[] = "cuda";
SIM_EXPORT const char accelerator_simulation_boundary[] = SIM_BOUNDARY;

static bool is_bad_fork; /* this process was forked from one that had initialized CUDA */
static pthread_mutex_t initializing = PTHREAD_MUTEX_INITIALIZER;

static void disable_after_fork(void)
{
    is_bad_fork = true;
    driver_status = ERROR_NOT_INITIALIZED;
}

__attribute__((destructor)) static void leave_state(void)
{
    if (driver_status == SUCCESS)
        sim_state_drop_self(driver_state);
}

static CUresult initialize(void)
{
    if (is_bad_fork)
        return ERROR_NOT_INITIALIZED;
    if (driver_status == SUCCESS)
        return SUCCESS;

    sim_init_delay("cuInit");
    devices_enumerate();
    if (device_count == 0)
        return ERROR_NO_DEVICE;
    driver_state = sim_state_open();
    if (!driver_state)
        return ERROR_OPERATING_SYSTEM;
    sim_state_drop_self(driver_state);
    pthread_atfork(NULL, NULL, disable_after_fork);
    sim_log("cuInit");
    driver_status = SUCCESS;
    return SUCCESS;
}

SIM_EXPORT CUresult cuInit(unsigned flags)
{
    if (is_bad_fork)
        return ERROR_NOT_INITIALIZED;
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    if (flags != 0)
        return ERROR_INVALID_VALUE;
    pthread_mutex_lock(&initializing);
    CUresult result = initialize();
    pthread_mutex_unlock(&initializing);
    return result;
}

SIM_EXPORT CUresult cuDriverGetVersion(int *version)
{
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    if (!version)
        return ERROR_INVALID_VALUE;
    *version = sim_config()->cuda_version;
    return SUCCESS;
}
