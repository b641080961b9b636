/* The CUDA runtime: the calls for attributes and occupancy of kernels, which ptx_kernels.c answers. A kernel that does not run
 * has those of a small one. */
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

enum { LAST = 8 }; /* of the attributes as the driver numbers them, that the runtime has */

struct ptx_kernel *find_registered(const void *function, const struct sim_device *device)
{
    const char *name;
    struct image *image = retain_kernel_image(function, &name);
    struct ptx_kernel *kernel = image && image->data ? find_ptx_kernel(image, name, device) : NULL;
    if (image && !kernel)
        image_release(image);
    return kernel;
}

/* Returns the kernel if it runs, or NULL. */
static struct ptx_kernel *find_running(const void *function, const struct sim_device *device)
{
    struct ptx_kernel *kernel = computes() ? find_registered(function, device) : NULL;
    const bool runs = kernel && translate(kernel) == SUCCESS;
    if (kernel && !runs)
        image_release(kernel->program->image);
    return runs ? kernel : NULL;
}

static void release(const struct ptx_kernel *kernel)
{
    if (kernel)
        image_release(kernel->program->image);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct function_attributes *attributes, const void *function)
{
    ENTER_CONTEXT(device);
    RETURN_UNLESS(attributes && function, fail(attributes ? ERROR_INVALID_DEVICE_FUNCTION : ERROR_INVALID_VALUE));
    const struct ptx_kernel *kernel = find_running(function, device);
    int values[LAST + 1];
    for (int i = 0; i <= LAST; i++)
        read_attribute(kernel, device, i, &values[i]);
    release(kernel);
    *attributes = (struct function_attributes){
        .shared_memory = (size_t)values[1],
        .constant_memory = (size_t)values[2],
        .local_memory = (size_t)values[3],
        .threads_per_block = values[0],
        .registers = values[4],
        .ptx_version = values[5],
        .binary_version = values[6],
        .dynamic_shared_memory = values[LAST],
        .preferred_carveout = -1,
    };
    return SUCCESS;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    ENTER_CONTEXT(device);
    RETURN_UNLESS(function, fail(ERROR_INVALID_DEVICE_FUNCTION));
    struct ptx_kernel *kernel = find_running(function, device);
    const cudaError_t error = set_attribute(kernel, device, attribute, value);
    release(kernel);
    return finish(error);
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

EXPORT cudaError_t cudaFuncSetSharedMemConfig(const void *function, int config)
{
    enum { EIGHT_BYTES = 2 };
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    REQUIRE(config >= 0 && config <= EIGHT_BYTES);
    return finish(function ? SUCCESS : ERROR_INVALID_DEVICE_FUNCTION);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int block_size, size_t shared_memory,
                                                                          unsigned flags)
{
    ENTER_CONTEXT(device);
    (void)flags;
    REQUIRE(blocks && function && block_size > 0);
    const struct ptx_kernel *kernel = find_running(function, device);
    *blocks = resident_blocks(device, kernel, (uint64_t)block_size, shared_memory);
    release(kernel);
    return SUCCESS;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                                 size_t shared_memory)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_memory, 0);
}
