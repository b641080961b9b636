/* The inside of libcuda.so.1: what its files share. */
#ifndef ACCELERATOR_SIM_DRIVER_H
#define ACCELERATOR_SIM_DRIVER_H

#include <stdbool.h>

#include "config.h"
#include "driver_errors.h"
#include "driver_table.h"
#include "state.h"

typedef int CUresult;
typedef int CUdevice;
typedef uintptr_t CUdeviceptr;
typedef struct sim_device *CUcontext; /* every context is a primary one, and stands for its device */
typedef void *CUstream;               /* streams belong to the runtime; the driver never looks into one */

/* driver.c. The answer of every entry point until cuInit succeeded, and in a child forked after that. */
extern _Atomic int driver_status;
extern struct sim_state *driver_state;

static inline CUresult driver_enter(const char *function, int gpu)
{
    return driver_status != SUCCESS ? driver_status : sim_injected(function, gpu);
}

#define RETURN_IF_ERROR(expression)                                                                                    \
    do {                                                                                                               \
        CUresult error_ = (expression);                                                                                \
        if (error_ != SUCCESS)                                                                                         \
            return error_;                                                                                             \
    } while (0)

/* The first statement of an entry point that concerns no device, the device given, or that of the current context. */
#define ENTER() RETURN_IF_ERROR(driver_enter(__func__, SIM_NO_GPU))
#define ENTER_DEVICE(ordinal)                                                                                          \
    do {                                                                                                               \
        RETURN_IF_ERROR(driver_enter(__func__, device_gpu(ordinal)));                                                  \
        if (!is_device(ordinal))                                                                                       \
            return ERROR_INVALID_DEVICE;                                                                               \
    } while (0)
#define ENTER_CONTEXT()                                                                                                \
    do {                                                                                                               \
        struct sim_device *context_ = current_context();                                                               \
        RETURN_IF_ERROR(driver_enter(__func__, context_ ? context_->gpu : SIM_NO_GPU));                                \
        if (!context_)                                                                                                 \
            return ERROR_INVALID_CONTEXT;                                                                              \
    } while (0)

/* visible.c */
struct visible_device {
    int gpu, instance;
};

/* Fills in what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER leave, in order; returns how many. */
int visible_devices(struct visible_device found[SIM_MAX_GPUS]);

/* driver_device.c */
extern struct sim_device devices[SIM_MAX_GPUS];
extern int device_count;

void devices_enumerate(void);

static inline bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < device_count;
}

static inline int device_gpu(int ordinal)
{
    return is_device(ordinal) ? devices[ordinal].gpu : SIM_NO_GPU;
}

/* driver_context.c */
struct sim_device *current_context(void);
void wait_until(int64_t time);

/* driver_memory.c. Blocks are the ranges of addresses that CUDA knows, ordered by address. */
struct block {
    struct sim_memory memory;
    int file;         /* the anonymous file that holds it once it was shared, or -1 */
    uint64_t charged; /* bytes it takes on its device */
    void *physical;   /* the handle that a mapped block shows */
};

void memory_lock(void);
void memory_unlock(void);
/* The following are called with the lock held. */
struct block *block_find(const void *address);
struct block *block_insert(enum sim_memory_kind kind, void *base, size_t size, int device);
void block_remove(struct block *block);

size_t round_to_pages(size_t size);
void *map_anonymous(size_t size);
int charge(int device, uint64_t bytes);
void release(int device, uint64_t bytes);
int find_memory(const void *address, struct sim_memory *found);
int is_valid_range(const void *address, size_t size);
void set_pool(void *address, void *pool);
bool is_shared(const void *address);

/* driver_zero.c. Exported for kernels that do the work of CUDA's in Python. */
void accelerator_simulation_zero(void *address, size_t size);

/* driver_stream.c */
void use_runtime(const struct sim_runtime *used);
int wait_for_pending_on_device(int ordinal); /* for NCCL's work, which is not done at the call */

/* driver_share.c */
int export_memory(const void *address, struct sim_ipc_handle *handle);
int import_memory(const struct sim_ipc_handle *handle, void **address);
int close_imported(void *address);

#endif
