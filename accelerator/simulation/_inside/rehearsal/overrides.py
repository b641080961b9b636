"""Kernel overrides of GPUs that compute nothing: an op allocates its results, and computes small ones only.

The shapes, strides and types of the results come from torch's meta kernels. They are inferred at the first call with arguments
of these shapes and types, and cached. Some results have values all the same. Ops whose results decide shapes or reach the host
(``nonzero``, masks as indices) compute on what memory holds. Small results are zero, so that numbers, masks and indices do not
depend on what their memory held before. Fills of small tensors (constants, random numbers, ranges) and small copies are
performed. Ops of small tensors compute if the values of all are known, and those of integers and masks always: programs make
sizes of lengths and positions. Masks of other tensors are those of zeros: programs look for numbers that are not finite. All
else keeps what memory holds, and memory that nobody writes costs the host nothing. `known_values` has which values are known.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator, Sequence
from threading import get_ident
from typing import Any

import torch

from ..._settings import LIMITS
from ..ops import accesses, bindings, dispatch, runtime
from ..ops.bindings import DispatchKey, current_device, empty_on_current_device
from ..ops.call import Call, tensors_in
from ..ops.decompositions import DECOMPOSITIONS
from ..ops.decompositions.common import resize_like
from ..ops.dispatch import kernel_override, override_with_own_kernel, run_each, spans_devices
from ..ops.op import Op, _to_meta, import_dynamo
from ..ops.runtime import streams_need_checks
from ..ops.shape_rules import RULES_OF_CUDA, SHAPE_RULES
from .comparisons import KEEP_SIGN, NEVER_NEGATIVE, has_one_answer, is_result_not_negative
from .known_values import (
    COUNT,
    EMPTY,
    KNOWN,
    NOT_NEGATIVE,
    UNKNOWN,
    allocated,
    copied_to_host,
    note,
    noting_copies,
    state_of,
    written,
)
from .refusals import check_indices, check_types, has_indices

SMALL_COPY = LIMITS["COPY"]
"""More bytes are not copied, nor are more of integers and masks computed, nor CPU tensors filled with random numbers."""

# Up to this size results of floating point are computed, random numbers too. It is the unit of torch's allocator.
_SMALL_RESULT = 512
# These ops wait for the stream, but the values of their large arguments decide no shapes.
_SHAPES_WITHOUT_VALUES = frozenset(("histc", "_ctc_loss", "linalg_lstsq"))
_MAXIMUM_PLANS = 4096  # of one op: programs with ever new shapes or numbers must not fill the host's memory
_LEAST_SUM_OF_WINDOWS = 1e-11
_CPU_KEY = DispatchKey.CPU
# torch's shape rule of the first calls cuDNN for meta tensors too; the second's of torch 2.6 raises for a cell without biases;
# those of the others ask fake tensors for their device.
_OWN_SHAPES = frozenset(
    (
        *("aten::_cudnn_rnn_flatten_weight", "aten::_thnn_fused_lstm_cell", "aten::_convert_weight_to_int4pack"),
        *("aten::_weight_int4pack_mm", *RULES_OF_CUDA),
    )
)
_FILLS = frozenset(("fill_", "zero_"))
_OVERWRITING = frozenset(("bernoulli_",))  # which reads other tensors than the first
_COUNTS = frozenset(("sum", "count_nonzero"))
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_memset = ctypes.PyDLL(None).memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None

_computing: set[int] = set()  # the threads all of whose ops compute

# The shapes of one result: its size, strides and type, its bytes if they are few, and the elements of its storage if they are
# more than its own; a list of them; or any other value.
_New = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int, int]


class _Plan:
    """What one op returns for arguments of certain shapes and types."""

    __slots__ = (
        *(
            "computes",
            "device",
            "first_argument",
            "has_integers",
            "has_masks",
            "is_mask",
            "is_mask_of_zeros",
            "keeps_sign",
            "out",
            "returned",
        ),
        *("single", "state"),
    )

    def __init__(self) -> None:
        self.computes = False  # whether all arguments and results are small
        self.has_integers = False  # whether all arguments and results are integers or masks
        self.has_masks = False  # whether all tensors among the arguments and results are masks
        self.is_mask = False  # whether the result is a mask that says something about numbers or masks
        self.is_mask_of_zeros = False  # whether the mask is so small that it has values, those that zeros give
        self.keeps_sign = False  # whether the result is small, and not negative if arguments are not
        self.device = -1  # the index of the device of the results
        self.single: _New | None = None  # if the op returns one new tensor
        self.state = UNKNOWN  # of results that are not computed
        self.first_argument = False  # whether the op returns its first argument
        self.returned: list[tuple[str | None, Any]] = []  # for each result the argument that it is, or its shapes
        self.out: list[tuple[str, torch.Tensor]] = []  # out= tensors that the op resizes, as meta tensors


@contextlib.contextmanager
def all_computed() -> Generator[None]:
    """Let all ops of this thread compute and all its copies move data, whatever their size."""
    thread = get_ident()
    is_outermost = thread not in _computing
    _computing.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _computing.discard(thread)


def rehearsal_override(name: str, key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of an op that allocates its results and does not compute them."""
    if key != _CPU_KEY:
        # torch infers few shapes of sparse, nested and quantized tensors, whose sizes depend on values.
        return kernel_override(name, key)
    op: Op | None = None  # described at the first call: to describe every op would take longer than many programs run
    plans: dict[tuple[Any, ...], _Plan] = {}
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
        if _computing and get_ident() in _computing:
            return _compute(described, compute, args, kwargs, KNOWN)
        if may_have_to_compute and _has_to_compute(described, args, kwargs):
            return _compute_always(described, compute, args, kwargs)
        if is_in_place and type(args[0]) is list:
            if args[0] and all(map(_is_small, args[0])) and _state_of_inputs(described, args, kwargs) == KNOWN:
                return _compute(described, compute, args, kwargs, KNOWN)
            return _write_lists(described, args, kwargs)
        # The default decides the type of results such as quotients of integers.
        signature: list[Any] = [torch.get_default_dtype()]
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
        if is_indexed:
            check_indices(described, args, kwargs)
        new = plan.single
        if new is not None:
            return _allocate(new, plan.device, state=plan.state)
        if plan.first_argument:
            written(args[0], UNKNOWN)
            return args[0]
        if plan.computes:
            state = _state_of_inputs(described, args, kwargs)
            if state == KNOWN or plan.has_integers:
                try:
                    return _compute(described, compute, args, kwargs, max(state, plan.state))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, IndexError):  # zeros of earlier ops are indices here
                    if state == KNOWN:
                        raise
        if plan.keeps_sign and is_result_not_negative(described.short_name.rstrip("_"), described.bind(args, kwargs)):
            return _results(described, plan, args, kwargs, 0, NOT_NEGATIVE)
        if plan.is_mask:
            return _results_of_zeros(described, plan, args, kwargs)
        return _results(described, plan, args, kwargs, 0, plan.state)

    return run


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
            if _are_small((args, kwargs)) and (state == KNOWN or _are_integers((args, kwargs))):
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


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough to have values: a number, a mask or indices."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= (_SMALL_RESULT if _has_fractions(tensor) else SMALL_COPY)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def _are_integers(values: Any) -> bool:
    """Return whether there are tensors, and all are integers or masks."""
    tensors = tensors_in(values)
    return bool(tensors) and not any(map(_has_fractions, tensors))


def _are_small(values: Any) -> bool:
    return all(map(_is_small, tensors_in(values)))


def _are_masks(values: Any) -> bool:
    return all(tensor.dtype is torch.bool for tensor in tensors_in(values))


def _has_to_compute(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call computes: its results decide shapes or reach the host, or it fills a small tensor."""
    if _is_fill(op):
        return _is_small(op.bind(args, kwargs)[next(iter(op.written))])
    return (None in op.results or bool(op.out)) and op.reads_results(args, kwargs)


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


class _Check(Call):
    """Raises CUDA's errors for types and devices that an op does not support, and converts nothing."""

    def _widened(self, tensor: torch.Tensor, narrow_dtype: torch.dtype) -> torch.Tensor:
        return tensor


def _make_plan(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan:
    check = _Check(op)
    with bindings.without_torch_function():
        check.convert(args, kwargs)
    assert check.device is not None
    check_types(op, args, kwargs)
    plan = _Plan()
    plan.device = check.device.index
    if op.written and None not in op.results and not op.out:
        if not op.is_random:  # a random fill takes any shape
            with contextlib.suppress(_NoShapeRule):
                _infer(op, args, kwargs)  # raises the op's errors for wrong shapes
        plan.computes = _are_small((args, kwargs))
        plan.has_integers = _are_integers((args, kwargs))
        plan.first_argument = op.results == op.names[:1] and not plan.computes
        plan.keeps_sign = op.results == op.names[:1] and op.short_name.rstrip("_") in KEEP_SIGN and args[0].is_floating_point()
        plan.returned = [(source, None) for source in op.results]
        return plan
    results, arguments = _infer_with_out(op, args, kwargs)
    plan.computes = _are_small((results, args, kwargs)) and bool(tensors_in(results))
    plan.has_integers = _are_integers((results, args, kwargs))
    plan.has_masks = bool(tensors_in(args)) and _are_masks((results, args, kwargs))
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
    is_alike = is_one and results[0].dtype is torch.bool and _masks_alike(op)
    plan.is_mask, plan.is_mask_of_zeros = is_alike or (plan.has_masks and is_one), is_alike and _is_small(results[0])
    if op.short_name in _COUNTS and is_one and args[0].dtype is torch.bool:
        plan.state = COUNT
    if all(tensor.is_floating_point() and tensor.nbytes <= SMALL_COPY for tensor in tensors_in(results)):
        plan.state = NOT_NEGATIVE if op.short_name in NEVER_NEGATIVE else plan.state
        plan.keeps_sign = is_one and op.short_name in KEEP_SIGN and _is_small(results[0])
    if is_single and not plan.computes and not plan.is_mask and not plan.keeps_sign:
        plan.single = plan.returned[0][1]
    return plan


def _masks_alike(op: Op) -> bool:
    """Return whether zeros give a mask of one number."""
    return torch.Tag.pointwise in op.tags or op.short_name == "all"


def _results_of_zeros(op: Op, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    import_dynamo()
    with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
        own = SHAPE_RULES.get(op.name) or DECOMPOSITIONS.get(op.name)
        for function in (own,) if op.name in _OWN_SHAPES else (op.infer, own):
            if function is not None:
                with contextlib.suppress(NotImplementedError):
                    return _call_with_meta_tensors(op, function, args, kwargs)
    raise _NoShapeRule(f"{op.name} cannot be rehearsed: torch has no shape rule (meta kernel) for it")


def _infer_with_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return an op's results and arguments as meta tensors. Those of ``out=`` have the strides of a resize.

    torch's shape rules of overloads with ``out=`` give no strides, or do not exist. Those of the overload without it do.
    """
    functional = op.without_out() if op.out and not op.is_random else None

    def infer_new() -> list[Any]:
        assert functional is not None
        return _infer(functional, args, {name: value for name, value in kwargs.items() if name not in op.out})[0]

    try:
        results, arguments = _infer(op, args, kwargs)
    except _NoShapeRule:
        if functional is None:
            raise
        results = [torch.empty(result.size(), dtype=result.dtype, device="meta") for result in infer_new()]
        return results, dict(zip(filter(None, op.results), results, strict=True))
    resized = [
        name for name in op.out if isinstance(tensor := kwargs.get(name), _Tensor) and tensor.size() != arguments[name].size()
    ]
    if functional is not None and resized:
        results = infer_new()
        arguments = dict(zip(filter(None, op.results), results, strict=True))
    return results, arguments


def _call_with_meta_tensors(
    op: Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, _Tensor) and value.is_cpu and not value.dim()]

    def call(convert: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        meta_args, meta_kwargs = tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}
        returned = function(*meta_args, **meta_kwargs)
        results = [] if not op.results else [returned] if len(op.results) == 1 else list(returned)
        return results, op.bind(meta_args, meta_kwargs)

    try:
        return call(_to_meta)
    except NotImplementedError:
        raise
    except RuntimeError:
        if not numbers:
            raise
    # Shape rules in Python refuse numbers on the host, which CUDA's kernels take.
    return call(lambda value: value.to("meta") if any(value is number for number in numbers) else _to_meta(value))


def _shapes(result: Any, elements: int = 0) -> Any:
    if isinstance(result, _Tensor):
        if result.is_cpu:
            return result
        small_bytes = result.nbytes if _is_small(result) else 0
        return (tuple(result.size()), result.stride(), result.dtype, small_bytes, elements if elements > result.numel() else 0)
    return [_shapes(item) for item in result] if isinstance(result, (list, tuple)) else result


def _allocate(new: _New, index: int, value: int = 0, state: int = UNKNOWN) -> torch.Tensor:
    """Return a new tensor of a state. If it is small, all its bytes have a value."""
    size, stride, dtype, small_bytes, elements = new
    if elements:
        result = _empty((elements,), (1,), dtype, index).as_strided(size, stride)
    else:
        result = _empty(size, stride, dtype, index)
    if small_bytes:
        _fill(result, value, small_bytes)
    allocated(result, state)
    return result


def _fill(tensor: torch.Tensor, value: int, nbytes: int) -> None:
    """Write a value into all bytes of a tensor, in the order of its stream: a collective may be sending the memory."""
    if streams_need_checks.value:
        runtime.wait_for_pending(tensor.device)
    _memset(tensor.data_ptr(), value, nbytes)


def _results(op: Op, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any], value: int, state: int) -> Any:
    """Return an op's results, which get a state. All bytes of those that are small have a value."""
    arguments = op.bind(args, kwargs) if op.written else {}
    for name, resized in plan.out:
        resize_like(arguments[name], resized)
    for name in op.out:
        out = arguments.get(name)
        if isinstance(out, _Tensor) and out.is_cuda and out.is_contiguous() and _is_small(out):
            _fill(out, value, out.nbytes)
    for tensor in tensors_in([arguments.get(name) for name in op.written]):
        written(tensor, state)
    results = tuple(
        arguments[source] if source is not None else _new_value(new, plan.device, value, state) for source, new in plan.returned
    )
    return None if not results else results[0] if len(results) == 1 else results


def _new_value(new: Any, index: int, value: int, state: int) -> Any:
    if type(new) is tuple:
        return _allocate(new, index, value, state)
    if isinstance(new, list):
        return [_new_value(item, index, value, state) for item in new]
    return new.clone() if isinstance(new, _Tensor) else new


def empty_overrides() -> dict[str, Callable[..., Any]]:
    """Return the kernel overrides of ``empty`` and ``empty_strided``. Small memory is zero, whatever it held before."""

    def empty(
        size: list[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if memory_format is None or memory_format is torch.contiguous_format:
            return empty_strided(size, _contiguous_strides(size), dtype, layout, device)
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
        return empty_strided(size, strides, dtype, layout, device)

    def empty_strided(
        size: list[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        index: int | None = None if device is None else device.index
        index = current_device() if index is None else index
        return _zeroed(_empty(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), index))

    return {"aten::empty.memory_format": empty, "aten::empty_strided": empty_strided}


def zero_memory_of_compiled_code() -> None:
    """Let the buffers of code that Inductor generates be as the memory of ``empty``: its kernels write nothing."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _zeroed(empty_on_current_device(size, stride, dtype))

    bindings.replace_empty_of_compiled_code(empty)


def _contiguous_strides(size: Sequence[int]) -> list[int]:
    strides: list[int] = []
    stride = 1
    for length in reversed(size):
        strides.insert(0, stride)
        stride *= max(length, 1)
    return strides


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> torch.Tensor:
    """Return an uninitialized tensor on a device. torch's own kernel is not called through the dispatcher."""
    if index == current_device():
        return empty_on_current_device(size, stride, dtype)
    with torch.cuda.device(index):
        return empty_on_current_device(size, stride, dtype)


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """Set the state of a new tensor that no op has written, and its memory to zero if it is small."""
    nbytes = tensor.nbytes
    if nbytes and _is_small(tensor):
        _fill(tensor, 0, nbytes)
    allocated(tensor, EMPTY if nbytes <= SMALL_COPY else UNKNOWN)
    return tensor


def copy_override(key: DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of ``copy_``, which performs small copies and allocates what torch's kernel does."""
    compute = kernel_override("aten::copy_", key)
    copy = dispatch.copy_override(key)
    by_key = bindings.get_overload("aten::copy_", "")[1]
    torch_key = DispatchKey.CompositeExplicitAutograd

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(src, _Tensor):
            return self.fill_(src)
        if _computing and get_ident() in _computing:
            return copy(self, src, non_blocking)
        expanded = src.expand_as(self)  # raises torch's error for other sizes
        is_on_one_device = self.device == src.device
        copies_bytes = self.dtype == src.dtype and _is_laid_out_alike(self, expanded)
        state = UNKNOWN
        if self.nbytes <= SMALL_COPY and src.nbytes <= SMALL_COPY and (copies_bytes or not is_on_one_device):
            if streams_need_checks.value:
                runtime.wait_for_pending(self.device if self.is_cuda else src.device)
            by_key(torch_key, self, src, non_blocking)
            state = state_of((src,))
        elif is_on_one_device and self.is_cuda and _is_small(self):
            compute(self, expanded, non_blocking)
            state = state_of((src,))
        elif not is_on_one_device:
            if accesses.FINDS_RACES:
                accesses.skipped_transfer(self, expanded, non_blocking)
            if not copies_bytes:
                _take_temporary_memory(self, src, non_blocking)
        if self.is_cuda:
            written(self, state)
        elif self.is_cpu:
            copied_to_host(self, state)
        return self

    return run


def _take_temporary_memory(self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
    """Allocate and free what torch takes for a copy to or from the host of another type or layout.

    torch copies through contiguous tensors. It converts where the source is, but waits and converts on the host.
    """
    if self.is_cuda and not self.is_contiguous():
        torch.empty_like(self, memory_format=torch.contiguous_format)
    if src.is_cuda:
        converts = self.is_cuda or non_blocking
        (src.to(self.dtype) if converts else src).expand_as(self).contiguous()


def _is_laid_out_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have their elements in the same order, without gaps, and neither changes their sign lazily."""
    if first.is_conj() != second.is_conj() or first.is_neg() != second.is_neg():
        return False
    if first.stride() == second.stride():
        return first.is_contiguous() or first.untyped_storage().nbytes() == first.nbytes == second.untyped_storage().nbytes()
    return first.is_contiguous() and second.is_contiguous()
