/* libcuda.so.1: entry points that are not simulated. */
#include "driver.h"
#include "common/stubs.h"

CALLED_BY_STUBS static CUresult refuse(const char *function)
{
    RETURN_IF_ERROR(enter(function));
    return ERROR_NOT_SUPPORTED;
}

#define NAME(name)                                                                                                     \
    STUB CUresult name(void)                                                                                           \
    {                                                                                                                  \
        return refuse(__func__);                                                                                       \
    }

#include "exported/driver.h"
