"""The engine: the compiled kernel that handles the usual calls of most ops (``native/engine``).

This module loads it, and tells it what it needs to know about an op when the op is called first.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from .._engine_build import describe, ensure_built
from . import capture, races
from .argument_checks import checked_dtypes
from .decompositions import NEEDS, Need
from .determinism import has_alert
from .dtypes import WITHOUT_KERNELS
from .kernel_memory import KERNEL_MEMORY, WITHOUT_MEMORY
from .ops import Op
from .workspaces import has_workspace

__all__ = ["PYTHON_KEY", "engine"]

_C: Any = torch._C
PYTHON_KEY: torch._C.DispatchKey = _C._dispatch_key_parse("PrivateUse2")
"""The dispatch key under which the engine finds the overrides in Python. No device has it."""

# The flags of Rules in native/engine/call.hpp.
_TAKES_HOST_SCALARS, _HAS_ALERT, _HAS_WORKSPACE, _READS_INDICES, _COPIES, _CLEARS, _DRAWS, _WAITS, _NEEDS_INPUT_DTYPE = (
    1 << bit for bit in range(9)
)
# Results of these ops may have parts, or a scale.
_PARTS = ("sparse", "nested")
_SCALED = ("quantize", "_make_per")
_WAIT_SOMETIMES = ("repeat_interleave",)
# The engine composes the usual calls of these ops itself (native/engine/attention.hpp).
_COMPOSED_BY_ENGINE = frozenset(
    (
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_efficient_attention_backward",
    )
)


class _Rules(ctypes.Structure):
    """``Rules`` of native/engine/call.hpp."""

    _fields_ = (
        ("python_dtypes", ctypes.c_uint64),
        ("host_arguments", ctypes.c_uint64),
        ("out_arguments", ctypes.c_uint64),
        ("state_arguments", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("selecting_argument", ctypes.c_int32),
        ("python_value", ctypes.c_int32),
        ("counted_argument", ctypes.c_int32),
        ("maximum_count", ctypes.c_int64),
    )


class _Runtime(ctypes.Structure):
    """``engine_runtime`` of native/engine/engine.cpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("attention", "is_stream_free", "pointer_attributes", "clear_memory"))


class _Races(ctypes.Structure):
    """``Races`` of native/engine/races.hpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in races.functions)


class Engine:
    """The loaded engine."""

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        library.accelerator_engine_start.argtypes = (ctypes.POINTER(_Runtime),)
        library.accelerator_engine_override.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        library.accelerator_engine_override.restype = ctypes.c_void_p
        library.accelerator_engine_dtype_of.argtypes = (ctypes.c_void_p,)
        library.accelerator_engine_describe.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Rules))
        runtime = capture.runtime
        functions = (
            runtime.accelerator_simulation_is_stream_free,
            runtime.cudaPointerGetAttributes,
            ctypes.CDLL("libcuda.so.1").accelerator_simulation_zero,
        )
        addresses = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
        library.accelerator_engine_start(_Runtime(ctypes.addressof(capture.captures), *addresses))
        library.accelerator_engine_describe_races.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
        self._finds_races = races.FINDS_RACES
        if self._finds_races:
            pointers = (ctypes.cast(function, ctypes.c_void_p) for function in races.functions.values())
            library.accelerator_engine_find_races(ctypes.byref(_Races(*pointers)))
        self._kernels: dict[str, int] = {}
        self._is_forked = library.accelerator_engine_is_forked
        self._resume = library.accelerator_engine_resume
        self.count_copies = library.accelerator_engine_copies
        self.count_copies.restype = ctypes.c_uint64
        self.release_workspaces = library.accelerator_engine_release_workspaces

    def check_fork(self) -> None:
        """Raise torch's error in a forked child of an initialized process. In other children, the engine goes on afterwards."""
        if self._is_forked():
            capture.raise_in_bad_fork()
            self._resume()

    def override(self, name: str) -> None:
        """Register the engine's kernel of an op. Python handles all calls until ``describe``."""
        base, _, overload = name.partition(".")
        kernel = self._kernels[name] = self._library.accelerator_engine_override(base.encode(), overload.encode())
        if self._finds_races and kernel is not None and (flags := races.flags_of(name)):
            self._library.accelerator_engine_describe_races(kernel, flags)

    def describe(self, op: Op) -> None:
        """Tell the engine what it needs to know about an op, so that it handles usual calls; some ops it never handles."""
        kernel, rules = self._kernels.get(op.name), _rules(op, self._scalar_type)
        if kernel is not None and rules is not None:
            self._library.accelerator_engine_describe(kernel, rules)

    @functools.cache  # noqa: B019, there is one engine
    def _scalar_type(self, dtype: torch.dtype) -> int:
        tensor: Any = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)
        scalar_type: int = self._library.accelerator_engine_dtype_of(tensor._cdata)
        return scalar_type


def _rules(op: Op, scalar_type: Callable[[torch.dtype], int]) -> _Rules | None:
    """Return what the engine needs to know about an op, or None if Python handles all its calls."""
    is_scaled = op.short_name.startswith(_SCALED) or any(part in op.name for part in _PARTS)
    draws = op.is_random and op.has_generator and not op.is_decomposed
    is_composed = op.name in _COMPOSED_BY_ENGINE
    if not op.is_dense or is_scaled or op.short_name in _WAIT_SOMETIMES or (op.is_random and not draws and not is_composed):
        return None
    few = WITHOUT_MEMORY.get(op.name)
    need = NEEDS.get(op.name)
    if (op.name in KERNEL_MEMORY and few is None) or (op.is_decomposed and need is None and not is_composed):
        return None
    if need is None:
        flag = few.flag if few is not None else "sparse"
        need = Need(argument=flag, value=True) if flag in op.names else Need()
    dtypes = {*op.dtype_rules.refused, *op.dtype_rules.widened, *checked_dtypes(op.short_name), *need.dtypes, WITHOUT_KERNELS}
    flags = {
        _TAKES_HOST_SCALARS: op.takes_host_scalars,
        _HAS_ALERT: has_alert(op.short_name),
        _HAS_WORKSPACE: has_workspace(op.short_name),
        _READS_INDICES: op.is_indexing,
        _COPIES: op.is_copy,
        _CLEARS: op.name == "aten::zero_",
        _DRAWS: draws,
        _WAITS: op.is_data_dependent and not op.is_indexing,
        _NEEDS_INPUT_DTYPE: bool(need.argument) and need.value is None,
    }
    return _Rules(
        python_dtypes=sum(1 << scalar_type(dtype) for dtype in dtypes if dtype is not None),
        host_arguments=_positions(op, op.host_arguments),
        out_arguments=_positions(op, op.out),
        state_arguments=_positions(op, op.state),
        flags=sum(flag for flag, is_set in flags.items() if is_set),
        selecting_argument=op.names.index(need.argument) if need.argument else -1,
        python_value=bool(need.value),
        counted_argument=-1 if few is None else op.names.index(few.argument),
        maximum_count=0 if few is None else few.most,
    )


def _positions(op: Op, names: frozenset[str]) -> int:
    return sum(1 << op.names.index(name) for name in names)


def _load() -> Engine | None:
    """Load the engine of the installed torch, if ops compute."""
    if os.environ.get("ACCELERATOR_SIM_COMPUTE") == "0":
        return None
    path = ensure_built(describe(torch), os.environ.get("ACCELERATOR_SIM_LIBRARIES"))
    return None if path is None else Engine(str(path))


engine = _load()
"""The engine of this process, or None if Python handles all calls: it could not be built, or ops do not compute."""
