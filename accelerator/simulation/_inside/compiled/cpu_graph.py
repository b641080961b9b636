"""Converts an FX graph of aten ops on CUDA tensors to the same graph on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from .device_ops import cpu_arguments, device_op, runs_on_device
from .higher_order import convert_higher_order

__all__ = ["convert", "output_devices", "uses_cuda"]

CPU = torch.device("cpu")
_COPIES_TO_DEVICE = frozenset(
    (torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default, torch.ops.aten.copy.default)
)


def uses_cuda(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return whether an input or a value of a graph is on a GPU."""
    if any(_is_cuda(value) for value in example_inputs):
        return True
    return any(_is_cuda(leaf) for module in _graph_modules(gm) for node in module.graph.nodes for leaf in _leaves(node))


def output_devices(gm: torch.fx.GraphModule) -> list[torch.device | None]:
    """Return the device of each output of a graph, None for an output that is not a tensor."""
    output = next(iter(reversed(gm.graph.nodes)))
    values = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in output.args[0]]
    return [value.device if isinstance(value, torch.Tensor) else None for value in values]


def convert(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Convert a graph in place, with the graphs of its higher-order ops, and return the example inputs for it."""
    converter = _Converter()
    for module in _graph_modules(gm):
        converter.convert_graph(module)
    return [converter.to_cpu(value) for value in example_inputs]


def _graph_modules(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    return (module for module in gm.modules() if isinstance(module, torch.fx.GraphModule))


def _leaves(node: torch.fx.Node) -> list[Any]:
    values = node.meta.get("val"), node.meta.get("example_value")  # as AOTAutograd and as Dynamo call it
    return pytree.tree_leaves((values, node.args, node.kwargs))


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class _Converter:
    """Converts graphs that share fake tensors."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the originals, and so their ids

    def convert_graph(self, module: torch.fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                self._convert_call(module, node)
            elif node.op == "get_attr":
                _convert_constant(module, str(node.target))
        for node in module.graph.nodes:
            for key in ("val", "example_value"):
                if key in node.meta:
                    node.meta[key] = pytree.tree_map(self.to_cpu, node.meta[key])
        module.recompile()

    def _convert_call(self, module: torch.fx.GraphModule, node: Any) -> None:
        index = _device_index(node)
        if index is not None:
            if convert_higher_order(module, node, index):
                return
            if runs_on_device(node.target, node.args, node.kwargs):
                node.target = device_op(node.target, index, cpu_arguments(node.target, node.args, node.kwargs))
            else:
                _convert_called_op(node, index)
        if node.target in _COPIES_TO_DEVICE and _changes_device(node):
            # Without a change of the device, the op may return its argument instead of a copy.
            with module.graph.inserting_before(node):
                source = module.graph.call_function(torch.ops.aten.clone.default, (node.args[0],))
                source.meta = dict(node.args[0].meta)
            node.replace_input_with(node.args[0], source)
        node.args = map_aggregate(node.args, _device_to_cpu)
        node.kwargs = map_aggregate(node.kwargs, _device_to_cpu)

    def to_cpu(self, value: Any) -> Any:
        """Return the CPU's counterpart of a fake tensor, or the value itself."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
            return value
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value, _cpu_counterpart(value)
        return self._tensors[id(value)][1]


def _cpu_counterpart(tensor: Any) -> torch.Tensor:
    mode = getattr(tensor, "fake_mode", None)
    if mode is None:
        return tensor.detach().cpu()
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)


def _convert_constant(module: torch.fx.GraphModule, name: str) -> None:
    """Copy a constant tensor of a graph to the CPU."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    value = getattr(owner, attribute)
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        setattr(owner, attribute, type(value)(value.cpu()) if isinstance(value, torch.nn.Parameter) else value.cpu())


def _device_index(node: torch.fx.Node) -> int | None:
    """Return the index of the GPU that a node runs on, None if it does not run on a GPU."""
    values = [*pytree.tree_leaves(node.meta.get("val")), *(_values(node)), *pytree.tree_leaves((node.args, node.kwargs))]
    for value in values:
        if _is_cuda(value):
            device = value.device if isinstance(value, torch.Tensor) else value
            return torch.cuda.current_device() if device.index is None else device.index
    return None


def _values(node: torch.fx.Node) -> list[Any]:
    return [leaf for source in node.all_input_nodes for leaf in pytree.tree_leaves(source.meta.get("val"))]


def _changes_device(node: torch.fx.Node) -> bool:
    source, result = (each.meta.get("val") if isinstance(each, torch.fx.Node) else None for each in (node.args[0], node))
    return isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor) and source.device != result.device


def _convert_called_op(node: torch.fx.Node, index: int) -> None:
    """Convert the op that a higher-order op calls: an argument of the higher-order op, followed by the op's own arguments."""
    for position, op in enumerate(node.args):
        if runs_on_device(op, (), {}):
            on_cpu = cpu_arguments(op, node.args[position + 1 :], node.kwargs)
            node.update_arg(position, device_op(op, index, on_cpu))


def _device_to_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value
