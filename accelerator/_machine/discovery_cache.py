"""The one found answer of this process: kept with all that it was an answer to, replaced as a whole, never edited."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from . import cuda, driver, probe, process, rocm, torch_build
from .discovery_result import RETRY_AFTER_S, DiscoveredDevice, DiscoveryResult, Failed
from .driver_child import Device

_driver_count = driver.device_count
_torch_accelerator = process.torch_accelerator
_environment = process.environment

# Never found: an object that is equal to no key.
_NO_KEY: Any = object()


class _Entry(NamedTuple):
    """An answer, the key that is compared at each question, the whole key where that takes longer, and until when it holds."""

    key: Any
    whole_key: Any
    until: float
    result: DiscoveryResult


_NO_ENTRY = _Entry(_NO_KEY, _NO_KEY, 0.0, DiscoveryResult(0, None, ""))
_entry = _NO_ENTRY


def current() -> DiscoveryResult:
    """What this process sees."""
    key = _driver_count(), _torch_accelerator(), _environment()
    entry = _entry
    return entry[3] if entry[0] == key else _discover(key)


def _discover(key: tuple[int | None, Any, tuple[Any, ...]]) -> DiscoveryResult:
    """Find out anew, and keep the answer for as long as nothing that it depends on changes."""
    global _entry
    before = _entry
    is_rocm = backend() is rocm
    # ROCm's runtime cannot be asked whether it is up without starting it: torch's word has to do, and costs more.
    whole_key = key, is_rocm and process.is_initialized()
    if before.whole_key == whole_key and time.monotonic() < before.until:
        return before.result
    result = _find(key[0], process.as_mapping(key[2]))
    until = float("inf") if result.is_cacheable else time.monotonic() + RETRY_AFTER_S
    # Not what was asked in an environment that has changed meanwhile, nor over what another thread found since, nor after it
    # was told to forget.
    if _entry is before:
        _entry = _Entry(key if result.is_cacheable and not is_rocm else _NO_KEY, whole_key, until, result)
    return result


def for_environment(env: Mapping[str, str]) -> DiscoveryResult:
    """What a fresh process with another environment would see."""
    accelerator = torch_build.accelerator_type(env)
    return current() if accelerator not in (None, "cuda") else _find_fresh(accelerator, env)


def _find(driver_count: int | None, env: Mapping[str, str]) -> DiscoveryResult:
    accelerator = torch_build.accelerator_type(env)
    if accelerator not in (None, "cuda") or (accelerator and backend() is rocm and process.is_initialized()):
        return _of_torch(accelerator)
    if accelerator and backend() is cuda and driver_count is not None:
        return cuda.from_driver(driver_count)
    return _find_fresh(accelerator, env)


def _find_fresh(accelerator: str | None, env: Mapping[str, str]) -> DiscoveryResult:
    if accelerator is None:
        return DiscoveryResult(0, _no_accelerator(env), "torch's build", is_cacheable=torch_build.is_settled())
    result: DiscoveryResult = backend().discover(env)
    return result


def _of_torch(accelerator: str) -> DiscoveryResult:
    import torch

    module: Any = getattr(torch, accelerator)
    count: int = module.device_count() if hasattr(module, "device_count") else int(module.is_available())
    devices = tuple(DiscoveredDevice(None, None, Device(None, accelerator, None, None, None)) for _ in range(count))
    return DiscoveryResult(count, None if count else f"torch finds no usable {accelerator} device", "torch", devices)


def _no_accelerator(env: Mapping[str, str]) -> str:
    if env.get("ACCELERATOR_BACKEND") == "cpu":
        return "ACCELERATOR_BACKEND=cpu keeps the accelerator out of use; unset it"
    build = torch_build.read()
    if build is None:
        return "torch is not installed in this Python; install it with 'pip install torch'"
    return f"torch {build.version} is a CPU build; install one that is built for the accelerator"


def backend() -> ModuleType:
    """The one that fits torch's build, CUDA's where there is no telling."""
    return rocm if torch_build.is_rocm() else cuda


def physical() -> tuple[ModuleType, tuple[DiscoveredDevice, ...]]:
    """Every GPU and MIG instance of the machine, and the backend that reads them; none where no library lists any."""
    fitting = backend()
    try:
        return fitting, fitting.physical()
    except Failed:
        if not torch_build.fits_no_gpu():
            return fitting, ()
    # Whose GPUs these are torch does not say.
    try:
        return rocm, rocm.physical()
    except Failed:
        return fitting, ()


def clear() -> None:
    """Look anew at the next question."""
    global _entry
    _entry = _NO_ENTRY._replace(whole_key=object())  # another object than any thread that is finding out began with
    probe.clear()
    cuda.clear()
    rocm.clear()


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _entry
    _entry = _NO_ENTRY
