"""What lies below: the accelerator's initialization, and the handles and switches of the libraries that torch rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._torch import bindings, lazy_calls, state, tracing
from ._torch.tracing import traced_as

__all__ = [
    "cudart",
    "current_blas_handle",
    "get_sync_debug_mode",
    "init",
    "ipc_collect",
    "lazy_call",
    "set_sync_debug_mode",
]

_SYNC_DEBUG_MODES = ("default", "warn", "error")


@traced_as(tracing.init)
def init() -> None:
    """Initialize the accelerator now instead of at its first use.

    Raises:
        RuntimeError: if torch cannot.

    Does nothing if it is initialized, and when the CPU stands in. Mirrors ``torch.cuda.init``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.init()
        >>> acc.is_initialized() == acc.is_available()
        True
    """
    state.initialize()


def lazy_call(callback: Callable[[], object]) -> None:
    """Call a function as soon as the accelerator is initialized.

    Args:
        callback: a function without arguments. It is called now if the accelerator is initialized or the CPU stands in,
            else when it is, after what was queued before it. What it returns is dropped. On a backend that keeps no queue it
            is called now.

    Raises:
        TypeError: if it cannot be called.
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    An error in a queued function comes out of what initializes the accelerator, as torch's ``DeferredCudaCallError``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.init()
        >>> acc.lazy_call(lambda: print("initialized"))
        initialized
    """
    if not callable(callback):
        raise TypeError(f"lazy_call() takes a function, not {type(callback).__name__}")
    state.current()
    lazy_calls.run(callback)


@traced_as(tracing.ipc_collect)
def ipc_collect() -> None:
    """Give back the memory that was shared with other processes which have released it since.

    Mirrors ``torch.cuda.ipc_collect``; does nothing while the accelerator is not initialized, when the CPU stands in, and
    where memory cannot be shared like this.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.ipc_collect()
    """
    runtime = state.current()
    if runtime.is_initialized:
        collect = getattr(runtime.device_module, "ipc_collect", None)
        if collect is not None:
            collect()


def cudart() -> Any:
    """Return torch's binding of the CUDA runtime library, with ``cudaMemGetInfo``, ``cudaHostRegister``, ...

    Returns:
        The module that ``torch.cuda.cudart`` returns.

    Raises:
        RuntimeError: when the CPU stands in and on accelerators other than CUDA's, which have no CUDA runtime, and in a child
            forked from a process that had initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> free, total = acc.cudart().cudaMemGetInfo(0)
        >>> total == acc.total_memory(0)
        True
    """
    return _of_cuda("cudart", "The CUDA runtime")()


def current_blas_handle() -> int:
    """Return the cuBLAS handle that torch uses on the current stream.

    Returns:
        A ``cublasHandle_t`` as an address. Mirrors ``torch.cuda.current_blas_handle``.

    Raises:
        RuntimeError: when the CPU stands in and on accelerators other than CUDA's, which have no such handle, and in a child
            forked from a process that had initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available() and not acc.simulation.is_simulated() and acc.device_name() == "cuda":
        ...     handle = acc.current_blas_handle()
    """
    handle: int = _of_cuda("current_blas_handle", "A cuBLAS handle")()
    return handle


def _of_cuda(name: str, what: str) -> Any:
    kind = state.current().device_type
    if kind != "cuda":
        why = "the CPU stands in for an accelerator here" if kind == "cpu" else f"the accelerator is {kind}"
        raise RuntimeError(f"{what} needs CUDA, and {why}")
    return state.initialize().function(name)


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Choose what torch does when a call makes the host wait for the device.

    Args:
        debug_mode: 0 or "default" for nothing, 1 or "warn" for a warning, 2 or "error" for a RuntimeError.

    Raises:
        TypeError: if it is neither int nor string.
        RuntimeError: for another mode, for any but 0 on an accelerator other than CUDA's, and in a child forked from a
            process that had initialized the accelerator.

    Mirrors ``torch.cuda.set_sync_debug_mode``, and does not initialize CUDA for it; does nothing when the CPU stands in. The
    first time torch warns that the feature is a prototype.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_sync_debug_mode("default")
    """
    mode = _sync_debug_mode(debug_mode)
    kind = state.current().device_type
    if kind == "cuda":
        # torch warns at every call that the feature is a prototype; not to change anything needs no warning.
        if mode != bindings.get_sync_debug_mode():
            bindings.set_sync_debug_mode(mode)
    elif kind != "cpu" and mode:
        raise RuntimeError(f"torch has no sync debug mode for {kind}")


def _sync_debug_mode(debug_mode: int | str) -> int:
    if isinstance(debug_mode, bool) or not isinstance(debug_mode, (int, str)):
        raise TypeError(f"A sync debug mode is an int or a str, not {type(debug_mode).__name__} ({debug_mode!r})")
    if debug_mode in _SYNC_DEBUG_MODES:
        return _SYNC_DEBUG_MODES.index(debug_mode)
    if isinstance(debug_mode, str) or not 0 <= debug_mode < len(_SYNC_DEBUG_MODES):
        raise RuntimeError(f"A sync debug mode is 'default', 'warn', 'error' or 0, 1, 2, not {debug_mode!r}")
    return debug_mode


def get_sync_debug_mode() -> int:
    """Return what torch does when a call makes the host wait for the device.

    Returns:
        0 for nothing, 1 for a warning, 2 for a RuntimeError; 0 on accelerators other than CUDA's and when the CPU stands in.
        Mirrors ``torch.cuda.get_sync_debug_mode``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.get_sync_debug_mode()
        0
    """
    return int(bindings.get_sync_debug_mode()) if state.current().device_type == "cuda" else 0
