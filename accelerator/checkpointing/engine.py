"""The engine: a function runs without keeping what its backward needs, and runs again when backward asks for it.

It stands on saved-tensor hooks; ``frames`` says how.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as _torch_checkpoint
from torch import Tensor

from . import bindings, configuration
from .arguments import CONTAINERS, Arguments
from .frames import Frame, Replay, inside, unpack
from .rng import tracker
from .surroundings import Surroundings, accelerator_is_up
from .timing import Region

__all__ = ["checkpoint", "non_reentrant_checkpoint"]

_R = TypeVar("_R")

_innermost_hooks = bindings.innermost_hooks
_push_hooks = bindings.push_hooks
_pop_hooks = bindings.pop_hooks
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling

# Under this key the node that made a checkpoint's output has a weak reference to the checkpoint.
_MADE_BY = "accelerator.checkpointing"


def _is_ours(hooks: tuple[Any, Any] | None) -> bool:
    return hooks is not None and type(getattr(hooks[0], "__self__", None)) in (Frame, Replay)


def checkpoint(function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Call a function without keeping what its backward needs; it is computed again when backward comes to it.

    What it returns is what the function returns. Tensors in tuples, lists and dicts count as arguments like those given
    directly; arguments are never changed. Random numbers, autocast and the default device are those of the forward when
    the function runs again, and the caller's own afterwards. Arguments that require no gradient are fine if something
    else in the function does. With ``configure(partition_activations=True)`` every floating-point argument must be the
    same on all ranks of the group. Under ``torch.compile`` plain checkpoints are torch's own; others, and all while there
    are streams in the tracker, run outside of the compiled graph.

    Args:
        function: what to call. It has to do the same the second time.
        args: its positional arguments.
        kwargs: its keyword arguments, all of them: ``use_reentrant``, ``preserve_rng_state`` and others of torch's go to
            the function too.

    Returns:
        What the function returns.

    Raises:
        RuntimeError: for contiguous buffers without room, and a world without a group; what the function raises. Backward
            raises one for arguments that were edited in place and for a process group that was destroyed meanwhile, and
            ``torch.utils.checkpoint.CheckpointError`` if the function does something else the second time.

    Fork: Safe, if the function and the device of the arguments are.
    Initializes: Nothing by itself.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpointing.checkpoint(torch.exp, x).sum().backward()
        >>> torch.equal(x.grad, x.exp())
        True
    """
    if not _grad_enabled():
        return function(*args, **kwargs)
    if _compiling():
        return _run_compiled(function, args, kwargs)
    return _run(function, args, kwargs)


def non_reentrant_checkpoint(function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Do what ``checkpoint`` does; the name is for code that chooses between the two.

    Args:
        function: what to call. It has to do the same the second time.
        args: its positional arguments.
        kwargs: its keyword arguments, all of them.

    Returns:
        What the function returns.

    Raises:
        RuntimeError: as ``checkpoint``.

    Fork: Safe, if the function and the device of the arguments are.
    Initializes: Nothing by itself.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> x = torch.ones(2, requires_grad=True)
        >>> torch.autograd.grad(checkpointing.non_reentrant_checkpoint(torch.exp, x).sum(), x)[0]
        tensor([2.7183, 2.7183])
    """
    if not _grad_enabled():
        return function(*args, **kwargs)
    if _compiling():
        return _run_compiled(function, args, kwargs)
    return _run(function, args, kwargs)


def _run(function: Callable[..., _R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _R:
    settings = configuration.current
    hooks = None if _innermost_hooks is None else _innermost_hooks(False)
    simple = settings.plain and not kwargs and hooks is None and _innermost_hooks is not None
    versions: list[int | None] = []
    devices: set[torch.device] | None = None
    for item in args:
        if isinstance(item, Tensor):
            if not item.is_cpu:
                devices = {item.device} if devices is None else devices | {item.device}
            if item.is_inference():
                simple = False
            else:
                versions.append(item._version)
                continue
        elif isinstance(item, CONTAINERS):
            simple = False
        versions.append(None)
    if not simple:
        devices = _devices((args, kwargs), devices)
    frame = Frame(function, settings, Surroundings(settings.preserve_rng_state, devices))
    if simple:
        frame.args = args
        frame.versions = versions
    else:
        blind = _innermost_hooks is None
        nested = inside.depth > 0 if blind else _is_ours(hooks)
        frame.arguments = Arguments(args, kwargs, settings, hooks, inside=nested, blind=blind)
        if frame.arguments.links:
            frame.previous = _maker(frame.arguments.links)
    _push_hooks(frame.pack, unpack)
    inside.depth += 1
    try:
        if settings.watched:
            with Region(function, settings.profile, settings.synchronize, False):
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
    except BaseException:
        if frame.arguments is not None:
            frame.arguments.release()
        raise
    finally:
        inside.depth -= 1
        _pop_hooks()
    frame.done = True
    if simple:
        for item, version in zip(args, versions, strict=True):
            if version is not None and item._version != version:
                # Edited by the function itself: its history leads through this frame by now, which would so keep itself
                # alive. Backward will find it missing and say so.
                frame.args = None
                break
    elif frame.arguments is not None:
        frame.arguments.settle()
        if not settings.plain:
            _sign(result, frame)
    if not frame.holders and not _needs_gradient(result) and not _needs_gradient((args, kwargs)):
        warnings.warn(
            "Nothing in this checkpoint requires a gradient: neither its arguments nor anything that the function uses. "
            "Nothing is saved by it, and its outputs get no gradients.",
            stacklevel=3,
        )
    if settings.preserve_rng_state and not frame.surroundings.up and accelerator_is_up():
        raise RuntimeError(
            "The accelerator was initialized inside of a checkpoint, so that the random numbers of its forward could not be "
            "drawn again; initialize it before, or configure(preserve_rng_state=False)."
        )
    return result


def _devices(item: Any, found: set[torch.device] | None) -> set[torch.device] | None:
    """The devices of the tensors in a structure, beside the CPU."""
    if isinstance(item, Tensor):
        if not item.is_cpu:
            found = {item.device} | (found or set())
    elif isinstance(item, dict):
        for each in item.values():
            found = _devices(each, found)
    elif isinstance(item, (tuple, list)):
        for each in item:
            found = _devices(each, found)
    return found


def _needs_gradient(item: Any) -> bool:
    """Whether anything in a structure requires a gradient."""
    if isinstance(item, Tensor):
        return item.requires_grad
    if isinstance(item, dict):
        return any(_needs_gradient(each) for each in item.values())
    if isinstance(item, (tuple, list)):
        return any(_needs_gradient(each) for each in item)
    return False


def _sign(result: Any, frame: Frame) -> None:
    """Leave word at the outputs who made them, so that the next checkpoint finds out which backward comes to next."""
    for item in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(item, Tensor) and item.grad_fn is not None:
            node: Any = item.grad_fn
            node.metadata[_MADE_BY] = weakref.ref(frame)


def _maker(tensors: list[Tensor]) -> Frame | None:
    """The checkpoint that made one of these arguments.

    It follows from the graph alone, which is the same on every rank: ranks must agree on what they gather ahead.
    """
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            reference = node.metadata.get(_MADE_BY)
            frame: Frame | None = None if reference is None else reference()
            if frame is not None:
                return frame
    return None


def _run_compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces: torch's checkpoint, which it knows, where that does all that is configured."""
    settings = configuration.current
    if not settings.plain or settings.watched or tracker.has_streams:
        return _run_outside(function, args, kwargs)
    preserve, check = settings.preserve_rng_state, settings.determinism_check
    if kwargs:
        return _torch_checkpoint.checkpoint(
            lambda *inputs: function(*inputs, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve,
            determinism_check=check,
        )
    return _torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve, determinism_check=check
    )


_run_outside = bindings.outside_compile(_run)
