/* libcuda.so.1: finding the CUDA runtime that owns the streams: the one in use, or else the first in the process. */
#include "driver.h"

#include <dlfcn.h>

static const struct sim_runtime *_Atomic runtime;

void use_runtime(const struct sim_runtime *used)
{
    runtime = used;
    refusal_raises(used->needs_checks);
}

const struct sim_runtime *find_runtime(void)
{
    const struct sim_runtime *(*first)(void);
    if (!runtime && (*(void **)&first = dlsym(RTLD_DEFAULT, "accelerator_sim_runtime")))
        first(); /* its initialization calls use_runtime */
    return runtime;
}

int wait_for_pending_on_device(int ordinal)
{
    return runtime ? runtime->wait_for_pending_on_device(ordinal) : SUCCESS;
}

int wait_for_pending_on_stream(CUstream stream)
{
    return runtime ? runtime->wait_for_pending_on_stream(stream) : SUCCESS;
}

int free_to_pool(const struct sim_memory *memory)
{
    const struct sim_runtime *functions = find_runtime();
    return functions ? functions->free_to_pool(memory) : ERROR_NOT_SUPPORTED;
}
