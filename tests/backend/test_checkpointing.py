"""Checkpoints on another accelerator: gradients, random numbers, and saved inputs on the CPU."""

from __future__ import annotations

import pytest

from tests.backend.server import Server

pytestmark = pytest.mark.xdist_group("hostacc")

PRELUDE = """
import pytest, torch
from torch.utils.checkpoint import checkpoint as torch_non_reentrant
import accelerator as acc
from accelerator import checkpointing

torch.default_generator.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh()).to("hostacc:1")
x = torch.randn(4, 8, device="hostacc:1")

def gradients(run):
    acc.manual_seed_all(3)
    torch.default_generator.manual_seed(3)
    layer.zero_grad()
    inputs = x.clone().requires_grad_()
    out = run(layer, inputs)
    torch.rand(5, device="hostacc:1")
    out.sum().backward()
    return [out.detach(), inputs.grad, *(each.grad.clone() for each in layer.parameters())]

def same(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))
plain = gradients(lambda function, inputs: function(inputs))
"""


@pytest.mark.parametrize("switch", ["", "hidden-generators", "bad-fork", "no-streams", "module-memory", "no-is_initialized"])
def test_gradients(hostacc: Server, switch: str) -> None:
    """Dropout draws the same numbers in the recomputation, even if only the module can use the generators."""
    hostacc.run(
        PRELUDE
        + """
with acc.device_index(1):
    assert same(gradients(checkpointing.checkpoint), plain)
    if hasattr(torch.hostacc, "is_initialized"):  # torch restores random states only with this function
        assert same(gradients(lambda function, inputs: torch_non_reentrant(function, inputs, use_reentrant=False)), plain)
""",
        switch,
    )


def test_without_generators(hostacc: Server) -> None:
    """The error names the setting that makes checkpoints work."""
    hostacc.run(
        PRELUDE.replace("torch.nn.Dropout(0.5), ", "").replace("acc.manual_seed_all(3)", "pass")
        + """
with pytest.raises(RuntimeError, match="preserve_rng_state=False") as raised:
    gradients(checkpointing.checkpoint)
assert "hostacc:" in str(raised.value)
checkpointing.configure(preserve_rng_state=False)
assert same(gradients(checkpointing.checkpoint), plain)
""",
        "no-generators",
    )


@pytest.mark.parametrize("options", ["checkpoint_in_cpu=True", "contiguous_checkpointing=True, num_checkpoints=1"])
def test_options(hostacc: Server, options: str) -> None:
    hostacc.run(
        PRELUDE
        + f"""
checkpointing.configure(partition_activations=True, {options})
with acc.device_index(1):
    assert same(gradients(checkpointing.checkpoint), plain)
"""
    )


def test_offload_saves_the_input_on_the_cpu(hostacc: Server) -> None:
    hostacc.run(
        PRELUDE
        + """
checkpointing.configure(checkpoint_in_cpu=True, partition_activations=True)
def kept(size):
    acc.empty_cache()
    inputs = torch.ones(size, device="hostacc:1", requires_grad=True)
    out = checkpointing.checkpoint(lambda each: each.tanh().exp().sum(), inputs * 1)
    held = acc.memory_allocated(1)
    out.backward()
    torch.testing.assert_close(inputs.grad.cpu(), ((1 - inputs.tanh() ** 2) * inputs.tanh().exp()).detach().cpu())
    return held
with acc.device_index(1):
    before = acc.memory_allocated(1)
    assert kept(10**6) - before < 1.5 * 4 * 10**6, "more than the input's leaf remains on the device"
"""
    )
