/* The CUDA runtime: launches of kernels: which are simulated, which run from their PTX, which are refused.
 *
 * With --no-compute, launching a kernel that is not simulated succeeds and does nothing. */
#include <dlfcn.h>
#include <string.h>

#include "images.h"

struct dim3 {
    unsigned x, y, z;
};

static _Thread_local struct {
    struct dim3 grid, block;
    size_t shared_memory;
    void *stream;
} configurations[8];
static _Thread_local unsigned configuration_count;

EXPORT unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared_memory, void *stream)
{
    if (configuration_count == sizeof configurations / sizeof *configurations)
        return 1;
    configurations[configuration_count].grid = grid;
    configurations[configuration_count].block = block;
    configurations[configuration_count].shared_memory = shared_memory;
    configurations[configuration_count++].stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared_memory, void *stream)
{
    RETURN_UNLESS(configuration_count != 0, fail(ERROR_MISSING_CONFIGURATION));
    *grid = configurations[--configuration_count].grid;
    *block = configurations[configuration_count].block;
    *shared_memory = configurations[configuration_count].shared_memory;
    *(void **)stream = configurations[configuration_count].stream;
    return SUCCESS;
}

static cudaError_t do_nothing(struct stream *stream, const struct work *work)
{
    (void)stream, (void)work;
    return SUCCESS;
}

static const struct work_type no_kernel = {.node = "KERNEL", .run = do_nothing};

static struct work work_of(const struct torch_kernel *kernel, void **arguments)
{
    struct work work = {.type = &no_kernel};
    if (!kernel)
        return work;
    if (kernel->type == &spin_kernel) {
        work.kernel.duration = *(const int64_t *)arguments[0];
        if (work.kernel.duration > 0)
            work.type = &spin_kernel;
    } else if (kernel->type == &barrier_kernel) {
        work.type = &barrier_kernel;
        work.barrier.value = *(_Atomic int32_t *const *)arguments[0];
        work.barrier.timeout_ms = *(const uint64_t *)arguments[1];
    } else if (computes()) { /* without computation, the memory does not hold what the program sends */
        work.type = &nan_check;
        work.nan_check.type = kernel->checked;
        work.nan_check.data = *(const char *const *)arguments[0];
        work.nan_check.count = *(const size_t *)arguments[1];
    }
    return work;
}

/* Whether the kernel is one of torch's, which have no PTX: its op should have run instead. */
static bool is_torchs(const void *function)
{
    Dl_info info;
    const char *name = dladdr(function, &info) && info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
    return name && strncmp(name, "/libtorch", strlen("/libtorch")) == 0;
}

/* Launches a kernel that is not torch's own from its PTX. */
static cudaError_t launch_from_ptx(const void *function, struct stream *stream, const struct sim_launch *shape,
                                   void **arguments)
{
    const char *reason = refusal_of_launch(shape->has_clusters);
    struct ptx_kernel *kernel = find_registered(function, &driver->devices[stream->device]);
    cudaError_t error = reason || !kernel ? ERROR_NOT_SUPPORTED : launch_ptx_kernel(stream, kernel, shape, arguments);
    if (error == ERROR_NOT_SUPPORTED)
        error = refuse_kernel(function, is_torchs(function) || !kernel ? NULL : reason ? reason : kernel->problem);
    if (kernel)
        image_release(kernel->program->image);
    return error;
}

static cudaError_t launch(const void *function, const struct sim_launch *shape, void **arguments, void *handle,
                          const struct sim_device *device)
{
    struct stream *stream = find_stream(handle, device);
    if (has_faults())
        driver->faults_at(CLOCK_LAUNCHES, device->gpu);
    RETURN_UNLESS(stream && stream->device == device->ordinal, ERROR_INVALID_HANDLE);
    RETURN_UNLESS(function, ERROR_INVALID_DEVICE_FUNCTION);
    const struct torch_kernel *kernel = find_torch_kernel(function);
    if (!is_valid_shape(shape)) {
        struct ptx_kernel *from_ptx = !kernel && computes() ? find_registered(function, device) : NULL;
        if (from_ptx) {
            report_launch(from_ptx, shape, ERROR_INVALID_CONFIGURATION);
            image_release(from_ptx->program->image);
        }
        return ERROR_INVALID_CONFIGURATION;
    }
    if (!kernel && computes())
        return launch_from_ptx(function, stream, shape, arguments);
    const struct work work = work_of(kernel, arguments);
    return submit(stream, &work);
}

static struct sim_launch shape_of(struct dim3 grid, struct dim3 block, size_t shared_memory)
{
    return (struct sim_launch){{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_memory, false, false};
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                    size_t shared_memory, void *stream)
{
    ENTER_CONTEXT(device);
    const struct sim_launch shape = shape_of(grid, block, shared_memory);
    return finish_launch(launch(function, &shape, arguments, stream, device));
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block,
                                               void **arguments, size_t shared_memory, void *stream)
{
    ENTER_CONTEXT(device);
    struct sim_launch shape = shape_of(grid, block, shared_memory);
    shape.is_cooperative = true;
    return finish_launch(launch(function, &shape, arguments, stream, device));
}

/* Code compiled for CUDA 13 fetches a kernel once and launches it. Here a kernel is its host function. */
EXPORT cudaError_t __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return SUCCESS;
}

EXPORT cudaError_t __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                                      size_t shared_memory, void *stream)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_memory, stream);
}

struct launch_configuration {
    struct dim3 grid, block;
    size_t shared_memory;
    void *stream;
    const struct launch_attribute *attributes;
    unsigned attribute_count;
};

EXPORT cudaError_t cudaLaunchKernelExC(const struct launch_configuration *configuration, const void *function,
                                       void **arguments)
{
    ENTER_CONTEXT(device);
    REQUIRE(configuration);
    struct sim_launch shape = shape_of(configuration->grid, configuration->block, configuration->shared_memory);
    read_launch_attributes(&shape, configuration->attributes, configuration->attribute_count);
    return finish_launch(launch(function, &shape, arguments, configuration->stream, device));
}
