/* The simulated machine, as the variables of interface/settings.h describe it.
 *
 * GPUs are numbered physically, in PCI bus order. Everything here is read from the environment once per process, at the
 * first use, and is constant from then on. Nothing in this file knows about CUDA or NVML. */
#ifndef ACCELERATOR_SIM_CONFIG_H
#define ACCELERATOR_SIM_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "interface/settings.h"

#define SIM_EXPORT __attribute__((visibility("default")))

enum {
    SIM_WHOLE_GPU = -1,    /* in place of an instance number: the GPU itself */
    SIM_NO_GPU = -1,       /* in place of a GPU number: the call concerns none */
    SIM_HOST = -2,         /* in place of a GPU number: the host, which pinned memory is charged to */
    SIM_MIG_OFF = -1,
    SIM_NO_LINKS = -1,     /* in place of an NVLink group */
    SIM_NAME_SIZE = SIM_MAX_NAME_LENGTH + 1,
    SIM_UUID_SIZE = 41, /* "GPU-" or "MIG-", 36 characters, the final zero */
    SIM_MAX_ERROR_RULES = SIM_MAX_ERRORS + 2, /* those of driver="broken" and of nvml="broken" or "mismatch" too */
};

struct sim_gpu {
    char name[SIM_NAME_SIZE];
    uint64_t memory;  /* of programs */
    uint64_t reserve; /* of the driver, beside it: NVML's total is the sum of both */
    int major, minor; /* compute capability */
    int speed;        /* orders CUDA's FASTEST_FIRST */
    int instances;    /* SIM_MIG_OFF, or the number of MIG instances (0: MIG on, no instance) */
    int link_group;   /* GPUs of one group have NVLink between them; SIM_NO_LINKS */
    uint64_t nodes;   /* the nearest NUMA nodes of the host, a bit for each; 0: unknown */
    unsigned clock_reasons; /* why the clocks are throttled, as NVML's bits */
};

struct sim_error_rule {
    char function[80];
    bool is_prefix;
    int gpu; /* SIM_NO_GPU: any */
    int code;
};

struct sim_config {
    int node; /* the machine's number in its cluster */
    int gpu_count;
    struct sim_gpu gpus[SIM_MAX_GPUS];
    char driver_version[80]; /* "595.45.04" */
    int cuda_version;        /* 13020 for CUDA 13.2 */
    bool fills_with_nan;     /* new device memory, instead of zeros */
    bool is_rehearsed;       /* programs go on beyond the memory of a GPU */
    struct sim_error_rule error_rules[SIM_MAX_ERROR_RULES];
    int cu_init_delay, nvml_init_delay; /* milliseconds */
    char log_path[4096];
};

const struct sim_config *sim_config(void);

/* identity.c. Writes the UUID of a GPU (instance SIM_WHOLE_GPU) or of a MIG instance, as bytes (CUDA) and as text (NVML).
 * Either destination may be NULL. */
void sim_uuid(int gpu, int instance, unsigned char bytes[16], char text[SIM_UUID_SIZE]);

void sim_pci_address(int gpu, unsigned *domain, unsigned *bus);
void sim_display_name(int gpu, int instance, char *text, size_t size);

/* injections.c. Returns the error that SETTING_ERRORS injects into this call, or 0. */
extern _Atomic int sim_error_rules; /* number of rules; negative until the environment was read */
int sim_find_injected(const char *function, int physical_gpu);

static inline int sim_injected(const char *function, int physical_gpu)
{
    return sim_error_rules == 0 ? 0 : sim_find_injected(function, physical_gpu);
}

/* Sleeps for the time that SETTING_INIT_DELAY sets for `function` ("cuInit" or "nvmlInit"). */
void sim_init_delay(const char *function);

/* log.c. Appends "<pid> <event>" to the file of SETTING_LOG. */
void sim_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
