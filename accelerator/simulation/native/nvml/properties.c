/* What does not change: figures of the model, modes, and features that no simulated GPU uses. A figure that is not known is not
 * supported. */
#include "nvml.h"

#include <string.h>

/* A figure of the model, which is 0 if it is not known. */
#define FIGURE(function, figure)                                                                                       \
    NVML_FIGURE_IF(nvml_enter_gpu, function, unsigned, (figure) != 0, NVML_NOT_SUPPORTED, figure)

enum { LANES = 16 };

FIGURE(nvmlDeviceGetBrand, nvml_model(&device)->brand)
FIGURE(nvmlDeviceGetNumGpuCores, nvml_model(&device)->cores)
FIGURE(nvmlDeviceGetMemoryBusWidth, nvml_model(&device)->bus_width)
FIGURE(nvmlDeviceGetMaxPcieLinkGeneration, nvml_model(&device)->pcie_generation)
FIGURE(nvmlDeviceGetGpuMaxPcieLinkGeneration, nvml_model(&device)->pcie_generation)
FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, nvml_model(&device)->pcie_generation)
FIGURE(nvmlDeviceGetPcieLinkMaxSpeed, nvml_model(&device)->pcie_generation) /* NVML numbers the speeds as the generations */
FIGURE(nvmlDeviceGetMaxPcieLinkWidth, nvml_model(&device)->pcie_generation ? LANES : 0)
FIGURE(nvmlDeviceGetCurrPcieLinkWidth, nvml_model(&device)->pcie_generation ? LANES : 0)
FIGURE(nvmlDeviceGetPcieSpeed, nvml_model(&device)->pcie_generation ? 1000u << nvml_model(&device)->pcie_generation : 0) /* MB/s a lane: 8000 in the third one */

/* The same for all GPUs. */
#define CONSTANT(function, constant) NVML_FIGURE(function, unsigned, constant)

CONSTANT(nvmlDeviceGetComputeMode, 0) /* any number of processes may use the GPU */
CONSTANT(nvmlDeviceGetPersistenceMode, 1) /* the driver keeps an unused GPU initialized */
CONSTANT(nvmlDeviceGetPowerManagementMode, 1)
CONSTANT(nvmlDeviceGetPowerSource, 0) /* the mains */
CONSTANT(nvmlDeviceGetPowerState, 0)
CONSTANT(nvmlDeviceGetDisplayActive, 0)
CONSTANT(nvmlDeviceGetDisplayMode, 1)
CONSTANT(nvmlDeviceGetBusType, 2) /* PCIe */
CONSTANT(nvmlDeviceGetMultiGpuBoard, 0)
CONSTANT(nvmlDeviceGetVirtualizationMode, 0)
CONSTANT(nvmlDeviceGetPcieReplayCounter, 0)
CONSTANT(nvmlDeviceGetAccountingMode, 0)
CONSTANT(nvmlDeviceGetAccountingBufferSize, 4000)

static unsigned board_id(int gpu)
{
    const struct nvml_pci_info info = nvml_pci_info(gpu);
    return info.domain << 16 | info.bus << 8 | info.device;
}
NVML_FIGURE(nvmlDeviceGetBoardId, unsigned, board_id(device.gpu))

SIM_EXPORT int nvmlDeviceGetPcieThroughput(nvml_handle handle, unsigned direction, unsigned *kilobytes)
{
    enum { DIRECTIONS = 2 };
    NVML_ENTER_GPU(kilobytes && direction < DIRECTIONS);
    *kilobytes = 0;
    return NVML_OK;
}

/* No program encodes or decodes on a simulated GPU. Also unavailable for a GPU in MIG mode. */
static int idle_engine(const char *function, nvml_handle handle, unsigned *percent, unsigned *period)
{
    enum { MICROSECONDS = 100000 };
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_gpu(function, handle, percent && period, &device));
    RETURN_UNLESS(nvml_gpu(&device)->instances == SIM_MIG_OFF, NVML_NOT_SUPPORTED);
    *percent = 0;
    *period = MICROSECONDS;
    return NVML_OK;
}

#define IDLE_ENGINE(function)                                                                                          \
    SIM_EXPORT int function(nvml_handle handle, unsigned *percent, unsigned *period)                                   \
    {                                                                                                                  \
        return idle_engine(__func__, handle, percent, period);                                                         \
    }

IDLE_ENGINE(nvmlDeviceGetEncoderUtilization)
IDLE_ENGINE(nvmlDeviceGetDecoderUtilization)
IDLE_ENGINE(nvmlDeviceGetJpgUtilization)
IDLE_ENGINE(nvmlDeviceGetOfaUtilization)

SIM_EXPORT int nvmlDeviceGetEncoderStats(nvml_handle handle, unsigned *sessions, unsigned *frames, unsigned *latency)
{
    NVML_ENTER_GPU(sessions && frames && latency);
    *sessions = *frames = *latency = 0;
    return NVML_OK;
}

SIM_EXPORT int nvmlDeviceGetFBCStats(nvml_handle handle, unsigned stats[3])
{
    NVML_ENTER_GPU(stats);
    memset(stats, 0, 3 * sizeof *stats);
    return NVML_OK;
}

#define EMPTY_LIST(function)                                                                                           \
    SIM_EXPORT int function(nvml_handle handle, unsigned *count, void *rows)                                           \
    {                                                                                                                  \
        struct nvml_device device;                                                                                     \
        (void)rows;                                                                                                    \
        RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, count, &device));                                             \
        *count = 0;                                                                                                    \
        return NVML_OK;                                                                                                \
    }

EMPTY_LIST(nvmlDeviceGetEncoderSessions)
EMPTY_LIST(nvmlDeviceGetFBCSessions)
EMPTY_LIST(nvmlDeviceGetAccountingPids)
