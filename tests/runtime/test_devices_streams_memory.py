"""Devices, streams and memory before initialization, during it and after a fork. Each test runs in its own process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator._machine import torch_build
from accelerator._torch import state
from accelerator._torch.cpu_streams import CPUEvent, CPUStream
from tests.programs import in_child
from tests.runtime.device_arguments import (
    DIGITS_ARE_FINE,
    FUNCTIONS,
    HUGE,
    INDEX_IS_REQUIRED,
    NEGATIVE,
    NEGATIVE_IS_FINE,
    WRONG,
    Index,
)
from tests.support import plain_environment, run, simulated_environment
from tests.support.simulation_driver import is_driver_initialized

pytestmark = pytest.mark.xdist_group("machines")

build = torch_build.read()
needs_simulation = pytest.mark.skipif(
    sys.platform != "linux" or build is None or build.cuda is None, reason="needs a CUDA build of torch on Linux"
)
# The test runs in a child that is forked from a process that has imported torch and initialized nothing.
uninitialized = pytest.mark.simulated_machine(gpus=2)


@uninitialized
def test_documented_functions_do_not_initialize() -> None:
    for device in (None, 0, 1, "cuda", "cuda:1", torch.device("cuda", 1)):
        assert acc.memory_allocated(device) == acc.max_memory_allocated(device) == 0
        assert acc.memory_reserved(device) == acc.max_memory_reserved(device) == 0
        assert acc.memory_stats(device) == acc.memory_stats_as_nested_dict(device) == {}
        assert acc.mem_get_info(device) == acc.get_memory_info(device)
        assert acc.total_memory(device) == acc.get_memory_info(device)[1] == acc.visible_devices()[0].total_memory
        assert 0 < acc.available_memory(device) <= acc.total_memory(device)
        assert acc.get_per_process_memory_fraction(device) == 1.0
        assert "Allocated memory" in acc.memory_summary(device)
        assert acc.device(device).type == "cuda"
        acc.synchronize(device)
        acc.reset_peak_memory_stats(device)
        acc.reset_accumulated_memory_stats(device)
        acc.set_per_process_memory_fraction(1.0, device)
        acc.get_device_capability(device)
        acc.device_index(None), acc.device_index(-1)
    assert acc.current_device() == acc.current_device_index() == 0
    assert acc.current_device_name() == "cuda:0"
    assert acc.get_arch_list()
    assert acc.get_gencode_flags()
    assert acc.host_memory_stats() == {}
    assert acc.memory_snapshot() == []
    assert acc.get_sync_debug_mode() == 0
    assert not acc.is_synchronized_device()
    assert not acc.use_host_timers()
    acc.set_sync_debug_mode(0)
    acc.record_memory_history()
    acc.record_memory_history(None)
    acc.dump_memory_snapshot(os.devnull)
    acc.empty_cache()
    acc.empty_host_cache()
    acc.ipc_collect()
    acc.lazy_call(print)
    acc.set_device(-1)
    acc.set_device_index(-1)
    with acc.stream(None), acc.device_of(torch.ones(1)):
        pass
    assert not acc.is_initialized()
    assert acc.is_fork_safe()
    assert not torch.cuda.is_initialized()
    assert not is_driver_initialized()

    def use() -> None:
        acc.set_device(1)
        assert torch.empty(1, device="cuda").device.index == 1
        assert is_driver_initialized()

    in_child(use)
    assert not acc.is_initialized()
    assert not is_driver_initialized()


@uninitialized
@pytest.mark.parametrize(
    "call",
    ["init()", "set_device(1)", "set_device_index('cuda:1')", "current_stream()", "default_stream(1)",
     "get_device_properties()", "can_device_access_peer(0, 1)", "cudart()", "external_stream(0)",
     "device_index(0).__enter__()"],
)  # fmt: skip
def test_functions_that_initialize(call: str) -> None:
    assert not is_driver_initialized()
    eval(f"acc.{call}")
    assert acc.is_initialized()
    assert is_driver_initialized()


@uninitialized
@pytest.mark.parametrize("arguments", [(None, None), (print, None), ((print, None), ((), ()))])
def test_wrong_callables_for_graphs_initialize_nothing(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"callable|sample_args"):
        acc.make_graphed_callables(*arguments)
    assert not acc.is_initialized()


@uninitialized
def test_wrong_devices_before_initialization() -> None:
    for name, function in FUNCTIONS.items():
        for device, error in WRONG:
            if device == "0" and name in DIGITS_ARE_FINE:
                continue
            with pytest.raises(error) as caught:
                function(device)
            assert type(caught.value) is error, (name, device)
        for device in ("cpu", torch.device("cpu", 0)):
            with pytest.raises(ValueError, match="cpu doesn't match the current accelerator cuda"):
                function(device)
        for device in (2, *HUGE, "cuda:2", torch.device("cuda", 2), Index(2)):
            with pytest.raises(ValueError, match="out of range: 2 cuda devices are visible"):
                function(device)
        for device in NEGATIVE:
            if name not in NEGATIVE_IS_FINE:
                with pytest.raises(ValueError, match="out of range"):
                    function(device)
            elif name != "current_stream":
                function(device)
        if name in INDEX_IS_REQUIRED:
            for device in (None, "cuda"):
                with pytest.raises(ValueError, match="with an index"):
                    function(device)
    assert not acc.is_initialized()
    assert not is_driver_initialized()


@uninitialized
def test_queued_calls_run_at_initialization() -> None:
    order: list[int] = []
    acc.lazy_call(lambda: order.append(1))
    acc.set_per_process_memory_fraction(0.5, 1)
    acc.set_per_process_memory_fraction(0.25, "cuda:1")
    assert acc.get_per_process_memory_fraction(1) == 0.25
    assert acc.get_per_process_memory_fraction() == 1.0
    acc.record_memory_history(max_entries=10)
    acc.lazy_call(lambda: order.append(2))
    assert order == []
    assert not acc.is_initialized()
    torch.empty(1, device="cuda:0")
    assert order == [1, 2]
    assert torch.cuda.current_device() == 0
    assert acc.get_per_process_memory_fraction(1) == torch.cuda.get_per_process_memory_fraction(1) == 0.25
    torch.cuda.set_device(0)
    assert acc.get_per_process_memory_fraction(0) == 1.0
    assert torch.cuda.memory._snapshot()["device_traces"][0]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(acc.total_memory(1) // 2, dtype=torch.uint8, device="cuda:1")
    assert acc.is_out_of_memory_error(caught.value)


@pytest.mark.slow
@pytest.mark.simulated_machine(gpus=1, memory="1GiB")
def test_out_of_memory_on_a_gpu_with_one_gibibyte() -> None:
    held = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(Exception) as caught:
        torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    assert acc.is_out_of_memory_error(caught.value) is True
    assert acc.memory_allocated() == acc.memory_reserved() == 600 << 20
    assert acc.max_memory_allocated() == 600 << 20
    assert acc.memory_stats()["num_ooms"] == 1
    assert acc.total_memory() == 1 << 30
    assert acc.available_memory() == acc.get_memory_info()[0] <= 424 << 20
    caught.value.__traceback__ = None
    del held
    again = torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
    assert acc.memory_allocated() == again.numel() == 900 << 20


@uninitialized
def test_functions_raise_in_bad_fork() -> None:
    acc.init()
    stream = acc.current_stream()

    def use_after_fork() -> None:
        calls: list[Callable[[], object]] = [
            lambda: acc.set_device(0),
            lambda: acc.current_device(),
            lambda: acc.current_device_name(),
            lambda: acc.device_of(torch.ones(1)),
            lambda: acc.get_device_properties(),
            lambda: acc.can_device_access_peer(0, 1),
            lambda: acc.default_stream(),
            lambda: acc.stream(stream),
            lambda: acc.external_stream(0),
            acc.init,
            lambda: acc.lazy_call(print),
            acc.ipc_collect,
            acc.cudart,
            acc.current_blas_handle,
            lambda: acc.set_sync_debug_mode(1),
            acc.get_sync_debug_mode,
            acc.mem_get_info,
            acc.memory_stats_as_nested_dict,
            acc.host_memory_stats,
            acc.memory_summary,
            acc.memory_snapshot,
            acc.record_memory_history,
            lambda: acc.dump_memory_snapshot(os.devnull),
            acc.total_memory,
            acc.available_memory,
            lambda: acc.set_per_process_memory_fraction(1.0),
            acc.get_per_process_memory_fraction,
            acc.memory_allocated,
            acc.synchronize,
            acc.empty_cache,
            acc.current_stream,
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"spawn.*forkserver"):
                call()
        assert acc.device() == torch.device("cuda")
        assert acc.device(0) == torch.device("cuda", 0)
        assert (acc.device_name(), acc.device_name(1), acc.device_name("0")) == ("cuda", "cuda:1", "cuda:0")
        assert not acc.is_synchronized_device()
        assert not acc.use_host_timers()
        assert not acc.resolves_data_dependency()
        assert not acc.handles_memory_backpressure()
        assert acc.on_accelerator(torch.ones(1)) is False
        assert acc.op_builder_dir() == "deepspeed.ops.op_builder"
        assert acc.get_op_builder("NoSuchBuilder") is None
        for wrong, error in ((2, ValueError), ("cpu", ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                acc.device(wrong)  # type: ignore[arg-type]
        # As in torch, seeds are deferred until the initialization, which is impossible in this child.
        torch.default_generator.manual_seed(7)
        acc.manual_seed(1), acc.manual_seed_all(1), acc.seed(), acc.seed_all()
        assert torch.initial_seed() == 7
        assert acc.get_arch_list() == torch.cuda.get_arch_list()
        assert acc.is_out_of_memory_error(MemoryError())
        with acc.stream(None):
            pass

    in_child(use_after_fork)


@uninitialized
def test_invalid_calls_do_not_initialize() -> None:
    assert acc.device_count() == 2
    calls: list[tuple[Callable[[], object], Any]] = [
        (lambda: acc.FloatTensor(None), (TypeError, RuntimeError)),
        (lambda: acc.LongTensor("x"), (TypeError, ValueError)),
        (lambda: acc.HalfTensor([[1], [1, 2]]), ValueError),
        (lambda: acc.external_stream(-1), ValueError),
        (lambda: acc.external_stream(None), TypeError),
        (lambda: acc.external_stream(0, 2), ValueError),
        (lambda: acc.pin_empty(None), TypeError),
        (lambda: acc.pin_empty(-1), RuntimeError),
        (lambda: acc.pin_empty("x"), TypeError),
        (lambda: acc.pin_memory(None), TypeError),
        (lambda: acc.pin_memory(torch.empty(1, device="meta")), RuntimeError),
        (lambda: acc.register_host_memory(None, 1), TypeError),
        (lambda: acc.register_host_memory(0, None), TypeError),
        (lambda: acc.unregister_host_memory(None), TypeError),
        (lambda: acc.unregister_host_memory(-1), ValueError),
        (lambda: acc.manual_seed(float("inf")), ValueError),
        (lambda: acc.manual_seed_all(2**70), (ValueError, RuntimeError)),
        (lambda: acc.set_device_index(2), ValueError),
        (lambda: acc.set_device_index(None), ValueError),
        (lambda: acc.current_stream("cuda:2"), ValueError),
        (lambda: acc.device_index(2), ValueError),
        (lambda: acc.Graph(capture_error_mode="strict"), ValueError),
        (lambda: acc.set_stream(3), TypeError),
        (lambda: acc.capture_to_graph(3), TypeError),
        (lambda: acc.replay_graph(None), TypeError),
        (lambda: acc.can_device_access_peer(2, 0), ValueError),
        (lambda: acc.can_device_access_peer(0, 2), ValueError),
        (lambda: acc.range_push(3), TypeError),
    ]
    for call, error in calls:
        with pytest.raises(error) as caught:
            call()
        # Some versions of torch list all signatures of empty() if the arguments match none.
        several_lines = str(caught.value).startswith("empty() received")
        assert several_lines or "\n" not in str(caught.value), caught.value
    assert not acc.is_initialized()
    assert acc.is_fork_safe()
    assert not is_driver_initialized()


@uninitialized
def test_context_initializes_when_entered() -> None:
    made = [acc.device_index(device) for device in (0, 1, "cuda:1", torch.device("cuda", 1))][-1]
    assert not acc.is_initialized()
    assert acc.is_fork_safe()
    assert not is_driver_initialized()
    with made, made:
        assert acc.is_initialized()
        assert is_driver_initialized()
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


@uninitialized
def test_entering_a_context_in_bad_fork_raises() -> None:
    made = acc.device_index(1)
    torch.cuda.init()

    def enter() -> None:
        with pytest.raises(RuntimeError, match=r"^The accelerator cannot be used: "):
            made.__enter__()

    in_child(enter)


@uninitialized
def test_device_errors_hide_internal_exceptions() -> None:
    for prepare in (lambda: None, acc.init):
        prepare()
        for device in (torch.device("cpu"), "cpu", "bogus", 1.5):
            for function in (acc.synchronize, acc.memory_allocated, acc.set_device_index):
                with pytest.raises(Exception) as caught:
                    function(device)
                shown = "".join(traceback.format_exception(caught.value))
                assert "KeyError" not in shown, shown
                assert "During handling" not in shown, shown


@uninitialized
def test_runtime_state_follows_environment_until_initialization() -> None:
    before = state.current("cuda:1")
    assert before == ("cuda", 1, False)
    os.environ["ACCELERATOR_BACKEND"] = "cpu"
    assert state.current(5) == ("cpu", 0, False)
    assert before == ("cuda", 1, False)
    assert not state.initialized
    del os.environ["ACCELERATOR_BACKEND"]
    torch.cuda.init()
    assert state.current("cuda") == ("cuda", None, True)


@uninitialized
def test_stream_classes_follow_the_runtime_state(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_classes, of_the_cpu = (torch.Stream, torch.Event), (CPUStream, CPUEvent)
    for _ in range(2):
        assert (acc.Stream, acc.Event) == torch_classes
        for variable, value in (("ACCELERATOR_BACKEND", "cpu"), ("CUDA_VISIBLE_DEVICES", "")):
            monkeypatch.setenv(variable, value)
            assert (acc.Stream, acc.Event) == of_the_cpu
            monkeypatch.delenv(variable)
    with monkeypatch.context() as replaced:
        replaced.setattr(acc, "Stream", int)
        assert acc.Stream is int
    in_child(lambda: acc.Stream(0).synchronize())
    assert (acc.Stream, acc.Event) == torch_classes
    acc.init()
    monkeypatch.setenv("ACCELERATOR_BACKEND", "cpu")
    assert (acc.Stream, acc.Event) == torch_classes
    monkeypatch.delenv("ACCELERATOR_BACKEND")

    def in_bad_fork() -> None:
        for _ in range(2):
            assert issubclass(acc.Stream, torch.Stream)
            for create in (acc.Stream, acc.Event):
                with pytest.raises(RuntimeError, match=r"spawn.*forkserver"):
                    create()

    in_child(in_bad_fork)


@uninitialized
@pytest.mark.parametrize("variable", [("ACCELERATOR_BACKEND", "cpu"), ("CUDA_VISIBLE_DEVICES", "0")])
def test_results_ignore_environment_after_initialization(variable: tuple[str, str]) -> None:
    acc.init()
    os.environ.update([variable])
    assert acc.device_count() == 2
    assert acc.is_available()
    assert acc.device(1) == torch.device("cuda", 1)
    assert acc.device_name(1) == "cuda:1"
    assert acc.get_device_index("cuda:1") == 1
    assert acc.current_accelerator() == torch.device("cuda")
    acc.set_device_index(1)
    assert acc.current_device_index() == acc.get_device_index() == 1


COMPILED = """
import torch._dynamo
import torch
import accelerator as acc
device = {device}
def program(tensor):
    with acc.device_index(device):
        return tensor + 1, torch.empty(1, device="{kind}")
tensor, made = torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2))
assert tensor.tolist() == [2, 2]
print(made.device)
"""


@pytest.mark.slow
@needs_simulation
@pytest.mark.parametrize("device", ["1", "'cuda:1'", "torch.device('cuda', 1)", "torch.empty(1, device='cuda:1')"])
def test_compiled_context_initializes_the_accelerator(device: str) -> None:
    assert run(COMPILED.format(device=device, kind="cuda"), simulated_environment(gpus=2)) == "cuda:1\n"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["0", "'cpu'", "torch.device('cpu')", "torch.ones(1)"])
def test_compiled_context_as_first_use_on_the_cpu(device: str) -> None:
    assert run(COMPILED.format(device=device, kind="cpu"), plain_environment(ACCELERATOR_BACKEND="cpu")) == "cpu\n"


@uninitialized
def test_accelerator_backend_variable_selects_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATOR_BACKEND", "cpu")
    assert acc.device() == torch.device("cpu")
    assert acc.is_synchronized_device()
    assert acc.mem_get_info()[1] == acc.get_memory_info()[1]  # free memory varies
    acc.set_device(0)
    acc.init()
    assert not acc.is_initialized()
    assert not is_driver_initialized()
    refusing: list[Callable[[], object]] = [acc.cudart, acc.current_blas_handle, lambda: acc.external_stream(0)]
    for refused in refusing:
        with pytest.raises(RuntimeError, match="accelerator"):
            refused()
