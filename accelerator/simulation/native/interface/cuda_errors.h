/* CUDA's errors. The runtime and the driver use the same codes and texts, but different names. */
#ifndef ACCELERATOR_SIM_CUDA_ERRORS_H
#define ACCELERATOR_SIM_CUDA_ERRORS_H

#include <stddef.h>

/* X(the name after CUDA_ERROR_, code, the runtime's name, text), or R(...) if only the runtime has the error: the driver names
 * it CUDA_ERROR_UNKNOWN. */
#define SIM_ERRORS(X, R)                                                                                               \
    X(INVALID_VALUE, 1, cudaErrorInvalidValue, "invalid argument")                                                     \
    X(OUT_OF_MEMORY, 2, cudaErrorMemoryAllocation, "out of memory")                                                    \
    X(NOT_INITIALIZED, 3, cudaErrorInitializationError, "initialization error")                                        \
    X(DEINITIALIZED, 4, cudaErrorCudartUnloading, "driver shutting down")                                              \
    R(INVALID_CONFIGURATION, 9, cudaErrorInvalidConfiguration, "invalid configuration argument")                       \
    R(INVALID_PITCH_VALUE, 12, cudaErrorInvalidPitchValue, "invalid pitch argument")                                   \
    R(INVALID_SYMBOL, 13, cudaErrorInvalidSymbol, "invalid device symbol")                                             \
    R(INVALID_MEMCPY_DIRECTION, 21, cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")              \
    X(STUB_LIBRARY, 34, cudaErrorStubLibrary, "CUDA driver is a stub library")                                         \
    R(INSUFFICIENT_DRIVER, 35, cudaErrorInsufficientDriver,                                                            \
      "CUDA driver version is insufficient for CUDA runtime version")                                                  \
    X(DEVICE_UNAVAILABLE, 46, cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")        \
    R(MISSING_CONFIGURATION, 52, cudaErrorMissingConfiguration, "__global__ function call is not configured")          \
    R(INVALID_DEVICE_FUNCTION, 98, cudaErrorInvalidDeviceFunction, "invalid device function")                          \
    X(NO_DEVICE, 100, cudaErrorNoDevice, "no CUDA-capable device is detected")                                         \
    X(INVALID_DEVICE, 101, cudaErrorInvalidDevice, "invalid device ordinal")                                           \
    X(INVALID_IMAGE, 200, cudaErrorInvalidKernelImage, "device kernel image is invalid")                               \
    X(INVALID_CONTEXT, 201, cudaErrorDeviceUninitialized, "invalid device context")                                    \
    X(MAP_FAILED, 205, cudaErrorMapBufferObjectFailed, "mapping of buffer object failed")                              \
    X(NO_BINARY_FOR_GPU, 209, cudaErrorNoKernelImageForDevice,                                                         \
      "no kernel image is available for execution on the device")                                                      \
    X(ECC_UNCORRECTABLE, 214, cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")                        \
    X(PEER_ACCESS_UNSUPPORTED, 217, cudaErrorPeerAccessUnsupported,                                                    \
      "peer access is not supported between these two devices")                                                        \
    X(UNSUPPORTED_LIMIT, 215, cudaErrorUnsupportedLimit, "limit is not supported on this architecture")                \
    X(INVALID_PTX, 218, cudaErrorInvalidPtx, "a PTX JIT compilation failed")                                           \
    X(NVLINK_UNCORRECTABLE, 220, cudaErrorNvlinkUncorrectable, "uncorrectable NVLink error detected during the execution") \
    X(FILE_NOT_FOUND, 301, cudaErrorFileNotFound, "file not found")                                                    \
    X(OPERATING_SYSTEM, 304, cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS")         \
    X(INVALID_HANDLE, 400, cudaErrorInvalidResourceHandle, "invalid resource handle")                                  \
    X(ILLEGAL_STATE, 401, cudaErrorIllegalState, "the operation cannot be performed in the present state")             \
    X(NOT_FOUND, 500, cudaErrorSymbolNotFound, "named symbol not found")                                               \
    X(NOT_READY, 600, cudaErrorNotReady, "device not ready")                                                           \
    X(ILLEGAL_ADDRESS, 700, cudaErrorIllegalAddress, "an illegal memory access was encountered")                       \
    X(LAUNCH_OUT_OF_RESOURCES, 701, cudaErrorLaunchOutOfResources, "too many resources requested for launch")          \
    X(LAUNCH_TIMEOUT, 702, cudaErrorLaunchTimeout, "the launch timed out and was terminated")                          \
    X(PEER_ACCESS_ALREADY_ENABLED, 704, cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")           \
    X(PEER_ACCESS_NOT_ENABLED, 705, cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")                 \
    X(PRIMARY_CONTEXT_ACTIVE, 708, cudaErrorSetOnActiveProcess, "cannot set while device is active in this process")   \
    X(CONTEXT_IS_DESTROYED, 709, cudaErrorContextIsDestroyed, "context is destroyed")                                  \
    X(ASSERT, 710, cudaErrorAssert, "device-side assert triggered")                                                    \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712, cudaErrorHostMemoryAlreadyRegistered,                                       \
      "part or all of the requested memory range is already mapped")                                                   \
    X(HOST_MEMORY_NOT_REGISTERED, 713, cudaErrorHostMemoryNotRegistered,                                               \
      "pointer does not correspond to a registered memory region")                                                     \
    X(HARDWARE_STACK_ERROR, 714, cudaErrorHardwareStackError, "hardware stack error")                                  \
    X(ILLEGAL_INSTRUCTION, 715, cudaErrorIllegalInstruction, "an illegal instruction was encountered")                 \
    X(MISALIGNED_ADDRESS, 716, cudaErrorMisalignedAddress, "misaligned address")                                       \
    X(INVALID_PC, 718, cudaErrorInvalidPc, "invalid program counter")                                                  \
    X(LAUNCH_FAILED, 719, cudaErrorLaunchFailure, "unspecified launch failure")                                        \
    X(COOPERATIVE_LAUNCH_TOO_LARGE, 720, cudaErrorCooperativeLaunchTooLarge,                                           \
      "too many blocks in cooperative launch")                                                                         \
    X(NOT_PERMITTED, 800, cudaErrorNotPermitted, "operation not permitted")                                            \
    X(NOT_SUPPORTED, 801, cudaErrorNotSupported, "operation not supported")                                            \
    X(SYSTEM_NOT_READY, 802, cudaErrorSystemNotReady, "system not yet initialized")                                    \
    X(SYSTEM_DRIVER_MISMATCH, 803, cudaErrorSystemDriverMismatch,                                                      \
      "system has unsupported display driver / cuda driver combination")                                               \
    X(COMPAT_NOT_SUPPORTED_ON_DEVICE, 804, cudaErrorCompatNotSupportedOnDevice,                                        \
      "forward compatibility was attempted on non supported HW")                                                       \
    X(STREAM_CAPTURE_UNSUPPORTED, 900, cudaErrorStreamCaptureUnsupported,                                              \
      "operation not permitted when stream is capturing")                                                              \
    X(STREAM_CAPTURE_INVALIDATED, 901, cudaErrorStreamCaptureInvalidated,                                              \
      "operation failed due to a previous error during capture")                                                       \
    X(STREAM_CAPTURE_MERGE, 902, cudaErrorStreamCaptureMerge,                                                          \
      "operation would result in a merge of separate capture sequences")                                               \
    X(STREAM_CAPTURE_UNMATCHED, 903, cudaErrorStreamCaptureUnmatched,                                                  \
      "capture was not ended in the same stream as it began")                                                          \
    X(STREAM_CAPTURE_UNJOINED, 904, cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")              \
    X(STREAM_CAPTURE_ISOLATION, 905, cudaErrorStreamCaptureIsolation,                                                  \
      "dependency created on uncaptured work in another stream")                                                       \
    X(STREAM_CAPTURE_IMPLICIT, 906, cudaErrorStreamCaptureImplicit,                                                    \
      "operation would make the legacy stream depend on a capturing blocking stream")                                  \
    X(CAPTURED_EVENT, 907, cudaErrorCapturedEvent,                                                                     \
      "operation not permitted on an event last recorded in a capturing stream")                                       \
    X(STREAM_CAPTURE_WRONG_THREAD, 908, cudaErrorStreamCaptureWrongThread,                                             \
      "attempt to terminate a thread-local capture sequence from another thread")                                      \
    X(UNKNOWN, 999, cudaErrorUnknown, "unknown error")

#define SIM_ERROR_CODE(name, code, runtime_name, text) ERROR_##name = code,
enum { SUCCESS = 0, SIM_ERRORS(SIM_ERROR_CODE, SIM_ERROR_CODE) };
#undef SIM_ERROR_CODE

struct sim_error {
    int code;
    const char *runtime_name, *driver_name, *text;
};

/* Returns NULL for an unknown code. */
static inline const struct sim_error *sim_find_error(int code)
{
#define SIM_ERROR_OF_BOTH(name, code, runtime_name, text) {code, #runtime_name, "CUDA_ERROR_" #name, text},
#define SIM_ERROR_OF_RUNTIME(name, code, runtime_name, text) {code, #runtime_name, "CUDA_ERROR_UNKNOWN", text},
    static const struct sim_error errors[] = {{SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
                                              SIM_ERRORS(SIM_ERROR_OF_BOTH, SIM_ERROR_OF_RUNTIME)};
#undef SIM_ERROR_OF_BOTH
#undef SIM_ERROR_OF_RUNTIME
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

#endif
