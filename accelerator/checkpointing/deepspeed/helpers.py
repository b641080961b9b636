"""DeepSpeed's helper functions for checkpoints, for code that calls them. ``checkpoint`` does not use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import configuration, partition, transfers
from ..checkpoint_call import checkpoint
from ..groups import SINGLE_RANK, Group


def _group() -> Group:
    return configuration.current.group or SINGLE_RANK


def _numel(item: Any, function: str) -> int:
    if not isinstance(item, torch.Tensor):
        raise TypeError(f"{function}() takes a tensor, not {type(item).__name__}")
    return item.numel()


class CheckpointFunction:
    """``checkpoint`` with the interface of DeepSpeed's autograd function."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Call a function as ``checkpoint`` does.

        Args:
            run_function: the function.
            all_outputs: a list, to which all outputs are appended in order.
            args: the arguments of the function.

        Returns:
            The output if it is a tensor, else a tuple of the outputs that are tensors.
        """
        argument: Any = all_outputs
        if not isinstance(argument, list):
            raise TypeError(f"CheckpointFunction.apply() takes a list for the outputs, not {type(argument).__name__}")
        outputs = checkpoint(run_function, *args)
        if isinstance(outputs, torch.Tensor):
            all_outputs.append(outputs)
            return outputs
        several: Sequence[Any] = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        all_outputs.extend(several)
        return tuple(each for each in several if isinstance(each, torch.Tensor))


def detach_variable(inputs: tuple[Any, ...], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Detach the tensors of a tuple from the graph.

    Args:
        inputs: a tuple of tensors and other objects.
        device: the device to which the tensors are moved. None leaves them on theirs.

    Returns:
        A tuple with a leaf for each tensor, with the same ``requires_grad``, and the other objects as they are.

    Raises:
        TypeError: if it is not a tuple.

    Example:
        >>> checkpointing.detach_variable((torch.ones(1, requires_grad=True), 2))
        (tensor([1.], requires_grad=True), 2)
    """
    argument: Any = inputs
    if not isinstance(argument, tuple):
        raise TypeError(f"detach_variable() takes a tuple, not {type(inputs).__name__}")
    return tuple(
        (item.detach() if device is None else item.detach().to(device)).requires_grad_(item.requires_grad)
        if isinstance(item, torch.Tensor)
        else item
        for item in inputs
    )


def get_partition_size(item: torch.Tensor) -> int:
    """Return the number of elements in each rank's part of a tensor.

    Args:
        item: the tensor.

    Returns:
        The number of elements divided by the size of the configured group, rounded up.

    Raises:
        TypeError: if it is not a tensor.

    Example:
        >>> checkpointing.get_partition_size(torch.ones(3, 3))
        9
    """
    return partition.part_size(_numel(item, "get_partition_size"), _group().size)


def get_partition_start(item: torch.Tensor) -> int:
    """Return the start of this rank's part of a tensor.

    Args:
        item: the tensor.

    Returns:
        The index of the first element in the flattened tensor.

    Raises:
        TypeError: if it is not a tensor.

    Example:
        >>> checkpointing.get_partition_start(torch.ones(3, 3))
        0
    """
    group = _group()
    return partition.part_size(_numel(item, "get_partition_start"), group.size) * group.rank


def is_activation_to_checkpoint(item: Any) -> bool:
    """Return whether checkpoints partition and offload an argument.

    Args:
        item: the argument.

    Returns:
        True for a floating-point tensor with at least one element for each rank of the configured group. False for a
        parameter, and for a tensor whose attribute ``no_checkpointing`` is true.

    Example:
        >>> [checkpointing.is_activation_to_checkpoint(x) for x in (torch.ones(2), torch.arange(2), "mask")]
        [True, False, False]
    """
    return partition.is_activation(item, _group().size)


def partition_activations(args: Sequence[Any], cpu_checkpoint: bool = False, contiguous_checkpoint: bool = False) -> list[Any]:
    """Return this rank's parts of the activations among arguments.

    Args:
        args: the arguments, which do not change.
        cpu_checkpoint: whether the parts are in host memory.
        contiguous_checkpoint: must be False. Only ``checkpoint`` uses contiguous buffers.

    Returns:
        For every activation a tensor of one dimension with ``get_partition_size`` elements, padded with zeros. Other
        arguments as they are.

    Raises:
        ValueError: if ``contiguous_checkpoint`` is true.

    Example:
        >>> checkpointing.partition_activations([torch.ones(2, 2), "mask"])
        [tensor([1., 1., 1., 1.]), 'mask']
    """
    if contiguous_checkpoint:
        raise ValueError("partition_activations() does not use contiguous buffers; call checkpoint()")
    return [_part(item, cpu_checkpoint) if is_activation_to_checkpoint(item) else item for item in args]


def _part(item: torch.Tensor, on_host: bool) -> torch.Tensor:
    group = _group()
    own = partition.own_part(item.detach().reshape(-1), group)
    size = partition.part_size(item.numel(), group.size)
    part = transfers.allocate(size, item.dtype, item.device, on_host)
    part[: own.numel()].copy_(own)
    part[own.numel() :].zero_()
    return part


def get_partitioned_activations_for_backward(
    args: Sequence[Any], inputs: Sequence[Any], contiguous_checkpoint: bool = False
) -> list[Any]:
    """Return the parts and shapes of partitioned arguments, for ``gather_partitioned_activations``.

    Args:
        args: the arguments, which do not change.
        inputs: the result of ``partition_activations``.
        contiguous_checkpoint: has no effect.

    Returns:
        Two elements for every argument: its part (the argument itself if it is not an activation), and an int64 tensor with
        its shape (None if it is not a tensor).

    Raises:
        ValueError: if ``args`` and ``inputs`` differ in length.

    Example:
        >>> args = [torch.ones(2, 2), "mask"]
        >>> parts = checkpointing.partition_activations(args)
        >>> checkpointing.get_partitioned_activations_for_backward(args, parts)
        [tensor([1., 1., 1., 1.]), tensor([2, 2]), 'mask', None]
    """
    result: list[Any] = []
    for item, part in zip(args, get_cpu_activations_for_backward(args, inputs), strict=True):
        result += [part, torch.tensor(item.shape, device="cpu") if isinstance(item, torch.Tensor) else None]
    return result


def get_cpu_activations_for_backward(args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return the stored inputs in place of the activations among arguments.

    Args:
        args: the arguments, which do not change.
        inputs: the stored input of each argument.

    Returns:
        For every activation its stored input, detached and with the same ``requires_grad``. Other arguments as they are.

    Raises:
        ValueError: if ``args`` and ``inputs`` differ in length.
        TypeError: if the stored input of an activation is not a tensor.

    Example:
        >>> checkpointing.get_cpu_activations_for_backward([torch.ones(2), 3], [torch.zeros(2), 3])
        [tensor([0., 0.]), 3]
    """
    if len(args) != len(inputs):
        raise ValueError(f"{len(args)} arguments, but {len(inputs)} inputs")
    result: list[Any] = []
    for item, stored in zip(args, inputs, strict=True):
        if not is_activation_to_checkpoint(item):
            result.append(item)
        elif isinstance(stored, torch.Tensor):
            result.append(stored.detach().requires_grad_(item.requires_grad))
        else:
            raise TypeError(f"the stored input of an activation must be a tensor, not {type(stored).__name__}")
    return result


def gather_partitioned_activations(tensors: Sequence[Any], device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Gather partitioned arguments from the parts of all ranks of the configured group.

    Args:
        tensors: the result of ``get_partitioned_activations_for_backward``. Ranks may differ only in their parts.
        device: the device to which the parts are moved first. None leaves them on theirs.

    Returns:
        The arguments. The gathered ones are leaves.

    Raises:
        ValueError: if the length of ``tensors`` is odd.
        RuntimeError: if the group was destroyed.

    Example:
        >>> checkpointing.gather_partitioned_activations([torch.ones(4), torch.tensor([2, 2]), "mask", None])
        (tensor([[1., 1.],
                [1., 1.]]), 'mask')
    """
    if len(tensors) % 2:
        raise ValueError(f"gather_partitioned_activations() takes pairs of a part and a shape, not {len(tensors)} elements")
    group = _group()
    result: list[Any] = []
    for item, size in zip(tensors[::2], tensors[1::2], strict=True):
        shape = None if size is None else torch.Size(int(length) for length in size)
        # Among several ranks a part has another shape than the whole tensor. is_activation() would test the size of the part.
        is_only_part = group.size == 1 and is_activation_to_checkpoint(item)
        if shape is None or not isinstance(item, torch.Tensor) or (item.shape == shape and not is_only_part):
            result.append(item)
            continue
        part = item.detach() if device is None else item.detach().to(device)
        whole = part if group.size == 1 else partition.Gathering(part, group).wait()
        result.append(whole[: math.prod(shape)].view(shape).requires_grad_(item.requires_grad))
    return tuple(result)


def extract_tensors(all_objects: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[bool]]:
    """Separate tensors from other objects. ``merge_tensors`` does the opposite.

    Args:
        all_objects: a tuple or a list.

    Returns:
        The tensors, the other objects, and for every object whether it is a tensor. All three are of the type of the argument.

    Example:
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
    """Merge what ``extract_tensors`` separated.

    Args:
        tensor_objects: the tensors.
        non_tensor_objects: the other objects.
        tensor_flags: for every position whether a tensor goes there.

    Returns:
        All objects in their order.

    Raises:
        ValueError: if the lengths do not match the flags.

    Example:
        >>> checkpointing.merge_tensors((torch.ones(1),), ("mask",), (True, False))
        (tensor([1.]), 'mask')
    """
    expected = sum(map(bool, tensor_flags))
    if expected != len(tensor_objects) or len(tensor_flags) - expected != len(non_tensor_objects):
        raise ValueError(
            f"{len(tensor_objects)} tensors and {len(non_tensor_objects)} other objects do not match "
            f"{len(tensor_flags)} flags, {expected} of them true"
        )
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if flag else next(others) for flag in tensor_flags)
