/* NVML's results and structures, which the simulated NVML fills in and the simulated nvidia-smi reads. */
#ifndef ACCELERATOR_SIM_NVML_TYPES_H
#define ACCELERATOR_SIM_NVML_TYPES_H

#include <stdint.h>

enum {
    NVML_OK = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_LIBRARY_NOT_FOUND = 12,
    NVML_FUNCTION_NOT_FOUND = 13,
    NVML_VERSION_MISMATCH = 25,
};

struct nvml_pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device;
    unsigned device_id, subsystem_id;
    char bus_id[32];
};
_Static_assert(sizeof(struct nvml_pci_info) == 68, "the layout of version 3");

struct nvml_memory {
    unsigned version;
    uint64_t total, reserved, free, used;
};
_Static_assert(sizeof(struct nvml_memory) == 40, "the layout of version 2");

struct nvml_process {
    unsigned pid;
    uint64_t memory;
    unsigned gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct nvml_process) == 24, "the layout of versions 2 and 3");

/* NVML reads several figures at once, each by its field id and with its own result. */
struct nvml_field_value {
    unsigned field, scope;
    int64_t timestamp, latency; /* microseconds */
    int type, result;
    union {
        unsigned u32;
        uint64_t u64;
    } value;
};
_Static_assert(sizeof(struct nvml_field_value) == 40, "NVML's layout");

#endif
