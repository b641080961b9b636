/* The simulated libnvidia-ml: the session and what concerns the whole system. */
#include "nvml.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Marks the process as simulated: simulation.is_simulated() searches for this name. */
SIM_EXPORT const char accelerator_simulation[] = "nvml";

/* The upper half is the id of the process that opened the session, the lower half its number of open nvmlInit calls. One
 * word needs no lock, so it is valid in a child forked at any moment. Such a child has no session. */
static _Atomic uint64_t session;

static bool is_own(uint64_t value)
{
    return value >> 32 == (uint64_t)getpid();
}

static int open_session(const char *function)
{
    sim_init_delay("nvmlInit");
    RETURN_IF_ERROR(sim_injected(function, SIM_NO_GPU));

    uint64_t old = session, new;
    do
        new = is_own(old) ? old + 1 : ((uint64_t)getpid() << 32) + 1;
    while (!atomic_compare_exchange_weak(&session, &old, new));
    sim_log("nvmlInit");
    return NVML_OK;
}

SIM_EXPORT int nvmlInit(void)
{
    return open_session(__func__);
}

SIM_EXPORT int nvmlInit_v2(void)
{
    return open_session(__func__);
}

SIM_EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags; /* whether to attach to GPUs: no difference here */
    return open_session(__func__);
}

/* NVML documents that more shutdowns than initializations are not an error. */
SIM_EXPORT int nvmlShutdown(void)
{
    uint64_t old = session, new;
    do {
        RETURN_UNLESS(is_own(old), NVML_UNINITIALIZED);
        RETURN_IF_ERROR(sim_injected(__func__, SIM_NO_GPU));
        new = (uint32_t)old > 0 ? old - 1 : old;
    } while (!atomic_compare_exchange_weak(&session, &old, new));
    sim_log("nvmlShutdown");
    return NVML_OK;
}

int nvml_enter(const char *function, bool has_valid_arguments)
{
    uint64_t current = session;
    RETURN_UNLESS((uint32_t)current != 0 && is_own(current), NVML_UNINITIALIZED);
    RETURN_IF_ERROR(sim_injected(function, SIM_NO_GPU));
    return has_valid_arguments ? NVML_OK : NVML_INVALID_ARGUMENT;
}

SIM_EXPORT const char *nvmlErrorString(int result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "The operating system has blocked the request",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "ECC is not supported by the virtual GPU",
        "Insufficient resources",
        "Frequency not supported",
        "Argument version mismatch",
        "Deprecated",
        "Not Ready",
        "GPU not found",
        "Invalid state",
        "Reset type not supported",
    };
    return result >= 0 && result < (int)(sizeof texts / sizeof *texts) ? texts[result] : "Unknown Error";
}

int nvml_put_text(const char *text, char *buffer, unsigned size)
{
    RETURN_UNLESS(strlen(text) < size, NVML_INSUFFICIENT_SIZE);
    strcpy(buffer, text);
    return NVML_OK;
}

SIM_EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    RETURN_IF_ERROR(nvml_enter(__func__, version));
    return nvml_put_text(sim_config()->driver_version, version, size);
}

/* The library's version consists of the CUDA major and the driver's version. */
SIM_EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    RETURN_IF_ERROR(nvml_enter(__func__, version));
    char text[sizeof sim_config()->driver_version + 16];
    snprintf(text, sizeof text, "%d.%s", sim_config()->cuda_version / 1000, sim_config()->driver_version);
    return nvml_put_text(text, version, size);
}

SIM_EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    RETURN_IF_ERROR(nvml_enter(__func__, version));
    *version = sim_config()->cuda_version;
    return NVML_OK;
}

/* Fails without the driver's library, which a container with NVML alone lacks. */
SIM_EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    RETURN_IF_ERROR(nvml_enter(__func__, version));
    RETURN_UNLESS(nvml_has_driver(), NVML_LIBRARY_NOT_FOUND);
    *version = sim_config()->cuda_version;
    return NVML_OK;
}

/* The first word of a process's command line, cut to the size of the buffer. */
SIM_EXPORT int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    RETURN_IF_ERROR(nvml_enter(__func__, name && size > 0));
    char path[32], text[4096];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    RETURN_UNLESS(file >= 0, NVML_NOT_FOUND);
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    RETURN_UNLESS(length > 0, NVML_NOT_FOUND);
    text[length] = '\0';
    snprintf(name, size, "%s", text);
    return NVML_OK;
}
