/* Telemetry, except for memory: utilization, temperature, fans, power, clocks. A simulated GPU is idle, so the figures are
 * invented. They are constant and differ between GPUs, so that a test can recognize the GPU that a figure belongs to. */
#include "nvml.h"

#include <time.h>

/* The figures of GPU i. */
static unsigned utilization(int i)
{
    return (7u * (unsigned)i + 13) % 101; /* percent */
}

static unsigned memory_utilization(int i)
{
    return (5u * (unsigned)i + 7) % 101; /* percent */
}

static unsigned temperature(int i)
{
    return 30 + (unsigned)i % 50; /* degrees Celsius */
}

static unsigned memory_temperature(int i)
{
    return 40 + (unsigned)i % 50; /* degrees Celsius */
}

static unsigned fan_speed(int i)
{
    return 25 + (unsigned)i % 75; /* percent */
}

static unsigned power(int i)
{
    return 60000 + 1000u * (unsigned)i; /* milliwatts */
}

static const unsigned power_limit = 700000, least_power_limit = 200000; /* milliwatts */

/* Megahertz, indexed as in NVML: graphics, SM, memory, video. */
enum { CLOCKS = 4 };

static unsigned clock_rate(int i, unsigned type)
{
    static const unsigned base[CLOCKS] = {1000, 1000, 2600, 900};
    return base[type] + 15u * (unsigned)i;
}

static unsigned maximum_clock_rate(int i, unsigned type)
{
    return clock_rate(i, type) + 500;
}

struct utilization_rates {
    unsigned gpu, memory;
};

/* Also unavailable for a GPU in MIG mode. */
SIM_EXPORT int nvmlDeviceGetUtilizationRates(nvml_handle handle, struct utilization_rates *rates)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, rates, &device));
    if (nvml_gpu(&device)->instances != SIM_MIG_OFF)
        return NVML_NOT_SUPPORTED;
    rates->gpu = utilization(device.gpu);
    rates->memory = memory_utilization(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetTemperature(nvml_handle handle, unsigned sensor, unsigned *degrees)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, degrees && sensor == 0, &device));
    *degrees = temperature(device.gpu);
    return NVML_OK;
}

struct versioned_temperature {
    unsigned version, sensor;
    int degrees;
};

SIM_EXPORT int nvmlDeviceGetTemperatureV(nvml_handle handle, struct versioned_temperature *reading)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, reading, &device));
    if (reading->version != (sizeof *reading | 1 << 24))
        return NVML_VERSION_MISMATCH;
    if (reading->sensor != 0)
        return NVML_INVALID_ARGUMENT;
    reading->degrees = (int)temperature(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetPowerUsage(nvml_handle handle, unsigned *milliwatts)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, milliwatts, &device));
    *milliwatts = power(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetPowerManagementLimit(nvml_handle handle, unsigned *milliwatts)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, milliwatts, &device));
    *milliwatts = power_limit;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetEnforcedPowerLimit(nvml_handle handle, unsigned *milliwatts)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, milliwatts, &device));
    *milliwatts = power_limit;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, megahertz && type < CLOCKS, &device));
    *megahertz = clock_rate(device.gpu, type);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMaxClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, megahertz && type < CLOCKS, &device));
    *megahertz = maximum_clock_rate(device.gpu, type);
    return NVML_OK;
}

/* Any number of processes may use the GPU. */
SIM_EXPORT int nvmlDeviceGetComputeMode(nvml_handle handle, unsigned *mode)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, mode, &device));
    *mode = 0;
    return NVML_OK;
}

/* The driver keeps an unused GPU initialized. */
SIM_EXPORT int nvmlDeviceGetPersistenceMode(nvml_handle handle, unsigned *mode)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, mode, &device));
    *mode = 1;
    return NVML_OK;
}

/* From 0, the highest, to 15. */
SIM_EXPORT int nvmlDeviceGetPerformanceState(nvml_handle handle, unsigned *state)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, state, &device));
    *state = 0;
    return NVML_OK;
}

/* A GPU has one fan. */
SIM_EXPORT int nvmlDeviceGetNumFans(nvml_handle handle, unsigned *count)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, count, &device));
    *count = 1;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetFanSpeed(nvml_handle handle, unsigned *percent)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, percent, &device));
    *percent = fan_speed(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetFanSpeed_v2(nvml_handle handle, unsigned fan, unsigned *percent)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, percent && fan == 0, &device));
    *percent = fan_speed(device.gpu);
    return NVML_OK;
}

/* Why the clocks are throttled. The functions with Throttle in their names are older. */
static int clock_reasons(const char *function, nvml_handle handle, uint64_t *reasons, bool is_supported)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(function, handle, reasons, &device));
    enum { ALL = 0x1ff };
    *reasons = is_supported ? ALL : nvml_gpu(&device)->clock_reasons;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetCurrentClocksEventReasons(nvml_handle handle, uint64_t *reasons)
{
    return clock_reasons(__func__, handle, reasons, false);
}

SIM_EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(nvml_handle handle, uint64_t *reasons)
{
    return clock_reasons(__func__, handle, reasons, false);
}

SIM_EXPORT int nvmlDeviceGetSupportedClocksEventReasons(nvml_handle handle, uint64_t *reasons)
{
    return clock_reasons(__func__, handle, reasons, true);
}

SIM_EXPORT int nvmlDeviceGetSupportedClocksThrottleReasons(nvml_handle handle, uint64_t *reasons)
{
    return clock_reasons(__func__, handle, reasons, true);
}

static bool read_field(int gpu, unsigned field, unsigned *value)
{
    switch (field) {
    case 82:
        *value = memory_temperature(gpu);
        return true;
    case 91:
        *value = (unsigned)nvml_link_count(gpu);
        return true;
    case 185: /* power, average */
    case 186: /* power, now */
        *value = power(gpu);
        return true;
    case 187: /* power limit: minimum */
        *value = least_power_limit;
        return true;
    case 188: /* power limit: maximum, default, current */
    case 189:
    case 190:
        *value = power_limit;
        return true;
    default:
        return false;
    }
}

SIM_EXPORT int nvmlDeviceGetFieldValues(nvml_handle handle, int count, struct nvml_field_value *values)
{
    enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, values && count > 0, &device));
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        uint64_t value = 0;
        unsigned figure = 0;
        bool is_long = false;
        bool is_known = !nvml_is_instance(&device) && nvml_health_field(device.gpu, values[i].field, &value, &is_long);
        if (!is_known && !nvml_is_instance(&device) && (is_known = read_field(device.gpu, values[i].field, &figure)))
            value = figure;
        values[i].timestamp = now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latency = 0;
        values[i].type = is_long ? UNSIGNED_LONG_LONG : UNSIGNED_INT;
        values[i].result = is_known ? NVML_OK : NVML_NOT_SUPPORTED;
        values[i].value.u64 = value;
    }
    return NVML_OK;
}
