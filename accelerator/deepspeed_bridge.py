"""Other libraries that have an idea of an accelerator of their own, on this module's functions."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["use_in_deepspeed"]


def use_in_deepspeed() -> None:
    """Have DeepSpeed use this module in place of its own accelerator from now on.

    What ``deepspeed.accelerator.get_accelerator()`` returns then forwards every name to this module. It takes arguments as
    DeepSpeed's own does (``device_index=``, the index as a string of digits) and answers what DeepSpeed means by a question:
    where the CPU stands in, it is available, has a device for each rank of this machine, and any of them can be set. Call it
    before ``deepspeed.initialize()``.

    Raises:
        ImportError: if DeepSpeed is not installed.

    Fork: safe, initializes nothing; importing DeepSpeed does what DeepSpeed does then.

    Example:
        >>> import accelerator as acc, importlib.util
        >>> if importlib.util.find_spec("deepspeed"):
        ...     acc.use_in_deepspeed()
    """
    try:
        deepspeed: Any = importlib.import_module("deepspeed.accelerator")
    except ImportError as error:
        raise ImportError(f"use_in_deepspeed() needs DeepSpeed, which cannot be imported: {error}") from error
    deepspeed.set_accelerator(_subclass(deepspeed.DeepSpeedAccelerator)())


def _subclass(abstract: Any) -> Any:
    """DeepSpeed's abstract class with everything that it leaves open filled in from here."""
    namespace: dict[str, Any] = {}
    for name in dir(abstract):
        # Its own pinning asks the hooks below, and keeps what it knows of memory that DeepSpeed pins itself.
        if name.startswith("_") or hasattr(_Meant, name) or (name in _PINNING and name not in abstract.__abstractmethods__):
            continue
        method = getattr(abstract, name)
        takes_index = inspect.isfunction(method) and "device_index" in inspect.signature(method).parameters
        namespace[name] = _with_index(name) if takes_index else _forwarded(name)
    return type(abstract)("Accelerator", (_Meant, abstract), namespace)


_PINNING = ("is_pinned", "pin_empty", "pin_empty_like", "pin_memory", "unpin_memory")


def _ours() -> Any:
    return importlib.import_module(__package__ or "")


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(_ours(), name))


def _with_index(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if "device_index" in keywords:
            arguments = (*arguments, keywords.pop("device_index"))
        return getattr(_ours(), name)(*map(_read_index, arguments), **keywords)

    method.__name__ = name
    return method


def _read_index(argument: Any) -> Any:
    return int(argument) if isinstance(argument, str) and argument.isdecimal() else argument


class _Meant:
    """What DeepSpeed means otherwise than this module."""

    def __init__(self) -> None:
        super().__init__()
        self._name = _ours()._name
        self._communication_backend_name = _ours().communication_backend_name()
        self._compile_backend = _ours().get_compile_backend()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(_ours(), name)

    def is_available(self) -> bool:
        """Whether there is anything to train on, which the CPU is."""
        return _ours().device_count() == 0 or _ours().is_available()

    def device_count(self) -> int:
        """How many devices the ranks of this machine have; the CPU is one for each."""
        ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        return _ours().device_count() or max(1, int(ranks))

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder; for the CPU also the one that says, when it is asked to build, that there is none."""
        found = _ours().get_op_builder(class_name)
        if found is None and _ours().device_count() == 0:
            return getattr(importlib.import_module(_ours().op_builder_dir()), "NotImplementedBuilder", None)
        return found

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    @property
    def _torch_pins_host_memory(self) -> bool:
        return _ours().device_count() > 0

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return _ours().pin_memory(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return _ours().pin_empty(shape, dtype=tensor.dtype)

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return _ours().is_pinned(tensor)
