"""What checkpoints do beyond recomputing: the settings in force, how they are read and checked.

Settings are immutable. A checkpoint takes those in force when its forward starts, and its backward uses the same.
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

__all__ = [
    "configure",
    "is_configured",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_SECTION = "activation_checkpointing"

# The keys of the section, the parameter of configure() each stands for, and the type of its value.
_KEYS: dict[str, tuple[str, type]] = {
    "partition_activations": ("partition_activations", bool),
    "contiguous_memory_optimization": ("contiguous_checkpointing", bool),
    "number_checkpoints": ("num_checkpoints", int),
    "cpu_checkpointing": ("checkpoint_in_cpu", bool),
    "synchronize_checkpoint_boundary": ("synchronize", bool),
    "profile": ("profile", bool),
}

_DETERMINISM_CHECKS = ("default", "none", "debug")

# What gives the contexts of a forward and of its recomputation.
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Settings:
    """The settings of a checkpoint; ``group`` is None where none was given."""

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
    # What the engine asks at every checkpoint, worked out once: are arguments simply kept, is the region watched, are
    # recomputed tensors compared with those of the forward.
    plain: bool = field(init=False, default=True)
    watched: bool = field(init=False, default=False)
    compares: bool = field(init=False, default=True)
    debug: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", not (self.partition_activations or self.checkpoint_in_cpu))
        object.__setattr__(self, "watched", self.synchronize or self.profile)
        object.__setattr__(self, "compares", self.determinism_check != "none")
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
    """Say what checkpoints do from here on. Everything is checked before anything changes.

    A setting is taken from its argument, else from the section "activation_checkpointing" of the configuration, else it
    is off. Only the group outlasts a call that names none.

    Partitioning takes the arguments of a checkpoint to be the same on every rank of the group: of each it keeps one part
    per rank and gathers them in backward. ``determinism_check="debug"`` verifies that.

    Args:
        mpu_: an object with ``get_<kind>_parallel_rank()``, ``..._world_size()`` and ``..._group()``, where the kind is
            "tensor_model", "slice" or "model".
        deepspeed_config: a DeepSpeed configuration, or the path of its JSON file. Other sections are left alone.
        partition_activations: keep of every floating-point argument only this rank's part.
        contiguous_checkpointing: keep the parts in one buffer per argument position; needs ``partition_activations`` and
            ``num_checkpoints``.
        num_checkpoints: for how many checkpoints that wait for their backward at once the buffers are made; one beyond, or
            one whose argument does not fit, gets memory of its own. Buffers follow other sizes once none waits.
        checkpoint_in_cpu: keep arguments, or their parts, in pinned memory of the host.
        synchronize: wait for the accelerator at both ends of every forward and recomputation.
        profile: record times for ``region_times``.
        group: a ``ProcessGroup`` or a one-dimensional ``DeviceMesh`` instead of ``mpu_``.
        preserve_rng_state: recompute with the random numbers of the forward.
        determinism_check: "default" compares shape, dtype and device of recomputed tensors with those of the forward;
            "none" does not; "debug" compares their values as well, and the arguments across the ranks: slow.
        context_fn: called at every checkpoint for two contexts, one for the forward and one for its recomputation, as that of
            ``torch.utils.checkpoint.checkpoint``: for selective checkpoints a partial of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Raises:
        ValueError: for settings that contradict each other, unknown keys, a value out of range, a file that is not JSON,
            a group that this process is not in, and partitioning without a group in a world of several ranks. For contiguous
            buffers without ``num_checkpoints`` it is an ``AssertionError`` too, as DeepSpeed's.
        TypeError: for a value, an mpu or a group of the wrong kind.
        FileNotFoundError: if there is no such file.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
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
        raise ValueError("configure() got both mpu_ and group; give one of them.")
    if mpu_ is not None:
        chosen["group"], chosen["mpu"] = from_mpu(mpu_), mpu_
    elif group is not None:
        chosen["group"] = from_group(group)
    elif current.group is not None and is_alive(current.group):
        chosen["group"], chosen["mpu"] = current.group, current.mpu
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check is one of {', '.join(_DETERMINISM_CHECKS)}, not {determinism_check!r}.")
    given: Any = context_fn
    if given is not None and not callable(given):
        raise TypeError(f"context_fn is a function that returns two contexts, not {given!r}.")
    if given is not None and determinism_check == "debug":
        raise ValueError('determinism_check="debug" does not go with context_fn, whose contexts would see its work.')
    settings = Settings(
        **chosen, preserve_rng_state=preserve_rng_state, determinism_check=determinism_check, context_fn=context_fn
    )
    current = _checked(settings)
    _configured = True


def is_configured() -> bool:
    """Return whether ``configure`` has succeeded in this process.

    Returns:
        True after a call that raised nothing.

    Raises:
        Nothing.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
        >>> checkpointing.configure()
        >>> checkpointing.is_configured()
        True
    """
    return _configured


def reset() -> None:
    """Let go of the contiguous buffers; the settings stay. The next checkpoint allocates buffers of the sizes it needs.

    Buffers are used again from one iteration to the next, so that this is needed only to free memory.

    Raises:
        RuntimeError: while checkpoints whose arguments are in the buffers still wait for their backward; nothing changes.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
        >>> checkpointing.reset()
    """
    if current.buffers is not None:
        current.buffers.clear()


def set_num_layers(nlayers: int) -> None:
    """Change how many checkpoints may wait for their backward at once, as ``configure(num_checkpoints=)``.

    Args:
        nlayers: the number of checkpoints.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is not positive.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
        >>> checkpointing.set_num_layers(12)
        >>> checkpointing.configure()
    """
    global current
    current = _checked(replace(current, num_checkpoints=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch partitioning on or off, as ``configure(partition_activations=)``.

    Args:
        partition_activation: whether checkpoints from here on keep only this rank's part.

    Raises:
        TypeError: if it is no bool.
        ValueError: if contiguous checkpointing needs it, or a world of several ranks has no group.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
        >>> checkpointing.partition_activations_in_checkpoint(True)
        >>> checkpointing.partition_activations_in_checkpoint(False)
    """
    global current
    current = _checked(replace(current, partition_activations=partition_activation))


def deepspeed_globals() -> dict[str, Any]:
    """What DeepSpeed's module has in its globals, under their names."""
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
    """The group to partition over; one of size 1 where there is no other rank.

    Raises:
        RuntimeError: if a world of several ranks has come up since partitioning was configured without a group.
    """
    if settings.group is not None:
        return settings.group
    if (world := world_size()) > 1:
        raise RuntimeError(_no_group(world))
    return SINGLE_RANK


def _no_group(world: int) -> str:
    return (
        f"partition_activations is on in a world of {world} ranks, but no group says over which of them: "
        "configure(group=...) with a ProcessGroup or DeviceMesh, or configure(mpu_)."
    )


class NumCheckpointsMissingError(ValueError, AssertionError):
    """Contiguous buffers without a number of checkpoints, which DeepSpeed asserts: who catches that catches this."""


def _checked(settings: Settings) -> Settings:
    """The settings with the buffers they need, if they make sense."""
    for name, kind in _KEYS.values():
        value = getattr(settings, name)
        if kind is bool and not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}.")
    preserve: Any = settings.preserve_rng_state
    if not isinstance(preserve, bool):
        raise TypeError(f"preserve_rng_state is True or False, not {preserve!r}.")
    count: Any = settings.num_checkpoints
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"num_checkpoints is a number of checkpoints, not {count!r}.")
        if count < 1:
            raise ValueError(f"num_checkpoints is at least 1, not {count}.")
    if settings.partition_activations and settings.group is None and (world := world_size()) > 1:
        raise ValueError(_no_group(world))
    buffers: Buffers | None = None
    if settings.contiguous_checkpointing:
        if not settings.partition_activations:
            raise ValueError("contiguous_checkpointing needs partition_activations: its buffers hold the parts.")
        if count is None:
            raise NumCheckpointsMissingError(
                "contiguous_checkpointing needs num_checkpoints, the number of layers under checkpoints: it sizes the buffers."
            )
        # Buffers outlast a call that leaves their size alone, so that configuring every step allocates nothing.
        buffers = current.buffers if current.buffers is not None and current.buffers.count == count else Buffers(count)
    return replace(settings, buffers=buffers)


def _read(source: Any) -> dict[str, Any]:
    """The arguments that a configuration stands for.

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
        raise TypeError(f"deepspeed_config is a dict or the path of a JSON file that holds one, not {content!r}.")
    if misplaced := sorted(key for key in _KEYS if key in content and not isinstance(content[key], Mapping)):
        raise ValueError(f'{where}: {", ".join(misplaced)} belong in the section "{_SECTION}".')
    section = content.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise TypeError(f'{where}: the section "{_SECTION}" holds keys and values, not {section!r}.')
    if unknown := sorted(str(key) for key in section if key not in _KEYS):
        raise ValueError(f'{where}: unknown in "{_SECTION}": {", ".join(unknown)}; known: {", ".join(_KEYS)}.')
    chosen: dict[str, Any] = {}
    for key, value in section.items():
        name, kind = _KEYS[key]
        if value is None and kind is int:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{where}: {key} is of type {kind.__name__}, not {value!r}.")
        chosen[name] = value
    return chosen
