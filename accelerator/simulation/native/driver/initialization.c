/* libcuda.so.1: initialization, and the version of the driver. */
#include "driver.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "api.h"
#include "common/fork.h"
#include "interface/boundary.h"

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
SIM_EXPORT const char accelerator_simulation[] = "cuda";
SIM_EXPORT const char accelerator_simulation_boundary[] = SIM_BOUNDARY;

static bool is_bad_fork; /* this process was forked from one that had initialized CUDA */
RENEWED_LOCK(initializing) /* a child forked before the end of cuInit may initialize CUDA itself */

static void disable_after_fork(void)
{
    is_bad_fork = true;
    driver_status = ERROR_NOT_INITIALIZED;
}

/* The machine of one process ends with it; of another one the command that runs on it says so. */
static void tell_unfired_faults(void)
{
    char text[4096], *rest = text;
    if (sim_state_path() || !faults_are_used())
        return;
    faults_describe(used_faults, true, text, sizeof text);
    for (char *line; (line = strsep(&rest, "\n"));)
        if (*line)
            fprintf(stderr, "accelerator: the fault %s\n", line);
}

__attribute__((destructor)) static void leave_state(void)
{
    if (driver_status != SUCCESS)
        return;
    tell_unfired_faults();
    sim_state_drop_self(driver_state);
}

static CUresult initialize(void)
{
    RETURN_UNLESS(!is_bad_fork, ERROR_NOT_INITIALIZED);
    if (driver_status == SUCCESS)
        return SUCCESS;

    sim_init_delay("cuInit");
    driver_state = sim_state_open();
    if (driver_state)
        faults_use(sim_state_faults(driver_state));
    RETURN_IF_ERROR(devices_enumerate());
    RETURN_UNLESS(driver_state, ERROR_OPERATING_SYSTEM);
    sim_state_drop_self(driver_state);
    pthread_atfork(NULL, NULL, disable_after_fork);
    sim_log("cuInit");
    driver_status = SUCCESS;
    return SUCCESS;
}

SIM_EXPORT CUresult cuInit(unsigned flags)
{
    RETURN_UNLESS(!is_bad_fork, ERROR_NOT_INITIALIZED);
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    REQUIRE(flags == 0);
    pthread_mutex_lock(&initializing);
    CUresult result = initialize();
    pthread_mutex_unlock(&initializing);
    return result;
}

SIM_EXPORT CUresult cuDriverGetVersion(int *version)
{
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    REQUIRE(version);
    *version = sim_config()->cuda_version;
    return SUCCESS;
}
