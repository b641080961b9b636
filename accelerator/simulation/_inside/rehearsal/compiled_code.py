"""Kernels that Inductor generates: a rehearsal launches none, so it compiles none unless the program asks for its code."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ..compiled.refusal import guarded, refuse_calls
from ..import_hook import after_import


def install() -> None:
    """Hook Inductor when the program imports it. Imports nothing."""
    refuse = refuse_calls("CachingAutotuner.run")
    after_import("torch._inductor.runtime.triton_heuristics", guarded(_hook, refuse))


class _Launcher:
    """What Inductor makes of a configuration of a kernel. Tuning calls it too, and takes its memory as on a GPU."""

    n_regs = n_spills = shared = bin = None
    store_cubin = False
    cache_hash = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def _hook(heuristics: ModuleType) -> None:
    from torch._inductor import config

    settings: Any = config
    settings.compile_threads = 1  # other processes would have nothing to compile
    settings.autotune_local_cache = False  # a real GPU must not take the configurations that were the fastest here
    tuner: Any = heuristics.CachingAutotuner
    precompile = tuner.precompile

    @functools.wraps(precompile)
    def compile_if_needed(self: Any, *arguments: Any, **options: Any) -> None:
        if self.inductor_meta.get("store_cubin") or not self.configs:
            precompile(self, *arguments, **options)
        elif not self.launchers:
            self.launchers = [_Launcher(each) for each in self.configs]

    tuner.precompile = compile_if_needed
