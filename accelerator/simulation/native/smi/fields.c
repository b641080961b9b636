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
    int failure = selector == 'c'   ? NVML(nvmlDeviceGetCount_v2, &value)
                  : selector == 'm' ? NVML(nvmlDeviceGetMinorNumber, gpu, &value)
                  : selector == 'a' ? NVML(nvmlDeviceGetAccountingBufferSize, gpu, &value)
                  : selector == 'r' ? NVML(nvmlDeviceGetPcieReplayCounter, gpu, &value)
                                    : NVML(nvmlDeviceGetIndex, gpu, &value);
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

/* The link of a GPU to the host. */
static void query_link(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned value = 0;
    int failure = selector == 'g'   ? NVML(nvmlDeviceGetCurrPcieLinkGeneration, gpu, &value)
                  : selector == 'G' ? NVML(nvmlDeviceGetMaxPcieLinkGeneration, gpu, &value)
                  : selector == 'w' ? NVML(nvmlDeviceGetCurrPcieLinkWidth, gpu, &value)
                                    : NVML(nvmlDeviceGetMaxPcieLinkWidth, gpu, &value);
    put(text, failure, "%.0f", value);
}

static void query_link_width(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    query_link(gpu, selector, text);
    if (*text != '[')
        strcat(text, "x");
}

static void query_throughput(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned kilobytes = 0;
    int failure = NVML(nvmlDeviceGetPcieThroughput, gpu, selector, &kilobytes);
    put(text, failure, "%.0f", kilobytes);
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

static void query_temperature(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned degrees = 0;
    (void)selector;
    int failure = NVML(nvmlDeviceGetTemperature, gpu, 0, &degrees);
    put(text, failure, "%.0f", degrees);
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

static void query_power(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned milliwatts = 0;
    int failure = selector == 'd'   ? NVML(nvmlDeviceGetPowerUsage, gpu, &milliwatts)
                  : selector == 'e' ? NVML(nvmlDeviceGetEnforcedPowerLimit, gpu, &milliwatts)
                                  : NVML(nvmlDeviceGetPowerManagementLimit, gpu, &milliwatts);
    put(text, failure, "%.2f", milliwatts / 1000.0);
}

/* A selector is the type of clock, plus one of these. */
enum clock_kind { CURRENT = 0, HIGHEST = 4, APPLICATION = 8, APPLICATION_DEFAULT = 12, BOOST = 16 };

static void query_clock(nvml_handle gpu, int selector, char text[SMI_TEXT])
{
    unsigned megahertz = 0;
    const int type = selector % HIGHEST, kind = selector - type;
    int failure = kind == CURRENT       ? NVML(nvmlDeviceGetClockInfo, gpu, type, &megahertz)
                  : kind == HIGHEST     ? NVML(nvmlDeviceGetMaxClockInfo, gpu, type, &megahertz)
                  : kind == APPLICATION ? NVML(nvmlDeviceGetApplicationsClock, gpu, type, &megahertz)
                  : kind == BOOST       ? NVML(nvmlDeviceGetMaxCustomerBoostClock, gpu, type, &megahertz)
                                        : NVML(nvmlDeviceGetDefaultApplicationsClock, gpu, type, &megahertz);
    put(text, failure, "%.0f", megahertz);
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

static const struct field {
    const char *name, *unit;
    query *read;
    int selector;
    const char *header; /* the name that the driver prints, if it is another one */
} fields[] = {
    {"timestamp", "", query_time, 0, NULL},
    {"driver_version", "", query_text, 'd', NULL},
    {"count", "", query_number, 'c', NULL},
    {"index", "", query_number, 'i', NULL},
    {"name", "", query_text, 'n', NULL},
    {"gpu_name", "", query_text, 'n', "name"},
    {"uuid", "", query_text, 'u', NULL},
    {"gpu_uuid", "", query_text, 'u', "uuid"},
    {"serial", "", query_text, 's', NULL},
    {"gpu_serial", "", query_text, 's', "serial"},
    {"vbios_version", "", query_text, 'v', NULL},
    {"pci.bus_id", "", query_bus, 'i', NULL},
    {"gpu_bus_id", "", query_bus, 'i', "pci.bus_id"},
    {"pci.domain", "", query_bus, 'd', NULL},
    {"pci.bus", "", query_bus, 'b', NULL},
    {"pci.device", "", query_bus, 'x', NULL},
    {"compute_cap", "", query_capability, 0, NULL},
    {"memory.total", "MiB", query_memory, 't', NULL},
    {"memory.used", "MiB", query_memory, 'u', NULL},
    {"memory.free", "MiB", query_memory, 'f', NULL},
    {"memory.reserved", "MiB", query_memory, 'r', NULL},
    {"utilization.gpu", "%", query_utilization, 0, NULL},
    {"utilization.memory", "%", query_utilization, 1, NULL},
    {"temperature.gpu", "", query_temperature, 0, NULL},
    {"temperature.memory", "", query_field, 82, NULL},
    {"power.draw", "W", query_power, 'd', NULL},
    {"power.draw.average", "W", query_field, 185, NULL},
    {"power.draw.instant", "W", query_field, 186, NULL},
    {"power.limit", "W", query_power, 'l', NULL},
    {"enforced.power.limit", "W", query_power, 'e', NULL},
    {"power.min_limit", "W", query_field, 187, NULL},
    {"power.max_limit", "W", query_field, 188, NULL},
    {"power.default_limit", "W", query_field, 189, NULL},
    {"fan.speed", "%", query_fan, 0, NULL},
    {"pstate", "", query_state, 0, NULL},
    {"persistence_mode", "", query_mode, 'p', NULL},
    {"compute_mode", "", query_mode, 'c', NULL},
    {"mig.mode.current", "", query_mig, 0, NULL},
    {"mig.mode.pending", "", query_mig, 1, NULL},
    {"clocks.gr", "MHz", query_clock, 0, "clocks.current.graphics"},
    {"clocks.sm", "MHz", query_clock, 1, "clocks.current.sm"},
    {"clocks.mem", "MHz", query_clock, 2, "clocks.current.memory"},
    {"clocks.video", "MHz", query_clock, 3, "clocks.current.video"},
    {"clocks.current.graphics", "MHz", query_clock, 0, NULL},
    {"clocks.current.sm", "MHz", query_clock, 1, NULL},
    {"clocks.current.memory", "MHz", query_clock, 2, NULL},
    {"clocks.current.video", "MHz", query_clock, 3, NULL},
    {"clocks.max.gr", "MHz", query_clock, HIGHEST, "clocks.max.graphics"},
    {"clocks.max.graphics", "MHz", query_clock, HIGHEST, NULL},
    {"clocks.max.sm", "MHz", query_clock, HIGHEST + 1, NULL},
    {"clocks.max.mem", "MHz", query_clock, HIGHEST + 2, "clocks.max.memory"},
    {"clocks.max.memory", "MHz", query_clock, HIGHEST + 2, NULL},
    {"clocks_event_reasons.active", "", query_clock_reasons, 0, NULL},
    {"clocks_throttle_reasons.active", "", query_clock_reasons, 0, "clocks_event_reasons.active"},
    {"display_mode", "", query_nothing, 0, NULL},
    {"ecc.mode.current", "", query_ecc_mode, 0, NULL},
    {"ecc.mode.pending", "", query_ecc_mode, 1, NULL},
    {"ecc.errors.corrected.volatile.total", "", query_ecc_errors, 0, NULL},
    {"ecc.errors.uncorrected.volatile.total", "", query_ecc_errors, 1, NULL},
    {"ecc.errors.corrected.aggregate.total", "", query_ecc_errors, 2, NULL},
    {"ecc.errors.uncorrected.aggregate.total", "", query_ecc_errors, 3, NULL},
    {"remapped_rows.correctable", "", query_remapped_rows, 0, NULL},
    {"remapped_rows.uncorrectable", "", query_remapped_rows, 1, NULL},
    {"remapped_rows.pending", "", query_remapped_rows, 2, NULL},
    {"remapped_rows.failure", "", query_remapped_rows, 3, NULL},
    {"gpu_recovery_action", "", query_recovery_action, 0, NULL},
    {"display_active", "", query_mode, 'd', NULL},
    {"accounting.mode", "", query_mode, 'a', NULL},
    {"accounting.buffer_size", "", query_number, 'a', NULL},
    {"pci.device_id", "", query_bus, 'v', NULL},
    {"pci.sub_device_id", "", query_bus, 's', NULL},
    {"pcie.link.gen.current", "", query_link, 'g', NULL},
    {"pcie.link.gen.gpucurrent", "", query_link, 'g', NULL},
    {"pcie.link.gen.max", "", query_link, 'G', NULL},
    {"pcie.link.gen.gpumax", "", query_link, 'G', NULL},
    {"pcie.link.width.current", "", query_link, 'w', NULL},
    {"pcie.link.width.max", "", query_link, 'W', NULL},
    {"utilization.encoder", "%", query_engine, 'e', NULL},
    {"utilization.decoder", "%", query_engine, 'd', NULL},
    {"utilization.jpeg", "%", query_engine, 'j', NULL},
    {"utilization.ofa", "%", query_engine, 'o', NULL},
    {"encoder.stats.sessionCount", "", query_encoder, 0, NULL},
    {"encoder.stats.averageFps", "", query_encoder, 1, NULL},
    {"encoder.stats.averageLatency", "", query_encoder, 2, NULL},
    {"temperature.gpu.tlimit", "", query_margin, 0, NULL},
    {"clocks.applications.graphics", "MHz", query_clock, APPLICATION, NULL},
    {"clocks.applications.memory", "MHz", query_clock, APPLICATION + 2, NULL},
    {"clocks.default_applications.graphics", "MHz", query_clock, APPLICATION_DEFAULT, NULL},
    {"clocks.default_applications.memory", "MHz", query_clock, APPLICATION_DEFAULT + 2, NULL},
    {"clocks_event_reasons.gpu_idle", "", query_clock_reason, 0x1, NULL},
    {"clocks_throttle_reasons.gpu_idle", "", query_clock_reason, 0x1, "clocks_event_reasons.gpu_idle"},
    {"clocks_event_reasons.applications_clocks_setting", "", query_clock_reason, 0x2, NULL},
    {"clocks_throttle_reasons.applications_clocks_setting", "", query_clock_reason, 0x2, "clocks_event_reasons.applications_clocks_setting"},
    {"clocks_event_reasons.sw_power_cap", "", query_clock_reason, 0x4, NULL},
    {"clocks_throttle_reasons.sw_power_cap", "", query_clock_reason, 0x4, "clocks_event_reasons.sw_power_cap"},
    {"clocks_event_reasons.hw_slowdown", "", query_clock_reason, 0x8, NULL},
    {"clocks_throttle_reasons.hw_slowdown", "", query_clock_reason, 0x8, "clocks_event_reasons.hw_slowdown"},
    {"clocks_event_reasons.sync_boost", "", query_clock_reason, 0x10, NULL},
    {"clocks_throttle_reasons.sync_boost", "", query_clock_reason, 0x10, "clocks_event_reasons.sync_boost"},
    {"clocks_event_reasons.sw_thermal_slowdown", "", query_clock_reason, 0x20, NULL},
    {"clocks_throttle_reasons.sw_thermal_slowdown", "", query_clock_reason, 0x20, "clocks_event_reasons.sw_thermal_slowdown"},
    {"clocks_event_reasons.hw_thermal_slowdown", "", query_clock_reason, 0x40, NULL},
    {"clocks_throttle_reasons.hw_thermal_slowdown", "", query_clock_reason, 0x40, "clocks_event_reasons.hw_thermal_slowdown"},
    {"clocks_event_reasons.hw_power_brake_slowdown", "", query_clock_reason, 0x80, NULL},
    {"clocks_throttle_reasons.hw_power_brake_slowdown", "", query_clock_reason, 0x80, "clocks_event_reasons.hw_power_brake_slowdown"},
    {"ecc.errors.corrected.volatile.dram", "", query_memory_errors, 0, NULL},
    {"ecc.errors.corrected.volatile.sram", "", query_memory_errors, 4, NULL},
    {"ecc.errors.uncorrected.volatile.dram", "", query_memory_errors, 1, NULL},
    {"ecc.errors.uncorrected.volatile.sram", "", query_memory_errors, 5, NULL},
    {"ecc.errors.corrected.aggregate.dram", "", query_memory_errors, 2, NULL},
    {"ecc.errors.corrected.aggregate.sram", "", query_memory_errors, 6, NULL},
    {"ecc.errors.uncorrected.aggregate.dram", "", query_memory_errors, 3, NULL},
    {"ecc.errors.uncorrected.aggregate.sram", "", query_memory_errors, 7, NULL},
    {"remapped_rows.histogram.max", "", query_histogram, 0, NULL},
    {"remapped_rows.histogram.high", "", query_histogram, 1, NULL},
    {"remapped_rows.histogram.partial", "", query_histogram, 2, NULL},
    {"remapped_rows.histogram.low", "", query_histogram, 3, NULL},
    {"remapped_rows.histogram.none", "", query_histogram, 4, NULL},
    {"retired_pages.single_bit_ecc.count", "", query_nothing, 0, NULL},
    {"retired_pages.double_bit.count", "", query_nothing, 0, NULL},
    {"retired_pages.pending", "", query_nothing, 0, NULL},
};

/* What only -q shows. */
static const struct field details[] = {
    {"brand", "", query_brand, 0, NULL},
    {"architecture", "", query_architecture, 0, NULL},
    {"display_mode", "", query_deprecated, 0, NULL},
    {"display_attached", "", query_mode, 't', NULL},
    {"minor_number", "", query_number, 'm', NULL},
    {"multi_gpu_board", "", query_board, 'm', NULL},
    {"board_id", "", query_board, 'i', NULL},
    {"link_width.current", "", query_link_width, 'w', NULL},
    {"link_width.max", "", query_link_width, 'W', NULL},
    {"replays", "", query_number, 'r', NULL},
    {"tx", "KB/s", query_throughput, 0, NULL},
    {"rx", "KB/s", query_throughput, 1, NULL},
    {"bar1.total", "MiB", query_bar1, 0, NULL},
    {"bar1.free", "MiB", query_bar1, 1, NULL},
    {"bar1.used", "MiB", query_bar1, 2, NULL},
    {"fbc.sessions", "", query_capture, 0, NULL},
    {"fbc.fps", "", query_capture, 1, NULL},
    {"fbc.latency", "", query_capture, 2, NULL},
    {"display_clock_setting", "", query_clock_reason, 0x100, NULL},
    {"tlimit.shutdown", "C", query_field, 193, NULL},
    {"tlimit.slowdown", "C", query_field, 194, NULL},
    {"tlimit.memory", "C", query_field, 195, NULL},
    {"tlimit.gpu", "C", query_field, 196, NULL},
    {"requested_limit", "W", query_field, 192, NULL},
    {"boost", "MHz", query_clock, BOOST, NULL},
    {"clocks.max.video", "MHz", query_clock, HIGHEST + 3, NULL},
    {"banks.max", "bank(s)", query_histogram, 0, NULL},
    {"banks.high", "bank(s)", query_histogram, 1, NULL},
    {"banks.partial", "bank(s)", query_histogram, 2, NULL},
    {"banks.low", "bank(s)", query_histogram, 3, NULL},
    {"banks.none", "bank(s)", query_histogram, 4, NULL},
    {"nothing", "", query_nothing, 0, NULL},
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
    field->read(gpu->handle, field->selector, text);
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
