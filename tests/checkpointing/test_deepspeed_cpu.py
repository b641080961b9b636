"""Tests of the behavior that DeepSpeed's own tests of checkpoints check, and of DeepSpeed's helper functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accelerator import checkpointing
from tests import support

both = pytest.mark.parametrize(
    "ckpt", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint], ids=["checkpoint", "non_reentrant"]
)
WIDTH = 20


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_fill(mask, 0.0).exp()


class Functional(nn.Module):
    """A linear layer and tanh, followed by a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear(x).tanh(), *args, **kwargs)


def x(seed: int = 0, grad: bool = True) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def mask() -> torch.Tensor:
    return torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(9)) > 0.5


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "one in, one out": (lambda: Functional(lambda h: h.exp()), (x(),), {}),
    "one in, two out": (lambda: Functional(lambda h: (h.exp(), h.sin())), (x(),), {}),
    "one in, three out": (lambda: Functional(lambda h: (h.exp(), h.sin(), h.cos())), (x(),), {}),
    "two in, one out": (lambda: Functional(lambda h, g: h * g), (x(), x(1)), {}),
    "two in, two out": (lambda: Functional(lambda h, g: (h * g, h + g)), (x(), x(1)), {}),
    "two in, three out": (lambda: Functional(lambda h, g: (h * g, h + g, h - g)), (x(), x(1)), {}),
    "mask": (Masked, (x(), mask()), {}),
    "none in": (lambda: Functional(lambda h, n: h.exp() if n is None else h), (x(), None), {}),
    "none out": (lambda: Functional(lambda h: (h.exp(), None)), (x(),), {}),
    "no tensor in": (lambda: Functional(lambda h, k: h * k), (x(), 2), {}),
    "no tensor out": (lambda: Functional(lambda h: (h.exp(), 2, "text", True)), (x(),), {}),
    "order": (lambda: Functional(lambda h, k, g, n: (k, h * g, n, h + g)), (x(), 3, x(1), None), {}),
    "integers out": (lambda: Functional(lambda h: (h.exp(), h.argmax(-1))), (x(),), {}),
    "keyword": (lambda: Functional(lambda h, *, g: h * g), (x(),), {"g": x(1)}),
    "keyword and mask": (lambda: Functional(lambda h, *, m, k: h.masked_fill(m, k)), (x(),), {"m": mask(), "k": 3.0}),
    "input without grad": (lambda: Functional(lambda h: h.exp()), (x(grad=False),), {}),
    "first without grad": (lambda: Functional(lambda h, g: h * g), (x(grad=False), x(1)), {}),
    "none requires grad": (lambda: Functional(lambda h, g: h * g), (x(grad=False), x(1, grad=False)), {}),
}


def run(name: str, ckpt: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs, and the gradients of inputs and parameters."""
    torch.manual_seed(0)
    make, args, kwargs = CASES[name]
    module, args, kwargs = make(), copy.deepcopy(args), copy.deepcopy(kwargs)
    out = ckpt(module, *args, **kwargs)
    several = list(out) if isinstance(out, tuple) else [out]
    sum(item.sum() for item in several if isinstance(item, torch.Tensor) and item.requires_grad).backward()  # type: ignore[union-attr]
    tensors = [item for item in (*args, *kwargs.values(), *module.parameters()) if isinstance(item, torch.Tensor)]
    return several, [tensor.grad for tensor in tensors]


@both
@pytest.mark.parametrize("settings", [{}, {"partition_activations": True}, {"checkpoint_in_cpu": True}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_equal_no_checkpointing(name: str, settings: dict[str, Any], ckpt: Callable[..., Any]) -> None:
    checkpointing.configure(**settings)
    for expected, results in zip(run(name, lambda f, *a, **k: f(*a, **k)), run(name, ckpt), strict=True):
        assert len(expected) == len(results)
        for one, other in zip(expected, results, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@both
def test_without_grad(ckpt: Callable[..., Any]) -> None:
    module = Functional(lambda h: h.exp())
    with torch.no_grad():
        out = ckpt(module, x())
    assert not out.requires_grad
    assert torch.equal(out, module(x()))


@both
def test_consecutive_checkpoints(ckpt: Callable[..., Any]) -> None:
    layers = nn.Sequential(*[Functional(lambda h: h.exp()) for _ in range(5)])

    def gradients(ckpt: Callable[..., Any]) -> list[torch.Tensor]:
        layers.zero_grad()
        item = x()
        h = item
        for layer in layers:
            h = ckpt(layer, h)
        h.sum().backward()
        return [item.grad, *[p.grad.clone() for p in layers.parameters()]]  # type: ignore[list-item, union-attr]

    expected = gradients(lambda function, *args: function(*args))
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients(ckpt), strict=True))


@pytest.mark.parametrize("cls", [AssertionError, ValueError])
def test_contiguous_buffers_without_num_checkpoints(cls: type[Exception]) -> None:
    with pytest.raises(cls, match="number of checkpointed layers"):
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True)


@both
def test_more_layers_than_num_checkpoints(ckpt: Callable[..., Any]) -> None:
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)
    item = x()
    h = item
    for _ in range(5):
        h = ckpt(torch.sin, h)
    h.sum().backward()
    assert torch.equal(item.grad, torch.autograd.grad(item.sin().sin().sin().sin().sin().sum(), item)[0])


def test_checkpoint_function() -> None:
    outputs: list[Any] = []
    item = x()
    first = checkpointing.CheckpointFunction.apply(lambda h: (h.sin(), 3, h.cos()), outputs, item)
    assert [type(each) for each in outputs] == [torch.Tensor, int, torch.Tensor]
    assert first == (outputs[0], outputs[2])
    only = checkpointing.CheckpointFunction.apply(torch.exp, outputs, item)
    assert outputs[3] is only
    (first[0].sum() + only.sum()).backward()
    assert torch.equal(item.grad, item.cos() + item.exp())


def test_detach_variable() -> None:
    item = x() * 1
    detached, other, three = checkpointing.detach_variable((item, torch.ones(1), 3))
    assert detached.is_leaf
    assert detached.requires_grad
    assert not other.requires_grad
    assert three == 3
    with pytest.raises(TypeError, match="takes a tuple, not list"):
        checkpointing.detach_variable([item])  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [tuple, list])
def test_extract_and_merge(cls: type) -> None:
    objects = cls([torch.ones(1), "text", torch.zeros(2), None])
    tensors, others, flags = checkpointing.extract_tensors(objects)
    assert type(tensors) is type(others) is type(flags) is cls
    merged = checkpointing.merge_tensors(tensors, others, flags)
    assert all(one is other for one, other in zip(merged, objects, strict=True))
    with pytest.raises(ValueError, match="do not match"):
        checkpointing.merge_tensors(tensors, others, flags[:-1])


def test_helpers_reject_mismatched_arguments() -> None:
    with pytest.raises(ValueError, match="pairs"):
        checkpointing.gather_partitioned_activations([1])
    with pytest.raises(ValueError, match="2 arguments, but 1 inputs"):
        checkpointing.get_cpu_activations_for_backward([1, 2], [1])
    with pytest.raises(ValueError, match="contiguous buffers"):
        checkpointing.partition_activations([torch.ones(1)], False, True)


# Prints [world size, rank, elements, start of the part, size of the part]. The backend "fake" needs no other processes.
PARTS = """
import json, sys, torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from accelerator import checkpointing

found = []
for world, sizes in json.loads(sys.argv[1]):
    for rank in range(world):
        torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        checkpointing.configure(group=torch.distributed.group.WORLD)
        for size in sizes:
            x = torch.empty(size)
            start, length = checkpointing.get_partition_start(x), checkpointing.get_partition_size(x)
            found.append([world, rank, size, start, length])
        torch.distributed.destroy_process_group()
print(json.dumps(found))
"""


def parts(*worlds: tuple[int, list[int]]) -> list[list[int]]:
    return json.loads(support.run(PARTS, support.plain_environment(), json.dumps(worlds)))  # type: ignore[no-any-return]


def test_partition_start_and_size() -> None:
    assert parts((1, [0, 9]), (2, [8, 9]), (3, [7, 3, 1]), (4, [10])) == [
        [1, 0, 0, 0, 0], [1, 0, 9, 0, 9],
        [2, 0, 8, 0, 4], [2, 0, 9, 0, 5],
        [2, 1, 8, 4, 4], [2, 1, 9, 5, 5],
        [3, 0, 7, 0, 3], [3, 0, 3, 0, 1], [3, 0, 1, 0, 1],
        [3, 1, 7, 3, 3], [3, 1, 3, 1, 1], [3, 1, 1, 1, 1],
        [3, 2, 7, 6, 3], [3, 2, 3, 2, 1], [3, 2, 1, 2, 1],
        [4, 0, 10, 0, 3], [4, 1, 10, 3, 3], [4, 2, 10, 6, 3], [4, 3, 10, 9, 3],
    ]  # fmt: skip


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_partitions_equal_those_of_deepspeed() -> None:
    # DeepSpeed supports only sizes that the number of ranks divides. Otherwise it rounds the start down, and the size fails.
    worlds = [(world, [world * part for part in (0, 1, 2, 7, 1000)]) for world in range(1, 17)]
    theirs = """
    import json, sys, torch
    from deepspeed.runtime.activation_checkpointing import checkpointing

    found = []
    for world, sizes in json.loads(sys.argv[1]):
        for rank in range(world):
            checkpointing.mp_rank, checkpointing.mp_size = rank, world
            for size in sizes:
                x = torch.empty(size)
                start, length = checkpointing.get_partition_start(x), checkpointing.get_partition_size(x)
                found.append([world, rank, size, start, length])
    print(json.dumps(found))
    """
    expected = json.loads(support.run(theirs, support.plain_environment(), json.dumps(worlds)).splitlines()[-1])
    assert len(expected) == 5 * sum(range(1, 17))
    assert parts(*worlds) == expected
