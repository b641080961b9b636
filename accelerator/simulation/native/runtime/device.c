/* The CUDA runtime: devices, their attributes and properties, access between them. */
#include "runtime.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* cudaDeviceProp, whose layout is part of the interface. Texture and surface limits are 0. CUDA 13 dropped some fields and
 * added others in the reserved area at the end. */
#if CUDART == 12
#define ONLY_12(declaration) declaration;
#define ONLY_12_VALUE(value) value,
enum { PROPERTIES_SIZE = 1032, TEXTURE_AND_SURFACE_INTS = 40, RESERVED_INTS = 63 };
#else
#define ONLY_12(declaration)
#define ONLY_12_VALUE(value)
enum { PROPERTIES_SIZE = 1008, TEXTURE_AND_SURFACE_INTS = 39, RESERVED_INTS = 63 };
#endif

struct properties {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_device_node_mask;
    size_t total_memory;
    size_t shared_memory_per_block;
    int registers_per_block;
    int warp_size;
    size_t memory_pitch;
    int threads_per_block;
    int block_dimensions[3];
    int grid_dimensions[3];
    ONLY_12(int clock_rate)
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment;
    size_t texture_pitch_alignment;
    ONLY_12(int device_overlap)
    int processors;
    ONLY_12(int kernel_time_limit)
    int integrated;
    int maps_host_memory;
    ONLY_12(int compute_mode)
    int texture_and_surface_limits[TEXTURE_AND_SURFACE_INTS];
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc;
    int pci_bus, pci_device, pci_domain;
    int tcc_driver;
    int copy_engines;
    int unified_addressing;
    ONLY_12(int memory_clock_rate)
    int memory_bus_width;
    int l2_cache_size;
    int persisting_l2_cache_size;
    int threads_per_processor;
    int stream_priorities;
    int global_l1_cache, local_l1_cache;
    size_t shared_memory_per_processor;
    int registers_per_processor;
    int managed_memory;
    int is_multi_gpu_board, multi_gpu_board_group;
    int host_native_atomics;
    ONLY_12(int single_to_double_ratio)
    int pageable_memory_access;
    int concurrent_managed_access;
    int compute_preemption;
    int host_pointer_for_registered_memory;
    int cooperative_launch;
    ONLY_12(int cooperative_multi_device_launch)
    size_t shared_memory_per_block_opted_in;
    int pageable_memory_uses_host_page_tables;
    int direct_managed_access_from_host;
    int blocks_per_processor;
    int access_policy_window_size;
    size_t reserved_shared_memory_per_block;
    int host_register;
    int sparse_arrays;
    int read_only_host_register;
    int timeline_semaphores;
    int memory_pools;
    int gpu_direct_rdma, gpu_direct_rdma_flush_options, gpu_direct_rdma_ordering;
    int memory_pool_handle_types;
    int deferred_array_mapping;
    int ipc_events;
    int cluster_launch;
    int unified_function_pointers;
    int reserved[RESERVED_INTS];
};

_Static_assert(sizeof(struct properties) == PROPERTIES_SIZE, "as in CUDA's ABI");
_Static_assert(offsetof(struct properties, major) == 360, "as in CUDA's ABI");
_Static_assert(offsetof(struct properties, processors) == (CUDART == 12 ? 388 : 384), "as in CUDA's ABI");
_Static_assert(offsetof(struct properties, shared_memory_per_processor) == (CUDART == 12 ? 640 : 624),
               "as in CUDA's ABI");

/* Attributes, numbered as in the driver. */
enum attribute {
    CONSTANT_MEMORY = 9,
    WARP_SIZE = 10,
    REGISTERS_PER_BLOCK = 12,
    CLOCK_RATE = 13,
    MEMORY_CLOCK_RATE = 36,
    MEMORY_BUS_WIDTH = 37,
    L2_CACHE_SIZE = 38,
    THREADS_PER_PROCESSOR = 39,
    COPY_ENGINES = 40,
    SHARED_MEMORY_PER_PROCESSOR = 81,
    REGISTERS_PER_PROCESSOR = 82,
    SHARED_MEMORY_PER_BLOCK_OPTED_IN = 97,
    BLOCKS_PER_PROCESSOR = 106,
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
};

/* Those of textures and surfaces, in the order of the properties. */
static const int texture_and_surface_attributes[TEXTURE_AND_SURFACE_INTS] = {
    21, 77, ONLY_12_VALUE(69) 22, 23, 73, 74, 70, 71, 72, 45, 46, 24, 25, 26, 47, 48, 49, 52, 42, 43, 27, 28, 29, 53, 54,
    55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68,
};

static int read_attribute(const struct sim_device *device, int attribute)
{
    int value = 0;
    driver->cuDeviceGetAttribute(&value, attribute, device->ordinal);
    return value;
}

static void describe(struct properties *properties, const struct sim_device *device)
{
    *properties = (struct properties){
        .total_memory = device->memory,
        .shared_memory_per_block = 49152,
        .registers_per_block = read_attribute(device, REGISTERS_PER_BLOCK),
        .warp_size = read_attribute(device, WARP_SIZE),
        .memory_pitch = 2147483647,
        .threads_per_block = 1024,
        .block_dimensions = {1024, 1024, 64},
        .grid_dimensions = {2147483647, 65535, 65535},
        .constant_memory = (size_t)read_attribute(device, CONSTANT_MEMORY),
        .major = device->major,
        .minor = device->minor,
        .texture_alignment = 512,
        .texture_pitch_alignment = 32,
        .processors = device->processors,
        .maps_host_memory = 1,
        .surface_alignment = 512,
        .concurrent_kernels = 1,
        .ecc = 1,
        .pci_bus = (int)device->pci_bus,
        .pci_domain = (int)device->pci_domain,
        .copy_engines = read_attribute(device, COPY_ENGINES),
        .unified_addressing = 1,
        .memory_bus_width = read_attribute(device, MEMORY_BUS_WIDTH),
        .l2_cache_size = read_attribute(device, L2_CACHE_SIZE),
        .threads_per_processor = read_attribute(device, THREADS_PER_PROCESSOR),
        .stream_priorities = 1,
        .global_l1_cache = 1,
        .local_l1_cache = 1,
        .shared_memory_per_processor = (size_t)read_attribute(device, SHARED_MEMORY_PER_PROCESSOR),
        .registers_per_processor = read_attribute(device, REGISTERS_PER_PROCESSOR),
        .managed_memory = 1,
        .concurrent_managed_access = 1,
        .compute_preemption = 1,
        .host_pointer_for_registered_memory = 1,
        .cooperative_launch = 1,
        .shared_memory_per_block_opted_in = (size_t)read_attribute(device, SHARED_MEMORY_PER_BLOCK_OPTED_IN),
        .blocks_per_processor = read_attribute(device, BLOCKS_PER_PROCESSOR),
        .reserved_shared_memory_per_block = (size_t)read_attribute(device, RESERVED_SHARED_MEMORY_PER_BLOCK),
        .host_register = 1,
        .read_only_host_register = 1,
        .memory_pools = 1,
        .memory_pool_handle_types = 1,
        .ipc_events = 1,
        .cluster_launch = 1,
#if CUDART == 12
        .clock_rate = read_attribute(device, CLOCK_RATE),
        .device_overlap = 1,
        .memory_clock_rate = read_attribute(device, MEMORY_CLOCK_RATE),
        .single_to_double_ratio = 2,
#endif
    };
    for (int i = 0; i < TEXTURE_AND_SURFACE_INTS; i++)
        properties->texture_and_surface_limits[i] = read_attribute(device, texture_and_surface_attributes[i]);
    memcpy(properties->name, device->name, sizeof properties->name);
    memcpy(properties->uuid, device->uuid, sizeof properties->uuid);
}

cudaError_t check_device(int ordinal)
{
    return finish(ordinal >= 0 && ordinal < visible_device_count() ? SUCCESS : ERROR_INVALID_DEVICE);
}

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(count);
    *count = visible_device_count();
    return SUCCESS;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct properties *properties, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(check_device(ordinal));
    REQUIRE(properties);
    describe(properties, &driver->devices[ordinal]);
    return SUCCESS;
}

EXPORT cudaError_t cudaGetDeviceProperties_v2(struct properties *properties, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaGetDeviceProperties(properties, ordinal);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    return finish(driver->cuDeviceGetAttribute(value, attribute, ordinal));
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int ordinal)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(check_device(ordinal));
    const struct sim_device *device = &driver->devices[ordinal];
    REQUIRE(text && size >= 13);
    snprintf(text, (size_t)size, "%04X:%02X:00.0", device->pci_domain, device->pci_bus);
    return SUCCESS;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    RETURN_IF_ERROR(enter(__func__));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}

static bool can_access(int ordinal, int peer)
{
    /* A process has one MIG instance at most, so any two devices are GPUs. */
    return ordinal != peer;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer)
{
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(check_device(ordinal));
    RETURN_IF_ERROR(check_device(peer));
    REQUIRE(can);
    *can = can_access(ordinal, peer);
    return SUCCESS;
}

static _Atomic bool is_enabled[SIM_MAX_GPUS][SIM_MAX_GPUS]; /* access of the first device to the second one */

bool has_peer_access(int device, int peer)
{
    return is_enabled[device][peer];
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(check_device(peer));
    REQUIRE(flags == 0);
    RETURN_UNLESS(can_access(device->ordinal, peer), fail(ERROR_INVALID_DEVICE));
    bool was_enabled = atomic_exchange(&is_enabled[device->ordinal][peer], true);
    return finish(was_enabled ? ERROR_PEER_ACCESS_ALREADY_ENABLED : SUCCESS);
}

EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(check_device(peer));
    bool was_enabled = atomic_exchange(&is_enabled[device->ordinal][peer], false);
    return finish(was_enabled ? SUCCESS : ERROR_PEER_ACCESS_NOT_ENABLED);
}

void reset_peer_access(int ordinal)
{
    for (int other = 0; other < SIM_MAX_GPUS; other++)
        is_enabled[ordinal][other] = is_enabled[other][ordinal] = false;
}

EXPORT cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int ordinal, int peer)
{
    enum { PERFORMANCE_RANK = 1, ACCESS = 2, NATIVE_ATOMICS = 3, ARRAYS = 4 };
    RETURN_IF_ERROR(enter(__func__));
    RETURN_IF_ERROR(check_device(ordinal));
    RETURN_IF_ERROR(check_device(peer));
    REQUIRE(value && attribute >= PERFORMANCE_RANK && attribute <= ARRAYS);
    RETURN_UNLESS(ordinal != peer, fail(ERROR_INVALID_DEVICE));
    *value = attribute == ACCESS || attribute == NATIVE_ATOMICS;
    return SUCCESS;
}

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int *ordinal, const char *text)
{
    unsigned domain = 0, bus = 0, slot = 0, function = 0;
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(ordinal && text);
    if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
        domain = 0;
        REQUIRE(sscanf(text, "%x:%x.%x", &bus, &slot, &function) >= 2);
    }
    for (int i = 0; i < visible_device_count(); i++)
        if (driver->devices[i].pci_domain == domain && driver->devices[i].pci_bus == bus && slot == 0 && function == 0) {
            *ordinal = i;
            return SUCCESS;
        }
    return fail(ERROR_INVALID_DEVICE);
}

/* How a GPU divides its memory for caches changes no result. */
static cudaError_t set_configuration(const char *function, int value, int last)
{
    RETURN_IF_ERROR(enter_context(function, NULL));
    return finish(value >= 0 && value <= last ? SUCCESS : ERROR_INVALID_VALUE);
}

static cudaError_t get_configuration(const char *function, int *value, int initial)
{
    RETURN_IF_ERROR(enter_context(function, NULL));
    REQUIRE(value);
    *value = initial;
    return SUCCESS;
}

EXPORT cudaError_t cudaDeviceSetCacheConfig(int config)
{
    enum { PREFER_EQUAL = 3 };
    return set_configuration(__func__, config, PREFER_EQUAL);
}

EXPORT cudaError_t cudaDeviceGetCacheConfig(int *config)
{
    return get_configuration(__func__, config, 0);
}

EXPORT cudaError_t cudaDeviceSetSharedMemConfig(int config)
{
    enum { EIGHT_BYTES = 2 };
    return set_configuration(__func__, config, EIGHT_BYTES);
}

EXPORT cudaError_t cudaDeviceGetSharedMemConfig(int *config)
{
    enum { FOUR_BYTES = 1 };
    return get_configuration(__func__, config, FOUR_BYTES);
}

EXPORT cudaError_t cudaCtxResetPersistingL2Cache(void)
{
    return set_configuration(__func__, 0, 0);
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    ENTER_CONTEXT(device);
    RETURN_IF_ERROR(unsafe_call());
    RETURN_IF_ERROR(finish(wait_for_device(device)));
    return finish(unless_failed(device->ordinal));
}

#if CUDART == 12
EXPORT cudaError_t cudaThreadSynchronize(void)
{
    RETURN_IF_ERROR(enter(__func__));
    return cudaDeviceSynchronize();
}
#endif
