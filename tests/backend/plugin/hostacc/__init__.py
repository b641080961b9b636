"""A plug-in of torch that registers the accelerator of ``hostacc.cpp`` when it is imported or when torch loads its entry point.

``HOSTACC_LIBRARY`` is the path of the compiled library. ``HOSTACC_SWITCHES`` lists features to remove, and
other changes, separated by commas:

- ``no-generators``: the accelerator has no generators. Random ops use the CPU's.
- ``hidden-generators``: only the functions of the module, such as ``get_rng_state``, use the generators.
- ``no-memory``: neither torch nor the module reports figures of memory.
- ``module-memory``: only the functions of the module report figures of memory.
- ``no-is_initialized``: the module has no lazy initialization.
- ``no-streams``: torch cannot create streams and events.
- ``bad-fork``: a child of a process that initialized the accelerator cannot use it.
"""

from __future__ import annotations

import os

import torch

from . import device

_BITS = {"no-generators": 1, "no-memory": 2, "module-memory": 2, "no-streams": 4, "bad-fork": 8, "hidden-generators": 16}
_GENERATORS = ("default_generators",)
_RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed")
_REMOVED = {
    "no-generators": (*_GENERATORS, *_RANDOM),
    "hidden-generators": _GENERATORS,
    "no-memory": (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info"),
        *("reset_peak_memory_stats", "empty_cache"),
    ),
    "no-is_initialized": ("is_initialized", "init", "_lazy_init"),
}


def load() -> None:
    """Do nothing: the import registers the accelerator."""


def _register(switches: list[str]) -> None:
    unknown = set(switches) - {*_BITS, *_REMOVED}
    if unknown:
        raise ValueError(f"unknown switches: {unknown}")
    device.library.hostacc_register(sum({_BITS.get(switch, 0) for switch in switches}))
    torch.utils.rename_privateuse1_backend("hostacc")
    torch._register_device_module("hostacc", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    if "no-generators" not in switches:
        device.get_default_generators()
    if "bad-fork" not in switches:
        del device._is_in_bad_fork
    for switch in switches:
        for name in _REMOVED.get(switch, ()):
            delattr(device, name)


_register(list(filter(None, os.environ.get("HOSTACC_SWITCHES", "").split(","))))
