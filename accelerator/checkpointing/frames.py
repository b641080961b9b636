"""What stands in the graph for the tensors of a checkpointed function, and how they are made again.

During forward every tensor that an operation would save is replaced by a ``Placeholder``, which knows its ``Frame``; the frame
knows the function and its arguments. The first placeholder that backward unpacks makes the frame run the function again and fills
the placeholders that are still alive, in the order in which they were made. So the graph of the forward is the one that backward
walks: gradients reach whatever the function used, as argument or not, through ``backward`` and ``torch.autograd.grad`` alike.

Frames refer to placeholders only weakly: what is recomputed dies with the part of the graph that needs it. The graph of the
recomputation refers to no frame once the function has returned: torch keeps the hook in it, where Python's collector does not
see it, and a function may keep that graph alive.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from . import bindings, checks
from .arguments import Arguments
from .configuration import Settings
from .forward_state import ForwardState
from .partition import changed
from .timing import Region

_backward_id = bindings.backward_id
_backward_group = bindings.backward_group
_push_hooks = bindings.push_hooks
_pop_hooks = bindings.pop_hooks
_set_grad_enabled = bindings.set_grad_enabled
_grad_enabled = torch.is_grad_enabled
_weak = weakref.ref

# From how many bytes in the largest tensor that a function saves it pays to stop its recomputation after the last one: the
# exception that does it costs as much as some twenty operations on tensors smaller than this.
LARGE = 2**16

# Seconds between two looks at whether another thread is done.
_PATIENCE = 0.001


class Inside(threading.local):
    """How many checkpoints this thread is in; asked only where torch cannot tell which hooks are in force."""

    depth = 0


inside = Inside()
hooks_unreadable = bindings.innermost_hooks is None


class _Stop(BaseException):
    """Ends a recomputation when all that is needed is there; not an Exception, lest the function catch it."""


class Placeholder:
    """Stands in the graph for a tensor that is recomputed when it is needed."""

    __slots__ = ("__weakref__", "found", "frame")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        # The tensor, which run of backward it is for, and how often it had been edited then.
        self.found: tuple[Tensor, Any, int] | None = None


class Frame:
    """One call of a checkpointed function. It is the hook of its forward itself, through which hooks around it are found."""

    __slots__ = (
        "__weakref__",
        "_user_hooks",
        "args",
        "arguments",
        "compares",
        "context",
        "done",
        "explain",
        "forward_state",
        "function",
        "largest",
        "metadata",
        "placeholders",
        "previous",
        "running",
        "settings",
        "stops",
        "versions",
    )

    # With this and _user_hooks torch's selective checkpoints tell hooks like this from those of a user.
    _checkpoint_internal = True

    def __init__(self, function: Callable[..., Any], settings: Settings, forward_state: ForwardState) -> None:
        self.function = function
        self.settings = settings
        self.forward_state = forward_state
        self.args: tuple[Any, ...] | None = None
        self.versions: list[int | None] = []
        self.arguments: Arguments | None = None
        self.placeholders: list[weakref.ref[Placeholder]] = []
        self.compares = settings.compares
        self.metadata: list[tuple[Any, ...]] = []
        # Bytes in the largest tensor saved.
        self.largest = 0
        self.done = False
        # Whether a recomputation ends after the last tensor saved; until the forward is done nobody knows which that is.
        self.stops = True
        # The recomputations under way, the oldest first.
        self.running: list[Recomputation] = []
        self.previous: Frame | None = None
        # What a recomputation runs under, and what raises its error with all that is known.
        self.context: AbstractContextManager[Any] | None = None
        self.explain: Callable[[Exception], None] | None = None
        # Those around it, while it is on torch's stack; afterwards the graph that keeps it must not lead to a user's hooks.
        self._user_hooks: tuple[Any, Any] | None = None

    def __call__(self, tensor: Tensor) -> Placeholder:
        placeholder = Placeholder(self)
        self.placeholders.append(_weak(placeholder))
        size = tensor.numel() * tensor.itemsize
        if size > self.largest:
            self.largest = size
        if self.compares:
            metadata = (tensor.shape, tensor.dtype, tensor.device)
            self.metadata.append((*metadata, checks.digest(tensor)) if self.settings.debug else metadata)
        return placeholder

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, for another run.

        Raises:
            RuntimeError: if one was edited in place, or cannot be brought back.
        """
        if self.arguments is not None:
            return self.arguments.restore()
        args = self.args
        for number, version in enumerate(self.versions):
            if version is not None and (args is None or args[number]._version != version):
                raise RuntimeError(changed(f"argument {number}"))
        return args or (), {}

    def recompute(self, placeholder: Placeholder, backward: Any) -> tuple[Tensor, Any, int]:
        """Run the function again and fill the placeholders.

        Returns:
            What this placeholder has then.

        Raises:
            RuntimeError: as ``inputs``, and a ``torch.utils.checkpoint.CheckpointError`` if the function does not do
                again what it did.
        """
        recomputation = Recomputation(self, backward)
        running = self.running
        running.append(recomputation)
        try:
            if running[0] is not recomputation:
                _wait_for_turn(recomputation, running, placeholder)
                found = placeholder.found
                if found is not None and found[1] == backward != -1:
                    # Another thread of this backward was here first.
                    return found
            self._run(recomputation)
            if recomputation.mismatches or (recomputation.count != recomputation.expected and not recomputation.open_end):
                raise recomputation.error()
            found = placeholder.found
            if found is None:
                raise RuntimeError("A tensor of a checkpointed function was not recomputed, although others were.")
            return found
        except BaseException as error:
            self.clear()
            if self.explain is not None and isinstance(error, CheckpointError):
                self.explain(error)
            raise
        finally:
            running.remove(recomputation)
            recomputation.frame = None

    def _run(self, recomputation: Recomputation) -> None:
        args, kwargs = self.inputs()
        if self.previous is not None and self.previous.arguments is not None:
            self.previous.arguments.start()
        settings = self.settings
        grad_enabled = _grad_enabled()
        _push_hooks(recomputation, _same)
        if hooks_unreadable:
            inside.depth += 1
        try:
            _set_grad_enabled(True)
            if settings.watched:
                with Region(self.function, settings.profile, settings.synchronize, True):
                    self.forward_state.run(self.function, args, kwargs, self.context)
            else:
                self.forward_state.run(self.function, args, kwargs, self.context)
        except _Stop:
            pass
        finally:
            _set_grad_enabled(grad_enabled)
            if hooks_unreadable:
                inside.depth -= 1
            _pop_hooks()

    def clear(self) -> None:
        """Let go of what was recomputed."""
        for reference in self.placeholders:
            placeholder = reference()
            if placeholder is not None:
                placeholder.found = None


class Recomputation:
    """One recomputation: the hook that catches what the function saves."""

    __slots__ = ("backward", "count", "expected", "frame", "mismatches", "open_end", "stops", "thread")

    _checkpoint_internal = True
    _user_hooks: tuple[Any, Any] | None = None

    def __init__(self, frame: Frame, backward: Any) -> None:
        # None when it is over.
        self.frame: Frame | None = frame
        self.backward = backward
        self.thread = threading.get_ident()
        self.count = 0
        self.expected = len(frame.placeholders)
        self.mismatches: list[str] = []
        self.stops = frame.stops
        # Whether more tensors may come than there are placeholders: backward was called inside of the forward, which is not
        # done yet, and early stop is off.
        self.open_end = not frame.done and not frame.stops

    def __call__(self, tensor: Tensor) -> Tensor:
        """What it keeps for the recomputed graph lets the function call backward itself."""
        frame = self.frame
        number = self.count
        self.count = number + 1
        if tensor.requires_grad:
            tensor = tensor.detach()
        if frame is None or number >= self.expected:
            if self.stops:
                # The function caught the exception that was to end it, and went on.
                self.count = number
                raise _Stop
            return tensor
        placeholder = frame.placeholders[number]()
        if placeholder is not None:
            if frame.compares:
                before = frame.metadata[number]
                metadata = (tensor.shape, tensor.dtype, tensor.device)
                if len(before) > 3:
                    metadata = (*metadata, checks.digest(tensor))  # type: ignore[assignment]
                if metadata != before:
                    self.mismatches.append(f"tensor {number}: {_described(before)} in forward, {_described(metadata)} now")
            placeholder.found = (tensor, self.backward, tensor._version)
        if self.stops and self.count == self.expected:
            raise _Stop
        return tensor

    def error(self) -> CheckpointError:
        """What to raise when the function did something else than in forward."""
        hint = (
            "The function must do the same each time: it may not depend on state that changes between forward and backward, "
            "nor on random numbers drawn outside of torch."
        )
        if self.mismatches:
            return CheckpointError(
                f"Recomputed tensors of a checkpointed function differ from those of its forward: "
                f"{'; '.join(self.mismatches)}. {hint}"
            )
        return CheckpointError(
            f"A checkpointed function saved {self.expected} tensors in forward, but {self.count} when recomputed. {hint}"
        )


def _described(metadata: tuple[Any, ...]) -> str:
    text = f"{metadata[1]} {list(metadata[0])} on {metadata[2]}"
    return f"{text} with digest {metadata[3]}" if len(metadata) > 3 else text


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _wait_for_turn(recomputation: Recomputation, running: list[Recomputation], placeholder: Placeholder) -> None:
    """Wait for the recomputations that other threads began before, as two at once would draw each other's random numbers.

    Not for one that itself waits: for autograd, which may need this very thread to run a node, or for its own turn.
    """
    while any(
        each.thread != recomputation.thread and not _waits(each.thread) for each in running[: running.index(recomputation)]
    ) and not (placeholder.found is not None and placeholder.found[1] == recomputation.backward != -1):
        time.sleep(_PATIENCE)


def _waits(thread: int) -> bool:
    top = sys._current_frames().get(thread)
    return top is None or top.f_code is bindings.engine_code or top.f_code is _wait_for_turn.__code__


def unpack(placeholder: Placeholder) -> Tensor:
    """The hook of backward. A tensor that is unpacked twice in one backward is recomputed twice."""
    backward = _backward_group() or _backward_id()
    found = placeholder.found
    if found is None or found[1] != backward or backward == -1:
        found = placeholder.frame.recompute(placeholder, backward)
    tensor, _, version = found
    if tensor._version != version:
        raise RuntimeError(changed("a tensor that an operation needs for its gradient, in the middle"))
    placeholder.found = None
    if backward == -1:
        # Outside of backward nobody comes for the others.
        placeholder.frame.clear()
    return tensor
