"""Hooks Inductor, the default backend of ``torch.compile``: graphs of simulated GPUs become code for the CPU.

The hook replaces the function of Inductor that compiles one graph of aten ops. The graph is converted to a graph of the CPU,
Inductor generates C++ for it, and the compiled code runs on CPU aliases of its CUDA inputs. Everything before (Dynamo,
autograd, the partitioner, the passes over the graph) has seen CUDA tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import cpu_graph
from .device_call import DeviceCall
from .higher_order import let_generators_reach_device_ops
from .refusal import graph_problems

__all__ = ["hook", "hook_launches", "refuse", "refuse_because"]

_FUNCTION = "_compile_fx_inner"
_PARAMETERS = ["gm", "example_inputs"]


def hook(compile_fx: ModuleType) -> None:
    """Replace the function of ``torch._inductor.compile_fx`` that compiles a graph."""
    original: Any = getattr(compile_fx, _FUNCTION, None)
    if original is None or list(inspect.signature(original).parameters)[:2] != _PARAMETERS:
        refuse(compile_fx)
        return
    _configure()
    _disable_autograd_cache()
    let_generators_reach_device_ops()
    setattr(compile_fx, _FUNCTION, _compile_for_cpu(original))


def hook_launches(compile_fx: ModuleType) -> None:
    """Let the kernels that a program has written run in Triton's interpreter, beside those that Inductor generates.

    Inductor would generate a launcher for them too, which does not know the grid when the interpreter runs it.
    """
    original: Any = getattr(compile_fx, _FUNCTION)
    _disable_autograd_cache()

    def compile_graph(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        cpu_graph.convert_launches(gm)
        return original(gm, example_inputs, *args, **kwargs)

    setattr(compile_fx, _FUNCTION, compile_graph)


def refuse_because(compile_fx: ModuleType, problem: str) -> None:
    """Make the backend raise for graphs that use a GPU, because the hook has failed."""
    graph_problems.append(problem)
    refuse(compile_fx)


def refuse(compile_fx: ModuleType) -> None:
    """Make the backend raise for graphs that use a GPU, because the hook does not support this version of Inductor."""
    original: Any = compile_fx.compile_fx

    def raise_not_simulated(model: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if cpu_graph.uses_cuda(model, example_inputs):
            raise NotImplementedError(
                f"torch.compile's default backend is not simulated for torch {torch.__version__}, which is older or newer than"
                f' the simulation knows; use backend="aot_eager"{"".join(f" ({problem})" for problem in graph_problems)}'
            )
        return original(model, example_inputs, *args, **kwargs)

    module: Any = compile_fx
    module.compile_fx = raise_not_simulated


def _disable_autograd_cache() -> None:
    """Turn off the cache whose entries contain compiled code, and would bypass the hooks.

    The cache of Inductor's own artifacts stays on: the hooks convert the graph before Inductor looks it up.
    """
    from torch._functorch import config

    settings: Any = config
    settings.enable_autograd_cache = False


def _configure() -> None:
    """Turn off options that benchmark kernels on the GPU."""
    from torch._inductor import config

    settings: Any = config
    settings.shape_padding = False  # decides by timing matrix products


def _compile_for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_graph(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.utils import BoxedBool
        from torch._inductor.virtualized import V

        if not cpu_graph.uses_cuda(gm, example_inputs):
            return original(gm, example_inputs, *args, **kwargs)
        if graph_problems:
            raise NotImplementedError("; ".join(graph_problems))
        if V.aot_compilation:
            raise NotImplementedError("AOTInductor is not simulated: compile for the CPU, or use torch.compile")
        devices = cpu_graph.output_devices(gm)
        cpu_inputs = cpu_graph.convert(gm, example_inputs)
        kwargs["cudagraphs"] = BoxedBool(False)
        # Tuning for speed measures kernels of a GPU that does not exist.
        with config.patch(max_autotune=False, max_autotune_gemm=False, max_autotune_pointwise=False):
            compiled = original(gm, cpu_inputs, *args, **kwargs)
        return DeviceCall(compiled, devices)

    return compile_graph
