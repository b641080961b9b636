"""Lets ``torch.cuda._compile_kernel`` load PTX: NVRTC compiles on the CPU, and simulated GPUs run PTX, not machine code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..ops import runtime


def hook(utils: ModuleType) -> None:
    """Replace the functions of ``torch.cuda._utils`` that return NVRTC, and the one that loads what it has compiled."""
    for name in ("_get_nvrtc_library", "_get_gpu_rtc_library"):
        if hasattr(utils, name):
            setattr(utils, name, _with_ptx(getattr(utils, name)))
    load = "_cuda_load_module"
    if hasattr(utils, load):
        setattr(utils, load, _with_context(getattr(utils, load)))


def _with_ptx(get_library: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(get_library)
    def get() -> Any:
        library = get_library()
        # NVRTC keeps the PTX from which it has made the machine code.
        library.nvrtcGetCUBINSize = library.nvrtcGetPTXSize
        library.nvrtcGetCUBIN = library.nvrtcGetPTX
        return library

    return get


def _with_context(load: Callable[..., Any]) -> Callable[..., Any]:
    """The driver loads modules into the current context, which the first allocation would make."""

    @functools.wraps(load)
    def load_module(*arguments: Any, **options: Any) -> Any:
        runtime.raise_in_bad_fork()
        runtime.library.cudaFree(None)
        return load(*arguments, **options)

    return load_module
