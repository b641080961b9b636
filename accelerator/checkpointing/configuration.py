"""The settings of checkpoints: reading and checking them.

Settings are immutable. A checkpoint uses the current settings when its forward starts, and the same in its backward.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from .buffers import Buffers
from .groups import SINGLE_RANK, Group, from_group, from_mpu, is_alive, world_size

_SECTION = "activation_checkpointing"

# The keys of the section, with the parameter of configure() and its type.
_KEYS: dict[str, tuple[str, type]] = {
    "partition_activations": ("partition_activations", bool),
    "contiguous_memory_optimization": ("contiguous_checkpointing", bool),
    "number_checkpoints": ("num_checkpoints", int),
    "cpu_checkpointing": ("checkpoint_in_cpu", bool),
    "synchronize_checkpoint_boundary": ("synchronize", bool),
    "profile": ("profile", bool),
}

_DETERMINISM_CHECKS = ("default", "none", "debug")

# Returns the contexts of a forward and of its recomputation.
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Settings:
    """The settings of a checkpoint. ``group`` is None if none is configured."""

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    group: Group | None = None
    mpu: Any = None
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    context_fn: ContextFn | None = None
    buffers: Buffers | None = None

    # Whether arguments are kept as they are, neither partitioned nor offloaded.
    keeps_arguments: bool = field(init=False)
    # Whether a ``Region`` surrounds each run of a function.
    measures: bool = field(init=False)
    # Whether values are compared, not only metadata.
    debug: bool = field(init=False)

    def __post_init__(self) -> None:
        # Fields rather than properties: a checkpoint reads them each time, and Dynamo cannot trace a ``cached_property`` before
        # Python 3.12, where it takes a lock.
        object.__setattr__(self, "keeps_arguments", not (self.partition_activations or self.checkpoint_in_cpu))
        object.__setattr__(self, "measures", self.synchronize or self.profile)
        object.__setattr__(self, "debug", self.determinism_check == "debug")


current = Settings()
_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    group: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    context_fn: ContextFn | None = None,
) -> None:
    """Set what later checkpoints do. All settings are checked before any changes.

    A setting comes from its argument, else from the section "activation_checkpointing" of ``deepspeed_config``, else it is
    off. Each call sets all settings except the group, which stays if the call names none.

    Partitioning assumes that the arguments of a checkpoint are the same on every rank of the group. Each rank keeps one part
    of each argument, and backward gathers the parts. ``determinism_check="debug"`` verifies the assumption.

    Args:
        mpu_: an object with ``get_<prefix>_parallel_rank()``, ``..._world_size()`` and ``..._group()``, where the prefix is
            "tensor_model", "slice" or "model".
        deepspeed_config: a DeepSpeed configuration, or the path of its JSON file. Other sections are ignored.
        partition_activations: keep only this rank's part of every floating-point argument.
        contiguous_checkpointing: keep the parts in one buffer per argument position. Needs ``partition_activations`` and
            ``num_checkpoints``.
        num_checkpoints: how many checkpoints that wait for their backward fit into the buffers. Further checkpoints, and
            arguments of another size, get memory of their own. The buffers change their size when no checkpoint waits.
        checkpoint_in_cpu: keep arguments, or their parts, in pinned host memory.
        synchronize: synchronize the accelerator before and after every forward and recomputation.
        profile: record times for ``region_times``.
        group: a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``, in place of ``mpu_``.
        preserve_rng_state: recompute with the random numbers of the forward.
        determinism_check: "default" compares the shape, dtype and device of recomputed tensors with those of the forward.
            "none" compares nothing. "debug" also compares values, and the arguments across ranks, which is slow.
        context_fn: returns two contexts, for the forward and for the recomputation of a checkpoint, as in
            ``torch.utils.checkpoint.checkpoint``. For selective checkpoints pass a partial of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Raises:
        ValueError: for settings that contradict each other, unknown keys, a value out of range, a file that is not JSON,
            a group that this process is not in, and partitioning without a group in a world of several ranks. Contiguous
            buffers without ``num_checkpoints`` raise an error that is an ``AssertionError`` too, as in DeepSpeed.
        TypeError: for a value, an mpu or a group of the wrong type.
        FileNotFoundError: if the file does not exist.

    Example:
        >>> checkpointing.configure(deepspeed_config={"activation_checkpointing": {"profile": True}})
        >>> checkpointing.is_configured()
        True
        >>> checkpointing.configure()
    """
    global current, _configured
    chosen: dict[str, Any] = {} if deepspeed_config is None else _read(deepspeed_config)
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    chosen.update((name, value) for name, value in arguments.items() if value is not None)
    if mpu_ is not None and group is not None:
        raise ValueError("configure() got both mpu_ and group; pass one of them")
    if mpu_ is not None:
        chosen["group"], chosen["mpu"] = from_mpu(mpu_), mpu_
    elif group is not None:
        chosen["group"] = from_group(group)
    elif current.group is not None and is_alive(current.group):
        chosen["group"], chosen["mpu"] = current.group, current.mpu
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check must be one of {', '.join(_DETERMINISM_CHECKS)}, not {determinism_check!r}")
    contexts: Any = context_fn
    if contexts is not None and not callable(contexts):
        raise TypeError(f"context_fn must be a function that returns two contexts, not {contexts!r}")
    if contexts is not None and determinism_check == "debug":
        raise ValueError('determinism_check="debug" cannot be used with context_fn: the contexts would see its operations')
    settings = Settings(
        **chosen, preserve_rng_state=preserve_rng_state, determinism_check=determinism_check, context_fn=context_fn
    )
    current = _checked(settings)
    _configured = True


def is_configured() -> bool:
    """Return whether ``configure`` has succeeded in this process.

    Returns:
        True after a call that raised nothing.

    Example:
        >>> checkpointing.configure()
        >>> checkpointing.is_configured()
        True
    """
    return _configured


def reset() -> None:
    """Free the contiguous buffers. The settings stay, and the next checkpoint allocates new buffers.

    The buffers are reused in each iteration, so ``reset()`` is needed only to free memory.

    Raises:
        RuntimeError: if checkpoints with arguments in the buffers wait for their backward; nothing changes.

    Example:
        >>> checkpointing.reset()
    """
    if current.buffers is not None:
        current.buffers.clear()


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints that fit into the buffers, as ``configure(num_checkpoints=)``.

    Args:
        nlayers: the number of checkpoints.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is not positive.

    Example:
        >>> checkpointing.set_num_layers(12)
        >>> checkpointing.configure()
    """
    global current
    current = _checked(replace(current, num_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch partitioning on or off, as ``configure(partition_activations=)``.

    Args:
        partition_activation: whether later checkpoints keep only this rank's part of their arguments.

    Raises:
        TypeError: if it is not a bool.
        ValueError: if contiguous checkpointing needs partitioning, or a world of several ranks has no group.

    Example:
        >>> checkpointing.partition_activations_in_checkpoint(True)
        >>> checkpointing.partition_activations_in_checkpoint(False)
    """
    global current
    current = _checked(replace(current, partition_activations=partition_activation))


def deepspeed_globals() -> dict[str, Any]:
    """The globals of DeepSpeed's module, by name."""
    group = current.group or SINGLE_RANK
    return {
        "CONTIGUOUS_CHECKPOINTING": current.contiguous_checkpointing,
        "CPU_CHECKPOINT": current.checkpoint_in_cpu,
        "PARTITION_ACTIVATIONS": current.partition_activations,
        "PROFILE_TIME": current.profile,
        "SYNCHRONIZE": current.synchronize,
        "deepspeed_checkpointing_enabled": _configured,
        "mp_group": group.handle,
        "mp_rank": group.rank,
        "mp_size": group.size,
        "mpu": current.mpu,
        "num_layers": current.num_checkpoints,
    }


def rank() -> int:
    """This process's rank in the configured group, 0 without one."""
    return 0 if current.group is None else current.group.rank


def partition_group(settings: Settings) -> Group:
    """Return the group over which activations are partitioned.

    Raises:
        RuntimeError: if torch.distributed was initialized with several ranks after partitioning was configured without a group.
    """
    if settings.group is not None:
        return settings.group
    if (world := world_size()) > 1:
        raise RuntimeError(_no_group(world))
    return SINGLE_RANK


def _no_group(world: int) -> str:
    return (
        f"partition_activations is on in a world of {world} ranks, but no group is configured: "
        "call configure(group=...) with a ProcessGroup or DeviceMesh, or configure(mpu_)"
    )


class NumCheckpointsMissingError(ValueError, AssertionError):
    """Contiguous buffers without ``num_checkpoints``. DeepSpeed raises an ``AssertionError`` for them."""


def _checked(settings: Settings) -> Settings:
    """Check settings, and return them with the buffers they need."""
    for name in [name for name, cls in _KEYS.values() if cls is bool] + ["preserve_rng_state"]:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")
    count: Any = settings.num_checkpoints
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"num_checkpoints must be an integer, not {count!r}")
        if count < 1:
            raise ValueError(f"num_checkpoints must be at least 1, not {count}")
    if settings.partition_activations and settings.group is None and (world := world_size()) > 1:
        raise ValueError(_no_group(world))
    buffers: Buffers | None = None
    if settings.contiguous_checkpointing:
        if not settings.partition_activations:
            raise ValueError("contiguous_checkpointing needs partition_activations: its buffers hold the parts")
        if count is None:
            raise NumCheckpointsMissingError(
                "contiguous_checkpointing needs num_checkpoints, the number of checkpointed layers, for the size of its buffers"
            )
        # Buffers of the same size and place are kept, so that configuring in every step allocates nothing.
        buffers = current.buffers
        if buffers is None or buffers.count != count or current.checkpoint_in_cpu != settings.checkpoint_in_cpu:
            buffers = Buffers(count)
    return replace(settings, buffers=buffers)


def _read(source: Any) -> dict[str, Any]:
    """Return the arguments of ``configure`` that a DeepSpeed configuration sets.

    Raises:
        FileNotFoundError, ValueError, TypeError: as ``configure``.
    """
    if isinstance(source, (str, os.PathLike)):
        where: str = os.fspath(source)
        try:
            with open(where, encoding="utf-8") as file:
                content: Any = json.load(file)
        except FileNotFoundError:
            raise FileNotFoundError(f"deepspeed_config names a file that does not exist: {where}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"deepspeed_config names a file that is not JSON: {where}: {error}") from None
    else:
        where, content = "deepspeed_config", source
    if not isinstance(content, Mapping):
        raise TypeError(f"deepspeed_config must be a dict or the path of a JSON file with one, not {content!r}")
    if misplaced := sorted(key for key in _KEYS if key in content and not isinstance(content[key], Mapping)):
        raise ValueError(f'{where}: {", ".join(misplaced)} belong in the section "{_SECTION}"')
    section = content.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise TypeError(f'{where}: the section "{_SECTION}" must be a dict, not {section!r}')
    if unknown := sorted(str(key) for key in section if key not in _KEYS):
        raise ValueError(f'{where}: unknown in "{_SECTION}": {", ".join(unknown)}; known: {", ".join(_KEYS)}')
    chosen: dict[str, Any] = {}
    for key, value in section.items():
        name, cls = _KEYS[key]
        if value is None and cls is int:
            continue
        if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
            raise TypeError(f"{where}: {key} must be of type {cls.__name__}, not {value!r}")
        chosen[name] = value
    return chosen
