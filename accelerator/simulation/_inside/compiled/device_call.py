"""Runs code that was compiled for the CPU on CUDA tensors: inputs become CPU aliases, outputs get device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops import accesses, assertions, capture, runtime
from ..ops.aliases import cpu_alias

__all__ = ["DeviceCall"]

_COMPILED = "compiled code"  # as reports of races name it
_Function = Callable[[list[Any]], Sequence[Any]]


class DeviceCall:
    """A compiled graph. Its argument is a list, which it clears, as Inductor's own compiled graphs do."""

    def __init__(self, compiled: _Function, devices: list[torch.device | None]) -> None:
        self._boxed_call = True  # an attribute of the object: torch copies those to the wrappers that it makes
        self._compiled = compiled
        self._devices = devices

    def __call__(self, *arguments: Any) -> list[Any]:
        inputs = list(arguments)
        if len(arguments) == 1 and isinstance(arguments[0], list):
            inputs = list(arguments[0])
            arguments[0].clear()
        if not accesses.FINDS_RACES:
            return self._call(inputs)
        written = getattr(self._compiled, "mutated_input_idxs", None) or ()
        touched = [(each, accesses.WRITES * (i in written)) for i, each in enumerate(inputs) if _is_cuda(each)]
        results: list[Any] = accesses.at_op(_COMPILED, touched, lambda: self._call(inputs))
        ids_of_inputs = {id(each) for each in inputs}
        new = [each for each in results if _is_cuda(each) and id(each) not in ids_of_inputs and each._base is None]
        accesses.record(_COMPILED, [(each, accesses.WRITES) for each in new])
        return results

    def _call(self, inputs: list[Any]) -> list[Any]:
        cpu_inputs = [cpu_alias(value) if _is_cuda(value) else value for value in inputs]
        if runtime.streams_need_checks.value or runtime.has_faults():
            devices = {value.device for value in inputs if _is_cuda(value)} | set(filter(None, self._devices))
            for device in devices:
                if device.type == "cuda" and runtime.wait_unless_capturing(device):
                    return self._record(inputs, cpu_inputs, device)
        return self._run(inputs, cpu_inputs)[0]

    def _run(self, inputs: list[Any], cpu_inputs: list[Any]) -> tuple[list[Any], Sequence[Any]]:
        outputs = _Outputs(inputs, cpu_inputs)
        try:
            computed = self._compiled(list(cpu_inputs))
        except (RuntimeError, IndexError) as error:
            device = next((value.device for value in inputs if _is_cuda(value)), None)
            if device is None or not assertions.is_failed("index", error):
                raise
            assertions.fail(_COMPILED, error, device)
            runtime.raise_error(device)
            raise
        return [outputs.to_device(value, device) for value, device in zip(computed, self._devices, strict=True)], computed

    def _record(self, inputs: list[Any], cpu_inputs: list[Any], device: torch.device) -> list[Any]:
        """Put the call on the stream that captures.

        One call now shows the sizes of the outputs. It must change nothing, so the inputs' memory is restored after it.
        """
        memory = {value.untyped_storage().data_ptr(): _bytes_of(value) for value in inputs if _is_cuda(value)}
        saved = {address: content.clone() for address, content in memory.items()}
        results, computed = self._run(inputs, cpu_inputs)
        for address, content in saved.items():
            memory[address].copy_(content)
        is_new = [
            _is_cuda(result) and result.untyped_storage().data_ptr() not in memory and isinstance(value, torch.Tensor)
            for result, value in zip(results, computed, strict=True)
        ]
        targets = [cpu_alias(result) if new else None for result, new in zip(results, is_new, strict=True)]

        def replay() -> None:
            for target, value in zip(targets, self._compiled(list(cpu_inputs)), strict=True):
                if target is not None:
                    target.copy_(value)

        capture.put_on_stream(device, replay)
        return results


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU alias of the whole memory of a CUDA tensor's storage."""
    storage = tensor.untyped_storage()
    return cpu_alias(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,)))


class _Outputs:
    """The device memory of one call's inputs and outputs."""

    def __init__(self, inputs: list[Any], cpu_inputs: list[Any]) -> None:
        self._inputs = [pair for pair in zip(cpu_inputs, inputs, strict=True) if _is_cuda(pair[1])]
        self._copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def to_device(self, value: Any, device: torch.device | None) -> Any:
        """Return the CUDA tensor of an output: an input, a view of an input, or a tensor in new device memory."""
        if device is None or device.type != "cuda" or value is None:
            return value
        for cpu_input, tensor in self._inputs:
            if value is cpu_input:
                return tensor
        if not value.numel():
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        storage = self._find_input(value.data_ptr())
        start = value.untyped_storage().data_ptr() if storage is None else storage.data_ptr()
        if storage is None:
            storage = self._copy(value.untyped_storage(), device)
        offset = (value.data_ptr() - start) // value.element_size()
        result = torch.empty(0, dtype=value.dtype, device=device)
        return result.set_(storage, offset, value.size(), value.stride())

    def _find_input(self, address: int) -> torch.UntypedStorage | None:
        for _, tensor in self._inputs:
            storage = tensor.untyped_storage()
            if 0 <= address - storage.data_ptr() < storage.nbytes():
                return storage
        return None

    def _copy(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        """Copy memory to the device, only once if several outputs share it."""
        key = storage.data_ptr(), device
        if key not in self._copies:
            on_device = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            cpu_alias(on_device).copy_(source)
            self._copies[key] = on_device.untyped_storage()
        return self._copies[key]


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
