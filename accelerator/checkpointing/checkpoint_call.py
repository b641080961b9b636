"""``checkpoint``: choose between a plain call, a ``Frame``, and torch's own checkpoint under ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint

from . import bindings, configuration, producers
from .containers import tensors_in
from .recomputation import Frame
from .rng_tracker import tracker

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checkpoint(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function without saving what its backward needs. Backward runs the function again to recompute it.

    Tensors nested in tuples, lists, dicts, namedtuples and dataclasses are treated like top-level arguments. Instances of
    subclasses of these types, and all other objects, are passed to the function as they are. Arguments are never changed.
    They need not require gradients if something else in the function does.

    The recomputation uses the forward's random numbers, autocast, current device, default device and dtype, modes of torch and
    switches of ``torch.backends``. The caller's own are restored afterwards. Buffers that the function changes, such as running
    statistics, change once.

    With ``configure(partition_activations=True)`` every floating-point argument must be the same on all ranks of the group.
    Arguments that were partitioned, offloaded or stored in contiguous buffers are leaves in the recomputation. The function
    can call ``torch.autograd.grad`` for its arguments, but not for the tensors they were computed from.

    Recomputation stops after the last saved tensor if the function saves a tensor of at least 64 KiB or if torch.distributed
    is initialized. Otherwise it runs to the end of the function, which is faster.
    ``torch.utils.checkpoint.set_checkpoint_early_stop`` overrides this choice. Older torches, 2.6 among them, switch early
    stop on by default, so there only ``set_checkpoint_early_stop(False)`` has an effect.
    ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` works too. A tensor that is unpacked twice in one backward is
    recomputed twice.

    Under ``torch.compile`` a plain checkpoint is torch's own. These run outside of the compiled graph: checkpoints with other
    settings, those with ``determinism_check="debug"``, and all checkpoints while the tracker has random streams.

    Args:
        function: the function. It must do the same each time it is called.
        args: its positional arguments.
        kwargs: its keyword arguments. torch's ``use_reentrant``, ``preserve_rng_state`` and others go to the function too.

    Returns:
        The result of the function.

    Raises:
        RuntimeError: if partitioning has no group in a world of several ranks, or if the function initializes the accelerator.
            In backward, if an argument was edited in place or the process group was destroyed.
        ValueError: if both ``configure(context_fn=)`` and torch's debug switch are set.
        torch.utils.checkpoint.CheckpointError: in backward, if the function does not repeat what it did in the forward.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpointing.checkpoint(torch.exp, x).sum().backward()
        >>> torch.equal(x.grad, x.exp())
        True
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return _checkpoint_compiled(function, args, kwargs)
    return _checkpoint(function, args, kwargs)


def non_reentrant_checkpoint(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Do the same as ``checkpoint``. Code written for DeepSpeed chooses between the two names.

    Args:
        function: the function. It must do the same each time it is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of the function.

    Raises:
        RuntimeError: as ``checkpoint``.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> torch.autograd.grad(checkpointing.non_reentrant_checkpoint(torch.exp, x).sum(), x)[0]
        tensor([2.7183, 2.7183])
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return _checkpoint_compiled(function, args, kwargs)
    return _checkpoint(function, args, kwargs)


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings = configuration.current
    frame = Frame(function, args, kwargs, settings)
    result = frame.forward(args, kwargs)
    if not settings.keeps_arguments:
        producers.tag_outputs(result, frame)
    if not frame.placeholders and not any(tensor.requires_grad for tensor in tensors_in((result, args, kwargs))):
        warnings.warn(
            "nothing in this checkpoint requires a gradient: neither its arguments nor anything that the function uses; "
            "the checkpoint saves nothing, and its outputs get no gradients",
            stacklevel=3,
        )
    return result


def _checkpoint_compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dynamo traces this. It knows torch's checkpoint, which does all that plain settings need."""
    settings = configuration.current
    if not settings.keeps_arguments or settings.measures or settings.debug or tracker.has_streams:
        return _checkpoint_outside_graph(function, args, kwargs)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
    }
    if settings.context_fn is not None:
        options["context_fn"] = settings.context_fn
    if kwargs:
        return torch_checkpoint.checkpoint(lambda *inputs: function(*inputs, **kwargs), *args, **options)
    return torch_checkpoint.checkpoint(function, *args, **options)


_checkpoint_outside_graph = bindings.outside_compile(_checkpoint)
