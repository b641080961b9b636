/* The CUDA runtime: launches of kernels.
 *
 * Without computation, a kernel that does not run does nothing. */
#include "runtime.h"

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
    if (configuration_count == 0)
        return fail(ERROR_MISSING_CONFIGURATION);
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

static struct work work_of(const struct simulated_kernel *kernel, void **arguments)
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

static cudaError_t launch(const void *function, struct dim3 grid, struct dim3 block, void **arguments, void *handle,
                          const struct sim_device *device)
{
    struct stream *stream = find_stream(handle, device);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!stream || stream->device != device->ordinal)
        return ERROR_INVALID_HANDLE;
    if (!function)
        return ERROR_INVALID_DEVICE_FUNCTION;
    if (threads == 0 || threads > SIM_MAX_THREADS_PER_BLOCK || grid.x == 0 || grid.y == 0 || grid.z == 0)
        return ERROR_INVALID_CONFIGURATION;
    const struct simulated_kernel *kernel = find_simulated_kernel(function);
    if (!kernel && computes())
        return refuse_kernel(function);
    const struct work work = work_of(kernel, arguments);
    return submit(stream, &work);
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                    size_t shared_memory, void *stream)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    (void)shared_memory;
    return finish(launch(function, grid, block, arguments, stream, device));
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block,
                                               void **arguments, size_t shared_memory, void *stream)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaLaunchKernel(function, grid, block, arguments, shared_memory, stream);
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
    void *attributes;
    unsigned attribute_count;
};

EXPORT cudaError_t cudaLaunchKernelExC(const struct launch_configuration *configuration, const void *function,
                                       void **arguments)
{
    RETURN_IF_ERROR(enter(__func__));
    if (!configuration)
        return fail(ERROR_INVALID_VALUE);
    return cudaLaunchKernel(function, configuration->grid, configuration->block, arguments,
                            configuration->shared_memory, configuration->stream);
}
