"""The default generator of a device; if torch has none (a vendor's accelerator), one that calls the vendor's functions."""

from __future__ import annotations

from typing import Any

import torch

from .._machine import process
from .._machine.discovery_result import NotSupported
from . import bindings


class ModuleGenerator:
    """The generator of a device for which torch has no object. It calls the functions of the accelerator's module.

    It has the methods of a ``torch.Generator`` that random functions call.
    """

    def __init__(self, device_type: str, index: int) -> None:
        self.device = torch.device(device_type, index)
        self._module = getattr(torch, device_type)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._call("get_rng_state", self.device)
        return state

    def set_state(self, new_state: torch.Tensor) -> None:
        self._call("set_rng_state", new_state, self.device)

    def initial_seed(self) -> int:
        return int(self._on_device("initial_seed"))

    def manual_seed(self, seed: int) -> None:
        self._on_device("manual_seed", seed)

    def seed(self) -> int:
        """Seed the device randomly and return the seed."""
        seed = torch.Generator().seed()
        self.manual_seed(seed)
        return seed

    def _on_device(self, name: str, *arguments: Any) -> Any:
        # These functions act on the current device. Before initialization that is device 0, and a change of the device would
        # initialize the accelerator.
        if self.device.index == 0 and not process.is_initialized():
            return self._call(name, *arguments)
        previous = bindings.exchange_index(self.device.index)
        try:
            return self._call(name, *arguments)
        finally:
            bindings.restore_index(previous)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._module, name, None) or getattr(getattr(self._module, "random", None), name, None)
        if function is None:
            raise NotSupported(
                f"torch {torch.__version__} has no generator of {self.device} and no torch.{self.device.type}.{name}()"
            )
        return function(*arguments)


def seed_all(device_type: str, count: int, seed: int) -> None:
    """Seed the generators of all devices.

    If only the accelerator's module knows them, this calls its ``manual_seed_all``. Its functions for one device act on the
    current device, and before initialization only the first device can be the current one.
    """
    all_generators = [find_generator(device_type, index) for index in range(count)]
    of_module = getattr(getattr(torch, device_type), "manual_seed_all", None)
    if of_module and any(isinstance(generator, ModuleGenerator) for generator in all_generators):
        of_module(seed)
    else:
        for generator in all_generators:
            generator.manual_seed(seed)


def default_generator(device_type: str, index: int) -> torch.Generator:
    """Return the default generator of an initialized device, or the CPU's.

    Raises:
        NotSupported: if torch has no generator of the device.
    """
    generator = find_generator(device_type, index)
    if isinstance(generator, ModuleGenerator):
        raise NotSupported(f"torch {torch.__version__} has no generator of {device_type}:{index}")
    return generator


def find_generator(device_type: str, index: int) -> torch.Generator | ModuleGenerator:
    """Return the default generator of an initialized device, or an object that acts on it through torch's module."""
    if device_type == "cpu":
        return torch.default_generator
    module = getattr(torch, device_type)
    generators = getattr(module, "default_generators", ())
    generator: torch.Generator | None = generators[index] if index < len(generators) else None
    # The binding initializes the accelerator. Its module's own functions need not.
    is_lazy = hasattr(module, "get_rng_state") and not process.is_initialized()
    if generator is None and bindings.default_generator is not None and not is_lazy:
        try:
            generator = bindings.default_generator(index)
        except RuntimeError:  # the backend does not give torch its generators
            generator = None
    if generator is None and device_type == "mps":
        generator = bindings.mps_generator()
    return ModuleGenerator(device_type, index) if generator is None else generator
