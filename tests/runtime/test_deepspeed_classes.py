"""DeepSpeed's accelerator classes and this package on the same accelerators: each difference is listed with its reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.runtime.vendor_modules import CLASSES
from tests.support import ROOT, plain_environment, simulated_environment
from tests.support.discovery import on_simulated_gpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

OTHER_PROCESSES = "the device's free memory, of which other processes use some"
UNKNOWN_BUILDER = "an unknown name is None"
OF_EVERY_CLASS = {
    "available_memory()": OTHER_PROCESSES,
    "available_memory(1)": OTHER_PROCESSES,
    "create_op_builder('NoSuchBuilder')": UNKNOWN_BUILDER,
    "get_op_builder('NoSuchBuilder')": UNKNOWN_BUILDER,
}
DEVICE = {call: "a torch.device, which is a context manager too" for call in ("device()", "device(1)")}
NO_GRAPHS = "an error rather than None"
HABANA = "Habana's own variable"
INDEX = "the index counts"
ONE_DEVICE = "there is one device; another index is an error"
SETS = ("set_visible_devices_envs({}, [0, 1])", "set_visible_devices_envs({}, ['1'])")
CPU_STREAM = "the CPU fallback has streams and events"
NO_ALLOCATOR = "the CPU has no allocator with statistics; DeepSpeed's figures are the process's memory"
DIFFERENCES: dict[str, dict[str, str]] = {
    "npu": OF_EVERY_CLASS,
    "mlu": {**OF_EVERY_CLASS, **DEVICE, "export_envs()": "MLU's variables too"},
    "hpu": {
        **{call: reason for call, reason in OF_EVERY_CLASS.items() if not call.startswith("create")},
        "export_envs()": "Habana's variables are forwarded",
        "visible_devices_envs()": HABANA,
        "set_visible_devices_envs({}, [0, 1])": HABANA,
        "set_visible_devices_envs({}, ['1'])": HABANA,
        "is_fp16_supported()": "a tensor is created; DeepSpeed calls Habana's library, which is not here",
        "supported_dtypes()": "as is_fp16_supported()",
        **dict.fromkeys(("device(1)", "device_name(1)", "current_stream(1)", "default_stream(1)"), INDEX),
        **dict.fromkeys(("memory_allocated(1)", "max_memory_allocated(1)"), INDEX),
    },
    "xpu": {
        **OF_EVERY_CLASS,
        "is_triton_supported()": "Triton is part of torch's XPU wheels",
        "export_envs()": "the variables of oneCCL and Level Zero are forwarded",
        "create_graph()": NO_GRAPHS,
        "reset_max_memory_cached()": "DeepSpeed calls a function that torch.xpu lacks",
    },
    "sdaa": {**OF_EVERY_CLASS, **DEVICE, "create_graph()": NO_GRAPHS},
    "supa": {call: OF_EVERY_CLASS[call] for call in ("available_memory()", "available_memory(1)")},
    "cuda": {
        **dict.fromkeys(("memory_stats()", "memory_stats(1)"), "torch.accelerator's statistics"),
        **dict.fromkeys(("range_push('range')", "range_pop()"), "None rather than NVTX's depth"),
        "Event": "torch.Event, as of every accelerator",
    },
    "mps": {
        **{call: UNKNOWN_BUILDER for call in OF_EVERY_CLASS if "Builder" in call},
        "current_device()": "an index, as of every accelerator",
        "is_available()": "DeepSpeed asks torch's bindings, which know no MPS here",
        **dict.fromkeys(
            ("is_bf16_supported()", "supported_dtypes()", "is_fp64_supported()"), "the stand-in's tensors are the CPU's"
        ),
        **dict.fromkeys(("visible_devices_envs()", *SETS), "MPS has no such variable"),
        "create_graph()": NO_GRAPHS,
        **dict.fromkeys(("device()", "device(1)", "device_name(1)", "set_device(1)", "default_generator(1)"), ONE_DEVICE),
        **dict.fromkeys(("synchronize(1)", "current_stream(1)", "default_stream(1)", "get_rng_state(1)"), ONE_DEVICE),
        **dict.fromkeys(("memory_allocated(1)", "max_memory_allocated(1)", "memory_reserved(1)"), ONE_DEVICE),
        **dict.fromkeys(("max_memory_reserved(1)", "memory_stats(1)", "reset_peak_memory_stats(1)"), ONE_DEVICE),
        "initial_seed()": "the seed rather than None",
        **dict.fromkeys(("current_stream()", "default_stream()", "Stream"), "torch's stream rather than None"),
        **dict.fromkeys(
            ("max_memory_allocated()", "max_memory_reserved()", "max_memory_cached()"),
            "the module's peak, not its current value",
        ),
        "memory_stats()": "the module's statistics",
        **dict.fromkeys(
            ("total_memory()", "total_memory(1)", "available_memory()", "available_memory(1)"), "the host's memory"
        ),
    },
    "cpu": {
        **{call: UNKNOWN_BUILDER for call in OF_EVERY_CLASS if "Builder" in call},
        **dict.fromkeys(("device_count()", "is_available()"), "the CPU is no accelerator"),
        "is_fp16_supported()": "False rather than None, if the processor has no 16-bit floats",
        "supported_dtypes()": "the same dtypes in another order, if the processor has 16-bit floats",
        "create_graph()": NO_GRAPHS,
        **dict.fromkeys(("device()", "device(1)"), "torch.device rather than None"),
        **dict.fromkeys(("current_stream()", "current_stream(1)", "default_stream()", "default_stream(1)"), CPU_STREAM),
        **dict.fromkeys(("Stream", "Event"), CPU_STREAM),
        **dict.fromkeys(("manual_seed(7)", "manual_seed_all(7)"), "None, as torch.cuda's"),
        **dict.fromkeys(("memory_allocated()", "memory_allocated(1)", "max_memory_allocated()"), NO_ALLOCATOR),
        **dict.fromkeys(("max_memory_allocated(1)", "memory_reserved()", "memory_reserved(1)"), NO_ALLOCATOR),
        **dict.fromkeys(("max_memory_reserved()", "max_memory_reserved(1)", "memory_stats()", "memory_stats(1)"), NO_ALLOCATOR),
        **dict.fromkeys(("memory_cached()", "max_memory_cached()"), NO_ALLOCATOR),
    },
}
# The free memory of the host changes between two calls.
VARYING = {"cpu": {"available_memory()", "available_memory(1)"}}
OF_SOME_PROCESSORS = {"cpu": {"is_fp16_supported()", "supported_dtypes()"}}


def run_comparison(*device_types: str, environment: dict[str, str]) -> dict[str, dict[str, list[Any]]]:
    """Return the results of both sides for each device type, from a new process."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.runtime.vendor_modules", *device_types]
    child = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment)
    assert child.returncode == 0, child.stderr[-4000:]
    return dict(json.loads(line) for line in child.stdout.splitlines() if line.startswith('["'))


def check(device_type: str, results: dict[str, list[Any]]) -> None:
    assert len(results) > 70
    varying = VARYING.get(device_type, set())
    different = {call: pair for call, pair in results.items() if pair[0] != pair[1] and call not in varying}
    assert {call: pair for call, pair in different.items() if call not in DIFFERENCES[device_type]} == {}
    equal = set(DIFFERENCES[device_type]) - set(different) - OF_SOME_PROCESSORS.get(device_type, set())
    assert equal == set(), "no longer different"


@pytest.fixture(scope="module")
def cpu_comparisons() -> dict[str, dict[str, list[Any]]]:
    return {
        **run_comparison(*(name for name in CLASSES if name not in ("cuda", "cpu")), environment=plain_environment()),
        **run_comparison("cpu", environment=plain_environment(ACCELERATOR_BACKEND="cpu")),
    }


@pytest.mark.parametrize("device_type", [name for name in CLASSES if name != "cuda"])
def test_differences_from_deepspeed_are_listed(device_type: str, cpu_comparisons: dict[str, dict[str, list[Any]]]) -> None:
    check(device_type, cpu_comparisons[device_type])


@on_simulated_gpus
def test_differences_from_deepspeed_on_cuda_are_listed() -> None:
    check("cuda", run_comparison("cuda", environment=simulated_environment(gpus=2))["cuda"])
