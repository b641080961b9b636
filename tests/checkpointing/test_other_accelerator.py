"""Checkpoints with an accelerator whose module has no generators: a PrivateUse1 backend registered from Python."""

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
    state = torch.zeros(1, dtype=torch.uint8)

class WithState(Module):
    def get_rng_state(self, device):
        return Module.state.clone()
    def set_rng_state(self, new_state, device):
        Module.state = new_state.clone()

backend_registration._setup_privateuseone_for_python_backend("fakeacc", backend_module=Module())
from accelerator import checkpointing

drawn = []
def function(h):
    drawn.append(int(Module.state))
    Module.state = Module.state + 1
    return h.sin().exp()

x = torch.ones(3, requires_grad=True)
"""


def test_the_state_of_its_module_is_preserved() -> None:
    run(
        PRELUDE
        + """
torch.fakeacc.__class__ = WithState
out = checkpointing.checkpoint(function, x)
Module.state = torch.tensor([50], dtype=torch.uint8)
out.sum().backward()
assert drawn == [0, 0] and int(Module.state) == 50, (drawn, Module.state)
assert torch.equal(x.grad, x.cos() * x.sin().exp())
""",
        plain_environment(),
    )


def test_without_any_state_the_error_names_the_setting() -> None:
    run(
        PRELUDE
        + """
try:
    checkpointing.checkpoint(function, x)
except RuntimeError as error:
    assert "fakeacc:0" in str(error) and "preserve_rng_state=False" in str(error), error
else:
    raise AssertionError
checkpointing.configure(preserve_rng_state=False)
checkpointing.checkpoint(function, x).sum().backward()
assert torch.equal(x.grad, x.cos() * x.sin().exp())
""",
        plain_environment(),
    )
