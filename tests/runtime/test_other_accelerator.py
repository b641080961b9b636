"""Columns of the vendor table on a PrivateUse1 backend registered from Python. ``tests/backend`` has the other tests."""

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


def test_before_it_says_that_it_is_initialized() -> None:
    """The reference backend of torch queues calls that must not use the device, and pins memory before it is initialized."""
    run(
        PRELUDE
        + """
class Module2(Module):
    _queued_calls = []
    seeds = []
    def is_initialized(self):
        return False
    def manual_seed(self, seed):
        self.seeds.append(seed)

del Module.default_generators
torch.fakeacc.__class__ = Module2
acc.manual_seed(5)
acc.manual_seed_all(6)
assert Module2.seeds == [5, 6] and Module2._queued_calls == [], Module2._queued_calls
acc.lazy_call(print)
assert [call for call, _ in Module2._queued_calls] == [print]

class Pinned(torch.Tensor):
    def is_pinned(self):
        return True
assert acc.is_pinned(Pinned()) is True
for call in (acc.register_host_memory, lambda address, size: acc.unregister_host_memory(address)):
    try:
        call(4096, 4096)
    except RuntimeError as error:
        assert str(error).startswith("register" if call is acc.register_host_memory else "unregister"), error
    else:
        raise AssertionError(call)
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
