"""The engine: the compiled kernel that handles the usual calls of most ops (``native/engine``).

This module loads it, and tells it what it needs to know about an op when the op is called first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import _settings
from ..._build.boundary import Boundary
from ..._build.engine import describe, ensure_built
from . import bindings, runtime
from .argument_checks import checked_dtypes
from .decompositions import NEEDS, Need
from .determinism import has_alert
from .dtypes import WITHOUT_KERNELS
from .kernel_memory import (
    COPIES_OF_RESULT,
    CPU_HAS_RESULT_MEMORY,
    KERNEL_MEMORY,
    RESULT_MEMORY,
    WITHOUT_MEMORY,
    FewElements,
    memory_sizes,
    take_together,
    with_kernel_memory,
)
from .op import Op
from .reduction_memory import ALWAYS_TAKE_MEMORY, REDUCTIONS
from .schemas import operator_of, schema_of, split
from .version_counters import SPLITS, counts_versions
from .workspaces import has_workspace

OVERRIDE_KEY = bindings.parse_key("PrivateUse2")
"""The dispatch key under which the engine finds the overrides in Python. No device has it."""

# Results of these ops may have parts, or a scale.
_PARTS = ("sparse", "nested")
_SCALED = ("quantize", "_make_per")
_WAIT_SOMETIMES = ("repeat_interleave",)  # beside those with a wait_condition
# The engine composes the usual calls of these ops itself (native/engine/attention.hpp).
_COMPOSED_BY_ENGINE = frozenset(
    ("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_efficient_attention_backward")
)


class _Rules(NamedTuple):
    """``op_rules`` of native/interface/op_rules.h."""

    python_dtypes: int
    host_arguments: int
    host_scalars: int
    out_arguments: int
    state_arguments: int
    flags: int
    selecting_argument: int
    python_value: int
    counted_argument: int
    maximum_count: int
    counting_flag: int
    dims_argument: int
    dtype_argument: int


class _Flags(NamedTuple):
    """The flags of ``op_rules``."""

    HAS_ALERT: bool
    HAS_WORKSPACE: bool
    READS_INDICES: bool
    COPIES: bool
    CLEARS: bool
    DRAWS: bool
    WAITS: bool
    NEEDS_INPUT_DTYPE: bool
    COUNTS_VERSIONS: bool
    KEEPS_STORAGE: bool
    COPIES_RESULT: bool


_Address = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "start": (ctypes.c_char_p, _Address),
    "boundary": (ctypes.c_char_p,),
    "override": (_Address, ctypes.c_char_p, ctypes.c_char_p),
    "describe": (None, _Address, _Address),
    "describe_races": (None, _Address, ctypes.c_uint32),
    "dtype_of": (ctypes.c_int, _Address),
    "begin_accesses": (_Address, ctypes.c_char_p),
    "add_access": (None, _Address, _Address, ctypes.c_int32),
    "record_accesses": (None, _Address),
    "end_accesses": (None, _Address),
    "order_devices": (None, ctypes.c_int, ctypes.c_int),
    "begin_learning": (None,),
    "end_learning": (None, _Address, ctypes.c_int),
    "copies": (ctypes.c_uint64,),
}
"""The results and arguments of functions of the engine."""


class _Accesses:
    """The accesses of a call that is no op. Inside its block, copies belong to the line of the program that began it."""

    def __init__(self, library: ctypes.CDLL, name: bytes) -> None:
        self._library = library
        self._name = name

    def __enter__(self) -> _Accesses:
        self._scope = self._library.accelerator_engine_begin_accesses(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.accelerator_engine_end_accesses(self._scope)

    def add(self, tensor: Any, flags: int) -> None:
        self._library.accelerator_engine_add_access(self._scope, tensor._cdata, flags)

    def record(self) -> None:
        """Tell race detection the accesses so far, each on the current stream of its device."""
        self._library.accelerator_engine_record_accesses(self._scope)

    def order(self, first: int, second: int) -> None:
        """Let the current streams of two devices wait for each other."""
        self._library.accelerator_engine_order_devices(first, second)


class Engine:
    """The loaded engine."""

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)  # for libraries that AOTInductor has compiled
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"accelerator_engine_{name}")
            function.restype, function.argtypes = result, arguments
        engine_runtime = runtime.library.accelerator_simulation_engine_runtime
        engine_runtime.restype = ctypes.c_void_p
        problem = library.accelerator_engine_start(engine_runtime())
        if problem:
            raise RuntimeError(os.fsdecode(problem))
        self.boundary = Boundary(library.accelerator_engine_boundary().decode())
        self._rules_type = self.boundary.structure("op_rules", _Rules._fields)
        self._flags = self.boundary.numbers("op_flags", _Flags._fields)
        self._kernels: dict[str, int | None] = {}
        self._is_forked = library.accelerator_engine_is_forked
        self._resume = library.accelerator_engine_resume
        self.count_copies = library.accelerator_engine_copies
        self.release_workspaces = library.accelerator_engine_release_workspaces

    def check_fork(self) -> None:
        """Raise torch's error in a forked child of an initialized process. In other children, the engine goes on afterwards."""
        if self._is_forked():
            runtime.raise_in_bad_fork()
            self._resume()

    def override(self, name: str) -> None:
        """Register the engine's kernel of an op. Python handles all calls until ``describe``."""
        base, overload = split(name)
        self._kernels[name] = self._library.accelerator_engine_override(base.encode(), overload.encode())

    def describe_races(self, name: str, flags: int) -> None:
        """Tell the engine how an op accesses memory, beyond what its schema says."""
        kernel = self._kernels[name]
        if kernel is not None:
            self._library.accelerator_engine_describe_races(kernel, flags)

    def accesses(self, name: bytes) -> _Accesses:
        """Return an object that collects the accesses of a call, whose name must live as long as the process."""
        return _Accesses(self._library, name)

    def describe(self, op: Op) -> None:
        """Tell the engine what it needs to know about an op, so that it handles usual calls; some ops it never handles."""
        kernel, rules = self._kernels.get(op.name), _rules(op, self._sum_flags, self._scalar_type)
        if kernel is not None and rules is not None:
            self._library.accelerator_engine_describe(kernel, ctypes.byref(self._rules_type(*rules)))

    def with_memory(self, name: str, override: Callable[..., Any]) -> Callable[..., Any]:
        """Return an op's kernel override, which lets the engine compute, takes memory, and tells the engine how much."""
        kernel = functools.partial(operator_of(name).redispatch, bindings.keys_of(bindings.DispatchKey.CUDA))
        begin, end = self._library.accelerator_engine_begin_learning, self._library.accelerator_engine_end_learning
        sizes_of, in_python = memory_sizes(name), with_kernel_memory(name, override)
        thread = threading.local()

        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "is_learning", False):
                return override(*args, **kwargs)  # the engine does not handle this call for another reason
            if bindings.is_deterministic():
                return in_python(*args, **kwargs)
            thread.is_learning = True
            begin()
            try:
                result = kernel(*args, **kwargs)
                sizes, device = sizes_of(args, kwargs)
            except BaseException:
                end(None, -1)
                raise
            finally:
                thread.is_learning = False
            end((ctypes.c_size_t * len(sizes))(*sizes), len(sizes))
            take_together(sizes, device)
            return result

        return run

    def _sum_flags(self, flags: _Flags) -> int:
        return sum(number for number, is_set in zip(self._flags, flags, strict=True) if is_set)

    @functools.cache  # noqa: B019, there is one engine
    def _scalar_type(self, dtype: torch.dtype) -> int:
        tensor: Any = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)
        scalar_type: int = self._library.accelerator_engine_dtype_of(tensor._cdata)
        return scalar_type


def _rules(op: Op, sum_flags: Callable[[_Flags], int], scalar_type: Callable[[torch.dtype], int]) -> _Rules | None:
    """Return what the engine needs to know about an op, or None if Python handles all its calls."""
    if _is_left_to_python(op):
        return None
    calls_without_memory = WITHOUT_MEMORY.get(op.name)
    if op.name in KERNEL_MEMORY and calls_without_memory is None and op.name not in COPIES_OF_RESULT:
        calls_without_memory = FewElements(_first_tensor(op.name), -1)  # no calls
    need = NEEDS.get(op.name)
    if need is None:
        flag = calls_without_memory.flag if calls_without_memory is not None else "sparse"
        need = Need(flag=flag) if flag in op.names else Need()
    selecting_argument = need.flag or need.dtype_argument
    reduces = op.name in REDUCTIONS.keys() - ALWAYS_TAKE_MEMORY and "dim" in op.names and not op.out
    dtypes = {*op.dtype_rules.refused, *op.dtype_rules.widened, *checked_dtypes(op.name), *need.dtypes, WITHOUT_KERNELS}
    return _Rules(
        python_dtypes=sum(1 << scalar_type(dtype) for dtype in dtypes if dtype is not None),
        host_arguments=_positions(op, op.host_arguments),
        host_scalars=_positions(op, op.host_scalars),
        out_arguments=_positions(op, op.out),
        state_arguments=_positions(op, op.state),
        flags=sum_flags(_flags(op, need)),
        selecting_argument=op.names.index(selecting_argument) if selecting_argument else -1,
        python_value=bool(need.flag) and need.flag_value,
        counted_argument=-1 if calls_without_memory is None else op.names.index(calls_without_memory.argument),
        maximum_count=0 if calls_without_memory is None else calls_without_memory.most,
        counting_flag=op.names.index(only_if) if (only_if := calls_without_memory and calls_without_memory.only_if) else -1,
        dims_argument=op.names.index("dim") if reduces else -1,
        dtype_argument=op.names.index("dtype") if reduces and "dtype" in op.names else -1,
    )


def _draws(op: Op) -> bool:
    return op.is_random and op.has_generator and not op.is_decomposed


def _is_left_to_python(op: Op) -> bool:
    """Return whether Python handles all calls of an op."""
    is_composed = op.name in _COMPOSED_BY_ENGINE
    is_scaled = op.short_name.startswith(_SCALED) or any(part in op.name for part in _PARTS)
    return (
        (not op.is_dense or is_scaled or op.name == SPLITS)
        or (op.short_name in _WAIT_SOMETIMES or op.wait_condition is not None)
        or (op.is_random and not _draws(op) and not is_composed)
        or op.name in RESULT_MEMORY.keys() - CPU_HAS_RESULT_MEMORY
        or (op.is_decomposed and op.name not in NEEDS and not is_composed)
    )


def _flags(op: Op, need: Need) -> _Flags:
    return _Flags(
        HAS_ALERT=has_alert(op.short_name),
        HAS_WORKSPACE=has_workspace(op.short_name),
        READS_INDICES=op.is_indexing,
        COPIES=op.is_copy,
        CLEARS=op.name == "aten::zero_",
        DRAWS=_draws(op),
        WAITS=op.is_data_dependent and not op.is_indexing,
        NEEDS_INPUT_DTYPE=bool(need.dtype_argument),
        COUNTS_VERSIONS=counts_versions(op.name),
        KEEPS_STORAGE=op.name in CPU_HAS_RESULT_MEMORY,
        COPIES_RESULT=op.name in COPIES_OF_RESULT,
    )


def _first_tensor(name: str) -> str:
    return next(each.name for each in schema_of(name).arguments if str(each.type) == "Tensor")


def _positions(op: Op, names: frozenset[str]) -> int:
    return sum(1 << op.names.index(name) for name in names)


def _load() -> Engine | None:
    """Load the engine of the installed torch, if ops compute or races are to be found."""
    finds_races = bool(runtime.library.accelerator_simulation_races())
    if _settings.read("compute") == "0" and not finds_races:
        return None
    path = ensure_built(describe(torch), _settings.read("libraries"), is_required=finds_races)
    return None if path is None else Engine(str(path))


engine = _load()
"""The engine of this process. None if Python handles all calls: it could not be built, or it is not needed, because ops do not
compute and races are not to be found."""


def with_memory(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override that takes the memory that the op's CUDA kernel does, if the table has it."""
    if engine is None or name not in KERNEL_MEMORY:
        return with_kernel_memory(name, override)
    return engine.with_memory(name, override)
