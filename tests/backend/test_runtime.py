"""Runtime functions on another accelerator, compared with those of torch.accelerator and of the accelerator's module."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelerator._machine import torch_build
from accelerator.simulation._settings.torch_versions import release
from tests.backend import SWITCHES
from tests.backend.server import Server

pytestmark = pytest.mark.xdist_group("hostacc")

build = torch_build.read()

PRELUDE = """
import pytest, torch
import accelerator as acc

module = torch.hostacc
accelerator = torch.accelerator
def initialized():
    return bool(module.library.hostacc_is_initialized())
"""


Run = Callable[[str], str]


@pytest.fixture
def switch() -> str:
    """Return the switch of the plug-in. Tests of others parametrize it."""
    return ""


@pytest.fixture
def run(hostacc: Server, switch: str) -> Run:
    """Return a function that runs a program after ``PRELUDE`` and returns its output."""
    return lambda program: hostacc.run(PRELUDE + program, switch)


def test_devices_and_streams(run: Run) -> None:
    run("""
tensor = torch.ones(2, device="hostacc:1")
assert acc.is_available() and acc.device_count() == module.device_count() == accelerator.device_count() == 2
assert acc.current_accelerator() == accelerator.current_accelerator() == torch.device("hostacc") == acc.device()
assert acc.device(1) == tensor.device and acc.on_accelerator(tensor) and not acc.on_accelerator(tensor.cpu())
assert acc.get_device_name(1) == module.get_device_name(1) == acc.visible_devices()[1].name
for index in (1, 0):
    acc.set_device_index(index)
    assert acc.current_device_index() == accelerator.current_device_index() == module.current_device() == index
with acc.device_index("hostacc:1"):
    assert accelerator.current_device_index() == 1
    with acc.device_index(0), acc.device_of(tensor):
        assert accelerator.current_device_index() == 1
    assert accelerator.current_device_index() == 1
assert accelerator.current_device_index() == 0

acc.synchronize(1), acc.synchronize("hostacc:1"), acc.synchronize()
assert [module.times_synchronized(index) for index in range(2)] == [1, 2]
assert acc.current_stream(1) == accelerator.current_stream(1) == acc.default_stream(1)
side = acc.Stream(device="hostacc:1")
with acc.stream(side):
    assert acc.current_stream() == accelerator.current_stream() == side and acc.current_device_index() == 1
assert acc.current_device_index() == 0 and acc.current_stream(1) == acc.default_stream(1) != side
acc.set_stream(side)
assert accelerator.current_stream(1) == side and accelerator.current_device_index() == 1
start, end = acc.Event(device="hostacc:1", enable_timing=True), acc.Event(device="hostacc:1", enable_timing=True)
start.record(side), end.record(side)
assert end.query() and start.elapsed_time(end) > 0
assert acc.supported_dtypes() and acc.is_bf16_supported() and acc.amp() is torch.amp
assert acc.is_pinned(acc.pin_memory(torch.ones(3))) == torch.ones(3).pin_memory().is_pinned()
assert acc.FloatTensor([1.0]).device == torch.device("hostacc", 1)
assert acc.op_builder_dir() == "deepspeed.ops.op_builder.hostacc"
with acc.annotate("range"):
    pass
""")


def test_memory(run: Run) -> None:
    """Each figure equals the module's, and that of torch.accelerator if this torch reports it."""
    run("""
kept = [torch.ones(100 * (1 + index), device=f"hostacc:{index}") for index in range(2)]
torch.ones(1000, device="hostacc:1")
names = "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"
def figures():
    for index in range(2):
        for name in names:
            figure = getattr(acc, name)(index)
            assert figure == getattr(module, name)(index), (name, index)
            if hasattr(accelerator, name):
                assert figure == getattr(accelerator, name)(index), (name, index)
            yield figure
        assert acc.get_memory_info(index) == module.mem_get_info(index) == acc.mem_get_info(f"hostacc:{index}")
        assert acc.total_memory(index) == (1 + index) * 2**30
        if hasattr(accelerator, "get_memory_info"):
            assert acc.get_memory_info(index) == accelerator.get_memory_info(index)
        if hasattr(accelerator, "memory_stats"):
            assert acc.memory_stats(index) == accelerator.memory_stats(index)
        else:
            assert acc.memory_stats(index) == {}
before = list(figures())
assert before[4] == 800 and before[5] == 4800 and before[6] == 4800, before
acc.empty_cache()
acc.reset_peak_memory_stats(1)
after = list(figures())
assert after[4:] == [800] * 4 and after[1] == before[1], (before, after)
acc.reset_accumulated_memory_stats(1)
list(figures())
assert "Allocated memory" in acc.memory_summary(1)
with pytest.raises(torch.OutOfMemoryError) as raised:
    torch.empty(2**31, device="hostacc:0")
assert acc.is_out_of_memory_error(raised.value)
""")


@pytest.mark.parametrize("switch", ["", "hidden-generators"])
def test_random_numbers(run: Run) -> None:
    """The functions also work if only the module can use the generators. Until 0.3 they raised."""
    run("""
def drawn(index):
    return torch.rand(2, device=f"hostacc:{index}").tolist()
acc.manual_seed_all(7)
assert acc.initial_seed(0) == acc.initial_seed(1) == 7 and drawn(0) == drawn(1)
states = acc.get_rng_state_all()
assert all(torch.equal(states[index], module.get_rng_state(f"hostacc:{index}")) for index in range(2))
expected = drawn(1)
acc.set_rng_state(states[1], 1)
assert drawn(1) == expected
acc.set_rng_state_all(states)
with acc.fork_rng():
    acc.manual_seed(8)
    acc.seed_all()
    assert drawn(1) != expected and acc.initial_seed() not in (7, 8)
assert drawn(1) == expected
acc.set_device_index(1)
acc.manual_seed(9)
assert (acc.initial_seed(0), acc.initial_seed(1)) == (7, 9)
assert acc.initial_seed() == 9
if hasattr(module, "default_generators"):
    assert acc.default_generator(1) is module.default_generators[1]
    assert (acc.initial_seed(0), acc.initial_seed(1)) == (acc.initial_seed("hostacc:0"), 9)
else:
    with pytest.raises(RuntimeError, match="has no generator of hostacc:1"):
        acc.default_generator()
""")


@pytest.mark.parametrize("switch", ["hidden-generators"])
def test_early_seeds_reach_each_device_of_a_module_that_seeds_only_the_current_one(run: Run) -> None:
    run("""
del module.manual_seed_all
def seeds():
    return [generator.initial_seed() for generator in module._generators]
for generator in module._generators:
    generator.manual_seed(3)
assert not initialized()
acc.manual_seed_all(7)
assert seeds() == [7, 7] and acc.current_device_index() == 0
""")


@pytest.mark.parametrize("switch", ["no-generators"])
def test_without_generators(run: Run) -> None:
    run("""
for call in (lambda: acc.manual_seed(1), acc.get_rng_state, acc.default_generator, acc.initial_seed, acc.seed):
    with pytest.raises(RuntimeError, match="has no generator of hostacc:0"):
        call()
""")


LAZY = [switch for switch in SWITCHES if switch not in ("no-is_initialized", "hidden-generators")]


@pytest.mark.parametrize(
    "switch", ["", "hidden-generators", *(pytest.param(switch, marks=pytest.mark.slow) for switch in LAZY)]
)
def test_queries_and_seeds_do_not_initialize(run: Run) -> None:
    run("""
acc.visible_devices(), acc.device_count(), acc.is_available(), acc.unavailable_reason(), acc.device_name(1)
assert acc.current_device_index() == 0 == acc.get_device_index() and not acc.is_initialized() and acc.is_fork_safe()
acc.synchronize(), acc.synchronize(1), acc.empty_cache(), acc.empty_host_cache(), acc.ipc_collect()
acc.reset_peak_memory_stats(1), acc.reset_accumulated_memory_stats(1)
assert acc.memory_allocated(1) == acc.max_memory_reserved(0) == 0 and acc.memory_stats() == {}
assert not initialized()
if hasattr(module, "manual_seed"):
    with acc.fork_rng():
        acc.manual_seed(5), acc.set_rng_state(module.get_rng_state("hostacc:0")), acc.seed()
        acc.seed_all(), acc.manual_seed_all(4), acc.set_rng_state_all([module.get_rng_state("hostacc:0")] * 2)
assert not initialized(), "a query or a seed initialized the accelerator"
acc.init()
assert initialized() and acc.is_initialized()
""")


@pytest.mark.parametrize("query", ["acc.visible_devices()", "acc.telemetry(1)", "acc.is_initialized(), acc.device_count()"])
def test_answers_from_before_the_initialization_end_with_it(run: Run, query: str) -> None:
    initialize = f"acc.init()\nprint({query})\n"
    fresh = run(initialize)
    before, after = run(f"print({query})\n{initialize}").splitlines()
    assert before != after
    assert after == fresh.rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["", "no-memory", "module-memory"])
def test_memory_before_initialization(run: Run) -> None:
    """A child process imports torch and reads the figures."""
    run("""
if hasattr(module, "mem_get_info"):
    assert [acc.get_memory_info(index)[1] for index in range(2)] == [2**30, 2**31]
    assert acc.total_memory("hostacc:1") == 2**31 and acc.available_memory(1) <= 2**31
else:
    with pytest.raises(RuntimeError, match="memory of hostacc devices"):
        acc.get_memory_info(1)
assert not initialized()
""")


@pytest.mark.parametrize("switch", ["no-is_initialized"])
def test_without_lazy_initialization(run: Run) -> None:
    run("""
assert acc.is_initialized() and acc.is_fork_safe()
acc.set_device_index(1)
assert acc.get_device_index() == acc.current_device_index() == 1
assert acc.get_memory_info() == module.mem_get_info(1)
acc.init()
""")


@pytest.mark.parametrize("switch", ["no-memory", "module-memory"])
def test_without_an_allocator_registered_in_torch(run: Run) -> None:
    """The figures are the module's. If it has none, the functions raise an error and do not return 0."""
    run("""
kept = torch.ones(25, device="hostacc:1")
assert acc.memory_stats(1) == {} == acc.memory_stats_as_nested_dict(1)
acc.reset_accumulated_memory_stats(1), acc.reset_peak_memory_stats(1), acc.empty_cache(), acc.empty_host_cache()
assert "Allocated memory" in acc.memory_summary() and acc.host_memory_stats() == {}
if hasattr(module, "memory_allocated"):
    assert (acc.memory_allocated(1), acc.memory_allocated(0)) == (100, 0) and acc.max_memory_reserved("hostacc:1") == 100
    assert acc.get_memory_info(1) == (2**31 - 100, 2**31)
else:
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        with pytest.raises(RuntimeError, match=rf"no torch.hostacc.{name}\\(\\)"):
            getattr(acc, name)(1)
    with pytest.raises(RuntimeError, match="does not report the memory of hostacc devices"):
        acc.get_memory_info(1)
    assert acc.visible_devices()[1].total_memory is None
""")


@pytest.mark.parametrize("switch", ["no-streams"])
def test_without_streams(run: Run) -> None:
    run("""
acc.init()
acc.synchronize()
assert acc.current_stream() == acc.default_stream()
with acc.stream(acc.current_stream(1)):
    assert acc.current_device_index() == 1
with pytest.raises(RuntimeError, match="doesn't support create a new Stream"):
    acc.Stream()
""")


def test_cuda_bindings_are_not_called(hostacc: Server) -> None:
    """The test imitates torch 2.6 on a machine with a CUDA GPU. Some bindings of torch 2.6 exist for CUDA only."""
    hostacc.run(
        """
import importlib, sys
import torch
def fail(*arguments):
    raise AssertionError("a binding of CUDA was called")
for name in ("exchangeDevice", "maybeExchangeDevice", "getDeviceStats", "getMemoryInfo", "resetPeakStats",
             "resetAccumulatedStats", "emptyCache", "emptyHostCache", "getDefaultGenerator"):
    if hasattr(torch._C, "_accelerator_" + name):
        delattr(torch._C, "_accelerator_" + name)
for name in ("exchangeDevice", "maybeExchangeDevice", "memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats",
             "emptyCache", "memorySnapshot", "getDeviceCount", "cudaCachingAllocator_set_allocator_settings"):
    setattr(torch._C, "_cuda_" + name, fail)
# The package looks for bindings when it is imported.
for name in [name for name in sys.modules if name.partition(".")[0] == "accelerator"]:
    del sys.modules[name]
"""
        + PRELUDE
        + """
kept = torch.ones(25, device="hostacc:1")
with acc.device_index(1):
    assert acc.current_device_index() == 1
    acc.empty_cache(), acc.reset_peak_memory_stats(1), acc.reset_accumulated_memory_stats()
assert acc.current_device_index() == 0 and acc.memory_stats() == {} and acc.memory_allocated(1) == 100
assert acc.max_memory_allocated(1) == 100 and acc.mem_get_info(1) == module.mem_get_info(1)
assert acc.host_memory_stats() == {} and acc.ipc_collect() is None
""",
        "module-memory",
    )


def test_cuda_only_functions_raise(run: Run) -> None:
    run("""
acc.init()
assert acc.is_current_stream_capturing() is acc.is_triton_supported() is acc.prefer_triton_grouped_mm() is False
assert not acc.visible_devices_envs() and acc.get_arch_list() == [] and acc.get_sync_debug_mode() == 0
for call in (
    acc.create_graph, acc.graph_pool_handle, lambda: acc.make_graphed_callables(abs, ()), acc.cudart, acc.current_blas_handle,
    lambda: acc.register_host_memory(0, 1), lambda: acc.unregister_host_memory(0), acc.get_device_properties,
    lambda: acc.set_per_process_memory_fraction(0.5), lambda: acc.can_device_access_peer(0, 1), lambda: acc.external_stream(0),
    acc.record_memory_history, acc.memory_snapshot, lambda: acc.set_sync_debug_mode(1),
):
    with pytest.raises(RuntimeError, match="hostacc") as raised:
        call()
    assert "\\n" not in str(raised.value)
called = []
acc.lazy_call(lambda: called.append(1))
assert called == [1]
""")


GRAPHS = """
import accelerator._torch.bindings
class Recorded:
    calls = []
    {constructor}
    def capture_begin(self{pool}):
        self.calls.append("begin"{noted})
    def capture_end(self):
        self.calls.append("end")
torch.accelerator.Graph = Recorded
"""


OPTIONS = 'keep_graph=False, *, pool=None, capture_error_mode="default"'
NEW = f"""
    def __new__(cls, {OPTIONS}):
        cls.calls.append(("new", keep_graph, pool, capture_error_mode))
        return super().__new__(cls)
"""
INIT = f"""
    def __init__(self, {OPTIONS}):
        self.calls.append(("init", keep_graph, pool, capture_error_mode))
"""


@pytest.mark.parametrize("constructors", [("new",), ("init",), ("new", "init")])
def test_graph_uses_the_class_of_torch_accelerator(constructors: tuple[str, ...], run: Run) -> None:
    """Newer classes take all options in the constructor."""
    constructor = "".join({"new": NEW, "init": INIT}[name] for name in constructors)
    run(
        GRAPHS.format(constructor=constructor, pool="", noted="")
        + f"""
graph = acc.Graph(True, pool=(1, 2), capture_error_mode="relaxed")
assert isinstance(graph, acc.Graph) and isinstance(graph, Recorded)
with graph:
    pass
expected = [(name, True, (1, 2), "relaxed") for name in {constructors}]
assert Recorded.calls == [*expected, "begin", "end"], Recorded.calls
"""
    )


def test_graph_uses_an_older_class_of_torch_accelerator(run: Run) -> None:
    """Older classes take only the pool, in ``capture_begin``."""
    run(
        GRAPHS.format(constructor="", pool=", pool=None", noted="), self.calls.append(pool")
        + """
graph = acc.Graph(pool=(1, 2), capture_error_mode="relaxed")
assert isinstance(graph, acc.Graph) and isinstance(graph, Recorded)
with graph:
    pass
acc.Graph().capture_begin()
assert Recorded.calls == ["begin", (1, 2), "end", "begin", None], Recorded.calls
with pytest.raises(RuntimeError, match="keep_graph"):
    acc.Graph(True)
del torch.accelerator.Graph
"""
    )


def test_launching(run: Run) -> None:
    """An unknown accelerator has no variable of visible devices. Its communication backend is that in torch's registry."""
    run("""
assert acc.communication_backend_name() == "gloo"
with pytest.raises(RuntimeError, match="which hostacc devices a process sees"):
    acc.set_visible_devices_envs({}, [1])
import torch.distributed
torch.distributed.Backend.register_backend("hcl", lambda *arguments: None, devices=["hostacc"])
assert acc.communication_backend_name() == "hcl", acc.communication_backend_name()
""")


@pytest.mark.slow
@pytest.mark.skipif(
    build is not None and build.version.startswith("2.6."),
    reason="torch 2.6 traces functions of torch.cuda, not those of torch.accelerator",
)
@pytest.mark.parametrize(
    "context",
    [
        "nullcontext()",
        pytest.param(
            "acc.device_index(1)",
            marks=pytest.mark.skipif(
                build is not None and (2, 8) <= release(build.version) < (2, 12),
                reason="torch 2.8 to 2.11 do not trace torch.accelerator.device_index",
            ),
        ),
    ],
)
def test_compiled_code(run: Run, context: str) -> None:
    run(f"""
from contextlib import nullcontext
# Dynamo traces the module's functions, but not their calls of ctypes.
torch.hostacc.empty_cache = torch.hostacc.reset_peak_memory_stats = lambda *arguments: None
def program(tensor):
    acc.synchronize(), acc.empty_cache(), acc.reset_peak_memory_stats(), acc.ipc_collect()
    with {context}:
        tensor = tensor + acc.current_device_index()
    return tensor + 1 if acc.is_synchronized_device() else tensor - acc.current_device_index()
compiled = torch.compile(program, backend="eager", fullgraph=True)
assert compiled(torch.ones(2)).tolist() == program(torch.ones(2)).tolist()
assert program(torch.ones(2)).tolist() == [2.0 if "index" in "{context}" else 1.0] * 2
""")


FORK = """
import os
from tests.programs import in_child
def child():
    assert acc.device_count() == 2
    if IS_BAD:
        assert acc.is_in_bad_fork() and not acc.is_available() and "fork" in acc.unavailable_reason()
        for call in (acc.init, lambda: acc.set_device_index(1), acc.current_stream, acc.get_rng_state, acc.memory_allocated):
            with pytest.raises(RuntimeError, match="spawn"):
                call()
    else:
        assert not acc.is_in_bad_fork() and acc.is_available()
        assert torch.ones(2, device="hostacc:1").sum().item() == 2
        acc.set_device_index(1)
        assert acc.current_device_index() == accelerator.current_device_index() == 1
        acc.manual_seed(1), acc.synchronize(), acc.memory_allocated()
        assert acc.current_stream() == accelerator.current_stream()
"""


def test_module_decides_whether_a_fork_is_bad(run: Run) -> None:
    """torch's reference backend has the function, and it returns False in children, which can use the accelerator."""
    run(
        FORK
        + """
IS_BAD = False
module._is_in_bad_fork = lambda: False
torch.ones(1, device="hostacc")
assert acc.is_initialized()
in_child(child)
"""
    )


@pytest.mark.parametrize("switch", ["", "bad-fork", "no-is_initialized"])
def test_fork(run: Run) -> None:
    """Queries never break fork. After initialization, a child can use the accelerator only if its module supports that."""
    run(
        FORK
        + """
IS_BAD = False
acc.device_count(), acc.is_available(), acc.visible_devices(), acc.memory_allocated(), acc.manual_seed(1)
in_child(child)
IS_BAD = hasattr(module, "_is_in_bad_fork")
acc.init()
torch.ones(1, device="hostacc")
assert acc.is_fork_safe() is not IS_BAD
in_child(child)
acc.synchronize()
"""
    )


@pytest.mark.parametrize("first", ["acc.init()", "acc.FloatTensor([1.0])"])
def test_failed_initialization_of_another_accelerator(first: str, hostacc: Server) -> None:
    hostacc.run(f"""
import sys, torch
import hostacc.device as device_module

class Failing:
    def __init__(self, library): self._library = library
    def hostacc_init(self): raise RuntimeError("no planet.\\nadvice")
    def __getattr__(self, name): return getattr(self._library, name)

import accelerator as acc
assert acc.is_available() and acc.device_count() == 2
working, device_module.library = device_module.library, Failing(device_module.library)
try:
    {first}
    raise AssertionError("initialized")
except RuntimeError as error:
    assert "no planet" in str(error), error
assert acc.unavailable_reason() == (
    "torch could not initialize the accelerator in this process: no planet; refresh() allows another attempt")
assert not acc.is_available() and acc.device_count() == 0 and acc.FloatTensor([1.0]).device.type == "cpu"
assert str(acc.current_accelerator()) == "hostacc"
device_module.library = working
acc.refresh()
assert acc.is_available() and acc.FloatTensor([1.0]).device.type == "hostacc" and acc.device_count() == 2
""")
