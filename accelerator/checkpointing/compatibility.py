"""DeepSpeed's helpers around its checkpoints, for code that calls them; the engine does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import configuration, partition, transfers
from .engine import checkpoint
from .groups import ALONE, Group

__all__ = [
    "CheckpointFunction",
    "detach_variable",
    "extract_tensors",
    "gather_partitioned_activations",
    "get_cpu_activations_for_backward",
    "get_partition_size",
    "get_partition_start",
    "get_partitioned_activations_for_backward",
    "is_activation_to_checkpoint",
    "merge_tensors",
    "partition_activations",
]


def _group() -> Group:
    return configuration.current.group or ALONE


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

    Fork: Safe, unless device is an accelerator, which is then initialized.
    Initializes: Nothing, or the accelerator that device names.

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
        Nothing.

    Fork: Safe.
    Initializes: Nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_partition_size(torch.ones(3, 3))
        9
    """
    return partition.part_size(item.numel(), _group().size)


def get_partition_start(item: torch.Tensor) -> int:
    """Return where this rank's part of a tensor starts.

    Args:
        item: the tensor.

    Returns:
        The number of the first element, counted in the flattened tensor.

    Raises:
        Nothing.

    Fork: Safe.
    Initializes: Nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_partition_start(torch.ones(3, 3))
        0
    """
    group = _group()
    return partition.part_size(item.numel(), group.size) * group.rank


def is_activation_to_checkpoint(item: Any) -> bool:
    """Return whether an argument is one that checkpoints partition and offload.

    Args:
        item: anything.

    Returns:
        True for a floating-point tensor that is no parameter, has at least one element for each rank of the configured
        group and no true attribute ``no_checkpointing``.

    Raises:
        Nothing.

    Fork: Safe.
    Initializes: Nothing.

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

    Fork: Safe.
    Initializes: Nothing.

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

    Fork: Safe.
    Initializes: Nothing.

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
        result += [kept, torch.tensor(item.shape) if isinstance(item, torch.Tensor) else None]
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

    Fork: Safe.
    Initializes: Nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.get_cpu_activations_for_backward([torch.ones(2), 3], [torch.zeros(2), 3])
        [tensor([0., 0.]), 3]
    """
    if len(args) != len(inputs):
        raise ValueError(f"{len(args)} arguments, but {len(inputs)} inputs.")
    return [
        kept.detach().requires_grad_(item.requires_grad) if is_activation_to_checkpoint(item) else item
        for item, kept in zip(args, inputs, strict=True)
    ]


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

    Fork: Safe, unless device is an accelerator, which is then initialized.
    Initializes: Nothing, or the accelerator that device names.

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

    Fork: Safe.
    Initializes: Nothing.

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

    Fork: Safe.
    Initializes: Nothing.

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
