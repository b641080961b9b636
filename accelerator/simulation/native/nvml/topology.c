/* Connections between GPUs, and between a GPU and the host: NVLink and its counters, PCI, NUMA nodes.
 *
 * Each GPU has one NVLink to every other GPU of its link group, up to LINKS_PER_GPU links. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LINKS_PER_GPU = 18, MOST_LINKS_OF_ANY_GPU = 36 };

static bool are_linked(int gpu, int other)
{
    const struct sim_gpu *gpus = sim_config()->gpus;
    return gpu != other && gpus[gpu].link_group != SIM_NO_LINKS && gpus[gpu].link_group == gpus[other].link_group;
}

/* Returns SIM_NO_GPU if the link is inactive. */
static int find_link_peer(int gpu, unsigned link)
{
    for (int other = 0; link < LINKS_PER_GPU && other < sim_config()->gpu_count; other++)
        if (are_linked(gpu, other) && link-- == 0)
            return other;
    return SIM_NO_GPU;
}

int nvml_link_count(int gpu)
{
    int count = 0;
    while (find_link_peer(gpu, (unsigned)count) != SIM_NO_GPU)
        count++;
    return count;
}

/* Enters a call that concerns one link. Sets `peer` to the GPU at its other end, or to SIM_NO_GPU if it is inactive. */
static int enter_link(const char *function, nvml_handle handle, unsigned link, bool has_valid_arguments, int *peer)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(function, handle, has_valid_arguments && link < MOST_LINKS_OF_ANY_GPU, &device));
    RETURN_UNLESS(nvml_gpu(&device)->link_group != SIM_NO_LINKS && link < LINKS_PER_GPU, NVML_NOT_SUPPORTED);
    *peer = find_link_peer(device.gpu, link);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetNvLinkState(nvml_handle handle, unsigned link, unsigned *is_active)
{
    int peer;
    RETURN_IF_ERROR(enter_link(__func__, handle, link, is_active, &peer));
    *is_active = peer != SIM_NO_GPU;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetNvLinkVersion(nvml_handle handle, unsigned link, unsigned *version)
{
    int peer;
    RETURN_IF_ERROR(enter_link(__func__, handle, link, version, &peer));
    RETURN_UNLESS(peer != SIM_NO_GPU, NVML_NOT_SUPPORTED);
    *version = 4;
    return NVML_OK;
}

/* An active link gives access, including atomic access, to the memory of peers and of the host. It is not an SLI bridge. */
SIM_EXPORT int nvmlDeviceGetNvLinkCapability(nvml_handle handle, unsigned link, unsigned capability, unsigned *is_capable)
{
    enum { PEER_ACCESS, SYSTEM_ACCESS, PEER_ATOMICS, SYSTEM_ATOMICS, CAPABILITIES = 6 };
    int peer;
    RETURN_IF_ERROR(enter_link(__func__, handle, link, is_capable && capability < CAPABILITIES, &peer));
    *is_capable = peer != SIM_NO_GPU && capability <= SYSTEM_ATOMICS;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(nvml_handle handle, unsigned link, int *type)
{
    enum { DEVICE_TYPE_GPU = 0 };
    int peer;
    RETURN_IF_ERROR(enter_link(__func__, handle, link, type, &peer));
    RETURN_UNLESS(peer != SIM_NO_GPU, NVML_NOT_SUPPORTED);
    *type = DEVICE_TYPE_GPU;
    return NVML_OK;
}

static int remote_pci_info(const char *function, nvml_handle handle, unsigned link, void *info, size_t size)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(function, handle, info && link < MOST_LINKS_OF_ANY_GPU, &device));
    int peer = nvml_is_instance(&device) ? SIM_NO_GPU : find_link_peer(device.gpu, link);
    RETURN_UNLESS(peer != SIM_NO_GPU, NVML_NOT_SUPPORTED);
    struct nvml_pci_info remote = nvml_pci_info(peer);
    memcpy(info, &remote, size);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_handle handle, unsigned link, struct nvml_pci_info *info)
{
    return remote_pci_info(__func__, handle, link, info, sizeof *info);
}

/* The first version of the structure has no `bus_id`. */
SIM_EXPORT int nvmlDeviceGetNvLinkRemotePciInfo(nvml_handle handle, unsigned link, void *info)
{
    return remote_pci_info(__func__, handle, link, info, offsetof(struct nvml_pci_info, bus_id));
}

/* All GPUs access each other over PCI. Atomic operations need NVLink. */
SIM_EXPORT int nvmlDeviceGetP2PStatus(nvml_handle handle, nvml_handle other, unsigned capability, int *status)
{
    enum { READ, WRITE, NVLINK, ATOMICS, PCI, CAPABILITIES };
    enum { POSSIBLE = 0, IMPOSSIBLE = 5 };
    struct nvml_device second;
    struct nvml_device device;
    bool is_valid = status && capability < CAPABILITIES && nvml_decode(other, &second);
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, is_valid, &device));
    RETURN_UNLESS(!nvml_is_instance(&second), NVML_NOT_SUPPORTED);
    bool needs_nvlink = capability == NVLINK || capability == ATOMICS;
    *status = !needs_nvlink || are_linked(device.gpu, second.gpu) ? POSSIBLE : IMPOSSIBLE;
    return NVML_OK;
}

/* Values of NVML's nvmlGpuTopologyLevel_t. */
enum { SAME_GPU = 0, SAME_NODE = 40, SAME_MACHINE = 50 };

static unsigned common_level(int gpu, int other)
{
    const struct sim_gpu *gpus = sim_config()->gpus;
    return gpu == other ? SAME_GPU : gpus[gpu].nodes == gpus[other].nodes ? SAME_NODE : SAME_MACHINE;
}

SIM_EXPORT int nvmlDeviceGetTopologyCommonAncestor(nvml_handle handle, nvml_handle other, unsigned *level)
{
    struct nvml_device second;
    NVML_ENTER_GPU(level && nvml_decode(other, &second));
    *level = common_level(device.gpu, second.gpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetTopologyNearestGpus(nvml_handle handle, unsigned level, unsigned *count, nvml_handle *gpus)
{
    NVML_ENTER_GPU(count && level <= SAME_MACHINE);
    unsigned capacity = gpus ? *count : 0;
    *count = 0;
    for (int other = 0; other < sim_config()->gpu_count; other++) {
        if (other == device.gpu || common_level(device.gpu, other) != level)
            continue;
        if (*count < capacity)
            gpus[*count] = nvml_encode(other, SIM_WHOLE_GPU);
        ++*count;
    }
    return gpus && *count > capacity ? NVML_INSUFFICIENT_SIZE : NVML_OK;
}

enum { WORD_BITS = 64, SCOPES = 2 };

static void put_bit(uint64_t *set, unsigned words, unsigned long bit)
{
    if (bit / WORD_BITS < words)
        set[bit / WORD_BITS] |= UINT64_C(1) << bit % WORD_BITS;
}

/* Returns false if this host has no such NUMA node, or the node has no processors. */
static bool add_cpus_of_node(unsigned node, uint64_t *set, unsigned words)
{
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", node);
    FILE *list = fopen(path, "re");
    if (!list)
        return false;
    unsigned long first, last; /* "0-3,8": a number, or the first and the last of a range */
    bool has_cpus = false;
    while (fscanf(list, "%lu", &first) == 1) {
        if (fscanf(list, "-%lu", &last) != 1)
            last = first;
        for (; first <= last; first++)
            put_bit(set, words, first);
        has_cpus = true;
        if (fgetc(list) != ',')
            break;
    }
    fclose(list);
    return has_cpus;
}

/* Sets the processors of the GPU's NUMA nodes. If this host has none of these nodes, sets all processors, because a
 * program that binds itself to an empty set fails. */
static int cpu_affinity(const char *function, nvml_handle handle, unsigned words, uint64_t *set, unsigned scope)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(function, handle, set && words > 0 && scope < SCOPES, &device));
    RETURN_UNLESS(nvml_gpu(&device)->nodes != 0, NVML_NOT_SUPPORTED);
    memset(set, 0, words * sizeof *set);
    bool has_cpus = false;
    for (unsigned node = 0; node < WORD_BITS; node++)
        if (nvml_gpu(&device)->nodes >> node & 1)
            has_cpus |= add_cpus_of_node(node, set, words);
    for (long cpu = 0; !has_cpus && cpu < sysconf(_SC_NPROCESSORS_CONF); cpu++)
        put_bit(set, words, (unsigned long)cpu);
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetCpuAffinity(nvml_handle handle, unsigned words, uint64_t *set)
{
    return cpu_affinity(__func__, handle, words, set, 0);
}

SIM_EXPORT int nvmlDeviceGetCpuAffinityWithinScope(nvml_handle handle, unsigned words, uint64_t *set, unsigned scope)
{
    return cpu_affinity(__func__, handle, words, set, scope);
}

SIM_EXPORT int nvmlDeviceGetMemoryAffinity(nvml_handle handle, unsigned words, uint64_t *set, unsigned scope)
{
    NVML_ENTER_DEVICE(set && words > 0 && scope < SCOPES);
    RETURN_UNLESS(nvml_gpu(&device)->nodes != 0, NVML_NOT_SUPPORTED);
    memset(set, 0, words * sizeof *set);
    set[0] = nvml_gpu(&device)->nodes;
    return NVML_OK;
}

/* No simulated GPU belongs to an NVLink fabric across machines. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

SIM_EXPORT int nvmlDeviceGetGpuFabricInfoV(nvml_handle handle, struct fabric_info *info)
{
    enum { NO_FABRIC = 0 };
    NVML_ENTER_GPU(info);
    *info = (struct fabric_info){.version = info->version, .status = NVML_NOT_SUPPORTED, .state = NO_FABRIC};
    return NVML_OK;
}
