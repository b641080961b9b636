"""What holds a device's memory when the memory that the process has taken of it grows, of which the last time is its peak."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._settings.rehearsal_record import CATEGORIES, Peak
from .missing_values import is_outside_of_torch

_MOST_LINES = 5  # of the program, in the report and its JSON
_MODULE, _AUTOGRAD, _OPTIMIZERS = (f"{torch.__path__[0]}/{part}" for part in ("nn/modules/module.py", "autograd/", "optim/"))


def held_memory(device: int, where: str | None, known: dict[int, str]) -> Peak:
    """Return what holds the allocated memory of a device now, by category and by line of the program.

    torch must record the stacks of what is allocated.

    Args:
        device: its index.
        where: the line of the program that has just taken memory.
        known: what `known_addresses` returns now.
    """
    by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    by_line: dict[str, int] = {}
    snapshot: Any = torch.cuda.memory._snapshot()
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = block.get("frames", [])
                by_category[known.get(block["address"]) or category_of(frames)] += block["size"]
                line = _line(frames)
                by_line[line] = by_line.get(line, 0) + block["size"]
    largest = sorted(by_line.items(), key=lambda item: -item[1])[:_MOST_LINES]
    return Peak(where, sum(by_category.values()), [*by_category.values()], [[line, size] for line, size in largest])


def known_addresses() -> dict[int, str]:
    """Return the category of the memory of all parameters and optimizers of the process, by address."""
    # isinstance alone would ask each object for its class, which deprecated names of torch.distributed warn about.
    objects = [value for value in gc.get_objects() if issubclass(type(value), (torch.Tensor, torch.optim.Optimizer))]
    optimizers = [value for value in objects if not issubclass(type(value), torch.Tensor)]
    return addresses_of([value for value in objects if isinstance(value, torch.nn.Parameter)], *optimizers)


def _addresses_of_tensor(tensor: Any) -> list[int]:
    """Return where the memory on a GPU begins of a tensor, of its local part, or of the tensors of which it consists."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [address for name in names for address in _addresses_of_tensor(getattr(tensor, name))]
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or isinstance(local, FakeTensor) or not local.is_cuda:
        return []
    try:
        return [local.untyped_storage().data_ptr()]
    except RuntimeError:  # it is a wrapper of another kind, without memory of its own
        return []


def addresses_of(parameters: list[Any], *optimizers: Any) -> dict[int, str]:
    """Return the category of the memory of parameters, of their gradients and of what optimizers keep for them, by address."""
    found: dict[int, str] = {}

    def add(tensor: Any, category: str) -> None:
        found.update(dict.fromkeys(_addresses_of_tensor(tensor), category))

    for parameter in parameters:
        for optimizer in optimizers:
            for value in optimizer.state.get(parameter, {}).values():
                add(value, "optimizer state")
        if parameter.grad is not None:
            add(parameter.grad, "gradients")
        add(parameter, "parameters")
    found.pop(0, None)  # of tensors without elements
    return found


def category_of(frames: list[dict[str, Any]]) -> str:
    """Return what memory is for whose address is not known, by who allocated it."""
    files = [frame["filename"] for frame in frames]
    if any(file.startswith(_OPTIMIZERS) for file in files):
        return "optimizer state"
    is_of_model = not any(map(is_outside_of_torch, files)) or any(file.startswith((_MODULE, _AUTOGRAD)) for file in files)
    return "activations" if is_of_model else "other"


def _line(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line outside of torch. A backward runs in a thread that has none."""
    for frame in frames:
        if is_outside_of_torch(frame["filename"]):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return "a backward" if frames else "code without Python"
