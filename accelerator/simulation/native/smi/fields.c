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

enum { NO_SELECTOR = -1 };

struct field {
    const char *name, *unit;
    query *read;
    int selector;
    const char *header; /* the name that the driver prints, if it is another one */
    const char *function, *format; /* without `read`: NVML's function of one figure, and how the figure is printed */
};

/* Reads a figure. Those functions that take a selector, as a type of clock, have it before the result. */
static void query_figure(nvml_handle gpu, const struct field *field, char text[SMI_TEXT])
{
    unsigned value = 0;
    nvml_function *const function = smi_find(field->function);
    int failure = field->selector == NO_SELECTOR ? function(gpu, &value) : function(gpu, field->selector, &value);
    put(text, failure, field->format, strcmp(field->unit, "W") == 0 ? value / 1000.0 : value); /* NVML has milliwatts */
}

#define FIELD(name_, unit_, read_, selector_, header_) \
    {.name = name_, .unit = unit_, .read = read_, .selector = selector_, .header = header_}
#define FORMATTED_FIGURE(name_, unit_, function_, selector_, header_, format_) \
    {.name = name_, .unit = unit_, .selector = selector_, .header = header_, .function = function_, .format = format_}
#define FIGURE_OF(name, unit, function, selector, header) FORMATTED_FIGURE(name, unit, function, selector, header, "%.0f")
#define FIGURE(name, unit, function, header) FIGURE_OF(name, unit, function, NO_SELECTOR, header)
#define FORMATTED(name, unit, function, format) FORMATTED_FIGURE(name, unit, function, NO_SELECTOR, NULL, format)
#define CLOCK_REASON(name, bit) \
    FIELD("clocks_event_reasons." name, "", query_clock_reason, bit, NULL), \
    FIELD("clocks_throttle_reasons." name, "", query_clock_reason, bit, "clocks_event_reasons." name)

static void query_text(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    put_text(text, selector == 'n'   ? NVML(nvmlDeviceGetName, gpu, text, SMI_TEXT)
                   : selector == 'u' ? NVML(nvmlDeviceGetUUID, gpu, text, SMI_TEXT)
                   : selector == 's' ? NVML(nvmlDeviceGetSerial, gpu, text, SMI_TEXT)
                   : selector == 'v' ? NVML(nvmlDeviceGetVbiosVersion, gpu, text, SMI_TEXT)
                                   : NVML(nvmlSystemGetDriverVersion, text, SMI_TEXT));
}

static void query_count(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned value = 0;
    (void)gpu, (void)selector;
    int failure = NVML(nvmlDeviceGetCount_v2, &value);
    put(text, failure, "%.0f", value);
}

static void query_board(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned value = 0;
    int failure = selector == 'i' ? NVML(nvmlDeviceGetBoardId, gpu, &value) : NVML(nvmlDeviceGetMultiGpuBoard, gpu, &value);
    snprintf(text, SMI_TEXT, "0x%x", value);
    if (selector == 'm')
        strcpy(text, value ? "Yes" : "No");
    put_text(text, failure);
}

static void query_brand(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    enum { NVIDIA = 14 };
    unsigned brand = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetBrand, gpu, &brand);
    strcpy(text, brand == NVIDIA ? "NVIDIA" : "Unknown");
    put_text(text, failure);
}

static void query_architecture(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    static const char *const names[] = {[2] = "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"};
    unsigned number = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetArchitecture, gpu, &number);
    strcpy(text, number >= 2 && number < sizeof names / sizeof *names ? names[number] : "Unknown");
    put_text(text, failure);
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
        snprintf(text, SMI_TEXT,
                 selector == 'd'                      ? "0x%04X"
                 : selector == 'v' || selector == 's' ? "0x%08X"
                                                      : "0x%02X",
                 selector == 'd'   ? info.domain
                 : selector == 'b' ? info.bus
                 : selector == 'v' ? info.device_id
                 : selector == 's' ? info.subsystem_id
                                   : info.device);
    if (!failure && selector == 's' && info.subsystem_id == 0)
        strcpy(text, "[N/A]");
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

static void query_bar1(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    uint64_t memory[3] = {0}; /* total, free, used */
    int failure = NVML(nvmlDeviceGetBAR1MemoryInfo, gpu, memory);
    put(text, failure, "%.0f", (double)(memory[selector] >> 20));
}

static void query_engine(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned percent = 0, period;
    int failure = selector == 'e'   ? NVML(nvmlDeviceGetEncoderUtilization, gpu, &percent, &period)
                  : selector == 'd' ? NVML(nvmlDeviceGetDecoderUtilization, gpu, &percent, &period)
                  : selector == 'j' ? NVML(nvmlDeviceGetJpgUtilization, gpu, &percent, &period)
                                    : NVML(nvmlDeviceGetOfaUtilization, gpu, &percent, &period);
    put(text, failure, "%.0f", percent);
}

static void query_encoder(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned stats[3] = {0}; /* sessions, frames a second, latency */
    int failure = NVML(nvmlDeviceGetEncoderStats, gpu, &stats[0], &stats[1], &stats[2]);
    put(text, failure, "%.0f", stats[selector]);
}

static void query_capture(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned stats[3] = {0}; /* as above */
    int failure = NVML(nvmlDeviceGetFBCStats, gpu, stats);
    put(text, failure, "%.0f", stats[selector]);
}

static void query_utilization(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned rates[2] = {0};
    int failure = NVML(nvmlDeviceGetUtilizationRates, gpu, rates);
    put(text, failure, "%.0f", rates[selector]);
}

static void query_margin(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    struct {
        unsigned version;
        int degrees;
    } margin = {.version = sizeof margin | 1 << 24};
    (void)selector;
    int failure = NVML(nvmlDeviceGetMarginTemperature, gpu, &margin);
    put(text, failure, "%.0f", margin.degrees);
}

/* Reads one of NVML's fields: milliwatts for power, signed integers for the others. */
static void query_field(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    enum { MEMORY_TEMPERATURE = 82, MARGINS = 193 };
    struct nvml_field_value field = {.field = (unsigned)selector};
    int failure = NVML(nvmlDeviceGetFieldValues, gpu, 1, &field);
    bool is_power = selector != MEMORY_TEMPERATURE && selector < MARGINS;
    put(text, failure ? failure : field.result, is_power ? "%.2f" : "%.0f",
        is_power ? (double)field.value.u32 / 1000 : (double)(int)field.value.u32);
}

static void query_clock_reason(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    uint64_t reasons = 0;
    int failure = NVML(nvmlDeviceGetCurrentClocksEventReasons, gpu, &reasons);
    strcpy(text, reasons & (uint64_t)selector ? "Active" : "Not Active");
    put_text(text, failure);
}

static void query_clock_reasons(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    uint64_t reasons = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetCurrentClocksEventReasons, gpu, &reasons);
    snprintf(text, SMI_TEXT, "0x%016llX", (unsigned long long)reasons);
    put_text(text, failure);
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
    int failure = selector == 'p'   ? NVML(nvmlDeviceGetPersistenceMode, gpu, &mode)
                  : selector == 'd' ? NVML(nvmlDeviceGetDisplayActive, gpu, &mode)
                  : selector == 't' ? NVML(nvmlDeviceGetDisplayMode, gpu, &mode)
                  : selector == 'a' ? NVML(nvmlDeviceGetAccountingMode, gpu, &mode)
                                    : NVML(nvmlDeviceGetComputeMode, gpu, &mode);
    static const char *const compute_modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    strcpy(text, selector == 'c'   ? compute_modes[mode & 3]
                 : selector == 't' ? mode ? "Yes" : "No"
                 : mode            ? "Enabled"
                                   : "Disabled");
    put_text(text, failure);
}

/* The selector is the type of errors, plus 2 for the aggregate counter. */
static void query_ecc_errors(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned long long count = 0;
    int failure = NVML(nvmlDeviceGetTotalEccErrors, gpu, selector % 2, selector / 2, &count);
    put(text, failure, "%.0f", (double)count);
}

/* The selector is that of query_ecc_errors, plus 4 for those of the SRAM instead of the DRAM. */
static void query_memory_errors(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    enum { DRAM = 2, SRAM = 7 };
    unsigned long long count = 0;
    int failure = NVML(nvmlDeviceGetMemoryErrorCounter, gpu, selector % 2, selector / 2 % 2, selector < 4 ? DRAM : SRAM, &count);
    put(text, failure, "%.0f", (double)count);
}

static void query_histogram(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned banks[5] = {0};
    int failure = NVML(nvmlDeviceGetRowRemapperHistogram, gpu, banks);
    put(text, failure, "%.0f", banks[selector]);
}

static void query_ecc_mode(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned modes[2] = {0, 0};
    int failure = NVML(nvmlDeviceGetEccMode, gpu, &modes[0], &modes[1]);
    put_text(text, failure);
    if (!failure)
        strcpy(text, modes[selector] ? "Enabled" : "Disabled");
}

/* The selector: correctable, uncorrectable, pending, failure. */
static void query_remapped_rows(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned values[4] = {0};
    int failure = NVML(nvmlDeviceGetRemappedRows, gpu, &values[0], &values[1], &values[2], &values[3]);
    put(text, failure, "%.0f", values[selector]);
    if (!failure && selector >= 2)
        strcpy(text, values[selector] ? "Yes" : "No");
}

static void query_recovery_action(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    enum { RECOVERY_ACTION = 230 };
    static const char *const actions[] = {"None", "Reset", "Reboot", "Drain P2P", "Drain and Reset"};
    struct nvml_field_value value = {.field = RECOVERY_ACTION};
    (void)selector;
    int failure = NVML(nvmlDeviceGetFieldValues, gpu, 1, &value);
    failure = failure ? failure : value.result;
    put_text(text, failure);
    if (!failure)
        strcpy(text, value.value.u32 < sizeof actions / sizeof *actions ? actions[value.value.u32] : "Unknown");
}

static void query_deprecated(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    (void)gpu, (void)selector;
    strcpy(text, "Requested functionality has been deprecated");
}

static void query_nothing(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    (void)gpu, (void)selector;
    strcpy(text, "[N/A]");
}

static const struct field fields[] = {
    FIELD("timestamp", "", query_time, 0, NULL),
    FIELD("driver_version", "", query_text, 'd', NULL),
    FIELD("count", "", query_count, 0, NULL),
    FIGURE("index", "", "nvmlDeviceGetIndex", NULL),
    FIELD("name", "", query_text, 'n', NULL),
    FIELD("gpu_name", "", query_text, 'n', "name"),
    FIELD("uuid", "", query_text, 'u', NULL),
    FIELD("gpu_uuid", "", query_text, 'u', "uuid"),
    FIELD("serial", "", query_text, 's', NULL),
    FIELD("gpu_serial", "", query_text, 's', "serial"),
    FIELD("vbios_version", "", query_text, 'v', NULL),
    FIELD("pci.bus_id", "", query_bus, 'i', NULL),
    FIELD("gpu_bus_id", "", query_bus, 'i', "pci.bus_id"),
    FIELD("pci.domain", "", query_bus, 'd', NULL),
    FIELD("pci.bus", "", query_bus, 'b', NULL),
    FIELD("pci.device", "", query_bus, 'x', NULL),
    FIELD("compute_cap", "", query_capability, 0, NULL),
    FIELD("memory.total", "MiB", query_memory, 't', NULL),
    FIELD("memory.used", "MiB", query_memory, 'u', NULL),
    FIELD("memory.free", "MiB", query_memory, 'f', NULL),
    FIELD("memory.reserved", "MiB", query_memory, 'r', NULL),
    FIELD("utilization.gpu", "%", query_utilization, 0, NULL),
    FIELD("utilization.memory", "%", query_utilization, 1, NULL),
    FIGURE_OF("temperature.gpu", "", "nvmlDeviceGetTemperature", 0, NULL),
    FIELD("temperature.memory", "", query_field, 82, NULL),
    FORMATTED("power.draw", "W", "nvmlDeviceGetPowerUsage", "%.2f"),
    FIELD("power.draw.average", "W", query_field, 185, NULL),
    FIELD("power.draw.instant", "W", query_field, 186, NULL),
    FORMATTED("power.limit", "W", "nvmlDeviceGetPowerManagementLimit", "%.2f"),
    FORMATTED("enforced.power.limit", "W", "nvmlDeviceGetEnforcedPowerLimit", "%.2f"),
    FIELD("power.min_limit", "W", query_field, 187, NULL),
    FIELD("power.max_limit", "W", query_field, 188, NULL),
    FIELD("power.default_limit", "W", query_field, 189, NULL),
    FIGURE("fan.speed", "%", "nvmlDeviceGetFanSpeed", NULL),
    FORMATTED("pstate", "", "nvmlDeviceGetPerformanceState", "P%.0f"),
    FIELD("persistence_mode", "", query_mode, 'p', NULL),
    FIELD("compute_mode", "", query_mode, 'c', NULL),
    FIELD("mig.mode.current", "", query_mig, 0, NULL),
    FIELD("mig.mode.pending", "", query_mig, 1, NULL),
    FIGURE_OF("clocks.gr", "MHz", "nvmlDeviceGetClockInfo", 0, "clocks.current.graphics"),
    FIGURE_OF("clocks.sm", "MHz", "nvmlDeviceGetClockInfo", 1, "clocks.current.sm"),
    FIGURE_OF("clocks.mem", "MHz", "nvmlDeviceGetClockInfo", 2, "clocks.current.memory"),
    FIGURE_OF("clocks.video", "MHz", "nvmlDeviceGetClockInfo", 3, "clocks.current.video"),
    FIGURE_OF("clocks.current.graphics", "MHz", "nvmlDeviceGetClockInfo", 0, NULL),
    FIGURE_OF("clocks.current.sm", "MHz", "nvmlDeviceGetClockInfo", 1, NULL),
    FIGURE_OF("clocks.current.memory", "MHz", "nvmlDeviceGetClockInfo", 2, NULL),
    FIGURE_OF("clocks.current.video", "MHz", "nvmlDeviceGetClockInfo", 3, NULL),
    FIGURE_OF("clocks.max.gr", "MHz", "nvmlDeviceGetMaxClockInfo", 0, "clocks.max.graphics"),
    FIGURE_OF("clocks.max.graphics", "MHz", "nvmlDeviceGetMaxClockInfo", 0, NULL),
    FIGURE_OF("clocks.max.sm", "MHz", "nvmlDeviceGetMaxClockInfo", 1, NULL),
    FIGURE_OF("clocks.max.mem", "MHz", "nvmlDeviceGetMaxClockInfo", 2, "clocks.max.memory"),
    FIGURE_OF("clocks.max.memory", "MHz", "nvmlDeviceGetMaxClockInfo", 2, NULL),
    FIELD("clocks_event_reasons.active", "", query_clock_reasons, 0, NULL),
    FIELD("clocks_throttle_reasons.active", "", query_clock_reasons, 0, "clocks_event_reasons.active"),
    FIELD("display_mode", "", query_nothing, 0, NULL),
    FIELD("ecc.mode.current", "", query_ecc_mode, 0, NULL),
    FIELD("ecc.mode.pending", "", query_ecc_mode, 1, NULL),
    FIELD("ecc.errors.corrected.volatile.total", "", query_ecc_errors, 0, NULL),
    FIELD("ecc.errors.uncorrected.volatile.total", "", query_ecc_errors, 1, NULL),
    FIELD("ecc.errors.corrected.aggregate.total", "", query_ecc_errors, 2, NULL),
    FIELD("ecc.errors.uncorrected.aggregate.total", "", query_ecc_errors, 3, NULL),
    FIELD("remapped_rows.correctable", "", query_remapped_rows, 0, NULL),
    FIELD("remapped_rows.uncorrectable", "", query_remapped_rows, 1, NULL),
    FIELD("remapped_rows.pending", "", query_remapped_rows, 2, NULL),
    FIELD("remapped_rows.failure", "", query_remapped_rows, 3, NULL),
    FIELD("gpu_recovery_action", "", query_recovery_action, 0, NULL),
    FIELD("display_active", "", query_mode, 'd', NULL),
    FIELD("accounting.mode", "", query_mode, 'a', NULL),
    FIGURE("accounting.buffer_size", "", "nvmlDeviceGetAccountingBufferSize", NULL),
    FIELD("pci.device_id", "", query_bus, 'v', NULL),
    FIELD("pci.sub_device_id", "", query_bus, 's', NULL),
    FIGURE("pcie.link.gen.current", "", "nvmlDeviceGetCurrPcieLinkGeneration", NULL),
    FIGURE("pcie.link.gen.gpucurrent", "", "nvmlDeviceGetCurrPcieLinkGeneration", NULL),
    FIGURE("pcie.link.gen.max", "", "nvmlDeviceGetMaxPcieLinkGeneration", NULL),
    FIGURE("pcie.link.gen.gpumax", "", "nvmlDeviceGetMaxPcieLinkGeneration", NULL),
    FIGURE("pcie.link.width.current", "", "nvmlDeviceGetCurrPcieLinkWidth", NULL),
    FIGURE("pcie.link.width.max", "", "nvmlDeviceGetMaxPcieLinkWidth", NULL),
    FIELD("utilization.encoder", "%", query_engine, 'e', NULL),
    FIELD("utilization.decoder", "%", query_engine, 'd', NULL),
    FIELD("utilization.jpeg", "%", query_engine, 'j', NULL),
    FIELD("utilization.ofa", "%", query_engine, 'o', NULL),
    FIELD("encoder.stats.sessionCount", "", query_encoder, 0, NULL),
    FIELD("encoder.stats.averageFps", "", query_encoder, 1, NULL),
    FIELD("encoder.stats.averageLatency", "", query_encoder, 2, NULL),
    FIELD("temperature.gpu.tlimit", "", query_margin, 0, NULL),
    FIGURE_OF("clocks.applications.graphics", "MHz", "nvmlDeviceGetApplicationsClock", 0, NULL),
    FIGURE_OF("clocks.applications.memory", "MHz", "nvmlDeviceGetApplicationsClock", 2, NULL),
    FIGURE_OF("clocks.default_applications.graphics", "MHz", "nvmlDeviceGetDefaultApplicationsClock", 0, NULL),
    FIGURE_OF("clocks.default_applications.memory", "MHz", "nvmlDeviceGetDefaultApplicationsClock", 2, NULL),
    CLOCK_REASON("gpu_idle", 0x1),
    CLOCK_REASON("applications_clocks_setting", 0x2),
    CLOCK_REASON("sw_power_cap", 0x4),
    CLOCK_REASON("hw_slowdown", 0x8),
    CLOCK_REASON("sync_boost", 0x10),
    CLOCK_REASON("sw_thermal_slowdown", 0x20),
    CLOCK_REASON("hw_thermal_slowdown", 0x40),
    CLOCK_REASON("hw_power_brake_slowdown", 0x80),
    FIELD("ecc.errors.corrected.volatile.dram", "", query_memory_errors, 0, NULL),
    FIELD("ecc.errors.corrected.volatile.sram", "", query_memory_errors, 4, NULL),
    FIELD("ecc.errors.uncorrected.volatile.dram", "", query_memory_errors, 1, NULL),
    FIELD("ecc.errors.uncorrected.volatile.sram", "", query_memory_errors, 5, NULL),
    FIELD("ecc.errors.corrected.aggregate.dram", "", query_memory_errors, 2, NULL),
    FIELD("ecc.errors.corrected.aggregate.sram", "", query_memory_errors, 6, NULL),
    FIELD("ecc.errors.uncorrected.aggregate.dram", "", query_memory_errors, 3, NULL),
    FIELD("ecc.errors.uncorrected.aggregate.sram", "", query_memory_errors, 7, NULL),
    FIELD("remapped_rows.histogram.max", "", query_histogram, 0, NULL),
    FIELD("remapped_rows.histogram.high", "", query_histogram, 1, NULL),
    FIELD("remapped_rows.histogram.partial", "", query_histogram, 2, NULL),
    FIELD("remapped_rows.histogram.low", "", query_histogram, 3, NULL),
    FIELD("remapped_rows.histogram.none", "", query_histogram, 4, NULL),
    FIELD("retired_pages.single_bit_ecc.count", "", query_nothing, 0, NULL),
    FIELD("retired_pages.double_bit.count", "", query_nothing, 0, NULL),
    FIELD("retired_pages.pending", "", query_nothing, 0, NULL),
};

/* What only -q shows. */
static const struct field details[] = {
    FIELD("brand", "", query_brand, 0, NULL),
    FIELD("architecture", "", query_architecture, 0, NULL),
    FIELD("display_mode", "", query_deprecated, 0, NULL),
    FIELD("display_attached", "", query_mode, 't', NULL),
    FIGURE("minor_number", "", "nvmlDeviceGetMinorNumber", NULL),
    FIELD("multi_gpu_board", "", query_board, 'm', NULL),
    FIELD("board_id", "", query_board, 'i', NULL),
    FORMATTED("link_width.current", "", "nvmlDeviceGetCurrPcieLinkWidth", "%.0fx"),
    FORMATTED("link_width.max", "", "nvmlDeviceGetMaxPcieLinkWidth", "%.0fx"),
    FIGURE("replays", "", "nvmlDeviceGetPcieReplayCounter", NULL),
    FIGURE_OF("tx", "KB/s", "nvmlDeviceGetPcieThroughput", 0, NULL),
    FIGURE_OF("rx", "KB/s", "nvmlDeviceGetPcieThroughput", 1, NULL),
    FIELD("bar1.total", "MiB", query_bar1, 0, NULL),
    FIELD("bar1.free", "MiB", query_bar1, 1, NULL),
    FIELD("bar1.used", "MiB", query_bar1, 2, NULL),
    FIELD("fbc.sessions", "", query_capture, 0, NULL),
    FIELD("fbc.fps", "", query_capture, 1, NULL),
    FIELD("fbc.latency", "", query_capture, 2, NULL),
    FIELD("display_clock_setting", "", query_clock_reason, 0x100, NULL),
    FIELD("tlimit.shutdown", "C", query_field, 193, NULL),
    FIELD("tlimit.slowdown", "C", query_field, 194, NULL),
    FIELD("tlimit.memory", "C", query_field, 195, NULL),
    FIELD("tlimit.gpu", "C", query_field, 196, NULL),
    FIELD("requested_limit", "W", query_field, 192, NULL),
    FIGURE_OF("boost", "MHz", "nvmlDeviceGetMaxCustomerBoostClock", 0, NULL),
    FIGURE_OF("clocks.max.video", "MHz", "nvmlDeviceGetMaxClockInfo", 3, NULL),
    FIELD("banks.max", "bank(s)", query_histogram, 0, NULL),
    FIELD("banks.high", "bank(s)", query_histogram, 1, NULL),
    FIELD("banks.partial", "bank(s)", query_histogram, 2, NULL),
    FIELD("banks.low", "bank(s)", query_histogram, 3, NULL),
    FIELD("banks.none", "bank(s)", query_histogram, 4, NULL),
    FIELD("nothing", "", query_nothing, 0, NULL),
};

static const struct field *find_field(const char *name, const struct field *table, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

static bool read_field(const struct field *field, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit)
{
    if (!field)
        return false;
    if (field->read)
        field->read(gpu->handle, field->selector, text);
    else
        query_figure(gpu->handle, field, text);
    *unit = field->unit;
    return true;
}

bool smi_query_gpu(const char *name, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit)
{
    return read_field(find_field(name, fields, sizeof fields / sizeof *fields), gpu, text, unit);
}

bool smi_query_detail(const char *name, const struct smi_gpu *gpu, char text[SMI_TEXT], const char **unit)
{
    return read_field(find_field(name, details, sizeof details / sizeof *details), gpu, text, unit) ||
           smi_query_gpu(name, gpu, text, unit);
}

const char *smi_header(const char *name, enum smi_rows rows)
{
    if (rows == SMI_PROCESSES)
        return strcmp(name, "name") == 0          ? "process_name"
               : strcmp(name, "used_memory") == 0 ? "used_gpu_memory"
                                                  : name;
    const struct field *field = rows == SMI_GPUS ? find_field(name, fields, sizeof fields / sizeof *fields) : NULL;
    return field && field->header ? field->header : name;
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
