"""No function makes a CUDA context, which takes hundreds of MB, on a GPU that the process does not use."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator._machine import torch_build
from tests.runtime.device_arguments import FUNCTIONS, MORE_FUNCTIONS
from tests.support import run, simulated_environment

build = torch_build.read()
pytestmark = pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch")

ALL = {**FUNCTIONS, **MORE_FUNCTIONS}
# They make device 1 the current one, or take a device only to compare it with another one.
LAST = ("set_device", "set_device_index", "set_device_idx")


def functions_with_a_device() -> list[str]:
    """Return the public functions with a parameter that is a device."""
    names: list[str] = []
    for name in acc.__all__:
        function = getattr(acc, name)
        if inspect.isfunction(function):
            annotations = [str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]
            if any("Device" in annotation for annotation in annotations):
                names.append(name)
    return names


def test_every_function_with_a_device_is_called() -> None:
    called = {name.partition(",")[0] for name in ALL}
    assert len(functions_with_a_device()) > 40
    assert [name for name in functions_with_a_device() if name not in called] == []


def _enter(context: Any) -> None:
    with context:
        torch.ones(2, device="cuda:1").add_(1)


def _set_and_get_states() -> None:
    acc.set_rng_state_all(acc.get_rng_state_all())
    acc.set_rng_state(acc.get_rng_state(1), 1)


# What a process that uses device 1 alone may call besides, while device 0 is the current one.
OTHERS: dict[str, Callable[[], object]] = {
    "device_of": lambda: _enter(acc.device_of(torch.ones(1, device="cuda:1"))),
    "device_index": lambda: _enter(acc.device_index(1)),
    "empty_cache": acc.empty_cache,
    "empty_host_cache": acc.empty_host_cache,
    "ipc_collect": acc.ipc_collect,
    "fork_rng": lambda: _enter(acc.fork_rng([1])),
    "get_memory_info of another GPU": lambda: (acc.get_memory_info(0), acc.total_memory(0), acc.available_memory(0)),
    "init": acc.init,
    "is_available": lambda: acc.is_available(strict=True),
    "is_bf16_supported": lambda: (acc.is_bf16_supported(), acc.is_fp8_supported(), acc.supported_dtypes()),
    "manual_seed_all": lambda: acc.manual_seed_all(1),
    "on_accelerator": lambda: (acc.on_accelerator(torch.ones(1)), acc.is_pinned(torch.ones(1))),
    "pin_memory": lambda: acc.pin_memory(torch.ones(3)),
    "record_stream": lambda: acc.record_stream(torch.ones(1, device="cuda:1"), torch.Stream("cuda:1")),
    "set_rng_state": _set_and_get_states,
    "stream": lambda: _enter(acc.stream(torch.Stream("cuda:1"))),
    "stream, the current one": lambda: _enter(acc.stream(acc.current_stream(1))),
    "telemetry": lambda: [acc.telemetry(index) for index in range(2)],
    "visible_devices": lambda: (acc.visible_devices(), acc.physical_devices()),
}


def has_context(index: int) -> bool:
    """Whether NVML lists this process among those that have a context on a GPU."""
    return os.getpid() in [process.pid for process in acc.processes(index)]


def find_creator(use: Callable[[], object]) -> str:
    """Return the first function that makes a context on device 0 after a program has used a device or nothing."""
    warnings.simplefilter("ignore")
    use()
    calls: dict[str, Callable[[], object]] = {name: partial(call, 1) for name, call in ALL.items()}
    last = {name: calls.pop(name) for name in LAST}
    for name, call in (calls | OTHERS | last).items():
        with suppress(RuntimeError):  # the state of set_rng_state has a wrong size
            call()
        if has_context(0):
            return name
    return f"none, and one on device 1: {has_context(1)}"


@pytest.mark.slow
@pytest.mark.parametrize("use", ["None", "torch.cuda.init()", "torch.ones(1, device='cuda:1')"])
def test_no_context_on_a_gpu_that_is_not_used(use: str) -> None:
    code = f"""
    import torch
    from tests.runtime.test_created_contexts import find_creator
    print(find_creator(lambda: {use}))
    """
    assert run(code, simulated_environment(gpus=2), timeout=300).splitlines()[-1] == "none, and one on device 1: True"


def test_no_context_for_the_figures_of_a_gpu_that_is_not_used() -> None:
    """The quick test: the functions that made one."""
    code = """
    import torch, accelerator as acc
    x = torch.ones(1, device="cuda:1")
    acc.set_per_process_memory_fraction(acc.get_per_process_memory_fraction(1), 1)
    acc.synchronize(1)
    with acc.stream(torch.Stream("cuda:1")):
        x.add_(1)
    assert acc.total_memory(0) == acc.total_memory(1) and acc.available_memory(0) <= acc.get_memory_info(0)[1]
    print([len(acc.processes(index)) for index in range(2)], acc.current_device_index())
    """
    assert run(code, simulated_environment(gpus=2)).strip() == "[0, 1] 0"
