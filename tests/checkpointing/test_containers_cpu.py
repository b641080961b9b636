"""Tests of containers as arguments: exact types are copied, all others are passed through unchanged."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from accelerator import checkpointing
from accelerator.checkpointing.containers import map_tensors, tensors_in
from tests.support.checkpointing_cases import torch_non_reentrant
from tests.support.checkpointing_memory import MODES

Tensor = torch.Tensor
Pair = namedtuple("Pair", "one two")


class Typed(NamedTuple):
    one: Tensor
    two: Tensor


@dataclasses.dataclass
class Plain:
    one: Tensor
    two: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: Tensor
    two: Tensor


@dataclasses.dataclass
class Inherited(Plain):
    three: int = 3


class Recording(dict[str, Tensor]):
    """A dict that records the order in which its items were set."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.order.append(key)
        super().__setitem__(key, value)


class Scaling(dict[str, Tensor]):
    """A dict that changes the values that are set."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value * 2)


class Renaming(dict[str, Tensor]):
    """A dict that changes its keys."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key.upper(), value)

    def __getitem__(self, key: str) -> Tensor:
        return super().__getitem__(key.upper())


class OwnItems(dict[str, Tensor]):
    """A dict whose ``items()`` returns other items than it holds."""

    def items(self) -> Any:
        return [("one", torch.zeros(3))]


class NeedsSize(list[Tensor]):
    def __new__(cls, size: int) -> NeedsSize:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__([torch.zeros(3)] * size)


class NeedsName(dict[str, Tensor]):
    def __new__(cls, name: str) -> NeedsName:
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        super().__init__()


class Doubling(list[Tensor]):
    def extend(self, items: Any) -> None:
        super().extend([*items, *items])


class Reversed(list[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return super().__reversed__()


class Slots(list[Tensor]):
    __slots__ = ("scale",)


class InheritedSlots(Slots):
    pass


class Named(tuple[Tensor, ...]):
    """A tuple with an attribute."""

    scale: float


class NamedPair(Pair):
    """A namedtuple with an attribute."""

    scale: float


@dataclasses.dataclass
class Slotted:
    __slots__ = ("one", "two")
    one: Tensor
    two: Tensor


@dataclasses.dataclass
class Made:
    """A dataclass whose ``__new__`` needs an argument."""

    one: Tensor
    two: Tensor

    def __new__(cls, one: Tensor, two: Tensor) -> Made:
        return super().__new__(cls)


@dataclasses.dataclass
class Extended:
    """A dataclass with an attribute that is not a field."""

    one: Tensor
    two: Tensor

    def __post_init__(self) -> None:
        self.total = self.one + self.two


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Tensor]):
    """A dataclass that is also a dict, like the outputs of transformers."""

    one: Tensor
    two: Tensor

    def __post_init__(self) -> None:
        self["one"], self["two"] = self.one, self.two

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name in self.keys():
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class TensorDict:
    """A batch of tensors that is not a dict, like tensordict's class."""

    def __init__(self, source: dict[str, Tensor]) -> None:
        self._source = source
        self.batch_size = torch.Size([3])

    def __getitem__(self, key: str) -> Tensor:
        return self._source[key]


class Attrs:
    """A slotted, frozen class, like those that attrs makes."""

    __slots__ = ("__weakref__", "one", "two")
    __attrs_attrs__ = ("one", "two")

    def __init__(self, one: Tensor, two: Tensor) -> None:
        object.__setattr__(self, "one", one)
        object.__setattr__(self, "two", two)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Pydantic:
    """A class with its fields in ``__dict__`` and checked assignments, like pydantic's models."""

    def __init__(self, **data: Tensor) -> None:
        object.__setattr__(self, "__dict__", data)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            raise ValueError(name)
        vars(self)[name] = value


def filled(container: Any, one: Tensor, two: Tensor, **attributes: Any) -> Any:
    if isinstance(container, dict):
        container["one"], container["two"] = one, two
    elif isinstance(container, list):
        container[:] = [one, two]
    for name, value in attributes.items():
        setattr(container, name, value)
    return container


def tuple_of(cls: Any, one: Tensor, two: Tensor) -> Any:
    container = cls(one, two) if cls is NamedPair else cls((one, two))
    container.scale = 2.0
    return container


by_key: Callable[[Any], Any] = lambda c: c["one"].sin() * c["two"].exp()  # noqa: E731
by_index: Callable[[Any], Any] = lambda c: c[0].sin() * c[1].exp()  # noqa: E731
by_name: Callable[[Any], Any] = lambda c: c.one.sin() * c.two.exp()  # noqa: E731
scaled: Callable[[Any], Any] = lambda c: c[0].sin() * c[1].exp() * c.scale  # noqa: E731
by_items: Callable[[Any], Any] = lambda c: sum(value.sin() for _, value in c.items()) * c["one"].exp()  # noqa: E731

REBUILT: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda one, two: [one, two], by_index),
    "dict": (lambda one, two: {"one": one, "two": two}, by_key),
    "tuple": (lambda one, two: (one, two), by_index),
    "namedtuple": (Pair, by_name),
    "typed namedtuple": (Typed, by_name),
    "torch's tuple": (lambda one, two: torch.return_types.max((one, two)), by_index),
    "dataclass": (Plain, by_name),
    "frozen dataclass": (Frozen, by_name),
    "inherited dataclass": (Inherited, by_name),
}
PASSED_THROUGH: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "dict that records": (lambda one, two: filled(Recording(), one, two), lambda c: by_key(c) * len(c.order)),
    "dict that changes values": (lambda one, two: filled(Scaling(), one, two), by_key),
    "dict that changes keys": (lambda one, two: filled(Renaming(), one, two), by_key),
    "dict with its own items": (lambda one, two: filled(OwnItems(), one, two), by_items),
    "torch.fx's list": (lambda one, two: immutable_list([one, two]), by_index),
    "torch.fx's dict": (lambda one, two: immutable_dict({"one": one, "two": two}), by_key),
    "list whose __new__ needs an argument": (lambda one, two: filled(NeedsSize(2), one, two), by_index),
    "dict whose __new__ needs an argument": (lambda one, two: filled(NeedsName("x"), one, two), by_key),
    "dataclass whose __new__ needs arguments": (Made, by_name),
    "list with its own extend": (lambda one, two: filled(Doubling(), one, two), lambda c: by_index(c) * len(c)),
    "list with its own iteration": (lambda one, two: filled(Reversed(), one, two), by_index),
    "list with slots": (lambda one, two: filled(Slots(), one, two, scale=2.0), scaled),
    "list with inherited slots": (lambda one, two: filled(InheritedSlots(), one, two, scale=2.0), scaled),
    "tuple with an attribute": (lambda one, two: tuple_of(Named, one, two), scaled),
    "namedtuple with an attribute": (lambda one, two: tuple_of(NamedPair, one, two), scaled),
    "slotted dataclass": (Slotted, by_name),
    "dataclass with another attribute": (Extended, lambda c: by_name(c) * c.total),
    "model output": (ModelOutput, lambda c: by_key(c) * c.one),
    "tensordict": (lambda one, two: TensorDict({"one": one, "two": two}), by_key),
    "attrs": (Attrs, by_name),
    "pydantic": (lambda one, two: Pydantic(one=one, two=two), by_name),
    "OrderedDict": (lambda one, two: OrderedDict(one=one, two=two), by_key),
    "defaultdict": (lambda one, two: filled(defaultdict(list), one, two), by_key),
    "UserDict": (lambda one, two: UserDict(one=one, two=two), by_key),
    "UserList": (lambda one, two: UserList([one, two]), by_index),
    "deque": (lambda one, two: deque([one, two]), by_index),
}
CASES = {**REBUILT, **PASSED_THROUGH}


def state_of(container: Any) -> Any:
    """Return the items and attributes of a container, with the identity of each tensor."""

    def plain(item: Any) -> Any:
        return id(item) if isinstance(item, torch.Tensor) else copy.copy(item)

    items: list[Any] = []
    if isinstance(container, dict):
        items = [(key, plain(value)) for key, value in dict.items(container)]
    elif isinstance(container, (list, tuple)):
        items = [plain(each) for each in (list if isinstance(container, list) else tuple).__iter__(container)]
    names = [name for cls in type(container).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__weakref__"]
    attributes = {name: plain(getattr(container, name)) for name in names if hasattr(container, name)}
    return items, attributes, {name: plain(value) for name, value in getattr(container, "__dict__", {}).items()}


def run(ckpt: Callable[..., Any], name: str, received: list[Any]) -> list[Tensor]:
    make, use = CASES[name]
    one, two = torch.linspace(0, 1, 3, requires_grad=True), torch.linspace(1, 2, 3, requires_grad=True)
    container = make(one, two)
    before = state_of(container)

    def function(container: Any) -> Tensor:
        received.append(container)
        result: Tensor = use(container)
        return result.exp()

    output = ckpt(function, container)
    assert state_of(container) == before
    gradients = torch.autograd.grad(output.sum(), [one, two], allow_unused=True)
    assert state_of(container) == before
    assert received[0] is container
    return [output.detach(), *[torch.zeros(0) if each is None else each for each in gradients]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_values_equal_torch_checkpoint(name: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    received: list[Any] = []
    expected = run(torch_non_reentrant, name, [])
    results = run(checkpointing.checkpoint, name, received)
    assert all(torch.equal(*pair) for pair in zip(expected, results, strict=True))
    assert len(received) == 2
    assert type(received[0]) is type(received[1])
    if name in PASSED_THROUGH:
        assert received[0] is received[1]


@pytest.mark.parametrize("name", CASES)
def test_container_in_a_list_and_as_a_keyword(name: str) -> None:
    make, use = CASES[name]
    one, two = torch.linspace(0, 1, 3, requires_grad=True), torch.linspace(1, 2, 3, requires_grad=True)

    def function(items: list[Any], *, more: Any) -> Tensor:
        assert items[0] is more
        result: Tensor = use(more)
        return result.exp()

    def gradients(ckpt: Callable[..., Any]) -> tuple[Any, ...]:
        container = make(one, two)
        output = ckpt(function, [container], more=container)
        return torch.autograd.grad(output.sum(), [one, two], allow_unused=True)

    for expected, result in zip(gradients(torch_non_reentrant), gradients(checkpointing.checkpoint), strict=True):
        assert (expected is None) == (result is None)
        assert expected is None or torch.equal(expected, result)


@pytest.mark.parametrize("name", CASES)
def test_map_tensors_copies_only_exact_types(name: str) -> None:
    make, _ = CASES[name]
    container = make(torch.ones(3), torch.zeros(3))
    new = map_tensors(container, "argument 0", lambda tensor, name: tensor + 1, {})
    if name in PASSED_THROUGH:
        assert new is container
    else:
        assert type(new) is type(container)
        assert new is not container
        assert [each[0].item() for each in tensors_in(new)] == [2.0, 1.0]


def test_tensors_in_ignores_overridden_methods() -> None:
    container = filled(OwnItems(), torch.ones(3), torch.zeros(3))
    assert len(tensors_in([container, Reversed([torch.ones(1)])])) == 3
