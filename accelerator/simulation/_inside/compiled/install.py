"""Applies the hooks to the modules of torch and Triton that a program imports."""

from __future__ import annotations

from ..._settings import read
from .. import ops
from ..import_hook import after_import
from . import dynamo, inductor, library_ops, nvrtc, other_runtimes, triton_compiler
from .refusal import guarded, refuse_calls, refuse_graphs


def install() -> None:
    """Replace torch's kernels, and prepare this process for compiled code. Imports and initializes nothing."""
    ops.install()
    library_ops.install()
    other_runtimes.install()
    dynamo.install()
    after_import("torch.cuda._utils", nvrtc.hook)
    if read("triton") == "1":
        triton_compiler.install()
    after_import("torch._inductor.compile_fx", inductor.hook_refusal)
    after_import("torch._inductor.cpp_builder", guarded(inductor.hook_builder, refuse_graphs))
    if read("tune") != "1":
        after_import("torch._inductor.compile_fx", guarded(inductor.hook_tuning, refuse_graphs))
        launchers = refuse_calls("CachingAutotuner.run")
        after_import("torch._inductor.runtime.triton_heuristics", guarded(inductor.hook_launchers, launchers))
