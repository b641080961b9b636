"""Which exceptions are recognized as out-of-memory errors."""

from __future__ import annotations

import builtins
import errno
from typing import Any

import pytest
import torch

import accelerator as acc

YES = [
    torch.OutOfMemoryError("Allocation on device"),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("XPU out of memory, please use `empty_cache` to release all unoccupied cached memory."),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("NCCL error: unhandled cuda error. Last error:\nFailed to CUDA calloc async 608 bytes"),
    RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("Failed to CUDA host alloc 4194304 bytes"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    torch.distributed.DistBackendError("NCCL error in: Cuda failure 'out of memory'")
    if torch.distributed.is_available()
    else MemoryError(),
]

# ExceptionGroup exists from Python 3.11 on.
group = getattr(builtins, "ExceptionGroup", None)


def caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("step 3 failed")
    error.__cause__ = cause
    return error


YES += [
    RuntimeError("CUDA out of memory"),
    RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:50"),
    RuntimeError("unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    # What torch's check of cuSPARSE makes of the library's texts, those of CUDA 12 and 11.
    RuntimeError("CUDA error: out of memory when calling `cusparseCreate(handle)`"),
    RuntimeError("CUDA error: insufficient resources when calling `cusparseSpMM_bufferSize(handle)`"),
    RuntimeError("cusparse: allocation failed"),
    RuntimeError("cudss error: CUDSS_STATUS_ALLOC_FAILED, when calling `cudssExecute(handle)`"),
    RuntimeError("hipsolver error: HIPSOLVER_STATUS_ALLOC_FAILED, when calling `hipsolverDnCreate(handle)`"),
    RuntimeError("CUDA error: HIPSPARSE_STATUS_ALLOC_FAILED when calling `hipsparseCreate(handle)`"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("rocblas error: rocblas_status_memory_error"),
    RuntimeError("linalg.eigh: (Batch element 0): cannot allocate memory on GPU device"),
    RuntimeError("CNNL_STATUS_ALLOC_FAILED"),
    RuntimeError("aclrtMalloc failed: ACL_ERROR_RT_MEMORY_ALLOCATION (207001)"),
    RuntimeError("Invalid buffer size: 20.00 GiB"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("std::bad_alloc: cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("C10 Out of Memory. Trying to allocate 64 bytes"),
    RuntimeError("CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, ..."),
    RuntimeError("Allocation of 20 bytes would exceed allowed memory. (out of memory)\nCurrently allocated: 10"),
    RuntimeError("memory allocation failed with OOM on device 0"),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB"),
    RuntimeError(
        "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback:\ntorch.OutOfMemoryError: CUDA out of memory."
    ),
    caused_by(torch.OutOfMemoryError("Allocation on device")),
    caused_by(caused_by(MemoryError())),
]
if group:
    YES += [
        group("ranks", [ValueError("first"), torch.OutOfMemoryError("Allocation on device")]),
        group("ranks", [group("more", [caused_by(MemoryError())])]),
    ]
NO = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: unhandled system error"),
    RuntimeError("ran out of memoryless states"),
    RuntimeError(""),
    RuntimeError(),
    ValueError("out of memory"),
    KeyboardInterrupt("out of memory"),
    Exception("CUDA out of memory"),
    RuntimeError("This batch is out of memory budget"),
    RuntimeError("Cannot allocate memory that was freed before"),
    RuntimeError("I cannot allocate memory to this job"),
    OSError(errno.ENOENT, "No such file"),
    RuntimeError("CUDA error: resource allocation failed when calling `cusparseCreate(handle)`, see the log"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_NOT_INITIALIZED when calling `cusparseCreate(handle)`"),
    RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
    RuntimeError("insufficient resources to schedule the job"),
    RuntimeError("Invalid buffer size: expected a multiple of 4"),
    RuntimeError("the test catches std::bad_alloc"),
    RuntimeError("when the GPU is out of memory when calling home"),
    RuntimeError("UR_RESULT_ERROR_OUT_OF_RESOURCES"),
    caused_by(ValueError("CUDA out of memory")),
]
if group:
    NO.append(group("ranks", [ValueError("first"), RuntimeError("This batch is out of memory budget")]))


@pytest.mark.parametrize("exception", [*YES, *NO], ids=repr)
def test_out_of_memory(exception: BaseException) -> None:
    assert acc.is_out_of_memory_error(exception) is (exception in YES)


@pytest.mark.parametrize("thing", [None, "CUDA out of memory", MemoryError, 2], ids=repr)
def test_no_exception(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes an exception"):
        acc.is_out_of_memory_error(thing)


def test_host_allocator_error_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert acc.is_out_of_memory_error(caught.value) is True


def test_circular_causes_terminate() -> None:
    error, other = RuntimeError("one"), RuntimeError("other")
    error.__cause__, other.__cause__ = other, error
    assert acc.is_out_of_memory_error(error) is False


def test_implicit_exception_context_is_ignored() -> None:
    with pytest.raises(ValueError) as caught:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("while cleaning up")  # noqa: B904
    assert acc.is_out_of_memory_error(caught.value) is False
