"""DeepSpeed's accelerator classes and this package on the same accelerators: each difference is listed with its reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.runtime.deepspeed_stand_ins import CLASSES
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
NO_GRAPHS = "an error rather than None"
HABANA = "Habana's own variable"
INDEX = "the index counts"
DIFFERENCES: dict[str, dict[str, str]] = {
    "npu": OF_EVERY_CLASS,
    "mlu": {**OF_EVERY_CLASS, "export_envs()": "MLU's variables too"},
    "hpu": {
        **OF_EVERY_CLASS,
        "export_envs()": "Habana's variables are forwarded",
        "visible_devices_envs()": HABANA,
        "set_visible_devices_envs({}, [0, 1])": HABANA,
        "set_visible_devices_envs({}, ['1'])": HABANA,
        "is_fp16_supported()": "a tensor is created; DeepSpeed calls Habana's library, which is not here",
        "supported_dtypes()": "as is_fp16_supported()",
        **dict.fromkeys(("device_name(1)", "current_stream(1)", "default_stream(1)"), INDEX),
        **dict.fromkeys(("memory_allocated(1)", "max_memory_allocated(1)"), INDEX),
    },
    "xpu": {
        **OF_EVERY_CLASS,
        "is_triton_supported()": "Triton is part of torch's XPU wheels",
        "export_envs()": "the variables of oneCCL and Level Zero are forwarded",
        "create_graph()": NO_GRAPHS,
        "reset_max_memory_cached()": "DeepSpeed calls a function that torch.xpu lacks",
    },
    "sdaa": {**OF_EVERY_CLASS, "create_graph()": NO_GRAPHS},
    "supa": OF_EVERY_CLASS,
}


def run_comparison(*device_types: str, environment: dict[str, str]) -> dict[str, dict[str, list[Any]]]:
    """Compare in processes that are forked from one that has imported torch and DeepSpeed."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.runtime.deepspeed_stand_ins", *device_types]
    child = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment)
    assert child.returncode == 0, child.stderr[-4000:]
    return dict(json.loads(line) for line in child.stdout.splitlines() if line.startswith('["'))


def check(device_type: str, results: dict[str, list[Any]]) -> None:
    assert len(results) > 70
    different = {call: pair for call, pair in results.items() if pair[0] != pair[1]}
    assert {call: pair for call, pair in different.items() if call not in DIFFERENCES[device_type]} == {}
    assert set(DIFFERENCES[device_type]) - set(different) == set(), "no longer different"


@pytest.fixture(scope="module")
def without_a_gpu() -> dict[str, dict[str, list[Any]]]:
    return {
        **run_comparison(*(name for name in CLASSES if name not in ("cuda", "cpu")), environment=plain_environment()),
        **run_comparison("cpu", environment=plain_environment(ACCELERATOR_BACKEND="cpu")),
    }


@pytest.mark.parametrize("device_type", [name for name in CLASSES if name != "cuda"])
def test_every_difference_is_known(device_type: str, without_a_gpu: dict[str, dict[str, list[Any]]]) -> None:
    check(device_type, without_a_gpu[device_type])


@on_simulated_gpus
def test_every_difference_is_known_on_cuda() -> None:
    check("cuda", run_comparison("cuda", environment=simulated_environment(gpus=2))["cuda"])
