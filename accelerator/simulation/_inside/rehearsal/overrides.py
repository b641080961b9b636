"""Kernel overrides of GPUs that compute nothing: an op allocates its results, and computes small ones only.

Some results have values all the same. Ops whose results decide shapes or reach the host (``nonzero``, masks as indices) compute
on what memory holds. Small results are zero, so that numbers, masks and indices do not depend on what their memory held before.
Fills of small tensors (constants, random numbers, ranges) and small copies are performed. Ops of small tensors compute if the
values of all are known, and those of integers and masks always: programs make sizes of lengths and positions. Masks of other
tensors are those of zeros: programs look for numbers that are not finite. All else keeps what memory holds, and memory that
nobody writes costs the host nothing. `known_values` has which values are known, `plans` the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ..ops import bindings
from ..ops.bindings import DispatchKey
from ..ops.call import tensors_in
from ..ops.decompositions.common import resize_like
from ..ops.dispatch import kernel_override, override_with_own_kernel, run_each, spans_devices
from ..ops.op import Op
from .comparisons import has_one_answer, is_result_not_negative
from .computing import SMALL_COPY, Tensor, are_integers, are_small, computing_threads, has_fractions, is_small
from .copies import CPU_KEY
from .known_values import KNOWN, NOT_NEGATIVE, UNKNOWN, allocated, state_of, written
from .missing_values import note, noting_copies
from .new_memory import allocate, fill
from .plans import Plan, describe, make_plan
from .refusals import check_indices, has_indices

# These ops wait for the stream, but the values of their large arguments decide no shapes.
_SHAPES_WITHOUT_VALUES = frozenset(("histc", "_ctc_loss", "linalg_lstsq"))

_MAXIMUM_PLANS = 4096  # of one op: programs with ever new shapes or numbers must not fill the host's memory
_LEAST_SUM_OF_WINDOWS = 1e-11
_FILLS = frozenset(("fill_", "zero_"))
_OVERWRITING = frozenset(("bernoulli_",))  # which reads other tensors than the first


def rehearsal_override(name: str, key: DispatchKey = CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of an op that allocates its results and does not compute them."""
    if key != CPU_KEY:
        # torch infers few shapes of sparse, nested and quantized tensors, whose sizes depend on values.
        return kernel_override(name, key)
    op: Op | None = None  # described at the first call: to describe every op would take longer than many programs run
    plans: dict[tuple[Any, ...], Plan] = {}
    compute = kernel_override(name, key)
    may_have_to_compute = is_pointwise = is_in_place = is_indexed = False

    def prepare() -> Op:
        nonlocal op, may_have_to_compute, is_pointwise, is_in_place, is_indexed
        described = Op(name, key)
        may_have_to_compute = described.is_data_dependent or described.is_indexing or _is_fill(described)
        is_pointwise = torch.Tag.pointwise in described.tags
        is_indexed = has_indices(described)
        # Ops over lists write their first list and return nothing, or write several lists and return them.
        is_in_place = bool(described.written) and not described.out and None not in described.results
        op = described
        return described

    def run(*args: Any, **kwargs: Any) -> Any:
        described = op or prepare()
        if computing_threads and get_ident() in computing_threads:
            return _compute(described, compute, args, kwargs, KNOWN)
        if may_have_to_compute and _has_to_compute(described, args, kwargs):
            return _compute_always(described, compute, args, kwargs)
        if is_in_place and type(args[0]) is list:
            if args[0] and all(map(is_small, args[0])) and _state_of_inputs(described, args, kwargs) == KNOWN:
                return _compute(described, compute, args, kwargs, KNOWN)
            return _write_lists(described, args, kwargs)
        # The default decides the type of results such as quotients of integers.
        signature: list[Any] = [torch.get_default_dtype()]
        describe(args, signature, is_pointwise)
        if kwargs:
            describe(kwargs, signature, is_pointwise)
            describe(kwargs.values(), signature, is_pointwise)
        plan_key = tuple(signature)
        plan = plans.get(plan_key)
        if plan is None:
            if described.is_foreach and spans_devices(args[0]):
                return run_each(run, args, kwargs)
            plan = make_plan(described, args, kwargs)
            if len(plans) >= _MAXIMUM_PLANS:
                plans.clear()
            plans[plan_key] = plan
        if is_indexed:
            check_indices(described, args, kwargs)
        new = plan.single
        if new is not None:
            return allocate(new, plan.device, state=plan.state)
        if plan.first_argument:
            written(args[0], UNKNOWN)
            return args[0]
        return _follow(plan, described, compute, args, kwargs)

    return run


def _follow(plan: Plan, op: Op, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of a call, computed if all that it reads and makes is small."""
    if plan.computes:
        state = _state_of_inputs(op, args, kwargs)
        if state == KNOWN or plan.has_integers:
            try:
                return _compute(op, compute, args, kwargs, max(state, plan.state))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError):  # zeros of earlier ops are indices here
                if state == KNOWN:
                    raise
    if plan.keeps_sign and is_result_not_negative(op.short_name.rstrip("_"), op.bind(args, kwargs)):
        return _results(op, plan, args, kwargs, 0, NOT_NEGATIVE)
    if plan.is_mask:
        return _results_of_zeros(op, plan, args, kwargs)
    return _results(op, plan, args, kwargs, 0, plan.state)


def override_library_op(library: Any, name: str) -> None:
    """Let the CPU's kernel of another library's op compute calls with small arguments.

    Other calls reach the library's own CUDA kernel, which allocates its results and launches what computes nothing.

    Args:
        library: A library of torch, with which the override is registered.
        name: The name of the op.
    """
    op: Op | None = None
    compute = kernel_override(name)

    def run(own_kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal op
        if any(tensor.is_cuda for tensor in tensors_in((args, kwargs))):
            op = described = op or Op(name)
            state = _state_of_inputs(described, args, kwargs)
            if are_small((args, kwargs)) and (state == KNOWN or are_integers((args, kwargs))):
                return _compute(described, compute, args, kwargs, state)
        with noting_copies(name):
            return own_kernel(*args, **kwargs)

    override_with_own_kernel(library, name, run)


def _compute(op: Op, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: int) -> Any:
    """Compute an op, whose results get a state."""
    result = compute(*args, **kwargs)
    results = () if not op.results else (result,) if len(op.results) == 1 else result
    for source, value in zip(op.results, results, strict=True):
        if source is None:
            for tensor in tensors_in(value):
                if tensor.is_cuda and tensor.layout is torch.strided and tensor.numel():
                    allocated(tensor, state)
    if op.written:
        arguments = op.bind(args, kwargs)
        for tensor in tensors_in([arguments.get(name) for name in op.written]):
            written(tensor, state)
    return result


def _compute_always(op: Op, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an op whatever is known: it fills a small tensor, or its results decide shapes or reach the host."""
    if not op.is_data_dependent and not op.is_indexing:
        filled = op.bind(args, kwargs)[next(iter(op.written))]
        others = [value for value in (*args, *kwargs.values()) if value is not filled]
        return _compute(op, compute, args, kwargs, state_of(others))
    state = _state_of_inputs(op, args, kwargs)
    if state != KNOWN and op.short_name not in _SHAPES_WITHOUT_VALUES:
        note(op.name)
    return _compute(op, compute, args, kwargs, state)


def _write_lists(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an op over lists returns that writes its arguments, whose values are unknown then."""
    arguments = op.bind(args, kwargs)
    for name in op.written:
        values = arguments.get(name)
        if type(values) is list:
            for tensor in values:
                if tensor.nbytes <= SMALL_COPY:
                    written(tensor, UNKNOWN)
    if not op.results:
        return None
    results = tuple(arguments[source] for source in op.results if source is not None)
    return results[0] if len(results) == 1 else results


def _is_fill(op: Op) -> bool:
    """Return whether an op overwrites one tensor and reads no other, such as ``fill_`` and ``random_``."""
    reads_none = len(op.written) == 1 and op.tensor_names == op.written and not op.out
    return op.short_name in _FILLS or (reads_none and op.is_random)


def _state_of_inputs(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the state of what an op reads, but not whether it is negative: most ops change signs."""
    if op.short_name in _OVERWRITING:
        args = args[1:]
    state = state_of((*args, *(value for name, value in kwargs.items() if name not in op.out)))
    return UNKNOWN if state == NOT_NEGATIVE else state


def _has_to_compute(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call computes: its results decide shapes or reach the host, or it fills a small tensor."""
    if _is_fill(op):
        return is_small(op.bind(args, kwargs)[next(iter(op.written))])
    return (None in op.results or bool(op.out)) and op.reads_results(args, kwargs)


def _results_of_zeros(op: Op, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the mask that an op makes of zeros. It is known if it is about finite numbers, or made of known masks."""
    if _is_check_of_istft(op, args):
        return _results(op, plan, args, kwargs, 0, KNOWN)
    is_known = has_one_answer(op.short_name, args) or (plan.has_masks and _state_of_inputs(op, args, kwargs) == KNOWN)
    value = _mask_of_zeros(op, args, kwargs) if plan.is_mask_of_zeros else 0
    return _results(op, plan, args, kwargs, value, KNOWN if is_known else UNKNOWN)


def _is_check_of_istft(op: Op, args: tuple[Any, ...]) -> bool:
    """Return whether torch.istft asks which sums of its windows are too small. Those without values are zero, and must pass."""
    return op.name == "aten::lt.Scalar" and bool(args[1] == _LEAST_SUM_OF_WINDOWS)


def _mask_of_zeros(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number in a mask that an op makes of zeros. A mask without values is one of which ``all`` is true."""
    if op.short_name == "all":
        return int(args[0].dtype is torch.bool)

    def zero(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # The CPU compares fewer types than CUDA.
        usual = torch.complex64 if value.is_complex() else torch.float32 if has_fractions(value) else torch.int64
        return torch.zeros((), dtype=torch.bool if value.dtype is torch.bool else usual)

    with bindings.without_torch_function():
        return int(op.compute(*map(zero, args), **{name: zero(value) for name, value in kwargs.items()}).item())


def _results(op: Op, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], value: int, state: int) -> Any:
    """Return an op's results, which get a state. All bytes of those that are small have a value."""
    arguments = op.bind(args, kwargs) if op.written else {}
    for name, resized in plan.out:
        resize_like(arguments[name], resized)
    for name in op.out:
        out = arguments.get(name)
        if isinstance(out, Tensor) and out.is_cuda and out.is_contiguous() and is_small(out):
            fill(out, value, out.nbytes)
    for tensor in tensors_in([arguments.get(name) for name in op.written]):
        written(tensor, state)
    results = tuple(
        arguments[source] if source is not None else _new_value(new, plan.device, value, state) for source, new in plan.returned
    )
    return None if not results else results[0] if len(results) == 1 else results


def _new_value(new: Any, index: int, value: int, state: int) -> Any:
    if type(new) is tuple:
        return allocate(new, index, value, state)
    if isinstance(new, list):
        return [_new_value(item, index, value, state) for item in new]
    return new.clone() if isinstance(new, Tensor) else new
