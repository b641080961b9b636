"""Tests of arguments that are no dense tensors with values, and of arguments that the function edits, under every setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerator import checkpointing
from accelerator.checkpointing import bindings
from accelerator.checkpointing.debug_checks import digest

SETTINGS: list[dict[str, Any]] = [
    {},
    {"determinism_check": "debug"},
    {"checkpoint_in_cpu": True},
    {"partition_activations": True},
    {"partition_activations": True, "determinism_check": "debug"},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2},
]
settings_of_each = pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: " ".join(each) or "plain")


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((1, 3), 2.0)], layout=layout)


# How to make a tensor, and a function of it and a dense matrix.
KINDS: dict[str, tuple[Callable[[], torch.Tensor], Callable[..., Any]]] = {
    "coo": (lambda: torch.eye(4).to_sparse(), lambda x, t: (t @ x).sin()),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), lambda x, t: (t @ x).sin()),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), lambda x, t: (t @ x).sin()),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), lambda x, t: (x * t.to_dense()).sin()),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), lambda x, t: (x * t.to_dense()).sin()),
    "jagged": (lambda: nested(torch.jagged), lambda x, t: (t * x.sum()).sin().values() * x[0, 0]),
    "nested": (
        lambda: nested(torch.strided).requires_grad_(),
        lambda x, t: x.sin() * (t * 2).sin().to_padded_tensor(0.0).sum(),
    ),
    "meta": (lambda: torch.ones(4, 4, device="meta"), lambda x, t: x.sin().exp() * t.numel()),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8),
        lambda x, t: (x * t.dequantize()).sin(),
    ),
}


if bindings.innermost_hooks is None:
    # Torch 2.6 saves arguments itself, and no strided nested ones.
    del KINDS["nested"]


@pytest.mark.filterwarnings("ignore")
@settings_of_each
@pytest.mark.parametrize("kind", KINDS)
def test_argument(kind: str, settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    make, function = KINDS[kind]
    x, expected = (torch.rand(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2))
    checkpointing.checkpoint(function, x, make()).sum().backward()
    function(expected, make()).sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


@settings_of_each
def test_meta_argument_with_a_gradient(settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    x = torch.ones(3, 3, device="meta", requires_grad=True)
    checkpointing.checkpoint(lambda h: (h * 2).sin().exp(), x).sum().backward()
    assert x.grad is not None
    assert x.grad.is_meta


@settings_of_each
def test_fake_argument(settings: dict[str, Any]) -> None:
    """A forward of fake tensors is recomputed with fake tensors."""
    checkpointing.configure(**settings)
    with FakeTensorMode():
        x, t = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
        out = checkpointing.checkpoint(lambda x, t: (x * 2).exp() * t.sin() + torch.ones(3), x, t)
    out.sum().backward()
    assert type(x.grad) is type(x)


@pytest.fixture
def _world_of_one(tmp_path: Path) -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("_world_of_one")
@settings_of_each
def test_distributed_argument(settings: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    checkpointing.configure(**settings)
    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Replicate()]).requires_grad_()
    checkpointing.checkpoint(lambda h: (h * 2).sin().exp(), x).sum().backward()
    assert isinstance(x.grad, DTensor)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "meta"])
def test_values_of_each_kind_are_compared(kind: str) -> None:
    make, _ = KINDS[kind]
    assert digest(make()) == digest(make()) is not None
    other = make() if kind == "quantized" else make() * 2
    if kind == "quantized":
        other = torch.quantize_per_tensor(torch.full((4, 4), 2.0), 0.1, 0, torch.quint8)
    assert digest(other) != digest(make())


@settings_of_each
@pytest.mark.parametrize("edit", ["first", "later", "nested"])
def test_an_edited_argument_is_named(edit: str, settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    functions: dict[str, Callable[..., Any]] = {
        "first": lambda h: h.add_(1).sin().exp(),
        "later": lambda h: h.sin().exp() * h.mul_(2),
        "nested": lambda items: items[0].add_(1).sin().exp(),
    }
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    out = checkpointing.checkpoint(functions[edit], [h] if edit == "nested" else h)
    name = r"argument 0\[0\]" if edit == "nested" else "argument 0"
    # Torch 2.6 saves the arguments that are kept as they are, and does not name them.
    named = bindings.innermost_hooks is not None or "contiguous_checkpointing" in settings
    expected = f"{name} of a checkpointed function" if named else ""
    with pytest.raises(RuntimeError, match=f"modified by an inplace operation: {expected}"):
        out.sum().backward()
