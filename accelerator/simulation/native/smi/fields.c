/* The simulated nvidia-smi: the fields of queries. */
#include "smi.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* Formats a figure, or the text for one that NVML did not return. */
static void put(char text[SMI_TEXT], int failure, const char *format, double value)
{
    if (failure == NVML_NOT_SUPPORTED || failure == NVML_FUNCTION_NOT_FOUND)
        strcpy(text, "[N/A]");
    else if (failure)
        snprintf(text, SMI_TEXT, "[%s]", smi_error(failure));
    else
        snprintf(text, SMI_TEXT, format, value);
}

static void put_text(char text[SMI_TEXT], int failure)
{
    if (failure)
        put(text, failure, "", 0);
}

typedef void query(nvml_handle gpu, int selector, char text[SMI_TEXT]);

static void query_text(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    put_text(text, selector == 'n'   ? NVML(nvmlDeviceGetName, gpu, text, SMI_TEXT)
                   : selector == 'u' ? NVML(nvmlDeviceGetUUID, gpu, text, SMI_TEXT)
                   : selector == 's' ? NVML(nvmlDeviceGetSerial, gpu, text, SMI_TEXT)
                   : selector == 'v' ? NVML(nvmlDeviceGetVbiosVersion, gpu, text, SMI_TEXT)
                                   : NVML(nvmlSystemGetDriverVersion, text, SMI_TEXT));
}

static void query_number(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned value = 0;
    int failure = selector == 'c' ? NVML(nvmlDeviceGetCount_v2, &value) : NVML(nvmlDeviceGetIndex, gpu, &value);
    put(text, failure, "%.0f", value);
}

static void query_time(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    (void)gpu, (void)selector;
    time_t now = time(NULL);
    strftime(text, SMI_TEXT, "%Y/%m/%d %H:%M:%S.000", localtime(&now));
}

static void query_bus(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    struct nvml_pci_info info;
    int failure = NVML(nvmlDeviceGetPciInfo_v3, gpu, &info);
    put_text(text, failure);
    if (!failure && selector == 'i')
        strcpy(text, info.bus_id);
    else if (!failure)
        snprintf(text, SMI_TEXT, selector == 'd' ? "0x%04X" : "0x%02X", selector == 'd' ? info.domain
                                                                      : selector == 'b' ? info.bus
                                                                                      : info.device);
}

static void query_capability(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    (void)selector;
    int major = 0, minor = 0;
    int failure = NVML(nvmlDeviceGetCudaComputeCapability, gpu, &major, &minor);
    put(text, failure, "%.1f", major + minor / 10.0);
}

static void query_memory(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    struct nvml_memory memory;
    int failure = smi_memory(gpu, &memory);
    uint64_t bytes = selector == 't' ? memory.total : selector == 'u' ? memory.used : selector == 'f' ? memory.free : memory.reserved;
    put(text, failure, "%.0f", (double)(bytes >> 20));
}

static void query_utilization(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned rates[2] = {0};
    int failure = NVML(nvmlDeviceGetUtilizationRates, gpu, rates);
    put(text, failure, "%.0f", rates[selector]);
}

static void query_temperature(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned degrees = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetTemperature, gpu, 0, &degrees);
    put(text, failure, "%.0f", degrees);
}

/* Reads one of NVML's fields: milliwatts for power, integers for the others. */
static void query_field(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    enum { MEMORY_TEMPERATURE = 82 };
    struct nvml_field_value field = {.field = (unsigned)selector};
    int failure = NVML(nvmlDeviceGetFieldValues, gpu, 1, &field);
    bool is_power = selector != MEMORY_TEMPERATURE;
    put(text, failure ? failure : field.result, is_power ? "%.2f" : "%.0f",
        is_power ? (double)field.value.u32 / 1000 : (double)field.value.u32);
}

static void query_power(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned milliwatts = 0;
    int failure = selector == 'd'   ? NVML(nvmlDeviceGetPowerUsage, gpu, &milliwatts)
                  : selector == 'e' ? NVML(nvmlDeviceGetEnforcedPowerLimit, gpu, &milliwatts)
                                  : NVML(nvmlDeviceGetPowerManagementLimit, gpu, &milliwatts);
    put(text, failure, "%.2f", milliwatts / 1000.0);
}

static void query_clock(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned megahertz = 0;
    int failure = NVML(nvmlDeviceGetClockInfo, gpu, selector, &megahertz);
    put(text, failure, "%.0f", megahertz);
}

static void query_highest_clock(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned megahertz = 0;
    int failure = NVML(nvmlDeviceGetMaxClockInfo, gpu, selector, &megahertz);
    put(text, failure, "%.0f", megahertz);
}

static void query_clock_reasons(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    uint64_t reasons = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetCurrentClocksEventReasons, gpu, &reasons);
    snprintf(text, SMI_TEXT, "0x%016llX", (unsigned long long)reasons);
    put_text(text, failure);
}

static void query_fan(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned percent = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetFanSpeed, gpu, &percent);
    put(text, failure, "%.0f", percent);
}

static void query_state(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned state = 0;
    (void)selector;
    put(text, NVML(nvmlDeviceGetPerformanceState, gpu, &state), "P%.0f", state);
}

static void query_mig(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned modes[2] = {0};
    int failure = NVML(nvmlDeviceGetMigMode, gpu, &modes[0], &modes[1]);
    strcpy(text, modes[selector] ? "Enabled" : "Disabled");
    put_text(text, failure);
}

static void query_mode(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned mode = 0;
    int failure = selector == 'p' ? NVML(nvmlDeviceGetPersistenceMode, gpu, &mode) : NVML(nvmlDeviceGetComputeMode, gpu, &mode);
    static const char *const compute_modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    strcpy(text, selector == 'p' ? mode ? "Enabled" : "Disabled" : compute_modes[mode & 3]);
    put_text(text, failure);
}

static void query_nothing(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    (void)gpu, (void)selector;
    strcpy(text, "[N/A]");
}

static const struct field {
    const char *name, *unit;
    query *read;
    int selector;
} fields[] = {
    {"timestamp", "", query_time, 0},
    {"driver_version", "", query_text, 'd'},
    {"count", "", query_number, 'c'},
    {"index", "", query_number, 'i'},
    {"name", "", query_text, 'n'},
    {"gpu_name", "", query_text, 'n'},
    {"uuid", "", query_text, 'u'},
    {"gpu_uuid", "", query_text, 'u'},
    {"serial", "", query_text, 's'},
    {"gpu_serial", "", query_text, 's'},
    {"vbios_version", "", query_text, 'v'},
    {"pci.bus_id", "", query_bus, 'i'},
    {"gpu_bus_id", "", query_bus, 'i'},
    {"pci.domain", "", query_bus, 'd'},
    {"pci.bus", "", query_bus, 'b'},
    {"pci.device", "", query_bus, 'x'},
    {"compute_cap", "", query_capability, 0},
    {"memory.total", "MiB", query_memory, 't'},
    {"memory.used", "MiB", query_memory, 'u'},
    {"memory.free", "MiB", query_memory, 'f'},
    {"memory.reserved", "MiB", query_memory, 'r'},
    {"utilization.gpu", "%", query_utilization, 0},
    {"utilization.memory", "%", query_utilization, 1},
    {"temperature.gpu", "", query_temperature, 0},
    {"temperature.memory", "", query_field, 82},
    {"power.draw", "W", query_power, 'd'},
    {"power.draw.average", "W", query_field, 185},
    {"power.draw.instant", "W", query_field, 186},
    {"power.limit", "W", query_power, 'l'},
    {"enforced.power.limit", "W", query_power, 'e'},
    {"power.min_limit", "W", query_field, 187},
    {"power.max_limit", "W", query_field, 188},
    {"power.default_limit", "W", query_field, 189},
    {"fan.speed", "%", query_fan, 0},
    {"pstate", "", query_state, 0},
    {"persistence_mode", "", query_mode, 'p'},
    {"compute_mode", "", query_mode, 'c'},
    {"mig.mode.current", "", query_mig, 0},
    {"mig.mode.pending", "", query_mig, 1},
    {"clocks.gr", "MHz", query_clock, 0},
    {"clocks.sm", "MHz", query_clock, 1},
    {"clocks.mem", "MHz", query_clock, 2},
    {"clocks.video", "MHz", query_clock, 3},
    {"clocks.current.graphics", "MHz", query_clock, 0},
    {"clocks.current.sm", "MHz", query_clock, 1},
    {"clocks.current.memory", "MHz", query_clock, 2},
    {"clocks.current.video", "MHz", query_clock, 3},
    {"clocks.max.gr", "MHz", query_highest_clock, 0},
    {"clocks.max.graphics", "MHz", query_highest_clock, 0},
    {"clocks.max.sm", "MHz", query_highest_clock, 1},
    {"clocks.max.mem", "MHz", query_highest_clock, 2},
    {"clocks.max.memory", "MHz", query_highest_clock, 2},
    {"clocks_event_reasons.active", "", query_clock_reasons, 0},
    {"clocks_throttle_reasons.active", "", query_clock_reasons, 0},
    {"display_active", "", query_nothing, 0},
    {"display_mode", "", query_nothing, 0},
    {"ecc.mode.current", "", query_nothing, 0},
    {"ecc.errors.corrected.volatile.total", "", query_nothing, 0},
    {"ecc.errors.uncorrected.volatile.total", "", query_nothing, 0},
    {"encoder.stats.sessionCount", "", query_nothing, 0},
    {"pcie.link.gen.current", "", query_nothing, 0},
    {"pcie.link.gen.max", "", query_nothing, 0},
    {"pcie.link.width.current", "", query_nothing, 0},
    {"pcie.link.width.max", "", query_nothing, 0},
};

bool smi_query_gpu(const char *name, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strcmp(fields[i].name, name) == 0) {
            fields[i].read(gpu->handle, fields[i].selector, text);
            *unit = fields[i].unit;
            return true;
        }
    return false;
}

bool smi_query_process(const char *name, const struct smi_gpu *gpu, const struct nvml_process *row, char text[SMI_TEXT],
                       const char **unit)
{
    if (strcmp(name, "pid") == 0)
        snprintf(text, SMI_TEXT, "%u", row->pid);
    else if (strcmp(name, "process_name") == 0 || strcmp(name, "name") == 0)
        put_text(text, NVML(nvmlSystemGetProcessName, row->pid, text, SMI_TEXT));
    else if (strcmp(name, "used_memory") == 0 || strcmp(name, "used_gpu_memory") == 0) {
        snprintf(text, SMI_TEXT, "%llu", (unsigned long long)(row->memory >> 20));
        *unit = "MiB";
    } else if (strcmp(name, "timestamp") == 0 || strncmp(name, "gpu_", 4) == 0)
        return smi_query_gpu(name, gpu, text, unit);
    else
        return false;
    return true;
}
