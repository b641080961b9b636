/* The simulated nvidia-smi: the list of GPUs, the table of them, and what connects them. */
#include "smi.h"

#include <stdio.h>
#include <string.h>

static const char *field(const char *name, const struct smi_gpu *gpu, char text[SMI_TEXT])
{
    const char *unit;
    smi_query_gpu(name, gpu, text, &unit);
    if (*text == '[') /* without the brackets of a query */
        strcpy(text, strcmp(text, "[N/A]") == 0 ? "N/A" : "ERR!");
    return text;
}

/* Appends the unit to a value, but not to words such as "N/A". */
static const char *measured(char value[SMI_TEXT], const char *unit)
{
    if (*value >= '0' && *value <= '9')
        strncat(value, unit, SMI_TEXT - strlen(value) - 1);
    return value;
}

/* Finds the MIG instance at an index of the GPU. Returns false if there is none. */
static bool find_instance(nvml_handle gpu, unsigned place, nvml_handle *instance)
{
    return NVML(nvmlDeviceGetMigDeviceHandleByIndex, gpu, place, instance) == NVML_OK;
}

static unsigned instance_places(nvml_handle gpu)
{
    unsigned count = 0;
    return NVML(nvmlDeviceGetMaxMigDeviceCount, gpu, &count) == NVML_OK ? count : 0;
}

int smi_list(void)
{
    char name[SMI_TEXT], uuid[SMI_TEXT];
    for (int i = 0; i < smi_gpu_count; i++) {
        const struct smi_gpu *gpu = &smi_gpus[i];
        printf("GPU %u: %s (UUID: %s)\n", gpu->index, field("name", gpu, name), field("uuid", gpu, uuid));
        struct smi_gpu instance = {.index = 0};
        for (unsigned place = 0; place < instance_places(gpu->handle); place++)
            if (find_instance(gpu->handle, place, &instance.handle))
                printf("  MIG 1g     Device %2u: (UUID: %s)\n", instance.index++, field("uuid", &instance, uuid));
    }
    return 0;
}

enum { WIDTH = 92 };

/* Prints a line of the table: text, padded to the width, between bars. */
static void line(const char *text)
{
    printf("|%-*.*s|\n", WIDTH, WIDTH, text);
}

static void rule(char character)
{
    putchar('+');
    for (int i = 0; i < WIDTH; i++)
        putchar(character);
    puts("+");
}

/* The fields in the two lines of a GPU. */
enum { NAME, PERSISTENCE, BUS, FAN, TEMPERATURE, STATE, DRAW, LIMIT, USED, TOTAL, BUSY, ERRORS, FIGURES };
static const char *const figures[FIGURES] = {"name",       "persistence_mode", "pci.bus_id",   "fan.speed",
                                             "temperature.gpu", "pstate",      "power.draw",   "power.limit",
                                             "memory.used", "memory.total",    "utilization.gpu",
                                             "ecc.errors.uncorrected.volatile.total"};

static void describe(const struct smi_gpu *gpu)
{
    char values[FIGURES][SMI_TEXT], text[SMI_TEXT];
    for (int i = 0; i < FIGURES; i++)
        field(figures[i], gpu, values[i]);
    snprintf(text, sizeof text, " %3u  %-34.34s %3s | %16.16s %5s | %20.20s", gpu->index, values[NAME],
             values[PERSISTENCE][0] == 'E' ? "On" : "Off", values[BUS], "Off", values[ERRORS]);
    line(text);
    snprintf(text, sizeof text, " %4.4s   %5.5s  %-4.4s    %9.9s / %9.9s | %9.9s / %10.10s | %5.5s     Default",
             measured(values[FAN], "%"), measured(values[TEMPERATURE], "C"), values[STATE], measured(values[DRAW], "W"),
             measured(values[LIMIT], "W"), measured(values[USED], "MiB"), measured(values[TOTAL], "MiB"),
             measured(values[BUSY], "%"));
    line(text);
}

static void describe_instances(const struct smi_gpu *gpu)
{
    struct smi_gpu instance = {.index = 0};
    char used[SMI_TEXT], total[SMI_TEXT], text[SMI_TEXT];
    for (unsigned place = 0; place < instance_places(gpu->handle); place++) {
        unsigned gpu_instance = 0, compute_instance = 0;
        if (!find_instance(gpu->handle, place, &instance.handle))
            continue;
        NVML(nvmlDeviceGetGpuInstanceId, instance.handle, &gpu_instance);
        NVML(nvmlDeviceGetComputeInstanceId, instance.handle, &compute_instance);
        field("memory.used", &instance, used);
        field("memory.total", &instance, total);
        snprintf(text, sizeof text, " %3u  MIG device %2u  GI %2u  CI %2u            | %9.9s / %10.10s |", gpu->index,
                 instance.index++, gpu_instance, compute_instance, measured(used, "MiB"), measured(total, "MiB"));
        line(text);
    }
}

static void describe_processes(const struct smi_gpu *gpu)
{
    struct nvml_process rows[SMI_MAX_PROCESSES];
    unsigned count;
    char name[SMI_TEXT], memory[SMI_TEXT], text[2 * SMI_TEXT];
    const char *unit;
    smi_processes(gpu->handle, rows, &count);
    for (unsigned i = 0; i < count; i++) {
        smi_query_process("process_name", gpu, &rows[i], name, &unit);
        smi_query_process("used_memory", gpu, &rows[i], memory, &unit);
        snprintf(text, sizeof text, " %4u %12u      C   %-45.45s %11s", gpu->index, rows[i].pid, name, measured(memory, "MiB"));
        line(text);
    }
}

int smi_table(void)
{
    char version[SMI_TEXT] = "N/A", text[SMI_TEXT];
    int cuda = 0;
    NVML(nvmlSystemGetDriverVersion, version, SMI_TEXT);
    NVML(nvmlSystemGetCudaDriverVersion, &cuda);
    rule('-');
    snprintf(text, sizeof text, " NVIDIA-SMI %-18.18s Driver Version: %-18.18s CUDA Version: %d.%d", version, version,
             cuda / 1000, cuda % 1000 / 10);
    line(text);
    rule('-');
    line(" GPU  Name                     Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC");
    line(" Fan    Temp  Perf             Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M.");
    rule('=');
    for (int i = 0; i < smi_gpu_count; i++) {
        describe(&smi_gpus[i]);
        describe_instances(&smi_gpus[i]);
        rule('-');
    }
    puts("");
    rule('-');
    line(" Processes:");
    line("  GPU          PID   Type   Process name                                       GPU Memory");
    rule('=');
    for (int i = 0; i < smi_gpu_count; i++)
        describe_processes(&smi_gpus[i]);
    rule('-');
    return 0;
}

int smi_topology(void)
{
    enum { NVLINK = 2, SAME_NODE = 40 };
    for (int i = 0; i < smi_gpu_count; i++)
        printf("\tGPU%u", smi_gpus[i].index);
    puts("");
    for (int i = 0; i < smi_gpu_count; i++) {
        printf("GPU%u", smi_gpus[i].index);
        for (int j = 0; j < smi_gpu_count; j++) {
            int linked = -1;
            unsigned level = 0;
            NVML(nvmlDeviceGetP2PStatus, smi_gpus[i].handle, smi_gpus[j].handle, NVLINK, &linked);
            NVML(nvmlDeviceGetTopologyCommonAncestor, smi_gpus[i].handle, smi_gpus[j].handle, &level);
            printf("\t%s", i == j ? "X" : linked == 0 ? "NV1" : level <= SAME_NODE ? "NODE" : "SYS");
        }
        puts("");
    }
    return 0;
}
