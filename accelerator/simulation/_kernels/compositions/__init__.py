"""Ops that have a CUDA kernel and no CPU kernel, as pure functions of CPU tensors.

Each is named as the dispatcher names it. What is not here and has no CPU kernel either is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attention, convolution, dropout, losses, matmul, normalization, recurrent

COMPOSITIONS: dict[str, Callable[..., Any]] = {
    name: function
    for room in (attention, convolution, dropout, losses, matmul, normalization, recurrent)
    for name, function in room.COMPOSITIONS.items()
}
