"""Cache of the discovery result, keyed by everything the result depends on, and its discovery.

The backends discover CUDA's and ROCm's devices. This module discovers those of other accelerators, which only torch knows, says
why a CPU build has none, and remembers a failed initialization.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import (
    child_process,
    cuda,
    driver,
    driver_probe,
    limits,
    process,
    rocm,
    torch_build,
    torch_probe,
    torch_runtime,
    vendors,
    visibility_variables,
)
from .discovery_result import Backend, DiscoveredDevice, DiscoveryResult, Failed, ListedDevices
from .driver_child import DriverDevice

_driver_count = driver.device_count
_torch_accelerator = process.torch_accelerator
_environment = visibility_variables.snapshot

# Equal to no key.
_NO_KEY: Any = object()

_CPU_CHOSEN = "ACCELERATOR_BACKEND=cpu disables the accelerator; unset it"

# Whether ACCELERATOR_BACKEND chose the CPU at the latest discovery, None before the first; and whether that is frozen because
# the accelerator is initialized.
_cpu_choice: tuple[bool | None, bool] = None, False

# Why a runtime function of this package could not initialize the accelerator. torch does not remember its own failures.
_failure: str | None = None


class _Entry(NamedTuple):
    """A result, the key that each query compares, the full key if that takes longer to read, and the time of expiry."""

    key: Any
    full_key: Any
    expires: float
    result: DiscoveryResult


_NO_ENTRY = _Entry(_NO_KEY, _NO_KEY, 0.0, DiscoveryResult(0, None, "", environment={}))
_entry = _NO_ENTRY

# Held while the entry is replaced. Re-entrant, because a signal handler may interrupt a query that holds it.
_lock = threading.RLock()


def current() -> DiscoveryResult:
    """The devices that this process sees."""
    key = _driver_count(), _torch_accelerator(), _environment()
    entry_key, _, _, result = _entry
    return result if entry_key == key else _discover(key)


def _discover(key: tuple[int | None, Any, list[Any]]) -> DiscoveryResult:
    """Discover again, and cache the result for as long as its key stays the same."""
    global _entry
    before = _entry
    # CUDA's driver reports at no cost whether it is initialized. For other accelerators, and after a failure, only torch does,
    # which takes longer.
    depends_on_torch = backend() is rocm or (key[1] is not None and key[1].type != "cuda") or _failure is not None
    full_key = key, depends_on_torch and process.is_initialized()
    if before.full_key == full_key and time.monotonic() < before.expires:
        return before.result
    result = _discover_now(key[0], visibility_variables.as_mapping(key[2]))
    expires = float("inf") if result.is_cacheable else time.monotonic() + limits.RETRY_AFTER_S
    entry = _Entry(key if result.is_cacheable and not depends_on_torch else _NO_KEY, full_key, expires, result)
    with _lock:
        # Another thread may have stored a newer result, or cleared the cache.
        if _entry is before:
            _entry = entry
    return result


def for_environment(env: Mapping[str, str]) -> DiscoveryResult:
    """The devices that a fresh process with another environment would see."""
    if _chooses_cpu(env):
        return _without_accelerator(_CPU_CHOSEN, env)
    accelerator = torch_build.accelerator_type()
    if accelerator is None:
        return _without_accelerator(_cpu_build(), env)
    if accelerator == "cuda":
        return backend().discover(env)
    row = vendors.get_row(accelerator)
    is_alike = all(env.get(name) == os.environ.get(name) for name in row.visible_devices)
    # The other process neither inherits this one's choice of the CPU, nor its failure, nor what it has initialized.
    if is_alike and not (_chooses_cpu(os.environ) or _failure or process.is_initialized()):
        return current()
    try:
        probed = torch_probe.run({name: env.get(name) for name in row.visible_devices})
    except child_process.NotStarted as error:
        return _result_of_torch(accelerator, (), env, str(error))
    return _result_of_torch(accelerator, probed.devices, env, probed.error)


def _discover_now(driver_count: int | None, env: Mapping[str, str]) -> DiscoveryResult:
    if _is_cpu_chosen(env):
        return _without_accelerator(_CPU_CHOSEN, env)
    accelerator = torch_build.accelerator_type()
    if accelerator is None:
        return _without_accelerator(_cpu_build(), env)
    if _failure and not process.is_initialized():
        return DiscoveryResult(0, _failure, "torch's initialization", environment=env, accelerator_type=accelerator)
    if accelerator != "cuda":
        return _from_torch(accelerator, env)
    used = backend()
    if used is rocm and process.is_initialized():
        return rocm.from_torch(process.torch_device_module(), env)
    if used is cuda and driver_count is not None:
        return cuda.from_driver(driver_count, env)
    return used.discover(env)


def _is_cpu_chosen(env: Mapping[str, str]) -> bool:
    """Whether ACCELERATOR_BACKEND chooses the CPU in this process; the variable changes nothing after initialization."""
    global _cpu_choice
    before, is_frozen = _cpu_choice
    is_initialized = process.is_initialized()
    if is_frozen and is_initialized:
        return bool(before)
    # If the latest query before initialization saw the accelerator, the variable was set too late.
    is_chosen = _chooses_cpu(env) and not (is_initialized and before is False)
    _cpu_choice = is_chosen, is_initialized
    return is_chosen


def _chooses_cpu(env: Mapping[str, str]) -> bool:
    return env.get("ACCELERATOR_BACKEND") == "cpu"


def _from_torch(accelerator: str, env: Mapping[str, str]) -> DiscoveryResult:
    """The devices of an accelerator that only torch knows, from the imported torch or from a child process."""
    module = process.torch_device_module()
    can_count = process.is_initialized() or not vendors.get_row(accelerator).counting_may_initialize
    if module is not None and can_count:
        return _of_imported_torch(module, accelerator, env)
    try:
        probed = torch_probe.run()
    except child_process.NotStarted as error:
        return _result_of_torch(accelerator, (), env, str(error))
    return _result_of_torch(accelerator, probed.devices, env, probed.error)


def _of_imported_torch(module: Any, accelerator: str, env: Mapping[str, str]) -> DiscoveryResult:
    count = torch_runtime.device_count(module)
    if not process.is_initialized():
        return _result_of_torch(accelerator, (DriverDevice(None, accelerator, None, None, None),) * count, env)

    # Runtime functions need the count only, and some backends lack the functions that describe a device.
    def devices() -> tuple[tuple[DiscoveredDevice, ...], bool]:
        described = (torch_runtime.describe(module, accelerator, index) for index in range(count))
        return tuple(DiscoveredDevice(None, None, device, index) for index, device in enumerate(described)), True

    return _counted_by_torch(accelerator, count, devices, env)


def _result_of_torch(
    accelerator: str, devices: tuple[DriverDevice, ...], env: Mapping[str, str], error: str | None = None
) -> DiscoveryResult:
    discovered = tuple(DiscoveredDevice(None, None, device) for device in devices)
    return _counted_by_torch(accelerator, len(devices), discovered, env, error)


def _counted_by_torch(
    accelerator: str, count: int, devices: ListedDevices, env: Mapping[str, str], error: str | None = None
) -> DiscoveryResult:
    problem = None if count else error or f"torch finds no usable {accelerator} device"
    return DiscoveryResult(
        *(count, problem, "torch", devices), environment=env, accelerator_type=accelerator, is_cacheable=error is None
    )


def _without_accelerator(problem: str, env: Mapping[str, str]) -> DiscoveryResult:
    # Whether torch can be imported depends on more than the key.
    is_cacheable = torch_build.is_known() and torch_build.import_error() is None
    return DiscoveryResult(0, problem, "torch's build", environment=env, is_cacheable=is_cacheable)


def _cpu_build() -> str:
    build = torch_build.read()
    if import_error := torch_build.import_error():
        return f"torch cannot be imported: {import_error}"
    if build is None and (error := torch_build.read_error()):
        return f"whether torch is installed is unknown: {getattr(error, 'strerror', None) or error}"
    if build is None and (path := torch_build.hiding_file()):
        return torch_build.HIDDEN.format(path)
    if build is None:
        return "torch is not installed in this Python; install it with 'pip install torch'"
    return f"torch {build.version} is a CPU build; install one that is built for the accelerator"


def backend() -> Backend:
    """The discovery backend that fits torch's build; CUDA's if the build does not say."""
    return rocm if torch_build.is_rocm() else cuda


def physical() -> tuple[Backend, tuple[DiscoveredDevice, ...]]:
    """Every GPU and MIG instance of the machine, and the backend that reads them; none if no library lists any."""
    preferred = backend()
    try:
        return preferred, preferred.physical()
    except Failed:
        if not torch_build.fits_no_gpu():
            return preferred, ()
    # torch does not say whose GPUs these are.
    try:
        return rocm, rocm.physical()
    except Failed:
        return preferred, ()


def record_failed_initialization(error: Exception) -> None:
    """Remember why torch could not initialize the accelerator. Nothing tries to in a bad fork."""
    global _failure
    # torch's message continues with advice, or with the traceback of a queued call.
    cause = str(error).strip().partition("\n")[0].rstrip(".")
    _failure = f"torch could not initialize the accelerator in this process: {cause}; refresh() allows another attempt"
    _drop_entry()


def _drop_entry() -> None:
    global _entry
    with _lock:
        # A new object, so that a thread that is discovering now does not store its result.
        _entry = _NO_ENTRY._replace(full_key=object())


def clear() -> None:
    """Discover again at the next query."""
    global _failure
    _failure = None
    _drop_entry()
    torch_build.clear()
    driver_probe.clear()
    cuda.clear()
    rocm.clear()


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _entry, _cpu_choice, _failure, _lock
    _entry, _cpu_choice, _failure, _lock = _NO_ENTRY, (None, False), None, threading.RLock()
