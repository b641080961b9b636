"""The modules on an accelerator that is not CUDA's: a PrivateUse1 backend registered from Python."""

from __future__ import annotations

import pytest
from torch.utils import backend_registration

from tests.support import plain_environment, run

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="this torch has no Python backends"
)

PRELUDE = """
import torch
from torch.utils import backend_registration

class Module(backend_registration._DummyBackendModule):
    default_generators = (torch.Generator(),)

backend_registration._setup_privateuseone_for_python_backend("fakeacc", backend_module=Module())
import accelerator as acc
"""


def test_random_functions_use_the_generators_of_its_module() -> None:
    run(
        PRELUDE
        + """
torch.default_generator.manual_seed(1)
acc.manual_seed(5)
assert acc.initial_seed("fakeacc:0") == 5 and torch.initial_seed() == 1
states = acc.get_rng_state_all()
with acc.fork_rng():
    acc.seed_all()
    assert acc.initial_seed() != 5
assert acc.initial_seed() == 5
acc.seed()
acc.set_rng_state_all(states)
assert len(states) == 1 and torch.equal(acc.get_rng_state(0), states[0])
assert acc.default_generator() is Module.default_generators[0]
""",
        plain_environment(),
    )


def test_other_modules_work_or_name_what_is_missing() -> None:
    run(
        PRELUDE
        + """
# There is no kernel that makes a tensor, so no dtype is supported.
assert not acc.is_bf16_supported() and not acc.is_fp16_supported() and not acc.is_fp64_supported()
assert acc.is_tf32_supported() is False and acc.supported_dtypes() == [torch.float32]
assert acc.amp() is torch.amp
assert acc.is_nvlink_connected(0, 0) is True
assert acc.on_accelerator(torch.ones(1)) is False and acc.is_pinned(torch.ones(1)) is False
assert acc.is_current_stream_capturing() is acc.is_triton_supported() is acc.prefer_triton_grouped_mm() is False
assert acc.op_builder_dir() == "deepspeed.ops.op_builder.fakeacc" and acc.get_op_builder("AdamBuilder") is None
with acc.annotate("range"):
    pass
for call in (
    acc.create_graph, acc.graph_pool_handle, lambda: acc.make_graphed_callables(abs, ()),
    lambda: acc.register_host_memory(0, 1), lambda: acc.unregister_host_memory(0), lambda: acc.FloatTensor([1.0]),
):
    try:
        call()
    except RuntimeError as error:
        assert "fakeacc" in str(error), error
    else:
        raise AssertionError(call)
""",
        plain_environment(),
    )


def test_without_generators_the_error_names_the_accelerator_or_torchs_own() -> None:
    run(
        PRELUDE
        + """
del Module.default_generators
for call in (lambda: acc.manual_seed(1), acc.get_rng_state, acc.default_generator):
    try:
        call()
    except RuntimeError as error:
        assert "generator" in str(error).lower(), error
    else:
        raise AssertionError(call)
""",
        plain_environment(),
    )


def test_graphs_are_those_that_torch_has_for_it() -> None:
    """Its constructor takes the pool and the mode; its ``capture_begin`` takes nothing."""
    run(
        PRELUDE
        + """
class Recorded:
    calls = []
    def __new__(cls, keep_graph=False, *, pool=None, capture_error_mode="default"):
        return super().__new__(cls)
    def __init__(self, keep_graph=False, *, pool=None, capture_error_mode="default"):
        self.calls.append((keep_graph, pool, capture_error_mode))
    def capture_begin(self):
        self.calls.append("begin")
    def capture_end(self):
        self.calls.append("end")

torch.accelerator.Graph = Recorded
for name in ("_accelerator_synchronizeDevice", "_accelerator_emptyCache", "_accelerator_emptyHostCache", "_host_emptyCache"):
    setattr(torch._C, name, lambda *device: None)  # a stand-in has no streams and no allocators
graph = acc.Graph(True, pool=(1, 2), capture_error_mode="relaxed")
assert isinstance(graph, acc.Graph) and isinstance(graph, Recorded)
with graph:
    pass
assert Recorded.calls == [(True, (1, 2), "relaxed"), "begin", "end"], Recorded.calls
""",
        plain_environment(),
    )


def test_a_stream_is_entered_in_compiled_code() -> None:
    """The stand-in has no streams to compute on; what notes that it is entered and left takes the place of one."""
    run(
        PRELUDE
        + """
entered = []
class Side:
    def __enter__(self):
        entered.append("in")
    def __exit__(self, *exception):
        entered.append("out")

def program(tensor):
    with acc.stream(Side()):
        tensor = tensor + 1
    with acc.stream(None):
        return tensor + 1

assert torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [3, 3]
assert entered == ["in", "out"], entered
""",
        plain_environment(),
    )


def test_without_generators_the_functions_of_its_module_are_used() -> None:
    run(
        PRELUDE
        + """
class Module2(Module):
    states = {0: torch.tensor([1], dtype=torch.uint8)}
    seeds = []
    def get_rng_state(self, device):
        return self.states[torch.device(device).index].clone()
    def set_rng_state(self, new_state, device):
        self.states[torch.device(device).index] = new_state
    def manual_seed(self, seed):
        self.seeds.append(seed)
    def initial_seed(self):
        return self.seeds[-1]

del Module.default_generators
torch.fakeacc.__class__ = Module2
acc.manual_seed(5)
acc.manual_seed_all(6)
assert Module2.seeds == [5, 6] and acc.initial_seed() == 6
state = torch.tensor([7], dtype=torch.uint8)
acc.set_rng_state(state)
assert acc.get_rng_state().tolist() == [7] and [each.tolist() for each in acc.get_rng_state_all()] == [[7]]
with acc.fork_rng():
    acc.seed()
    acc.set_rng_state(torch.tensor([8], dtype=torch.uint8))
assert Module2.states[0].tolist() == [7]
try:
    acc.default_generator()
except RuntimeError as error:
    assert "has no generator of fakeacc:0" in str(error), error
else:
    raise AssertionError
""",
        plain_environment(),
    )


def test_no_binding_gets_an_index_that_is_out_of_range() -> None:
    run(
        """
import torch
called = []
def record(name):
    def call(*arguments):
        called.append((name, arguments))
        return {} if "Stats" in name else 0
    return call
for name in [name for name in dir(torch._C) if name.startswith("_accelerator_") and name != "_accelerator_getAccelerator"]:
    setattr(torch._C, name, record(name))
"""
        + PRELUDE.replace("import torch\n", "", 1)
        + """
from tests.runtime.device_arguments import FUNCTIONS, NEGATIVE_IS_FINE, raised
acc.synchronize()
assert acc.is_initialized(), "the backend has no lazy initialization"
for name in FUNCTIONS:
    if name in ("get_device_properties", "default_stream", "can_device_access_peer", "set_per_process_memory_fraction"):
        continue
    for device in (1, 57, 2**40, "fakeacc:57", torch.device("fakeacc", 3), *((-1, -2) if name not in NEGATIVE_IS_FINE else ())):
        called.clear()
        error, message = raised(name, device)
        assert error is ValueError and "is out of range: 1 fakeacc device is visible" in message, (name, device, error, message)
        assert not [each for each in called if each[1]], (name, device, called)
""",
        plain_environment(),
    )


def test_no_binding_of_cuda_is_called() -> None:
    """As on torch 2.6, which has some bindings for CUDA only."""
    run(
        """
import torch
def fail(*arguments):
    raise AssertionError("a binding of CUDA was called")
for name in ("exchangeDevice", "maybeExchangeDevice", "getDeviceStats", "getMemoryInfo", "resetPeakStats",
             "resetAccumulatedStats", "emptyCache", "emptyHostCache", "getDefaultGenerator"):
    if hasattr(torch._C, "_accelerator_" + name):
        delattr(torch._C, "_accelerator_" + name)
for name in ("exchangeDevice", "maybeExchangeDevice", "memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats",
             "emptyCache"):
    setattr(torch._C, "_cuda_" + name, fail)
"""
        + PRELUDE.replace("import torch\n", "", 1)
        + """
class Module2(Module):
    calls = []
    def empty_cache(self):
        self.calls.append("empty_cache")
    def reset_peak_memory_stats(self, index):
        self.calls.append(("reset_peak_memory_stats", index))
    def memory_allocated(self, index):
        return 77

torch.fakeacc.__class__ = Module2
with acc.device_index(0):
    acc.empty_cache()
    acc.reset_peak_memory_stats(0)
    acc.reset_accumulated_memory_stats()
assert Module2.calls == ["empty_cache", ("reset_peak_memory_stats", 0)], Module2.calls
assert acc.memory_stats() == {} and acc.memory_allocated(0) == 77
""",
        plain_environment(),
    )


def test_memory_counters_come_from_its_module_without_an_allocator() -> None:
    run(
        PRELUDE
        + """
try:
    acc.memory_allocated()
except RuntimeError as error:
    assert "no torch.fakeacc.memory_allocated()" in str(error), error
else:
    raise AssertionError
Module.memory_allocated = lambda self, index: 77
Module.max_memory_reserved = lambda self, index: 99
assert acc.memory_allocated("fakeacc:0") == 77 and acc.max_memory_reserved() == 99
""",
        plain_environment(),
    )


def test_a_class_of_graphs_that_takes_no_options() -> None:
    run(
        PRELUDE
        + """
class Plain:
    calls = []
    def capture_begin(self, pool=None):
        self.calls.append(("begin", pool))
    def capture_end(self):
        self.calls.append("end")

torch.accelerator.Graph = Plain
for name in ("_accelerator_synchronizeDevice", "_accelerator_emptyCache", "_accelerator_emptyHostCache", "_host_emptyCache"):
    setattr(torch._C, name, lambda *device: None)
graph = acc.Graph(pool=(1, 2), capture_error_mode="relaxed")
assert isinstance(graph, acc.Graph) and isinstance(graph, Plain)
with graph:
    pass
acc.Graph().capture_begin()
assert Plain.calls == [("begin", (1, 2)), "end", ("begin", None)], Plain.calls
try:
    acc.Graph(True)
except RuntimeError as error:
    assert "keep_graph" in str(error)
else:
    raise AssertionError
""",
        plain_environment(),
    )


def test_functions_follow_the_vendor_table() -> None:
    run(
        PRELUDE
        + """
from accelerator._machine import accelerators
row = accelerators.Accelerator(
    "fakeacc", compile_backend="fake", is_synchronized=True, use_host_timers=False, resolves_data_dependency=True,
    handles_memory_backpressure=False, op_builders="fake", graph_class="FakeGraph", has_triton=True,
)
accelerators._TABLE["fakeacc"] = row
from accelerator._machine import triton
triton.is_usable = lambda: True
assert (acc.is_synchronized_device(), acc.use_host_timers()) == (True, False)
assert (acc.resolves_data_dependency(), acc.handles_memory_backpressure()) == (True, False)
assert acc.get_compile_backend() == "fake" and acc.op_builder_dir() == "deepspeed.ops.op_builder.fake"
assert acc.is_triton_supported() is True and acc.prefer_triton_grouped_mm() is False
Module.is_bf16_supported = lambda self: False
Module.is_tf32_supported = lambda self: True
assert acc.is_bf16_supported() is False and acc.is_tf32_supported() is True

from types import SimpleNamespace
from accelerator._torch import bindings
bindings.nvtx, stack = None, []
accelerators._TABLE["fakeacc"] = row._replace(range_module="ranges")
Module.ranges = SimpleNamespace(range_push=stack.append, range_pop=stack.pop)
acc.range_push("outer")
assert stack == ["outer"]
acc.range_pop()
assert stack == []

def program(tensor):
    acc.empty_cache()
    acc.reset_peak_memory_stats()
    acc.ipc_collect()
    return tensor + 1 if acc.is_synchronized_device() else tensor
Module.empty_cache = Module.reset_peak_memory_stats = lambda self, *arguments: None
assert torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]

class FakeGraph:
    pass
if hasattr(torch.accelerator, "Graph"):
    del torch.accelerator.Graph
Module.FakeGraph = FakeGraph
assert isinstance(acc.Graph(), FakeGraph)
""",
        plain_environment(),
    )


def test_devices_are_described_only_when_a_query_needs_them() -> None:
    run(
        PRELUDE
        + """
described = []
def get_memory_info(index):
    described.append(index)
    raise AttributeError("module 'torch._C' has no attribute '_accelerator_getMemoryInfo'", name="missing", obj=torch._C)
torch.accelerator.get_memory_info = get_memory_info
Module.mem_get_info = lambda self, index: (3, 5)
assert acc.device_count() == 1 and acc.current_device_index() == 0 and acc.device(0).index == 0
assert not described
# torch lacks the binding, so the figure is that of the accelerator's module.
assert acc.visible_devices()[0].total_memory == 5 and described == [0]
assert acc.visible_devices() and described == [0]
assert acc.mem_get_info(0) == (3, 5)
""",
        plain_environment(),
    )


@pytest.mark.slow
def test_an_initialized_device_is_monitored_by_its_module() -> None:
    run(
        PRELUDE
        + """
from accelerator._machine import accelerators
Module.mem_get_info = lambda self, index: (3, 5)
Module.utilization = lambda self, index: 41.6
Module.power_draw = lambda self, index: 12.5
Module.temperature = lambda self, index: 30
def clock_rate(self, index):
    raise ImportError("pyzes is missing")
Module.clock_rate = clock_rate
acc.refresh()

def error_of(function):
    try:
        function(0)
    except RuntimeError as error:
        return str(error)
    raise AssertionError

# No unit is assumed of a module that the vendor table does not know.
assert "fakeacc" in error_of(acc.utilization), error_of(acc.utilization)
row = accelerators.Accelerator("fakeacc", telemetry={"utilization": 1, "power_draw": 1000, "clock_rate": 1})
accelerators._TABLE["fakeacc"] = row
assert acc.utilization(0) == acc.utilization("fakeacc:0") == acc.utilization() == 42
assert acc.power_draw() == 12_500 and acc.device_memory_used() == 2
assert "pyzes is missing" in error_of(acc.clock_rate)
assert "not report its temperature" in error_of(acc.temperature), error_of(acc.temperature)
now = acc.telemetry(0)
assert now[:7] == (42, None, 2, None, 12_500, None, None), now
""",
        plain_environment(),
    )


@pytest.mark.slow
def test_memory_figures_follow_the_vendor_table() -> None:
    run(
        PRELUDE
        + """
from types import SimpleNamespace
from accelerator._machine import accelerators, host_memory
row = accelerators.Accelerator("fakeacc", memory_limits=("Limit", "InUse"))
accelerators._TABLE["fakeacc"] = row
Module.memory = SimpleNamespace(memory_stats=lambda index: {"Limit": 50, "InUse": 20})
assert acc.get_memory_info(0) == (30, 50) and acc.total_memory() == 50 and acc.available_memory() == 30

# As on MPS: no memory of its own, functions of other names that take no device.
accelerators._TABLE["fakeacc"] = accelerators.get_row("mps")._replace(device_type="fakeacc")
Module.current_allocated_memory = lambda self: 7
Module.set_per_process_memory_fraction = lambda self, fraction: fractions.append(fraction)
fractions = []
assert acc.memory_allocated() == 7
acc.set_per_process_memory_fraction(0.5)
assert fractions == [0.5]
assert acc.total_memory() == acc.get_memory_info()[1] == host_memory.total()
assert 50 < acc.available_memory() <= host_memory.total()
assert acc.device_memory_used(0) > 0
text = acc.memory_summary()
assert {len(line) for line in text.splitlines()} == {77} and "PyTorch FAKEACC memory summary" in text, text
""",
        plain_environment(),
    )
