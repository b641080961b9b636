/* libcuda.so.1: devices, their identity and attributes. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

#include "api.h"
#include "common/models.h"

struct sim_device devices[SIM_MAX_GPUS];
int device_count;

static void describe(struct sim_device *device, int ordinal, struct visible_device visible)
{
    const struct sim_gpu *gpu = &sim_config()->gpus[visible.gpu];
    device->ordinal = ordinal;
    device->gpu = visible.gpu;
    device->instance = visible.instance;
    device->memory = sim_memory_size(visible.gpu, visible.instance);
    device->major = gpu->major;
    device->minor = gpu->minor;
    device->processors = visible.instance == SIM_WHOLE_GPU ? 132 : 16;
    sim_display_name(visible.gpu, visible.instance, device->name, sizeof device->name);
    sim_uuid(visible.gpu, visible.instance, device->uuid, NULL);
    sim_pci_address(visible.gpu, &device->pci_domain, &device->pci_bus);
}

CUresult devices_enumerate(void)
{
    struct visible_device visible[SIM_MAX_GPUS];
    const int count = visible_devices(visible);
    RETURN_UNLESS(count != REPEATED_DEVICE, ERROR_INVALID_DEVICE);
    device_count = 0;
    for (int i = 0; i < count; i++)
        if (!faults_is_lost(visible[i].gpu)) {
            describe(&devices[device_count], device_count, visible[i]);
            device_count++;
        }
    return device_count == 0 ? ERROR_NO_DEVICE : SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGetCount(int *count)
{
    RETURN_IF_ERROR(enter(__func__));
    REQUIRE(count);
    *count = device_count;
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    RETURN_IF_ERROR(enter_device(__func__, ordinal));
    REQUIRE(device);
    *device = ordinal;
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(name && size > 0);
    snprintf(name, (size_t)size, "%s", devices[device].name);
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGetUuid(unsigned char uuid[16], CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(uuid);
    /* The first version of this function returns the UUID of the GPU, even for a MIG instance. */
    sim_uuid(devices[device].gpu, SIM_WHOLE_GPU, uuid, NULL);
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(uuid);
    memcpy(uuid, devices[device].uuid, sizeof devices[device].uuid);
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(bytes);
    *bytes = devices[device].memory;
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(major && minor);
    *major = devices[device].major;
    *minor = devices[device].minor;
    return SUCCESS;
}

SIM_EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(text && size >= 13);
    snprintf(text, (size_t)size, "%04X:%02X:00.0", devices[device].pci_domain, devices[device].pci_bus);
    return SUCCESS;
}

/* Attributes that all simulated GPUs share, indexed as in the driver. A missing one is 0. */
static const int common_attributes[] = {
    [1] = 1024,           /* threads per block */
    [2] = 1024,           /* block dimensions */
    [3] = 1024,
    [4] = 64,
    [5] = 2147483647,     /* grid dimensions */
    [6] = 65535,
    [7] = 65535,
    [8] = 49152,          /* shared memory per block */
    [9] = 65536,          /* constant memory */
    [10] = SIM_WARP_SIZE,
    [11] = 2147483647,    /* pitch */
    [12] = 65536,         /* registers per block */
    [13] = SIM_CLOCK_KHZ,
    [14] = 512,           /* texture alignment */
    [15] = 1,             /* overlaps copies and kernels */
    [19] = 1,             /* maps host memory */
    /* textures: 1D, 2D, 3D, 2D layers */
    [21] = 131072, [22] = 131072, [23] = 65536,
    [24] = 16384, [25] = 16384, [26] = 16384,
    [27] = 32768, [28] = 32768, [29] = 2048,
    [30] = 512,           /* surface alignment */
    [31] = 1,             /* concurrent kernels */
    [32] = 1,             /* ECC */
    [36] = 2619000,       /* memory clock */
    [37] = 5120,          /* memory bus width */
    [38] = 52428800,      /* L2 cache */
    [39] = 2048,          /* threads per processor */
    [40] = 3,             /* copy engines */
    [41] = 1,             /* unified addressing */
    /* 1D layers, gathers, 3D with other proportions */
    [42] = 32768, [43] = 2048, [45] = 32768, [46] = 32768,
    [47] = 8192, [48] = 8192, [49] = 32768,
    [51] = 32,            /* texture pitch alignment */
    /* cubes, surfaces, linear memory, mipmaps */
    [52] = 32768, [53] = 32768, [54] = 2046,
    [55] = 32768, [56] = 131072, [57] = 65536,
    [58] = 16384, [59] = 16384, [60] = 16384,
    [61] = 32768, [62] = 2048, [63] = 32768, [64] = 32768, [65] = 2048,
    [66] = 32768, [67] = 32768, [68] = 2046,
    [69] = 268435456, [70] = 131072, [71] = 65000, [72] = 2097120,
    [73] = 32768, [74] = 32768, [77] = 32768,
    [78] = 1,             /* stream priorities */
    [79] = 1,             /* global and local L1 cache */
    [80] = 1,
    [81] = 233472,        /* shared memory per processor */
    [82] = 65536,         /* registers per processor */
    [83] = 1,             /* managed memory */
    [87] = 2,             /* ratio of single to double precision */
    [89] = 1,             /* concurrent access to managed memory */
    [90] = 1,             /* preemption of kernels */
    [91] = 1,             /* registered host memory has one address */
    [95] = 1,             /* cooperative launch */
    [97] = 232448,        /* shared memory per block, opted in */
    [99] = 1,             /* registration of host memory */
    [102] = 1,            /* virtual memory management */
    [103] = 1,            /* ... shared as file descriptors */
    [106] = 32,           /* blocks per processor */
    [111] = 1024,         /* shared memory reserved per block */
    [113] = 1,            /* registers host memory as read-only */
    [115] = 1,            /* memory pools */
    [119] = 1,            /* ... shared as file descriptors */
    [120] = 1,            /* clusters of blocks */
    [122] = 1,            /* writes of values in streams */
    [125] = 1,            /* events between processes */
    [130] = 0,            /* not a NUMA node */
    [131] = -1,
};

enum { ATTRIBUTES_KNOWN = 150 };

/* The host's NUMA node nearest to a GPU, or -1 unless there is exactly one. */
static int host_node(int gpu)
{
    uint64_t nodes = sim_config()->gpus[gpu].nodes;
    return nodes != 0 && (nodes & (nodes - 1)) == 0 ? __builtin_ctzll(nodes) : -1;
}

/* Of the device or the subsystem; 0 unless the model is known. */
static int pci_id(int gpu, bool is_of_subsystem)
{
    const struct sim_model *model = sim_find_model(sim_config()->gpus[gpu].name);
    return !model ? 0 : (int)(is_of_subsystem ? model->subsystem_id : model->device_id);
}

SIM_EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    RETURN_IF_ERROR(enter_device(__func__, device));
    REQUIRE(value && attribute >= 1 && attribute <= ATTRIBUTES_KNOWN);
    switch (attribute) {
    case 16:
        *value = devices[device].processors;
        break;
    case 33:
        *value = (int)devices[device].pci_bus;
        break;
    case 50:
        *value = (int)devices[device].pci_domain;
        break;
    case 75:
        *value = devices[device].major;
        break;
    case 76:
        *value = devices[device].minor;
        break;
    case 126: /* domains of memory synchronization, which change nothing here */
        *value = devices[device].major >= 9 ? 4 : 1;
        break;
    case 127:
        *value = devices[device].major >= SIM_TENSOR_MAP_MAJOR;
        break;
    case 139:
    case 140:
        *value = pci_id(devices[device].gpu, attribute == 140);
        break;
    case 134:
        *value = host_node(devices[device].gpu);
        break;
    default:
        *value = attribute < (int)(sizeof common_attributes / sizeof *common_attributes) ? common_attributes[attribute]
                                                                                         : 0;
    }
    return SUCCESS;
}
