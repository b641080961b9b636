"""Applies the hooks to the modules of torch and Triton that a program imports."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from .._values import runs_compiled_code
from . import dynamo, inductor, library_ops, triton_interpreter, triton_op
from .import_hook import after_import
from .triton_libdevice import hook_libdevice

__all__ = ["install"]


def install() -> None:
    """Prepare this process for compiled code. Imports and initializes nothing."""
    library_ops.install()
    after_import("torch._dynamo.trace_rules", dynamo.hook_trace_rules)
    if not runs_compiled_code(torch.__version__):
        after_import("torch._inductor.compile_fx", inductor.refuse)
        after_import("torch.utils._triton", _report_that_triton_does_not_work)
        return
    after_import("triton._utils", _silence_fusion_warning)
    if os.environ.get("ACCELERATOR_SIM_COMPILE") == "cpp":
        after_import("torch._inductor.compile_fx", inductor.hook)
    if os.environ.get("ACCELERATOR_SIM_TRITON") == "1" and os.environ.get("TRITON_INTERPRET") == "1":
        after_import("triton.runtime.interpreter", triton_interpreter.hook_interpreter)
        after_import("triton.runtime.autotuner", triton_interpreter.hook_autotuner)
        for name in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
            after_import(name, hook_libdevice)
        after_import("torch._dynamo.variables.builder", dynamo.hook_builder)
        after_import("torch._library.triton", triton_op.hook_wrap_triton)
        after_import("torch.export._trace", triton_op.hook_decomposition)


def _report_that_triton_does_not_work(triton_utils: Any) -> None:
    """Programs and PyTorch's tests leave out their compiled part if ``has_triton()`` is False."""
    triton_utils.has_triton = lambda: False


def _silence_fusion_warning(triton_utils: Any) -> None:
    """Suppress Triton 3.9's warning that its next version compiles kernels differently: no kernel is compiled here."""
    if hasattr(triton_utils, "FP_FUSION_DEFAULT_WARNING"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            triton_utils.warn_once(triton_utils.FP_FUSION_DEFAULT_WARNING)
