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

/* Returns whether all fields exist. Prints the first unknown one. */
static bool are_known(const char *fields, const struct nvml_process *process)
{
    char *copy = strdup(fields), *rest = copy, text[SMI_TEXT];
    const char *unit;
    bool is_known = true;
    for (char *field; is_known && (field = next_field(&rest));)
        if (!(is_known = query_field(field, &smi_gpus[0], process, text, &unit)))
            printf("Field \"%s\" is not a valid field to query.\n", field);
    free(copy);
    return is_known;
}

/* Prints a row with the names of the fields if `names` is set, else with their values. */
static void print_row(const char *fields, bool names, const struct smi_gpu *gpu, const struct nvml_process *process,
                      struct smi_format format)
{
    char *copy = strdup(fields), *rest = copy, text[SMI_TEXT];
    const char *unit;
    bool is_first = true;
    for (char *field; (field = next_field(&rest)); is_first = false) {
        query_field(field, gpu, process, text, &unit);
        if (names) {
            snprintf(text, sizeof text, *unit ? "%s [%s]" : "%s", field, unit);
            print_cell(is_first, text, "", false);
        } else
            print_cell(is_first, text, unit, format.has_units);
    }
    free(copy);
    putchar('\n');
}

bool smi_query(const char *fields, bool of_processes, struct smi_format format)
{
    static const struct nvml_process nobody;
    if (!are_known(fields, of_processes ? &nobody : NULL))
        return false;
    if (format.has_header)
        print_row(fields, true, &smi_gpus[0], of_processes ? &nobody : NULL, format);
    for (int i = 0; i < smi_gpu_count; i++) {
        struct nvml_process rows[SMI_MAX_PROCESSES];
        unsigned count;
        if (!of_processes)
            print_row(fields, false, &smi_gpus[i], NULL, format);
        else if (smi_processes(smi_gpus[i].handle, rows, &count) == NVML_OK)
            for (unsigned row = 0; row < count; row++)
                print_row(fields, false, &smi_gpus[i], &rows[row], format);
    }
    return true;
}
