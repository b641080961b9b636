"""What stands in the graph for the tensors of a checkpointed function, and how they are made again.

During forward every tensor that an operation would save is replaced by a ``Holder``, which knows its ``Frame``; the frame
knows the function and its arguments. The first holder that backward unpacks makes the frame run the function again, up to the
last tensor that is needed, and fills the holders that are still alive, in the order in which they were made. So the graph of
the forward is the one that backward walks: gradients reach whatever the function used, as argument or not, through
``backward`` and ``torch.autograd.grad`` alike.

Frames refer to holders only weakly: what is recomputed dies with the part of the graph that needs it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as _torch_checkpoint
from torch import Tensor

from . import bindings, checks
from .arguments import Arguments
from .configuration import Settings
from .partition import changed
from .surroundings import Surroundings
from .timing import Region

_backward_id = bindings.backward_id
_push_hooks = bindings.push_hooks
_pop_hooks = bindings.pop_hooks
_set_grad_enabled = bindings.set_grad_enabled
_grad_enabled = torch.is_grad_enabled


class Inside(threading.local):
    """How many checkpoints this thread is in; asked only where torch cannot tell which hooks are in force."""

    depth = 0


inside = Inside()


class _Stop(BaseException):
    """Ends a recomputation when all that is needed is there; not an Exception, lest the function catch it."""


class Holder:
    """Stands in the graph for a tensor that is recomputed when it is needed."""

    __slots__ = ("__weakref__", "backward", "frame", "value", "version")

    # Which run of backward the value is for, and how often it had been edited then.
    backward: int
    version: int

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None


class Frame:
    """One call of a checkpointed function."""

    __slots__ = (
        "__weakref__",
        "args",
        "arguments",
        "done",
        "early_stop",
        "function",
        "holders",
        "lock",
        "metadata",
        "previous",
        "settings",
        "surroundings",
        "versions",
    )

    def __init__(self, function: Callable[..., Any], settings: Settings, surroundings: Surroundings) -> None:
        self.function = function
        self.settings = settings
        self.surroundings = surroundings
        self.args: tuple[Any, ...] | None = None
        self.versions: list[int | None] = []
        self.arguments: Arguments | None = None
        self.holders: list[weakref.ref[Holder]] = []
        self.metadata: list[Any] = []
        self.done = False
        # torch's switch, torch.utils.checkpoint.set_checkpoint_early_stop, holds here too.
        self.early_stop = _torch_checkpoint._enable_checkpoint_early_stop is not False
        self.lock = threading.RLock()
        self.previous: Frame | None = None

    def pack(self, tensor: Tensor) -> Holder:
        """The hook of the forward."""
        holder = Holder(self)
        self.holders.append(weakref.ref(holder))
        settings = self.settings
        if settings.compares:
            self.metadata.append(_with_digest(tensor) if settings.debug else (tensor.shape, tensor.dtype, tensor.device))
        return holder

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

    def recompute(self, holder: Holder, backward: int) -> None:
        """Run the function again and fill the holders.

        Raises:
            RuntimeError: as ``inputs``, and a ``torch.utils.checkpoint.CheckpointError`` if the function does not do
                again what it did.
        """
        with self.lock:
            if holder.value is not None and holder.backward == backward != -1:
                # Another thread of this backward was here first.
                return
            args, kwargs = self.inputs()
            if self.previous is not None and self.previous.arguments is not None:
                self.previous.arguments.start()
            replay = Replay(self, backward)
            settings = self.settings
            grad_enabled = _grad_enabled()
            _push_hooks(replay.pack, _same)
            inside.depth += 1
            try:
                _set_grad_enabled(True)
                if settings.watched:
                    with Region(self.function, settings.profile, settings.synchronize, True):
                        self.surroundings.run(self.function, args, kwargs)
                else:
                    self.surroundings.run(self.function, args, kwargs)
            except _Stop:
                pass
            except BaseException:
                self.clear()
                raise
            finally:
                _set_grad_enabled(grad_enabled)
                inside.depth -= 1
                _pop_hooks()
            if replay.mismatches or (replay.count != replay.expected and not replay.open_end):
                self.clear()
                raise replay.error()

    def clear(self) -> None:
        """Let go of what was recomputed."""
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                holder.value = None


class Replay:
    """One recomputation: the hook that catches what the function saves."""

    __slots__ = ("backward", "count", "expected", "frame", "mismatches", "open_end")

    def __init__(self, frame: Frame, backward: int) -> None:
        self.frame = frame
        self.backward = backward
        self.count = 0
        self.expected = len(frame.holders)
        self.mismatches: list[str] = []
        # Whether more tensors may come than there are holders: backward was called inside of the forward, which is not
        # done yet, and early stop is off.
        self.open_end = not frame.done and not frame.early_stop

    def pack(self, tensor: Tensor) -> Tensor:
        """The hook of the recomputation; what it keeps for the recomputed graph lets the function call backward itself."""
        frame = self.frame
        number = self.count
        self.count = number + 1
        if tensor.requires_grad:
            tensor = tensor.detach()
        if number >= self.expected:
            if frame.early_stop:
                # The function caught the exception that was to end it.
                raise _Stop
            return tensor
        holder = frame.holders[number]()
        if holder is not None:
            settings = frame.settings
            if settings.compares:
                metadata = _with_digest(tensor) if settings.debug else (tensor.shape, tensor.dtype, tensor.device)
                if metadata != frame.metadata[number]:
                    self.mismatches.append(
                        f"tensor {number}: {_described(frame.metadata[number])} in forward, {_described(metadata)} now"
                    )
            holder.value = tensor
            holder.version = tensor._version
            holder.backward = self.backward
        if number + 1 == self.expected and frame.early_stop:
            raise _Stop
        return tensor

    def error(self) -> Exception:
        """What to raise when the function did something else than in forward."""
        from torch.utils.checkpoint import CheckpointError

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


def _with_digest(tensor: Tensor) -> tuple[Any, ...]:
    """What a recomputed tensor has to have in common with the first one when values count too."""
    return tensor.shape, tensor.dtype, tensor.device, checks.digest(tensor)


def _described(metadata: tuple[Any, ...]) -> str:
    text = f"{metadata[1]} {list(metadata[0])} on {metadata[2]}"
    return f"{text} with digest {metadata[3]}" if len(metadata) > 3 else text


def _same(tensor: Tensor) -> Tensor:
    return tensor


def unpack(holder: Holder) -> Tensor:
    """The hook of backward."""
    backward = _backward_id()
    if holder.value is None or holder.backward != backward or backward == -1:
        holder.frame.recompute(holder, backward)
    value = holder.value
    if value is None:
        raise RuntimeError("A tensor of a checkpointed function was not recomputed, although others were; please report it.")
    if value._version != holder.version:
        raise RuntimeError(changed("a tensor that an operation needs for its gradient, in the middle"))
    holder.value = None
    if backward == -1:
        # Outside of backward nobody comes for the others.
        holder.frame.clear()
    return value
