/* MIG: instances of a GPU, which CUDA treats as small GPUs. */
#include "nvml.h"

/* Instances have every other index if those fit, so that callers see gaps between indices. */
static unsigned index_of_instance(const struct sim_gpu *gpu, int instance)
{
    return (unsigned)(2 * (gpu->instances - 1) < NVML_MAX_MIG_DEVICES ? 2 * instance : instance);
}

SIM_EXPORT int nvmlDeviceGetMigMode(nvml_handle handle, unsigned *current, unsigned *pending)
{
    NVML_ENTER_DEVICE(current && pending);
    RETURN_UNLESS(!nvml_is_instance(&device) && nvml_has_mig(&device), NVML_NOT_SUPPORTED);
    *current = *pending = nvml_gpu(&device)->instances != SIM_MIG_OFF;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(nvml_handle handle, unsigned index, nvml_handle *instance_handle)
{
    NVML_ENTER_DEVICE(instance_handle && index < NVML_MAX_MIG_DEVICES);
    RETURN_UNLESS(!nvml_is_instance(&device), NVML_INVALID_ARGUMENT);
    RETURN_UNLESS(nvml_has_mig(&device), NVML_NOT_SUPPORTED);
    for (int instance = 0; instance < nvml_gpu(&device)->instances; instance++)
        if (index_of_instance(nvml_gpu(&device), instance) == index) {
            *instance_handle = nvml_encode(device.gpu, instance);
            return NVML_OK;
        }
    return NVML_NOT_FOUND;
}

#define FIGURE(function, type, figure) NVML_FIGURE_IF(nvml_enter_device, function, type, true, NVML_OK, figure)
#define FIGURE_OF_INSTANCE(function, type, figure)                                                                     \
    NVML_FIGURE_IF(nvml_enter_device, function, type, nvml_is_instance(&device), NVML_INVALID_ARGUMENT, figure)

/* NVML documents that the count is zero if MIG is off. */
FIGURE(nvmlDeviceGetMaxMigDeviceCount, unsigned,
       nvml_gpu(&device)->instances == SIM_MIG_OFF || nvml_is_instance(&device) ? 0 : NVML_MAX_MIG_DEVICES)
/* The index of a GPU, or of an instance among those of its GPU. */
FIGURE(nvmlDeviceGetIndex, unsigned,
       nvml_is_instance(&device) ? index_of_instance(nvml_gpu(&device), device.instance) : (unsigned)device.gpu)
FIGURE(nvmlDeviceIsMigDeviceHandle, unsigned, nvml_is_instance(&device))
FIGURE_OF_INSTANCE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvml_handle, nvml_encode(device.gpu, SIM_WHOLE_GPU))
FIGURE_OF_INSTANCE(nvmlDeviceGetGpuInstanceId, unsigned, (unsigned)device.instance + 1)
FIGURE_OF_INSTANCE(nvmlDeviceGetComputeInstanceId, unsigned, 0)
