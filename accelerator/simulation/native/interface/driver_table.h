/* The functions of the simulated driver that the simulated runtime calls. The driver owns devices, contexts and memory.
 *
 * libcuda.so.1 exports accelerator_sim_driver(), which returns a pointer to this table. The runtime treats a driver
 * without that symbol as missing. A function named after a driver entry point is that entry point. */
#ifndef ACCELERATOR_SIM_DRIVER_TABLE_H
#define ACCELERATOR_SIM_DRIVER_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "interface/fault_effects.h"
#include "interface/launch.h"

#define SIM_DRIVER_SYMBOL "accelerator_sim_driver"
#define SIM_MODULE_SEPARATOR "\n// the end of a module that cuLinkComplete has linked\n" /* in the PTX that it returns */

enum {
    SIM_CLOCK_KHZ = 1000000, /* a clock cycle lasts a nanosecond, as _sleep assumes */
    SIM_WARP_SIZE = 32,
    SIM_MAX_THREADS_PER_BLOCK = 1024,
    SIM_THREADS_PER_PROCESSOR = 2048,
};

/* CUlimit and cudaLimit: of each thread, and of a device. */
enum sim_limit { SIM_STACK_LIMIT = 0, SIM_HEAP_LIMIT = 2 };

/* One CUDA device: a GPU or a MIG instance. Constant after cuInit, except for the atomics. */
struct sim_device {
    int ordinal;
    int gpu, instance; /* physical */
    char name[256];
    unsigned char uuid[16];
    uint64_t memory;
    int major, minor;
    int processors; /* streaming multiprocessors */
    unsigned pci_domain, pci_bus;
    _Atomic int context_users; /* references to the primary context, which is active if there are any */
    _Atomic unsigned context_flags;
    _Atomic unsigned context_resets; /* how often a reset has freed all memory of the primary context */
    _Atomic int64_t busy_until; /* when the last work on the device ends: nanoseconds of CLOCK_MONOTONIC */
};

enum sim_memory_type {
    SIM_DEVICE_MEMORY,
    SIM_MANAGED_MEMORY,
    SIM_MAPPED_MEMORY,   /* by cuMemMap; cuMemCreate has charged it */
    SIM_IMPORTED_MEMORY, /* exported by another process */
    SIM_PINNED_MEMORY,
    SIM_REGISTERED_MEMORY, /* the caller's host memory, pinned in place */
};

struct sim_memory {
    enum sim_memory_type type;
    char *base;
    size_t size;
    int device;
    uint64_t id;
    void *pool; /* the pool it was allocated from, or NULL */
    bool is_idle; /* freed, and kept by its pool */
    unsigned flags; /* of pinned and managed memory, as the program gave them */
};

static inline bool sim_is_on_host(const struct sim_memory *memory)
{
    return memory->type == SIM_PINNED_MEMORY || memory->type == SIM_REGISTERED_MEMORY;
}

struct sim_ipc_handle {
    char bytes[64];
};

/* The functions of the runtime that the driver calls: the runtime owns the streams, and runs kernels. */
/* The parameters of a launch as the kernel lays them out. */
struct sim_parameter_buffer {
    const char *data;
    size_t size;
};

struct sim_runtime {
    int (*create_stream)(void **stream, unsigned flags, int priority);
    int (*destroy_stream)(void *stream);
    int (*query_stream)(void *stream);
    int (*synchronize_stream)(void *stream);
    int (*is_capturing)(void *stream, int *status);
    int (*wait_for_pending_on_device)(int ordinal);
    int (*wait_for_pending_on_stream)(void *stream);
    int (*free_to_pool)(const struct sim_memory *memory);
    /* Loads an image, of which there are at most `limit` bytes. Writes into the log why it is wrong. */
    int (*load_module)(const void *data, size_t limit, char *log, size_t log_size, void **module);
    int (*unload_module)(void *module);
    bool (*is_module)(void *handle);
    bool (*is_function)(void *handle);
    int (*check_ptx)(const char *text, size_t size, char *log, size_t log_size);
    int (*find_function)(void *module, const char *name, void **function);
    int (*find_global)(void *module, const char *name, void **address, size_t *size);
    /* The parameters are pointers to each, or one buffer with all. */
    int (*launch_function)(void *function, const struct sim_launch *launch, void *stream, void **parameters,
                           const struct sim_parameter_buffer *buffer);
    int (*function_attribute)(void *function, int attribute, int *value);
    int (*set_function_attribute)(void *function, int attribute, int value);
    int (*function_occupancy)(void *function, int threads, size_t dynamic_shared, int *blocks);
    _Atomic int *needs_checks; /* not zero if ops must look before they compute */
};

/* The entry points: X(name, exported name, parameters). */
#define SIM_DRIVER_FUNCTIONS(X) \
    X(cuInit, cuInit, (unsigned flags)) \
    X(cuDriverGetVersion, cuDriverGetVersion, (int *version)) \
    X(cuDeviceGetCount, cuDeviceGetCount, (int *count)) \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, int ordinal)) \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (struct sim_device **context, int ordinal)) \
    X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (int ordinal)) \
    X(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2, (int ordinal, unsigned flags)) \
    X(cuCtxSetCurrent, cuCtxSetCurrent, (struct sim_device *context)) \
    X(cuCtxSetLimit, cuCtxSetLimit, (unsigned limit, size_t value)) \
    X(cuCtxGetLimit, cuCtxGetLimit, (size_t *value, unsigned limit)) \
    X(cuMemAlloc, cuMemAlloc_v2, (uintptr_t *address, size_t size)) \
    X(cuMemAllocManaged, cuMemAllocManaged, (uintptr_t *address, size_t size, unsigned flags)) \
    X(cuMemFree, cuMemFree_v2, (uintptr_t address)) \
    X(cuMemHostAlloc, cuMemHostAlloc, (void **address, size_t size, unsigned flags)) \
    X(cuMemFreeHost, cuMemFreeHost, (void *address)) \
    X(cuMemHostRegister, cuMemHostRegister_v2, (void *address, size_t size, unsigned flags)) \
    X(cuMemHostUnregister, cuMemHostUnregister, (void *address)) \
    X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *free, size_t *total)) \
    X(cuGetProcAddress, cuGetProcAddress_v2, (const char *name, void **function, int version, uint64_t flags, int *status))
#define SIM_DRIVER_MEMBER(name, exported, parameters) int (*name) parameters;

struct sim_driver {
    SIM_DRIVER_FUNCTIONS(SIM_DRIVER_MEMBER)

    struct sim_handles *handles; /* interface/module_handles.h */
    struct sim_device *devices;
    struct sim_device *(*current)(void); /* of the calling thread's context, or NULL */

    /* Finds the memory that holds `address`; returns 0 if CUDA does not know it. */
    int (*find_memory)(const void *address, struct sim_memory *memory);
    /* Whether a copy may use the range: memory that CUDA knows, within its bounds, or mapped host memory. */
    int (*is_valid_range)(const void *address, size_t size);
    /* Finds the memory that holds `address` or is nearest to it, in use or not; returns 0 if there is none. */
    int (*find_nearest)(const void *address, struct sim_memory *memory);
    void (*set_pool)(void *address, void *pool);
    /* Marks a block of a pool as idle or in use. Returns false if it was so already. */
    bool (*set_idle)(void *address, bool is_idle);
    int (*free_idle)(void *address);
    void (*fill_with_zeros)(void *address, size_t size);
    void (*use_runtime)(const struct sim_runtime *runtime);

    int (*export_memory)(const void *address, struct sim_ipc_handle *handle);
    int (*import_memory)(const struct sim_ipc_handle *handle, void **address);
    int (*close_imported)(void *address);

    _Atomic uint64_t *pending_refusal;
    int (*refuse_launch)(const char *kernel, const char *reason, bool is_reported);
    bool (*read_refusal)(char *text, size_t size);
    /* From now on the text of this thread's first refused launch goes to `target` of SIM_MAX_REFUSAL_LENGTH bytes, if that is
     * empty, and no error stays pending: the caller computes otherwise. NULL ends that. Returns the target before. */
    char *(*note_refusals)(char *target);

    int (*injected)(const char *function, int physical_gpu);
    int (*has_injections)(void);

    /* See common/faults.h. The others are called only while what the first one returns points to another value than 0. */
    _Atomic int *(*fault_flag)(void);
    int (*faults_error)(int gpu);
    struct fault_effect (*faults_at_op)(int gpu);
    void (*faults_at)(enum fault_clock clock, int gpu);
    bool (*faults_block)(int gpu);
    int64_t (*faults_end_of)(int64_t time);
    int (*faults_flip)(int gpu);
    void (*faults_flipped)(int gpu);
    int (*faults_sleep)(int gpu, int64_t time);
    int (*faults_break)(int gpu, int error);
    size_t (*limit_of)(int device, unsigned limit); /* enum sim_limit */
    void (*log)(const char *format, ...);
};

#endif
