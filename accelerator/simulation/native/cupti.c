/* libcupti.so.13: a profiling library that is never initialized.
 *
 * With an unknown driver, the real cuptiGetResultString calls itself until the stack overflows. With this library,
 * PyTorch's profiler records CPU events only. */
#include <stdint.h>

#define CUPTI_EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_PARAMETER = 1, NOT_INITIALIZED = 15, API_VERSION = 130200 };

#define NOT_INITIALIZED_FUNCTION(name)                                                                                 \
    CUPTI_EXPORT int name(void)                                                                                        \
    {                                                                                                                  \
        return NOT_INITIALIZED;                                                                                        \
    }

NOT_INITIALIZED_FUNCTION(cuptiActivityDisable)
NOT_INITIALIZED_FUNCTION(cuptiActivityEnable)
NOT_INITIALIZED_FUNCTION(cuptiActivityEnableCudaEventDeviceTimestamps)
NOT_INITIALIZED_FUNCTION(cuptiActivityEnableDriverApi)
NOT_INITIALIZED_FUNCTION(cuptiActivityEnableRuntimeApi)
NOT_INITIALIZED_FUNCTION(cuptiActivityFlushAll)
NOT_INITIALIZED_FUNCTION(cuptiActivityGetNextRecord)
NOT_INITIALIZED_FUNCTION(cuptiActivityGetNumDroppedRecords)
NOT_INITIALIZED_FUNCTION(cuptiActivityPopExternalCorrelationId)
NOT_INITIALIZED_FUNCTION(cuptiActivityPushExternalCorrelationId)
NOT_INITIALIZED_FUNCTION(cuptiActivityRegisterCallbacks)
NOT_INITIALIZED_FUNCTION(cuptiActivityRegisterTimestampCallback)
NOT_INITIALIZED_FUNCTION(cuptiActivitySetAttribute)
NOT_INITIALIZED_FUNCTION(cuptiEnableCallback)
NOT_INITIALIZED_FUNCTION(cuptiEnableDomain)
NOT_INITIALIZED_FUNCTION(cuptiFinalize)
NOT_INITIALIZED_FUNCTION(cuptiGetCallbackName)
NOT_INITIALIZED_FUNCTION(cuptiSubscribe)
NOT_INITIALIZED_FUNCTION(cuptiUnsubscribe)

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
