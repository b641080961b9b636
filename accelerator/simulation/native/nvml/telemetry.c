/* Telemetry, except for memory and processes: utilization, temperature, fans, power and its limit, energy, clocks.
 *
 * A simulated GPU is idle, so the figures are invented. Most are constant and differ between GPUs, so that a test can recognize
 * the GPU that a figure belongs to; energy grows with time. */
#include "nvml.h"

#include <time.h>

#include "common/clock.h"

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

static const struct sim_model *model_of(int i)
{
    return nvml_model(&(struct nvml_device){i, SIM_WHOLE_GPU});
}

static unsigned power_limit(int i)
{
    const unsigned watts = model_of(i)->power_limit;
    return watts ? watts * 1000 : 700000; /* milliwatts */
}

/* Returns 0 for a model of which only the highest limit is known. */
static unsigned least_power_limit(int i)
{
    const struct sim_model *model = model_of(i);
    return model->power_limit ? model->least_power_limit * 1000 : 200000; /* milliwatts */
}

static unsigned power(int i)
{
    const unsigned drawn = 60000 + 1000u * (unsigned)i; /* milliwatts */
    return drawn < power_limit(i) ? drawn : power_limit(i);
}

/* Millijoules since the host started. */
static uint64_t energy(int i)
{
    return power(i) * (uint64_t)(now() / MILLISECOND) / 1000;
}

static unsigned fan_count(int i)
{
    return model_of(i)->is_passive ? 0 : 1;
}

/* Megahertz, indexed as in NVML: graphics, SM, memory, video. */
enum { CLOCKS = 4 };

static unsigned clock_rate(int i, unsigned type)
{
    static const unsigned base[CLOCKS] = {1000, 1000, 2600, 900};
    return base[type] + 15u * (unsigned)i;
}

static unsigned maximum_clock_rate(int i, unsigned type)
{
    const unsigned known = model_of(i)->clocks[type];
    return known ? known : clock_rate(i, type) + 500;
}

struct utilization_rates {
    unsigned gpu, memory;
};

/* Also unavailable for a GPU in MIG mode. */
NVML_FIGURE_IF(nvml_enter_gpu, nvmlDeviceGetUtilizationRates, struct utilization_rates,
               nvml_gpu(&device)->instances == SIM_MIG_OFF, NVML_NOT_SUPPORTED,
               ((struct utilization_rates){utilization(device.gpu), memory_utilization(device.gpu)}))

SIM_EXPORT int nvmlDeviceGetTemperature(nvml_handle handle, unsigned sensor, unsigned *degrees)
{
    NVML_ENTER_GPU(degrees && sensor == 0);
    *degrees = temperature(device.gpu);
    return NVML_OK;
}

struct versioned_temperature {
    unsigned version, sensor;
    int degrees;
};

SIM_EXPORT int nvmlDeviceGetTemperatureV(nvml_handle handle, struct versioned_temperature *reading)
{
    NVML_ENTER_GPU(reading);
    RETURN_UNLESS(reading->version == (sizeof *reading | 1 << 24), NVML_VERSION_MISMATCH);
    RETURN_UNLESS(reading->sensor == 0, NVML_INVALID_ARGUMENT);
    reading->degrees = (int)temperature(device.gpu);
    return NVML_OK;
}

NVML_FIGURE(nvmlDeviceGetPowerUsage, unsigned, power(device.gpu))
NVML_FIGURE(nvmlDeviceGetPowerManagementLimit, unsigned, power_limit(device.gpu))
NVML_FIGURE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, power_limit(device.gpu))
NVML_FIGURE(nvmlDeviceGetEnforcedPowerLimit, unsigned, power_limit(device.gpu))
NVML_FIGURE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy(device.gpu))
NVML_FIGURE(nvmlDeviceGetPerformanceState, unsigned, 0) /* from 0, the highest, to 15 */
NVML_FIGURE(nvmlDeviceGetNumFans, unsigned, fan_count(device.gpu)) /* one, unless the model has none */
NVML_FIGURE_IF(nvml_enter_gpu, nvmlDeviceGetFanSpeed, unsigned, fan_count(device.gpu), NVML_NOT_SUPPORTED, fan_speed(device.gpu))

SIM_EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(nvml_handle handle, unsigned *least, unsigned *greatest)
{
    NVML_ENTER_GPU(least && greatest);
    RETURN_UNLESS(least_power_limit(device.gpu) != 0, NVML_NOT_SUPPORTED);
    *least = least_power_limit(device.gpu);
    *greatest = power_limit(device.gpu);
    return NVML_OK;
}

enum { SHUTDOWN, SLOWDOWN, MEMORY_MAXIMUM, GPU_MAXIMUM, THRESHOLDS = 8 };

SIM_EXPORT int nvmlDeviceGetTemperatureThreshold(nvml_handle handle, unsigned threshold, unsigned *degrees)
{
    NVML_ENTER_GPU(degrees && threshold < THRESHOLDS);
    const struct sim_model *model = nvml_model(&device);
    if (model->temperature == 0 || (threshold != SHUTDOWN && threshold != SLOWDOWN && threshold != GPU_MAXIMUM))
        return NVML_NOT_SUPPORTED;
    *degrees = model->temperature + (threshold == SHUTDOWN ? model->shutdown : threshold == SLOWDOWN ? model->slowdown : 0);
    return NVML_OK;
}

struct versioned_margin {
    unsigned version;
    int degrees;
};

SIM_EXPORT int nvmlDeviceGetMarginTemperature(nvml_handle handle, struct versioned_margin *margin)
{
    NVML_ENTER_GPU(margin);
    RETURN_UNLESS(margin->version == (sizeof *margin | 1 << 24), NVML_VERSION_MISMATCH);
    RETURN_UNLESS(nvml_model(&device)->temperature != 0, NVML_NOT_SUPPORTED);
    margin->degrees = (int)nvml_model(&device)->temperature - (int)temperature(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    NVML_ENTER_GPU(megahertz && type < CLOCKS);
    *megahertz = clock_rate(device.gpu, type);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMaxClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    NVML_ENTER_GPU(megahertz && type < CLOCKS);
    *megahertz = maximum_clock_rate(device.gpu, type);
    return NVML_OK;
}

/* Nobody has set the clocks of applications, so they are the maximum. They are known with it. */
static int application_clock(const char *function, nvml_handle handle, unsigned type, unsigned *megahertz)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(function, handle, megahertz && type < CLOCKS, &device));
    RETURN_UNLESS(nvml_model(&device)->clocks[type] != 0, NVML_NOT_SUPPORTED);
    *megahertz = nvml_model(&device)->clocks[type];
    return NVML_OK;
}

#define APPLICATION_CLOCK(function)                                                                                    \
    SIM_EXPORT int function(nvml_handle handle, unsigned type, unsigned *megahertz)                                    \
    {                                                                                                                  \
        return application_clock(__func__, handle, type, megahertz);                                                   \
    }

APPLICATION_CLOCK(nvmlDeviceGetApplicationsClock)
APPLICATION_CLOCK(nvmlDeviceGetDefaultApplicationsClock)
APPLICATION_CLOCK(nvmlDeviceGetMaxCustomerBoostClock)

SIM_EXPORT int nvmlDeviceGetClock(nvml_handle handle, unsigned type, unsigned id, unsigned *megahertz)
{
    enum { CURRENT, TARGET, DEFAULT, CUSTOMER_BOOST, IDS };
    NVML_ENTER_GPU(megahertz && type < CLOCKS && id < IDS);
    if (id != CURRENT)
        return application_clock(__func__, handle, type, megahertz);
    *megahertz = clock_rate(device.gpu, type);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetFanSpeed_v2(nvml_handle handle, unsigned fan, unsigned *percent)
{
    NVML_ENTER_GPU(percent);
    RETURN_UNLESS(fan < fan_count(device.gpu), NVML_INVALID_ARGUMENT);
    *percent = fan_speed(device.gpu);
    return NVML_OK;
}

static int fan_detail(const char *function, nvml_handle handle, const void *result)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(function, handle, result, &device));
    return fan_count(device.gpu) == 0 ? NVML_INVALID_ARGUMENT : NVML_NOT_SUPPORTED;
}

SIM_EXPORT int nvmlDeviceGetMinMaxFanSpeed(nvml_handle handle, unsigned *least, unsigned *greatest)
{
    return fan_detail(__func__, handle, least ? greatest : NULL);
}

SIM_EXPORT int nvmlDeviceGetFanSpeedRPM(nvml_handle handle, void *speed)
{
    return fan_detail(__func__, handle, speed);
}

/* Why the clocks are throttled. The functions with Throttle in their names are older. */
enum { ALL_REASONS = 0x1ff };
NVML_FIGURE(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, nvml_gpu(&device)->clock_reasons)
NVML_FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, nvml_gpu(&device)->clock_reasons)
NVML_FIGURE(nvmlDeviceGetSupportedClocksEventReasons, uint64_t, ALL_REASONS)
NVML_FIGURE(nvmlDeviceGetSupportedClocksThrottleReasons, uint64_t, ALL_REASONS)

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_INT = 5 }; /* nvmlValueType_t */

/* Returns false for a field that is not known. */
static bool read_field(int gpu, unsigned field, uint64_t *value, int *type)
{
    const struct sim_model *model = model_of(gpu);
    switch (field) {
    case 82:
        *value = memory_temperature(gpu);
        return true;
    case 83:
    case 191:
        *type = UNSIGNED_LONG_LONG;
        *value = energy(gpu);
        return true;
    case 91:
        *value = (unsigned)nvml_link_count(gpu);
        return *value > 0;
    case 94: /* PCIe replays, and how often their counter overflowed */
    case 95:
        return true;
    case 185: /* power, average */
    case 186: /* power, now */
        *value = power(gpu);
        return true;
    case 187: /* power limit: minimum */
        *value = least_power_limit(gpu);
        return *value > 0;
    case 188: /* power limit: maximum, default, current, requested */
    case 189:
    case 190:
    case 192:
        *value = power_limit(gpu);
        return true;
    case 193: /* degrees that are left at a shutdown, at a slowdown, and at the highest temperature of the memory and of the GPU */
    case 194:
    case 195:
    case 196:
        *type = SIGNED_INT;
        *value = (uint32_t)-(int)(field == 193 ? model->shutdown : field == 194 ? model->slowdown : 0);
        return model->temperature > 0;
    default:
        return false;
    }
}

SIM_EXPORT int nvmlDeviceGetFieldValues(nvml_handle handle, int count, struct nvml_field_value *values)
{
    NVML_ENTER_DEVICE(values && count > 0);
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    for (int i = 0; i < count; i++) {
        uint64_t value = 0;
        bool is_long = false;
        int type = UNSIGNED_INT;
        bool is_known = !nvml_is_instance(&device) && nvml_health_field(device.gpu, values[i].field, &value, &is_long);
        if (is_known && is_long)
            type = UNSIGNED_LONG_LONG;
        else if (!is_known && !nvml_is_instance(&device))
            is_known = read_field(device.gpu, values[i].field, &value, &type);
        values[i].timestamp = time.tv_sec * 1000000 + time.tv_nsec / 1000;
        values[i].latency = 0;
        values[i].type = is_known ? type : UNSIGNED_INT;
        values[i].result = is_known ? NVML_OK : NVML_NOT_SUPPORTED;
        values[i].value.u64 = is_known ? value : 0;
    }
    return NVML_OK;
}
