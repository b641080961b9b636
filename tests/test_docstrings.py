"""Docstrings of public functions: their sections, and their lines about initialization and child processes.

A docstring has the line ``Initializes: the accelerator.`` or ``May start: a child process.`` if and only if it is true.
The test derives both from behavior: it calls each function in a forked child of a process that has imported torch and
initialized nothing, on a healthy machine and on one without NVML.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from typing import Any, NamedTuple

import pytest
import torch  # noqa: F401  (its types are in annotations)

import accelerator as acc
from accelerator import _EXPORTS
from tests.support import run, simulated_environment
from tests.support.discovery import on_simulated_gpus

NAMES = [name for name in acc.__all__ if inspect.isfunction(getattr(acc, name))]
MODULES = ("discovery", "identity", "launching", "memory_info", "monitoring", "out_of_memory")
QUERIES = {name for module in MODULES for name in _EXPORTS[module]}
INITIALIZES = "Initializes: the accelerator."
MAY_START = "May start: a child process."

# Calls of functions that need an argument or return a context. The other functions are called without arguments.
CALLS = {
    **{name: f"{name}([1])" for name in _EXPORTS["tensors"] if name.endswith("Tensor")},
    "annotate": "with annotate('range'): pass",
    "can_device_access_peer": "can_device_access_peer(0, 1)",
    "create_op_builder": "create_op_builder('NoBuilder')",
    "device_index": "with device_index(1): pass",
    "device_of": "with device_of(torch.ones(1)): pass",
    "dump_memory_snapshot": "dump_memory_snapshot(os.devnull)",
    "external_stream": "external_stream(0)",
    "fork_rng": "with fork_rng(): pass",
    "get_op_builder": "get_op_builder('NoBuilder')",
    "is_nvlink_connected": "is_nvlink_connected(0, 1)",
    "is_out_of_memory_error": "is_out_of_memory_error(ValueError())",
    "is_pinned": "is_pinned(torch.ones(1))",
    "lazy_call": "lazy_call(print)",
    "make_graphed_callables": "make_graphed_callables(torch.nn.Identity(), (torch.ones(1),))",
    "manual_seed": "manual_seed(1)",
    "manual_seed_all": "manual_seed_all(1)",
    "on_accelerator": "on_accelerator(torch.ones(1))",
    "pin_empty": "pin_empty(1)",
    "pin_empty_like": "pin_empty_like(torch.ones(1))",
    "pin_memory": "pin_memory(torch.ones(1))",
    "range_push": "range_push('range')",
    "register_host_memory": "register_host_memory(numbers.data_ptr(), numbers.nbytes)",
    "register_op_builder": "register_op_builder('NoBuilder', print)",
    "set_compile_backend": "set_compile_backend('eager')",
    "set_device": "set_device(1)",
    "set_device_idx": "set_device_idx(1)",
    "set_device_index": "set_device_index(1)",
    "set_per_process_memory_fraction": "set_per_process_memory_fraction(0.5)",
    "set_rng_state": "set_rng_state(torch.zeros(16, dtype=torch.uint8))",
    "set_rng_state_all": "set_rng_state_all([torch.zeros(16, dtype=torch.uint8)] * 2)",
    "set_sync_debug_mode": "set_sync_debug_mode(0)",
    "set_visible_devices_envs": "set_visible_devices_envs({}, [0])",
    "stream": "with stream(None): pass",
    "unpin_memory": "unpin_memory(torch.ones(1))",
    "unregister_host_memory": "unregister_host_memory(numbers.data_ptr())",
    "use_mem_pool": "use_mem_pool(None)",
}
# Their arguments exist only after the initialization, or they need a package that the tests do not install.
NOT_CALLED = {"capture_to_graph", "record_stream", "replay_graph", "set_stream", "use_in_deepspeed"}
# They initialize, then raise: simulated GPUs have no cuBLAS, the memory is not registered, the tensor is on the CPU.
RAISING = {"current_blas_handle", "unregister_host_memory", "make_graphed_callables"}

# Prints for each call whether it initialized the driver in its process, whether it started a process, and its error.
PROGRAM = """
import ctypes, json, os, sys, warnings
import torch
import accelerator
from tests.programs import in_child

warnings.simplefilter("ignore")
STARTING = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
calls = json.loads(sys.argv[1])
# Stream and Event are left out: reading them runs a query, and every child would inherit its result.
names = {name: getattr(accelerator, name) for name in (key.partition(",")[0] for key in calls)}
names.update(torch=torch, os=os, numbers=torch.ones(1024))

def is_driver_initialized():
    not_initialized = 3
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized

def call(code):
    started = []
    sys.addaudithook(lambda event, arguments: started.append(event) if event in STARTING else None)
    error = None
    try:
        exec(code, names)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return is_driver_initialized(), bool(started), error

assert not in_child(is_driver_initialized)
print(json.dumps({name: in_child(call, code) for name, code in calls.items()}))
"""


class Behavior(NamedTuple):
    initializes: bool
    starts_child: bool
    error: str | None


def observe(calls: dict[str, str], **machine: Any) -> dict[str, Behavior]:
    """Run each call in its own process, on two simulated GPUs."""
    output = run(PROGRAM, simulated_environment(gpus=2, **machine), json.dumps(calls), timeout=300)
    return {name: Behavior(*each) for name, each in json.loads(output.splitlines()[-1]).items()}


def read_docstring(name: str) -> str:
    return inspect.getdoc(getattr(acc, name)) or ""


def says(name: str, line: str) -> bool:
    return re.search(rf"^{re.escape(line)}$", read_docstring(name), re.MULTILINE) is not None


@pytest.mark.parametrize("name", NAMES)
def test_docstring_sections(name: str) -> None:
    documentation = read_docstring(name)
    assert documentation.splitlines()[0].endswith("."), "no summary"
    assert "Fork:" not in documentation
    if name not in _EXPORTS["deprecated"]:
        assert "\nExample:\n" in documentation


def test_query_modules_document_that_they_do_not_initialize() -> None:
    for module in MODULES:
        documentation = inspect.getdoc(sys.modules[f"accelerator.{module}"]) or ""
        assert "fork-safe" in documentation, module
        assert "initialize nothing" in " ".join(documentation.split()), module


@pytest.mark.slow
@on_simulated_gpus
def test_docstrings_document_initialization_and_child_processes() -> None:
    calls = {name: CALLS.get(name, f"{name}()") for name in NAMES if name not in NOT_CALLED}
    strict = {name: f"{name}(strict=True)" for name in calls if "strict" in inspect.signature(getattr(acc, name)).parameters}
    assert strict
    healthy = observe({**calls, **{f"{name}, strict": code for name, code in strict.items()}})
    # Functions that start a child process even on a healthy machine do not run again: importing torch there takes seconds.
    starts = {name.removesuffix(", strict") for name, behavior in healthy.items() if behavior.starts_child}
    repeated = QUERIES | {name for name in calls if says(name, MAY_START) and name not in starts}
    without_nvml = observe({name: code for name, code in calls.items() if name in repeated}, nvml="absent")
    assert {name for name, behavior in healthy.items() if behavior.error} <= RAISING, healthy
    assert [name for name, behavior in healthy.items() if behavior.initializes and name in QUERIES] == []
    wrong: dict[str, str] = {}
    for name in calls:
        behavior = healthy[name]
        if behavior.initializes != says(name, INITIALIZES):
            wrong[name] = f"initializes: {behavior.initializes}"
        if name in starts:
            if not says(name, MAY_START):
                wrong[name] = "starts a child process"
        elif says(name, MAY_START) and not without_nvml[name].starts_child:
            wrong[name] = "starts no child process"
    assert wrong == {}
    # Without NVML, every query may start a child process. The module's docstring says so, not that of each function.
    starting = {name for name, behavior in without_nvml.items() if behavior.starts_child}
    for module in MODULES:
        if starting & set(_EXPORTS[module]):
            assert "child process" in (inspect.getdoc(sys.modules[f"accelerator.{module}"]) or ""), module


def test_uncalled_functions_do_not_document_initialization() -> None:
    assert [name for name in NOT_CALLED if says(name, INITIALIZES) or says(name, MAY_START)] == []


def test_every_function_has_type_annotations() -> None:
    for name in NAMES:
        function = getattr(acc, name)
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        untyped = [each.name for each in signature.parameters.values() if each.annotation is inspect.Parameter.empty]
        assert untyped == [], name
        assert typing.get_type_hints(inspect.unwrap(function)), name
