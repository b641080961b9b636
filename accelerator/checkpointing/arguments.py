"""The arguments of a checkpoint between its forward and its backward."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from . import checks
from .configuration import Settings
from .partition import Share, changed, share

# What is looked into for tensors; everything else is passed on as it is.
CONTAINERS = (tuple, list, dict)


class _Held:
    """A tensor that is kept as it is: what the function gets again is the very same object."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = version(tensor)

    def restore(self, position: str) -> torch.Tensor:
        tensor = self._tensor
        if tensor is None or version(tensor) != self._version:
            raise RuntimeError(changed(position))
        return tensor

    def settle(self) -> None:
        """Let go of a tensor that the function itself edited: its history leads through the checkpoint by now, which
        would so keep itself alive."""
        if self._tensor is not None and version(self._tensor) != self._version:
            self._tensor = None


class _Handed:
    """A tensor that went through the saved-tensor hooks around the checkpoint, an outer checkpoint's for instance."""

    __slots__ = ("_packed", "_requires_grad", "_unpack")

    def __init__(self, tensor: torch.Tensor, hooks: tuple[Any, Any]) -> None:
        self._requires_grad = tensor.requires_grad
        self._unpack = hooks[1]
        self._packed = hooks[0](tensor)

    def restore(self, position: str) -> torch.Tensor:
        tensor: torch.Tensor = self._unpack(self._packed)
        if tensor.requires_grad != self._requires_grad:
            tensor = tensor.detach().requires_grad_(self._requires_grad)
        return tensor


class _Saver(torch.autograd.Function):
    """Saves tensors as an operation does, for a torch that does not tell which hooks are around it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing flows through what only saves")


class _Saved:
    """Tensors that ``_Saver`` saved."""

    __slots__ = ("_output",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # Its node holds what was saved only as long as the output lives.
        self._output: Any = _Saver.apply(anchor, *tensors)

    def restore(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._output.grad_fn.saved_tensors)


class _Reference:
    """Stands in a kept structure for the tensor of this number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was edited in place; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


class Arguments:
    """Positional and keyword arguments of any structure; ``restore`` makes them again, as often as asked.

    A tensor that occurs twice is kept once and comes back as one object. Tuples, lists and dicts are copied, so that what
    caller or function do to theirs is not seen by the recomputation.
    """

    __slots__ = ("_args", "_kept", "_kwargs", "_names", "_saved", "links")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        hooks: tuple[Any, Any] | None,
        *,
        inside: bool,
        blind: bool,
    ) -> None:
        """
        Args:
            hooks: the saved-tensor hooks around the checkpoint.
            inside: those are an outer checkpoint's, which recomputes the arguments: there is nothing to partition.
            blind: it is not known whether there are hooks.
        """
        tensors: dict[int, tuple[torch.Tensor, str]] = {}
        numbers: dict[int, int] = {}
        self._args = tuple(_take(item, f"argument {i}", tensors, numbers) for i, item in enumerate(args))
        self._kwargs = {name: _take(item, f"argument {name}", tensors, numbers) for name, item in kwargs.items()}
        self._kept: list[Any] = []
        self._names = [name for _, name in tensors.values()]
        self._saved: _Saved | None = None
        # The tensors whose makers may be checkpoints that backward comes to after this one.
        self.links: list[torch.Tensor] = []
        divided = not settings.plain and not inside
        loose: list[torch.Tensor] = []
        position = 0
        try:
            for tensor, _ in tensors.values():
                kept: Any = share(tensor, settings, position, hooks) if divided else None
                if kept is not None:
                    self.links.append(tensor)
                    position += 1
                elif hooks is not None:
                    kept = _Handed(tensor, hooks)
                elif blind and not tensor.is_inference():
                    kept = len(loose)
                    loose.append(tensor)
                else:
                    kept = _Held(tensor)
                self._kept.append(kept)
            if loose:
                self._saved = _Saved(loose)
        except BaseException:
            # The traceback keeps this frame alive; the slots taken so far must not wait for it.
            self._kept.clear()
            raise
        if divided and settings.debug:
            checks.same_on_all_ranks([(t, name) for t, name in tensors.values()], settings)

    def settle(self) -> None:
        """To be called when the forward is done."""
        self.links = []
        for kept in self._kept:
            if type(kept) is _Held:
                kept.settle()

    def start(self) -> None:
        """Begin to bring back what is elsewhere."""
        for kept in self._kept:
            if type(kept) is Share:
                kept.start()

    def release(self) -> None:
        """Let go of everything."""
        self._kept.clear()

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments.

        Raises:
            RuntimeError: if one was edited in place, or the group it was partitioned over is gone.
        """
        for kept in self._kept:
            if type(kept) is Share:
                kept.begin()
        saved = () if self._saved is None else self._saved.restore()
        tensors = [
            saved[kept] if type(kept) is int else kept.restore(name) for kept, name in zip(self._kept, self._names, strict=True)
        ]
        args = tuple(_give(item, tensors) for item in self._args)
        return args, {name: _give(item, tensors) for name, item in self._kwargs.items()}


def _take(item: Any, name: str, tensors: dict[int, tuple[torch.Tensor, str]], numbers: dict[int, int]) -> Any:
    """An argument with references for its tensors, which are collected by identity."""
    if isinstance(item, torch.Tensor):
        key = id(item)
        if key not in numbers:
            numbers[key] = len(tensors)
            tensors[key] = (item, name)
        return _Reference(numbers[key])
    kind = type(item)
    if kind is list:
        return [_take(each, f"{name}[{i}]", tensors, numbers) for i, each in enumerate(item)]
    if kind is dict or kind is OrderedDict:
        return kind((key, _take(each, f"{name}[{key!r}]", tensors, numbers)) for key, each in item.items())
    if kind is tuple:
        return tuple(_take(each, f"{name}[{i}]", tensors, numbers) for i, each in enumerate(item))
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return kind(*(_take(each, f"{name}[{i}]", tensors, numbers) for i, each in enumerate(item)))
    return item


def _give(item: Any, tensors: list[torch.Tensor]) -> Any:
    """The reverse of ``_take``."""
    kind = type(item)
    if kind is _Reference:
        return tensors[item.number]
    if kind is list:
        return [_give(each, tensors) for each in item]
    if kind is dict or kind is OrderedDict:
        return kind((key, _give(each, tensors)) for key, each in item.items())
    if kind is tuple:
        return tuple(_give(each, tensors) for each in item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return kind(*(_give(each, tensors) for each in item))
    return item
