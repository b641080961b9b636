"""Lets torch put the launch of a Triton kernel into a graph although Triton's interpreter runs the kernel.

torch puts objects of the class `JITFunction` into graphs. With TRITON_INTERPRET=1 ``triton.jit`` makes an object of another
class. In place of it torch gets a `JITFunction` whose launch is the interpreter's. To know what a kernel writes, torch would
compile it; here `triton_writes` reads its code.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from types import ModuleType
from typing import Any

import torch

from .triton_writes import written_parameters

__all__ = ["describe_kernel", "for_graph", "hook_builder", "hook_kernel_wrapper", "hook_wrap_triton"]

_TWIN = "_accelerator_kernel_for_graphs"


def for_graph(kernel: Any) -> Any:
    """Return what torch can put into a graph in place of a kernel, and other objects as they are."""
    interpreter, autotuner = (sys.modules.get(f"triton.runtime.{name}") for name in ("interpreter", "autotuner"))
    if interpreter is None or autotuner is None:
        return kernel
    if isinstance(kernel, (autotuner.Autotuner, autotuner.Heuristics)):
        below = for_graph(kernel.fn)
        if below is kernel.fn:
            return kernel
        twin = vars(kernel).get(_TWIN)
        if twin is None:
            twin = copy.copy(kernel)
            setattr(kernel, _TWIN, twin)
        # Again each time: a program may have replaced the configurations.
        vars(twin).update({name: value for name, value in vars(kernel).items() if name != _TWIN}, fn=below)
        return twin
    if not isinstance(kernel, interpreter.InterpretedFunction):
        return kernel
    if _TWIN not in vars(kernel):
        setattr(kernel, _TWIN, _make_twin(kernel))
    return vars(kernel)[_TWIN]


def _make_twin(kernel: Any) -> Any:
    """Return a `JITFunction` that the interpreter runs, or the kernel itself if its source is unknown."""
    from triton.runtime.jit import JITFunction

    try:
        inspect.getsource(kernel.fn)
    except OSError:
        return kernel
    jit_function: Any = JITFunction

    class InterpretedJITFunction(jit_function):  # type: ignore[misc]
        """Known to torch as a compiled kernel. `JITFunction` compares and hashes code, with that of all kernels it calls."""

        interpreted = kernel
        __hash__ = object.__hash__
        __eq__ = object.__eq__

        def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            return None if warmup else kernel[grid](*args, **kwargs)

    return InterpretedJITFunction(kernel.fn)


def _interpreted(kernel: Any) -> Any:
    """Return the interpreted kernel below an autotuner, None for other kernels."""
    while kernel is not None and not hasattr(kernel, "interpreted"):
        kernel = getattr(kernel, "fn", None)
    return None if kernel is None else kernel.interpreted


def hook_builder(builder: ModuleType) -> None:
    """Let Dynamo trace the launch of an interpreted kernel as it traces that of a compiled one."""
    variable_builder: Any = builder.VariableBuilder
    original = variable_builder._wrap

    def wrap(self: Any, value: Any) -> Any:
        return original(self, for_graph(value))

    variable_builder._wrap = wrap


def hook_kernel_wrapper(wrapper: ModuleType) -> None:
    """Let torch ask `triton_writes` what an interpreted kernel writes."""
    module: Any = wrapper
    original = module.get_mutated_tensors

    def get_mutated_tensors(kernel_idx: int, constant_args_idx: int, kwargs: dict[str, Any], *rest: Any) -> list[str]:
        interpreted = _interpreted(module.kernel_side_table.get_kernel(kernel_idx))
        if interpreted is None:
            return original(kernel_idx, constant_args_idx, kwargs, *rest)
        written = written_parameters(interpreted.fn)
        return [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name in written]

    module.get_mutated_tensors = get_mutated_tensors


def hook_wrap_triton(triton: ModuleType) -> None:
    """Replace ``wrap_triton`` in ``torch._library.triton``, and where torch imports it from there."""
    module: Any = triton
    original = module.wrap_triton

    def wrap_triton(triton_kernel: Any, /) -> Any:
        return original(for_graph(triton_kernel)) if module.is_wrap_triton_enabled() else triton_kernel

    wrap_triton.__doc__ = original.__doc__
    owners: tuple[Any, ...] = (module, torch._library, torch.library)
    for owner in owners:
        owner.wrap_triton = wrap_triton


def describe_kernel(kernel_index: int, constants_index: int) -> str:
    """Describe a kernel of a graph and its constant arguments, for the name of an op that launches it."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(kernel_index)
    configurations = [repr(vars(each)) for each in getattr(kernel, "configs", ())]
    source = inspect.getsource(_interpreted(kernel).fn)
    constants = repr(kernel_side_table.get_constant_args(constants_index))
    return hashlib.sha256(repr((source, configurations, constants)).encode()).hexdigest()
