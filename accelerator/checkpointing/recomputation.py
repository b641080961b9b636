"""A checkpoint's graph and recomputation: placeholders for the tensors that operations save, which backward fills and compares.

During the forward, a saved-tensor hook replaces every tensor that an operation saves with a ``Placeholder``, which refers to
its ``Frame``. The frame has the function and its arguments. When backward unpacks the first placeholder, the frame runs the
function again, and the hook of that ``Recomputation`` fills the placeholders in order, and compares shape, type and device of
each tensor with the forward's. Backward thus walks the graph of the forward, and gradients reach everything the function used,
as argument or not.

Frames refer to placeholders weakly, so a recomputed tensor lives as long as the part of the graph that needs it. The graph of
the recomputation refers to no frame after the function has returned: autograd keeps the hook in C++, where Python's garbage
collector cannot see it, and a function may keep that graph alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from . import bindings, debug_checks, producers, waiting
from .arguments import Hooks, keep_arguments
from .changing_state import shares
from .configuration import Settings
from .containers import shape_of
from .forward_state import ForwardState, clone_unseen, enter_context
from .partition import edited_in_place
from .timing import Region

# If a function saves a tensor of at least this many bytes, its recomputation stops after the last saved tensor. The exception
# that stops it costs as much as some twenty operations on smaller tensors.
EARLY_STOP_BYTES = 2**16


class _Depth(threading.local):
    """How many checkpoints run in this thread. Used only if torch does not report the innermost hooks."""

    value = 0


_depth = _Depth()


class _EarlyStop(BaseException):
    """Ends a recomputation after the last saved tensor. Not an ``Exception``, so that the function does not catch it."""


_Metadata = tuple[torch.Size, torch.dtype, torch.device]
# A recomputed tensor, the run of backward it is for, and its version then.
_Recomputed = tuple[Tensor, Any, int]


class Placeholder:
    """Takes the place of a saved tensor in the graph."""

    __slots__ = ("__weakref__", "frame", "metadata", "recomputed")

    def __init__(self, frame: Frame, tensor: Tensor) -> None:
        self.frame = frame
        shape = shape_of(tensor) if tensor.is_nested else tensor.shape
        self.metadata: _Metadata = (shape, tensor.dtype, tensor.device)
        self.recomputed: _Recomputed | None = None

    def recomputed_for(self, backward: Any) -> _Recomputed | None:
        """Return what was recomputed for this run of backward. Outside of backward, each unpacking recomputes."""
        recomputed = self.recomputed
        return recomputed if recomputed is not None and recomputed[1] == backward != bindings.NO_BACKWARD else None


class Frame:
    """One call of a checkpointed function: ``forward()`` runs it once, then ``recompute()`` as often as backward needs.

    A frame is the pack hook of its own forward.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_early_stop",
        "_explain",
        "_forward_context",
        "_function",
        "_producer",
        "_recomputations",
        "_recompute_context",
        "_saves_large_tensor",
        "_settings",
        "_user_hooks",
        "compares",
        "digests",
        "forward_state",
        "has_ended",
        "placeholders",
        "stops_early",
    )

    # torch's selective checkpoints recognize the hooks of a checkpoint by this attribute and by _user_hooks.
    _checkpoint_internal = True

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> None:
        innermost_hooks = bindings.innermost_hooks
        outer_hooks = None if innermost_hooks is None else innermost_hooks(False)
        if innermost_hooks is None:
            nested = _depth.value > 0
        else:
            nested = outer_hooks is not None and isinstance(outer_hooks[0], (Frame, Recomputation))
        self._function = function
        self._settings = settings
        # The hooks around the forward while it runs. Afterwards the graph must not keep a user's hooks alive.
        self._user_hooks: Hooks | None = outer_hooks
        self._early_stop, debug = bindings.checkpoint_switches()
        self._forward_context: AbstractContextManager[Any] | None = None
        self._recompute_context: AbstractContextManager[Any] | None = None
        # What explains a ``CheckpointError``.
        self._explain: Callable[[Exception], None] | None = None
        if debug or settings.context_fn is not None:
            self._make_contexts(debug)
        self._arguments = keep_arguments(args, kwargs, settings, outer_hooks, nested=nested)
        self.forward_state = ForwardState(settings.preserve_rng_state, self._arguments.devices, function, args, kwargs)
        # The checkpoint that backward reaches next, if it produced one of the arguments.
        self._producer: Frame | None = producers.find_producer(self._arguments.stored) if self._arguments.stored else None
        self.placeholders: list[weakref.ref[Placeholder]] = []
        self._saves_large_tensor = False
        # Whether recomputed tensors are compared with the saved ones.
        self.compares = settings.determinism_check != "none"
        self.digests = debug_checks.Digests() if settings.debug else None
        # Whether recomputation stops after the last saved tensor. The function may call backward before the forward has ended.
        self.stops_early = self._early_stop is not False
        self.has_ended = False
        # The recomputations that run now, the oldest first.
        self._recomputations: list[Recomputation] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the caller's own arguments, and save placeholders."""
        bindings.push_hooks(self, unpack)
        _depth.value += 1
        try:
            if self._forward_context is None and not self._settings.measures:
                result = self._function(*args, **kwargs)
            else:
                result = self._call_in_contexts(args, kwargs)
        except BaseException:
            self._arguments.release()
            raise
        finally:
            _depth.value -= 1
            bindings.pop_hooks()
            self._user_hooks = self._forward_context = None
        if self._early_stop is None:
            # Ranks whose tensors differ in size must still run the same collectives.
            self.stops_early = self._saves_large_tensor or bindings.distributed()
        self.has_ended = True
        self._arguments.forward_ended()
        if self.digests is not None:
            self.digests.forward_ended()
        self.forward_state.forward_ended()
        return result

    def _make_contexts(self, debug: bool) -> None:
        """Make the contexts of the forward and of the recomputation."""
        context_fn = self._settings.context_fn
        if context_fn is None:
            self._forward_context, self._recompute_context, self._explain = bindings.debug_contexts()
        elif debug:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        else:
            self._forward_context, self._recompute_context = context_fn()

    def _call_in_contexts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            if self._settings.measures:
                stack.enter_context(Region(self._function, self._settings, self._arguments.devices, recompute=False))
            if self._forward_context is not None:
                enter_context(stack, self._forward_context)
            return self._function(*args, **kwargs)
        raise RuntimeError("the forward context of context_fn swallowed the exception of a checkpointed function")

    def __call__(self, tensor: Tensor) -> Placeholder:
        """Replace a tensor that an operation of the forward saves."""
        placeholder = Placeholder(self, tensor)
        self.placeholders.append(weakref.ref(placeholder))
        if not self._saves_large_tensor and tensor.numel() * tensor.itemsize >= EARLY_STOP_BYTES:
            self._saves_large_tensor = True
        if self.digests is not None:
            self.digests.record(tensor)
        return placeholder

    def prefetch(self) -> None:
        """Start to fetch the arguments from the host or from other ranks, before a recomputation needs them."""
        self._arguments.prefetch()

    def recompute(self, placeholder: Placeholder, backward: Any) -> _Recomputed:
        """Run the function again and fill the placeholders.

        Returns:
            The content of ``placeholder``.

        Raises:
            RuntimeError: if an argument was edited in place or cannot be restored, and a
                ``torch.utils.checkpoint.CheckpointError`` if the function does not repeat what it did in the forward.
        """
        if self.digests is not None and not self.has_ended:
            # The function itself calls backward.
            self.digests.exclude_edited()
        recomputation = Recomputation(self, backward)
        running = self._recomputations
        running.append(recomputation)
        try:
            if running[0] is not recomputation:
                waiting.wait_for_turn(recomputation, running, lambda: placeholder.recomputed_for(backward) is not None)
                recomputed = placeholder.recomputed_for(backward)
                if recomputed is not None:
                    # Another thread of this backward recomputed it.
                    return recomputed
            self._run(recomputation)
            recomputation.check()
            if placeholder.recomputed is None:
                raise RuntimeError("a tensor of a checkpointed function was not recomputed, although others were")
            return placeholder.recomputed
        except BaseException as error:
            self.clear()
            if self._explain is not None and isinstance(error, CheckpointError):
                self._explain(error)
            raise
        finally:
            running.remove(recomputation)
            recomputation.frame = None

    def _run(self, recomputation: Recomputation) -> None:
        args, kwargs = self._arguments.restore()
        if self._producer is not None:
            self._producer.prefetch()
        grad_enabled = torch.is_grad_enabled()
        bindings.push_hooks(recomputation, _identity)
        _depth.value += 1
        try:
            bindings.set_grad_enabled(True)
            if self._settings.measures:
                with Region(self._function, self._settings, self._arguments.devices, recompute=True):
                    self.forward_state.reproduce(self._function, args, kwargs, self._recompute_context, recomputation.backward)
            else:
                self.forward_state.reproduce(self._function, args, kwargs, self._recompute_context, recomputation.backward)
        except _EarlyStop:
            pass
        finally:
            bindings.set_grad_enabled(grad_enabled)
            _depth.value -= 1
            bindings.pop_hooks()

    def clear(self) -> None:
        """Release what was recomputed."""
        for reference in self.placeholders:
            placeholder = reference()
            if placeholder is not None:
                placeholder.recomputed = None


class Recomputation:
    """One recomputation of a frame: the pack hook that fills its placeholders."""

    __slots__ = (
        "_allows_more",
        "_changing",
        "_count",
        "_expected",
        "_mismatches",
        "_stops_early",
        "backward",
        "frame",
        "thread",
    )

    _checkpoint_internal = True
    _user_hooks: Hooks | None = None

    def __init__(self, frame: Frame, backward: Any) -> None:
        # None when the recomputation has ended: a function may keep the recomputed graph, and with it this hook.
        self.frame: Frame | None = frame
        self.backward = backward
        self.thread = threading.get_ident()
        self._count = 0
        self._expected = len(frame.placeholders)
        self._mismatches: list[str] = []
        self._stops_early = frame.stops_early
        # The memory of state that the function changes, and that is restored when it has ended.
        self._changing = frame.forward_state.memory
        # If the function calls backward itself, the forward has not saved all its tensors yet.
        self._allows_more = not frame.has_ended and not self._stops_early

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill the next placeholder. The recomputed graph gets the tensor, so that the function can call backward itself."""
        frame = self.frame
        index = self._count
        if tensor.requires_grad:
            tensor = tensor.detach()
        if frame is None or index >= self._expected:
            if self._stops_early:
                # The function caught the exception that should have stopped it.
                raise _EarlyStop
            self._count = index + 1
            return tensor
        self._count = index + 1
        if self._changing is not None and shares(tensor, self._changing):
            tensor = clone_unseen(tensor)
        placeholder = frame.placeholders[index]()
        if placeholder is not None:
            if frame.compares:
                shape = shape_of(tensor) if tensor.is_nested else tensor.shape
                before, now = placeholder.metadata, (shape, tensor.dtype, tensor.device)
                if before != now:
                    self._mismatches.append(f"tensor {index}: {_describe(before)} in forward, {_describe(now)} now")
                elif frame.digests is not None and (difference := frame.digests.difference(index, tensor)) is not None:
                    self._mismatches.append(f"tensor {index}: {_describe(now)} with {difference}")
            placeholder.recomputed = (tensor, self.backward, tensor._version)
        if self._stops_early and self._count == self._expected:
            raise _EarlyStop
        return tensor

    def check(self) -> None:
        """Raise a ``CheckpointError`` if the function did not repeat what it did in the forward."""
        hint = (
            "the function must do the same each time: it may not depend on state that changes between forward and backward, "
            "nor on random numbers drawn outside of torch"
        )
        if self._mismatches:
            raise CheckpointError(
                "recomputed tensors of a checkpointed function differ from those of its forward: "
                f"{'; '.join(self._mismatches)}; {hint}"
            )
        if self._count != self._expected and not self._allows_more:
            raise CheckpointError(
                f"a checkpointed function saved {self._expected} tensors in forward, but {self._count} when recomputed; {hint}"
            )


def unpack(placeholder: Placeholder) -> Tensor:
    """Return a saved tensor to backward. A tensor that is unpacked twice in one backward is recomputed twice."""
    backward = bindings.current_backward()
    recomputed = placeholder.recomputed_for(backward)
    if recomputed is None:
        recomputed = placeholder.frame.recompute(placeholder, backward)
    tensor, _, version = recomputed
    if tensor._version != version:
        raise RuntimeError(edited_in_place("a tensor saved by an operation"))
    placeholder.recomputed = None
    if backward == bindings.NO_BACKWARD:
        # Outside of backward, nothing else uses the other recomputed tensors.
        placeholder.frame.clear()
    return tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _describe(metadata: _Metadata) -> str:
    shape, dtype, device = metadata
    return f"{dtype} {list(shape)} on {device}"
