/* What a GPU does at the moment, except for its memory. A simulated GPU does nothing, so the figures are made up: they
 * depend on the GPU alone and differ between GPUs, so that a test can tell whose figure it was given. */
#include "nvml.h"

/* The figures of GPU number i. */
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

static unsigned power(int i)
{
    return 60000 + 1000u * (unsigned)i; /* milliwatts */
}

static const unsigned power_limit = 700000; /* milliwatts */

/* Megahertz, by NVML's number of the clock: graphics, SM, memory, video. */
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

/* None of this is known of a MIG instance. */
#define ENTER_GPU(device, handle, condition)                                                                          \
    NVML_ENTER_DEVICE(device, handle, condition);                                                                     \
    do {                                                                                                              \
        if (nvml_is_instance(&device))                                                                                \
            return NVML_NOT_SUPPORTED;                                                                                \
    } while (0)

struct utilization_rates {
    unsigned gpu, memory;
};

/* Not known of a GPU that is divided into instances either. */
SIM_EXPORT int nvmlDeviceGetUtilizationRates(nvml_handle handle, struct utilization_rates *rates)
{
    ENTER_GPU(device, handle, rates);
    if (nvml_gpu(&device)->instances != SIM_MIG_OFF)
        return NVML_NOT_SUPPORTED;
    rates->gpu = utilization(device.gpu);
    rates->memory = memory_utilization(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetTemperature(nvml_handle handle, unsigned sensor, unsigned *degrees)
{
    ENTER_GPU(device, handle, degrees && sensor == 0);
    *degrees = temperature(device.gpu);
    return NVML_OK;
}

struct versioned_temperature {
    unsigned version, sensor;
    int degrees;
};

SIM_EXPORT int nvmlDeviceGetTemperatureV(nvml_handle handle, struct versioned_temperature *answer)
{
    ENTER_GPU(device, handle, answer);
    if (answer->version != (sizeof *answer | 1 << 24))
        return NVML_VERSION_MISMATCH;
    if (answer->sensor != 0)
        return NVML_INVALID_ARGUMENT;
    answer->degrees = (int)temperature(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetPowerUsage(nvml_handle handle, unsigned *milliwatts)
{
    ENTER_GPU(device, handle, milliwatts);
    *milliwatts = power(device.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetPowerManagementLimit(nvml_handle handle, unsigned *milliwatts)
{
    ENTER_GPU(device, handle, milliwatts);
    *milliwatts = power_limit;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetEnforcedPowerLimit(nvml_handle handle, unsigned *milliwatts)
{
    ENTER_GPU(device, handle, milliwatts);
    *milliwatts = power_limit;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    ENTER_GPU(device, handle, megahertz && type < CLOCKS);
    *megahertz = clock_rate(device.gpu, type);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMaxClockInfo(nvml_handle handle, unsigned type, unsigned *megahertz)
{
    ENTER_GPU(device, handle, megahertz && type < CLOCKS);
    *megahertz = maximum_clock_rate(device.gpu, type);
    return NVML_OK;
}

/* Any number of processes may use the GPU. */
SIM_EXPORT int nvmlDeviceGetComputeMode(nvml_handle handle, unsigned *mode)
{
    ENTER_GPU(device, handle, mode);
    *mode = 0;
    return NVML_OK;
}

/* The driver keeps the GPU up while nobody uses it. */
SIM_EXPORT int nvmlDeviceGetPersistenceMode(nvml_handle handle, unsigned *mode)
{
    ENTER_GPU(device, handle, mode);
    *mode = 1;
    return NVML_OK;
}
