"""Initialization, queued calls, and the handles and settings of CUDA's libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._torch import bindings, lazy_calls, state, tracing
from ._torch.tracing import traced_as

__all__ = ["cudart", "current_blas_handle", "get_sync_debug_mode", "init", "ipc_collect", "lazy_call", "set_sync_debug_mode"]

_SYNC_DEBUG_MODES = ("default", "warn", "error")


@traced_as(tracing.init)
def init() -> None:
    """Initialize the accelerator now instead of at its first use.

    Does nothing if it is initialized, and under the CPU fallback. Mirrors ``torch.cuda.init``.

    Raises:
        RuntimeError: if torch cannot initialize it; in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> acc.init()
        >>> acc.is_initialized()
        True
    """
    state.initialize()


def lazy_call(callback: Callable[[], object]) -> None:
    """Call a function once the accelerator is initialized.

    Args:
        callback: a function without arguments; its result is dropped. Before initialization it is queued after earlier calls.
            It is called now if the accelerator is initialized or has no queue, and under the CPU fallback.

    Raises:
        TypeError: if it is not callable.
        RuntimeError: in a bad fork.

    The call that initializes the accelerator raises a queued function's error, as torch's ``DeferredCudaCallError``.

    Example:
        >>> acc.init()
        >>> acc.lazy_call(lambda: print("initialized"))
        initialized
    """
    if not callable(callback):
        raise TypeError(f"lazy_call() takes a callable, not {type(callback).__name__}")
    state.current()
    lazy_calls.run(callback, uses_device=False)


@traced_as(tracing.ipc_collect)
def ipc_collect() -> None:
    """Free memory that was shared with other processes and that they have released.

    Mirrors ``torch.cuda.ipc_collect``; does nothing before initialization, under the CPU fallback, and on
    accelerators that do not share memory this way.

    Example:
        >>> acc.ipc_collect()
    """
    runtime = state.current()
    if runtime.is_initialized:
        collect = runtime.find_function("ipc_collect")
        if collect is not None:
            collect()


def cudart() -> Any:
    """Return torch's binding of the CUDA runtime, with ``cudaMemGetInfo``, ``cudaHostRegister``, ...

    Returns:
        The module that ``torch.cuda.cudart`` returns.

    Raises:
        RuntimeError: on other accelerators than CUDA, under the CPU fallback, and in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> free, total = acc.cudart().cudaMemGetInfo(0)
        >>> total == acc.total_memory(0)
        True
    """
    return cuda_function("cudart")()


def current_blas_handle() -> int:
    """Return the cuBLAS handle that torch uses on the current stream.

    Returns:
        A ``cublasHandle_t`` as an address. Mirrors ``torch.cuda.current_blas_handle``.

    Raises:
        RuntimeError: on other accelerators than CUDA, under the CPU fallback, and in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> if acc.is_available() and not acc.simulation.is_simulated() and acc.device_name() == "cuda":
        ...     handle = acc.current_blas_handle()
    """
    handle: int = cuda_function("current_blas_handle")()
    return handle


def cuda_function(name: str, caller: str | None = None) -> Any:
    """Initialize the accelerator, and return the function of that name of ``torch.cuda``.

    Raises:
        RuntimeError: in the caller's name, if torch's module for the accelerator has no such function.
    """
    runtime = state.current()
    if runtime.find_function(name) is None:
        problem = "there is no accelerator" if runtime.device_type == "cpu" else f"the accelerator is {runtime.device_type}"
        raise RuntimeError(f"{caller or name}() needs CUDA, but {problem}")
    return state.initialize().function(name)


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Set what torch does when a call makes the host wait for the device.

    Args:
        debug_mode: 0 or "default" for nothing, 1 or "warn" for a warning, 2 or "error" for a RuntimeError.

    Raises:
        TypeError: if the mode is neither an int nor a str.
        RuntimeError: for any other mode; for a mode other than 0 on other accelerators than CUDA; in a bad fork.

    Does nothing under the CPU fallback. Mirrors ``torch.cuda.set_sync_debug_mode`` without initializing CUDA. torch warns at
    the first call that the feature is a prototype.

    Example:
        >>> acc.set_sync_debug_mode("default")
    """
    mode = _sync_debug_mode(debug_mode)
    device_type = state.current().device_type
    if device_type == "cuda":
        # Skip a call that changes nothing, because torch may warn that the feature is a prototype.
        if mode != bindings.get_sync_debug_mode():
            bindings.set_sync_debug_mode(mode)
    elif device_type != "cpu" and mode:
        raise RuntimeError(f"torch has no sync debug mode for {device_type}")


def _sync_debug_mode(debug_mode: int | str) -> int:
    if isinstance(debug_mode, bool) or not isinstance(debug_mode, (int, str)):
        raise TypeError(f"The sync debug mode must be an int or a str, not {type(debug_mode).__name__} ({debug_mode!r})")
    if debug_mode in _SYNC_DEBUG_MODES:
        return _SYNC_DEBUG_MODES.index(debug_mode)
    if isinstance(debug_mode, str) or not 0 <= debug_mode < len(_SYNC_DEBUG_MODES):
        raise RuntimeError(f"The sync debug mode must be 'default', 'warn', 'error' or 0, 1, 2, not {debug_mode!r}")
    return debug_mode


def get_sync_debug_mode() -> int:
    """Return what torch does when a call makes the host wait for the device.

    Returns:
        0 for nothing, 1 for a warning, 2 for a RuntimeError; 0 on other accelerators than CUDA and under the CPU fallback.
        Mirrors ``torch.cuda.get_sync_debug_mode``.

    Example:
        >>> acc.get_sync_debug_mode()
        0
    """
    return int(bindings.get_sync_debug_mode()) if state.current().device_type == "cuda" else 0
