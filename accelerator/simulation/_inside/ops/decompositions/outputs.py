"""Ops with ``out=`` arguments whose CPU kernels ignore the strides of these arguments.

If such an argument is not laid out as a new result, they compute wrong values or write beyond its memory. CUDA's kernels follow
the strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import bindings
from ..schemas import schema_of, split
from .common import write_structured


def _with_outputs(name: str) -> Callable[..., Any]:
    """Return a function that computes new results and copies them to the ``out=`` arguments."""
    arguments = schema_of(name).arguments
    outputs = [argument.name for argument in arguments if argument.kwarg_only and argument.alias_info is not None]
    function = bindings.get_overload(split(name)[0], "")[0]

    def compute(*values: Any, **options: Any) -> Any:
        targets = [options.pop(output) for output in outputs]
        results = function(*values, **options)
        if isinstance(results, Tensor):
            return write_structured(targets[0], results)
        return tuple(write_structured(target, result) for target, result in zip(targets, results, strict=True))

    return compute


_NAMES = ("aten::tril.out", "aten::triu.out", "aten::lu_unpack.out", "aten::gelu.out", "aten::avg_pool3d.out")
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {name: _with_outputs(name) for name in _NAMES}
