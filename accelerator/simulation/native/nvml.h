/* What the files of the simulated NVML share: result codes, handles, and what every function does first.
 *
 * NVML shows every GPU whatever CUDA_VISIBLE_DEVICES says. A handle is an address that stands for a GPU or one of its
 * MIG instances and is good for the life of the process, without a table that threads could disagree about. */
#ifndef ACCELERATOR_SIM_NVML_H
#define ACCELERATOR_SIM_NVML_H

#include <stdbool.h>

#include "config.h"

enum {
    NVML_OK = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_LIBRARY_NOT_FOUND = 12,
    NVML_VERSION_MISMATCH = 25,
};

enum { NVML_MAX_MIG_DEVICES = 7, NVML_FIRST_MIG_MAJOR = 8 };

typedef const struct nvml_anchor *nvml_handle;

struct nvml_device {
    int gpu;
    int instance; /* SIM_WHOLE_GPU or the number of a MIG instance */
};

nvml_handle nvml_encode(int gpu, int instance);
bool nvml_decode(nvml_handle handle, struct nvml_device *device);

/* The result with which `function` has to end at once, or NVML_OK: not initialized in this process, not a handle, or an
 * error that ACCELERATOR_SIM_ERRORS prescribes. */
int nvml_enter(const char *function, int gpu);
int nvml_enter_device(const char *function, nvml_handle handle, struct nvml_device *device);

/* How every function begins; both leave it if it must not go on. `condition` is what has to hold of the arguments. */
#define NVML_ENTER(condition)                                                                                         \
    do {                                                                                                              \
        int failure = nvml_enter(__func__, SIM_NO_GPU);                                                               \
        if (failure != NVML_OK || !(condition))                                                                       \
            return failure != NVML_OK ? failure : NVML_INVALID_ARGUMENT;                                              \
    } while (0)

#define NVML_ENTER_DEVICE(device, handle, condition)                                                                  \
    struct nvml_device device;                                                                                        \
    do {                                                                                                              \
        int failure = nvml_enter_device(__func__, handle, &device);                                                   \
        if (failure != NVML_OK || !(condition))                                                                       \
            return failure != NVML_OK ? failure : NVML_INVALID_ARGUMENT;                                              \
    } while (0)

static inline bool nvml_is_instance(const struct nvml_device *device)
{
    return device->instance != SIM_WHOLE_GPU;
}

static inline const struct sim_gpu *nvml_gpu(const struct nvml_device *device)
{
    return &sim_config()->gpus[device->gpu];
}

static inline bool nvml_has_mig(const struct nvml_device *device)
{
    return nvml_gpu(device)->major >= NVML_FIRST_MIG_MAJOR;
}

/* How functions begin that know nothing of MIG instances. */
#define NVML_ENTER_GPU(device, handle, condition)                                                                     \
    NVML_ENTER_DEVICE(device, handle, condition);                                                                     \
    do {                                                                                                              \
        if (nvml_is_instance(&device))                                                                                \
            return NVML_NOT_SUPPORTED;                                                                                \
    } while (0)

/* Copies text into a caller's buffer. */
int nvml_put_text(const char *text, char *buffer, unsigned size);

struct nvml_pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device;
    unsigned device_id, subsystem_id;
    char bus_id[32];
};
_Static_assert(sizeof(struct nvml_pci_info) == 68, "the layout of version 3");

struct nvml_pci_info nvml_pci_info(int gpu);

/* nvml_topology.c. How many NVLinks a GPU has in use. */
int nvml_link_count(int gpu);

#endif
