"""Lets compiled code call an op of ``torch.library.triton_op`` as one op, which runs its kernels in Triton's interpreter.

On a GPU, torch traces such an op's function and puts the launches inside ``wrap_triton`` into the graph. The interpreter cannot
be part of a graph, so here the op stays whole. Its function then runs on fake tensors only to show the op's results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["hook_decomposition", "hook_wrap_triton"]


def hook_decomposition(trace: ModuleType) -> None:
    """Replace the function of ``torch.export._trace`` that says whether the op stays whole."""
    module: Any = trace
    module.custom_triton_ops_decomposition_disabled = lambda: True


def hook_wrap_triton(triton: ModuleType) -> None:
    """Replace ``wrap_triton`` in ``torch._library.triton``, and where torch imports it from there."""
    module: Any = triton
    original = module.wrap_triton

    def wrap_triton(triton_kernel: Callable[..., Any], /) -> Any:
        if not _is_interpreted(triton_kernel):
            return original(triton_kernel)
        return _Kernel(triton_kernel) if module.is_wrap_triton_enabled() else triton_kernel

    wrap_triton.__doc__ = original.__doc__
    owners: tuple[Any, ...] = (module, torch._library, torch.library)
    for owner in owners:
        owner.wrap_triton = wrap_triton


def _is_interpreted(kernel: Any) -> bool:
    """Return whether Triton's interpreter runs a kernel, below its autotuner and heuristics."""
    autotuner, interpreter = (sys.modules.get(f"triton.runtime.{name}") for name in ("autotuner", "interpreter"))
    if autotuner is None or interpreter is None:
        return False
    while isinstance(kernel, (autotuner.Autotuner, autotuner.Heuristics)):
        kernel = kernel.fn
    return isinstance(kernel, interpreter.InterpretedFunction)


class _Kernel:
    """A kernel whose launch on tensors without memory does nothing, because torch only wants to know an op's results."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._launch(self._kernel[grid], *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._launch(self._kernel.run, *args, **kwargs)

    def _launch(self, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any(map(_has_no_memory, pytree.tree_leaves((args, kwargs)))):
            return launch(*args, **kwargs)
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        if get_proxy_mode() is not None:
            raise NotImplementedError(
                "a simulated GPU runs Triton kernels in Triton's interpreter, which cannot be part of a graph: put the launch"
                " into a torch.library.triton_op"
            )
        return None


def _has_no_memory(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta)
