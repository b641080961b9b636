/* What the files of the simulated nvidia-smi share. It calls NVML as any program does, so that it also shows the errors
 * injected into NVML. */
#ifndef ACCELERATOR_SIM_SMI_H
#define ACCELERATOR_SIM_SMI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "interface/nvml_types.h"
#include "interface/settings.h"

enum { SMI_MAX_PROCESSES = SIM_MAX_PROCESSES, SMI_TEXT = 256 };

typedef void *nvml_handle;

/* nvml.c. Loads and initializes NVML. Returns the exit status of a failure. */
int smi_start(void);

/* Calls a function of NVML by its name. */
typedef int nvml_function();
nvml_function *smi_find(const char *name);
#define NVML(name, ...) (smi_find(#name)(__VA_ARGS__))

const char *smi_error(int code);

int smi_memory(nvml_handle gpu, struct nvml_memory *memory);

int smi_processes(nvml_handle gpu, struct nvml_process rows[SMI_MAX_PROCESSES], unsigned *count);

/* The number of a MIG instance, or "N/A" for a GPU. */
const char *smi_instance(unsigned number, char text[SMI_TEXT]);

/* gpus.c. The GPUs that -i selects, or all. */
struct smi_gpu {
    nvml_handle handle;
    unsigned index;
};
extern struct smi_gpu smi_gpus[SIM_MAX_GPUS];
extern int smi_gpu_count;

int smi_find_gpus(const char *chosen); /* `chosen` is NULL for all; returns the exit status of a failure */

/* fields.c. Read a field of --query-gpu or --query-compute-apps. Return false if there is no such field. `unit` may be "". */
bool smi_query_gpu(const char *field, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit);
bool smi_query_process(const char *field, const struct smi_gpu *gpu, const struct nvml_process *row, char text[SMI_TEXT],
                       const char **unit);

/* Reads a line of -q: a field of --query-gpu, or one that it does not have. */
bool smi_query_detail(const char *field, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit);

/* What a query has a row for. Those of remapped rows are GPUs, too. */
enum smi_rows { SMI_GPUS, SMI_PROCESSES, SMI_REMAPPED };

/* The name that the driver prints above a field. */
const char *smi_header(const char *field, enum smi_rows rows);

/* query.c. Prints fields. Returns false if there is no such field. */
struct smi_format {
    bool has_header, has_units;
};

bool smi_query(const char *fields, enum smi_rows rows, struct smi_format format);

/* details.c. Prints the parts, "ECC,CLOCK", or all if `parts` is NULL. */
bool smi_are_parts(const char *parts);
int smi_details(const char *parts);

/* table.c */
int smi_list(void);
int smi_table(void);

/* topology.c */
int smi_topology(void);

#endif
