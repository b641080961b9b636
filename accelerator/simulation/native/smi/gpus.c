/* The simulated nvidia-smi: the GPUs that the command line chooses. */
#include "smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct smi_gpu smi_gpus[SIM_MAX_GPUS];
int smi_gpu_count;

/* Whether an entry of -i names the GPU: by index, UUID or bus address. */
static bool is_named(const char *entry, unsigned index, nvml_handle handle)
{
    nvml_handle named = NULL;
    char *end;
    if (strtoul(entry, &end, 10) == index && end != entry && *end == '\0')
        return true;
    if (NVML(nvmlDeviceGetHandleByUUID, entry, &named) == NVML_OK)
        return named == handle;
    return strchr(entry, ':') && NVML(nvmlDeviceGetHandleByPciBusId_v2, entry, &named) == NVML_OK && named == handle;
}

int smi_find_gpus(const char *chosen)
{
    unsigned count = 0;
    int failure = NVML(nvmlDeviceGetCount_v2, &count);
    for (unsigned index = 0; failure == NVML_OK && index < count; index++) {
        nvml_handle handle;
        if (NVML(nvmlDeviceGetHandleByIndex_v2, index, &handle) != NVML_OK) {
            printf("Unable to determine the device handle for GPU %u\n", index);
            continue;
        }
        bool is_chosen = !chosen;
        char *copy = strdup(chosen ? chosen : ""), *rest = copy;
        for (char *entry; !is_chosen && (entry = strsep(&rest, ","));)
            is_chosen = is_named(entry, index, handle);
        free(copy);
        if (is_chosen)
            smi_gpus[smi_gpu_count++] = (struct smi_gpu){handle, index};
    }
    if (failure)
        printf("Failed to count GPUs: %s\n", smi_error(failure));
    else if (smi_gpu_count == 0)
        puts("No devices were found");
    return failure ? failure : smi_gpu_count == 0 ? NVML_NOT_FOUND : NVML_OK;
}
