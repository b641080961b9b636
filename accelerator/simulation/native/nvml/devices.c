/* Handles and identity of GPUs and MIG instances, and what every function of a lost GPU returns. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>

#include "common/fork.h"
#include "common/state.h"

enum { DEVICES_PER_GPU = 1 + SIM_MAX_INSTANCES };

static const struct nvml_anchor {
    char unused;
} anchors[SIM_MAX_GPUS * DEVICES_PER_GPU];

nvml_handle nvml_encode(int gpu, int instance)
{
    return &anchors[gpu * DEVICES_PER_GPU + instance + 1];
}

bool nvml_decode(nvml_handle handle, struct nvml_device *device)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)anchors;
    if (offset >= sizeof anchors)
        return false;
    device->gpu = (int)(offset / DEVICES_PER_GPU);
    device->instance = (int)(offset % DEVICES_PER_GPU) - 1;
    return device->gpu < sim_config()->gpu_count &&
           (device->instance == SIM_WHOLE_GPU || device->instance < nvml_gpu(device)->instances);
}

/* A forked child opens the state itself, which may be another one. */
static void forget_faults(void)
{
    used_faults = NULL;
}
IN_FORKED_CHILD(forget_faults)

bool nvml_is_lost(int gpu)
{
    if (!used_faults) {
        struct sim_state *state = nvml_state();
        if (state)
            faults_use(sim_state_faults(state));
    }
    return faults_is_lost(gpu);
}

int nvml_enter_device(const char *function, nvml_handle handle, bool has_valid_arguments, struct nvml_device *device)
{
    RETURN_IF_ERROR(nvml_enter(function, true));
    RETURN_UNLESS(nvml_decode(handle, device), NVML_INVALID_ARGUMENT);
    RETURN_IF_ERROR(sim_injected(function, device->gpu));
    RETURN_UNLESS(!nvml_is_lost(device->gpu), NVML_GPU_IS_LOST);
    return has_valid_arguments ? NVML_OK : NVML_INVALID_ARGUMENT;
}

int nvml_enter_gpu(const char *function, nvml_handle handle, bool has_valid_arguments, struct nvml_device *device)
{
    RETURN_IF_ERROR(nvml_enter_device(function, handle, has_valid_arguments, device));
    return nvml_is_instance(device) ? NVML_NOT_SUPPORTED : NVML_OK;
}

static int get_count(const char *function, unsigned *count)
{
    RETURN_IF_ERROR(nvml_enter(function, count));
    *count = (unsigned)sim_config()->gpu_count;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetCount(unsigned *count)
{
    return get_count(__func__, count);
}

SIM_EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    return get_count(__func__, count);
}

/* An error may be injected for this GPU alone. */
static int put_handle(const char *function, int gpu, int instance, nvml_handle *handle)
{
    RETURN_IF_ERROR(sim_injected(function, gpu));
    RETURN_UNLESS(!nvml_is_lost(gpu), NVML_GPU_IS_LOST);
    *handle = nvml_encode(gpu, instance);
    return NVML_OK;
}

static int by_index(const char *function, unsigned index, nvml_handle *handle)
{
    RETURN_IF_ERROR(nvml_enter(function, handle && index < (unsigned)sim_config()->gpu_count));
    return put_handle(function, (int)index, SIM_WHOLE_GPU, handle);
}

SIM_EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, nvml_handle *handle)
{
    return by_index(__func__, index, handle);
}

SIM_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_handle *handle)
{
    return by_index(__func__, index, handle);
}

/* Instances also have the UUID form of drivers before R470: MIG-<UUID of the GPU>/<GPU instance>/<compute instance>. */
static bool has_uuid(const char *uuid, int gpu, int instance)
{
    char own[SIM_UUID_SIZE], gpu_uuid[SIM_UUID_SIZE], older[SIM_UUID_SIZE + 24];
    sim_uuid(gpu, instance, NULL, own);
    if (strcmp(uuid, own) == 0)
        return true;
    if (instance == SIM_WHOLE_GPU)
        return false;
    sim_uuid(gpu, SIM_WHOLE_GPU, NULL, gpu_uuid);
    snprintf(older, sizeof older, "MIG-%s/%d/0", gpu_uuid, instance + 1);
    return strcmp(uuid, older) == 0;
}

SIM_EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_handle *handle)
{
    RETURN_IF_ERROR(nvml_enter(__func__, uuid && handle));
    for (int gpu = 0; gpu < sim_config()->gpu_count; gpu++)
        for (int instance = SIM_WHOLE_GPU; instance == SIM_WHOLE_GPU || instance < sim_config()->gpus[gpu].instances;
             instance++)
            if (has_uuid(uuid, gpu, instance))
                return put_handle(__func__, gpu, instance, handle);
    return NVML_NOT_FOUND;
}

/* Takes "00000000:01:00.0", "0000:01:00.0", "01:00.0", and each without the function. */
static bool parse_bus_id(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    *domain = 0;
    return sscanf(text, "%x:%x:%x", domain, bus, device) == 3 ||
           (*domain = 0, sscanf(text, "%x:%x", bus, device) == 2);
}

static int by_bus_id(const char *function, const char *bus_id, nvml_handle *handle)
{
    unsigned domain, bus, device;
    RETURN_IF_ERROR(nvml_enter(function, bus_id && handle && parse_bus_id(bus_id, &domain, &bus, &device)));
    for (int gpu = 0; gpu < sim_config()->gpu_count; gpu++) {
        unsigned gpu_domain, gpu_bus;
        sim_pci_address(gpu, &gpu_domain, &gpu_bus);
        if (gpu_domain == domain && gpu_bus == bus && device == 0)
            return put_handle(function, gpu, SIM_WHOLE_GPU, handle);
    }
    return NVML_NOT_FOUND;
}

SIM_EXPORT int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvml_handle *handle)
{
    return by_bus_id(__func__, bus_id, handle);
}

SIM_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvml_handle *handle)
{
    return by_bus_id(__func__, bus_id, handle);
}

SIM_EXPORT int nvmlDeviceGetUUID(nvml_handle handle, char *uuid, unsigned size)
{
    NVML_ENTER_DEVICE(uuid);
    char text[SIM_UUID_SIZE];
    sim_uuid(device.gpu, device.instance, NULL, text);
    return nvml_put_text(text, uuid, size);
}

SIM_EXPORT int nvmlDeviceGetName(nvml_handle handle, char *name, unsigned size)
{
    NVML_ENTER_DEVICE(name);
    char text[SIM_NAME_SIZE + 16];
    sim_display_name(device.gpu, device.instance, text, sizeof text);
    return nvml_put_text(text, name, size);
}

NVML_FIGURE(nvmlDeviceGetMinorNumber, unsigned, (unsigned)device.gpu)

SIM_EXPORT int nvmlDeviceGetCudaComputeCapability(nvml_handle handle, int *major, int *minor)
{
    NVML_ENTER_DEVICE(major && minor);
    *major = nvml_gpu(&device)->major;
    *minor = nvml_gpu(&device)->minor;
    return NVML_OK;
}

/* NVML's constant for the GPU generation of a compute capability. */
SIM_EXPORT int nvmlDeviceGetArchitecture(nvml_handle handle, unsigned *architecture)
{
    enum { TURING = 6, ADA = 8, UNKNOWN = -1 };
    static const int generations[] = {[3] = 2, [5] = 3, [6] = 4, [7] = 5, [8] = 7, [9] = 9, [10] = 10, [12] = 10};
    NVML_ENTER_DEVICE(architecture);
    int major = nvml_gpu(&device)->major, minor = nvml_gpu(&device)->minor;
    int generation = major < (int)(sizeof generations / sizeof *generations) ? generations[major] : 0;
    *architecture = (unsigned)(major == 7 && minor >= 5 ? TURING : major == 8 && minor == 9 ? ADA
                               : generation                ? generation
                                                           : UNKNOWN);
    return NVML_OK;
}

struct nvml_pci_info nvml_pci_info(int gpu)
{
    enum { SOME_GPU_OF_NVIDIA = 0x233010de };
    const struct sim_model *model = nvml_model(&(struct nvml_device){gpu, SIM_WHOLE_GPU});
    struct nvml_pci_info info = {
        .device_id = model->device_id ? model->device_id : SOME_GPU_OF_NVIDIA,
        .subsystem_id = model->subsystem_id,
    };
    sim_pci_address(gpu, &info.domain, &info.bus);
    snprintf(info.legacy_bus_id, sizeof info.legacy_bus_id, "%04X:%02X:00.0", info.domain & 0xffff, info.bus & 0xff);
    snprintf(info.bus_id, sizeof info.bus_id, "%08X:%02X:00.0", info.domain, info.bus);
    return info;
}

NVML_FIGURE_IF(nvml_enter_device, nvmlDeviceGetPciInfo_v3, struct nvml_pci_info, true, NVML_OK, nvml_pci_info(device.gpu))

/* Older versions end before the long form of the address. */
enum { PCI_INFO_V1 = 32, PCI_INFO_V2 = 52 };

SIM_EXPORT int nvmlDeviceGetPciInfo_v2(nvml_handle handle, void *info)
{
    NVML_ENTER_DEVICE(info);
    struct nvml_pci_info now = nvml_pci_info(device.gpu);
    memset(info, 0, PCI_INFO_V2);
    memcpy(info, &now, offsetof(struct nvml_pci_info, bus_id));
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetPciInfo(nvml_handle handle, void *info)
{
    NVML_ENTER_DEVICE(info);
    struct nvml_pci_info now = nvml_pci_info(device.gpu);
    memcpy(info, &now, PCI_INFO_V1);
    return NVML_OK;
}
