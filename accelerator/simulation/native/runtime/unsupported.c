/* The CUDA runtime: entry points that are not simulated: each name of names.h that no other file defines is refused. */
#include "runtime.h"
#include "common/stubs.h"

CALLED_BY_STUBS static cudaError_t refuse(const char *function)
{
    RETURN_IF_ERROR(enter(function));
    return fail(ERROR_NOT_SUPPORTED);
}

#define NAME(name)                                                                                                     \
    STUB cudaError_t name(void)                                                                                        \
    {                                                                                                                  \
        return refuse(__func__);                                                                                       \
    }

/* The names that only one major version has. */
#if CUDART == 12
#define NAME_12 NAME
#define NAME_13(name)
#define VARIANT_12 VARIANT
#define VARIANT_13(name, function)
#else
#define NAME_12(name)
#define NAME_13 NAME
#define VARIANT_12(name, function)
#define VARIANT_13 VARIANT
#endif

#include "names.h"
