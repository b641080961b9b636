"""How a kernel runs: arguments to the CPU, the CPU's kernel, results to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import capture, random
from .capture import captures
from .memory import (
    _MANY_BYTES,
    _START,
    CPU,
    _copy_few,
    _copy_many,
    _empty_here,
    _everything_real,
    _view,
    alias,
    alias_of_storage,
    to_device,
    write_back,
)
from .operations import Operation
from .sparse import alias_of_parts, to_device_by_parts, write_back_parts

__all__ = ["copy_kernel", "kernel"]

_Tensor = torch.Tensor
_NOT_RESIZABLE = "not resizable"
_CPU_KEY = torch._C.DispatchKey.CPU


class Call:
    """One call of an op: which device it is on, and what it is to write."""

    __slots__ = ("device", "generator", "given_outs", "host", "may_resize", "name", "operation", "outs")

    def __init__(self, operation: Operation, may_resize: bool = False) -> None:
        self.operation = operation
        self.may_resize = may_resize
        self.device: torch.device | None = None
        self.generator: torch.Generator | None = None  # what the op draws from, once it is known
        self.host: tuple[str, torch.Tensor] | None = None
        self.given_outs: list[Any] = []
        self.outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.name = ""

    def to_cpu(self, value: Any) -> Any:
        """What the CPU's kernel takes for an argument."""
        if isinstance(value, _Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return [self.to_cpu(item) for item in value]
        if isinstance(value, torch.device):
            if self.device is None and value.type == "cuda":
                self.device = value
            return CPU
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device.type == "cpu":
            if self.host is None and not (tensor.dim() == 0 and self.operation.takes_host_numbers):
                self.host = (self.name, tensor)
            return tensor
        if device.type != "cuda":
            raise self.mixed(device)
        if self.device is None:
            self.device = device
        elif self.device != device and not self.operation.is_copy:
            raise self.mixed(device)
        if not self.operation.is_dense:
            result = alias_of_parts(tensor)
            if self.name in self.operation.written:
                self.outs.append((result, tensor))
            return result
        if self.name in self.operation.out or any(tensor is out for out in self.given_outs):
            return self._given_out(tensor)
        return alias(tensor)

    def _given_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor in all its places: by that an op knows that it writes one of its inputs, which it then does not resize."""
        result = next((result for result, known in self.outs if known is tensor), None)
        if result is None:
            result = alias(tensor).clone() if self.may_resize else alias_of_storage(tensor)
            self.outs.append((result, tensor))
        return result

    def mixed(self, other: torch.device) -> RuntimeError:
        short = self.operation.name.partition("::")[2].partition(".")[0]
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and {other}!"
            f" (when checking argument for argument {self.name} in method wrapper_CUDA_{short})"
        )

    def convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        here: list[Any] = []
        self.given_outs = [kwargs.get(name) for name in self.operation.out]
        for name, value in zip(self.operation.names, args, strict=False):
            self.name = name
            here.append(self.to_cpu(value))
        named: dict[str, Any] = {}
        for name, value in kwargs.items():
            self.name = name
            named[name] = self.to_cpu(value)
        if self.device is None or self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.host is not None and not self.operation.takes_host_tensors:
            self.name = self.host[0]
            raise self.mixed(CPU)
        return here, named

    def to_device(self, value: Any) -> Any:
        assert self.device is not None
        if isinstance(value, _Tensor):
            if value.device.type != "cpu":
                return value
            dense = self.operation.is_dense and value.layout is torch.strided
            return to_device(value, self.device) if dense else to_device_by_parts(value, self.device)
        if isinstance(value, (list, tuple)):
            return [self.to_device(item) for item in value]
        return value

    def compute(self, here: list[Any], named: dict[str, Any]) -> Any:
        operation = self.operation
        if not operation.is_random:
            return operation.compute(*here, **named)
        generator = self.generator or self.find_generator(here, named)
        if not operation.has_generator:
            return random.draw(generator, operation.compute, here, named)
        return random.draw_with_generator(generator, operation.compute, here, named, operation.names)

    def find_generator(self, here: list[Any], named: dict[str, Any]) -> torch.Generator:
        """The CUDA generator that the op draws from: the caller's, or the device's."""
        assert self.device is not None
        generator = self.operation.bind(tuple(here), named).get("generator")
        if generator is None:
            return random.default_generator(self.device.index)
        if generator.device.type != "cuda":
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        return generator

    def results(self, computed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op returns: of the arguments it wrote those that the caller gave, and new tensors on the device."""
        for result, tensor in self.outs:
            if result.layout != torch.strided:
                write_back_parts(result, tensor)
            elif result.data_ptr() != tensor.data_ptr() or result.size() != tensor.size():
                write_back(result, tensor)
        kinds = self.operation.results
        if not kinds:
            return None
        if len(kinds) == 1:
            return self.to_device(computed) if kinds[0] is None else self.operation.bind(args, kwargs)[kinds[0]]
        given = self.operation.bind(args, kwargs) if any(kinds) else {}
        return tuple(
            self.to_device(value) if kind is None else given[kind] for kind, value in zip(kinds, computed, strict=True)
        )

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the op on the stream that captures, and give the tensors that will have its results after each replay."""
        operation = self.operation
        assert self.device is not None
        if operation.needs_host:
            capture.refuse(self.device)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            shapes, given = operation.shapes(args, kwargs)
        for name in operation.out:
            wanted, tensor = given.get(name), kwargs.get(name)
            if isinstance(tensor, _Tensor) and isinstance(wanted, _Tensor) and tensor.size() != wanted.size():
                tensor.resize_(wanted.size())
        again = Call(operation)
        here, named = again.convert(args, kwargs)
        if operation.is_random:
            # The state that the generator has now: it may get another one before the replay.
            again.generator = again.find_generator(here, named).graphsafe_get_state()
        new = [shape for kind, shape in zip(operation.results, shapes, strict=True) if kind is None]
        results = [_like(shape, self.device) for shape in new]
        targets = [_aliases(result) for result in results]

        def replay() -> None:
            computed = again.compute(here, named)
            values = [computed] if len(operation.results) == 1 else computed or ()
            new = [value for kind, value in zip(operation.results, values, strict=True) if kind is None]
            for target, value in zip(targets, new, strict=True):
                _fill(target, value)

        capture.put_on_stream(self.device, replay)
        given = operation.bind(args, kwargs)
        rest = iter(results)
        all_results = [next(rest) if kind is None else given[kind] for kind in operation.results]
        return None if not all_results else all_results[0] if len(all_results) == 1 else tuple(all_results)


def _like(shape: Any, device: torch.device) -> Any:
    if isinstance(shape, _Tensor):
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=device)
    if isinstance(shape, (list, tuple)):
        return [_like(item, device) for item in shape]
    return shape


def _aliases(result: Any) -> Any:
    if isinstance(result, _Tensor):
        return alias(result)
    return [_aliases(item) for item in result] if isinstance(result, (list, tuple)) else result


def _fill(target: Any, value: Any) -> None:
    if isinstance(target, _Tensor):
        target.copy_(value)
    elif isinstance(target, list):
        for one, other in zip(target, value, strict=True):
            _fill(one, other)


def _run(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(operation)
    with torch._C.DisableTorchFunction():
        here, named = call.convert(args, kwargs)
        if captures.value and call.device is not None:
            if capture.is_capturing(call.device):
                return call.record(args, kwargs)
            capture.wait_for_pending(call.device)
        try:
            computed = call.compute(here, named)
        except RuntimeError as error:
            if not call.outs or _NOT_RESIZABLE not in str(error):
                raise
            # The op, which has warned of it, makes an argument larger than its memory: it gets memory that can grow.
            call = Call(operation, may_resize=True)
            here, named = call.convert(args, kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                computed = call.compute(here, named)
        return call.results(computed, args, kwargs)


_NONE = -2  # no device yet: the host's tensors say -1
_PLAIN = frozenset((int, float, bool, complex, type(None), str, torch.dtype, torch.layout, torch.memory_format))
_LISTED = frozenset((int, float, bool, complex))
_Parameter = torch.nn.Parameter
_STRIDED = torch.strided
_is_autocasting = torch.is_autocast_enabled
_current_device = torch._C._cuda_getDevice
_mode_count = torch._C._len_torch_function_stack


def kernel(name: str, key: torch._C.DispatchKey = _CPU_KEY) -> Callable[..., Any]:
    """The kernel of an op on simulated GPUs.

    What stands here in one piece, for each step costs, is `_run` for the calls that are nearly all of them: of ops that draw
    no random numbers and give new tensors or write their first argument, with plain strided tensors on one device, outside
    captures. All else goes to `_run`, which begins anew.
    """
    operation: Any = None  # until the first call: describing an op takes longer than many a program runs
    compute: Callable[..., Any] = _no_op
    is_plain = is_cast = returns_first = is_single = False
    wants_tensor: tuple[bool, ...] = ()

    def prepare() -> Operation:
        nonlocal operation, compute, is_plain, is_cast, returns_first, is_single, wants_tensor
        found = Operation(name, key)
        compute, is_plain, is_cast, is_single = found.directly, found.is_plain, found.is_cast, len(found.results) == 1
        returns_first = is_plain and found.results[0] is not None
        wants_tensor = tuple(argument in found.tensor_names for argument in found.names)
        operation = found
        return found

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_plain or captures.value or _mode_count() or (is_cast and _is_autocasting("cpu")):
            return _run(operation or prepare(), args, kwargs)
        index = _NONE
        here: list[Any] = []
        take = here.append
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                where = value.get_device()
                if where != index:
                    if index != _NONE or where < 0:
                        return _run(operation, args, kwargs)
                    index = where
                found = _everything_real.get(value.dtype)
                address = value.data_ptr()
                if found is None or not address:
                    return _run(operation, args, kwargs)
                everything, size = found
                if address % size:
                    return _run(operation, args, kwargs)
                take(_view(everything, tuple(value.shape), value.stride(), (address - _START) // size))
            elif kind in _PLAIN:
                if kind in _LISTED and wants_tensor[len(here)]:
                    return _run(operation, args, kwargs)
                take(value)
            elif kind is list and (not value or type(value[0]) in _LISTED):
                take(value)
            else:
                return _run(operation, args, kwargs)
        if index == _NONE:
            return _run(operation, args, kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in _PLAIN:
                    return _run(operation, args, kwargs)
            result = compute(*here, **kwargs)
        else:
            result = compute(*here)
        if returns_first:
            return args[0]
        if is_single:
            return _to_device_quickly(result, index)
        return tuple([_to_device_quickly(one, index) if type(one) is _Tensor else one for one in result])

    return run


def _no_op() -> None:
    """Stands for the function of an op that was not called yet."""


def _to_device_quickly(result: torch.Tensor, index: int) -> torch.Tensor:
    """`to_device`, for which there is a shorter way to the current device."""
    if result.layout is not _STRIDED:
        return to_device_by_parts(result, torch.device("cuda", index))
    dtype = result.dtype
    if not result.is_contiguous() or dtype not in _everything_real or index != _current_device():
        return to_device(result, torch.device("cuda", index))
    there = _empty_here(tuple(result.shape), result.stride(), dtype)
    count = result.nbytes
    (_copy_few if count < _MANY_BYTES else _copy_many)(there.data_ptr(), result.data_ptr(), count)
    return there


def copy_kernel() -> Callable[..., Any]:
    """The kernel of ``copy_``: torch's own where it copies bytes, on streams and between devices, else the CPU's."""
    compute = kernel("aten::copy_")
    by_key = torch._C._get_operation_overload("aten::copy_", "")[1]
    torchs_key = torch._C.DispatchKey.CompositeExplicitAutograd

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(src, _Tensor):
            return self.fill_(src)
        if self.is_cuda and src.is_cuda and not _are_same_bytes(self, src):
            compute(self, src.expand_as(self), non_blocking)
        else:
            if captures.value:
                capture.wait_for_pending(self.device if self.is_cuda else src.device)
            by_key(torchs_key, self, src, non_blocking)
        return self

    return run


def _are_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.size() == other.size()
        and one.is_contiguous()
        and other.is_contiguous()
        and not (one.is_neg() or other.is_neg() or one.is_conj() or other.is_conj())
        and one.data_ptr() != 0
        and other.data_ptr() != 0
    )
