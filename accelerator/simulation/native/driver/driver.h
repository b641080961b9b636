/* What the files of libcuda.so.1 share. */
#ifndef ACCELERATOR_SIM_DRIVER_H
#define ACCELERATOR_SIM_DRIVER_H

#include <stdbool.h>

#include "common/config.h"
#include "interface/cuda_errors.h"
#include "interface/driver_table.h"
#include "common/errors.h"
#include "common/state.h"
#include "common/faults.h"

typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUdeviceptr;
typedef struct sim_device *CUcontext; /* every context is the primary one of its device */
typedef void *CUstream;               /* streams belong to the runtime; they are opaque to the driver */

/* status.c. Every entry point returns this error until cuInit succeeds, and in a child forked after that. */
extern _Atomic int driver_status;
extern struct sim_state *driver_state;

/* visible.c */
struct visible_device {
    int gpu, instance;
};

enum { REPEATED_DEVICE = -1 };

/* Fills in the devices that CUDA_VISIBLE_DEVICES leaves, in CUDA_DEVICE_ORDER. Returns their number, or REPEATED_DEVICE. */
int visible_devices(struct visible_device visible[SIM_MAX_GPUS]);

/* device.c */
enum { SIM_TENSOR_MAP_MAJOR = 9 }; /* of the compute capability: older GPUs have no tensor maps */
extern struct sim_device devices[SIM_MAX_GPUS];
extern int device_count;

CUresult devices_enumerate(void);

static inline bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < device_count;
}

static inline int device_gpu(int ordinal)
{
    return is_device(ordinal) ? devices[ordinal].gpu : SIM_NO_GPU;
}

/* context.c */
struct sim_device *current_context(void);
size_t limit_of(int device, unsigned limit);
void end_context(int device); /* of all threads */

static inline CUresult driver_enter(const char *function, int gpu)
{
    return driver_status != SUCCESS ? driver_status : sim_injected(function, gpu);
}

/* Every entry point calls one of these first. They return the error that ends the call: the driver is not initialized, an
 * error is injected, there is no such device, or the thread has no context. */
static inline CUresult enter(const char *function)
{
    return driver_enter(function, SIM_NO_GPU);
}

static inline CUresult enter_device(const char *function, int ordinal)
{
    RETURN_IF_ERROR(driver_enter(function, device_gpu(ordinal)));
    return is_device(ordinal) ? SUCCESS : ERROR_INVALID_DEVICE;
}

static inline CUresult enter_any_context(const char *function)
{
    const struct sim_device *context = current_context();
    RETURN_IF_ERROR(driver_enter(function, context ? context->gpu : SIM_NO_GPU));
    return context ? SUCCESS : ERROR_INVALID_CONTEXT;
}

/* Ends an entry point if an argument is not valid. */
#define REQUIRE(is_valid) RETURN_UNLESS(is_valid, ERROR_INVALID_VALUE)

/* A fault, a failed assertion or a failed kernel has broken the context for good, and it fails all calls that use it. */
static inline CUresult unless_broken(void)
{
    return faults_are_used() ? faults_error(current_context()->gpu) : SUCCESS;
}

static inline CUresult enter_context(const char *function)
{
    RETURN_IF_ERROR(enter_any_context(function));
    return unless_broken();
}

/* blocks.c */
enum { PAGE = 4096 };

struct heap_part {
    uint64_t inode; /* of the heap's file; 0 for private memory */
    uint64_t offset;
};

struct block {
    struct sim_memory memory;
    struct heap_part part; /* of device memory */
    uint64_t charged;      /* bytes charged to its device, or to the host */
    void *physical;        /* the handle that is mapped here */
};

void memory_lock(void);
void memory_unlock(void);
/* Callers of the block functions hold the lock. */
struct block *block_find(const void *address);
struct block *block_insert(enum sim_memory_type type, void *base, size_t size, int device);
void block_remove(struct block *block);
struct block *block_of(int device); /* any that its context owns, and no other GPU uses; or NULL */
bool block_overlaps(const void *address, size_t size); /* whether a block lies in the range, maybe in part */

int find_memory(const void *address, struct sim_memory *memory);
int find_nearest(const void *address, struct sim_memory *memory);
void set_pool(void *address, void *pool);
bool set_idle(void *address, bool is_idle);

static inline size_t round_to_pages(size_t size)
{
    return (size + PAGE - 1) / PAGE * PAGE;
}

/* charges.c. charge() returns false if the device or the host has less memory left. */
bool charge(enum sim_memory_type type, int device, uint64_t bytes);
void release(enum sim_memory_type type, int device, uint64_t bytes);
size_t largest_allocation(const struct sim_device *device);
void end_of_allocation(void); /* of memory that was got and mapped */

/* ranges.c */
bool is_mapped_memory(const void *address, size_t size); /* by the operating system */
int is_valid_range(const void *address, size_t size);

/* memory.c */
int free_idle(void *address);
void free_blocks_of(int device); /* all that its context owns */

/* zero.c. Exported for the kernel overrides in Python. */
void accelerator_simulation_zero(void *address, size_t size);
void fill_new_memory(void *address, size_t size); /* with NaN if ACCELERATOR_SIM_FILL says so */

/* module.c. The caller frees the content, which ends with a NUL that does not count. */
CUresult read_file(const char *path, char **content, size_t *length);
extern struct sim_handles module_handles;
/* The options of what compiles PTX: their number, names and values. */
CUresult check_jit_options(unsigned count, const int *options, void *const *values);
void write_jit_logs(unsigned count, const int *options, void **values, const char *errors);

/* find_runtime.c */
void use_runtime(const struct sim_runtime *used);
const struct sim_runtime *find_runtime(void); /* NULL if there is none */
static inline CUresult enter_runtime(const char *function, const struct sim_runtime **functions)
{
    RETURN_IF_ERROR(enter_context(function));
    *functions = find_runtime();
    return *functions ? SUCCESS : ERROR_NOT_SUPPORTED;
}

/* First line of an entry point: declares the functions that enter_runtime() sets. */
#define ENTER_RUNTIME(functions)                                                                                       \
    const struct sim_runtime *functions;                                                                               \
    RETURN_IF_ERROR(enter_runtime(__func__, &functions))

/* Wait for NCCL's work, the only work that is not done at the call. */
int wait_for_pending_on_device(int ordinal);
int wait_for_pending_on_stream(CUstream stream);
int free_to_pool(const struct sim_memory *memory);

/* refusal.c */
extern _Atomic uint64_t pending_refusal; /* the number of a refused launch whose error the program has not read, or 0 */

/* Refuses the launch of a kernel: prints why unless that was reported, keeps the error pending and returns it. The reason is
 * NULL for a kernel of those that are never simulated. */
int refuse_launch(const char *kernel, const char *reason, bool is_reported);
/* Ends the pending error, because the program reads it. Copies its text if there is room; returns whether it was pending. */
bool read_refusal(char *text, size_t size);
char *note_refusals(char *target);
void refusal_raises(_Atomic int *needs_checks); /* of a runtime that is used from now on */

/* What copies and waits return that have succeeded. */
static inline CUresult unless_failed(void)
{
    return pending_refusal != 0 ? ERROR_NOT_SUPPORTED : unless_broken();
}

/* virtual_memory.c. Whether the range overlaps one that cuMemAddressReserve returned, or an arena. The caller holds the lock. */
bool is_reserved(const void *address, size_t size);

/* heap.c. The caller of the first three holds the memory lock. Heaps have the numbers of their devices; the host's is the last. */
enum { HOST_HEAP = SIM_MAX_GPUS };
void *heap_map(int number, size_t size, struct heap_part *part); /* NULL without memory */
void heap_unmap(int number, void *base, size_t size, const struct heap_part *part);
bool is_in_arena(const void *address, size_t size);
int export_memory(const void *address, struct sim_ipc_handle *handle);
int import_memory(const struct sim_ipc_handle *handle, void **address);
int close_imported(void *address);

#endif
