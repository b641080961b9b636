"""One call of an op: CPU aliases of the arguments, and CUDA tensors for the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import assertions, bindings, capture, random
from .aliases import CPU, cpu_alias, cpu_alias_beside, cpu_alias_of_storage, empty_within, to_device, unowned, write_back
from .decompositions.common import resize_like
from .dtypes import WITHOUT_KERNELS, raise_unsupported_dtype, widen
from .library_texts import has_text
from .op import Op
from .sparse import cpu_alias_of_parts, to_device_by_parts, write_back_parts

_Tensor = torch.Tensor


_SEVERAL_DEVICES = "Expected all tensors to be on the same device"


class _SeveralDevicesError(Exception):
    """Tensors are on several devices."""


class Call:
    """One call of an op: its device, its arguments on the CPU and the tensors that it writes."""

    __slots__ = (
        "argument",
        "device",
        "drawn_from",
        "generator",
        "host_argument",
        "may_resize",
        "narrow_dtype",
        "op",
        "out_tensors",
        "widens",
        "written",
    )

    def __init__(self, op: Op, may_resize: bool = False, widens: bool = False) -> None:
        self.op = op
        self.widens = widens  # computes in a wider type than the first tensor's
        self.may_resize = may_resize  # out= tensors become copies that can grow
        self.device: torch.device | None = None
        self.narrow_dtype: torch.dtype | None = None  # the first tensor's type if the op is computed in a wider one
        self.generator: torch.Generator | None = None  # overrides the caller's generator if not None
        self.drawn_from: tuple[torch.Generator, int] | None = (
            None  # the generator that the call advanced, and its offset before
        )
        self.argument = ""  # the name of the argument that is converted, for errors
        self.host_argument = ""  # the name of the first argument that is a CPU tensor and must not be
        self.out_tensors: list[Any] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []  # pairs of CPU tensor and CUDA tensor

    def convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the CPU's kernel; raise CUDA's errors for tensors on several devices."""
        self.out_tensors = [kwargs.get(name) for name in self.op.out]
        cpu_args: list[Any] = []
        cpu_kwargs: dict[str, Any] = {}
        try:
            for name, value in zip(self.op.names, args, strict=False):
                self.argument = name
                cpu_args.append(self._to_cpu(value))
            for name, value in kwargs.items():
                self.argument = name
                cpu_kwargs[name] = self._to_cpu(value)
        except _SeveralDevicesError:
            raise self._device_mismatch(args, kwargs) from None
        if self.device is None or self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.host_argument:
            if self.host_argument == "self" and self.op.short_name == "index":
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            self.argument = self.host_argument
            raise self._device_mismatch(args, kwargs)
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
            is_scalar = tensor.dim() == 0 and self.argument not in self.op.written
            may_be_on_host = self.argument in self.op.host_arguments or (is_scalar and self.argument in self.op.host_scalars)
            if not self.host_argument and not may_be_on_host:
                self.host_argument = self.argument
            return tensor
        if device.type != "cuda":
            raise _SeveralDevicesError
        if self.device is None:
            self.device = device
            self._check_dtype(tensor.dtype)
        elif self.device != device and not self.op.is_copy:
            raise _SeveralDevicesError
        if self.narrow_dtype is not None:
            return self._widened(tensor, self.narrow_dtype)
        if not self.op.is_dense:
            result = cpu_alias_of_parts(tensor)
            if self.argument in self.op.written:
                self.written.append((result, tensor))
            return result
        if self.argument in self.op.out or any(tensor is out for out in self.out_tensors):
            return self._out_to_cpu(tensor)
        for out in self.out_tensors:
            if not self.may_resize and _share_memory(tensor, out):
                return cpu_alias_beside(self._out_to_cpu(out), tensor)
        return cpu_alias(tensor)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise CUDA's error if the op does not support the first tensor's type on CUDA."""
        rules = self.op.dtype_rules
        if dtype in rules.refused:
            raise_unsupported_dtype(self.op.short_name, dtype)
        if self.widens or dtype in rules.widened or dtype is WITHOUT_KERNELS:
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
        """Return the same CPU tensor wherever a CUDA tensor occurs: an op that writes one of its inputs does not resize it."""
        result = next((result for result, other in self.written if other is tensor), None)
        if result is None:
            result = cpu_alias(tensor).clone() if self.may_resize else cpu_alias_of_storage(tensor)
            self.written.append((result, tensor))
        return result

    def _device_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuntimeError:
        """Return CUDA's error for tensors on several devices."""
        op = self.op
        if op.is_indexing and self.argument == "indices":
            return RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({self.device})")
        values = op.bind(args, kwargs)
        if op.short_name == "masked_fill_":
            return RuntimeError(_masked_fill_mismatch(values))
        tensors = [(name, tensor) for name in (*op.out, *values) for tensor in tensors_in(values.get(name))]
        if not op.device_check:  # TensorIterator's check, which names the device of the kernel first
            others = [tensor.device for _, tensor in tensors if tensor.device != self.device]
            numbers = [tensor.device for _, tensor in tensors if tensor.device != self.device and tensor.dim()]
            other = (numbers or others)[0]
            return RuntimeError(f"{_SEVERAL_DEVICES}, but found at least two devices, {self.device} and {other}!")
        common = tensors[0][1].device
        name, other = next((name, tensor.device) for name, tensor in tensors if tensor.device != common)
        if has_text("libtorch_cpu.so", "different from other tensors on"):
            return RuntimeError(
                f"{_SEVERAL_DEVICES}, but got {name} is on {other}, different from other tensors on {common}"
                f" (when checking argument in method {op.device_check})"
            )
        return RuntimeError(
            f"{_SEVERAL_DEVICES}, but found at least two devices, {common} and {other}!"
            f" (when checking argument for argument {name} in method {op.device_check})"
        )

    def save_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a CPU alias and its values for each tensor that must stay as it is if there is no memory for results."""
        if not self.op.state:
            return []
        values = self.op.bind(args, kwargs)
        aliases = [cpu_alias(values[name]) for name in self.op.state if isinstance(values.get(name), _Tensor)]
        return [(alias, alias.clone()) for alias in aliases]

    def compute(self, cpu_args: list[Any], cpu_kwargs: dict[str, Any]) -> Any:
        op = self.op
        if not op.draws(tuple(cpu_args), cpu_kwargs):
            return op.compute(*cpu_args, **cpu_kwargs)
        generator = self.generator or self._find_generator(cpu_args, cpu_kwargs)
        self.drawn_from = generator, generator.get_offset()
        if not op.takes_generator:
            return random.draw(generator, op.compute, cpu_args, cpu_kwargs)
        return random.draw_with_generator(generator, op.compute, cpu_args, cpu_kwargs, op.names)

    def undraw(self) -> None:
        """Give the generator the numbers back that a failed call has drawn: CUDA's kernels draw after all that may fail."""
        if self.drawn_from is not None:
            generator, offset = self.drawn_from
            generator.set_offset(offset)

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
        elements = self.op.result_elements(args, kwargs)
        if len(sources) == 1:
            return self._to_device(computed, elements[0]) if sources[0] is None else self.op.bind(args, kwargs)[sources[0]]
        arguments = self.op.bind(args, kwargs) if any(sources) else {}
        return tuple(
            self._to_device(value, count) if source is None else arguments[source]
            for source, value, count in zip(sources, computed, elements, strict=True)
        )

    def _compute_widened(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Compute at a replay with wider copies of the present values."""
        call = Call(self.op)
        call.generator = self.generator
        computed = call.compute(*call.convert(tuple(args), kwargs))
        call._write_back()
        return computed

    def _write_back(self) -> None:
        for result, tensor in self.written:
            if result.layout != torch.strided:
                write_back_parts(result.to(tensor.dtype), tensor)
                continue
            if result.is_conj() != tensor.is_conj():  # an ``out=`` argument that the op conjugates lazily
                bindings.set_conj(tensor, result.is_conj())
            if result.data_ptr() != tensor.data_ptr() or result.size() != tensor.size():
                write_back(result, tensor)

    def _round(self, computed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Convert results that were computed in a wider type to the types that the op returns."""
        assert self.narrow_dtype is not None
        results = [computed] if len(self.op.results) == 1 else computed
        if not isinstance(results[0], _Tensor):
            return computed
        try:
            if not self.op.is_dense:
                raise NotImplementedError  # torch has no meta tensors of other layouts
            with torch.no_grad(), bindings.below_autograd():
                meta_results, _ = self.op.infer_shapes(args, kwargs)
            dtypes = [meta.dtype for meta in meta_results]
        except RuntimeError:  # also NotImplementedError: neither meta tensors nor the CPU support the type
            wide = widen(self.narrow_dtype, self.narrow_dtype, self.op.short_name)
            dtypes = [self.narrow_dtype if result.dtype == wide else result.dtype for result in results]
        rounded = [result.resolve_conj().to(dtype) for result, dtype in zip(results, dtypes, strict=True)]
        return rounded[0] if len(self.op.results) == 1 else rounded

    def _to_device(self, value: Any, elements: int = 0) -> Any:
        assert self.device is not None
        if isinstance(value, _Tensor):
            if value.device.type != "cpu":
                return value
            is_dense = self.op.is_dense and value.layout is torch.strided and not value.is_nested
            return to_device(value, self.device, elements) if is_dense else to_device_by_parts(value, self.device)
        if isinstance(value, (list, tuple)):
            return [self._to_device(item) for item in value]
        return value

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the op on the stream that captures, and return the tensors that hold its results after each replay."""
        op = self.op
        assert self.device is not None
        if op.waits_for_stream(args, kwargs):
            capture.raise_capture_error(self.device)
        with torch.no_grad(), bindings.below_autograd():
            meta_results, meta_arguments = op.infer_shapes(args, kwargs)
        for name in op.out:
            resized, tensor = meta_arguments.get(name), kwargs.get(name)
            if isinstance(tensor, _Tensor) and isinstance(resized, _Tensor) and tensor.size() != resized.size():
                resize_like(tensor, resized)
        call = Call(op)
        cpu_args, cpu_kwargs = call.convert(args, kwargs)
        if op.draws(args, kwargs):
            # The present state: the generator may get another one before the replay.
            generator = call._find_generator(cpu_args, cpu_kwargs)
            random.raise_if_not_registered(generator)
            call.generator = generator.graphsafe_get_state()
        new_results = [
            _empty_like(result, self.device, count)
            for source, result, count in zip(op.results, meta_results, op.result_elements(args, kwargs), strict=True)
            if source is None
        ]
        # As on a GPU, the graph does not keep its arguments' memory allocated: a later op of the capture may reuse it.
        addresses = _device_addresses([*args, *kwargs.values()])
        if call.narrow_dtype is not None:
            cpu_args, cpu_kwargs = _unowned(args), _unowned(kwargs)
        call.written, call.out_tensors = [], []
        targets = [_cpu_aliases(result) for result in new_results]
        capture.put_on_stream(self.device, call._replaying(self.device, cpu_args, cpu_kwargs, addresses, targets))
        arguments = op.bind(args, kwargs)
        remaining = iter(new_results)
        results = [next(remaining) if source is None else arguments[source] for source in op.results]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _replaying(
        self, device: torch.device, cpu_args: Any, cpu_kwargs: Any, addresses: list[int], targets: list[Any]
    ) -> Callable[[], None]:
        """Return a function that computes the op at each replay, into the memory of its results."""
        op, compute = self.op, self.compute if self.narrow_dtype is None else self._compute_widened

        def replay() -> None:
            capture.raise_if_freed(addresses, op.name)
            try:
                computed = compute(cpu_args, cpu_kwargs)
            except (RuntimeError, IndexError) as error:
                if not assertions.is_failed(op.short_name, error):
                    raise
                assertions.fail(op.short_name, error, device)
                return
            values = [computed] if len(op.results) == 1 else computed or ()
            new_values = [value for source, value in zip(op.results, values, strict=True) if source is None]
            for target, value in zip(targets, new_values, strict=True):
                _copy_into(target, value)

        return replay


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments. Dynamo would trace torch's function for this."""
    if isinstance(values, _Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _masked_fill_mismatch(values: dict[str, Any]) -> str:
    tensor, mask = values["self"].device, values["mask"].device
    if isinstance(values["value"], _Tensor):
        return "masked_fill_: Expected inputs to be on same device"
    return f"expected self and mask to be on the same device, but got mask on {mask} and self on {tensor}"


def _share_memory(tensor: torch.Tensor, out: Any) -> bool:
    """Return whether an ``out=`` argument has elements in a tensor's storage."""
    if not isinstance(out, _Tensor) or not out.numel() or not tensor.numel():
        return False
    address = tensor.untyped_storage().data_ptr()
    return bool(address) and address == out.untyped_storage().data_ptr()


def _has_one_address(value: Any) -> bool:
    """Return whether a value is a dense CUDA tensor."""
    return isinstance(value, _Tensor) and value.is_cuda and value.layout is torch.strided and not value.is_nested


def _unowned(value: Any) -> Any:
    """Return arguments whose dense CUDA tensors do not keep their memory allocated."""
    if _has_one_address(value):
        return unowned(value)
    if isinstance(value, (list, tuple)):
        return [_unowned(item) for item in value]
    return {name: _unowned(item) for name, item in value.items()} if isinstance(value, dict) else value


def _device_addresses(values: Any) -> list[int]:
    """Return the addresses of dense CUDA tensors."""
    addresses: list[int] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            addresses += _device_addresses(value)
        elif _has_one_address(value):
            addresses.append(value.data_ptr())
    return [address for address in addresses if address]


def _empty_like(result: Any, device: torch.device, elements: int = 0) -> Any:
    if isinstance(result, _Tensor):
        if elements > result.numel():
            return empty_within(result, device, elements)
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
