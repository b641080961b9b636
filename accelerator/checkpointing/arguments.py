"""The arguments of a checkpoint between its forward and its backward."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import checks
from .configuration import Settings
from .partition import StoredActivation, changed, store_activation

# Kinds that neither hold a tensor nor change.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class _KeptTensor:
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


class PackedByHook:
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


class _SaveTensors(torch.autograd.Function):
    """Saves tensors as an operation does, for a torch that does not tell which hooks are around it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing flows through what only saves")


class _SavedByAutograd:
    """Tensors that ``_SaveTensors`` saved."""

    __slots__ = ("_output",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # Its node holds what was saved only as long as the output lives.
        self._output: Any = _SaveTensors.apply(anchor, *tensors)

    def restore(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._output.grad_fn.saved_tensors)


class Reference:
    """Stands in a kept structure for the tensor of this number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was edited in place; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


class Arguments:
    """Positional and keyword arguments of any structure; ``restore`` makes them again, as often as asked.

    A tensor or a container that occurs twice is kept once and comes back as one object. Containers are copied, so
    that what caller or function do to theirs is not seen by the recomputation.
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
        hooks_unreadable: bool,
    ) -> None:
        """
        Args:
            hooks: the saved-tensor hooks around the checkpoint.
            inside: those are an outer checkpoint's, which recomputes the arguments: there is nothing to partition.
            hooks_unreadable: it is not known whether there are hooks.
        """
        tensors: dict[int, tuple[torch.Tensor, str]] = {}
        numbers: dict[int, int] = {}

        def put(tensor: torch.Tensor, name: str) -> Reference:
            number = numbers.setdefault(id(tensor), len(numbers))
            tensors.setdefault(id(tensor), (tensor, name))
            return Reference(number)

        seen: dict[int, Any] = {}
        self._args = tuple(map_tensors(item, f"argument {i}", put, seen) for i, item in enumerate(args))
        self._kwargs = {name: map_tensors(item, f"argument {name}", put, seen) for name, item in kwargs.items()}
        self._kept: list[Any] = []
        self._names = [name for _, name in tensors.values()]
        self._saved: _SavedByAutograd | None = None
        # The tensors whose makers may be checkpoints that backward comes to after this one.
        self.links: list[torch.Tensor] = []
        divided = not settings.plain and not inside
        loose: list[torch.Tensor] = []
        position = 0
        try:
            for tensor, _ in tensors.values():
                kept: Any = store_activation(tensor, settings, position, hooks) if divided else None
                if kept is not None:
                    self.links.append(tensor)
                    position += 1
                elif hooks is not None:
                    kept = PackedByHook(tensor, hooks)
                elif hooks_unreadable and not tensor.is_inference():
                    kept = len(loose)
                    loose.append(tensor)
                else:
                    kept = _KeptTensor(tensor)
                self._kept.append(kept)
            if loose:
                self._saved = _SavedByAutograd(loose)
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
            if type(kept) is _KeptTensor:
                kept.settle()

    def start(self) -> None:
        """Begin to bring back what is elsewhere."""
        for kept in self._kept:
            if type(kept) is StoredActivation:
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
            if type(kept) is StoredActivation:
                kept.begin()
        saved = () if self._saved is None else self._saved.restore()
        tensors = [
            saved[kept] if type(kept) is int else kept.restore(name) for kept, name in zip(self._kept, self._names, strict=True)
        ]

        def put(reference: Reference, name: str) -> torch.Tensor:
            return tensors[reference.number]

        seen: dict[int, Any] = {}
        args = tuple(map_tensors(item, "", put, seen) for item in self._args)
        return args, {name: map_tensors(item, "", put, seen) for name, item in self._kwargs.items()}


def tensors_in(item: Any) -> Iterator[torch.Tensor]:
    """The tensors in a structure, as often as they occur in it."""
    found: list[torch.Tensor] = []
    map_tensors(item, "", lambda tensor, name: found.append(tensor))
    return iter(found)


def map_tensors(item: Any, name: str, put: Callable[[Any, str], Any], seen: dict[int, Any] | None = None) -> Any:
    """A structure with something else for each of its tensors, and for each ``Reference``; a structure without is copied too.

    Tuples, lists, dicts, dataclasses and kinds derived from them are looked into; all else is passed on as it is.

    Args:
        item: the structure.
        name: what to call it.
        put: is given a tensor and its name and returns what takes its place.
        seen: copies made so far, by the identity of the original, so that what was one thing stays one.
    """
    kind = type(item)
    if kind in ATOMS:
        return item
    if isinstance(item, (torch.Tensor, Reference)):
        return put(item, name)
    seen = {} if seen is None else seen
    if id(item) in seen:
        return seen[id(item)]
    if isinstance(item, tuple):
        parts = [map_tensors(each, f"{name}[{i}]", put, seen) for i, each in enumerate(item)]
        if all(part is each for part, each in zip(parts, item, strict=True)):
            return item
        # The named tuples that torch's operations return are made like tuples, those of collections past their own maker.
        new: Any = kind(parts) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, parts)
        seen[id(item)] = new
        return new
    if isinstance(item, list):
        seen[id(item)] = new = [] if kind is list else _blank(item)
        new.extend([map_tensors(each, f"{name}[{i}]", put, seen) for i, each in enumerate(item)])
        return new
    if isinstance(item, dict):
        seen[id(item)] = new = {} if kind is dict else _blank(item)
        for key, each in item.items():
            new[key] = map_tensors(each, f"{name}[{key!r}]", put, seen)
        return new
    if dataclasses.is_dataclass(item) and not isinstance(item, (type, torch.nn.Module)):
        seen[id(item)] = new = _blank(item)
        for field in dataclasses.fields(item):
            if hasattr(item, field.name):
                # Past the assignment of the class itself, which a frozen one refuses.
                value = map_tensors(getattr(item, field.name), f"{name}.{field.name}", put, seen)
                object.__setattr__(new, field.name, value)
        return new
    return item


def _blank(item: Any) -> Any:
    """Something of the same kind with the same attributes, past its maker, which may want arguments."""
    kind: Any = type(item)
    new = kind.__new__(kind)
    if hasattr(item, "__dict__"):
        vars(new).update(vars(item))
    if isinstance(item, defaultdict):
        new.default_factory = item.default_factory
    return new
