/* NVML's results, which the simulated NVML returns and the simulated nvidia-smi reads. */
#ifndef ACCELERATOR_SIM_NVML_CODES_H
#define ACCELERATOR_SIM_NVML_CODES_H

enum {
    NVML_OK = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_LIBRARY_NOT_FOUND = 12,
    NVML_FUNCTION_NOT_FOUND = 13,
    NVML_VERSION_MISMATCH = 25,
};

#endif
