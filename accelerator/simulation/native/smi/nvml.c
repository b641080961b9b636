/* The simulated nvidia-smi: calls of NVML. */
#include "smi.h"

#include <dlfcn.h>
#include <stdio.h>

static void *library;

static int not_found()
{
    return NVML_FUNCTION_NOT_FOUND;
}

nvml_function *smi_find(const char *name)
{
    nvml_function *function;
    *(void **)&function = dlsym(library, name);
    return function ? function : not_found;
}

const char *smi_error(int code)
{
    const char *(*text)(int);
    *(void **)&text = dlsym(library, "nvmlErrorString");
    return text(code);
}

int smi_memory(nvml_handle gpu, struct nvml_memory *memory)
{
    *memory = (struct nvml_memory){.version = sizeof *memory | 2 << 24};
    return NVML(nvmlDeviceGetMemoryInfo_v2, gpu, memory);
}

int smi_processes(nvml_handle gpu, struct nvml_process rows[SMI_MAX_PROCESSES], unsigned *count)
{
    *count = SMI_MAX_PROCESSES;
    int failure = NVML(nvmlDeviceGetComputeRunningProcesses_v3, gpu, count, rows);
    *count = failure ? 0 : *count;
    return failure;
}

const char *smi_instance(unsigned number, char text[SMI_TEXT])
{
    snprintf(text, SMI_TEXT, number == UINT32_MAX ? "N/A" : "%u", number);
    return text;
}

int smi_start(void)
{
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so.1: is the NVIDIA driver installed?");
        return NVML_LIBRARY_NOT_FOUND;
    }
    int failure = NVML(nvmlInit_v2);
    if (failure == NVML_DRIVER_NOT_LOADED)
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.");
    else if (failure)
        printf("Failed to initialize NVML: %s\n", smi_error(failure));
    return failure > 255 ? 255 : failure;
}
