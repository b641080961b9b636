/* Memory in use; the processes that use a GPU, with their memory and utilization. */
#include "nvml.h"

#include <stdlib.h>

#include "common/state.h"

struct nvml_memory_figures {
    uint64_t total, reserved, free, used;
};

/* The total of a GPU includes what its driver reserves. */
static struct nvml_memory_figures read_memory(const struct nvml_device *device)
{
    const struct sim_memory_figures memory = sim_state_memory(nvml_state(), device->gpu, device->instance);
    const uint64_t reserve = nvml_is_instance(device) ? 0 : sim_config()->gpus[device->gpu].reserve;
    return (struct nvml_memory_figures){memory.total + reserve, reserve, memory.free, memory.used};
}

struct memory_v1 {
    uint64_t total, free, used;
};

/* The older call counts the reserve as used. */
SIM_EXPORT int nvmlDeviceGetMemoryInfo(nvml_handle handle, struct memory_v1 *info)
{
    NVML_ENTER_DEVICE(info);
    struct nvml_memory_figures memory = read_memory(&device);
    *info = (struct memory_v1){memory.total, memory.free, memory.used + memory.reserved};
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetMemoryInfo_v2(nvml_handle handle, struct nvml_memory *info)
{
    NVML_ENTER_DEVICE(info);
    RETURN_UNLESS(info->version == (sizeof *info | 2 << 24), NVML_VERSION_MISMATCH);
    struct nvml_memory_figures memory = read_memory(&device);
    *info = (struct nvml_memory){info->version, memory.total, memory.reserved, memory.free, memory.used};
    return NVML_OK;
}

/* The host's window into the memory is unused, and as large as the memory if the model's is not known. */
SIM_EXPORT int nvmlDeviceGetBAR1MemoryInfo(nvml_handle handle, struct memory_v1 *info)
{
    NVML_ENTER_DEVICE(info);
    const uint64_t known = nvml_is_instance(&device) ? 0 : (uint64_t)nvml_model(&device)->bar1 << 20;
    const uint64_t size = known ? known : sim_memory_size(device.gpu, device.instance);
    *info = (struct memory_v1){.total = size, .free = size};
    return NVML_OK;
}

struct process_v1 {
    unsigned pid;
    uint64_t memory;
};
_Static_assert(sizeof(struct process_v1) == 16, "the layout of version 1");

/* Returns the number of rows of a device. The caller frees *rows. */
static int read_processes(const struct nvml_device *device, struct sim_usage **rows)
{
    int instance = nvml_is_instance(device) ? device->instance : SIM_ANY_INSTANCE;
    struct sim_state *state = nvml_state();
    int capacity = 0, count;
    *rows = NULL;
    /* Processes start and end between two calls. */
    while ((count = sim_state_processes(state, device->gpu, instance, *rows, capacity)) > capacity) {
        free(*rows);
        capacity = count + 8;
        *rows = malloc((size_t)capacity * sizeof **rows);
        if (!*rows)
            return 0;
    }
    return count;
}

static void put_v1(void *array, int at, const struct sim_usage *row)
{
    ((struct process_v1 *)array)[at] = (struct process_v1){(unsigned)row->pid, row->memory};
}

static void put_v2(void *array, int at, const struct sim_usage *row)
{
    bool on_gpu = row->instance == SIM_WHOLE_GPU;
    ((struct nvml_process *)array)[at] = (struct nvml_process){
        .pid = (unsigned)row->pid,
        .memory = row->memory,
        .gpu_instance = on_gpu ? UINT32_MAX : (unsigned)row->instance + 1,
        .compute_instance = on_gpu ? UINT32_MAX : 0,
    };
}

/* If the array is too small, fills in the size that is needed; callers begin with an empty array. */
static int get_processes(const char *function, nvml_handle handle, unsigned *count, void *array,
                         void (*put)(void *array, int at, const struct sim_usage *row))
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(function, handle, count && (*count == 0 || array), &device));

    struct sim_usage *rows;
    unsigned capacity = *count;
    *count = (unsigned)read_processes(&device, &rows);
    bool fits = *count <= capacity;
    for (unsigned i = 0; fits && i < *count; i++)
        put(array, (int)i, &rows[i]);
    free(rows);
    return fits ? NVML_OK : NVML_INSUFFICIENT_SIZE;
}

SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses(nvml_handle handle, unsigned *count, struct process_v1 *rows)
{
    return get_processes(__func__, handle, count, rows, put_v1);
}

SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(nvml_handle handle, unsigned *count, struct nvml_process *rows)
{
    return get_processes(__func__, handle, count, rows, put_v2);
}

SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(nvml_handle handle, unsigned *count, struct nvml_process *rows)
{
    return get_processes(__func__, handle, count, rows, put_v2);
}

/* A simulated GPU has no graphics processes and no MPS processes. */
static int get_no_processes(const char *function, nvml_handle handle, unsigned *count)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(function, handle, count, &device));
    *count = 0;
    return NVML_OK;
}

#define NO_PROCESSES(name)                                                                                             \
    SIM_EXPORT int name(nvml_handle handle, unsigned *count, void *rows)                                               \
    {                                                                                                                  \
        (void)rows;                                                                                                    \
        return get_no_processes(__func__, handle, count);                                                              \
    }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)
