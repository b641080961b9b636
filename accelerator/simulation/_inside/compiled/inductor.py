"""Hooks Inductor, the default backend of ``torch.compile``, which compiles its own code for GPUs: nothing is tuned by time."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from .refusal import graph_problems

_SITE = os.path.dirname(os.path.dirname(torch.__file__))


def hook_refusal(compile_fx: ModuleType) -> None:
    """Refuse graphs that use a GPU if a hook does not fit the installed torch."""
    module: Any = compile_fx
    original = module.compile_fx

    @functools.wraps(original)
    def compile_or_refuse(model: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if graph_problems and _uses_cuda(model, example_inputs):
            raise NotImplementedError(
                f"torch.compile's default backend is not simulated for torch {torch.__version__}, which is older or newer than"
                f' the simulation knows; use backend="aot_eager" ({"; ".join(graph_problems)})'
            )
        return original(model, example_inputs, *args, **kwargs)

    module.compile_fx = compile_or_refuse


def _uses_cuda(model: torch.fx.GraphModule, example_inputs: Iterable[Any]) -> bool:
    leaves = list(example_inputs)
    for node in model.graph.nodes:
        leaves += pytree.tree_leaves((node.meta.get("val"), node.meta.get("example_value"), node.args, node.kwargs))
    devices = (each.device if isinstance(each, torch.Tensor) else each for each in leaves)
    return any(isinstance(each, torch.device) and each.type == "cuda" for each in devices)


def hook_tuning(compile_fx: ModuleType) -> None:
    """Let nothing be tuned by time: the speed of a simulated GPU says nothing about that of a real one."""
    from torch._inductor import config

    module: Any = compile_fx
    settings: Any = config
    original = module._compile_fx_inner
    settings.shape_padding = False  # decides by timing matrix products
    settings.dynamic_scale_rblock = False  # adds configurations to time
    untuned = dict.fromkeys(("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"), False)

    @functools.wraps(original)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        with settings.patch(untuned):
            return original(*args, **kwargs)

    module._compile_fx_inner = compile_graph


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
