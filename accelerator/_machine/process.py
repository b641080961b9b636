"""This process: was it forked from one that had the accelerator up, and is the CUDA driver up here.

Everything is a look: nothing is loaded, imported or initialized to answer.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock  # as threading has it, whose import would cost more than all of this file
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

from . import driver  # noqa: E402

# Whether this process was forked from one that had the accelerator up: None until known. Where no hook has seen it, torch may
# know better: it also marks the children of a process that merely counted devices through it, and refuses to work there.
_in_bad_fork: bool | None = None
_seen_before_fork = False

# What modules of this package registered with ``reset_after_fork``.
_resets: list[Callable[[], None]] = []

# Held while a module is imported for the first time: a child forked in between would inherit CPython's own lock of that module,
# held by a thread that is gone, and wait for it for ever. So a fork waits for this one, but not for long; and who imports one
# module after the other passes the gate before each, which a waiting fork shuts.
_importing, _gate = RLock(), RLock()
_FORK_WAITS_S = 0.1

# What the first question opens, each after all that it imports itself, so that none takes long.
_FIRST_IMPORTS = (
    *("collections", "functools", "contextlib", "enum", "re", "typing", "json", "threading", "importlib.util"),
    *("._machine.driver_child", "._machine.grammar", "._machine.discovery_result", "._machine.nvml", "._machine.probe"),
    *("._machine.telemetry", "._machine.torch_build", "._machine.cuda", "._machine.amdsmi", "._machine.rocm"),
    *("._machine.discovery_cache", "._machine.host_memory", "._machine.description", "._machine.device_argument"),
    *("._machine.usability", "._machine.dynamo", ".discovery"),
)

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ACCELERATOR_BACKEND",
)


def torch_device_module() -> Any:
    """torch's module for its accelerator if torch is imported and has one, else None; imports nothing."""
    torch = sys.modules.get("torch")
    accelerator = torch_accelerator_type()
    return getattr(torch, accelerator, None) if accelerator else None


def torch_accelerator_type() -> str | None:
    """The device type of an imported torch's accelerator; None without torch, while it is being imported, or on a CPU build."""
    device = torch_accelerator()
    return None if device is None else device.type


def torch_accelerator() -> Any:
    """An imported torch's accelerator, with a ``type``, else None; the cheapest thing to compare that changes with it."""
    return _get_accelerator()


def _find_torch() -> Any:
    """The same while torch may not be imported yet; once it is, torch's own function takes this one's place."""
    global _get_accelerator
    bindings = sys.modules.get("torch._C")
    if bindings is None or "torch.accelerator" not in sys.modules:
        return None
    of_torch = hasattr(bindings, "_accelerator_exchangeDevice")
    _get_accelerator = bindings._accelerator_getAccelerator if of_torch else _accelerator_before_2_8
    return _get_accelerator()


_get_accelerator: Any = _find_torch


def _accelerator_before_2_8() -> Any:
    # There the binding starts the CUDA runtime to see whether a device is there, which poisons forks.
    torch, bindings = sys.modules["torch"], sys.modules["torch._C"]
    backend: str = bindings._get_privateuse1_backend_name()
    if backend != "privateuseone" and hasattr(torch, backend):
        return torch.device(backend)
    if torch.version.cuda or torch.version.hip:
        return torch.device("cuda")
    return torch.device("xpu") if bindings._has_xpu else torch.device("mps") if bindings._has_mps else None


def is_driver_initialized() -> bool:
    """Whether anything in this process, torch or not, initialized the CUDA driver."""
    return driver.device_count() is not None


def is_initialized() -> bool:
    """Whether torch's accelerator is initialized in this process. The one definition, for all backends.

    torch's module for the accelerator says so. A backend without lazy initialization is initialized when it is loaded and has
    a device.
    """
    module = torch_device_module()
    if module is None:
        return False
    is_initialized = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
    return bool(is_initialized() if is_initialized else module.device_count())


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had the accelerator up."""
    return _read_torch_bad_fork() if _in_bad_fork is None else _in_bad_fork


def _read_torch_bad_fork() -> bool:
    global _in_bad_fork
    module = torch_device_module()
    if module is None:
        return False
    in_bad_fork = getattr(module, "_is_in_bad_fork", None)
    _in_bad_fork = bool(in_bad_fork and in_bad_fork())
    return _in_bad_fork


def python() -> str | None:
    """The executable of Python, to start a child process with; None without one.

    That of a frozen program is the program itself: starting it again would ask again, without an end.
    """
    return None if getattr(sys, "frozen", False) else sys.executable or None


def is_fork_safe() -> bool:
    """Whether a child forked now could use the accelerator."""
    # torch marks children as bad as soon as it has counted devices, even without a driver, so the driver is asked. Accelerators
    # other than CUDA have torch's word only. A backend without a notion of a bad fork survives forks.
    if is_driver_initialized() or is_in_bad_fork():
        return False
    return not (hasattr(torch_device_module(), "_is_in_bad_fork") and is_initialized())


def reset_after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function in each forked child, in the order of registration; usable as a decorator."""
    _resets.append(function)
    return function


def import_public(name: str, package: str) -> Any:
    """The public room of this name, opened if it was not; for those that do not import torch, which no fork can wait for."""
    return import_modules(*_FIRST_IMPORTS, f".{name}", package=package)


def import_modules(*names: str, package: str | None = None) -> Any:
    """Import modules one after the other, and give the last; any may be a first import, and a fork waits for one at most."""
    module: Any = None
    for name in names:
        with _gate:
            pass
        with _importing:
            from importlib import import_module

            module = import_module(name, package)
    return module


def _before_fork() -> None:
    global _seen_before_fork
    until = monotonic() + _FORK_WAITS_S
    _gate.acquire(timeout=_FORK_WAITS_S)
    _importing.acquire(timeout=max(until - monotonic(), 0))
    # Whether a backend without lazy initialization was used, only torch knows, in the child.
    lazy = hasattr(torch_device_module(), "is_initialized")
    _seen_before_fork = is_driver_initialized() or is_in_bad_fork() or (lazy and not is_fork_safe())


def _after_fork_in_parent() -> None:
    _release(_importing)
    _release(_gate)


def _release(lock: Any) -> None:
    try:
        lock.release()
    except RuntimeError:  # this thread did not get it in time
        pass


def _after_fork_in_child() -> None:
    global _in_bad_fork, _importing, _gate
    _importing, _gate = RLock(), RLock()
    _in_bad_fork = _seen_before_fork or None
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


try:
    # The mapping below os.environ spares an encoding and a decoding per variable, which would cost more than all the rest of
    # a repeated question.
    _raw: Any = getattr(os.environ, "_data")  # noqa: B009, unknown to type checkers
    _keys: tuple[Any, ...] = tuple(os.environ.encodekey(name) for name in ENVIRONMENT)
    if _raw.get(os.environ.encodekey("PATH")) != os.environ.encodevalue(os.environ["PATH"]):
        raise AttributeError
except (AttributeError, KeyError):
    _raw, _keys = os.environ, ENVIRONMENT

_CUDA_VISIBLE, _CUDA_ORDER, _HIP_VISIBLE, _ROCR_VISIBLE, _BACKEND = _keys


def environment() -> tuple[Any, ...]:
    """The variables that decide what is visible, as a value to compare."""
    get = _raw.get
    return get(_CUDA_VISIBLE), get(_CUDA_ORDER), get(_HIP_VISIBLE), get(_ROCR_VISIBLE), get(_BACKEND)


def as_mapping(values: tuple[Any, ...]) -> dict[str, str]:
    """The variables that are set, of a value that ``environment`` gave."""
    decode: Any = str if _raw is os.environ else os.environ.decodevalue
    return {name: decode(value) for name, value in zip(ENVIRONMENT, values, strict=True) if value is not None}
