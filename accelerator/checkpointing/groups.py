"""The ranks over which activations are partitioned: a process group, a one-dimensional device mesh or an mpu object."""

from __future__ import annotations

from typing import Any, NamedTuple

# The prefixes of an mpu's methods, the preferred one first.
_MPU_PREFIXES = ("tensor_model", "slice", "model")


class Group(NamedTuple):
    """A group and this process's rank in it. Collectives take the handle, which is None for a single rank."""

    handle: Any
    rank: int
    size: int


SINGLE_RANK = Group(None, 0, 1)


def world_size() -> int:
    """The number of ranks, 1 if torch.distributed is not initialized."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def from_group(group: Any) -> Group:
    """Return the group of a ``ProcessGroup`` or ``DeviceMesh``.

    Raises:
        TypeError: for anything else.
        ValueError: for a mesh of several dimensions, a destroyed group, or one that this process is not in.
    """
    from torch import distributed

    if not distributed.is_available():
        raise ValueError("group needs torch.distributed, which this torch was built without")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            choice = f"mesh[{names[-1]!r}]" if names else "name its dimensions and index it by one"
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions; choose one of them: {choice}")
        group = group.get_group()
    elif not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a one-dimensional DeviceMesh, not {type(group).__name__}")
    return _from_handle(group)


def from_mpu(mpu: Any) -> Group:
    """Return the group of an object with DeepSpeed's mpu methods.

    Raises:
        TypeError: if it lacks the methods, or they return something else than integers and a process group.
        ValueError: if their results contradict each other.
    """
    for prefix in _MPU_PREFIXES:
        names = [f"get_{prefix}_parallel_{suffix}" for suffix in ("rank", "world_size", "group")]
        if all(callable(getattr(mpu, name, None)) for name in names):
            break
    else:
        raise TypeError(
            f"mpu_ lacks get_<prefix>_parallel_rank(), get_<prefix>_parallel_world_size() and get_<prefix>_parallel_group(), "
            f"with one of the prefixes {', '.join(_MPU_PREFIXES)}: {mpu!r}"
        )
    rank, size, handle = (getattr(mpu, name)() for name in names)
    for name, value in zip(names[:2], (rank, size), strict=True):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"mpu_.{name}() must return an integer, not {value!r}")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"mpu_ says rank {rank} of {size}")
    if size == 1:
        return SINGLE_RANK
    group = from_group(handle)
    if (group.rank, group.size) != (rank, size):
        raise ValueError(
            f"mpu_ says rank {rank} of {size}, but its {names[2]}() has this process as rank {group.rank} of {group.size}"
        )
    return group


def is_alive(group: Group) -> bool:
    """Whether collectives over the group are still possible. True for a single rank."""
    if group.handle is None:
        return True
    from torch import distributed

    try:
        return distributed.get_rank(group.handle) >= 0
    except (ValueError, RuntimeError, TypeError):
        return False


def _from_handle(handle: Any) -> Group:
    from torch import distributed

    try:
        rank, size = distributed.get_rank(handle), distributed.get_world_size(handle)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"group cannot be used: {error}") from None
    if rank < 0:
        raise ValueError("group does not contain this process")
    return Group(handle, rank, size) if size > 1 else SINGLE_RANK
