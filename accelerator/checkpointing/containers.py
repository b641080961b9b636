"""Finding and replacing the tensors in the arguments and results of a checkpoint.

Only containers that can be rebuilt exactly are rebuilt: lists, dicts, tuples, namedtuples and dataclasses of exactly these
types. A subclass may keep state or run code that this module cannot reproduce, so it is passed on untouched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

# Types that neither hold a tensor nor change.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def map_tensors(
    item: Any, name: str, replace: Callable[[Any, str], Any], copies: dict[int, Any], leaf: type = torch.Tensor
) -> Any:
    """Copy a structure with each tensor replaced. Containers without tensors are copied too.

    Args:
        item: the structure.
        name: the name of the structure, from which the names of its tensors are derived.
        replace: gets a tensor and its name, and returns the replacement.
        copies: the copies made so far, by the id of the original. An object that occurs twice is copied once.
        leaf: the type of what is replaced.
    """
    cls = type(item)
    if cls in ATOMS:
        return item
    if isinstance(item, leaf):
        return replace(item, name)
    if id(item) in copies:
        return copies[id(item)]
    new: Any
    if cls is list:
        copies[id(item)] = new = []
        new.extend([map_tensors(each, f"{name}[{i}]", replace, copies, leaf) for i, each in enumerate(item)])
    elif cls is dict:
        copies[id(item)] = new = {}
        for key, value in item.items():
            new[key] = map_tensors(value, f"{name}[{key!r}]", replace, copies, leaf)
    elif cls is tuple or _is_plain_namedtuple(cls):
        parts = [map_tensors(each, f"{name}[{i}]", replace, copies, leaf) for i, each in enumerate(item)]
        unchanged = all(part is each for part, each in zip(parts, item, strict=True))
        copies[id(item)] = new = item if unchanged else _make_tuple(cls, parts)
    elif _is_plain_dataclass(item):
        copies[id(item)] = new = object.__new__(cls)
        for field, value in vars(item).items():
            vars(new)[field] = map_tensors(value, f"{name}.{field}", replace, copies, leaf)
    else:
        return item
    return new


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a tensor; of a strided nested one, which has none, the shapes of its parts."""
    try:
        return tensor.shape
    except RuntimeError:
        return torch.Size(tensor._nested_tensor_size().reshape(-1).tolist())


def devices_of(tensors: list[torch.Tensor]) -> set[torch.device]:
    """Return the devices of tensors, without the CPU."""
    return {tensor.device for tensor in tensors if not tensor.is_cpu}


def tensors_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure, subclasses of list, dict and tuple included. Runs no code of those subclasses."""
    tensors: list[torch.Tensor] = []
    _collect(item, tensors, set())
    return tensors


def _collect(item: Any, tensors: list[torch.Tensor], visited: set[int]) -> None:
    if type(item) in ATOMS:
        return
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return
    children: Any
    if isinstance(item, tuple):
        children = tuple.__iter__(item)
    elif isinstance(item, list):
        children = list.__iter__(item)
    elif isinstance(item, dict):
        children = dict.values(item)
    elif _is_plain_dataclass(item):
        children = vars(item).values()
    else:
        return
    if id(item) not in visited:
        visited.add(id(item))
        for child in children:
            _collect(child, tensors, visited)


def _is_plain_namedtuple(cls: type) -> bool:
    """Whether the whole state of an instance is its items, which holds for namedtuples but not for their subclasses."""
    if cls.__bases__ != (tuple,):
        return False
    return cls.__module__ == "torch.return_types" or (hasattr(cls, "_fields") and vars(cls).get("__slots__") == ())


def _make_tuple(cls: type, items: list[Any]) -> Any:
    # The results of torch's operations are struct sequences, which only their own constructor can make.
    return cls(items) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, items)


def _is_plain_dataclass(item: Any) -> bool:
    """Whether the whole state of an instance is its fields, in its ``__dict__``."""
    cls = type(item)
    if not dataclasses.is_dataclass(cls) or cls.__new__ is not object.__new__:
        return False
    bases = cls.__mro__[:-1]
    if any("__dataclass_fields__" not in vars(base) or "__slots__" in vars(base) for base in bases):
        return False
    return vars(item).keys() == {field.name for field in dataclasses.fields(cls)}
