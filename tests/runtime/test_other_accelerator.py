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
