/* What the files of the simulated nvidia-smi share. It calls NVML as any program does, so that it also shows the errors
 * injected into NVML. */
#ifndef ACCELERATOR_SIM_SMI_H
#define ACCELERATOR_SIM_SMI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SMI_MAX_PROCESSES = 4096 /* as many as state.c records */, SMI_TEXT = 256 };

enum {
    NVML_OK = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_FUNCTION_NOT_FOUND = 13,
};

typedef void *nvml_handle;

/* Calls a function of NVML by its name. */
typedef int nvml_function();
nvml_function *smi_find(const char *name);
#define NVML(name, ...) (smi_find(#name)(__VA_ARGS__))

const char *smi_error(int code);

/* The GPUs that -i selects, or all. */
struct smi_gpu {
    nvml_handle handle;
    unsigned index;
};
extern struct smi_gpu smi_gpus[SIM_MAX_GPUS];
extern int smi_gpu_count;

struct smi_memory {
    unsigned version;
    uint64_t total, reserved, free, used;
};
int smi_memory(nvml_handle gpu, struct smi_memory *memory);

struct smi_process {
    unsigned pid;
    uint64_t memory;
    unsigned gpu_instance, compute_instance;
};
int smi_processes(nvml_handle gpu, struct smi_process rows[SMI_MAX_PROCESSES], unsigned *count);

/* Read a field of --query-gpu or --query-compute-apps. Return false if there is no such field. `unit` may be "". */
bool smi_query_gpu(const char *field, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit);
bool smi_query_process(const char *field, const struct smi_gpu *gpu, const struct smi_process *row, char text[SMI_TEXT],
                       const char **unit);

int smi_list(void);
int smi_table(void);
int smi_topology(void);

#endif
