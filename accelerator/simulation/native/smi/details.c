/* The simulated nvidia-smi: all that it knows of a GPU (-q), in the order of driver 580. */
#include "smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum { LABEL_WIDTH = 55 };

/* The parts that -d chooses: X(name). */
#define PARTS(X)                                                                                                       \
    X(MEMORY) X(UTILIZATION) X(ECC) X(TEMPERATURE) X(POWER) X(CLOCK) X(COMPUTE) X(PIDS) X(PERFORMANCE)                 \
    X(PAGE_RETIREMENT) X(ACCOUNTING) X(ENCODER_STATS) X(ROW_REMAPPER) X(FBC_STATS)
#define NUMBER_OF_PART(name) name##_NUMBER,
#define BIT_OF_PART(name) name = 1 << name##_NUMBER,
#define PART(name) {#name, name},

enum { PARTS(NUMBER_OF_PART) };
enum { OTHERS = 0, PARTS(BIT_OF_PART) };

static const struct part {
    const char *name;
    unsigned bit;
} parts_known[] = {PARTS(PART)};

static const struct row {
    unsigned part;
    int depth;
    const char *label, *field; /* without a field: the heading of a section */
} rows[] = {
    {OTHERS, 1, "Product Name", "name"},
    {OTHERS, 1, "Product Brand", "brand"},
    {OTHERS, 1, "Product Architecture", "architecture"},
    {OTHERS, 1, "Display Mode", "display_mode"},
    {OTHERS, 1, "Display Attached", "display_attached"},
    {OTHERS, 1, "Display Active", "display_active"},
    {OTHERS, 1, "Persistence Mode", "persistence_mode"},
    {OTHERS, 1, "MIG Mode", NULL},
    {OTHERS, 2, "Current", "mig.mode.current"},
    {OTHERS, 2, "Pending", "mig.mode.pending"},
    {ACCOUNTING, 1, "Accounting Mode", "accounting.mode"},
    {ACCOUNTING, 1, "Accounting Mode Buffer Size", "accounting.buffer_size"},
    {OTHERS, 1, "Driver Model", NULL},
    {OTHERS, 2, "Current", "nothing"},
    {OTHERS, 2, "Pending", "nothing"},
    {OTHERS, 1, "Serial Number", "serial"},
    {OTHERS, 1, "GPU UUID", "uuid"},
    {OTHERS, 1, "Minor Number", "minor_number"},
    {OTHERS, 1, "VBIOS Version", "vbios_version"},
    {OTHERS, 1, "MultiGPU Board", "multi_gpu_board"},
    {OTHERS, 1, "Board ID", "board_id"},
    {OTHERS, 1, "GPU Recovery Action", "gpu_recovery_action"},
    {OTHERS, 1, "PCI", NULL},
    {OTHERS, 2, "Bus", "pci.bus"},
    {OTHERS, 2, "Device", "pci.device"},
    {OTHERS, 2, "Domain", "pci.domain"},
    {OTHERS, 2, "Device Id", "pci.device_id"},
    {OTHERS, 2, "Bus Id", "pci.bus_id"},
    {OTHERS, 2, "Sub System Id", "pci.sub_device_id"},
    {OTHERS, 2, "GPU Link Info", NULL},
    {OTHERS, 3, "PCIe Generation", NULL},
    {OTHERS, 4, "Max", "pcie.link.gen.max"},
    {OTHERS, 4, "Current", "pcie.link.gen.current"},
    {OTHERS, 4, "Device Current", "pcie.link.gen.gpucurrent"},
    {OTHERS, 4, "Device Max", "pcie.link.gen.gpumax"},
    {OTHERS, 4, "Host Max", "nothing"},
    {OTHERS, 3, "Link Width", NULL},
    {OTHERS, 4, "Max", "link_width.max"},
    {OTHERS, 4, "Current", "link_width.current"},
    {OTHERS, 2, "Replays Since Reset", "replays"},
    {OTHERS, 2, "Tx Throughput", "tx"},
    {OTHERS, 2, "Rx Throughput", "rx"},
    {OTHERS, 1, "Fan Speed", "fan.speed"},
    {PERFORMANCE, 1, "Performance State", "pstate"},
    {PERFORMANCE, 1, "Clocks Event Reasons", NULL},
    {PERFORMANCE, 2, "Idle", "clocks_event_reasons.gpu_idle"},
    {PERFORMANCE, 2, "Applications Clocks Setting", "clocks_event_reasons.applications_clocks_setting"},
    {PERFORMANCE, 2, "SW Power Cap", "clocks_event_reasons.sw_power_cap"},
    {PERFORMANCE, 2, "HW Slowdown", "clocks_event_reasons.hw_slowdown"},
    {PERFORMANCE, 3, "HW Thermal Slowdown", "clocks_event_reasons.hw_thermal_slowdown"},
    {PERFORMANCE, 3, "HW Power Brake Slowdown", "clocks_event_reasons.hw_power_brake_slowdown"},
    {PERFORMANCE, 2, "Sync Boost", "clocks_event_reasons.sync_boost"},
    {PERFORMANCE, 2, "SW Thermal Slowdown", "clocks_event_reasons.sw_thermal_slowdown"},
    {PERFORMANCE, 2, "Display Clock Setting", "display_clock_setting"},
    {MEMORY, 1, "FB Memory Usage", NULL},
    {MEMORY, 2, "Total", "memory.total"},
    {MEMORY, 2, "Reserved", "memory.reserved"},
    {MEMORY, 2, "Used", "memory.used"},
    {MEMORY, 2, "Free", "memory.free"},
    {MEMORY, 1, "BAR1 Memory Usage", NULL},
    {MEMORY, 2, "Total", "bar1.total"},
    {MEMORY, 2, "Used", "bar1.used"},
    {MEMORY, 2, "Free", "bar1.free"},
    {COMPUTE, 1, "Compute Mode", "compute_mode"},
    {UTILIZATION, 1, "Utilization", NULL},
    {UTILIZATION, 2, "GPU", "utilization.gpu"},
    {UTILIZATION, 2, "Memory", "utilization.memory"},
    {UTILIZATION, 2, "Encoder", "utilization.encoder"},
    {UTILIZATION, 2, "Decoder", "utilization.decoder"},
    {UTILIZATION, 2, "JPEG", "utilization.jpeg"},
    {UTILIZATION, 2, "OFA", "utilization.ofa"},
    {ENCODER_STATS, 1, "Encoder Stats", NULL},
    {ENCODER_STATS, 2, "Active Sessions", "encoder.stats.sessionCount"},
    {ENCODER_STATS, 2, "Average FPS", "encoder.stats.averageFps"},
    {ENCODER_STATS, 2, "Average Latency", "encoder.stats.averageLatency"},
    {FBC_STATS, 1, "FBC Stats", NULL},
    {FBC_STATS, 2, "Active Sessions", "fbc.sessions"},
    {FBC_STATS, 2, "Average FPS", "fbc.fps"},
    {FBC_STATS, 2, "Average Latency", "fbc.latency"},
    {ECC, 1, "ECC Mode", NULL},
    {ECC, 2, "Current", "ecc.mode.current"},
    {ECC, 2, "Pending", "ecc.mode.pending"},
    {ECC, 1, "ECC Errors", NULL},
    {ECC, 2, "Volatile", NULL},
    {ECC, 3, "SRAM Correctable", "ecc.errors.corrected.volatile.sram"},
    {ECC, 3, "SRAM Uncorrectable Parity", "ecc.errors.uncorrected.volatile.sram"},
    {ECC, 3, "SRAM Uncorrectable SEC-DED", "ecc.errors.uncorrected.volatile.sram"},
    {ECC, 3, "DRAM Correctable", "ecc.errors.corrected.volatile.dram"},
    {ECC, 3, "DRAM Uncorrectable", "ecc.errors.uncorrected.volatile.dram"},
    {ECC, 2, "Aggregate", NULL},
    {ECC, 3, "SRAM Correctable", "ecc.errors.corrected.aggregate.sram"},
    {ECC, 3, "SRAM Uncorrectable Parity", "ecc.errors.uncorrected.aggregate.sram"},
    {ECC, 3, "SRAM Uncorrectable SEC-DED", "ecc.errors.uncorrected.aggregate.sram"},
    {ECC, 3, "DRAM Correctable", "ecc.errors.corrected.aggregate.dram"},
    {ECC, 3, "DRAM Uncorrectable", "ecc.errors.uncorrected.aggregate.dram"},
    {PAGE_RETIREMENT, 1, "Retired Pages", NULL},
    {PAGE_RETIREMENT, 2, "Single Bit ECC", "retired_pages.single_bit_ecc.count"},
    {PAGE_RETIREMENT, 2, "Double Bit ECC", "retired_pages.double_bit.count"},
    {PAGE_RETIREMENT, 2, "Pending Page Blacklist", "retired_pages.pending"},
    {ROW_REMAPPER, 1, "Remapped Rows", NULL},
    {ROW_REMAPPER, 2, "Correctable Error", "remapped_rows.correctable"},
    {ROW_REMAPPER, 2, "Uncorrectable Error", "remapped_rows.uncorrectable"},
    {ROW_REMAPPER, 2, "Pending", "remapped_rows.pending"},
    {ROW_REMAPPER, 2, "Remapping Failure Occurred", "remapped_rows.failure"},
    {ROW_REMAPPER, 2, "Bank Remap Availability Histogram", NULL},
    {ROW_REMAPPER, 3, "Max", "banks.max"},
    {ROW_REMAPPER, 3, "High", "banks.high"},
    {ROW_REMAPPER, 3, "Partial", "banks.partial"},
    {ROW_REMAPPER, 3, "Low", "banks.low"},
    {ROW_REMAPPER, 3, "None", "banks.none"},
    {TEMPERATURE, 1, "Temperature", NULL},
    {TEMPERATURE, 2, "GPU Current Temp", "temperature.gpu"},
    {TEMPERATURE, 2, "GPU T.Limit Temp", "temperature.gpu.tlimit"},
    {TEMPERATURE, 2, "GPU Shutdown T.Limit Temp", "tlimit.shutdown"},
    {TEMPERATURE, 2, "GPU Slowdown T.Limit Temp", "tlimit.slowdown"},
    {TEMPERATURE, 2, "GPU Max Operating T.Limit Temp", "tlimit.gpu"},
    {TEMPERATURE, 2, "GPU Target Temperature", "nothing"},
    {TEMPERATURE, 2, "Memory Current Temp", "temperature.memory"},
    {TEMPERATURE, 2, "Memory Max Operating T.Limit Temp", "tlimit.memory"},
    {POWER, 1, "GPU Power Readings", NULL},
    {POWER, 2, "Average Power Draw", "power.draw.average"},
    {POWER, 2, "Instantaneous Power Draw", "power.draw.instant"},
    {POWER, 2, "Current Power Limit", "power.limit"},
    {POWER, 2, "Requested Power Limit", "requested_limit"},
    {POWER, 2, "Default Power Limit", "power.default_limit"},
    {POWER, 2, "Min Power Limit", "power.min_limit"},
    {POWER, 2, "Max Power Limit", "power.max_limit"},
    {CLOCK, 1, "Clocks", NULL},
    {CLOCK, 2, "Graphics", "clocks.gr"},
    {CLOCK, 2, "SM", "clocks.sm"},
    {CLOCK, 2, "Memory", "clocks.mem"},
    {CLOCK, 2, "Video", "clocks.video"},
    {CLOCK, 1, "Applications Clocks", NULL},
    {CLOCK, 2, "Graphics", "clocks.applications.graphics"},
    {CLOCK, 2, "Memory", "clocks.applications.memory"},
    {CLOCK, 1, "Default Applications Clocks", NULL},
    {CLOCK, 2, "Graphics", "clocks.default_applications.graphics"},
    {CLOCK, 2, "Memory", "clocks.default_applications.memory"},
    {CLOCK, 1, "Max Clocks", NULL},
    {CLOCK, 2, "Graphics", "clocks.max.gr"},
    {CLOCK, 2, "SM", "clocks.max.sm"},
    {CLOCK, 2, "Memory", "clocks.max.mem"},
    {CLOCK, 2, "Video", "clocks.max.video"},
    {CLOCK, 1, "Max Customer Boost Clocks", NULL},
    {CLOCK, 2, "Graphics", "boost"},
};

static void print(int depth, const char *label, const char *value, const char *unit)
{
    enum { INDENT = 4 };
    printf("%*s%-*s: %s%s%s\n", depth * INDENT, "", LABEL_WIDTH - depth * INDENT, label, value, *unit ? " " : "", unit);
}

static void print_heading(int depth, const char *label)
{
    printf("%*s%s\n", 4 * depth, "", label);
}

static void print_row(const struct row *row, const struct smi_gpu *gpu)
{
    char text[SMI_TEXT];
    const char *unit = "";
    smi_query_detail(row->field, gpu, text, &unit);
    if (strncmp(row->field, "temperature", strlen("temperature")) == 0)
        unit = "C"; /* which a query leaves out */
    const size_t length = strlen(text);
    if (*text != '[') {
        print(row->depth, row->label, text, unit);
        return;
    }
    text[length - 1] = '\0'; /* without the brackets of a query */
    print(row->depth, row->label, text + 1, "");
}

static void print_processes(const struct smi_gpu *gpu)
{
    struct nvml_process processes[SMI_MAX_PROCESSES];
    unsigned count;
    char text[SMI_TEXT];
    const char *unit;
    smi_processes(gpu->handle, processes, &count);
    if (count == 0) {
        print(1, "Processes", "None", "");
        return;
    }
    print_heading(1, "Processes");
    for (unsigned i = 0; i < count; i++) {
        print(2, "GPU instance ID", smi_instance(processes[i].gpu_instance, text), "");
        print(2, "Compute instance ID", smi_instance(processes[i].compute_instance, text), "");
        smi_query_process("pid", gpu, &processes[i], text, &unit);
        print(2, "Process ID", text, "");
        print(3, "Type", "C", "");
        smi_query_process("process_name", gpu, &processes[i], text, &unit);
        print(3, "Name", text, "");
        smi_query_process("used_memory", gpu, &processes[i], text, &unit);
        print(3, "Used GPU Memory", text, unit);
    }
}

/* Returns 0 for names that are not known. */
static unsigned find_parts(const char *names)
{
    char *copy = strdup(names), *rest = copy;
    unsigned found = 0;
    for (char *name; (name = strsep(&rest, ","));) {
        unsigned bit = 0;
        for (size_t i = 0; i < sizeof parts_known / sizeof *parts_known; i++)
            if (strcasecmp(parts_known[i].name, name) == 0)
                bit = parts_known[i].bit;
        if (bit == 0) {
            found = 0;
            break;
        }
        found |= bit;
    }
    free(copy);
    return found;
}

bool smi_are_parts(const char *parts)
{
    return find_parts(parts) != 0;
}

int smi_details(const char *parts)
{
    char text[SMI_TEXT] = "N/A", cuda_text[SMI_TEXT];
    int cuda = 0;
    const time_t now = time(NULL);
    const unsigned chosen = parts ? find_parts(parts) : 0;
    char date[SMI_TEXT];
    strftime(date, sizeof date, "%a %b %e %H:%M:%S %Y", localtime(&now));
    NVML(nvmlSystemGetDriverVersion, text, SMI_TEXT);
    NVML(nvmlSystemGetCudaDriverVersion, &cuda);
    snprintf(cuda_text, sizeof cuda_text, "%d.%d", cuda / 1000, cuda % 1000 / 10);
    puts("\n==============NVSMI LOG==============\n");
    print(0, "Timestamp", date, "");
    print(0, "Driver Version", text, "");
    print(0, "CUDA Version", cuda_text, "");
    unsigned count = 0;
    NVML(nvmlDeviceGetCount_v2, &count);
    snprintf(text, sizeof text, "%u", count);
    puts("");
    print(0, "Attached GPUs", text, "");
    for (int i = 0; i < smi_gpu_count; i++) {
        const char *unit;
        smi_query_gpu("pci.bus_id", &smi_gpus[i], text, &unit);
        printf("GPU %s\n", text);
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
            if (parts && !(rows[k].part & chosen))
                continue;
            else if (rows[k].field)
                print_row(&rows[k], &smi_gpus[i]);
            else
                print_heading(rows[k].depth, rows[k].label);
        if (!parts || chosen & PIDS)
            print_processes(&smi_gpus[i]);
        puts("");
    }
    return 0;
}
