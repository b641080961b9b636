"""Random fills of large CPU tensors write nothing, so that a model that is initialized on the CPU uses no host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops import bindings, schemas
from .computing import SMALL_COPY

_RANDOM_FILLS = (
    *("normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float", "bernoulli_.Tensor"),
    *("cauchy_", "exponential_", "geometric_", "log_normal_"),
)
# The dispatcher visits this key for tensors of every device, before the key of the device.
_KEY = bindings.DispatchKey.BackendSelect

_libraries: list[Any] = []  # the overrides end with their library


def install() -> None:
    """Override the random fills of this process."""
    library = bindings.make_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    for name in _RANDOM_FILLS:
        library.impl(f"aten::{name}", _KEY, _fill(name), True)


def _fill(name: str) -> Callable[..., Any]:
    base, overload = schemas.split(name)
    operator: Any = getattr(getattr(torch.ops.aten, base), overload or "default")
    below = bindings.keys_after(_KEY)

    def run(keyset: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_cpu and self.nbytes > SMALL_COPY and self.layout is torch.strided:
            return self
        return operator.redispatch(keyset & below, self, *args, **kwargs)

    return run
