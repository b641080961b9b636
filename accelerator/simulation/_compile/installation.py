"""Applies the hooks to the modules of torch and Triton that a program imports."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from .._settings import read
from .._torch_versions import runs_compiled_code
from . import dynamo, inductor, library_ops, nvrtc, other_runtimes, triton_graph, triton_interpreter
from .import_hook import after_import
from .refusal import guarded, refuse_calls, refuse_functions, refuse_graphs
from .triton_libdevice import hook_libdevice

__all__ = ["install"]


def install() -> None:
    """Prepare this process for compiled code. Imports and initializes nothing."""
    library_ops.install()
    other_runtimes.install()
    dynamo.install()
    after_import("torch.cuda._utils", nvrtc.hook)
    if not runs_compiled_code(torch.__version__):
        after_import("torch._inductor.compile_fx", inductor.refuse)
        after_import("torch.utils._triton", _report_that_triton_does_not_work)
        return
    after_import("triton._utils", _silence_fusion_warning)
    if read("compile") == "cpp":
        after_import("torch._inductor.compile_fx", guarded(inductor.hook, inductor.refuse_because))
    if read("triton") == "1" and os.environ.get("TRITON_INTERPRET") == "1":
        launches = refuse_calls("InterpretedFunction.run", "InterpretedFunction.__getitem__", "GridExecutor.__call__")
        after_import("triton.runtime.interpreter", guarded(triton_interpreter.hook_interpreter, launches))
        tuned = refuse_calls("Autotuner.run", "Heuristics.run")
        after_import("triton.runtime.autotuner", guarded(triton_interpreter.hook_autotuner, tuned))
        for name in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
            after_import(name, guarded(hook_libdevice, refuse_functions))
        after_import("torch._dynamo.variables.builder", guarded(triton_graph.hook_builder, refuse_graphs))
        if read("compile") == "triton":
            after_import("torch._inductor.compile_fx", guarded(inductor.hook_launches, inductor.refuse_because))
        wrapper = "torch._higher_order_ops.triton_kernel_wrap"
        after_import(wrapper, guarded(triton_graph.hook_kernel_wrapper, refuse_calls("get_mutated_tensors")))
        after_import("torch._library.triton", guarded(triton_graph.hook_wrap_triton, refuse_calls("wrap_triton")))


def _report_that_triton_does_not_work(triton_utils: Any) -> None:
    """Programs and PyTorch's tests leave out their compiled part if ``has_triton()`` is False."""
    triton_utils.has_triton = lambda: False


def _silence_fusion_warning(triton_utils: Any) -> None:
    """Suppress Triton 3.9's warning that its next version compiles kernels differently: no kernel is compiled here."""
    if hasattr(triton_utils, "FP_FUSION_DEFAULT_WARNING"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            triton_utils.warn_once(triton_utils.FP_FUSION_DEFAULT_WARNING)
