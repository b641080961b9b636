"""The runtime state: which device type the runtime functions act on, and whether the accelerator is initialized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from .._machine import device_argument, discovery_cache, process, vendors
from .._machine.discovery_result import NotSupported
from .bindings import get_index


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device type and its number of devices; final once it is in `initialized`."""

    device_type: str
    device_count: int


# Holds one entry once the accelerator is initialized in this process. Only a fork empties it again. A list, because the
# fastest calls import it by name and test it.
initialized: list[Accelerator] = []

# The indices of its devices, filled together with `initialized`. The fastest calls check an index here, because the bindings
# of some accelerators do not check it.
device_indices: set[int] = set()

# Index of each string and torch.device that was resolved since initialization. The fastest calls read it by `cached_index`.
_index_cache: dict[str | torch.device, int] = {}


class RuntimeState(NamedTuple):
    """The runtime state and what a device argument names in it.

    Attributes:
        device_type: type of the device that runtime functions act on: the accelerator's, or "cpu" under the CPU fallback.
        requested_index: the index that the device argument names, None for the current device; negative if allowed.
        is_initialized: whether the accelerator is initialized.
    """

    device_type: str
    requested_index: int | None
    is_initialized: bool

    @property
    def device_index(self) -> int:
        """The requested index; the current device's for None and a negative one, 0 before initialization."""
        if self.requested_index is None or self.requested_index < 0:
            return get_index() if self.is_initialized else 0
        return self.requested_index

    @property
    def device_module(self) -> Any:
        """torch's module for the device type: ``torch.cuda``, ``torch.xpu``, ..., ``torch.cpu``."""
        return getattr(torch, self.device_type)

    @property
    def vendor(self) -> vendors.Vendor:
        """The row of the vendor table for the device type."""
        return vendors.get_row(self.device_type, is_hip=torch.version.hip is not None)

    @property
    def module_arguments(self) -> tuple[int, ...]:
        """The device index for functions of the module; nothing if they take no device."""
        return (self.device_index,) if self.vendor.takes_device else ()

    def find_function(self, name: str) -> Any:
        """Return the function of that name of torch's module for the device type, or None."""
        module, own_name = self.device_module, self.vendor.module_names.get(name, name)
        return getattr(module, own_name, None) or getattr(getattr(module, "memory", None), own_name, None)

    def function(self, name: str) -> Any:
        """Return the function of that name of torch's module for the device type.

        Raises:
            NotSupported: if it has none.
        """
        function = self.find_function(name)
        if function is None:
            raise NotSupported(f"torch {torch.__version__} has no torch.{self.device_type}.{name}()")
        return function


def current(
    device: Any = None, *, optional: bool = True, allow_negative: bool = False, allow_bad_fork: bool = False
) -> RuntimeState:
    """Return the runtime state and resolve a device argument; initializes nothing.

    Args:
        device: the device argument.
        optional: whether None and a device without an index name the current device.
        allow_negative: whether a negative index is returned as it is; else it is out of range.
        allow_bad_fork: whether to answer in a bad fork too.

    Raises:
        RuntimeError: in a bad fork, unless it is allowed; for a string that names no device.
        ValueError, TypeError: as ``device_argument.index``; ValueError also for an index that is out of range.
    """
    accelerator = initialized[0] if initialized else _discover(allow_bad_fork)
    device_type, count = accelerator.device_type, accelerator.device_count
    index = device_argument.index(device, device_type, optional=optional or device_type == "cpu")
    if index is not None and not (allow_negative and index < 0):
        index = device_argument.check(index, count or 1, device_type)
        if initialized and isinstance(device, (str, torch.device)):
            _index_cache[device] = index
    return RuntimeState(device_type, index, bool(initialized))


def _discover(allow_bad_fork: bool) -> Accelerator:
    """The device type and count; remembers them once the accelerator is initialized."""
    in_bad_fork = process.is_in_bad_fork()
    if in_bad_fork and not allow_bad_fork:
        raise_bad_fork()
    result = discovery_cache.current()
    accelerator = Accelerator(result.device_type, result.count)
    if accelerator.device_type != "cpu" and not in_bad_fork and process.is_initialized():
        initialized.append(accelerator)
        device_indices.update(range(accelerator.device_count))
    return accelerator


def raise_bad_fork() -> NoReturn:
    """Raise the RuntimeError for a process that cannot use the accelerator because it was forked."""
    raise RuntimeError(f"The accelerator cannot be used: {process.BAD_FORK}")


def initialize(device: Any = None, *, allow_negative: bool = False) -> RuntimeState:
    """Return the runtime state after initializing the accelerator if there is one; a wrong argument initializes nothing.

    If it cannot be initialized, this call raises; later ones act on the CPU.

    Raises:
        RuntimeError, ValueError, TypeError: as ``current``; RuntimeError also if torch cannot initialize it.
    """
    runtime = current(device, allow_negative=allow_negative)
    if runtime.is_initialized or runtime.device_type == "cpu":
        return runtime
    try:
        runtime.device_module.init()
    except Exception as error:
        discovery_cache.record_failed_initialization(error)
        raise
    return current(device, allow_negative=allow_negative)


def cached_index(device: Any) -> int | None:
    """Return the index of a string or torch.device that was resolved since initialization, else None."""
    try:
        return _index_cache.get(device)
    except TypeError:  # an unhashable object is not a device
        return None


@process.reset_after_fork
def _reset_after_fork() -> None:
    initialized.clear()
    device_indices.clear()
    _index_cache.clear()
