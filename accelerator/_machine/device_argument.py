"""Conversion of device arguments into device indices. No other module parses device arguments."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any, ForwardRef, NoReturn, SupportsIndex, TypeAlias, Union

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = int | str | "torch.device" | SupportsIndex | None
else:
    # The reference names torch.device's module, so that typing.get_type_hints() works in modules that do not import torch.
    Device = Union[int, str, ForwardRef("device", module="torch"), SupportsIndex, None]  # noqa: UP007
"""A device argument: an int or an object with ``__index__``, "cuda:1", a ``torch.device``, or None.

None is the current device, which is device 0 while the accelerator is not initialized.

An index out of range and a device of another type raise ValueError. A string that names no device raises RuntimeError. Any
other object raises TypeError. Under the CPU fallback, every index that is not negative names the CPU.
"""

# The device types that torch.device accepts; the current accelerator's type is accepted too.
_TYPES = frozenset(
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia privateuseone".split()
)
_DEVICE_STRING = re.compile(r"([a-z_]+)(?::(0|[1-9][0-9]*))?", re.ASCII)


def index(device: object, accelerator: str, *, optional: bool = True) -> int | None:
    """Return the index that a device argument names.

    Args:
        device: None, an int, a string, or an object with ``type`` and ``index``, as ``torch.device``.
        accelerator: the type that a string or a device must have.
        optional: whether None and a device without an index are allowed; they name the current device.

    Returns:
        The index, which may be negative or out of range; None for the current device.

    Raises:
        ValueError: if the type is not the accelerator's, or an index is required and missing.
        RuntimeError: if a string names no device.
        TypeError: for any other object.
    """
    device_type: str | None
    device_index: int | None
    if device is None:
        device_type, device_index = accelerator, None
    elif isinstance(device, str):
        device_type, device_index = _parse(device, accelerator)
    elif isinstance(device, bool):
        _raise_type_error(device)
    elif hasattr(device, "__index__"):
        return operator.index(device)  # type: ignore[arg-type, unused-ignore]  # pyright: ignore[reportArgumentType]
    else:
        device_type, device_index = _read_device(device)
    if device_type != accelerator:
        raise ValueError(f"{device_type} doesn't match the current accelerator {accelerator}.")
    if device_index is None and not optional:
        raise ValueError(f"Expected a device with an index, such as '{accelerator}:0', or an integer, but got {device!r}")
    return device_index


def check(device_index: int, count: int, accelerator: str) -> int:
    """Return the index if it names one of ``count`` devices. On the CPU, return 0 for every index that is not negative.

    Raises:
        ValueError: if the index is negative or, except on the CPU, too large.
    """
    if accelerator == "cpu" and device_index >= 0:
        return 0  # each rank passes its own index, and all ranks share the CPU
    if not 0 <= device_index < count:
        noun = "device is" if count == 1 else "devices are"
        raise ValueError(f"Device index {device_index} is out of range: {count} {accelerator} {noun} visible")
    return device_index


def check_bool(name: str, value: object) -> None:
    """Raise TypeError if the argument of a function without a device is not a bool: a caller may have passed a device."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__} ({value!r}); this function takes no device")


def _parse(text: str, accelerator: str) -> tuple[str, int | None]:
    match = _DEVICE_STRING.fullmatch(text)
    if match is None or (match[1] not in _TYPES and match[1] != accelerator):
        raise RuntimeError(f"{text!r} is no device: expected a device type with or without an index, such as '{accelerator}:0'")
    return match[1], None if match[2] is None else int(match[2])


def _read_device(device: Any) -> tuple[str, int | None]:
    device_type, device_index = getattr(device, "type", None), getattr(device, "index", -1)
    if not isinstance(device_type, str) or not (device_index is None or isinstance(device_index, int)):
        _raise_type_error(device)
    return device_type, device_index


def _raise_type_error(device: object) -> NoReturn:
    raise TypeError(f"Expected a device as None, an int, a str or a torch.device, but got {type(device).__name__} ({device!r})")
