/* MIG: instances of a GPU, which CUDA treats as small GPUs. */
#include "nvml.h"

/* Instances live at every other index while they fit, so that callers meet holes. */
static unsigned index_of_instance(const struct sim_gpu *gpu, int instance)
{
    return (unsigned)(2 * (gpu->instances - 1) < NVML_MAX_MIG_DEVICES ? 2 * instance : instance);
}

SIM_EXPORT int nvmlDeviceGetMigMode(nvml_handle handle, unsigned *current, unsigned *pending)
{
    NVML_ENTER_DEVICE(device, handle, current && pending);
    if (nvml_is_instance(&device) || !nvml_has_mig(&device))
        return NVML_NOT_SUPPORTED;
    *current = *pending = nvml_gpu(&device)->instances != SIM_MIG_OFF;
    return NVML_OK;
}

/* Zero also where MIG is off, as documented. */
SIM_EXPORT int nvmlDeviceGetMaxMigDeviceCount(nvml_handle handle, unsigned *count)
{
    NVML_ENTER_DEVICE(device, handle, count);
    *count = nvml_gpu(&device)->instances == SIM_MIG_OFF || nvml_is_instance(&device) ? 0 : NVML_MAX_MIG_DEVICES;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(nvml_handle handle, unsigned index, nvml_handle *instance_handle)
{
    NVML_ENTER_DEVICE(device, handle, instance_handle && index < NVML_MAX_MIG_DEVICES && !nvml_is_instance(&device));
    if (!nvml_has_mig(&device))
        return NVML_NOT_SUPPORTED;
    for (int instance = 0; instance < nvml_gpu(&device)->instances; instance++)
        if (index_of_instance(nvml_gpu(&device), instance) == index) {
            *instance_handle = nvml_encode(device.gpu, instance);
            return NVML_OK;
        }
    return NVML_NOT_FOUND;
}

/* The number of a GPU; of an instance the index at which its GPU lists it. */
SIM_EXPORT int nvmlDeviceGetIndex(nvml_handle handle, unsigned *index)
{
    NVML_ENTER_DEVICE(device, handle, index);
    *index = nvml_is_instance(&device) ? index_of_instance(nvml_gpu(&device), device.instance) : (unsigned)device.gpu;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceIsMigDeviceHandle(nvml_handle handle, unsigned *is_instance)
{
    NVML_ENTER_DEVICE(device, handle, is_instance);
    *is_instance = nvml_is_instance(&device);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml_handle handle, nvml_handle *gpu)
{
    NVML_ENTER_DEVICE(device, handle, gpu && nvml_is_instance(&device));
    *gpu = nvml_encode(device.gpu, SIM_WHOLE_GPU);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetGpuInstanceId(nvml_handle handle, unsigned *id)
{
    NVML_ENTER_DEVICE(device, handle, id);
    if (!nvml_is_instance(&device))
        return NVML_NOT_SUPPORTED;
    *id = (unsigned)device.instance + 1;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetComputeInstanceId(nvml_handle handle, unsigned *id)
{
    NVML_ENTER_DEVICE(device, handle, id);
    if (!nvml_is_instance(&device))
        return NVML_NOT_SUPPORTED;
    *id = 0;
    return NVML_OK;
}
