"""The device module of the accelerator, ``torch.hostacc``."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

library = ctypes.CDLL(os.environ["HOSTACC_LIBRARY"])
library.hostacc_bytes.restype = ctypes.c_longlong

default_generators: tuple[torch.Generator, ...] = ()
_generators: list[torch.Generator] = []


def get_default_generators() -> None:
    """Create ``default_generators``, which older releases of torch do not make accessible."""
    global default_generators
    library.hostacc_hand_out_defaults(1)
    _generators.extend(torch.Generator(torch.device("hostacc", index)) for index in range(device_count()))
    library.hostacc_hand_out_defaults(0)
    default_generators = tuple(_generators)


def is_available() -> bool:
    return True


def device_count() -> int:
    return library.hostacc_device_count()


def is_initialized() -> bool:
    return bool(library.hostacc_is_initialized())


def _is_in_bad_fork() -> bool:
    return bool(library.hostacc_is_in_bad_fork())


def _lazy_init() -> None:
    if library.hostacc_is_in_bad_fork():
        raise RuntimeError("Cannot re-initialize hostacc in forked subprocess")
    library.hostacc_init()


def init() -> None:
    _lazy_init()


def current_device() -> int:
    # torch's binding would initialize the accelerator.
    return library.hostacc_current_device()


def set_device(device: Any) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def _index(device: Any) -> int:
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    return current_device() if index is None else index


class device:
    """A context in which a device is current. torch's checkpoints use it."""

    def __init__(self, device: Any) -> None:
        self._target, self._previous = _index(device), -1

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._target)

    def __exit__(self, *exception: object) -> None:
        set_device(self._previous)


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch's checkpoints read it
        return bool(library.hostacc_is_initialized())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def times_synchronized(device: int) -> int:
    """Return how often torch has synchronized a device."""
    return library.hostacc_synchronized(device)


def get_device_name(device: Any = None) -> str:
    return f"Host accelerator {_index(device)}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_rng_state(device: Any = "hostacc") -> torch.Tensor:
    return _generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "hostacc") -> None:
    _generators[_index(device)].set_state(new_state)


def manual_seed(seed: int) -> None:
    _generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in _generators:
        generator.manual_seed(seed)


def seed() -> None:
    _generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return _generators[current_device()].initial_seed()


def memory_allocated(device: Any = None) -> int:
    return library.hostacc_bytes(_index(device), 0)


def max_memory_allocated(device: Any = None) -> int:
    return library.hostacc_bytes(_index(device), 1)


def memory_reserved(device: Any = None) -> int:
    return library.hostacc_bytes(_index(device), 2)


def max_memory_reserved(device: Any = None) -> int:
    return library.hostacc_bytes(_index(device), 3)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = library.hostacc_bytes(_index(device), 4)
    return total - memory_reserved(device), total


def reset_peak_memory_stats(device: Any = None) -> None:
    library.hostacc_reset(_index(device), 1)


def empty_cache() -> None:
    library.hostacc_empty_cache()
