/* The CUDA runtime: entry points that are not simulated. */
#include "runtime.h"
#include "common/stubs.h"

static cudaError_t refuse(const char *function)
{
    RETURN_IF_ERROR(enter(function));
    return fail(ERROR_NOT_SUPPORTED);
}

#define NAME(name)                                                                                                     \
    STUB cudaError_t name(void)                                                                                        \
    {                                                                                                                  \
        return refuse(__func__);                                                                                       \
    }

#if CUDART == 12
#include "names_cudart_12.h"
#else
#include "names_cudart_13.h"
#endif
