/* The simulated nvidia-smi: the list of GPUs (-L), and the table of them. */
#include "smi.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

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

enum { WIDTH = 89 };
#define RULE "+-----------------------------------------------------------------------------------------+"
#define GPU_RULE "+-----------------------------------------+------------------------+----------------------+"
#define MIG_RULE "+------------------+----------------------------------+-----------+-----------------------+"

/* Prints a line of the table: text, padded to the width, between bars. */
static void line(const char *text)
{
    printf("|%-*.*s|\n", WIDTH, WIDTH, text);
}

/* The fields in the three lines of a GPU. */
enum { NAME, PERSISTENCE, BUS, DISPLAY, FAN, TEMPERATURE, STATE, DRAW, LIMIT, USED, TOTAL, BUSY, ERRORS, MODE, MIG, FIGURES };
static const char *const figures[FIGURES] = {
    "name", "persistence_mode", "pci.bus_id", "display_active", "fan.speed", "temperature.gpu", "pstate", "power.draw", "power.limit",
    "memory.used", "memory.total", "utilization.gpu", "ecc.errors.uncorrected.volatile.total", "compute_mode", "mig.mode.current"};

/* Watts without their fraction. */
static char *whole(char value[SMI_TEXT])
{
    if (*value >= '0' && *value <= '9')
        value[strcspn(value, ".")] = '\0';
    return value;
}

static const char *on_or_off(const char *value)
{
    return *value == 'E' ? "On" : *value == 'D' ? "Off" : value;
}

static void describe(const struct smi_gpu *gpu)
{
    char values[FIGURES][SMI_TEXT], text[2 * SMI_TEXT];
    for (int i = 0; i < FIGURES; i++)
        field(figures[i], gpu, values[i]);
    if (strcmp(values[MODE], "Exclusive_Process") == 0)
        strcpy(values[MODE], "E. Process");
    snprintf(text, sizeof text, "%4u  %-30.30s %-3.3s |%19.19s %3.3s |%21.21s ", gpu->index, values[NAME], on_or_off(values[PERSISTENCE]),
             values[BUS], on_or_off(values[DISPLAY]), values[ERRORS]);
    line(text);
    snprintf(text, sizeof text, "%4.4s%6.6s    %-3.3s          %5.5s / %5.5s |%11.11s / %9.9s |%8.8s%13.13s ", measured(values[FAN], "%"),
             measured(values[TEMPERATURE], "C"), values[STATE], measured(whole(values[DRAW]), "W"), measured(whole(values[LIMIT]), "W"),
             measured(values[USED], "MiB"), measured(values[TOTAL], "MiB"), measured(values[BUSY], "%"), values[MODE]);
    line(text);
    snprintf(text, sizeof text, "%41s|%24s|%21.21s ", "", "", values[MIG]);
    line(text);
    puts(GPU_RULE);
}

static void describe_instances(const struct smi_gpu *gpu)
{
    struct smi_gpu instance = {.index = 0};
    char used[SMI_TEXT], total[SMI_TEXT], text[2 * SMI_TEXT];
    for (unsigned place = 0; place < instance_places(gpu->handle); place++) {
        unsigned gpu_instance = 0, compute_instance = 0;
        if (!find_instance(gpu->handle, place, &instance.handle))
            continue;
        NVML(nvmlDeviceGetGpuInstanceId, instance.handle, &gpu_instance);
        NVML(nvmlDeviceGetComputeInstanceId, instance.handle, &compute_instance);
        field("memory.used", &instance, used);
        field("memory.total", &instance, total);
        snprintf(text, sizeof text, " %2u  %3u %3u %3u  |%19.19s / %-12.12s|%11s|%23s", gpu->index, gpu_instance, compute_instance,
                 instance.index++, measured(used, "MiB"), measured(total, "MiB"), "", "");
        line(text);
        puts(MIG_RULE);
    }
}

static void list_instances(void)
{
    unsigned places = 0;
    for (int i = 0; i < smi_gpu_count; i++)
        places += instance_places(smi_gpus[i].handle);
    if (places == 0)
        return;
    puts("\n" RULE);
    line(" MIG devices:");
    puts(MIG_RULE);
    line(" GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         ");
    line("      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG ");
    line("                  |                                  |        ECC|                       ");
    puts("|==================+==================================+===========+=======================|");
    for (int i = 0; i < smi_gpu_count; i++)
        describe_instances(&smi_gpus[i]);
}

/* Returns the number of processes. */
static unsigned describe_processes(const struct smi_gpu *gpu)
{
    enum { NAME_WIDTH = 36 };
    struct nvml_process rows[SMI_MAX_PROCESSES];
    unsigned count;
    char name[SMI_TEXT], memory[SMI_TEXT], gpu_instance[SMI_TEXT], compute_instance[SMI_TEXT], text[5 * SMI_TEXT];
    const char *unit;
    smi_processes(gpu->handle, rows, &count);
    for (unsigned i = 0; i < count; i++) {
        smi_query_process("process_name", gpu, &rows[i], name, &unit);
        smi_query_process("used_memory", gpu, &rows[i], memory, &unit);
        const size_t length = strlen(name);
        const bool is_long = length > NAME_WIDTH; /* its end says more than its beginning */
        snprintf(text, sizeof text, "%5u   %-3s  %-3s%16u      C   %s%-*s%10s ", gpu->index, smi_instance(rows[i].gpu_instance, gpu_instance),
                 smi_instance(rows[i].compute_instance, compute_instance), rows[i].pid, is_long ? "..." : "",
                 is_long ? 0 : NAME_WIDTH, is_long ? name + length - NAME_WIDTH + 3 : name, measured(memory, "MiB"));
        line(text);
    }
    return count;
}

int smi_table(void)
{
    char version[SMI_TEXT] = "N/A", text[2 * SMI_TEXT];
    int cuda = 0;
    const time_t now = time(NULL);
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y       ", localtime(&now));
    puts(text);
    NVML(nvmlSystemGetDriverVersion, version, SMI_TEXT);
    NVML(nvmlSystemGetCudaDriverVersion, &cuda);
    puts(RULE);
    snprintf(text, sizeof text, " NVIDIA-SMI %-22.22s Driver Version: %-14.14s CUDA Version: %d.%d", version, version, cuda / 1000,
             cuda % 1000 / 10);
    line(text);
    puts(GPU_RULE);
    line(" GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC ");
    line(" Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. ");
    line("                                         |                        |               MIG M. ");
    puts("|=========================================+========================+======================|");
    for (int i = 0; i < smi_gpu_count; i++)
        describe(&smi_gpus[i]);
    list_instances();
    puts("\n" RULE);
    line(" Processes:");
    line("  GPU   GI   CI              PID   Type   Process name                        GPU Memory ");
    line("        ID   ID                                                               Usage      ");
    puts("|=========================================================================================|");
    unsigned processes = 0;
    for (int i = 0; i < smi_gpu_count; i++)
        processes += describe_processes(&smi_gpus[i]);
    if (processes == 0)
        line("  No running processes found");
    puts(RULE);
    return 0;
}
