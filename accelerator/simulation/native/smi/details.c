/* The simulated nvidia-smi: all that it knows of a GPU (-q). */
#include "smi.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { LABEL_WIDTH = 42 };

static const struct row {
    int depth;
    const char *label, *field; /* without a field: the heading of a section */
} rows[] = {
    {1, "Product Name", "name"},
    {1, "Persistence Mode", "persistence_mode"},
    {1, "MIG Mode", NULL},
    {2, "Current", "mig.mode.current"},
    {2, "Pending", "mig.mode.pending"},
    {1, "Serial Number", "serial"},
    {1, "GPU UUID", "uuid"},
    {1, "VBIOS Version", "vbios_version"},
    {1, "GPU Recovery Action", "gpu_recovery_action"},
    {1, "PCI", NULL},
    {2, "Bus", "pci.bus"},
    {2, "Device", "pci.device"},
    {2, "Domain", "pci.domain"},
    {2, "Bus Id", "pci.bus_id"},
    {1, "Fan Speed", "fan.speed"},
    {1, "Performance State", "pstate"},
    {1, "FB Memory Usage", NULL},
    {2, "Total", "memory.total"},
    {2, "Reserved", "memory.reserved"},
    {2, "Used", "memory.used"},
    {2, "Free", "memory.free"},
    {1, "Compute Mode", "compute_mode"},
    {1, "Utilization", NULL},
    {2, "GPU", "utilization.gpu"},
    {2, "Memory", "utilization.memory"},
    {1, "ECC Mode", NULL},
    {2, "Current", "ecc.mode.current"},
    {2, "Pending", "ecc.mode.pending"},
    {1, "ECC Errors", NULL},
    {2, "Volatile", NULL},
    {3, "DRAM Correctable", "ecc.errors.corrected.volatile.total"},
    {3, "DRAM Uncorrectable", "ecc.errors.uncorrected.volatile.total"},
    {2, "Aggregate", NULL},
    {3, "DRAM Correctable", "ecc.errors.corrected.aggregate.total"},
    {3, "DRAM Uncorrectable", "ecc.errors.uncorrected.aggregate.total"},
    {1, "Remapped Rows", NULL},
    {2, "Correctable Error", "remapped_rows.correctable"},
    {2, "Uncorrectable Error", "remapped_rows.uncorrectable"},
    {2, "Pending", "remapped_rows.pending"},
    {2, "Remapping Failure Occurred", "remapped_rows.failure"},
    {1, "Temperature", NULL},
    {2, "GPU Current Temp", "temperature.gpu"},
    {2, "Memory Current Temp", "temperature.memory"},
    {1, "GPU Power Readings", NULL},
    {2, "Average Power Draw", "power.draw.average"},
    {2, "Current Power Limit", "power.limit"},
    {1, "Clocks", NULL},
    {2, "Graphics", "clocks.gr"},
    {2, "SM", "clocks.sm"},
    {2, "Memory", "clocks.mem"},
    {2, "Video", "clocks.video"},
};

static void print(int depth, const char *label, const char *value, const char *unit)
{
    enum { INDENT = 4 };
    printf("%*s%-*s: %s%s%s\n", depth * INDENT, "", LABEL_WIDTH - depth * INDENT, label, value, *unit ? " " : "", unit);
}

static void print_row(const struct row *row, const struct smi_gpu *gpu)
{
    char text[SMI_TEXT];
    const char *unit = "";
    smi_query_gpu(row->field, gpu, text, &unit);
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

int smi_details(void)
{
    char text[SMI_TEXT] = "N/A", cuda_text[SMI_TEXT];
    int cuda = 0;
    const time_t now = time(NULL);
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
            if (rows[k].field)
                print_row(&rows[k], &smi_gpus[i]);
            else
                printf("%*s%s\n", 4 * rows[k].depth, "", rows[k].label);
        puts("");
    }
    return 0;
}
