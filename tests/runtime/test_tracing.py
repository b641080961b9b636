"""``torch.compile(fullgraph=True)`` traces a function of this package if it traces torch's function of that name. Value and
state afterwards are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator._machine import torch_build
from tests.support import plain_environment, run, simulated_environment

build = torch_build.read()
before_2_8 = torch.__version__ < "2.8"

# A program for each function that this package and torch.accelerator or torch.cuda have; ``api`` is one of these modules.
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    name: (lambda api, name=name: getattr(api, name)())
    for name in (
        "current_accelerator", "current_device", "current_device_index", "current_stream", "default_stream", "device_count",
        "empty_cache", "empty_host_cache", "get_arch_list", "get_device_name", "get_gencode_flags", "get_memory_info",
        "get_per_process_memory_fraction", "get_rng_state",
        "get_rng_state_all", "get_sync_debug_mode", "graph_pool_handle",
        "host_memory_stats",
        "init", "initial_seed", "ipc_collect", "is_available", "is_bf16_supported", "is_current_stream_capturing",
        "is_initialized", "is_tf32_supported", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
        "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats", "memory_summary", "reset_peak_memory_stats",
        "seed", "seed_all", "synchronize",
    )
}  # fmt: skip
PROGRAMS |= {
    "get_device_properties": lambda api: api.get_device_properties(0).name,
    "set_device": lambda api: api.set_device(0),
    "set_device_index": lambda api: api.set_device_index(0),
    "set_stream": lambda api: api.set_stream(api.current_stream()),
    "synchronize, with an index": lambda api: api.synchronize(0),
    "synchronize, with a string": lambda api: api.synchronize("cuda:0"),
    "current_stream, with an index": lambda api: api.current_stream(0),
    "manual_seed": lambda api: api.manual_seed(1),
}
# Their values differ in each call, or depend on what was traced before, so the test does not compare them.
ONLY_TRACED = ("graph_pool_handle", "is_initialized")
# They leave a different state in each call.
SEEDED_RANDOMLY = ("seed", "seed_all")
# Without a device torch.cuda's functions do nothing. Ours raise, or use the CPU's generator, which is not traceable.
NOT_ON_THE_CPU = ("get_rng_state_all", "graph_pool_handle", "manual_seed")
# Before torch 2.8 a function outside torch that returns a float as a constant cannot be traced.
NOT_BEFORE_2_8 = ("get_per_process_memory_fraction",)


def traced(api: Any, program: Callable[[Any], Any]) -> tuple[bool, Any]:
    """Return whether a program can be traced, and its value."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda tensor: (tensor + 1, program(api)), backend="eager", fullgraph=True)
    try:
        tensor, value = compiled(torch.ones(2))
    except Exception:
        return False, None
    assert tensor.tolist() == [2, 2]
    return True, (value.stream_id, value.device_index) if isinstance(value, torch.Stream) else value


def state() -> tuple[Any, ...]:
    """Return the state that a program may change."""
    host = torch.initial_seed(), torch.get_rng_state().tolist()
    if not torch.cuda.is_initialized():
        return host
    streams = [torch.cuda.current_stream(device).stream_id for device in range(2)]
    generators = [torch.cuda.default_generators[device].get_state().tolist() for device in range(2)]
    settings = torch.cuda.current_device(), torch.cuda.get_sync_debug_mode(), torch.cuda.memory_reserved()
    return *host, *settings, streams, generators


def set_initial_state() -> tuple[Any, ...]:
    """Reset the state before a program runs, and return it."""
    torch.default_generator.manual_seed(7)
    if torch.cuda.is_initialized():
        torch.cuda.set_device(1)
        torch.cuda.manual_seed_all(7)
        torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    return state()


def find_differences() -> list[str]:
    """Return the functions that torch traces and this package does not, or with another value or state."""
    warnings.simplefilter("ignore")
    differing: list[str] = []
    for name, program in PROGRAMS.items():
        for api in (torch.accelerator, torch.cuda):
            if not hasattr(api, name.partition(",")[0]):
                continue
            if (name in NOT_ON_THE_CPU and acc.device_count() == 0) or (name in NOT_BEFORE_2_8 and before_2_8):
                continue
            begun = set_initial_state()
            traces, theirs = traced(api, program)
            their_state = state()
            if not traces:
                continue
            assert set_initial_state() == begun or name == "init", name
            ours_traces, ours = traced(acc, program)
            our_state = state()
            if name in SEEDED_RANDOMLY:
                # Under the CPU fallback our function seeds the CPU's generator; torch.cuda's does nothing.
                their_state, our_state = (their_state != begun or not acc.device_count(),), (our_state != begun,)
            if not ours_traces or our_state != their_state:
                differing.append(f"{name} of {api.__name__}: torch gives {theirs}")
            elif name not in ONLY_TRACED and api is torch.accelerator and ours != theirs:
                differing.append(f"{name} of {api.__name__}: {ours}, torch gives {theirs}")
            print("traced", name, api.__name__, "" if their_state == begun else "with effects")
    return differing


def _run_differences(environment: dict[str, str], prelude: str = "") -> list[str]:
    find = "from tests.runtime.test_tracing import find_differences\nprint('differing', find_differences())"
    code = f"import torch\n{prelude}\n{find}"
    return run(code, environment, timeout=300).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch")
def test_calls_that_torch_traces_are_traced_on_two_devices() -> None:
    *lines, differing = _run_differences(simulated_environment(gpus=2), "torch.cuda.init(); torch.cuda.set_device(1)")
    assert differing == "differing []"
    # Before torch 2.8 few functions are traced. Newer releases trace at least these.
    least = {"is_available", "current_device"} if before_2_8 else {
        "is_available", "current_device_index", "current_accelerator", "current_stream", "synchronize", "set_stream",
    }  # fmt: skip
    assert least <= {line.split()[1] for line in lines}


@pytest.mark.slow
def test_calls_that_torch_traces_are_traced_on_the_cpu() -> None:
    assert _run_differences(plain_environment())[-1] == "differing []"


def program_with_side_effects(tensor: torch.Tensor, side: Any) -> tuple[Any, ...]:
    acc.synchronize()
    acc.synchronize(0)
    with acc.device_index(0), acc.device_of(tensor), acc.stream(side):
        inside = acc.current_device_index()
    acc.set_stream(acc.current_stream())
    acc.empty_cache()
    acc.reset_peak_memory_stats()
    acc.range_push("name")
    acc.range_pop()
    vendor = (
        *(acc.is_synchronized_device(), acc.use_host_timers()),
        *(acc.resolves_data_dependency(), acc.handles_memory_backpressure()),
    )
    return tensor + 1, inside, acc.is_available(), acc.device_count(), acc.device(0), vendor


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"])
def test_program_is_traced(device: str) -> None:
    code = """
    import torch._dynamo
    import sys, torch, accelerator as acc
    from tests.runtime.test_tracing import program_with_side_effects
    if sys.argv[1] == "cuda":
        torch.cuda.init()
    side = acc.Stream() if sys.argv[1] == "cuda" else None
    eager = program_with_side_effects(torch.ones(2), side)
    compiled = torch.compile(program_with_side_effects, backend="eager", fullgraph=True)(torch.ones(2), side)
    assert eager[0].tolist() == compiled[0].tolist() and eager[1:] == compiled[1:], (eager, compiled)
    print(compiled[2:4])
    """
    if device == "cpu":
        assert run(code, plain_environment(), "cpu").strip() == "(False, 0)"
    elif build is not None and build.cuda is not None:
        assert run(code, simulated_environment(gpus=2), "cuda").strip() == "(True, 2)"


@pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch")
def test_side_effects_run_at_each_call_of_compiled_code() -> None:
    run(
        """
        import torch._dynamo
        import torch, accelerator as acc
        torch.cuda.init()
        def program(tensor):
            acc.empty_cache()
            acc.reset_peak_memory_stats()
            return tensor + 1
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        for _ in range(3):
            torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
            assert acc.memory_reserved() >= 30 << 20 <= acc.max_memory_allocated()
            compiled(torch.ones(2))
            assert acc.memory_reserved() == 0 == acc.max_memory_allocated()
        def current(tensor):
            return tensor + 1, acc.current_device_index(), acc.current_stream()
        compiled = torch.compile(current, backend="eager", fullgraph=True)
        for index in (0, 1, 0):
            torch.cuda.set_device(index)
            _, current_index, stream = compiled(torch.ones(2))
            # Before torch 2.8 it is a torch.cuda.Stream, which does not equal a torch.Stream.
            wanted = torch.accelerator.current_stream()
            assert (current_index, stream.stream_id, stream.device_index) == (index, wanted.stream_id, index)
            assert stream == wanted or torch.__version__ < "2.8"
        """,
        simulated_environment(gpus=2),
    )


@pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch")
def test_compiled_code_synchronizes_the_device_that_eager_code_does() -> None:
    """Without an index that is the current device of each call. torch's functions take device 0 (pytorch 197384)."""
    run(
        """
        import torch._dynamo
        import torch, accelerator as acc
        torch.cuda.init()
        synchronized = set()
        # What torch.accelerator's function calls, and torch.cuda's, which is traced before torch 2.8.
        torch._C._accelerator_synchronizeDevice = synchronized.add
        torch._C._cuda_synchronize = lambda: synchronized.add(torch.cuda.current_device())
        # A negative index, None and an index that is left out mean the current device.
        current = (), (None,), (-1,), ("cuda",), (torch.device("cuda"),)
        for form in (*current, (0,), (1,), ("cuda:0",), (torch.device("cuda:1"),)):
            def program(tensor):
                acc.synchronize(*form)
                return tensor + 1
            compiled = torch.compile(program, backend="eager", fullgraph=True)
            for index in (0, 1, 0):
                torch.cuda.set_device(index)
                synchronized.clear()
                assert compiled(torch.ones(2)).tolist() == [2, 2], form
                assert synchronized == {index if form in current else acc.device(*form).index}, (form, index, synchronized)
            torch._dynamo.reset()
        """,
        simulated_environment(gpus=2),
    )


@pytest.mark.slow
@pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch for simulated GPUs")
@pytest.mark.skipif(torch.__version__[:4] == "2.7.", reason="torch 2.7 cannot trace a comparison of constant tuples")
def test_replacements_of_torch_calls_are_traced() -> None:
    """The guide recommends these functions in place of traceable calls of torch, so they are traced too."""
    code = """
import torch
import accelerator as acc

def program(tensor):
    if acc.compute_capability(1) >= (9, 0) and acc.total_memory(1) > 2**30 and acc.total_memory() > 0:
        tensor = tensor + 1
    if acc.is_fp8_supported() and acc.is_fp16_supported() and acc.get_device_name(0):
        tensor = tensor.to(acc.supported_dtypes()[0])
    return tensor

print(torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
"""
    assert run(code, simulated_environment(gpus=2)).splitlines()[-1] == "[2.0, 2.0]"
