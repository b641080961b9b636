"""Storage of a checkpoint's arguments between forward and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import bindings, debug_checks
from .configuration import Settings
from .containers import ATOMS, devices_of, map_tensors, tensors_in
from .partition import StoredActivation, edited_in_place, store_activation

# The (pack, unpack) pair of torch.autograd.graph.saved_tensors_hooks.
Hooks = tuple[Any, Any]


def keep_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, outer_hooks: Hooks | None, *, nested: bool
) -> KeptArguments | StoredArguments:
    """Keep the arguments of a checkpoint for its recomputation.

    Args:
        outer_hooks: the saved-tensor hooks around the checkpoint, or None.
        nested: whether these hooks belong to an outer checkpoint. That checkpoint recomputes the arguments, so they are
            neither partitioned nor offloaded.
    """
    if settings.keeps_arguments and outer_hooks is None and bindings.innermost_hooks is not None:
        return KeptArguments(args, kwargs)
    return StoredArguments(args, kwargs, settings, outer_hooks, nested=nested)


# A tensor that has a version, which one of inference mode has not; its version when the checkpoint started, and its name.
_Watched = tuple[torch.Tensor, int, str]


def _edited_name(watched: list[_Watched]) -> str | None:
    """Return the name of the first tensor that was edited in place, None if none was."""
    for tensor, version, name in watched:
        if tensor._version != version:
            return name
    return None


class KeptArguments:
    """Arguments whose tensors are stored by reference.

    Containers are copied, so that the recomputation does not see later edits by the caller or the function.
    """

    __slots__ = ("_args", "_edited", "_has_containers", "_kwargs", "_watched", "devices")

    # As ``StoredArguments.stored``: no tensor is partitioned or offloaded.
    stored: tuple[torch.Tensor, ...] = ()

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watched: list[_Watched] = []
        # The name of an argument that the function edited in its forward, or None.
        self._edited: str | None = None

        # The loop handles tensors and atoms. Containers and keyword arguments take the slower path below.
        self._has_containers = bool(kwargs)
        self.devices: set[torch.device] = set()
        for i, item in enumerate(args):
            if isinstance(item, torch.Tensor):
                if not item.is_inference():
                    self._watched.append((item, item._version, f"argument {i}"))
                if not item.is_cpu:
                    self.devices.add(item.device)
            elif type(item) not in ATOMS:
                self._has_containers = True
        self._args, self._kwargs = args, kwargs
        if self._has_containers:
            self._watched.clear()
            self._args, self._kwargs = _map_arguments(args, kwargs, self._watch)
            self.devices = devices_of(tensors_in((args, kwargs)))

    def _watch(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not tensor.is_inference():
            self._watched.append((tensor, tensor._version, name))
        return tensor

    def forward_ended(self) -> None:
        """Release the arguments if the function edited one in place. Backward then raises an error.

        The graph of the edited tensor refers to this checkpoint, so storing the tensor would be a reference cycle.
        """
        self._edited = _edited_name(self._watched)
        if self._edited is not None:
            self.release()

    def release(self) -> None:
        """Release all tensors."""
        self._watched, self._args, self._kwargs = [], (), {}

    def prefetch(self) -> None:
        """Do nothing, because the tensors are still on their devices."""

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments.

        Raises:
            RuntimeError: if one was edited in place.
        """
        edited = self._edited or _edited_name(self._watched)
        if edited is not None:
            raise RuntimeError(edited_in_place(edited))
        if not self._has_containers:
            return self._args, self._kwargs
        # Containers are copied again, so that the next recomputation does not see edits by this one.
        return _map_arguments(self._args, self._kwargs, lambda tensor, name: tensor)


def _map_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[Any, str], Any], leaf: type = torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    copies: dict[int, Any] = {}
    return (
        tuple([map_tensors(item, f"argument {i}", replace, copies, leaf) for i, item in enumerate(args)]),
        {name: map_tensors(item, f"argument {name}", replace, copies, leaf) for name, item in kwargs.items()},
    )


class _KeptTensor:
    """A tensor that is stored by reference."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        # None for a tensor of inference mode, which has no version.
        self._version = None if tensor.is_inference() else tensor._version

    def _was_edited(self) -> bool:
        return self._tensor is None or (self._version is not None and self._tensor._version != self._version)

    def restore(self, name: str) -> torch.Tensor:
        if self._tensor is None or self._was_edited():
            raise RuntimeError(edited_in_place(name))
        return self._tensor

    def forward_ended(self) -> None:
        """Release the tensor if the function edited it in place, as ``KeptArguments.forward_ended`` does."""
        if self._was_edited():
            self._tensor = None


class PackedByHook:
    """A tensor that is packed by the saved-tensor hooks around the checkpoint, such as those of an outer checkpoint."""

    __slots__ = ("_packed", "_requires_grad", "_unpack")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        self._requires_grad = tensor.requires_grad
        self._unpack = hooks[1]
        self._packed = hooks[0](tensor)

    def restore(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._unpack(self._packed)
        if tensor.requires_grad != self._requires_grad:
            tensor = tensor.detach().requires_grad_(self._requires_grad)
        return tensor


class _SaveTensors(torch.autograd.Function):
    """An operation that only saves tensors, so that autograd packs them: for torch 2.6, which does not report its hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this operation only saves tensors and has no gradient")


class _SavedByAutograd:
    """Tensors that ``_SaveTensors`` saved."""

    __slots__ = ("_output",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # The output keeps the saved tensors alive.
        self._output: Any = _SaveTensors.apply(anchor, *tensors)

    def restore(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._output.grad_fn.saved_tensors)


class _Reference:
    """Replaces a tensor in the stored containers by its index in ``StoredArguments._tensors``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class StoredArguments:
    """Arguments with tensors that may be partitioned, on the host, packed by hooks, or saved by autograd.

    A tensor or a container that occurs twice is stored once and restored as one object. Containers are copied.
    """

    __slots__ = ("_args", "_attributes", "_edited", "_kwargs", "_names", "_saved", "_tensors", "_watched", "devices", "stored")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, outer_hooks: Hooks | None, *, nested: bool
    ) -> None:
        tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        references: dict[int, _Reference] = {}

        def reference(tensor: torch.Tensor, name: str) -> _Reference:
            if id(tensor) not in references:
                references[id(tensor)] = _Reference(len(tensors))
                tensors.append(tensor)
                self._names.append(name)
            return references[id(tensor)]

        self._args, self._kwargs = _map_arguments(args, kwargs, reference)
        self.devices = devices_of(tensors_in((args, kwargs)))
        # The Python attributes of each tensor, which its stored form lacks.
        self._attributes = [dict(vars(tensor)) for tensor in tensors]
        # Each is a StoredActivation, a PackedByHook, a _KeptTensor, or an index into _saved.
        self._tensors: list[Any] = []
        self._saved: _SavedByAutograd | None = None
        # The tensors that are stored as a StoredActivation; empty after the forward.
        self.stored: tuple[torch.Tensor, ...] = ()
        # Those of them that require gradients: as leaves of the recomputation they cannot be edited.
        self._watched: list[_Watched] = []
        self._edited: str | None = None
        try:
            self._store(tensors, settings, outer_hooks, nested)
        except BaseException:
            self.release()
            raise

    def _store(self, tensors: list[torch.Tensor], settings: Settings, outer_hooks: Hooks | None, nested: bool) -> None:
        if settings.debug and settings.partition_activations and not nested:
            debug_checks.check_same_on_all_ranks(list(zip(tensors, self._names, strict=True)), settings)
        saved: list[torch.Tensor] = []
        for tensor, name in zip(tensors, self._names, strict=True):
            activation = None
            if not settings.keeps_arguments and not nested and not tensor.is_meta:
                activation = store_activation(tensor, settings, len(self.stored), outer_hooks)
            if activation is not None:
                self._tensors.append(activation)
                self.stored += (tensor,)
                if tensor.requires_grad:
                    self._watched.append((tensor, tensor._version, name))
            elif outer_hooks is not None:
                self._tensors.append(PackedByHook(tensor, outer_hooks))
            elif bindings.innermost_hooks is None and not tensor.is_inference():
                self._tensors.append(len(saved))
                saved.append(tensor)
            else:
                self._tensors.append(_KeptTensor(tensor))
        if saved:
            self._saved = _SavedByAutograd(saved)

    def forward_ended(self) -> None:
        """Release the memory that only the forward needs."""
        self._edited = _edited_name(self._watched)
        self._watched, self.stored = [], ()
        for each in self._tensors:
            if isinstance(each, (_KeptTensor, StoredActivation)):
                each.forward_ended()

    def release(self) -> None:
        """Release all tensors."""
        self._tensors.clear()
        self._attributes.clear()
        self._saved = None
        self._watched, self.stored = [], ()

    def prefetch(self) -> None:
        """Start to fetch the activations that are on the host or on other ranks."""
        for each in self._tensors:
            if isinstance(each, StoredActivation):
                each.prefetch()

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments.

        Raises:
            RuntimeError: if one was edited in place, or the process group over which it is partitioned was destroyed.
        """
        if self._edited is not None:
            raise RuntimeError(edited_in_place(self._edited))
        for each in self._tensors:
            if isinstance(each, StoredActivation):
                each.start_gathering()
        saved = () if self._saved is None else self._saved.restore()
        tensors = [
            saved[each] if isinstance(each, int) else each.restore(name)
            for each, name in zip(self._tensors, self._names, strict=True)
        ]
        for tensor, each, attributes in zip(tensors, self._tensors, self._attributes, strict=True):
            if attributes and not isinstance(each, _KeptTensor):
                vars(tensor).update(attributes)
        return _map_arguments(self._args, self._kwargs, lambda reference, name: tensors[reference.index], _Reference)
