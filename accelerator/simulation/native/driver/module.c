/* libcuda.so.1: modules, libraries and kernels. The runtime runs them, as it owns the streams. A library is a module, and its
 * kernels are the module's functions.
 *
 * Without computation, a launch succeeds and does nothing. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"
#include "interface/module_handles.h"

struct sim_handles module_handles = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void renew_lock(void)
{
    pthread_mutex_init(&module_handles.lock, NULL);
}
IN_FORKED_CHILD(renew_lock)

enum { INFO_LOG = 3, INFO_LOG_SIZE = 4, ERROR_LOG = 5, ERROR_LOG_SIZE = 6, LAST_OPTION = 40 };

CUresult check_jit_options(unsigned count, const int *options, void *const *values)
{
    REQUIRE(!count || (options && values));
    for (unsigned i = 0; i < count; i++)
        REQUIRE(options[i] >= 0 && options[i] <= LAST_OPTION);
    return SUCCESS;
}

/* Fills the logs that the options name, and says in the sizes how much of them is filled. */
void write_jit_logs(unsigned count, const int *options, void **values, const char *errors)
{
    for (int log = INFO_LOG; log <= ERROR_LOG; log += ERROR_LOG - INFO_LOG) {
        char *buffer = NULL;
        void **size = NULL;
        for (unsigned i = 0; i < count; i++) {
            if (options[i] == log)
                buffer = values[i];
            if (options[i] == log + 1)
                size = &values[i];
        }
        const char *text = log == ERROR_LOG ? errors : "";
        const size_t capacity = size ? (unsigned)(uintptr_t)*size : 0, length = strlen(text);
        if (buffer && capacity)
            snprintf(buffer, capacity, "%s", text);
        if (size)
            *size = (void *)(buffer && capacity ? length < capacity ? length : capacity - 1 : 0);
    }
}

static CUresult load(const char *function, void **module, const void *image, size_t limit, unsigned count, const int *options,
                     void **values)
{
    const struct sim_runtime *functions;
    char log[SIM_MAX_REFUSAL_LENGTH] = "";
    RETURN_IF_ERROR(enter_runtime(function, &functions));
    REQUIRE(module && image);
    RETURN_IF_ERROR(check_jit_options(count, options, values));
    const CUresult result = functions->load_module(image, limit, log, sizeof log, module);
    write_jit_logs(count, options, values, log);
    return result;
}

CUresult read_file(const char *path, char **content, size_t *length)
{
    FILE *file = fopen(path, "rb");
    RETURN_UNLESS(file, ERROR_FILE_NOT_FOUND);
    char *data = NULL;
    size_t size = 0, capacity = 0;
    do {
        char *larger = size == capacity ? realloc(data, (capacity = 2 * capacity + 65536) + 1) : data;
        if (!larger)
            break;
        data = larger;
        size += fread(data + size, 1, capacity - size, file);
    } while (size == capacity);
    fclose(file);
    if (!data || size >= capacity) {
        free(data);
        return ERROR_OUT_OF_MEMORY;
    }
    data[size] = '\0';
    *content = data;
    *length = size;
    return SUCCESS;
}

static CUresult load_file(const char *function, void **module, const char *path, unsigned count, const int *options, void **values)
{
    char *data;
    size_t size;
    RETURN_IF_ERROR(enter_context(function));
    REQUIRE(module && path);
    RETURN_IF_ERROR(read_file(path, &data, &size));
    const CUresult result = load(function, module, data, size + 1, count, options, values);
    free(data);
    return result;
}

SIM_EXPORT CUresult cuModuleLoad(void **module, const char *path)
{
    return load_file(__func__, module, path, 0, NULL, NULL);
}

SIM_EXPORT CUresult cuModuleLoadData(void **module, const void *image)
{
    return load(__func__, module, image, SIZE_MAX, 0, NULL, NULL);
}

SIM_EXPORT CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values)
{
    return load(__func__, module, image, SIZE_MAX, count, options, values);
}

SIM_EXPORT CUresult cuModuleLoadFatBinary(void **module, const void *image)
{
    return load(__func__, module, image, SIZE_MAX, 0, NULL, NULL);
}

SIM_EXPORT CUresult cuModuleUnload(void *module)
{
    ENTER_RUNTIME(functions);
    return module ? functions->unload_module(module) : ERROR_INVALID_HANDLE;
}

static CUresult find_function(const char *caller, void **function, void *module, const char *name)
{
    const struct sim_runtime *functions;
    RETURN_IF_ERROR(enter_runtime(caller, &functions));
    REQUIRE(function && name);
    return module ? functions->find_function(module, name, function) : ERROR_INVALID_HANDLE;
}

static CUresult find_global(const char *caller, CUdeviceptr *address, size_t *size, void *module, const char *name)
{
    const struct sim_runtime *functions;
    void *found = NULL;
    size_t found_size = 0;
    RETURN_IF_ERROR(enter_runtime(caller, &functions));
    if (!name || !module)
        return name ? ERROR_INVALID_HANDLE : ERROR_INVALID_VALUE;
    RETURN_IF_ERROR(functions->find_global(module, name, &found, &found_size));
    if (address)
        *address = (CUdeviceptr)found;
    if (size)
        *size = found_size;
    return SUCCESS;
}

SIM_EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    return find_function(__func__, function, module, name);
}

SIM_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, void *module, const char *name)
{
    return find_global(__func__, address, size, module, name);
}

SIM_EXPORT CUresult cuLibraryLoadData(void **library, const void *image, int *options, void **values, unsigned count,
                                      int *library_options, void **library_values, unsigned library_count)
{
    (void)library_options, (void)library_values, (void)library_count;
    return load(__func__, library, image, SIZE_MAX, count, options, values);
}

SIM_EXPORT CUresult cuLibraryLoadFromFile(void **library, const char *path, int *options, void **values, unsigned count,
                                          int *library_options, void **library_values, unsigned library_count)
{
    (void)library_options, (void)library_values, (void)library_count;
    return load_file(__func__, library, path, count, options, values);
}

SIM_EXPORT CUresult cuLibraryUnload(void *library)
{
    RETURN_IF_ERROR(enter(__func__));
    return cuModuleUnload(library);
}

SIM_EXPORT CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    return find_function(__func__, kernel, library, name);
}

SIM_EXPORT CUresult cuLibraryGetModule(void **module, void *library)
{
    ENTER_RUNTIME(functions);
    if (!module || !functions->is_module(library))
        return module ? ERROR_INVALID_HANDLE : ERROR_INVALID_VALUE;
    *module = library;
    return SUCCESS;
}

SIM_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, void *library, const char *name)
{
    return find_global(__func__, address, size, library, name);
}

SIM_EXPORT CUresult cuKernelGetFunction(void **function, void *kernel)
{
    ENTER_RUNTIME(functions);
    if (!function || !functions->is_function(kernel))
        return function ? ERROR_INVALID_HANDLE : ERROR_INVALID_VALUE;
    *function = kernel;
    return SUCCESS;
}

SIM_EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *function)
{
    ENTER_RUNTIME(functions);
    return value ? functions->function_attribute(function, attribute, value) : ERROR_INVALID_VALUE;
}

SIM_EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, void *kernel, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    return cuFuncGetAttribute(value, attribute, kernel);
}

SIM_EXPORT CUresult cuFuncSetAttribute(void *function, int attribute, int value)
{
    ENTER_RUNTIME(functions);
    return functions->set_function_attribute(function, attribute, value);
}

SIM_EXPORT CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    return cuFuncSetAttribute(kernel, attribute, value);
}

SIM_EXPORT CUresult cuFuncSetCacheConfig(void *function, int config)
{
    enum { PREFER_EQUAL = 3 };
    ENTER_RUNTIME(functions);
    REQUIRE(config >= 0 && config <= PREFER_EQUAL);
    return functions->is_function(function) ? SUCCESS : ERROR_INVALID_HANDLE;
}

/* The parameters as one buffer, if `extra` has it. Its data is NULL otherwise. */
static struct sim_parameter_buffer buffer_in(void **extra)
{
    static void *const buffer_key = (void *)1, *const size_key = (void *)2;
    struct sim_parameter_buffer buffer = {NULL, 0};
    for (; extra && *extra; extra += 2) {
        if (*extra == buffer_key)
            buffer.data = extra[1];
        else if (*extra == size_key && extra[1])
            buffer.size = *(const size_t *)extra[1];
    }
    return buffer;
}

static CUresult launch(void *function, const struct sim_launch *launched, CUstream stream, void **parameters, void **extra)
{
    const struct sim_runtime *functions = find_runtime();
    if (faults_are_used())
        faults_at(CLOCK_LAUNCHES, current_context()->gpu);
    RETURN_UNLESS(functions, ERROR_NOT_SUPPORTED);
    if (!functions->is_function(function))
        return ERROR_INVALID_HANDLE;
    REQUIRE(is_valid_shape(launched) && (!parameters || !extra));
    const struct sim_parameter_buffer buffer = buffer_in(extra);
    return functions->launch_function(function, launched, stream, parameters, buffer.data ? &buffer : NULL);
}

SIM_EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_memory, CUstream stream,
                                   void **parameters, void **extra)
{
    RETURN_IF_ERROR(enter_context(__func__));
    const struct sim_launch launched = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_memory, false, false};
    return launch(function, &launched, stream, parameters, extra);
}

SIM_EXPORT CUresult cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                              unsigned block_x, unsigned block_y, unsigned block_z,
                                              unsigned shared_memory, CUstream stream, void **parameters)
{
    RETURN_IF_ERROR(enter_context(__func__));
    const struct sim_launch launched = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_memory, true, false};
    return launch(function, &launched, stream, parameters, NULL);
}

struct launch_configuration {
    unsigned grid[3], block[3];
    unsigned shared_memory;
    CUstream stream;
    const struct launch_attribute *attributes;
    unsigned attribute_count;
};

SIM_EXPORT CUresult cuLaunchKernelEx(const struct launch_configuration *configuration, void *function, void **parameters,
                                     void **extra)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(configuration);
    const unsigned *grid = configuration->grid, *block = configuration->block;
    struct sim_launch launched = {
        .grid = {grid[0], grid[1], grid[2]},
        .block = {block[0], block[1], block[2]},
        .shared_memory = configuration->shared_memory,
    };
    read_launch_attributes(&launched, configuration->attributes, configuration->attribute_count);
    return launch(function, &launched, configuration->stream, parameters, extra);
}

SIM_EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, void *function, const struct launch_configuration *launch)
{
    RETURN_IF_ERROR(enter_context(__func__));
    REQUIRE(clusters && launch);
    if (!find_runtime() || !find_runtime()->is_function(function))
        return ERROR_INVALID_HANDLE;
    *clusters = current_context()->processors;
    return SUCCESS;
}

SIM_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block_size,
                                                                size_t shared_memory)
{
    ENTER_RUNTIME(functions);
    REQUIRE(blocks && block_size > 0);
    return functions->function_occupancy(function, block_size, shared_memory, blocks);
}
