"""Results that depend on the compute capability, on machines with several GPU models, and which functions initialize."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import accelerator as acc
from accelerator._machine import torch_build
from tests.support import run, simulated_environment

build = torch_build.read()
pytestmark = [
    pytest.mark.xdist_group("machines"),
    pytest.mark.skipif(not (build and build.cuda), reason="needs a CUDA build of torch"),
]

# Each test runs in a child that is forked from a process that has imported torch. The group shares that process.
on_a_machine = pytest.mark.simulated_machine(gpus=2)


def test_capability_results_follow_the_current_device(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    environment = simulated_environment(
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, gpus=7, capability=["6.1", "7.5", "8.6", "9.0", "8.8", "8.9", "8.0"], log=log
    )
    code = """
import os, torch, warnings
import accelerator as acc
from accelerator._machine import triton
triton.is_usable = lambda: True
torch._grouped_mm = print
warnings.simplefilter("ignore")

def results():
    return [
        acc.is_fp16_supported(), acc.is_bf16_supported(False), acc.is_bf16_supported(), acc.is_tf32_supported(),
        acc.is_triton_supported(), acc.prefer_triton_grouped_mm(), acc.is_fp8_supported(),
    ]

f, t = False, True
expected = {
    0: [f, f, t, f, f, f, f], 1: [t, f, t, f, f, t, f], 2: [t, t, t, t, t, t, f], 3: [t, t, t, t, t, f, t],
    4: [t, t, t, t, t, t, f], 5: [t, t, t, t, t, t, t], 6: [t, t, t, t, t, t, f],
}
assert results() == expected[0], results()
os.environ["DS_ALLOW_DEPRECATED_FP16"] = "1"
assert acc.is_fp16_supported() is True
assert acc.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
del os.environ["DS_ALLOW_DEPRECATED_FP16"]
assert acc.supported_dtypes() == [torch.float32, torch.bfloat16]

acc.amp(), acc.is_fp64_supported(), acc.graph_pool_handle(), acc.is_current_stream_capturing(), acc.op_builder_dir()
acc.on_accelerator(torch.ones(1)), acc.is_pinned(torch.ones(1)), acc.pin_memory_alignment(), acc.build_extension()
acc.get_op_builder("NoSuchBuilder"), acc.get_compile_backend(), acc.unpin_memory(torch.ones(1))
with acc.annotate("range"):
    pass
log = open(os.environ["ACCELERATOR_SIM_LOG"]).read()
assert acc.is_fork_safe() and "cuInit" not in log and "cudart" not in log, log

for device, expected_here in expected.items():
    torch.cuda.set_device(device)
    assert results() == expected_here, (device, results())
    assert acc.is_bf16_supported() is torch.cuda.is_bf16_supported(), device
    assert acc.is_bf16_supported(False) is torch.cuda.is_bf16_supported(False), device
"""
    run(code, environment)


def _names_spawn(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError as error:
        return "spawn" in str(error)
    return False


@on_a_machine
def test_functions_raise_in_child_forked_after_initialization() -> None:
    torch.cuda.init()
    child = os.fork()
    if child == 0:
        bad = -1
        try:
            tensor = torch.ones(1)
            calls: list[Callable[[], object]] = [
                acc.is_bf16_supported,
                acc.is_fp16_supported,
                acc.is_fp64_supported,
                acc.is_tf32_supported,
                acc.amp,
                acc.supported_dtypes,
                acc.create_graph,
                acc.graph_pool_handle,
                acc.is_current_stream_capturing,
                lambda: acc.FloatTensor(1),
                lambda: acc.pin_memory(tensor),
                lambda: acc.is_pinned(tensor),
                lambda: acc.pin_empty(1),
                lambda: acc.register_host_memory(0, 1),
                lambda: acc.unregister_host_memory(0),
                acc.is_triton_supported,
                acc.prefer_triton_grouped_mm,
                lambda: acc.capture_to_graph(None),
                lambda: acc.replay_graph(None),  # type: ignore[arg-type]
            ]
            bad = sum(not _names_spawn(call) for call in calls)
            acc.range_push("still")
            acc.range_pop()
            acc.get_compile_backend()
        finally:
            os._exit(bad & 255)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@on_a_machine
@pytest.mark.parametrize(
    "call",
    [lambda: acc.FloatTensor([1]), lambda: acc.pin_memory(torch.ones(1)), lambda: acc.pin_empty(1), lambda: acc.create_graph()],
    ids=["FloatTensor", "pin_memory", "pin_empty", "create_graph"],
)
def test_accelerator_functions_initialize_torch(call: Callable[[], object]) -> None:
    assert not acc.is_initialized()
    call()
    assert acc.is_initialized()


def test_environment_changed_after_initialization_has_no_effect() -> None:
    """After initialization, functions still use the accelerator and all of its devices."""
    code = """
import os, torch
import accelerator as acc
acc.set_device_index(1)
os.environ["ACCELERATOR_BACKEND"] = "cpu"
assert acc.device().type == "cuda"
assert acc.get_device_capability(0)["compute_capability"] == (7, 5)
assert acc.get_device_capability()["compute_capability"] == (9, 0)
assert (acc.is_bf16_supported(False), acc.is_fp8_supported()) == (True, True)
acc.manual_seed_all(9)
with acc.fork_rng():
    acc.seed_all()
    assert torch.cuda.initial_seed() != 9
assert [generator.initial_seed() for generator in torch.cuda.default_generators] == [9, 9]
states = acc.get_rng_state_all()
assert len(states) == 2
acc.set_rng_state_all(states)
"""
    run(code, simulated_environment(gpus=2, capability=["7.5", "9.0"]))
