"""How a kernel override runs: CPU aliases of the arguments, the CPU's kernel, CUDA tensors for the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import capture
from .aliases import (
    _MANY_BYTES,
    _START,
    _copy_few,
    _copy_many,
    _empty_on_current_device,
    _view,
    real_span,
    to_device,
)
from .call import Call
from .capture import captures
from .large_results import direct_kernel
from .ops import Op
from .sparse import to_device_by_parts

__all__ = ["copy_override", "kernel_override"]

_Tensor = torch.Tensor
_NOT_RESIZABLE = "not resizable"
_CPU_KEY = torch._C.DispatchKey.CPU


def _run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.is_foreach and _spans_devices(args[0]):
        return _run_each(op, args, kwargs)
    call = Call(op)
    with torch._C.DisableTorchFunction():
        cpu_args, cpu_kwargs = call.convert(args, kwargs)
        # The fast path has checked this for the ops that it handles; this function runs for all ops.
        if captures.value and call.device is not None and capture.wait_unless_capturing(call.device):
            return call.record(args, kwargs)
        if op.waits_for_stream(args, kwargs):
            # torch's own wait, for set_sync_debug_mode and the trace of synchronizations.
            torch.cuda.current_stream(call.device).synchronize()
        try:
            computed = call.compute(cpu_args, cpu_kwargs)
        except RuntimeError as error:
            if not call.written or _NOT_RESIZABLE not in str(error):
                raise
            # The op has warned that it enlarges an argument; the second run has arguments that can grow.
            call = Call(op, may_resize=True)
            cpu_args, cpu_kwargs = call.convert(args, kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                computed = call.compute(cpu_args, cpu_kwargs)
        return call.results(computed, args, kwargs)


def _spans_devices(tensors: Any) -> bool:
    return isinstance(tensors, list) and len({tensor.device for tensor in tensors if tensor.is_cuda}) > 1


def _run_each(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op over lists once for each item, as torch does if the tensors are on several devices."""
    count = len(args[0])

    def item(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list) and len(value) == count else value

    results: list[Any] = []
    for index in range(count):
        result = _run(op, tuple(item(value, index) for value in args), {n: item(value, index) for n, value in kwargs.items()})
        results += result or ()
    return results if op.results else None


_LARGE_BYTES = 131072  # smaller results are copied in less time
_NO_DEVICE = -2  # a CPU tensor has index -1
_PLAIN_TYPES = frozenset((int, float, bool, complex, type(None), str, torch.dtype, torch.layout, torch.memory_format))
_SCALAR_TYPES = frozenset((int, float, bool, complex))
_Parameter = torch.nn.Parameter
_STRIDED = torch.strided
_is_autocasting = torch.is_autocast_enabled
_current_device = torch._C._cuda_getDevice
_mode_count = torch._C._len_torch_function_stack


def kernel_override(name: str, key: torch._C.DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of an op.

    `run` is the fast path of `_run`, inlined because every call costs. It handles nearly all calls: of ops that draw no random
    numbers and return new tensors or write their first argument, with plain strided tensors on one device, outside captures.
    """
    op: Any = None  # described at the first call: to describe every op would take longer than many programs run
    compute: Callable[..., Any] = _not_prepared
    is_plain = is_cast = returns_first = is_single = has_results = False
    make_result: tuple[int, Callable[[list[Any], dict[str, Any]], Any]] | None = None  # for large results
    takes_tensor: tuple[bool, ...] = ()
    spans: dict[torch.dtype, tuple[torch.Tensor, int]] = {}  # of the types that the fast path handles

    def prepare() -> Op:
        nonlocal op, compute, is_plain, is_cast, returns_first, is_single, has_results, takes_tensor, make_result
        described = Op(name, key)
        compute, is_cast = described.plain_function, described.is_cast
        is_single, has_results = len(described.results) == 1, bool(described.results)
        returns_first = described.is_plain and has_results and described.results[0] is not None
        takes_tensor = tuple(described.takes_only_tensor(position) for position in range(len(described.names)))
        make_result = direct_kernel(name) if described.is_plain else None
        op = described
        is_plain = described.is_plain  # last: from then on other threads take the fast path
        return described

    def admit(dtype: torch.dtype) -> tuple[torch.Tensor, int] | None:
        """Return ``real_span`` of a type that the op supports on CUDA and on the CPU, else None."""
        if dtype.is_complex or dtype in op.dtype_rules.refused or dtype in op.dtype_rules.widened:
            return None
        span = spans[dtype] = real_span(dtype)
        return span

    def aliases(values: list[Any], index: int) -> list[torch.Tensor] | None:
        """Return the CPU aliases of a list of plain tensors of one device, or None if it has others."""
        cpu_tensors: list[torch.Tensor] = []
        for value in values:
            value_type = type(value)
            if (value_type is not _Tensor and value_type is not _Parameter) or value.get_device() != index:
                return None
            dtype = value.dtype
            span = spans.get(dtype) or admit(dtype)
            address = value.data_ptr()
            if span is None or not address or address % span[1]:
                return None
            cpu_tensors.append(_view(span[0], tuple(value.shape), value.stride(), (address - _START) // span[1]))
        return cpu_tensors

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_plain or captures.value or _mode_count() or (is_cast and _is_autocasting("cpu")):
            return _run(op or prepare(), args, kwargs)
        index = _NO_DEVICE
        cpu_args: list[Any] = []
        append = cpu_args.append
        for value in args:
            value_type = type(value)
            if value_type is _Tensor or value_type is _Parameter:
                value_index = value.get_device()
                if value_index != index:
                    if index != _NO_DEVICE or value_index < 0:
                        return _run(op, args, kwargs)
                    index = value_index
                dtype = value.dtype
                span = spans.get(dtype) or admit(dtype)
                address = value.data_ptr()
                if span is None or not address:
                    return _run(op, args, kwargs)
                tensor, size = span
                if address % size:
                    return _run(op, args, kwargs)
                append(_view(tensor, tuple(value.shape), value.stride(), (address - _START) // size))
            elif value_type in _PLAIN_TYPES:
                if value_type in _SCALAR_TYPES and takes_tensor[len(cpu_args)]:
                    return _run(op, args, kwargs)
                append(value)
            elif value_type is list:
                if value and type(value[0]) not in _SCALAR_TYPES:
                    if index == _NO_DEVICE:
                        index = _device_of(value)
                    value = aliases(value, index)
                    if value is None:
                        return _run(op, args, kwargs)
                append(value)
            else:
                return _run(op, args, kwargs)
        if index < 0:
            return _run(op, args, kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in _PLAIN_TYPES:
                    return _run(op, args, kwargs)
        if make_result is not None and cpu_args[make_result[0]].nbytes >= _LARGE_BYTES and index == _current_device():
            result = make_result[1](cpu_args, kwargs)
            if result is not None:
                return result
        result = compute(*cpu_args, **kwargs) if kwargs else compute(*cpu_args)
        if returns_first:
            return args[0]
        if is_single:
            if type(result) is _Tensor:
                return _to_device_quickly(result, index)
            return [_to_device_quickly(item, index) for item in result]
        if not has_results:
            return None
        return tuple([_to_device_quickly(item, index) if type(item) is _Tensor else item for item in result])

    return run


def _device_of(values: list[Any]) -> int:
    """Return the index of the device of a list's first item, or that of no device."""
    first = values[0]
    return first.get_device() if isinstance(first, _Tensor) else _NO_DEVICE


def _not_prepared() -> None:
    """Placeholder for the function of an op that was not called yet."""


def _to_device_quickly(result: torch.Tensor, index: int) -> torch.Tensor:
    """`to_device`, faster for contiguous results on the current device."""
    if result.layout is not _STRIDED:
        return to_device_by_parts(result, torch.device("cuda", index))
    dtype = result.dtype
    if not result.is_contiguous() or dtype.is_complex or index != _current_device():
        return to_device(result, torch.device("cuda", index))
    device_result = _empty_on_current_device(tuple(result.shape), result.stride(), dtype)
    nbytes = result.nbytes
    (_copy_few if nbytes < _MANY_BYTES else _copy_many)(device_result.data_ptr(), result.data_ptr(), nbytes)
    return device_result


def copy_override(key: torch._C.DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of ``copy_``: torch's own kernel if it copies bytes, else the CPU's.

    torch's kernel copies on streams and between devices.
    """
    compute = kernel_override("aten::copy_", key)
    by_key = torch._C._get_operation_overload("aten::copy_", "")[1]
    torch_key = torch._C.DispatchKey.CompositeExplicitAutograd

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(src, _Tensor):
            return self.fill_(src)
        if self.is_cuda and src.is_cuda and not _have_same_layout(self, src):
            compute(self, src.expand_as(self), non_blocking)
        else:
            if captures.value:
                capture.wait_for_pending(self.device if self.is_cuda else src.device)
            by_key(torch_key, self, src, non_blocking)
        return self

    return run


def _have_same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether a copy from one tensor to the other copies bytes in their order."""
    return (
        first.dtype == second.dtype
        and first.size() == second.size()
        and first.is_contiguous()
        and second.is_contiguous()
        and not (first.is_neg() or second.is_neg() or first.is_conj() or second.is_conj())
        and first.data_ptr() != 0
        and second.data_ptr() != 0
    )
