"""How a kernel override runs: CPU aliases of the arguments, the CPU's kernel, CUDA tensors for the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import capture, random
from .aliases import (
    _MANY_BYTES,
    _START,
    CPU,
    _copy_few,
    _copy_many,
    _empty_on_current_device,
    _view,
    cpu_alias,
    cpu_alias_of_storage,
    real_span,
    to_device,
    write_back,
)
from .capture import captures
from .dtypes import WITHOUT_KERNELS, raise_unsupported_dtype, widen
from .ops import Op
from .sparse import cpu_alias_of_parts, to_device_by_parts, write_back_parts

__all__ = ["copy_override", "kernel_override"]

_Tensor = torch.Tensor
_NOT_RESIZABLE = "not resizable"
_CPU_KEY = torch._C.DispatchKey.CPU


class Call:
    """One call of an op: its device, its arguments on the CPU and the tensors that it writes."""

    __slots__ = (
        "argument",
        "device",
        "generator",
        "host_argument",
        "may_resize",
        "narrow_dtype",
        "op",
        "out_tensors",
        "written",
    )

    def __init__(self, op: Op, may_resize: bool = False) -> None:
        self.op = op
        self.may_resize = may_resize  # out= tensors become copies that can grow
        self.device: torch.device | None = None
        self.narrow_dtype: torch.dtype | None = None  # the first tensor's type if the op is computed in a wider one
        self.generator: torch.Generator | None = None  # overrides the caller's generator if not None
        self.argument = ""  # the name of the argument that is converted, for errors
        self.host_argument = ""  # the name of the first argument that is a tensor of the host
        self.out_tensors: list[Any] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []  # pairs of CPU tensor and CUDA tensor

    def convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the CPU's kernel; raise CUDA's errors for tensors on several devices."""
        self.out_tensors = [kwargs.get(name) for name in self.op.out]
        cpu_args: list[Any] = []
        for name, value in zip(self.op.names, args, strict=False):
            self.argument = name
            cpu_args.append(self._to_cpu(value))
        cpu_kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            self.argument = name
            cpu_kwargs[name] = self._to_cpu(value)
        if self.device is None or self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.host_argument:
            raise self._device_mismatch(self.host_argument, CPU)
        return cpu_args, cpu_kwargs

    def _to_cpu(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            return self._tensor_to_cpu(value)
        if isinstance(value, (list, tuple)):
            return [self._to_cpu(item) for item in value]
        if isinstance(value, torch.device):
            if self.device is None and value.type == "cuda":
                self.device = value
            return CPU
        if self.narrow_dtype is not None and isinstance(value, torch.dtype):
            return widen(value, self.narrow_dtype, self.op.short_name)
        return value

    def _tensor_to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device.type == "cpu":
            may_be_on_host = self.argument in self.op.host_arguments or (tensor.dim() == 0 and self.op.takes_host_scalars)
            if not self.host_argument and not may_be_on_host:
                self.host_argument = self.argument
            return tensor
        if device.type != "cuda":
            raise self._device_mismatch(self.argument, device)
        if self.device is None:
            self.device = device
            self._check_dtype(tensor.dtype)
        elif self.device != device and not self.op.is_copy:
            raise self._device_mismatch(self.argument, device)
        if self.narrow_dtype is not None:
            return self._widened(tensor, self.narrow_dtype)
        if not self.op.is_dense:
            result = cpu_alias_of_parts(tensor)
            if self.argument in self.op.written:
                self.written.append((result, tensor))
            return result
        if self.argument in self.op.out or any(tensor is out for out in self.out_tensors):
            return self._out_to_cpu(tensor)
        return cpu_alias(tensor)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise CUDA's error if the op does not support the first tensor's type there."""
        rules = self.op.dtype_rules
        if dtype in rules.refused:
            raise_unsupported_dtype(self.op.short_name, dtype)
        if dtype in rules.widened or dtype is WITHOUT_KERNELS:
            self.narrow_dtype = dtype

    def _widened(self, tensor: torch.Tensor, narrow_dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor of the wider type; one that the op writes is copied back."""
        result = next((result for result, other in self.written if other is tensor), None)
        if result is None:
            is_conj = tensor.is_conj()
            plain = tensor.conj() if is_conj else tensor  # the CPU resolves conjugation only in types with kernels
            cpu_tensor = cpu_alias(plain) if self.op.is_dense else cpu_alias_of_parts(plain)
            result = cpu_tensor.to(widen(tensor.dtype, narrow_dtype, self.op.short_name), copy=True)
            if is_conj:
                result = result.conj()
            if self.argument in self.op.written:
                self.written.append((result, tensor))
        return result

    def _out_to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one CPU tensor for all places of a CUDA tensor: an op that writes one of its inputs does not resize it."""
        result = next((result for result, other in self.written if other is tensor), None)
        if result is None:
            result = cpu_alias(tensor).clone() if self.may_resize else cpu_alias_of_storage(tensor)
            self.written.append((result, tensor))
        return result

    def _device_mismatch(self, argument: str, other: torch.device) -> RuntimeError:
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and {other}!"
            f" (when checking argument for argument {argument} in method wrapper_CUDA_{self.op.short_name})"
        )

    def compute(self, cpu_args: list[Any], cpu_kwargs: dict[str, Any]) -> Any:
        op = self.op
        if not op.is_random:
            return op.compute(*cpu_args, **cpu_kwargs)
        generator = self.generator or self._find_generator(cpu_args, cpu_kwargs)
        if not op.has_generator:
            return random.draw(generator, op.compute, cpu_args, cpu_kwargs)
        return random.draw_with_generator(generator, op.compute, cpu_args, cpu_kwargs, op.names)

    def _find_generator(self, args: list[Any], kwargs: dict[str, Any]) -> torch.Generator:
        """Return the CUDA generator that the op draws from: the caller's or the device's."""
        assert self.device is not None
        generator = self.op.bind(tuple(args), kwargs).get("generator")
        if generator is None:
            return random.default_generator(self.device.index)
        if generator.device.type != "cuda":
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        return generator

    def results(self, computed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the op returns: the arguments that it wrote, and new tensors on the device."""
        self._write_back()
        sources = self.op.results
        if not sources:
            return None
        if self.narrow_dtype is not None:
            computed = self._round(computed, args, kwargs)
        if len(sources) == 1:
            return self._to_device(computed) if sources[0] is None else self.op.bind(args, kwargs)[sources[0]]
        arguments = self.op.bind(args, kwargs) if any(sources) else {}
        return tuple(
            self._to_device(value) if source is None else arguments[source]
            for source, value in zip(sources, computed, strict=True)
        )

    def _compute_widened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute at a replay with wider copies of the present values."""
        call = Call(self.op)
        call.generator = self.generator
        computed = call.compute(*call.convert(args, kwargs))
        call._write_back()
        return computed

    def _write_back(self) -> None:
        for result, tensor in self.written:
            if result.layout != torch.strided:
                write_back_parts(result.to(tensor.dtype), tensor)
            elif result.data_ptr() != tensor.data_ptr() or result.size() != tensor.size():
                write_back(result, tensor)

    def _round(self, computed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results that were computed in a wider type in the types that the op returns."""
        assert self.narrow_dtype is not None
        results = [computed] if len(self.op.results) == 1 else computed
        try:
            if not self.op.is_dense:
                raise NotImplementedError  # torch has no meta tensors of other layouts
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                meta_results, _ = self.op.infer_shapes(args, kwargs)
            dtypes = [meta.dtype for meta in meta_results]
        except NotImplementedError:
            wide = widen(self.narrow_dtype, self.narrow_dtype, self.op.short_name)
            dtypes = [self.narrow_dtype if result.dtype == wide else result.dtype for result in results]
        rounded = [result.resolve_conj().to(dtype) for result, dtype in zip(results, dtypes, strict=True)]
        return rounded[0] if len(self.op.results) == 1 else rounded

    def _to_device(self, value: Any) -> Any:
        assert self.device is not None
        if isinstance(value, _Tensor):
            if value.device.type != "cpu":
                return value
            is_dense = self.op.is_dense and value.layout is torch.strided
            return to_device(value, self.device) if is_dense else to_device_by_parts(value, self.device)
        if isinstance(value, (list, tuple)):
            return [self._to_device(item) for item in value]
        return value

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the op on the stream that captures, and return the tensors that hold its results after each replay."""
        op = self.op
        assert self.device is not None
        if op.waits_for_stream(args, kwargs):
            capture.raise_capture_error(self.device)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            meta_results, meta_arguments = op.infer_shapes(args, kwargs)
        for name in op.out:
            resized, tensor = meta_arguments.get(name), kwargs.get(name)
            if isinstance(tensor, _Tensor) and isinstance(resized, _Tensor) and tensor.size() != resized.size():
                tensor.resize_(resized.size())
        call = Call(op)
        cpu_args, cpu_kwargs = call.convert(args, kwargs)
        if op.is_random:
            # The present state: the generator may get another one before the replay.
            generator = call._find_generator(cpu_args, cpu_kwargs)
            random.raise_if_not_registered(generator)
            call.generator = generator.graphsafe_get_state()
        new_results = [
            _empty_like(result, self.device) for source, result in zip(op.results, meta_results, strict=True) if source is None
        ]
        targets = [_cpu_aliases(result) for result in new_results]

        def replay() -> None:
            is_widened = call.narrow_dtype is not None
            computed = call._compute_widened(args, kwargs) if is_widened else call.compute(cpu_args, cpu_kwargs)
            values = [computed] if len(op.results) == 1 else computed or ()
            new_values = [value for source, value in zip(op.results, values, strict=True) if source is None]
            for target, value in zip(targets, new_values, strict=True):
                _copy_into(target, value)

        capture.put_on_stream(self.device, replay)
        arguments = op.bind(args, kwargs)
        remaining = iter(new_results)
        results = [next(remaining) if source is None else arguments[source] for source in op.results]
        return None if not results else results[0] if len(results) == 1 else tuple(results)


def _empty_like(result: Any, device: torch.device) -> Any:
    if isinstance(result, _Tensor):
        return torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if isinstance(result, (list, tuple)):
        return [_empty_like(item, device) for item in result]
    return result


def _cpu_aliases(result: Any) -> Any:
    if isinstance(result, _Tensor):
        return cpu_alias(result)
    return [_cpu_aliases(item) for item in result] if isinstance(result, (list, tuple)) else result


def _copy_into(target: Any, value: Any) -> None:
    if isinstance(target, _Tensor):
        target.copy_(value)
    elif isinstance(target, list):
        for target_item, value_item in zip(target, value, strict=True):
            _copy_into(target_item, value_item)


def _run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(op)
    with torch._C.DisableTorchFunction():
        cpu_args, cpu_kwargs = call.convert(args, kwargs)
        # Checked here too: this function runs for every op.
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


_NO_DEVICE = -2  # a tensor of the host has index -1
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
    is_plain = is_cast = returns_first = is_single = False
    takes_tensor: tuple[bool, ...] = ()
    spans: dict[torch.dtype, tuple[torch.Tensor, int]] = {}  # of the types that the fast path handles

    def prepare() -> Op:
        nonlocal op, compute, is_plain, is_cast, returns_first, is_single, takes_tensor
        described = Op(name, key)
        compute, is_plain, is_cast = described.plain_function, described.is_plain, described.is_cast
        is_single = len(described.results) == 1
        returns_first = is_plain and described.results[0] is not None
        takes_tensor = tuple(argument in described.tensor_names for argument in described.names)
        op = described
        return described

    def admit(dtype: torch.dtype) -> tuple[torch.Tensor, int] | None:
        """Return the span of a type that the op supports on CUDA and on the CPU. Called once for each type."""
        if dtype.is_complex or dtype in op.dtype_rules.refused or dtype in op.dtype_rules.widened:
            return None
        span = spans[dtype] = real_span(dtype)
        return span

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
            elif value_type is list and (not value or type(value[0]) in _SCALAR_TYPES):
                append(value)
            else:
                return _run(op, args, kwargs)
        if index == _NO_DEVICE:
            return _run(op, args, kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in _PLAIN_TYPES:
                    return _run(op, args, kwargs)
            result = compute(*cpu_args, **kwargs)
        else:
            result = compute(*cpu_args)
        if returns_first:
            return args[0]
        if is_single:
            return _to_device_quickly(result, index)
        return tuple([_to_device_quickly(item, index) if type(item) is _Tensor else item for item in result])

    return run


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
