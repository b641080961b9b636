"""The state of this process: whether it has initialized the accelerator, and whether it was forked from one that had.

Nothing here loads a library, imports a module or initializes anything.
"""

from __future__ import annotations

import os
import sys

from . import driver, imports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Why the accelerator cannot be used in a bad fork, and what to do.
BAD_FORK = (
    "this process was forked after its parent had initialized the accelerator, which cannot be used again in the child; "
    "start processes with 'spawn' or 'forkserver', or fork before the accelerator is used"
)

# Whether this process was forked from one that had initialized the accelerator; None if only torch may know. torch also marks
# the children of a process that merely counted devices through it, and refuses to work there.
_in_bad_fork: bool | None = None
_initialized_before_fork = False

# The functions that modules of this package registered with ``reset_after_fork``.
_resets: list[Callable[[], None]] = []


def is_torch_imported() -> bool:
    """Whether torch is imported far enough to have an accelerator; after a failed import some of its modules remain."""
    return "torch.accelerator" in sys.modules and "torch" in sys.modules


def has_torch_import_failed() -> bool:
    """Whether an import of torch failed in this process, which cannot import it a second time: only its parts remain."""
    return "torch._C" in sys.modules and "torch" not in sys.modules


# The type of each accelerator that has its module: torch makes a new string whenever it is asked.
_types: dict[Any, str] = {}


def torch_device_module() -> Any:
    """The module of an imported torch for its accelerator, such as ``torch.cuda``; None without one."""
    device = _get_accelerator()
    if device is None:
        return None
    device_type = _types.get(device) or device.type
    module = getattr(sys.modules.get("torch"), device_type, None)
    if module is not None:
        _types[device] = device_type
    return module


def torch_accelerator_type() -> str | None:
    """The device type of an imported torch's accelerator; None without torch, while it is being imported, or on a CPU build."""
    device = torch_accelerator()
    return None if device is None else device.type


def torch_accelerator() -> Any:
    """An imported torch's accelerator as a ``torch.device``, else None. Cheap enough for the key of a cache."""
    return _get_accelerator()


def _get_accelerator_or_none() -> Any:
    """Return the accelerator of an imported torch, else None. Once torch is imported, its own function replaces this one."""
    global _get_accelerator
    bindings = sys.modules.get("torch._C")
    if bindings is None or not is_torch_imported():
        return None
    is_safe = hasattr(bindings, "_accelerator_exchangeDevice")
    _get_accelerator = bindings._accelerator_getAccelerator if is_safe else _get_accelerator_before_2_8
    return _get_accelerator()


_get_accelerator: Any = _get_accelerator_or_none


def _get_accelerator_before_2_8() -> Any:
    # Before torch 2.8 its own binding starts the CUDA runtime, which breaks fork.
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
    """Whether this process was forked from one that had initialized the accelerator."""
    return _is_in_torch_bad_fork() if _in_bad_fork is None else _in_bad_fork


def _is_in_torch_bad_fork() -> bool:
    global _in_bad_fork
    module = torch_device_module()
    if module is None:
        return False
    in_bad_fork = getattr(module, "_is_in_bad_fork", None)
    _in_bad_fork = bool(in_bad_fork and in_bad_fork())
    return _in_bad_fork


def is_fork_safe() -> bool:
    """Whether a child forked now could use the accelerator."""
    # Once torch has counted devices, it reports a bad fork in every child, even without a driver. So this asks the driver. For
    # accelerators other than CUDA, only torch knows. A backend without a notion of a bad fork survives forks.
    if is_driver_initialized() or is_in_bad_fork():
        return False
    return not (hasattr(torch_device_module(), "_is_in_bad_fork") and is_initialized())


def python() -> str | None:
    """The Python executable to start a child process with; None without one."""
    # The executable of a frozen program is the program itself, which would start itself without end.
    return None if getattr(sys, "frozen", False) else sys.executable or None


def reset_after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function in each forked child, in the order of registration; usable as a decorator."""
    _resets.append(function)
    return function


def _before_fork() -> None:
    global _initialized_before_fork
    imports.before_fork()
    # In the child torch knows whether another accelerator than CUDA was initialized, and whether that matters.
    _initialized_before_fork = is_driver_initialized() or is_in_bad_fork()


def _after_fork_in_child() -> None:
    global _in_bad_fork
    imports.reset_after_fork()
    _in_bad_fork = _initialized_before_fork or None
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=imports.after_fork_in_parent, after_in_child=_after_fork_in_child)
