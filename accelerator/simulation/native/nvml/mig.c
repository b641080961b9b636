/* MIG: instances of a GPU, which CUDA treats as small GPUs. */
#include "nvml.h"

/* Instances have every other index if those fit, so that callers see gaps between indices. */
static unsigned index_of_instance(const struct sim_gpu *gpu, int instance)
{
    return (unsigned)(2 * (gpu->instances - 1) < NVML_MAX_MIG_DEVICES ? 2 * instance : instance);
}

SIM_EXPORT int nvmlDeviceGetMigMode(nvml_handle handle, unsigned *current, unsigned *pending)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, current && pending, &device));
    if (nvml_is_instance(&device) || !nvml_has_mig(&device))
        return NVML_NOT_SUPPORTED;
    *current = *pending = nvml_gpu(&device)->instances != SIM_MIG_OFF;
    return NVML_OK;
}

/* NVML documents that the count is zero if MIG is off. */
SIM_EXPORT int nvmlDeviceGetMaxMigDeviceCount(nvml_handle handle, unsigned *count)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, count, &device));
    *count = nvml_gpu(&device)->instances == SIM_MIG_OFF || nvml_is_instance(&device) ? 0 : NVML_MAX_MIG_DEVICES;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(nvml_handle handle, unsigned index, nvml_handle *instance_handle)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, instance_handle && index < NVML_MAX_MIG_DEVICES, &device));
    if (nvml_is_instance(&device))
        return NVML_INVALID_ARGUMENT;
    if (!nvml_has_mig(&device))
        return NVML_NOT_SUPPORTED;
    for (int instance = 0; instance < nvml_gpu(&device)->instances; instance++)
        if (index_of_instance(nvml_gpu(&device), instance) == index) {
            *instance_handle = nvml_encode(device.gpu, instance);
            return NVML_OK;
        }
    return NVML_NOT_FOUND;
}

/* The index of a GPU, or of an instance among those of its GPU. */
SIM_EXPORT int nvmlDeviceGetIndex(nvml_handle handle, unsigned *index)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, index, &device));
    *index = nvml_is_instance(&device) ? index_of_instance(nvml_gpu(&device), device.instance) : (unsigned)device.gpu;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceIsMigDeviceHandle(nvml_handle handle, unsigned *is_instance)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, is_instance, &device));
    *is_instance = nvml_is_instance(&device);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml_handle handle, nvml_handle *gpu)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, gpu, &device));
    if (!nvml_is_instance(&device))
        return NVML_INVALID_ARGUMENT;
    *gpu = nvml_encode(device.gpu, SIM_WHOLE_GPU);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetGpuInstanceId(nvml_handle handle, unsigned *id)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, id, &device));
    if (!nvml_is_instance(&device))
        return NVML_INVALID_ARGUMENT;
    *id = (unsigned)device.instance + 1;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetComputeInstanceId(nvml_handle handle, unsigned *id)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, id, &device));
    if (!nvml_is_instance(&device))
        return NVML_INVALID_ARGUMENT;
    *id = 0;
    return NVML_OK;
}
