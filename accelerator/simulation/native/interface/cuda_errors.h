/* CUDA's errors. The runtime and the driver use the same codes and texts, but different names. */
#ifndef ACCELERATOR_SIM_DRIVER_ERRORS_H
#define ACCELERATOR_SIM_DRIVER_ERRORS_H

#include <stddef.h>

/* X(the name after ERROR_, code, the runtime's name, the driver's name, text)
 * The driver's name is CUDA_ERROR_UNKNOWN if only the runtime has the error. */
#define SIM_ERRORS(X)                                                                                                  \
    X(SUCCESS, 0, cudaSuccess, CUDA_SUCCESS, "no error")                                                               \
    X(INVALID_VALUE, 1, cudaErrorInvalidValue, CUDA_ERROR_INVALID_VALUE, "invalid argument")                           \
    X(OUT_OF_MEMORY, 2, cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                          \
    X(NOT_INITIALIZED, 3, cudaErrorInitializationError, CUDA_ERROR_NOT_INITIALIZED, "initialization error")            \
    X(DEINITIALIZED, 4, cudaErrorCudartUnloading, CUDA_ERROR_DEINITIALIZED, "driver shutting down")                    \
    X(INVALID_CONFIGURATION, 9, cudaErrorInvalidConfiguration, CUDA_ERROR_UNKNOWN, "invalid configuration argument")   \
    X(INVALID_SYMBOL, 13, cudaErrorInvalidSymbol, CUDA_ERROR_UNKNOWN, "invalid device symbol")                         \
    X(INVALID_MEMCPY_DIRECTION, 21, cudaErrorInvalidMemcpyDirection, CUDA_ERROR_UNKNOWN,                               \
      "invalid copy direction for memcpy")                                                                             \
    X(STUB_LIBRARY, 34, cudaErrorStubLibrary, CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                \
    X(INSUFFICIENT_DRIVER, 35, cudaErrorInsufficientDriver, CUDA_ERROR_UNKNOWN,                                        \
      "CUDA driver version is insufficient for CUDA runtime version")                                                  \
    X(DEVICE_UNAVAILABLE, 46, cudaErrorDevicesUnavailable, CUDA_ERROR_DEVICE_UNAVAILABLE,                              \
      "CUDA-capable device(s) is/are busy or unavailable")                                                             \
    X(MISSING_CONFIGURATION, 52, cudaErrorMissingConfiguration, CUDA_ERROR_UNKNOWN,                                    \
      "__global__ function call is not configured")                                                                    \
    X(INVALID_DEVICE_FUNCTION, 98, cudaErrorInvalidDeviceFunction, CUDA_ERROR_UNKNOWN, "invalid device function")      \
    X(NO_DEVICE, 100, cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                   \
    X(INVALID_DEVICE, 101, cudaErrorInvalidDevice, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                \
    X(INVALID_IMAGE, 200, cudaErrorInvalidKernelImage, CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")     \
    X(INVALID_CONTEXT, 201, cudaErrorDeviceUninitialized, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")        \
    X(MAP_FAILED, 205, cudaErrorMapBufferObjectFailed, CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")       \
    X(ECC_UNCORRECTABLE, 214, cudaErrorECCUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE,                                 \
      "uncorrectable ECC error encountered")                                                                           \
    X(PEER_ACCESS_UNSUPPORTED, 217, cudaErrorPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,                \
      "peer access is not supported between these two devices")                                                        \
    X(FILE_NOT_FOUND, 301, cudaErrorFileNotFound, CUDA_ERROR_FILE_NOT_FOUND, "file not found")                         \
    X(OPERATING_SYSTEM, 304, cudaErrorOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM,                                    \
      "OS call failed or operation not supported on this OS")                                                          \
    X(INVALID_HANDLE, 400, cudaErrorInvalidResourceHandle, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")       \
    X(ILLEGAL_STATE, 401, cudaErrorIllegalState, CUDA_ERROR_ILLEGAL_STATE,                                             \
      "the operation cannot be performed in the present state")                                                        \
    X(NOT_FOUND, 500, cudaErrorSymbolNotFound, CUDA_ERROR_NOT_FOUND, "named symbol not found")                         \
    X(NOT_READY, 600, cudaErrorNotReady, CUDA_ERROR_NOT_READY, "device not ready")                                     \
    X(ILLEGAL_ADDRESS, 700, cudaErrorIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS,                                       \
      "an illegal memory access was encountered")                                                                      \
    X(LAUNCH_TIMEOUT, 702, cudaErrorLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT,                                          \
      "the launch timed out and was terminated")                                                                       \
    X(PEER_ACCESS_ALREADY_ENABLED, 704, cudaErrorPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,     \
      "peer access is already enabled")                                                                                \
    X(PRIMARY_CONTEXT_ACTIVE, 708, cudaErrorSetOnActiveProcess, CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,                     \
      "cannot set while device is active in this process")                                                             \
    X(CONTEXT_IS_DESTROYED, 709, cudaErrorContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED,                         \
      "context is destroyed")                                                                                          \
    X(ASSERT, 710, cudaErrorAssert, CUDA_ERROR_ASSERT, "device-side assert triggered")                                 \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712, cudaErrorHostMemoryAlreadyRegistered,                                       \
      CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")        \
    X(HOST_MEMORY_NOT_REGISTERED, 713, cudaErrorHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,        \
      "pointer does not correspond to a registered memory region")                                                     \
    X(LAUNCH_FAILED, 719, cudaErrorLaunchFailure, CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")              \
    X(NOT_PERMITTED, 800, cudaErrorNotPermitted, CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                  \
    X(NOT_SUPPORTED, 801, cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                  \
    X(SYSTEM_NOT_READY, 802, cudaErrorSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")       \
    X(SYSTEM_DRIVER_MISMATCH, 803, cudaErrorSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,                   \
      "system has unsupported display driver / cuda driver combination")                                               \
    X(COMPAT_NOT_SUPPORTED, 804, cudaErrorCompatNotSupportedOnDevice, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,       \
      "forward compatibility was attempted on non supported HW")                                                       \
    X(CAPTURE_UNSUPPORTED, 900, cudaErrorStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,              \
      "operation not permitted when stream is capturing")                                                              \
    X(CAPTURE_INVALIDATED, 901, cudaErrorStreamCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,              \
      "operation failed due to a previous error during capture")                                                       \
    X(CAPTURE_MERGE, 902, cudaErrorStreamCaptureMerge, CUDA_ERROR_STREAM_CAPTURE_MERGE,                                \
      "operation would result in a merge of separate capture sequences")                                               \
    X(CAPTURE_UNMATCHED, 903, cudaErrorStreamCaptureUnmatched, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,                    \
      "capture was not ended in the same stream as it began")                                                          \
    X(CAPTURE_UNJOINED, 904, cudaErrorStreamCaptureUnjoined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED,                       \
      "capturing stream has unjoined work")                                                                            \
    X(CAPTURE_ISOLATION, 905, cudaErrorStreamCaptureIsolation, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,                    \
      "dependency created on uncaptured work in another stream")                                                       \
    X(CAPTURE_IMPLICIT, 906, cudaErrorStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,                       \
      "operation would make the legacy stream depend on a capturing blocking stream")                                  \
    X(CAPTURED_EVENT, 907, cudaErrorCapturedEvent, CUDA_ERROR_CAPTURED_EVENT,                                          \
      "operation not permitted on an event last recorded in a capturing stream")                                       \
    X(CAPTURE_WRONG_THREAD, 908, cudaErrorStreamCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,            \
      "attempt to terminate a thread-local capture sequence from another thread")                                      \
    X(UNKNOWN, 999, cudaErrorUnknown, CUDA_ERROR_UNKNOWN, "unknown error")

#define SIM_ERROR_CODE(name, code, runtime_name, driver_name, text) ERROR_##name = code,
enum { SIM_ERRORS(SIM_ERROR_CODE) };
#undef SIM_ERROR_CODE

#define SUCCESS ERROR_SUCCESS

struct sim_error {
    int code;
    const char *runtime_name, *driver_name, *text;
};

/* Returns NULL for an unknown code. */
static inline const struct sim_error *sim_find_error(int code)
{
#define SIM_ERROR_ROW(name, code, runtime_name, driver_name, text) {code, #runtime_name, #driver_name, text},
    static const struct sim_error errors[] = {SIM_ERRORS(SIM_ERROR_ROW)};
#undef SIM_ERROR_ROW
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

#endif
