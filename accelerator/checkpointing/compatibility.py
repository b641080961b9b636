"""DeepSpeed's helpers around its checkpoints, for code that calls them; the engine does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import configuration, partition, transfers
from .engine import checkpoint
from .groups import SINGLE_RANK, Group

__all__ = [
    "CheckpointFunction",
    "detach_variable",
    "extract_tensors",
    "gather_partitioned_activations",
    "get_cpu_activations_for_backward",
    "get_offloaded_activations_for_backward",
    "get_partition_size",
    "get_partition_start",
    "get_partitioned_activations_for_backward",
    "is_activation_to_checkpoint",
    "merge_tensors",
    "partition_activations",
    "restore_offloaded_activations",
]


def _group() -> Group:
    return configuration.current.group or SINGLE_RANK


def _numel(item: Any, where: str) -> int:
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"{where}() takes a tensor, not {type(item).__name__}.")
    return item.numel()


class CheckpointFunction:
    """``checkpoint`` in the shape of an autograd function, as DeepSpeed has it."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Call a function as ``checkpoint`` does.

        Args:
            run_function: what to call.
            all_outputs: is extended by the outputs, in order, those that are no tensors too.
            args: the function's arguments.

        Returns:
            The tensor if that is the output, else a tuple of those outputs that are tensors.
        """
        found: Any = all_outputs
        if not isinstance(found, list):
            raise TypeError(f"CheckpointFunction.apply() takes a list for the outputs, not {type(found).__name__}.")
        outputs = checkpoint(run_function, *args)
        if isinstance(outputs, torch.Tensor):
            all_outputs.append(outputs)
            return outputs
        several: Sequence[Any] = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        all_outputs.extend(several)
        return tuple(each for each in several if isinstance(each, torch.Tensor))


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Return the tensors of a tuple cut off from the graph, as leaves.

    Args:
        inputs: tensors and other things, which stay what they are.
        device: where the tensors go; None leaves them where they are.

    Returns:
        A tuple of the same length; its tensors require gradients where the given ones do.

    Raises:
        TypeError: if it is no tuple.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.detach_variable((torch.ones(1, requires_grad=True), 2))
        (tensor([1.], requires_grad=True), 2)
    """
    given: Any = inputs
    if not isinstance(given, tuple):
        raise TypeError(f"detach_variable() takes a tuple, not {type(inputs).__name__}.")
    return tuple(
        (item.detach() if device is None else item.detach().to(device)).requires_grad_(item.requires_grad)
        if isinstance(item, torch.Tensor)
        else item
        for item in inputs
    )


def get_partition_size(item: torch.Tensor) -> int:
    """Return how many elements of a tensor every rank of the configured group keeps.

    Args:
        item: the tensor.

    Returns:
        Elements, padding included: the number of elements over the size of the group, rounded up.

    Raises:
        TypeError: if it is no tensor.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_partition_size(torch.ones(3, 3))
        9
    """
    return partition.part_size(_numel(item, "get_partition_size"), _group().size)


def get_partition_start(item: torch.Tensor) -> int:
    """Return where this rank's part of a tensor starts.

    Args:
        item: the tensor.

    Returns:
        The number of the first element, counted in the flattened tensor.

    Raises:
        TypeError: if it is no tensor.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_partition_start(torch.ones(3, 3))
        0
    """
    group = _group()
    return partition.part_size(_numel(item, "get_partition_start"), group.size) * group.rank


def is_activation_to_checkpoint(item: Any) -> bool:
    """Return whether an argument is one that checkpoints partition and offload.

    Args:
        item: anything.

    Returns:
        True for a floating-point tensor that is no parameter, has at least one element for each rank of the configured
        group and no true attribute ``no_checkpointing``.

    Raises:
        Nothing.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> [checkpointing.is_activation_to_checkpoint(x) for x in (torch.ones(2), torch.arange(2), "mask")]
        [True, False, False]
    """
    return partition.is_activation(item, _group().size)


def partition_activations(args: Sequence[Any], cpu_checkpoint: bool = False, contiguous_checkpoint: bool = False) -> list[Any]:
    """Return this rank's parts of the activations among arguments.

    Args:
        args: arguments; the tensors are left as they are.
        cpu_checkpoint: put the parts into the host's memory.
        contiguous_checkpoint: has no meaning here, where parts have no fixed lifetime; ``checkpoint`` uses the buffers.

    Returns:
        For every activation a tensor of one dimension with ``get_partition_size`` elements, zeros as padding; other
        arguments as they are.

    Raises:
        ValueError: if contiguous_checkpoint is asked for.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.partition_activations([torch.ones(2, 2), "mask"])
        [tensor([1., 1., 1., 1.]), 'mask']
    """
    if contiguous_checkpoint:
        raise ValueError("partition_activations() hands out parts of their own; contiguous buffers belong to checkpoint().")
    return [_part(item, cpu_checkpoint) if is_activation_to_checkpoint(item) else item for item in args]


def _part(item: torch.Tensor, host: bool) -> torch.Tensor:
    group = _group()
    own = partition.own_part(item.detach().reshape(-1), group)
    size = partition.part_size(item.numel(), group.size)
    part = transfers.allocate(size, item.dtype, item.device, host)
    part[: own.numel()].copy_(own)
    part[own.numel() :].zero_()
    return part


def get_partitioned_activations_for_backward(
    args: Sequence[Any], inputs: Sequence[Any], contiguous_checkpoint: bool = False
) -> list[Any]:
    """Return what a backward needs to make partitioned arguments whole: each part, followed by the size of the whole.

    Args:
        args: the arguments, which keep their data.
        inputs: what ``partition_activations`` made of them.
        contiguous_checkpoint: sizes need no buffers here.

    Returns:
        For every argument two elements: its part (the argument itself if it is no activation), and an int64 tensor with
        its shape, None for what is no tensor.

    Raises:
        ValueError: if the numbers of arguments and inputs differ.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> args = [torch.ones(2, 2), "mask"]
        >>> parts = checkpointing.partition_activations(args)
        >>> checkpointing.get_partitioned_activations_for_backward(args, parts)
        [tensor([1., 1., 1., 1.]), tensor([2, 2]), 'mask', None]
    """
    result: list[Any] = []
    for item, kept in zip(args, get_cpu_activations_for_backward(args, inputs), strict=True):
        result += [kept, torch.tensor(item.shape, device="cpu") if isinstance(item, torch.Tensor) else None]
    return result


def get_cpu_activations_for_backward(args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return what stands for each argument until backward.

    Args:
        args: the arguments, which keep their data.
        inputs: what is kept of each.

    Returns:
        What is kept, for activations with the argument's ``requires_grad``; other arguments as they are.

    Raises:
        ValueError: if the numbers of arguments and inputs differ.
        TypeError: if something else than a tensor is kept of an activation.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_cpu_activations_for_backward([torch.ones(2), 3], [torch.zeros(2), 3])
        [tensor([0., 0.]), 3]
    """
    if len(args) != len(inputs):
        raise ValueError(f"{len(args)} arguments, but {len(inputs)} inputs.")
    result: list[Any] = []
    for item, kept in zip(args, inputs, strict=True):
        if not is_activation_to_checkpoint(item):
            result.append(item)
        elif isinstance(kept, torch.Tensor):
            result.append(kept.detach().requires_grad_(item.requires_grad))
        else:
            raise TypeError(f"Of an activation a tensor is kept, not {type(kept).__name__}.")
    return result


def get_offloaded_activations_for_backward(args: Sequence[Any], engine: Any) -> list[Any]:
    """Hand the activations among arguments to an offload engine; ``restore_offloaded_activations`` brings them back.

    Args:
        args: arguments; the tensors are left as they are.
        engine: has ``offload_input(tensor)``, which returns a token or None for a tensor that it does not take, and
            ``restore_input(token)``.

    Returns:
        For every activation that the engine took an empty tensor that carries the token as ``ds_offload_id``, the same one
        for a tensor that occurs twice; other arguments as they are.

    Raises:
        TypeError: if the engine lacks the methods.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> class Engine(list):
        ...     def offload_input(self, tensor):
        ...         self.append(tensor.clone())
        ...         return len(self) - 1
        ...     def restore_input(self, token):
        ...         return self[token]
        >>> engine = Engine()
        >>> kept = checkpointing.get_offloaded_activations_for_backward([torch.ones(2), "mask"], engine)
        >>> kept
        [tensor([]), 'mask']
        >>> checkpointing.restore_offloaded_activations(kept, engine)
        [tensor([1., 1.]), 'mask']
    """
    _check_engine(engine)
    result: list[Any] = []
    kept: dict[int, Any] = {}
    for item in args:
        if is_activation_to_checkpoint(item) and id(item) not in kept:
            token = engine.offload_input(item.detach())
            kept[id(item)] = item
            if token is not None:
                stand_in: Any = item.new_empty(0).requires_grad_(item.requires_grad)
                stand_in.ds_offload_id = token
                kept[id(item)] = stand_in
        result.append(kept.get(id(item), item))
    return result


def restore_offloaded_activations(tensors: Sequence[Any], engine: Any) -> Sequence[Any]:
    """Fill what ``get_offloaded_activations_for_backward`` returned with the activations again.

    Args:
        tensors: what that returned; its empty tensors become the activations.
        engine: the same engine.

    Returns:
        The same sequence.

    Raises:
        TypeError: if the engine lacks the methods.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> class Engine:
        ...     def offload_input(self, tensor):
        ...         return tensor.tolist()
        ...     def restore_input(self, token):
        ...         return torch.tensor(token)
        >>> engine = Engine()
        >>> kept = checkpointing.get_offloaded_activations_for_backward((torch.ones(2), 3), engine)
        >>> checkpointing.restore_offloaded_activations(kept, engine)
        [tensor([1., 1.]), 3]
    """
    _check_engine(engine)
    for item in tensors:
        token = getattr(item, "ds_offload_id", None) if isinstance(item, torch.Tensor) else None
        if token is not None:
            stand_in: Any = item
            stand_in.data = engine.restore_input(token)
            stand_in.ds_offload_id = None
    return tensors


def _check_engine(engine: Any) -> None:
    if not all(callable(getattr(engine, name, None)) for name in ("offload_input", "restore_input")):
        raise TypeError(f"An offload engine has offload_input() and restore_input(), which {type(engine).__name__} lacks.")


def gather_partitioned_activations(tensors: Sequence[Any], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Return arguments made whole again from the parts of all ranks of the configured group.

    Args:
        tensors: what ``get_partitioned_activations_for_backward`` returned, the same on every rank but for the parts.
        device: where the parts go first; None leaves them where they are.

    Returns:
        The arguments, the gathered ones as leaves.

    Raises:
        ValueError: if the number of elements is odd.
        RuntimeError: if the group was destroyed.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.gather_partitioned_activations([torch.ones(4), torch.tensor([2, 2]), "mask", None])
        (tensor([[1., 1.],
                [1., 1.]]), 'mask')
    """
    if len(tensors) % 2:
        raise ValueError(f"gather_partitioned_activations() takes pairs of a part and a size, not {len(tensors)} elements.")
    group = _group()
    result: list[Any] = []
    for item, size in zip(tensors[::2], tensors[1::2], strict=True):
        shape = None if size is None else torch.Size(int(length) for length in size)
        # Only a part has another shape than the whole; whether it is one must not be asked of the part's own size.
        if shape is None or not isinstance(item, torch.Tensor) or item.shape == shape:
            result.append(item)
            continue
        part = item.detach() if device is None else item.detach().to(device)
        whole = part if group.size == 1 else partition.Gathering(part, group).wait()
        result.append(whole[: math.prod(shape)].view(shape).requires_grad_(item.requires_grad))
    return tuple(result)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[bool]]:
    """Separate tensors from other things; ``merge_tensors`` puts them together again.

    Args:
        all_objects: a tuple or a list.

    Returns:
        The tensors, the others, and for every object whether it is a tensor, each of the kind that was given.

    Raises:
        Nothing.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.extract_tensors((torch.ones(1), "mask"))
        ((tensor([1.]),), ('mask',), (True, False))
    """
    flags = [isinstance(each, torch.Tensor) for each in all_objects]
    tensors = [each for each, flag in zip(all_objects, flags, strict=True) if flag]
    others = [each for each, flag in zip(all_objects, flags, strict=True) if not flag]
    if isinstance(all_objects, tuple):
        return tuple(tensors), tuple(others), tuple(flags)
    return tensors, others, flags


def merge_tensors(
    tensor_objects: Sequence[Any], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple[Any, ...]:
    """Put together what ``extract_tensors`` separated.

    Args:
        tensor_objects: the tensors.
        non_tensor_objects: the others.
        tensor_flags: for every place whether a tensor goes there.

    Returns:
        All objects in their order.

    Raises:
        ValueError: if the numbers do not fit.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.merge_tensors((torch.ones(1),), ("mask",), (True, False))
        (tensor([1.]), 'mask')
    """
    expected = sum(map(bool, tensor_flags))
    if expected != len(tensor_objects) or len(tensor_flags) - expected != len(non_tensor_objects):
        raise ValueError(
            f"{len(tensor_objects)} tensors and {len(non_tensor_objects)} others do not fit {expected} flags of "
            f"{len(tensor_flags)}."
        )
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if flag else next(others) for flag in tensor_flags)
