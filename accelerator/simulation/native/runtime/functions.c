/* The CUDA runtime: attributes and occupancy of kernels. */
#include "runtime.h"

struct function_attributes {
    size_t shared_memory, constant_memory, local_memory;
    int threads_per_block;
    int registers;
    int ptx_version, binary_version;
    int caches_globals;
    int dynamic_shared_memory;
    int reserved[24];
};
_Static_assert(sizeof(struct function_attributes) == 144, "as in CUDA's ABI");

EXPORT cudaError_t cudaFuncGetAttributes(struct function_attributes *attributes, const void *function)
{
    struct sim_device *device;
    RETURN_IF_ERROR(enter_context(__func__, &device));
    if (!attributes || !function)
        return fail(attributes ? ERROR_INVALID_DEVICE_FUNCTION : ERROR_INVALID_VALUE);
    int version = device->major * 10 + device->minor;
    *attributes = (struct function_attributes){
        .threads_per_block = SIM_MAX_THREADS_PER_BLOCK,
        .registers = 32,
        .ptx_version = version,
        .binary_version = version,
        .dynamic_shared_memory = 49152,
    };
    return SUCCESS;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)attribute, (void)value;
    return finish(function ? SUCCESS : ERROR_INVALID_DEVICE_FUNCTION);
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    (void)ordinal;
    return cudaFuncSetAttribute(kernel, attribute, value);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int block_size, size_t shared_memory,
                                                                          unsigned flags)
{
    RETURN_IF_ERROR(enter_context(__func__, NULL));
    (void)shared_memory, (void)flags;
    if (!blocks || !function || block_size <= 0)
        return fail(ERROR_INVALID_VALUE);
    *blocks = SIM_THREADS_PER_PROCESSOR / block_size;
    return SUCCESS;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                                 size_t shared_memory)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_memory, 0);
}
