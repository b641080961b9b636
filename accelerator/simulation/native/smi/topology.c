/* The simulated nvidia-smi: what connects GPUs, and which processors and memory are near to them (topo -m). */
#include "smi.h"

#include <stdio.h>
#include <string.h>

enum { MAX_CPUS = 1024, WORD_BITS = 64, WORDS = MAX_CPUS / WORD_BITS };

/* Formats a set as "0-3,8", or "N/A". */
static void put_set(const uint64_t *set, int failure, char text[SMI_TEXT])
{
    size_t length = 0;
    *text = '\0';
    for (int bit = 0; !failure && bit < MAX_CPUS; bit++) {
        if (!(set[bit / WORD_BITS] >> bit % WORD_BITS & 1))
            continue;
        int last = bit;
        while (last + 1 < MAX_CPUS && set[(last + 1) / WORD_BITS] >> (last + 1) % WORD_BITS & 1)
            last++;
        length += (size_t)snprintf(text + length, SMI_TEXT - length, last > bit ? "%s%d-%d" : "%s%d", length ? "," : "", bit, last);
        if (length >= SMI_TEXT)
            return;
        bit = last;
    }
    if (*text == '\0')
        strcpy(text, "N/A");
}

int smi_topology(void)
{
    enum { NVLINK = 2, SAME_NODE = 40 };
    printf("\t\033[4m");
    for (int i = 0; i < smi_gpu_count; i++)
        printf("GPU%u\t", smi_gpus[i].index);
    puts("CPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m");
    for (int i = 0; i < smi_gpu_count; i++) {
        uint64_t cpus[WORDS] = {0}, nodes[WORDS] = {0};
        char cpu_text[SMI_TEXT], node_text[SMI_TEXT];
        printf("GPU%u", smi_gpus[i].index);
        for (int j = 0; j < smi_gpu_count; j++) {
            int linked = -1;
            unsigned level = 0;
            NVML(nvmlDeviceGetP2PStatus, smi_gpus[i].handle, smi_gpus[j].handle, NVLINK, &linked);
            NVML(nvmlDeviceGetTopologyCommonAncestor, smi_gpus[i].handle, smi_gpus[j].handle, &level);
            printf("\t%s", i == j ? " X " : linked == 0 ? "NV1" : level <= SAME_NODE ? "NODE" : "SYS");
        }
        put_set(cpus, NVML(nvmlDeviceGetCpuAffinity, smi_gpus[i].handle, WORDS, cpus), cpu_text);
        put_set(nodes, NVML(nvmlDeviceGetMemoryAffinity, smi_gpus[i].handle, WORDS, nodes, 0), node_text);
        printf("\t%s\t%s\t\tN/A\n", cpu_text, node_text);
    }
    puts("\nLegend:\n\n"
         "  X    = Self\n"
         "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
         "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
         "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
         "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
         "  PIX  = Connection traversing at most a single PCIe bridge\n"
         "  NV#  = Connection traversing a bonded set of # NVLinks");
    return 0;
}
