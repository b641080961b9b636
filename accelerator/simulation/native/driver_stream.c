/* libcuda.so.1: streams for programs that ask the driver for them. They are the runtime's: of the one in use, else of the
 * first that is in the process. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>

static const struct sim_runtime *_Atomic runtime;

void use_runtime(const struct sim_runtime *used)
{
    runtime = used;
}

static const struct sim_runtime *find_runtime(void)
{
    const struct sim_runtime *(*first)(void);
    if (!runtime && (*(void **)&first = dlsym(RTLD_DEFAULT, "accelerator_sim_runtime")))
        runtime = first();
    return runtime;
}

int wait_for_pending_on_device(int ordinal)
{
    return runtime ? runtime->wait_for_pending_on_device(ordinal) : SUCCESS;
}

#define FORWARD(call)                                                                                                  \
    do {                                                                                                               \
        ENTER_CONTEXT();                                                                                               \
        const struct sim_runtime *runtime_ = find_runtime();                                                           \
        return runtime_ ? runtime_->call : ERROR_NOT_SUPPORTED;                                                        \
    } while (0)

SIM_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    FORWARD(create_stream(stream, flags, 0));
}

SIM_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    FORWARD(create_stream(stream, flags, priority));
}

SIM_EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    FORWARD(destroy_stream(stream));
}

SIM_EXPORT CUresult cuStreamQuery(CUstream stream)
{
    FORWARD(query_stream(stream));
}

SIM_EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    FORWARD(synchronize_stream(stream));
}

SIM_EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    FORWARD(is_capturing(stream, status));
}

SIM_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER_CONTEXT();
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}
