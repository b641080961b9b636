/* The CUDA runtime: attributes and occupancy of kernels. A kernel that does not run has those of a small one. */
#include "images.h"

struct function_attributes {
    size_t shared_memory, constant_memory, local_memory;
    int threads_per_block;
    int registers;
    int ptx_version, binary_version;
    int caches_globals;
    int dynamic_shared_memory;
    int preferred_carveout;
    int reserved[23];
};
_Static_assert(sizeof(struct function_attributes) == 144, "as in CUDA's ABI");

enum { REGISTERS = 32, SHARED_LIMIT = 48 << 10 };

/* Returns the kernel if it runs, or NULL. */
static struct translated *find_running(const void *function, const struct sim_device *device)
{
    const char *name;
    struct image *image = computes() ? find_kernel_image(function, &name) : NULL;
    struct translated *kernel = image && image->data ? find_translated(image, name, device->major * 10 + device->minor) : NULL;
    return kernel && translate(kernel) == SUCCESS ? kernel : NULL;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct function_attributes *attributes, const void *function)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!attributes || !function)
        return fail(attributes ? ERROR_INVALID_DEVICE_FUNCTION : ERROR_INVALID_VALUE);
    int version = device->major * 10 + device->minor;
    const struct translated *kernel = find_running(function, device);
    *attributes = (struct function_attributes){
        .threads_per_block = SIM_MAX_THREADS_PER_BLOCK,
        .registers = REGISTERS,
        .ptx_version = version,
        .binary_version = version,
        .dynamic_shared_memory = SHARED_LIMIT,
        .preferred_carveout = -1,
    };
    if (kernel) {
        const struct sim_kernel_facts *facts = &kernel->facts;
        attributes->shared_memory = facts->shared_size;
        attributes->constant_memory = facts->constant_size;
        attributes->local_memory = facts->local_size;
        attributes->threads_per_block = facts->thread_limit ? (int)facts->thread_limit : SIM_MAX_THREADS_PER_BLOCK;
        attributes->ptx_version = (int)facts->ptx_version;
        attributes->dynamic_shared_memory = kernel->dynamic_limit ? kernel->dynamic_limit : SHARED_LIMIT - (int)facts->shared_size;
    }
    return SUCCESS;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    enum { DYNAMIC_SHARED = 8, LAST = 15 };
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!function)
        return fail(ERROR_INVALID_DEVICE_FUNCTION);
    if (attribute < DYNAMIC_SHARED || attribute > LAST)
        return fail(ERROR_INVALID_VALUE);
    struct translated *kernel = attribute == DYNAMIC_SHARED ? find_running(function, device) : NULL;
    if (!kernel)
        return SUCCESS;
    if (value < 0 || kernel->facts.shared_size + (size_t)value > largest_shared_memory(device))
        return fail(ERROR_INVALID_VALUE);
    kernel->dynamic_limit = value;
    return SUCCESS;
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)ordinal;
    return cudaFuncSetAttribute(kernel, attribute, value);
}

EXPORT cudaError_t cudaFuncSetCacheConfig(const void *function, int config)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)config;
    return finish(function ? SUCCESS : ERROR_INVALID_DEVICE_FUNCTION);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int block_size, size_t shared_memory,
                                                                          unsigned flags)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    (void)flags;
    if (!blocks || !function || block_size <= 0)
        return fail(ERROR_INVALID_VALUE);
    *blocks = resident_blocks(device, find_running(function, device), (uint64_t)block_size, shared_memory);
    return SUCCESS;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                                 size_t shared_memory)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_memory, 0);
}
