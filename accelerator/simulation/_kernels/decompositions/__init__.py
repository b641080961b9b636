"""What the CPU has no kernel for, or not the right one, as functions of CPU tensors.

``DECOMPOSITIONS`` maps an op as the dispatcher spells it ("aten::mm.dtype", "aten::_thnn_fused_lstm_cell") to a function
that is called in place of the CPU's kernel, with the same arguments: each CUDA tensor is a CPU tensor over the same
memory, wrapped numbers are numbers, a device is the CPU. It returns what the op returns: new CPU tensors, or for an
argument that the schema says is written, anything (the caller's own argument is handed on). Written arguments are to be
written in place; an ``out=`` may be resized.

Random numbers are drawn from the CPU's default generator (or from ``generator``, where the op has one), which is seeded
from the CUDA generator around the call of every op that torch tags ``nondeterministic_seeded``. The functions are pure
otherwise: while a stream captures they run at each replay. They run below autograd and must not ask for gradients.

``CUDNN_SELECTION`` are kernels as they are: the host asks them which way to go, and they look at no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attention, convolution, dropout, matmul, normalization, recurrent, zeroing
from .cudnn_selection import CUDNN_SELECTION

__all__ = ["CUDNN_SELECTION", "DECOMPOSITIONS"]

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    name: function
    for room in (attention, convolution, dropout, zeroing, matmul, normalization, recurrent)
    for name, function in room.DECOMPOSITIONS.items()
}
