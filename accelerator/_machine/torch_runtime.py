"""What queries read from an initialized runtime, through the public functions of the torch that is already imported.

Only an imported torch can be initialized, so this module needs no import of torch and no private binding. Callers check
``process.is_initialized()`` first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import process, vendors
from .discovery_result import Failed, NotSupported
from .driver_child import DriverDevice


def current_index() -> int:
    """The index of the current device."""
    index: int = _torch().accelerator.current_device_index()
    return index


def memory_info(index: int) -> tuple[int, int]:
    """Free and total bytes of a device: from torch's generic function, else from that of the accelerator's module.

    Raises:
        NotSupported: if this torch has neither for this accelerator.
    """
    torch, module = _torch(), process.torch_device_module()
    own = getattr(module, "mem_get_info", None) or getattr(getattr(module, "memory", None), "mem_get_info", None)
    figures = _call(getattr(torch.accelerator, "get_memory_info", None), index) or _call(own, index) or _limits(module, index)
    if figures is None:
        device_type = process.torch_accelerator_type()
        raise NotSupported(f"torch {torch.__version__} does not report the memory of {device_type} devices")
    return figures


def _call(function: Callable[[int], tuple[int, int]] | None, index: int) -> tuple[int, int] | None:
    """What a memory function returns; None if torch lacks it, or the backend behind it does not have it."""
    if function is None:
        return None
    try:
        free, total = function(index)
    except AttributeError as error:
        # torch has the function, but not the binding that it calls.
        if isinstance(error.obj, ModuleType):
            return None
        raise
    except RuntimeError as error:
        # A backend without an allocator that torch knows, or whose allocator has no such figure.
        if isinstance(error, NotImplementedError) or "INTERNAL ASSERT" in str(error):
            return None
        raise
    return free, total


def _limits(module: Any, index: int) -> tuple[int, int] | None:
    """Free and total bytes from the module's memory statistics, if the vendor table says that they are there."""
    keys = _row().memory_limits
    if keys is None:
        return None
    read = getattr(module, "memory_stats", None) or module.memory.memory_stats
    total, used = (int(read(index)[key]) for key in keys)
    return total - used, total


def read(index: int, field: str) -> Any:
    """Read a field of an initialized device by the function of the accelerator's module; as ``read`` of discovery backends.

    Raises:
        NotSupported: if the module does not report the field, or the memory is the host's.
        Failed: if the module's function fails.
    """
    if field == "memory":
        return _read_memory(index)
    device_type, row, module = process.torch_accelerator_type(), _row(), process.torch_device_module()
    function = getattr(module, field, None) if field in row.telemetry else None
    if function is None:
        raise NotSupported(f"torch {_torch().__version__} does not report it for {device_type} devices")
    try:
        return round(function(index) * row.telemetry[field])
    except Exception as error:  # a vendor's library is missing, lacks a permission, or fails otherwise
        raise Failed(f"torch.{device_type}.{field}() failed: {error}") from None


def _read_memory(index: int) -> tuple[int, int, int]:
    if _row().shares_host_memory:
        raise NotSupported("it has no memory of its own")
    try:
        free, total = memory_info(index)
    except (NotSupported, RuntimeError) as error:
        raise Failed(str(error)) from None
    return free, total, total - free


def _row() -> vendors.Vendor:
    return vendors.get_row(process.torch_accelerator_type() or "cpu")


def library_problem() -> str:
    """Why a device without a handle cannot be read."""
    return "torch reads it once the accelerator is initialized"


def device_count(module: Any) -> int:
    """How many devices a torch module counts."""
    count: int = module.device_count() if hasattr(module, "device_count") else int(module.is_available())
    return count


def describe(module: Any, device_type: str, index: int) -> DriverDevice:
    """A device of an initialized runtime, with the name and the size that torch reports."""
    try:
        name = str(module.get_device_name(index))
    except (AttributeError, RuntimeError):
        name = device_type
    try:
        total: int | None = memory_info(index)[1]
    except (NotSupported, RuntimeError):
        total = None
    return DriverDevice(None, name, None, None, total)


def property_of(index: int, name: str) -> Any:
    """A property of a device, which torch reads without a context on it; None if its properties do not say."""
    properties = getattr(process.torch_device_module(), "get_device_properties", None)
    return getattr(properties(index), name, None) if properties else None


def _torch() -> Any:
    return sys.modules["torch"]
