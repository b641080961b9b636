"""What an op returns in a rehearsal for arguments of certain shapes and types.

The shapes, strides and types of the results come from torch's meta kernels. They are inferred at the first call with arguments
of these shapes and types, and cached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..ops import bindings
from ..ops.call import Call, tensors_in
from ..ops.decompositions import DECOMPOSITIONS
from ..ops.op import Op, import_dynamo, to_meta
from ..ops.shape_rules import RULES_OF_CUDA, SHAPE_RULES
from .comparisons import KEEP_SIGN, NEVER_NEGATIVE
from .computing import SMALL_COPY, Tensor, are_integers, are_masks, are_small, is_small
from .known_values import COUNT, NOT_NEGATIVE, UNKNOWN
from .new_memory import Shapes
from .refusals import check_types

# torch's shape rule of the first calls cuDNN for meta tensors too; the second's of torch 2.6 raises for a cell without biases;
# those of the others ask fake tensors for their device.
_OWN_SHAPES = frozenset(
    (
        *("aten::_cudnn_rnn_flatten_weight", "aten::_thnn_fused_lstm_cell", "aten::_convert_weight_to_int4pack"),
        *("aten::_weight_int4pack_mm", *RULES_OF_CUDA),
    )
)

_COUNTS = frozenset(("sum", "count_nonzero"))
_Parameter = torch.nn.Parameter


class Plan:
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
        self.single: Shapes | None = None  # if the op returns one new tensor
        self.state = UNKNOWN  # of results that are not computed
        self.first_argument = False  # whether the op returns its first argument
        self.returned: list[tuple[str | None, Any]] = []  # for each result the argument that it is, or its shapes
        self.out: list[tuple[str, torch.Tensor]] = []  # out= tensors that the op resizes, as meta tensors


def describe(values: Any, signature: list[Any], is_pointwise: bool) -> None:
    """Append what decides the shapes of results: shapes and types of tensors, and all else by value.

    The shapes of pointwise results depend only on the types of numbers.
    """
    append = signature.append
    for value in values:
        value_type = type(value)
        if value_type is Tensor or value_type is _Parameter:
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
            describe(value, signature, False)
        elif isinstance(value, torch.Generator):
            append(value.device)
        elif isinstance(value, Tensor):
            append((value.shape, value.stride(), value.dtype, value.get_device()))
        else:
            append(value)


class _Check(Call):
    """Raises CUDA's errors for types and devices that an op does not support, and converts nothing."""

    def _widened(self, tensor: torch.Tensor, narrow_dtype: torch.dtype) -> torch.Tensor:
        return tensor


def make_plan(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    check = _Check(op)
    with bindings.without_torch_function():
        check.convert(args, kwargs)
    assert check.device is not None
    check_types(op, args, kwargs)
    plan = Plan()
    plan.device = check.device.index
    if op.written and None not in op.results and not op.out:
        if not op.is_random:  # a random fill takes any shape
            with contextlib.suppress(_NoShapeRule):
                _infer(op, args, kwargs)  # raises the op's errors for wrong shapes
        plan.computes = are_small((args, kwargs))
        plan.has_integers = are_integers((args, kwargs))
        plan.first_argument = op.results == op.names[:1] and not plan.computes
        plan.keeps_sign = op.results == op.names[:1] and op.short_name.rstrip("_") in KEEP_SIGN and args[0].is_floating_point()
        plan.returned = [(source, None) for source in op.results]
        return plan
    results, arguments = _infer_with_out(op, args, kwargs)
    plan.computes = are_small((results, args, kwargs)) and bool(tensors_in(results))
    plan.has_integers = are_integers((results, args, kwargs))
    plan.has_masks = bool(tensors_in(args)) and are_masks((results, args, kwargs))
    for name in op.out:
        resized, tensor = arguments.get(name), kwargs.get(name)
        if isinstance(tensor, Tensor) and isinstance(resized, Tensor) and tensor.size() != resized.size():
            plan.out.append((name, resized))
    elements = op.result_elements(args, kwargs)
    plan.returned = [
        (source, None if source else _shapes(result, count))
        for source, result, count in zip(op.results, results, elements, strict=True)
    ]
    is_one = len(results) == 1 and isinstance(results[0], Tensor) and not results[0].is_cpu
    is_single = is_one and op.results == [None]
    is_alike = is_one and results[0].dtype is torch.bool and _masks_alike(op)
    plan.is_mask, plan.is_mask_of_zeros = is_alike or (plan.has_masks and is_one), is_alike and is_small(results[0])
    if op.short_name in _COUNTS and is_one and args[0].dtype is torch.bool:
        plan.state = COUNT
    if all(tensor.is_floating_point() and tensor.nbytes <= SMALL_COPY for tensor in tensors_in(results)):
        plan.state = NOT_NEGATIVE if op.short_name in NEVER_NEGATIVE else plan.state
        plan.keeps_sign = is_one and op.short_name in KEEP_SIGN and is_small(results[0])
    if is_single and not plan.computes and not plan.is_mask and not plan.keeps_sign:
        plan.single = plan.returned[0][1]
    return plan


def _masks_alike(op: Op) -> bool:
    """Return whether zeros give a mask of one number."""
    return torch.Tag.pointwise in op.tags or op.short_name == "all"


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
        name for name in op.out if isinstance(tensor := kwargs.get(name), Tensor) and tensor.size() != arguments[name].size()
    ]
    if functional is not None and resized:
        results = infer_new()
        arguments = dict(zip(filter(None, op.results), results, strict=True))
    return results, arguments


def _call_with_meta_tensors(
    op: Op, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_cpu and not value.dim()]

    def call(convert: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        meta_args, meta_kwargs = tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}
        returned = function(*meta_args, **meta_kwargs)
        results = [] if not op.results else [returned] if len(op.results) == 1 else list(returned)
        return results, op.bind(meta_args, meta_kwargs)

    try:
        return call(to_meta)
    except NotImplementedError:
        raise
    except RuntimeError:
        if not numbers:
            raise
    # Shape rules in Python refuse numbers on the host, which CUDA's kernels take.
    return call(lambda value: value.to("meta") if any(value is number for number in numbers) else to_meta(value))


def _shapes(result: Any, elements: int = 0) -> Any:
    if isinstance(result, Tensor):
        if result.is_cpu:
            return result
        small_bytes = result.nbytes if is_small(result) else 0
        return (tuple(result.size()), result.stride(), result.dtype, small_bytes, elements if elements > result.numel() else 0)
    return [_shapes(item) for item in result] if isinstance(result, (list, tuple)) else result
