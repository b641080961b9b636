"""DeepSpeed's accelerator object: this package's functions by their names, and what DeepSpeed expects otherwise."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["supports_nvtx_domain", "use_in_deepspeed"]

supports_nvtx_domain = True
"""Whether ``range_push`` and ``range_pop`` take a domain. DeepSpeed reads this."""


def use_in_deepspeed() -> None:
    """Make DeepSpeed use this package in place of its own accelerator object.

    Call it before ``deepspeed.initialize()``. ``deepspeed.accelerator.get_accelerator()`` then returns an object that forwards
    every name to this package. Its methods take DeepSpeed's arguments: the keyword ``device_index``, and an index as a str of
    digits. Under the CPU fallback it is available and has one device for each rank of this machine, as DeepSpeed's object for
    the CPU.

    Raises:
        ImportError: if DeepSpeed is not installed.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("deepspeed"):
        ...     acc.use_in_deepspeed()
    """
    try:
        deepspeed: Any = importlib.import_module("deepspeed.accelerator")
    except ImportError as error:
        raise ImportError(f"use_in_deepspeed() needs DeepSpeed, which cannot be imported: {error}") from error
    deepspeed.set_accelerator(_subclass(deepspeed.DeepSpeedAccelerator)())


def _subclass(abstract: Any) -> Any:
    """Return a subclass of DeepSpeed's abstract class that implements its methods with this package's functions."""
    namespace: dict[str, Any] = {}
    for name in dir(abstract):
        # DeepSpeed's own pinning functions track the memory that DeepSpeed pins. They call the hooks of _Overrides.
        if name.startswith("_") or hasattr(_Overrides, name) or (name in _PINNING and name not in abstract.__abstractmethods__):
            continue
        method = getattr(abstract, name)
        takes_index = inspect.isfunction(method) and "device_index" in inspect.signature(method).parameters
        namespace[name] = _with_index(name) if takes_index else _forwarded(name)
    return type(abstract)("Accelerator", (_Overrides, abstract), namespace)


_PINNING = ("is_pinned", "pin_empty", "pin_empty_like", "pin_memory", "unpin_memory")


def _package() -> Any:
    return importlib.import_module(__package__ or "")


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(_package(), name))


def _with_index(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if "device_index" in keywords:
            arguments = (*arguments, keywords.pop("device_index"))
        return getattr(_package(), name)(*map(_read_index, arguments), **keywords)

    method.__name__ = name
    return method


def _read_index(argument: Any) -> Any:
    return int(argument) if isinstance(argument, str) and argument.isdecimal() else argument


class _Overrides:
    """Methods that differ from this package's functions."""

    def __init__(self) -> None:
        super().__init__()
        self._name = _package()._name
        self._communication_backend_name = _package().communication_backend_name()
        self._compile_backend = _package().get_compile_backend()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_package(), name)

    def is_available(self) -> bool:
        """Whether there is a device to train on; under the CPU fallback that is the CPU."""
        return _package().device_count() == 0 or _package().is_available()

    def device_count(self) -> int:
        """The number of devices; under the CPU fallback, the number of ranks on this machine."""
        ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        return _package().device_count() or max(1, int(ranks))

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder; on the CPU, if there is none, DeepSpeed's class whose ``load`` raises ValueError."""
        builder = _package().get_op_builder(class_name)
        if builder is None and _package().device_count() == 0:
            return getattr(importlib.import_module(_package().op_builder_dir()), "NotImplementedBuilder", None)
        return builder

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def create_graph(self) -> Any:
        """A graph; None under the CPU fallback, where DeepSpeed runs the work of a graph instead of capturing it."""
        return _package().create_graph() if _package().device_count() else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return nullcontext() if graph is None else _package().capture_to_graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            _package().replay_graph(graph)

    @property
    def _torch_pins_host_memory(self) -> bool:
        return _package().device_count() > 0

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return _package().pin_memory(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return _package().pin_empty(shape, dtype=tensor.dtype)

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return _package().is_pinned(tensor)
