"""Recognition of out-of-memory errors, of torch and of the libraries that it calls.

Its functions are fork-safe: they initialize nothing and import nothing.
"""

from __future__ import annotations

import errno
import re
import sys

__all__ = ["is_out_of_memory_error"]

# The out-of-memory messages of torch's allocators and of the libraries that torch calls. Only the requested size may follow on
# the line. A longer sentence mentions memory and is not such a message.
_OUT_OF_MEMORY = re.compile(
    r"(?:^|[:\]'(] ?|\b[A-Z]{2,}\w* (?:backend |ran )?)out of memory"
    r"(?=\s*(?:[.,;:(')\n]|at \S+:\d+|outside PyTorch's|when calling `|$))"
    r"|(?:^|: )Cannot allocate memory(?=\s*(?:[.;:(\n]|$))|\bcannot allocate memory on (?:GPU device|CPU host)\b"
    r"|(?i:OUT_?OF_?(?:DEVICE_|HOST_)?MEMORY)|ErrorMemoryAllocation|\bACL_ERROR_RT_MEMORY_ALLOCATION\b"
    r"|\b[A-Z]+_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b|StatusAllocFailed\b|\brocblas_status_memory_error\b"
    r"|\binsufficient resources when calling `cusparse|\bcusparse: allocation failed\b"
    r"|^std::bad_alloc\b|^C10 Out of Memory\b|\bmemory allocation failed with OOM on device\b|^Invalid buffer size: \d"
    r"|\bFailed to CUDA (?:host )?[mc]?alloc\b"
    r"|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b"
    r"|\bPT_DEVMEM Allocation failed\b",
    re.MULTILINE,
)


def is_out_of_memory_error(exception: BaseException) -> bool:
    """Return whether an exception means that memory ran out, so that a retry with less may succeed.

    Args:
        exception: the caught exception.

    Returns:
        True for torch's ``OutOfMemoryError``, Python's ``MemoryError``, ENOMEM, and RuntimeErrors with an out-of-memory message
        of torch, the driver, cuBLAS, cuDNN, NCCL and similar libraries; also if such an error is the cause of the exception
        (``raise ... from``) or in its group.

    Raises:
        TypeError: if it is no exception.

    Example:
        >>> acc.is_out_of_memory_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        True
        >>> acc.is_out_of_memory_error(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
        False
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"is_out_of_memory_error() takes an exception, not {type(exception).__name__}")
    pending, visited = [exception], set[int]()
    while pending:
        error = pending.pop()
        if _is_out_of_memory(error):
            return True
        visited.add(id(error))
        related = (error.__cause__, *getattr(error, "exceptions", ()))
        pending += [other for other in related if isinstance(other, BaseException) and id(other) not in visited]
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's own error can only exist if torch is imported.
    torch_error = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    if isinstance(error, (MemoryError, torch_error)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
