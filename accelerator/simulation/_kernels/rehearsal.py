"""Kernel overrides of GPUs that compute nothing: an op allocates its results and leaves their values.

The shapes, strides and types of the results come from torch's meta kernels. They are inferred at the first call with arguments
of these shapes and types, and cached. Six things have values. Ops whose results decide shapes or reach the host (``nonzero``,
masks as indices) compute on what memory holds. Small results are zero, so that numbers, masks and indices do not depend on what
their memory held before. Fills of small tensors (constants, random integers, ranges) and small copies are performed. Ops of
small tensors with integers or masks as results compute: programs make sizes of lengths and positions. Masks of other tensors
are those of zeros: programs look for numbers that are not finite. All else keeps what memory holds, and memory that nobody
writes costs the host nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import accesses, bindings, capture
from .bindings import DispatchKey, current_device, empty_on_current_device
from .call import Call
from .capture import streams_need_checks
from .decompositions import DECOMPOSITIONS
from .decompositions.common import resize_like
from .dispatch import kernel_override, run_each, spans_devices
from .ops import Op, _to_meta
from .shape_rules import SHAPE_RULES

__all__ = ["SMALL_COPY", "copy_override", "rehearsal_override"]

SMALL_COPY = 2**20
"""Copies of more bytes are not performed."""

_SMALL_RESULT = 512  # the unit of torch's allocator; masks and integers are zero up to SMALL_COPY
_MAXIMUM_PLANS = 4096  # of one op: programs with ever new shapes or numbers must not fill the host's memory
_LEAST_SUM_OF_WINDOWS = 1e-11
_CPU_KEY = DispatchKey.CPU
# torch's shape rule of the first calls cuDNN for meta tensors too; the second's of torch 2.6 raises for a cell without biases.
_OWN_SHAPES = frozenset(("aten::_cudnn_rnn_flatten_weight", "aten::_thnn_fused_lstm_cell"))
_FILLS = frozenset(("fill_", "zero_"))
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_memset = ctypes.PyDLL(None).memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None
_empty_strided = torch.empty_strided

# The shapes of one result: its size, strides and type, its bytes if they are few, and the elements of its storage if they are
# more than its own; a list of them; or any other value.
_New = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int, int]


class _Plan:
    """What one op returns for arguments of certain shapes and types."""

    __slots__ = ("computes", "device", "first_argument", "is_mask_of_zeros", "out", "returned", "single")

    def __init__(self) -> None:
        self.computes = False  # whether all arguments are small, and all results integers or masks
        self.is_mask_of_zeros = False  # whether the result is a mask, that of zeros
        self.device = -1  # the index of the device of the results
        self.single: _New | None = None  # if the op returns one new tensor
        self.first_argument = False  # whether the op returns its first argument
        self.returned: list[tuple[str | None, Any]] = []  # for each result the argument that it is, or its shapes
        self.out: list[tuple[str, torch.Tensor]] = []  # out= tensors that the op resizes, as meta tensors


def rehearsal_override(name: str, key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of an op that allocates its results and does not compute them."""
    if key != _CPU_KEY:
        # torch infers few shapes of sparse, nested and quantized tensors, whose sizes depend on values.
        return kernel_override(name, key)
    op: Op | None = None  # described at the first call: to describe every op would take longer than many programs run
    plans: dict[tuple[Any, ...], _Plan] = {}
    compute = kernel_override(name, key)
    may_have_to_compute = is_pointwise = is_in_place = False

    def prepare() -> Op:
        nonlocal op, may_have_to_compute, is_pointwise, is_in_place
        described = Op(name, key)
        may_have_to_compute = (
            described.is_data_dependent or described.is_indexing or _is_fill(described) or _is_counting(described)
        )
        is_pointwise = torch.Tag.pointwise in described.tags
        # Ops over lists write their first list and return nothing, or write several lists and return them.
        is_in_place = bool(described.written) and not described.out and None not in described.results
        op = described
        return described

    def run(*args: Any, **kwargs: Any) -> Any:
        described = op or prepare()
        if may_have_to_compute and _has_to_compute(described, args, kwargs):
            return compute(*args, **kwargs)
        if is_in_place and type(args[0]) is list:
            return _arguments(described, args, kwargs)
        signature: list[Any] = []
        _describe(args, signature, is_pointwise)
        if kwargs:
            _describe(kwargs, signature, is_pointwise)
            _describe(kwargs.values(), signature, is_pointwise)
        plan_key = tuple(signature)
        plan = plans.get(plan_key)
        if plan is None:
            if described.is_foreach and spans_devices(args[0]):
                return run_each(run, args, kwargs)
            plan = _make_plan(described, args, kwargs)
            if len(plans) >= _MAXIMUM_PLANS:
                plans.clear()
            plans[plan_key] = plan
        new = plan.single
        if new is not None:
            return _allocate(new, plan.device)
        if plan.first_argument:
            return args[0]
        if plan.is_mask_of_zeros and _is_check_of_istft(described, args):
            return _results(described, plan, args, kwargs, False)
        if plan.computes and _have_all_values((args, kwargs)):
            try:
                return compute(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError):
                pass  # zeros of earlier ops divide or are indices here; the plan has checked all else
        value = _mask_of_zeros(described, args, kwargs) if plan.is_mask_of_zeros else 0
        return _results(described, plan, args, kwargs, value)

    return run


def _is_fill(op: Op) -> bool:
    """Return whether an op overwrites one tensor and reads no other, such as ``fill_``, ``random_`` and ``arange``."""
    reads_none = len(op.written) == 1 and op.tensor_names == op.written
    return op.short_name in _FILLS or (reads_none and (op.is_random or bool(op.out)))


def _is_counting(op: Op) -> bool:
    """Return whether an op may change a number in place, such as ``add_`` of a counter of steps."""
    return torch.Tag.pointwise in op.tags and op.results == op.names[:1]


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough to have values: a number, a mask or indices."""
    return tensor.nbytes <= (_SMALL_RESULT if _has_fractions(tensor) else SMALL_COPY)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, _Tensor)]


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def _are_small_integers(values: Any) -> bool:
    """Return whether there are tensors, and all are integers or masks that have values."""
    tensors = _tensors(values)
    return bool(tensors) and not any(_has_fractions(tensor) or tensor.nbytes > SMALL_COPY for tensor in tensors)


def _have_all_values(values: Any) -> bool:
    """Return whether all tensors have values: none is a part of floats that were left as memory held them."""
    return all(not _has_fractions(tensor) or tensor.untyped_storage().nbytes() <= _SMALL_RESULT for tensor in _tensors(values))


def _has_to_compute(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call computes: its results decide shapes or reach the host, or it fills a small tensor."""
    if _is_fill(op):
        return _is_small(op.bind(args, kwargs)[next(iter(op.written))])
    if _is_counting(op):
        return bool(args[0].numel() == 1)
    return None in op.results and op.waits_for_stream(args, kwargs)


def _describe(values: Any, signature: list[Any], is_pointwise: bool) -> None:
    """Append what decides the shapes of results: shapes and types of tensors, and all else by value.

    The shapes of pointwise results depend only on the types of numbers.
    """
    append = signature.append
    for value in values:
        value_type = type(value)
        if value_type is _Tensor or value_type is _Parameter:
            append(value.shape)
            append(value.stride())
            append(value.dtype)
            append(value.get_device())
        elif value is None or value_type is bool or value_type is torch.dtype or value_type is str:
            append(value)
        elif value_type is int or value_type is float or value_type is complex:
            append(value_type)
            if not is_pointwise:
                append(value)
        elif value_type is list or value_type is tuple:
            append(len(value))
            _describe(value, signature, False)
        elif isinstance(value, torch.Generator):
            append(value.device)
        elif isinstance(value, _Tensor):
            append((value.shape, value.stride(), value.dtype, value.get_device()))
        else:
            append(value)


def _arguments(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an op writes and returns."""
    if not op.results:
        return None
    arguments = op.bind(args, kwargs)
    results = tuple(arguments[source] for source in op.results if source is not None)
    return results[0] if len(results) == 1 else results


class _Check(Call):
    """Raises CUDA's errors for types and devices that an op does not support, and converts nothing."""

    def _widened(self, tensor: torch.Tensor, narrow_dtype: torch.dtype) -> torch.Tensor:
        return tensor


def _make_plan(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan:
    check = _Check(op)
    with bindings.without_torch_function():
        check.convert(args, kwargs)
    assert check.device is not None
    plan = _Plan()
    plan.device = check.device.index
    if op.written and None not in op.results and not op.out:
        if not op.is_random:  # a random fill takes any shape
            with contextlib.suppress(_NoShapeRule):
                _infer(op, args, kwargs)  # raises the op's errors for wrong shapes
        plan.computes = _are_small_integers((args, kwargs))
        plan.first_argument = op.results == op.names[:1] and not plan.computes
        plan.returned = [(source, None) for source in op.results]
        return plan
    results, arguments = _infer(op, args, kwargs)
    gives_integers = _are_small_integers(results)
    plan.computes = gives_integers and all(map(_is_small, _tensors((args, kwargs))))
    for name in op.out:
        resized, tensor = arguments.get(name), kwargs.get(name)
        if isinstance(tensor, _Tensor) and isinstance(resized, _Tensor) and tensor.size() != resized.size():
            plan.out.append((name, resized))
    elements = op.result_elements(args, kwargs)
    plan.returned = [
        (source, None if source else _shapes(result, count))
        for source, result, count in zip(op.results, results, elements, strict=True)
    ]
    is_one = len(results) == 1 and isinstance(results[0], _Tensor) and not results[0].is_cpu
    is_single = is_one and op.results == [None]
    plan.is_mask_of_zeros = is_one and gives_integers and results[0].dtype is torch.bool and _masks_alike(op)
    if is_single and not plan.computes and not plan.is_mask_of_zeros:
        plan.single = plan.returned[0][1]
    return plan


def _masks_alike(op: Op) -> bool:
    """Return whether zeros give a mask of one number."""
    return torch.Tag.pointwise in op.tags or op.short_name == "all"


def _is_check_of_istft(op: Op, args: tuple[Any, ...]) -> bool:
    """Return whether torch.istft asks which sums of its windows are too small. Those without values are zero, and must pass."""
    return op.name == "aten::lt.Scalar" and bool(args[1] == _LEAST_SUM_OF_WINDOWS)


def _mask_of_zeros(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number in a mask that an op makes of zeros. A mask without values is one of which ``all`` is true."""
    if op.short_name == "all":
        return int(args[0].dtype is torch.bool)

    def zero(value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return value
        # The CPU compares fewer types than CUDA.
        usual = torch.complex64 if value.is_complex() else torch.float32 if _has_fractions(value) else torch.int64
        return torch.zeros((), dtype=torch.bool if value.dtype is torch.bool else usual)

    with bindings.without_torch_function():
        return int(op.compute(*map(zero, args), **{name: zero(value) for name, value in kwargs.items()}).item())


class _NoShapeRule(NotImplementedError):
    """Neither torch nor the simulation can infer an op's shapes."""


def _infer(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return an op's results and arguments as meta tensors."""
    with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
        own = SHAPE_RULES.get(op.name) or DECOMPOSITIONS.get(op.name)
        for function in (own,) if op.name in _OWN_SHAPES else (op.infer, own):
            if function is None:
                continue
            meta_args = [_to_meta(value) for value in args]
            meta_kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
            with contextlib.suppress(NotImplementedError):
                returned = function(*meta_args, **meta_kwargs)
                results = [] if not op.results else [returned] if len(op.results) == 1 else list(returned)
                return results, op.bind(tuple(meta_args), meta_kwargs)
    raise _NoShapeRule(f"{op.name} cannot be rehearsed: torch has no shape rule (meta kernel) for it")


def _shapes(result: Any, elements: int = 0) -> Any:
    if isinstance(result, _Tensor):
        if result.is_cpu:
            return result
        small_bytes = result.nbytes if _is_small(result) else 0
        return (tuple(result.size()), result.stride(), result.dtype, small_bytes, elements if elements > result.numel() else 0)
    return [_shapes(item) for item in result] if isinstance(result, (list, tuple)) else result


def _allocate(new: _New, index: int, value: int = 0) -> torch.Tensor:
    """Return a new tensor. If it is small, all its bytes have a value."""
    size, stride, dtype, small_bytes, elements = new
    if elements:
        result = torch.empty(elements, dtype=dtype, device=torch.device("cuda", index)).as_strided(size, stride)
    elif index == current_device():
        result = empty_on_current_device(size, stride, dtype)
    else:
        result = _empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", index))
    if small_bytes:
        _memset(result.data_ptr(), value, small_bytes)
    return result


def _results(op: Op, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any], value: int) -> Any:
    """Return an op's results. All bytes of those that are small have a value."""
    arguments = op.bind(args, kwargs) if op.written else {}
    for name, resized in plan.out:
        resize_like(arguments[name], resized)
    for name in op.out:
        out = arguments.get(name)
        if isinstance(out, _Tensor) and out.is_cuda and out.is_contiguous() and _is_small(out):
            _memset(out.data_ptr(), value, out.nbytes)
    results = tuple(
        arguments[source] if source is not None else _new_value(new, plan.device, value) for source, new in plan.returned
    )
    return None if not results else results[0] if len(results) == 1 else results


def _new_value(new: Any, index: int, value: int) -> Any:
    if type(new) is tuple:
        return _allocate(new, index, value)
    if isinstance(new, list):
        return [_new_value(item, index, value) for item in new]
    return new.clone() if isinstance(new, _Tensor) else new


def copy_override(key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of ``copy_``, which performs small copies and allocates what torch's kernel does."""
    compute = kernel_override("aten::copy_", key)
    by_key = bindings.get_overload("aten::copy_", "")[1]
    torch_key = DispatchKey.CompositeExplicitAutograd

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(src, _Tensor):
            return self.fill_(src)
        expanded = src.expand_as(self)  # raises torch's error for other sizes
        is_on_one_device = self.device == src.device
        copies_bytes = self.dtype == src.dtype and _is_laid_out_alike(self, expanded)
        if self.nbytes <= SMALL_COPY and src.nbytes <= SMALL_COPY and (copies_bytes or not is_on_one_device):
            if streams_need_checks.value:
                capture.wait_for_pending(self.device if self.is_cuda else src.device)
            by_key(torch_key, self, src, non_blocking)
            return self
        if accesses.FINDS_RACES and not is_on_one_device:
            accesses.skipped_transfer(self, expanded, non_blocking)
        if is_on_one_device and self.is_cuda and _is_small(self):
            compute(self, expanded, non_blocking)
        elif not copies_bytes and not is_on_one_device:
            # torch copies through contiguous tensors. It converts where the source is, but waits and converts on the host.
            if self.is_cuda and not self.is_contiguous():
                torch.empty_like(self, memory_format=torch.contiguous_format)
            if src.is_cuda:
                converts = self.is_cuda or non_blocking
                (src.to(self.dtype) if converts else src).expand_as(self).contiguous()
        return self

    return run


def _is_laid_out_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have their elements in the same order, without gaps."""
    if first.stride() == second.stride():
        return first.is_contiguous() or first.untyped_storage().nbytes() == first.nbytes == second.untyped_storage().nbytes()
    return first.is_contiguous() and second.is_contiguous()
