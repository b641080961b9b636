/* What the files of the simulated NVML share: result codes, handles, and the first calls of every function.
 *
 * NVML lists every GPU, whatever CUDA_VISIBLE_DEVICES is. A handle is an address that encodes a GPU or one of its MIG
 * instances. It is valid as long as the process, and needs no table and no lock. */
#ifndef ACCELERATOR_SIM_NVML_H
#define ACCELERATOR_SIM_NVML_H

#include <stdbool.h>

#include "common/config.h"
#include "common/errors.h"
#include "common/faults.h"
#include "common/models.h"
#include "interface/nvml_types.h"

enum { NVML_MAX_MIG_DEVICES = SIM_MAX_INSTANCES, NVML_FIRST_MIG_MAJOR = 8 };

typedef const struct nvml_anchor *nvml_handle;

struct nvml_device {
    int gpu;
    int instance; /* SIM_WHOLE_GPU or the number of a MIG instance */
};

nvml_handle nvml_encode(int gpu, int instance);
bool nvml_decode(nvml_handle handle, struct nvml_device *device);

/* Every function calls one of these first. They return the error that ends the call: NVML is not initialized in this
 * process, the arguments are not valid, the handle is not one, or an error is injected. The last two functions are for
 * calls that concern a GPU or MIG instance, and a GPU only. */
int nvml_enter(const char *function, bool has_valid_arguments);
int nvml_enter_device(const char *function, nvml_handle handle, bool has_valid_arguments, struct nvml_device *device);
int nvml_enter_gpu(const char *function, nvml_handle handle, bool has_valid_arguments, struct nvml_device *device);

/* First lines of a function: declare the device of its handle. */
#define NVML_ENTER_DEVICE(has_valid_arguments)                                                                         \
    struct nvml_device device;                                                                                         \
    RETURN_IF_ERROR(nvml_enter_device(__func__, handle, has_valid_arguments, &device))
#define NVML_ENTER_GPU(has_valid_arguments)                                                                            \
    struct nvml_device device;                                                                                         \
    RETURN_IF_ERROR(nvml_enter_gpu(__func__, handle, has_valid_arguments, &device))

/* Define functions that write one figure, of a GPU, or of a GPU or MIG instance. If the condition does not hold, they return the
 * error. */
#define NVML_FIGURE_IF(enter, function, type, condition, error, figure)                                                \
    SIM_EXPORT int function(nvml_handle handle, type *result)                                                          \
    {                                                                                                                  \
        struct nvml_device device;                                                                                     \
        RETURN_IF_ERROR(enter(__func__, handle, result, &device));                                                     \
        if (!(condition))                                                                                              \
            return error;                                                                                              \
        *result = (figure);                                                                                            \
        return NVML_OK;                                                                                                \
    }
#define NVML_FIGURE(function, type, figure) NVML_FIGURE_IF(nvml_enter_gpu, function, type, true, NVML_OK, figure)

static inline bool nvml_is_instance(const struct nvml_device *device)
{
    return device->instance != SIM_WHOLE_GPU;
}

static inline const struct sim_gpu *nvml_gpu(const struct nvml_device *device)
{
    return &sim_config()->gpus[device->gpu];
}

/* Never NULL; the figures of an unknown model are 0. */
static inline const struct sim_model *nvml_model(const struct nvml_device *device)
{
    static const struct sim_model unknown;
    const struct sim_model *model = sim_find_model(nvml_gpu(device)->name);
    return model ? model : &unknown;
}

static inline bool nvml_has_mig(const struct nvml_device *device)
{
    return nvml_gpu(device)->major >= NVML_FIRST_MIG_MAJOR;
}

/* Copies text into a caller's buffer. */
int nvml_put_text(const char *text, char *buffer, unsigned size);

struct nvml_pci_info nvml_pci_info(int gpu);

/* driver.c */
bool nvml_has_driver(void);         /* whether its library can be loaded */
struct sim_state *nvml_state(void); /* NULL without a file while the program has not loaded the driver */

/* devices.c. Whether a fault has the GPU lost; fires what is due without a process. */
bool nvml_is_lost(int gpu);

/* health.c */
const struct gpu_health *nvml_health(int gpu);
bool nvml_health_field(int gpu, unsigned field, uint64_t *value, bool *is_long); /* returns false for other fields */

/* topology.c. The number of active NVLinks of a GPU. */
int nvml_link_count(int gpu);

#endif
