"""Columns of the vendor table, and modules with the functions of other vendors, on another accelerator."""

from __future__ import annotations

import pytest

from tests.backend.server import Server

pytestmark = pytest.mark.xdist_group("hostacc")

PRELUDE = """
import pytest, torch
import accelerator as acc
from accelerator._machine import vendors

module = torch.hostacc
"""


def test_vendor_table_columns_take_effect(hostacc: Server) -> None:
    hostacc.run(
        PRELUDE
        + """
from types import SimpleNamespace
from accelerator._machine import triton
from accelerator._torch import bindings
row = vendors.Vendor(
    "hostacc", compile_backend="fake", is_synchronized=True, use_host_timers=False, resolves_data_dependency=True,
    handles_memory_backpressure=False, op_builders="fake", graph_class="FakeGraph", has_triton=True, range_module="ranges",
)
vendors._TABLE["hostacc"] = row
triton.is_usable = lambda: True
assert (acc.is_synchronized_device(), acc.use_host_timers()) == (True, False)
assert (acc.resolves_data_dependency(), acc.handles_memory_backpressure()) == (True, False)
assert acc.get_compile_backend() == "fake" and acc.op_builder_dir() == "deepspeed.ops.op_builder.fake"
assert acc.is_triton_supported() is True and acc.prefer_triton_grouped_mm() is False
module.is_bf16_supported, module.is_tf32_supported = lambda: False, lambda: True
assert acc.is_bf16_supported() is False and acc.is_tf32_supported() is True
bindings.nvtx, stack = None, []
module.ranges = SimpleNamespace(range_push=stack.append, range_pop=stack.pop)
acc.range_push("outer")
assert stack == ["outer"]
acc.range_pop()
assert stack == []
class FakeGraph:
    pass
if hasattr(torch.accelerator, "Graph"):
    del torch.accelerator.Graph
module.FakeGraph = FakeGraph
assert isinstance(acc.Graph(), FakeGraph)
"""
    )


def test_seeding_bypasses_the_queue_of_lazy_calls(hostacc: Server) -> None:
    """As in torch's reference backend, queued calls must not use the device, and memory can be pinned before initialization."""
    hostacc.run(
        PRELUDE
        + """
seeds = []
module._queued_calls = []
module.manual_seed = module.manual_seed_all = seeds.append
acc.manual_seed(5)
acc.manual_seed_all(6)
assert seeds == [5, 6] and module._queued_calls == [], module._queued_calls
acc.lazy_call(print)
assert [call for call, _ in module._queued_calls] == [print] and not acc.is_initialized()

class Pinned(torch.Tensor):
    def is_pinned(self):
        return True
assert acc.is_pinned(Pinned()) is True
for name, arguments in (("register_host_memory", (4096, 4096)), ("unregister_host_memory", (4096,))):
    with pytest.raises(RuntimeError, match=f"^{name}"):
        getattr(acc, name)(*arguments)
""",
        "hidden-generators",
    )


def test_monitoring_uses_the_module_of_the_device(hostacc: Server) -> None:
    hostacc.run(
        PRELUDE
        + """
acc.init()
module.mem_get_info = lambda index: (3, 5)
module.utilization = lambda index: 41.6
module.power_draw = lambda index: 12.5
module.temperature = lambda index: 30
def clock_rate(index):
    raise ImportError("pyzes is missing")
module.clock_rate = clock_rate

# The unit of the figures is unknown, because the vendor table has no entry for the module.
with pytest.raises(RuntimeError, match="Host accelerator 0"):
    acc.utilization(0)
row = vendors.Vendor("hostacc", telemetry={"utilization": 1, "power_draw": 1000, "clock_rate": 1})
vendors._TABLE["hostacc"] = row
assert acc.utilization(0) == acc.utilization("hostacc:0") == acc.utilization() == 42
assert acc.power_draw() == 12_500 and acc.device_memory_used() == 2
with pytest.raises(RuntimeError, match="pyzes is missing"):
    acc.clock_rate()
with pytest.raises(RuntimeError, match="not report its temperature"):
    acc.temperature()
now = acc.telemetry(0)
assert now[:7] == (42, None, 2, None, 12_500, None, None), now
""",
        "no-memory",
    )


def test_memory_snapshot_without_include_traces(hostacc: Server) -> None:
    """The function has no such parameter, as in torch.xpu."""
    hostacc.run(
        PRELUDE
        + """
acc.init()
module.memory_snapshot = lambda mempool_id=None: [mempool_id]
assert acc.memory_snapshot() == [None] and acc.memory_snapshot((0, 1)) == [(0, 1)]
with pytest.raises(RuntimeError, match=r"torch.hostacc.memory_snapshot\\(\\) of torch .* does not take include_traces"):
    acc.memory_snapshot(include_traces=False)
"""
    )


def test_memory_figures(hostacc: Server) -> None:
    hostacc.run(
        PRELUDE
        + """
from types import SimpleNamespace
from accelerator._machine import host_memory
acc.init()
vendors._TABLE["hostacc"] = vendors.Vendor("hostacc", memory_limits=("Limit", "InUse"))
module.memory = SimpleNamespace(memory_stats=lambda index: {"Limit": 50 + index, "InUse": 20})
assert acc.get_memory_info(1) == (31, 51) and acc.total_memory() == 50 and acc.available_memory() == 30

# Like MPS: no device memory, and functions with other names and without a device argument.
vendors._TABLE["hostacc"] = vendors.get_row("mps")._replace(device_type="hostacc")
module.current_allocated_memory = lambda: 7
fractions = []
module.set_per_process_memory_fraction = fractions.append
assert acc.memory_allocated() == 7
acc.set_per_process_memory_fraction(0.5)
assert fractions == [0.5]
assert acc.total_memory() == acc.get_memory_info()[1] == host_memory.total()
assert 50 < acc.available_memory() <= host_memory.total()
assert acc.device_memory_used(0) > 0
text = acc.memory_summary()
assert {len(line) for line in text.splitlines()} == {77} and "PyTorch HOSTACC memory summary" in text, text
""",
        "no-memory",
    )
