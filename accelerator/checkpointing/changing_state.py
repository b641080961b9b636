"""The state that a function changes besides its results: the buffers of its modules, and tensors and generators that it holds.

A recomputation needs the state that its forward started with, and must leave the state as it finds it. Versions of tensors do
not tell what changed: batch norm and writes through ``.data`` leave them alone. So the values are copied before the forward.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import bindings
from .containers import ATOMS

# Larger tensors are copied for a forward only, and kept if their version changed in it: running statistics are small, while
# masks and quantized weights are large constants.
SMALL_BYTES = 2**20
# Tensors larger than this are copied only after a forward has changed them.
LARGEST_FIRST_COPY = 2**26
# Containers in closures and attributes with more items are not searched.
_MOST_ITEMS = 256

# Large tensors that their last forward did not change (False) or changed (True), by id and whether their module trained.
_known: dict[tuple[int, bool], tuple[weakref.ref[Tensor], bool]] = {}


def find_state(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChangingState | None:
    """Return the state that a function and its arguments refer to, with its values. None if there is none."""
    found: ChangingState | None = None
    # A single layer without buffers, which is frequent.
    if not isinstance(function, torch.nn.Module) or function._modules or function._buffers:
        found = ChangingState()
        found.visit(function)
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            # An edited argument is an error in backward, unless the edit leaves its version alone: that of a batch norm.
            if item.requires_grad or item.dim() != 1:
                continue
        elif type(item) in ATOMS:
            continue
        if found is None:
            found = ChangingState()
        found.visit(item, is_argument=True)
    return found if found is not None and (found.modules or found.tensors or found.generators) else None


class ChangingState:
    """State that a function may change, and after ``copy`` its values then."""

    __slots__ = ("_entries", "_globals", "_visited", "generators", "modules", "tensors")

    def __init__(self) -> None:
        # Each module with buffers, and those buffers.
        self.modules: list[tuple[torch.nn.Module, dict[str, Tensor | None]]] = []
        # Each tensor, whether its module trains, and the object itself. By id: tensors compare their elements.
        self.tensors: dict[int, tuple[Tensor, bool]] = {}
        self.generators: list[torch.Generator] = []
        self._visited: set[int] = set()
        self._globals: Any = None
        # Each tensor that is kept, its value when the forward started (None if unknown), and its version then.
        self._entries: list[tuple[Tensor, Tensor | None, int, bool]] = []

    def visit(self, item: Any, *, is_argument: bool = False, is_part: bool = False) -> None:
        """Find the state that an object refers to.

        Args:
            is_argument: whether the object belongs to the arguments, whose tensors are state only if they may be statistics.
            is_part: whether the object was found in another one: the attributes of objects in objects are not searched.
        """
        cls = type(item)
        if cls in ATOMS or id(item) in self._visited:
            return
        if isinstance(item, Tensor):
            if not item.requires_grad and (item.dim() == 1 or not is_argument):
                self._add(item, False)
            return
        self._visited.add(id(item))
        if isinstance(item, torch.nn.Module):
            self._visit_module(item)
        elif isinstance(item, torch.Generator):
            self.generators.append(item)
        elif cls is types.FunctionType:
            self._visit_function(item)
        elif cls is types.MethodType:
            self.visit(item.__self__)
            if not isinstance(item.__self__, torch.nn.Module):
                self.visit(item.__func__)
        elif cls is functools.partial:
            self.visit(item.func)
            self._visit_all((*item.args, *item.keywords.values()))
        elif isinstance(item, (tuple, list, dict)):
            if len(item) <= _MOST_ITEMS or is_argument:
                self._visit_all(dict.values(item) if isinstance(item, dict) else item, is_argument=is_argument)
        elif not (is_part or is_argument or isinstance(item, (type, types.ModuleType))) and hasattr(item, "__dict__"):
            self._visit_all(list(vars(item).values()))

    def _visit_all(self, items: Iterable[Any], *, is_argument: bool = False) -> None:
        for each in items:
            self.visit(each, is_argument=is_argument, is_part=True)

    def _visit_function(self, function: types.FunctionType) -> None:
        if self._globals is None:
            self._globals = function.__globals__
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            self.visit(content)
        if function.__defaults__ or function.__kwdefaults__:
            self._visit_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        if self._globals is function.__globals__:
            # Other functions of the same file too, but no libraries.
            for name in function.__code__.co_names:
                used = self._globals.get(name)
                if isinstance(used, (torch.nn.Module, Tensor, torch.Generator, types.FunctionType)) and (
                    not isinstance(used, types.FunctionType) or used.__globals__ is self._globals
                ):
                    self.visit(used)

    def _visit_module(self, module: torch.nn.Module) -> None:
        modules = [module]
        for each in modules:
            if each._buffers:
                buffers = dict(each._buffers.items())
                self.modules.append((each, buffers))
                for buffer in buffers.values():
                    if buffer is not None and not buffer.requires_grad:
                        self._add(buffer, each.training)
            for child in each._modules.values():
                if child is not None and id(child) not in self._visited:
                    self._visited.add(id(child))
                    modules.append(child)

    def _add(self, tensor: Tensor, training: bool) -> None:
        # Nothing can edit a tensor of inference mode here.
        if is_lazy(tensor) or not tensor.is_inference():
            self.tensors[id(tensor)] = (tensor, training)

    def copy(self) -> None:
        """Copy the values, before the forward."""
        self._visited.clear()
        self._globals = None
        tensors = self.tensors
        copied = {key: tensor for key, (tensor, training) in tensors.items() if _is_copied(tensor, training)}
        copies = dict(zip(copied, _copy(list(copied.values())), strict=True))
        self._entries = [(tensor, copies.get(key), tensor._version, training) for key, (tensor, training) in tensors.items()]
        tensors.clear()

    def forward_ended(self) -> bool:
        """Drop what the forward did not change, as far as that costs no synchronization. Return whether any state remains."""
        entries = []
        for entry in self._entries:
            tensor, start, version, training = entry
            changed = tensor._version != version
            if start is not None and not changed and _nbytes(start) <= SMALL_BYTES:
                changed = not (start.is_cpu and type(start) is Tensor and _is_equal(start, tensor))
            else:
                _learn(tensor, training, changed)
            if changed:
                entries.append(entry)
        self._entries = entries
        if not entries:
            self.modules = [pair for pair in self.modules if _has_replaced(*pair)]
        return bool(entries or self.modules)

    def rewind(self) -> Callable[[], None]:
        """Set the values that the forward started with. Return a function that sets the present ones again."""
        tensors = [tensor for tensor, *_ in self._entries]
        now = _copy(tensors)
        modules = [(module, dict(module._buffers.items()), _attributes(module)) for module, _ in self.modules]
        set_versions = bindings.preserve_versions(tensors)
        _write([(tensor, start) for tensor, start, *_ in self._entries if start is not None])
        for module, buffers in self.modules:
            _set_buffers(module, buffers)

        def restore() -> None:
            for module, buffers, attributes in modules:
                _set_buffers(module, buffers)
                vars(module).update(attributes)
            _write(list(zip(tensors, now, strict=True)))
            set_versions()

        return restore

    def memory(self) -> set[int]:
        """Return the memory of the tensors: a recomputation that saves one must save a copy."""
        return {tensor.untyped_storage()._cdata for tensor, *_ in self._entries if _is_plain(tensor)}


def _attributes(module: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors that are plain attributes of a module, such as the weight that a hook computes."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def _has_replaced(module: torch.nn.Module, buffers: dict[str, Tensor | None]) -> bool:
    return any(name in module._buffers and module._buffers[name] is not buffer for name, buffer in buffers.items())


def _set_buffers(module: torch.nn.Module, buffers: dict[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():
        if name in module._buffers and module._buffers[name] is not buffer:
            module._buffers[name] = buffer


def shares(tensor: Tensor, memory: set[int]) -> bool:
    """Whether a tensor is in such memory."""
    return _is_plain(tensor) and tensor.untyped_storage()._cdata in memory


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _is_copied(tensor: Tensor, training: bool) -> bool:
    if is_lazy(tensor):
        return False
    size = _nbytes(tensor)
    if size <= SMALL_BYTES:
        return True
    reference, changed = _known.get((id(tensor), training), (None, False))
    return changed if reference is not None and reference() is tensor else size <= LARGEST_FIRST_COPY


def _learn(tensor: Tensor, training: bool, changed: bool) -> None:
    key = (id(tensor), training)
    _known[key] = (weakref.ref(tensor, lambda _: _known.pop(key, None)), changed)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.layout is torch.strided and torch.equal(one, other)


def _copy(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _write(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        same = [(tensor, value) for tensor, value in pairs if _is_plain(tensor) and tensor.shape == value.shape]
        if same:
            torch._foreach_copy_([tensor for tensor, _ in same], [value for _, value in same])
        for tensor, value in pairs:
            if not _is_plain(tensor) or tensor.shape != value.shape:
                if tensor.shape != value.shape:
                    # Observers of quantization resize their buffers.
                    tensor.resize_(value.shape)
                tensor.copy_(value)
