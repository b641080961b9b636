/* The CUDA runtime: modules that the driver loads, for programs that use the driver's functions. */
#include <stdlib.h>
#include <string.h>

#include "images.h"
#include "interface/module_handles.h"

struct function {
    struct function *next;
    struct module *module;
    char name[];
};

struct module {
    struct image *image;
    struct function *functions;
};

static void *find_handle(const struct sorted *handles, void *handle)
{
    const struct sorted_item *item = sorted_at_or_below(handles, (uintptr_t)handle);
    return item && item->value == handle ? handle : NULL;
}

bool is_module(void *handle)
{
    pthread_mutex_lock(&driver->handles->lock);
    const bool is_known = find_handle(&driver->handles->modules, handle);
    pthread_mutex_unlock(&driver->handles->lock);
    return is_known;
}

/* Finds the image of a module or a function, which the caller releases, and the function's name, which lives as long. */
static struct image *retain_image(void *handle, const char **name)
{
    pthread_mutex_lock(&driver->handles->lock);
    const struct function *function = name ? find_handle(&driver->handles->functions, handle) : NULL;
    const struct module *module = name ? (function ? function->module : NULL) : find_handle(&driver->handles->modules, handle);
    struct image *image = module ? module->image : NULL;
    if (image)
        image_retain(image);
    if (function)
        *name = function->name;
    pthread_mutex_unlock(&driver->handles->lock);
    return image;
}

bool is_function(void *handle)
{
    pthread_mutex_lock(&driver->handles->lock);
    const bool is_known = find_handle(&driver->handles->functions, handle);
    pthread_mutex_unlock(&driver->handles->lock);
    return is_known;
}

/* What a GPU's driver finds when it compiles an image. */
static cudaError_t check_image(struct image *image, const struct sim_device *device, char *log, size_t log_size)
{
    const struct program *program = find_program(image, device);
    cudaError_t error = program ? SUCCESS : ERROR_OUT_OF_MEMORY;
    if (program && (program->is_damaged || (program->part_count == 0 && !program->is_code)))
        error = ERROR_INVALID_IMAGE;
    for (size_t i = 0; error == SUCCESS && i < program->part_count; i++)
        if (program->parts[i].compression == PART_PLAIN)
            error = check_ptx(program->parts[i].data, program->parts[i].size, log, log_size);
    return error;
}

cudaError_t load_module(const void *data, size_t limit, char *log, size_t log_size, void **handle)
{
    struct module *module = calloc(1, sizeof *module);
    struct image *image = module ? new_image(data) : NULL;
    cudaError_t error = image ? own_image(image, limit) : ERROR_OUT_OF_MEMORY;
    const bool is_own = error == SUCCESS;
    if (is_own) {
        module->image = image;
        error = check_image(image, driver->current(), log, log_size);
    }
    if (error == SUCCESS) {
        pthread_mutex_lock(&driver->handles->lock);
        error = sorted_insert(&driver->handles->modules, (uintptr_t)module, module) ? SUCCESS : ERROR_OUT_OF_MEMORY;
        pthread_mutex_unlock(&driver->handles->lock);
    }
    if (error == SUCCESS) {
        *handle = module;
        return SUCCESS;
    }
    if (is_own)
        image_release(image);
    else
        free(image);
    free(module);
    return error;
}

/* Launches under way, and graphs that launch its kernels, keep the image. */
cudaError_t unload_module(void *handle)
{
    pthread_mutex_lock(&driver->handles->lock);
    struct module *module = find_handle(&driver->handles->modules, handle);
    if (module)
        sorted_remove(&driver->handles->modules, sorted_index(&driver->handles->modules, (uintptr_t)module));
    for (struct function *function = module ? module->functions : NULL, *next; function; function = next) {
        next = function->next;
        sorted_remove(&driver->handles->functions, sorted_index(&driver->handles->functions, (uintptr_t)function));
        free(function);
    }
    pthread_mutex_unlock(&driver->handles->lock);
    RETURN_UNLESS(module, ERROR_INVALID_HANDLE);
    image_release(module->image);
    free(module);
    return SUCCESS;
}

/* Without machine code, whose kernels are unknown. Those of compressed PTX are known once it is translated. */
static cudaError_t check_kernel(struct image *image, const struct sim_device *device, const char *name)
{
    const struct program *program = find_program(image, device);
    bool is_compressed = false;
    if (!program || program->part_count == 0)
        return program ? SUCCESS : ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < program->part_count; i++) {
        is_compressed |= program->parts[i].compression != PART_PLAIN;
        if (program->parts[i].compression == PART_PLAIN && has_kernel(&program->parts[i], name))
            return SUCCESS;
    }
    if (!is_compressed || !computes())
        return is_compressed ? SUCCESS : ERROR_NOT_FOUND;
    struct ptx_kernel *kernel = find_ptx_kernel(image, name, device);
    const bool is_missing = kernel && translate(kernel) != SUCCESS && strstr(kernel->problem, ": no kernel ");
    return is_missing ? ERROR_NOT_FOUND : SUCCESS;
}

cudaError_t find_function(void *handle, const char *name, void **found)
{
    struct image *image = retain_image(handle, NULL);
    RETURN_UNLESS(image, ERROR_INVALID_HANDLE);
    cudaError_t error = check_kernel(image, driver->current(), name);
    pthread_mutex_lock(&driver->handles->lock);
    struct module *module = find_handle(&driver->handles->modules, handle); /* unless another thread has just unloaded it */
    struct function *function = error == SUCCESS && module ? module->functions : NULL;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (error == SUCCESS && module && !function && (function = calloc(1, sizeof *function + strlen(name) + 1))) {
        strcpy(function->name, name);
        function->module = module;
        function->next = module->functions;
        if (sorted_insert(&driver->handles->functions, (uintptr_t)function, function)) {
            module->functions = function;
        } else {
            free(function);
            function = NULL;
        }
    }
    pthread_mutex_unlock(&driver->handles->lock);
    image_release(image);
    *found = function;
    return error != SUCCESS || function ? error : module ? ERROR_OUT_OF_MEMORY : ERROR_INVALID_HANDLE;
}

cudaError_t find_global(void *handle, const char *name, void **address, size_t *size)
{
    struct image *image = retain_image(handle, NULL);
    RETURN_UNLESS(image, ERROR_INVALID_HANDLE);
    cudaError_t error = computes() ? find_variable(image, name, driver->current(), address, size) : ERROR_NOT_SUPPORTED;
    image_release(image);
    return error == ERROR_NOT_SUPPORTED ? ERROR_NOT_FOUND : error;
}

/* Finds the kernel that a handle means on the current device. The caller releases its image. */
static cudaError_t find_kernel(void *handle, struct ptx_kernel **kernel)
{
    const struct sim_device *device = driver->current();
    const char *name;
    struct image *image = retain_image(handle, &name);
    *kernel = image ? find_ptx_kernel(image, name, device) : NULL;
    if (image && !*kernel)
        image_release(image);
    return *kernel ? SUCCESS : image ? ERROR_OUT_OF_MEMORY : ERROR_INVALID_HANDLE;
}

/* Makes pointers to the parameters in a copy of a buffer, in one allocation that the caller frees. An H100 refused 24 bytes for
 * 8 of parameters, and an H200 accepted 4 for 12: what is missing is zeros here. That padding to 8 bytes is accepted is assumed. */
static cudaError_t point_into(const struct sim_parameter_buffer *buffer, const struct sim_kernel_facts *facts, void ***pointers)
{
    size_t largest = ((size_t)facts->parameter_size + 7) & ~(size_t)7;
    RETURN_UNLESS(buffer->size <= largest, ERROR_LAUNCH_OUT_OF_RESOURCES);
    RETURN_UNLESS(buffer->size != 0 || !facts->parameter_count, ERROR_INVALID_VALUE);
    *pointers = calloc(1, (facts->parameter_count + 1) * sizeof **pointers + largest);
    RETURN_UNLESS(*pointers, ERROR_OUT_OF_MEMORY);
    char *copy = (char *)(*pointers + facts->parameter_count + 1);
    memcpy(copy, buffer->data, buffer->size);
    for (uint32_t i = 0; i < facts->parameter_count; i++)
        (*pointers)[i] = copy + facts->parameters[i][0];
    return SUCCESS;
}

static cudaError_t launch_kernel(struct ptx_kernel *kernel, const struct sim_launch *launch, struct stream *stream,
                                 void **parameters, const struct sim_parameter_buffer *buffer)
{
    const char *reason = refusal_of_launch(launch->has_clusters);
    cudaError_t error = reason ? ERROR_NOT_SUPPORTED : translate(kernel);
    void **pointers = NULL;
    if (error == SUCCESS && buffer)
        error = point_into(buffer, &kernel->facts, &pointers);
    else if (error == SUCCESS && kernel->facts.parameter_count && !parameters)
        error = ERROR_INVALID_VALUE;
    if (error == SUCCESS)
        error = launch_ptx_kernel(stream, kernel, launch, buffer ? pointers : parameters);
    free(pointers);
    if (error != ERROR_NOT_SUPPORTED)
        return error;
    bool is_reported = kernel->is_reported;
    kernel->is_reported = true;
    return report_refusal(kernel->name, reason ? reason : kernel->problem, is_reported);
}

cudaError_t launch_function(void *handle, const struct sim_launch *launch, void *stream_handle, void **parameters,
                            const struct sim_parameter_buffer *buffer)
{
    struct stream *stream = find_stream(stream_handle, driver->current());
    struct ptx_kernel *kernel;
    RETURN_UNLESS(stream && is_function(handle), ERROR_INVALID_HANDLE);
    if (!computes())
        return SUCCESS;
    RETURN_IF_ERROR(find_kernel(handle, &kernel));
    const cudaError_t error = launch_kernel(kernel, launch, stream, parameters, buffer);
    image_release(kernel->program->image);
    return error;
}

/* Finds a kernel as find_kernel() does, or sets it to NULL if it does not run. */
static cudaError_t find_running_kernel(void *handle, struct ptx_kernel **kernel)
{
    *kernel = NULL;
    if (!computes())
        return is_function(handle) ? SUCCESS : ERROR_INVALID_HANDLE;
    RETURN_IF_ERROR(find_kernel(handle, kernel));
    if (translate(*kernel) != SUCCESS) {
        image_release((*kernel)->program->image);
        *kernel = NULL;
    }
    return SUCCESS;
}

cudaError_t function_attribute(void *handle, int attribute, int *value)
{
    struct ptx_kernel *kernel;
    RETURN_IF_ERROR(find_running_kernel(handle, &kernel));
    const cudaError_t error = read_attribute(kernel, driver->current(), attribute, value);
    if (kernel)
        image_release(kernel->program->image);
    return error;
}

cudaError_t set_function_attribute(void *handle, int attribute, int value)
{
    struct ptx_kernel *kernel;
    RETURN_IF_ERROR(find_running_kernel(handle, &kernel));
    const cudaError_t error = set_attribute(kernel, driver->current(), attribute, value);
    if (kernel)
        image_release(kernel->program->image);
    return error;
}

cudaError_t function_occupancy(void *handle, int threads, size_t dynamic_shared, int *blocks)
{
    struct ptx_kernel *kernel;
    RETURN_IF_ERROR(find_running_kernel(handle, &kernel));
    *blocks = resident_blocks(driver->current(), kernel, (uint64_t)threads, dynamic_shared);
    if (kernel)
        image_release(kernel->program->image);
    return SUCCESS;
}
