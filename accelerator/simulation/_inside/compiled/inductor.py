"""Hooks Inductor, the default backend of ``torch.compile``.

With ``--compile triton`` it compiles as for a GPU, but tunes nothing by time. Otherwise graphs become code for the CPU: a hook
replaces the function of Inductor that compiles one graph of aten ops. The graph is converted to a graph of the CPU, Inductor
generates C++ for it, and the compiled code runs on CPU aliases of its CUDA inputs. Everything before (Dynamo, autograd, the
partitioner, the passes over the graph) has seen CUDA tensors.
"""

from __future__ import annotations

import functools
import glob
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import cpu_graph
from .device_call import DeviceCall
from .higher_order import let_generators_reach_device_ops
from .refusal import graph_problems

__all__ = ["hook", "hook_builder", "hook_launchers", "hook_tuning", "refuse_because"]

_SITE = os.path.dirname(os.path.dirname(torch.__file__))
_FUNCTION = "_compile_fx_inner"
_PARAMETERS = ["gm", "example_inputs"]


def hook(compile_fx: ModuleType) -> None:
    """Replace the function of ``torch._inductor.compile_fx`` that compiles a graph."""
    original: Any = getattr(compile_fx, _FUNCTION, None)
    if original is None or list(inspect.signature(original).parameters)[:2] != _PARAMETERS:
        _refuse(compile_fx)
        return
    _configure()
    _disable_autograd_cache()
    let_generators_reach_device_ops()
    setattr(compile_fx, _FUNCTION, _compile_for_cpu(original))


def hook_tuning(compile_fx: ModuleType) -> None:
    """Let nothing be tuned by time: the speed of a simulated GPU says nothing about that of a real one."""
    original: Any = getattr(compile_fx, _FUNCTION)
    _configure()

    @functools.wraps(original)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        with _untuned():
            return original(*args, **kwargs)

    setattr(compile_fx, _FUNCTION, compile_graph)


def hook_launchers(heuristics: ModuleType) -> None:
    """Let generated kernels take the first of their configurations that compiles and fits, in ``triton_heuristics``."""
    tuner: Any = heuristics.CachingAutotuner
    # Before torch 2.7 one method compiles and loads.
    name, choices = ("_make_launchers", "compile_results") if hasattr(tuner, "_make_launchers") else ("precompile", "configs")
    load = getattr(tuner, name)

    @functools.wraps(load)
    def load_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        each = getattr(self, choices)
        for position in range(len(each or ()) - 1):
            setattr(self, choices, [each[position]])
            try:
                return load(self, *args, **kwargs)
            except Exception:  # the next, as Inductor does; the last one's error is raised
                self.launchers = []
        setattr(self, choices, each and each[-1:])
        return load(self, *args, **kwargs)

    def rank_by_order(self: Any, *_: Any, **__: Any) -> dict[Any, float]:
        return {each: float(at) for at, each in enumerate(self.launchers)}

    setattr(tuner, name, load_first)
    tuner.benchmark_all_configs = rank_by_order


def hook_builder(cpp_builder: ModuleType) -> None:
    """Let AOTInductor find CUDA's headers, which are in the wheels of Triton and NVIDIA, and the driver, without a toolkit."""
    module: Any = cpp_builder
    original = module.get_cpp_torch_device_options

    @functools.wraps(original)
    def device_options(device_type: str, *args: Any, **kwargs: Any) -> Any:
        options = original(device_type, *args, **kwargs)
        _, headers, _, _, libraries, *_ = options
        if device_type == "cuda":
            _add_folder(headers, "cuda.h", glob.glob(f"{_SITE}/triton/backends/nvidia/include"))
            _add_folder(headers, "nv/target", glob.glob(f"{_SITE}/nvidia/*/include"))
            _add_folder(libraries, "libcuda.so", os.environ["LD_LIBRARY_PATH"].split(":"))
        return options

    module.get_cpp_torch_device_options = device_options


def _add_folder(folders: list[str], file: str, others: list[str]) -> None:
    """Add the first other folder that has a file, if none of the folders has it."""
    first = next((each for each in [*folders, *others] if os.path.exists(os.path.join(each, file))), None)
    if first is not None and first not in folders:
        folders.append(first)


def refuse_because(compile_fx: ModuleType, problem: str) -> None:
    """Make the backend raise for graphs that use a GPU, because the hook has failed."""
    graph_problems.append(problem)
    _refuse(compile_fx)


def _refuse(compile_fx: ModuleType) -> None:
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
    """Turn off what compares the speed of kernels."""
    from torch._inductor import config

    settings: Any = config
    settings.shape_padding = False  # decides by timing matrix products
    settings.dynamic_scale_rblock = False  # adds configurations to time


def _untuned() -> Any:
    from torch._inductor import config

    settings: Any = config
    names = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    return settings.patch(dict.fromkeys(names, False))


def _compile_for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_graph(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
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
        with _untuned():
            compiled = original(gm, cpu_inputs, *args, **kwargs)
        return DeviceCall(compiled, devices)

    return compile_graph
