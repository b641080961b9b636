/* The CUDA runtime: entry points that PyTorch is linked to and that are not simulated. */
#include "runtime.h"

#define NOT_SUPPORTED(name)                                                                                            \
    EXPORT cudaError_t name(void)                                                                                      \
    {                                                                                                                  \
        RETURN_IF_ERROR(enter(__func__));                                                                                                       \
        return fail(ERROR_NOT_SUPPORTED);                                                                              \
    }

NOT_SUPPORTED(cudaGraphAddNode)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate)
NOT_SUPPORTED(cudaLibraryLoadData)
NOT_SUPPORTED(cudaLibraryLoadFromFile)
NOT_SUPPORTED(cudaLibraryUnload)
NOT_SUPPORTED(cudaLibraryGetKernel)
NOT_SUPPORTED(cudaLibraryGetGlobal)
NOT_SUPPORTED(cudaLibraryGetManaged)
NOT_SUPPORTED(cudaLibraryGetUnifiedFunction)
NOT_SUPPORTED(cudaLibraryGetKernelCount)
