/* The CUDA runtime: modules that the driver loads, for programs that use the driver's functions. */
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"
#include "images.h"

struct function {
    struct function *next;
    struct module *module;
    bool is_reported;
    char name[];
};

struct module {
    struct image *image;
    char *copy; /* the program may free what it has loaded */
    struct function *functions;
};

RENEWED_LOCK(lock)

static size_t size_of_image(const char *data)
{
    static const uint32_t fat_binary = 0xba55ed50;
    uint64_t size;
    uint16_t header;
    if (memcmp(data, &fat_binary, sizeof fat_binary) == 0) {
        memcpy(&header, data + 6, sizeof header);
        memcpy(&size, data + 8, sizeof size);
        return header + size;
    }
    /* Of machine code, what says so is enough. */
    return memcmp(data, "\177ELF", 4) == 0 ? 16 : strlen(data) + 1;
}

cudaError_t load_module(const void *data, void **handle)
{
    struct module *module = calloc(1, sizeof *module);
    struct image *image = module ? new_image(data) : NULL;
    size_t size = image ? size_of_image(image->data) : 0;
    char *copy = image ? malloc(size) : NULL;
    if (!copy) {
        free(image);
        free(module);
        return ERROR_OUT_OF_MEMORY;
    }
    memcpy(copy, image->data, size);
    image->data = copy;
    *module = (struct module){.image = image, .copy = copy};
    *handle = module;
    return SUCCESS;
}

/* Graphs may still launch its kernels: their code and variables stay. */
cudaError_t unload_module(void *handle)
{
    struct module *module = handle;
    module->image->is_gone = true;
    return SUCCESS;
}

cudaError_t find_function(void *handle, const char *name, void **found)
{
    struct module *module = handle;
    pthread_mutex_lock(&lock);
    struct function *function = module->functions;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (!function && (function = calloc(1, sizeof *function + strlen(name) + 1))) {
        strcpy(function->name, name);
        function->module = module;
        function->next = module->functions;
        module->functions = function;
    }
    pthread_mutex_unlock(&lock);
    *found = function;
    return function ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

cudaError_t find_global(void *handle, const char *name, void **address, size_t *size)
{
    struct module *module = handle;
    cudaError_t error = computes() ? find_variable(module->image, name, driver->current(), address, size) : ERROR_NOT_SUPPORTED;
    return error == ERROR_NOT_SUPPORTED ? ERROR_NOT_FOUND : error;
}

static struct translated *translated_for(const struct function *function, const struct sim_device *device)
{
    return find_translated(function->module->image, function->name, device->major * 10 + device->minor);
}

/* Makes pointers to the parameters in a copy of a buffer, in one allocation that the caller frees. An H100 refused 24 bytes for
 * 8 of parameters, and an H200 accepted 4 for 12: what is missing is zeros here. That padding to 8 bytes is accepted is assumed. */
static cudaError_t point_into(const struct sim_parameter_buffer *buffer, const struct sim_kernel_facts *facts, void ***pointers)
{
    size_t largest = ((size_t)facts->parameter_size + 7) & ~(size_t)7;
    if (buffer->size > largest)
        return ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (buffer->size == 0 && facts->parameter_count)
        return ERROR_INVALID_VALUE;
    *pointers = calloc(1, (facts->parameter_count + 1) * sizeof **pointers + largest);
    if (!*pointers)
        return ERROR_OUT_OF_MEMORY;
    char *copy = (char *)(*pointers + facts->parameter_count + 1);
    memcpy(copy, buffer->data, buffer->size);
    for (uint32_t i = 0; i < facts->parameter_count; i++)
        (*pointers)[i] = copy + facts->parameters[i][0];
    return SUCCESS;
}

cudaError_t launch_function(void *handle, const struct sim_launch *launch, void *stream_handle, void **parameters,
                            const struct sim_parameter_buffer *buffer)
{
    struct function *function = handle;
    const struct sim_device *device = driver->current();
    struct stream *stream = find_stream(stream_handle, device);
    if (!stream)
        return ERROR_INVALID_HANDLE;
    struct translated *kernel = translated_for(function, device);
    if (!kernel)
        return ERROR_OUT_OF_MEMORY;
    const char *reason = refusal_of_launch(launch->has_clusters);
    cudaError_t error = reason ? ERROR_NOT_SUPPORTED : translate(kernel);
    void **pointers = NULL;
    if (error == SUCCESS && buffer)
        error = point_into(buffer, &kernel->facts, &pointers);
    else if (error == SUCCESS && kernel->facts.parameter_count && !parameters)
        error = ERROR_INVALID_VALUE;
    if (error == SUCCESS)
        error = launch_translated(stream, kernel, launch, buffer ? pointers : parameters);
    free(pointers);
    if (error != ERROR_NOT_SUPPORTED)
        return error;
    bool is_reported = function->is_reported;
    function->is_reported = true;
    return report_refusal(function->name, reason ? reason : kernel->problem, is_reported);
}

cudaError_t function_attribute(void *handle, int attribute, int *value)
{
    const struct sim_device *device = driver->current();
    struct translated *kernel = computes() ? translated_for(handle, device) : NULL;
    if (!kernel || translate(kernel) != SUCCESS)
        kernel = NULL;
    return read_attribute(kernel, device, attribute, value);
}

cudaError_t set_function_attribute(void *handle, int attribute, int value)
{
    const struct sim_device *device = driver->current();
    struct translated *kernel = computes() ? translated_for(handle, device) : NULL;
    return kernel && translate(kernel) == SUCCESS ? set_attribute(kernel, device, attribute, value) : SUCCESS;
}

cudaError_t function_occupancy(void *handle, int threads, size_t dynamic_shared, int *blocks)
{
    const struct sim_device *device = driver->current();
    struct translated *kernel = computes() ? translated_for(handle, device) : NULL;
    bool runs = kernel && translate(kernel) == SUCCESS;
    *blocks = resident_blocks(device, runs ? kernel : NULL, (uint64_t)threads, dynamic_shared);
    return SUCCESS;
}
