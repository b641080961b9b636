"""The first op of a process may be in a capture: nothing that its shape rule imports fails there."""

from __future__ import annotations

import sys

import pytest

from tests.support import sample

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("machines")  # they share the process that has imported torch

OPS = {
    "gelu": "torch.nn.functional.gelu(x)",
    "dropout": "torch.nn.functional.dropout(x)",
    "randn": "torch.randn(64, device='cuda')",
    "normal_": "x.clone().normal_()",
    "bernoulli": "x.clone().bernoulli_(0.5)",
    "exponential_": "x.clone().exponential_()",
}


@pytest.mark.simulated_machine(gpus=2)
@pytest.mark.parametrize("name", sample(OPS, "gelu"))
def test_op_in_the_first_capture(name: str) -> None:
    import torch

    assert "torch._dynamo" not in sys.modules
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = eval(OPS[name], {"torch": torch, "x": x})
    graph.replay()
    assert y.abs().sum().item() > 0
