/* The functions of NVML that are not simulated. NVIDIA's Python binding needs their names: if one is missing, a
 * program assumes an old driver, not a GPU without the feature. */
#include "nvml.h"
#include "common/stubs.h"

CALLED_BY_STUBS static int refuse(const char *function)
{
    RETURN_IF_ERROR(nvml_enter(function, true));
    return NVML_NOT_SUPPORTED;
}

CALLED_BY_STUBS static int refuse_device(const char *function, nvml_handle handle)
{
    struct nvml_device device;
    RETURN_IF_ERROR(nvml_enter_device(function, handle, true, &device));
    return NVML_NOT_SUPPORTED;
}

#define NAME(name)                                                                                                     \
    STUB int name(void)                                                                    \
    {                                                                                                                  \
        return refuse(__func__);                                                                                       \
    }

/* The first argument is a device. */
#define DEVICE_NAME(name)                                                                                              \
    STUB int name(nvml_handle handle)                                                      \
    {                                                                                                                  \
        return refuse_device(__func__, handle);                                                                        \
    }

#include "exported/nvml.h"
