"""Tests of the arguments of checkpoints in every mode: containers, other objects, and wrong types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from accelerator import checkpointing
from accelerator.checkpointing.containers import tensors_in
from tests.support.checkpointing_memory import MODES

Pair = namedtuple("Pair", "one two")


class Typed(NamedTuple):
    one: torch.Tensor
    two: Any


@dataclass
class Mutable:
    one: torch.Tensor
    two: Any
    rest: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    one: torch.Tensor
    two: Any


@dataclass
class Slotted:
    __slots__ = ("one", "two")
    one: torch.Tensor
    two: Any


class Table(dict[str, Any]):
    """A dict whose items are also attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Row(list[Any]):
    one = property(lambda self: self[0])
    two = property(lambda self: self[1])


class Linked(tuple[Any, ...]):
    one = property(lambda self: self[0])
    two = property(lambda self: self[1])


@dataclass
class Output(OrderedDict[str, Any]):
    """A dataclass that is also a dict, as the outputs of many models are."""

    one: torch.Tensor
    two: Any

    def __post_init__(self) -> None:
        self["one"], self["two"] = self.one, self.two

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def default(one: Any, two: Any) -> Any:
    made: Any = defaultdict(list)
    made["one"], made["two"] = one, two
    return made


CONTAINERS: dict[str, Any] = {
    "named tuple": (Pair, lambda p: (p.one, p.two)),
    "typed tuple": (Typed, lambda p: (p.one, p.two)),
    "dataclass": (Mutable, lambda p: (p.one, p.two)),
    "frozen dataclass": (Frozen, lambda p: (p.one, p.two)),
    "slotted dataclass": (Slotted, lambda p: (p.one, p.two)),
    "dict with attributes": (lambda one, two: Table(one=one, two=two), lambda p: (p.one, p["two"])),
    "ordered dict": (lambda one, two: OrderedDict(one=one, two=two), lambda p: (p["one"], p["two"])),
    "default dict": (default, lambda p: (p["one"], p["two"])),
    "list": (lambda one, two: Row([one, two]), lambda p: (p.one, p.two)),
    "tuple": (lambda one, two: Linked((one, two)), lambda p: (p.one, p.two)),
    "output": (Output, lambda p: (p.one, p["two"])),
    "torch's tuple": (lambda one, two: torch.return_types.max((one, two)), lambda p: (p.values, p.indices)),
}

containers = pytest.mark.parametrize("container", CONTAINERS)
modes = pytest.mark.parametrize("mode", MODES)


@containers
@modes
def test_gradients_and_types_of_container_arguments(container: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    make, take = CONTAINERS[container]
    a, b = torch.linspace(0, 1, 5, requires_grad=True), torch.linspace(1, 2, 5, requires_grad=True)
    received: list[type] = []

    def function(pack: Any, again: Any) -> torch.Tensor:
        received.append(type(pack))
        one, two = take(pack)
        assert again[0] is pack
        return one.sin() * two.exp()

    pack = make(a, b)
    checkpointing.checkpoint(function, pack, [pack]).sum().backward()
    assert received == [type(pack)] * 2
    assert torch.equal(a.grad, a.cos() * b.exp())
    assert torch.equal(b.grad, a.sin() * b.exp())


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": (lambda a: [a], lambda item: item.__setitem__(0, item[0] * 0)),
    "dict": (lambda a: {"a": a}, lambda item: item.clear()),
    "dataclass": (lambda a: Mutable(a, 1), lambda item: setattr(item, "one", item.one * 0)),
    "list in a dataclass": (lambda a: Mutable(a, 1, [a]), lambda item: item.rest.clear()),
}


@modes
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["caller", "function"])
def test_recomputation_ignores_later_container_edits(change: str, who: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    make, edit = CHANGES[change]
    a = torch.linspace(0, 1, 5, requires_grad=True)

    def function(pack: Any) -> torch.Tensor:
        tensors = [*tensors_in(pack)]
        out = sum(each.sin() for each in tensors) * (len(pack) if isinstance(pack, list) else 1)
        if who == "function":
            edit(pack)
        return out.exp()

    expected = torch.autograd.grad(function(make(a)).sum(), a)[0]
    pack = make(a)
    out = checkpointing.checkpoint(function, pack).sum()
    if who == "caller":
        edit(pack)
    out.backward()
    assert torch.equal(a.grad, expected)


def test_other_objects_are_passed_unchanged() -> None:
    class Opaque:
        pass

    @dataclass(eq=False)
    class Layer(torch.nn.Module):
        scale: float = 2.0

        def __post_init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    things: list[Any] = [Opaque(), Layer, Layer(), len, Opaque, torch.Size([1])]
    received: list[Any] = []

    def function(h: torch.Tensor, *rest: Any) -> torch.Tensor:
        received.append(rest)
        return h.sin().exp()

    checkpointing.checkpoint(function, torch.ones(3, requires_grad=True), *things).sum().backward()
    assert len(received) == 2
    for before, after in zip(*received, strict=True):
        assert before is after or (type(before) is type(after) and before == after)


def test_list_that_contains_itself() -> None:
    a = torch.ones(3, requires_grad=True)
    loop: list[Any] = [a]
    loop.append(loop)

    def function(item: Any) -> torch.Tensor:
        assert item[1] is item
        return item[0].sin().exp()

    checkpointing.checkpoint(function, loop).sum().backward()
    assert torch.equal(a.grad, a.cos() * a.sin().exp())


def test_in_place_edit_in_a_dataclass_is_an_error() -> None:
    pack = Mutable(torch.ones(3, requires_grad=True) * 1, None)
    out = checkpointing.checkpoint(lambda p: p.one.sin().exp(), pack).sum()
    pack.one.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_results_are_not_copied() -> None:
    made = Mutable(torch.ones(2, requires_grad=True), None)
    assert checkpointing.checkpoint(lambda p: p, made) is made


@pytest.mark.parametrize("mode", ["partition", "contiguous"])
def test_copied_argument_loses_its_autograd_history(mode: str) -> None:
    x = torch.ones(4, requires_grad=True)

    def run(settings: dict[str, Any]) -> None:
        checkpointing.configure(**settings)
        h = x * 2

        def function(h: torch.Tensor) -> torch.Tensor:
            (inside,) = torch.autograd.grad(h.exp().sum(), x, create_graph=True)
            return inside.sin().exp()

        checkpointing.checkpoint(function, h).sum().backward()

    run({})
    if mode == "contiguous":
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            run(MODES[mode])
    else:
        # With a single rank, the checkpoint keeps the tensor itself, with its history.
        run(MODES[mode])


WRONG: dict[str, Any] = {
    "partition size": lambda: checkpointing.get_partition_size(3),  # type: ignore[arg-type]
    "partition start": lambda: checkpointing.get_partition_start(None),  # type: ignore[arg-type]
    "outputs": lambda: checkpointing.CheckpointFunction.apply(torch.sin, None, torch.ones(1)),  # type: ignore[arg-type]
    "kept": lambda: checkpointing.get_cpu_activations_for_backward([torch.ones(2)], [None]),
    "graph": lambda: checkpointing.CudaRNGStatesTracker().register_graph(None),
    "engine": lambda: checkpointing.get_offloaded_activations_for_backward([], None),
    "engine back": lambda: checkpointing.restore_offloaded_activations([], 3),
    "partitioned": lambda: checkpointing.partition_activations(3),  # type: ignore[arg-type]
    "extracted": lambda: checkpointing.extract_tensors(None),  # type: ignore[arg-type]
    "gathered": lambda: checkpointing.gather_partitioned_activations(3),  # type: ignore[arg-type]
    "context": lambda: checkpointing.configure(context_fn=3),  # type: ignore[arg-type]
    "function": lambda: checkpointing.checkpoint(None, torch.ones(1, requires_grad=True)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types_raise_one_line_type_errors(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        WRONG[name]()
    assert "\n" not in str(caught.value)


def test_deepspeed_globals() -> None:
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3, profile=True)
    names = "PARTITION_ACTIVATIONS CONTIGUOUS_CHECKPOINTING CPU_CHECKPOINT SYNCHRONIZE PROFILE_TIME num_layers".split()
    assert [getattr(checkpointing, name) for name in names] == [True, True, False, False, True, 3]
    more = "mp_rank mp_size mp_group mpu deepspeed_checkpointing_enabled".split()
    assert [getattr(checkpointing, name) for name in more] == [0, 1, None, None, True]
    checkpointing.set_num_layers(5)
    assert checkpointing.num_layers == 5
    assert not set(names) & set(dir(checkpointing))
    with pytest.raises(AttributeError, match="no_such_global"):
        _ = checkpointing.no_such_global


def test_custom_offload_engine() -> None:
    class Engine:
        taken: list[torch.Tensor]

        def __init__(self) -> None:
            self.taken = []
            self.restored: list[int] = []

        def offload_input(self, tensor: torch.Tensor) -> int | None:
            if tensor.numel() < 3:
                return None
            self.taken.append(tensor.clone())
            return len(self.taken) - 1

        def restore_input(self, token: int) -> torch.Tensor:
            self.restored.append(token)
            return self.taken[token]

    engine, a, small, b = Engine(), torch.ones(4, requires_grad=True), torch.ones(2), torch.full((5,), 2.0)
    args = [a, "mask", a, small, torch.arange(4), b]
    kept = checkpointing.get_offloaded_activations_for_backward(args, engine)
    assert len(engine.taken) == 2
    assert kept[0] is kept[2]
    assert kept[0].numel() == 0
    assert a.numel() == 4
    assert kept[1] == "mask"
    assert kept[3] is small
    assert kept[4] is args[4]
    back = checkpointing.restore_offloaded_activations(kept, engine)
    assert torch.equal(back[0], a)
    assert torch.equal(back[5], b)
    assert back[0].requires_grad
    assert engine.restored == [0, 1]  # an engine may free what it has restored
    assert checkpointing.restore_offloaded_activations(kept, engine) is kept
    assert engine.restored == [0, 1]
    assert torch.equal(back[0], a)
