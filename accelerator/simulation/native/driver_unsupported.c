/* libcuda.so.1: entry points that programs require to exist and that are not simulated. */
#include "driver.h"

#define NOT_SUPPORTED(name)                                                                                            \
    SIM_EXPORT CUresult name(void)                                                                                     \
    {                                                                                                                  \
        RETURN_IF_ERROR(enter(__func__));                                                                                                       \
        return ERROR_NOT_SUPPORTED;                                                                                    \
    }

NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
NOT_SUPPORTED(cuTensorMapEncodeIm2col)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastUnbind)
NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
