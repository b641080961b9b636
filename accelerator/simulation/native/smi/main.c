/* The simulated nvidia-smi: the command line, and the tables that --query-gpu and --query-compute-apps print. */
#include "smi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct smi_gpu smi_gpus[SIM_MAX_GPUS];
int smi_gpu_count;

static void *library;

static int not_found()
{
    return NVML_FUNCTION_NOT_FOUND;
}

nvml_function *smi_find(const char *name)
{
    nvml_function *function;
    *(void **)&function = dlsym(library, name);
    return function ? function : not_found;
}

const char *smi_error(int code)
{
    const char *(*text)(int);
    *(void **)&text = dlsym(library, "nvmlErrorString");
    return text(code);
}

int smi_memory(nvml_handle gpu, struct smi_memory *memory)
{
    *memory = (struct smi_memory){.version = sizeof *memory | 2 << 24};
    return NVML(nvmlDeviceGetMemoryInfo_v2, gpu, memory);
}

int smi_processes(nvml_handle gpu, struct smi_process rows[SMI_MAX_PROCESSES], unsigned *count)
{
    *count = SMI_MAX_PROCESSES;
    int failure = NVML(nvmlDeviceGetComputeRunningProcesses_v3, gpu, count, rows);
    *count = failure ? 0 : *count;
    return failure;
}

static int start(void)
{
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so.1: is the NVIDIA driver installed?");
        return 12;
    }
    int failure = NVML(nvmlInit_v2);
    if (failure == NVML_DRIVER_NOT_LOADED)
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.");
    else if (failure)
        printf("Failed to initialize NVML: %s\n", smi_error(failure));
    return failure > 255 ? 255 : failure;
}

/* Whether an entry of -i names the GPU: by index, UUID or bus address. */
static bool is_named(const char *entry, unsigned index, nvml_handle handle)
{
    nvml_handle named = NULL;
    char *end;
    if (strtoul(entry, &end, 10) == index && end != entry && *end == '\0')
        return true;
    if (NVML(nvmlDeviceGetHandleByUUID, entry, &named) == NVML_OK)
        return named == handle;
    return strchr(entry, ':') && NVML(nvmlDeviceGetHandleByPciBusId_v2, entry, &named) == NVML_OK && named == handle;
}

static int find_gpus(const char *chosen)
{
    unsigned count = 0;
    int failure = NVML(nvmlDeviceGetCount_v2, &count);
    for (unsigned index = 0; failure == NVML_OK && index < count; index++) {
        nvml_handle handle;
        if (NVML(nvmlDeviceGetHandleByIndex_v2, index, &handle) != NVML_OK) {
            printf("Unable to determine the device handle for GPU %u\n", index);
            continue;
        }
        bool is_chosen = !chosen;
        char *copy = strdup(chosen ? chosen : ""), *rest = copy;
        for (char *entry; !is_chosen && (entry = strsep(&rest, ","));)
            is_chosen = is_named(entry, index, handle);
        free(copy);
        if (is_chosen)
            smi_gpus[smi_gpu_count++] = (struct smi_gpu){handle, index};
    }
    if (failure)
        printf("Failed to count GPUs: %s\n", smi_error(failure));
    else if (smi_gpu_count == 0)
        puts("No devices were found");
    return failure ? failure : smi_gpu_count == 0 ? NVML_NOT_FOUND : NVML_OK;
}

struct format {
    bool has_header, has_units;
};

static void print_cell(bool is_first, const char *text, const char *unit, bool has_units)
{
    printf("%s%s", is_first ? "" : ", ", text);
    if (has_units && *unit && *text != '[')
        printf(" %s", unit);
}

/* Reads a field of the process, or of the GPU if `process` is NULL. */
static bool query_field(const char *field, const struct smi_gpu *gpu, const struct smi_process *process, char text[SMI_TEXT],
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
static bool are_known(const char *fields, const struct smi_process *process)
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
static void print_row(const char *fields, bool names, const struct smi_gpu *gpu, const struct smi_process *process,
                      struct format format)
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

static bool query(const char *fields, bool of_processes, struct format format)
{
    static const struct smi_process nobody;
    if (!are_known(fields, of_processes ? &nobody : NULL))
        return false;
    if (format.has_header)
        print_row(fields, true, &smi_gpus[0], of_processes ? &nobody : NULL, format);
    for (int i = 0; i < smi_gpu_count; i++) {
        struct smi_process rows[SMI_MAX_PROCESSES];
        unsigned count;
        if (!of_processes)
            print_row(fields, false, &smi_gpus[i], NULL, format);
        else if (smi_processes(smi_gpus[i].handle, rows, &count) == NVML_OK)
            for (unsigned row = 0; row < count; row++)
                print_row(fields, false, &smi_gpus[i], &rows[row], format);
    }
    return true;
}

/* Returns the value of the option `name`, written as --name=value or as two words, or NULL for another option. */
static const char *value_of(const char *name, char **argv, int *at)
{
    size_t length = strlen(name);
    if (strncmp(argv[*at], name, length) != 0)
        return NULL;
    if (argv[*at][length] == '=')
        return argv[*at] + length + 1;
    return argv[*at][length] == '\0' && argv[*at + 1] ? argv[++*at] : NULL;
}

int main(int argc, char **argv)
{
    enum { WRONG_USAGE = 2 };
    const char *chosen = NULL, *gpu_fields = NULL, *process_fields = NULL, *format = NULL, *value;
    bool is_list = false, is_topology = argc == 3 && strcmp(argv[1], "topo") == 0 && strcmp(argv[2], "-m") == 0;
    for (int i = 1; i < argc && !is_topology; i++) {
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0)
            is_list = true;
        else if ((value = value_of("--query-gpu", argv, &i)))
            gpu_fields = value;
        else if ((value = value_of("--query-compute-apps", argv, &i)))
            process_fields = value;
        else if ((value = value_of("--format", argv, &i)))
            format = value;
        else if ((value = value_of("-i", argv, &i)) || (value = value_of("--id", argv, &i)))
            chosen = value;
        else {
            printf("Invalid combination of input arguments: the simulated nvidia-smi has no %s.\n", argv[i]);
            return WRONG_USAGE;
        }
    }
    if ((gpu_fields || process_fields) && !(format && strncmp(format, "csv", 3) == 0)) {
        puts("\"--format=\" must be csv for a query.");
        return WRONG_USAGE;
    }
    int status = start();
    status = status ? status : find_gpus(chosen);
    if (status)
        return status;
    if (is_topology)
        return smi_topology();
    if (is_list)
        return smi_list();
    if (!gpu_fields && !process_fields)
        return smi_table();
    struct format parsed = {!strstr(format, "noheader"), !strstr(format, "nounits")};
    return query(gpu_fields ? gpu_fields : process_fields, !gpu_fields, parsed) ? 0 : WRONG_USAGE;
}
