/* libcupti.so.13: a profiling library that is never initialized.
 *
 * With an unknown driver, the real cuptiGetResultString calls itself until the stack overflows. With this library,
 * PyTorch's profiler records CPU events only. */
#include <stdint.h>

#define CUPTI_EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_PARAMETER = 1, API_VERSION = 130200 };

CUPTI_EXPORT int cuptiGetResultString(int result, const char **text)
{
    if (!text)
        return INVALID_PARAMETER;
    *text = result == SUCCESS ? "CUPTI_SUCCESS" : "CUPTI_ERROR_NOT_INITIALIZED";
    return SUCCESS;
}

CUPTI_EXPORT int cuptiGetVersion(uint32_t *version)
{
    if (!version)
        return INVALID_PARAMETER;
    *version = API_VERSION;
    return SUCCESS;
}
