/* libcuda.so.1: modules and kernels compiled at run time.
 *
 * Modules load, but their kernels do not run. If simulated GPUs compute (ACCELERATOR_SIM_COMPUTE=1), a launch fails,
 * because the program would read wrong results. Otherwise it succeeds and does nothing. */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* The handle of every module, because programs only pass it back. A function is identified by its name alone. */
static char any_module;

struct function {
    struct function *next;
    bool is_reported; /* each function is reported on stderr once */
    char name[];
};

static struct function *functions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct function *find_or_add_function(const char *name)
{
    pthread_mutex_lock(&lock);
    struct function *function = functions;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (!function && (function = calloc(1, sizeof *function + strlen(name) + 1))) {
        strcpy(function->name, name);
        function->next = functions;
        functions = function;
    }
    pthread_mutex_unlock(&lock);
    return function;
}

static CUresult refuse_function(struct function *function)
{
    pthread_mutex_lock(&lock);
    const bool is_reported = function->is_reported;
    function->is_reported = true;
    pthread_mutex_unlock(&lock);
    return refuse_launch(function->name, NULL, is_reported);
}

static bool is_compute_enabled(void)
{
    const char *value = getenv(SETTING_COMPUTE);
    return value && strcmp(value, "1") == 0;
}

static CUresult load_module(const char *function, void **module, const void *image)
{
    RETURN_IF_ERROR(enter_context(function));
    if (!module || !image)
        return ERROR_INVALID_VALUE;
    *module = &any_module;
    return SUCCESS;
}

SIM_EXPORT CUresult cuModuleLoad(void **module, const char *path)
{
    return load_module(__func__, module, path);
}

SIM_EXPORT CUresult cuModuleLoadData(void **module, const void *image)
{
    return load_module(__func__, module, image);
}

SIM_EXPORT CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values)
{
    (void)count, (void)options, (void)values;
    return load_module(__func__, module, image);
}

SIM_EXPORT CUresult cuModuleUnload(void *module)
{
    RETURN_IF_ERROR(enter_context(__func__));
    return module == &any_module ? SUCCESS : ERROR_INVALID_HANDLE;
}

SIM_EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (!function || !name)
        return ERROR_INVALID_VALUE;
    if (module != &any_module)
        return ERROR_INVALID_HANDLE;
    *function = find_or_add_function(name);
    return *function ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

static int function_attribute(int attribute)
{
    enum { BLOCK_SIZE = 0, REGISTERS = 4, PTX_VERSION = 5, BINARY_VERSION = 6 };
    switch (attribute) {
    case BLOCK_SIZE:
        return SIM_MAX_THREADS_PER_BLOCK;
    case REGISTERS:
        return 32;
    case PTX_VERSION:
    case BINARY_VERSION:
        return current_context()->major * 10 + current_context()->minor;
    default:
        return 0;
    }
}

SIM_EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *function)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (!value || !function)
        return ERROR_INVALID_VALUE;
    *value = function_attribute(attribute);
    return SUCCESS;
}

SIM_EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, void *kernel, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    return cuFuncGetAttribute(value, attribute, kernel);
}

SIM_EXPORT CUresult cuFuncSetAttribute(void *function, int attribute, int value)
{
    RETURN_IF_ERROR(enter_context(__func__));
    (void)attribute, (void)value;
    return function ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuFuncSetCacheConfig(void *function, int config)
{
    RETURN_IF_ERROR(enter_context(__func__));
    (void)config;
    return function ? SUCCESS : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_memory, CUstream stream,
                                   void **parameters, void **extra)
{
    RETURN_IF_ERROR(enter_context(__func__));
    (void)shared_memory, (void)stream, (void)parameters, (void)extra;
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (!function || grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0 || threads > SIM_MAX_THREADS_PER_BLOCK)
        return ERROR_INVALID_VALUE;
    return is_compute_enabled() ? refuse_function(function) : SUCCESS;
}

SIM_EXPORT CUresult cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                              unsigned block_x, unsigned block_y, unsigned block_z,
                                              unsigned shared_memory, CUstream stream, void **parameters)
{
    RETURN_IF_ERROR(enter(__func__));
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_memory, stream,
                          parameters, NULL);
}

struct launch_configuration {
    unsigned grid[3], block[3];
    unsigned shared_memory;
    CUstream stream;
    void *attributes;
    unsigned attribute_count;
};

SIM_EXPORT CUresult cuLaunchKernelEx(const struct launch_configuration *launch, void *function, void **parameters,
                                     void **extra)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!launch)
        return ERROR_INVALID_VALUE;
    return cuLaunchKernel(function, launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0],
                          launch->block[1], launch->block[2], launch->shared_memory, launch->stream, parameters, extra);
}

SIM_EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, void *function, const struct launch_configuration *launch)
{
    RETURN_IF_ERROR(enter_context(__func__));
    if (!clusters || !function || !launch)
        return ERROR_INVALID_VALUE;
    *clusters = current_context()->processors;
    return SUCCESS;
}

SIM_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block_size,
                                                                size_t shared_memory)
{
    RETURN_IF_ERROR(enter_context(__func__));
    (void)shared_memory;
    if (!blocks || !function || block_size <= 0)
        return ERROR_INVALID_VALUE;
    *blocks = SIM_THREADS_PER_PROCESSOR / block_size;
    return SUCCESS;
}
