/* The simulated nvidia-smi: the tables that --query-gpu and --query-compute-apps print. */
#include "smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_cell(bool is_first, const char *text, const char *unit, bool has_units)
{
    printf("%s%s", is_first ? "" : ", ", text);
    if (has_units && *unit && *text != '[')
        printf(" %s", unit);
}

/* Reads a field of the process, or of the GPU if `process` is NULL. */
static bool query_field(const char *field, const struct smi_gpu *gpu, const struct nvml_process *process, char text[SMI_TEXT],
                        const char **unit)
{
    *unit = "";
    return process ? smi_query_process(field, gpu, process, text, unit) : smi_query_gpu(field, gpu, text, unit);
}

static char *next_field(char **rest)
{
    char *field = strsep(rest, ",");
    return field ? field + strspn(field, " ") : NULL;
}

/* A query of remapped rows has their fields, and those that name the GPU. */
static bool is_of(const char *field, enum smi_rows rows)
{
    static const char *const beginnings[] = {"remapped_rows.", "gpu_name", "gpu_uuid", "gpu_bus_id", "gpu_serial", "timestamp"};
    bool is_known = rows != SMI_REMAPPED;
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
        is_known |= strncmp(field, beginnings[i], strlen(beginnings[i])) == 0;
    return is_known;
}

/* Returns whether all fields exist. Prints the first unknown one. */
static bool are_known(const char *fields, enum smi_rows rows, const struct nvml_process *process)
{
    char *copy = strdup(fields), *rest = copy, text[SMI_TEXT];
    const char *unit;
    bool is_known = true;
    for (char *field; is_known && (field = next_field(&rest));)
        if (!(is_known = is_of(field, rows) && query_field(field, &smi_gpus[0], process, text, &unit)))
            printf("Field \"%s\" is not a valid field to query.\n\n", field);
    free(copy);
    return is_known;
}

static void print_header(const char *fields, enum smi_rows rows, const struct nvml_process *process)
{
    char *copy = strdup(fields), *rest = copy, text[SMI_TEXT], unused[SMI_TEXT];
    const char *unit;
    bool is_first = true;
    for (char *field; (field = next_field(&rest)); is_first = false) {
        query_field(field, &smi_gpus[0], process, unused, &unit);
        snprintf(text, sizeof text, *unit ? "%s [%s]" : "%s", smi_header(field, rows), unit);
        print_cell(is_first, text, "", false);
    }
    free(copy);
    putchar('\n');
}

static void print_row(const char *fields, const struct smi_gpu *gpu, const struct nvml_process *process, struct smi_format format)
{
    char *copy = strdup(fields), *rest = copy, text[SMI_TEXT];
    const char *unit;
    bool is_first = true;
    for (char *field; (field = next_field(&rest)); is_first = false) {
        query_field(field, gpu, process, text, &unit);
        print_cell(is_first, text, unit, format.has_units);
    }
    free(copy);
    putchar('\n');
}

bool smi_query(const char *fields, enum smi_rows rows, struct smi_format format)
{
    static const struct nvml_process nobody;
    const struct nvml_process *any = rows == SMI_PROCESSES ? &nobody : NULL;
    if (!are_known(fields, rows, any))
        return false;
    if (format.has_header)
        print_header(fields, rows, any);
    for (int i = 0; i < smi_gpu_count; i++) {
        struct nvml_process processes[SMI_MAX_PROCESSES];
        unsigned count;
        if (rows != SMI_PROCESSES)
            print_row(fields, &smi_gpus[i], NULL, format);
        else if (smi_processes(smi_gpus[i].handle, processes, &count) == NVML_OK)
            for (unsigned k = 0; k < count; k++)
                print_row(fields, &smi_gpus[i], &processes[k], format);
    }
    return true;
}
