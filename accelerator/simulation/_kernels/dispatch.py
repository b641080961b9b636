"""How a kernel runs: arguments to the CPU, the CPU's kernel, results to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import capture, random
from .memory import CPU, alias, alias_of_storage, to_device, write_back
from .operations import Operation

__all__ = ["kernel"]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_NOT_RESIZABLE = "not resizable"


class Call:
    """One call of an op: which device it is on, and what it is to write."""

    __slots__ = ("device", "host", "name", "operation", "outs")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.device: torch.device | None = None
        self.host: tuple[str, torch.Tensor] | None = None
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
        elif self.device != device and not self._may_differ():
            raise self.mixed(device)
        if self.name in self.operation.out:
            result = alias_of_storage(tensor)
            self.outs.append((result, tensor))
            return result
        return alias(tensor)

    def _may_differ(self) -> bool:
        return self.operation.takes_host_tensors and self.operation.name.startswith("aten::copy_")

    def mixed(self, other: torch.device) -> RuntimeError:
        short = self.operation.name.partition("::")[2].partition(".")[0]
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and {other}!"
            f" (when checking argument for argument {self.name} in method wrapper_CUDA_{short})"
        )

    def convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        names = self.operation.names
        here: list[Any] = []
        for self.name, value in zip(names, args, strict=False):
            here.append(self.to_cpu(value))
        named: dict[str, Any] = {}
        for self.name, value in kwargs.items():
            named[self.name] = self.to_cpu(value)
        if self.device is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        elif self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.host is not None and not self.operation.takes_host_tensors:
            self.name = self.host[0]
            raise self.mixed(CPU)
        return here, named

    def to_device(self, value: Any) -> Any:
        assert self.device is not None
        if isinstance(value, _Tensor):
            return to_device(value, self.device) if value.device.type == "cpu" else value
        if isinstance(value, (list, tuple)):
            return [self.to_device(item) for item in value]
        return value

    def results(self, computed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op returns: of the arguments it wrote those that the caller gave, and new tensors on the device."""
        for result, tensor in self.outs:
            if result.data_ptr() != tensor.data_ptr() or result.size() != tensor.size():
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


def kernel(name: str, key: torch._C.DispatchKey = torch._C.DispatchKey.CPU) -> Callable[..., Any]:
    """The kernel of an op on simulated GPUs."""
    operation: Operation | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal operation
        if operation is None:
            operation = Operation(name, key)
        return _run(operation, args, kwargs)

    return run


def _run(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(operation)
    with torch._C.DisableTorchFunction():
        here, named = call.convert(args, kwargs)
        return call.results(_compute(operation, call, here, named), args, kwargs)


def _compute(operation: Operation, call: Call, here: list[Any], named: dict[str, Any]) -> Any:
    if not operation.is_random:
        return operation.compute(*here, **named)
    assert call.device is not None
    generator = operation.bind(tuple(here), named).get("generator") or random.default_generator(call.device.index)
    return random.draw(generator, operation.has_generator, operation.compute, here, named)
