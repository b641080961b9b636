"""The engine: a function runs without keeping what its backward needs, and runs again when backward asks for it.

It stands on saved-tensor hooks; ``frames`` says how.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as _torch_checkpoint
from torch import Tensor

from . import bindings, configuration
from .arguments import ATOMS, Arguments, tensors_in
from .forward_state import ForwardState, accelerator
from .frames import LARGE, Frame, Recomputation, inside, unpack
from .rng import tracker
from .timing import Region

__all__ = ["checkpoint", "non_reentrant_checkpoint"]

_R = TypeVar("_R")

_innermost_hooks = bindings.innermost_hooks
_push_hooks = bindings.push_hooks
_pop_hooks = bindings.pop_hooks
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling

# Under this key the node that made a checkpoint's output has a weak reference to the checkpoint.
_PRODUCER = "accelerator.checkpointing"


def checkpoint(function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Call a function without keeping what its backward needs; it is computed again when backward comes to it.

    What it returns is what the function returns. Tensors in tuples, lists, dicts and dataclasses, and in kinds derived from
    them, count as arguments like those given directly; arguments are never changed. Random numbers, autocast, the default
    device and dtype and ``torch.use_deterministic_algorithms`` are those of the forward when the function runs again, and
    the caller's own afterwards. Arguments that require no gradient are fine if something else in the function does. With
    ``configure(partition_activations=True)`` every floating-point argument must be the same on all ranks of the group.
    Arguments that were partitioned, or kept on the host or in buffers, come back as leaves: a function that calls
    ``torch.autograd.grad`` may do so for its arguments, but not for what they were computed from.

    The function runs again up to the last tensor that backward needs if one of those it saves has at least 64 KiB or
    torch.distributed is in use, else to its end, which costs less; ``torch.utils.checkpoint.set_checkpoint_early_stop``
    decides otherwise (on older torches, 2.6 among them, its True cannot be told from what torch starts with, and only its
    False counts), and ``set_checkpoint_debug_enabled`` holds too. A tensor that is unpacked twice in one backward is
    computed a third time. Under ``torch.compile`` plain checkpoints are torch's own; others, those with
    ``determinism_check="debug"``, and all while there are streams in the tracker, run outside of the compiled graph.

    Args:
        function: what to call. It has to do the same the second time.
        args: its positional arguments.
        kwargs: its keyword arguments, all of them: ``use_reentrant``, ``preserve_rng_state`` and others of torch's go to
            the function too.

    Returns:
        What the function returns.

    Raises:
        RuntimeError: for a world of several ranks without a group, if the function is what initializes the accelerator, and
            what the function raises. Backward raises one for arguments that were edited in place and for a process group that
            was destroyed meanwhile, and ``torch.utils.checkpoint.CheckpointError`` if the function does something else the
            second time.

    Fork: safe, initializes nothing.

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

    Fork: safe, initializes nothing.

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
    hooks_unreadable = _innermost_hooks is None
    simple = settings.plain and not kwargs and hooks is None and not hooks_unreadable
    versions: list[int | None] = []
    devices: set[torch.device] | None = None
    if simple:
        for item in args:
            if isinstance(item, Tensor):
                if not item.is_cpu:
                    devices = {item.device} if devices is None else devices | {item.device}
                try:
                    versions.append(item._version)
                except RuntimeError:
                    # Tensors of inference mode do not count their edits.
                    simple = False
            elif type(item) in ATOMS:
                versions.append(None)
            else:
                simple = False
    if simple:
        frame = Frame(function, settings, ForwardState(settings.preserve_rng_state, devices))
        frame.args = args
        frame.versions = versions
    else:
        devices = {tensor.device for tensor in tensors_in((args, kwargs)) if not tensor.is_cpu}
        frame = Frame(function, settings, ForwardState(settings.preserve_rng_state, devices))
        nested = inside.depth > 0 if hooks_unreadable else hooks is not None and type(hooks[0]) in (Frame, Recomputation)
        frame.arguments = Arguments(args, kwargs, settings, hooks, inside=nested, hooks_unreadable=hooks_unreadable)
        if frame.arguments.links:
            frame.previous = _producer(frame.arguments.links)
    early_stop = bindings.early_stop()
    frame.stops = early_stop is not False
    context = None
    if bindings.debug_enabled():
        context, frame.context, frame.explain = bindings.debug_contexts()
    elif settings.context_fn is not None:
        context, frame.context = settings.context_fn()
    frame._user_hooks = hooks
    _push_hooks(frame, unpack)
    if hooks_unreadable:
        inside.depth += 1
    try:
        if context is not None or settings.watched:
            result = _run_watched(function, args, kwargs, settings, context)
        else:
            result = function(*args, **kwargs)
    except BaseException:
        if frame.arguments is not None:
            frame.arguments.release()
        raise
    finally:
        if hooks_unreadable:
            inside.depth -= 1
        _pop_hooks()
        frame._user_hooks = None
    # Ranks that differ in the sizes of their tensors must not differ in how far they run a function that communicates.
    frame.stops = (frame.largest >= LARGE or bindings.distributed()) if early_stop is None else early_stop
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
            _tag_outputs(result, frame)
    if not frame.placeholders and not any(tensor.requires_grad for tensor in tensors_in((result, args, kwargs))):
        warnings.warn(
            "Nothing in this checkpoint requires a gradient: neither its arguments nor anything that the function uses. "
            "Nothing is saved by it, and its outputs get no gradients.",
            stacklevel=3,
        )
    if settings.preserve_rng_state and frame.forward_state.up is None and accelerator() is not None:
        raise RuntimeError(
            "The accelerator was initialized inside of a checkpoint, so that the random numbers of its forward could not be "
            "drawn again; initialize it before, or configure(preserve_rng_state=False)."
        )
    return result


def _run_watched(
    function: Callable[..., _R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: configuration.Settings,
    context: AbstractContextManager[Any] | None,
) -> _R:
    with ExitStack() as stack:
        if settings.watched:
            stack.enter_context(Region(function, settings.profile, settings.synchronize, False))
        if context is not None:
            stack.enter_context(context)
        return function(*args, **kwargs)
    raise RuntimeError("The context that context_fn gave for the forward of a checkpoint swallowed the function's exception.")


def _tag_outputs(result: Any, frame: Frame) -> None:
    """Leave word at the outputs who made them, so that the next checkpoint finds out which backward comes to next."""
    for tensor in tensors_in(result):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_PRODUCER] = weakref.ref(frame)


def _producer(tensors: list[Tensor]) -> Frame | None:
    """The checkpoint that made one of these arguments.

    It follows from the graph alone, which is the same on every rank: ranks must agree on what they gather ahead.
    """
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            reference = node.metadata.get(_PRODUCER)
            frame: Frame | None = None if reference is None else reference()
            if frame is not None:
                return frame
    return None


def _run_compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces: torch's checkpoint, which it knows, where that does all that is configured."""
    settings = configuration.current
    if not settings.plain or settings.watched or settings.debug or tracker.has_streams:
        return _run_outside(function, args, kwargs)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
    }
    if settings.context_fn is not None:
        options["context_fn"] = settings.context_fn
    if kwargs:
        return _torch_checkpoint.checkpoint(lambda *inputs: function(*inputs, **kwargs), *args, **options)
    return _torch_checkpoint.checkpoint(function, *args, **options)


_run_outside = bindings.outside_compile(_run)
