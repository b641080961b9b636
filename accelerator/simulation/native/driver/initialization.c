/* libcuda.so.1: initialization, versions, errors, entry points by name, and the table for the runtime. */
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "api.h"

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
SIM_EXPORT const char accelerator_simulation[] = "cuda";

_Atomic int driver_status = ERROR_NOT_INITIALIZED;
struct sim_state *driver_state;

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

SIM_EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
    const struct sim_error *error = sim_find_error(code);
    if (!name)
        return ERROR_INVALID_VALUE;
    *name = error ? error->driver_name : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    const struct sim_error *error = sim_find_error(code);
    if (!text)
        return ERROR_INVALID_VALUE;
    *text = error ? error->text : NULL;
    return error ? SUCCESS : ERROR_INVALID_VALUE;
}

/* Whether the entry point is more than a stub. */
static bool is_simulated(void *function)
{
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    return function && dladdr1(function, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol &&
           ELF64_ST_BIND(symbol->st_info) != STB_WEAK;
}

/* A base name means the newest version that is simulated: cuMemGetAddressRange is cuMemGetAddressRange_v2. */
static void *find_entry_point(const char *name)
{
    Dl_info self;
    if (strncmp(name, "cu", 2) != 0 || !dladdr((void *)&cuInit, &self))
        return NULL;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return NULL;
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *newest = dlsym(library, versioned), *function = dlsym(library, name);
    dlclose(library);
    return newest && (is_simulated(newest) || !is_simulated(function)) ? newest : function;
}

SIM_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    enum { FOUND = 0, NO_SUCH_SYMBOL = 1 };
    (void)version, (void)flags;
    if (!name || !function)
        return ERROR_INVALID_VALUE;
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    *function = find_entry_point(name);
    if (status)
        *status = *function ? FOUND : NO_SUCH_SYMBOL;
    return *function ? SUCCESS : ERROR_NOT_FOUND;
}

SIM_EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

SIM_EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    if (!table)
        return ERROR_INVALID_VALUE;
    *table = NULL;
    return ERROR_NOT_FOUND;
}

/* The simulation logs nothing, but PyTorch requires that registering its callback succeeds. */
SIM_EXPORT CUresult cuLogsRegisterCallback(void *callback, void *argument, void **handle)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)argument;
    if (!callback)
        return ERROR_INVALID_VALUE;
    if (handle)
        *handle = callback;
    return SUCCESS;
}

SIM_EXPORT CUresult cuLogsUnregisterCallback(void *handle)
{
    RETURN_IF_ERROR(enter(__func__));
    return handle ? SUCCESS : ERROR_INVALID_VALUE;
}

static int has_injections(void)
{
    sim_config();
    return sim_error_rules != 0;
}

SIM_EXPORT const struct sim_driver *accelerator_sim_driver(void)
{
    static const struct sim_driver table = {
        .cuInit = cuInit,
        .cuDriverGetVersion = cuDriverGetVersion,
        .cuDeviceGetCount = cuDeviceGetCount,
        .cuDeviceGetAttribute = cuDeviceGetAttribute,
        .cuDevicePrimaryCtxRetain = cuDevicePrimaryCtxRetain,
        .cuCtxSetCurrent = cuCtxSetCurrent,
        .cuMemAlloc = cuMemAlloc_v2,
        .cuMemAllocManaged = cuMemAllocManaged,
        .cuMemFree = cuMemFree_v2,
        .cuMemHostAlloc = cuMemHostAlloc,
        .cuMemFreeHost = cuMemFreeHost,
        .cuMemHostRegister = cuMemHostRegister_v2,
        .cuMemHostUnregister = cuMemHostUnregister,
        .cuMemGetInfo = cuMemGetInfo_v2,
        .cuGetProcAddress = cuGetProcAddress_v2,
        .devices = devices,
        .current = current_context,
        .find_memory = find_memory,
        .is_valid_range = is_valid_range,
        .set_pool = set_pool,
        .set_idle = set_idle,
        .free_idle = free_idle,
        .fill_with_zeros = accelerator_simulation_zero,
        .use_runtime = use_runtime,
        .export_memory = export_memory,
        .import_memory = import_memory,
        .close_imported = close_imported,
        .injected = sim_find_injected,
        .has_injections = has_injections,
        .log = sim_log,
    };
    return &table;
}

SIM_EXPORT struct sim_state *accelerator_sim_state(void)
{
    return driver_state;
}
