"""Higher-order ops that run on the simulated GPU inside code that was compiled for the CPU.

Inductor compiles flex_attention's backward only for GPUs, and the ops that save and restore random states would use the CPU's
generator. Such a call becomes one op, which takes its tensors and sizes as lists and calls the higher-order op on CUDA tensors.
The launch of a Triton kernel becomes one op too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import operator
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from ..ops import bindings, runtime
from .device_ops import NAMESPACE, let_inductor_call, library, run_on_device
from .triton_compiler import tuning_on_copies

__all__ = ["convert_higher_order", "let_generators_reach_device_ops"]

_ON_DEVICE = ("associative_scan", "flex_attention", "flex_attention_backward", "run_and_save_rng_state", "run_with_rng_state")
_LAUNCH = "triton_kernel_wrapper_functional"
_SCHEMA = "(Tensor[] tensors, {numbers}[] sizes) -> Tensor[]"

_RELAXED = 2  # cudaStreamCaptureModeRelaxed

_functions: set[str] = set()


def convert_higher_order(module: torch.fx.GraphModule, node: torch.fx.Node, index: int) -> bool:
    """Replace a call of a higher-order op that runs on the device; return whether it was one."""
    target: Any = node.target
    if not isinstance(target, bindings.HigherOrderOperator) or target._name not in (*_ON_DEVICE, _LAUNCH):
        return False
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    leaves = [getattr(module, leaf.target) if _is_graph(module, leaf) else leaf for leaf in leaves]
    nodes = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    tensors = [each for each in nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    sizes = [each for each in nodes if each not in tensors]
    results, results_spec = pytree.tree_flatten(node.meta["val"])
    positions = [position for position, value in enumerate(results) if isinstance(value, torch.Tensor)]

    def call(tensor_values: list[Any], size_values: list[Any]) -> list[Any]:
        values = {each: value for each, value in zip([*tensors, *sizes], [*tensor_values, *size_values], strict=True)}
        args, kwargs = pytree.tree_unflatten(
            [values[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], spec
        )
        with _vmap_allowed():
            return [leaf for leaf in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]

    constants = [_describe(leaf, nodes) for leaf in leaves]
    name, device = f"{target._name}_{index}", torch.device("cuda", index)
    if target._name == _LAUNCH:
        keywords: Any = node.kwargs
        constants.append(_describe_kernel(keywords["kernel_idx"], keywords["constant_args_idx"]))
        kernel = _launching(call, device, name)
    else:
        kernel = run_on_device(call, device, name, ("tensors", "sizes"))
    has_floats = any(isinstance(each.meta.get("val"), torch.SymFloat) for each in sizes)
    schema = _SCHEMA.format(numbers="Scalar" if has_floats else "SymInt")
    op = _define(name, schema, repr((schema, spec, constants)), call, kernel)
    graph = node.graph
    with graph.inserting_before(node):
        replacement = graph.call_function(op, (tensors, sizes))
        replacement.meta = {**node.meta, "val": [results[position] for position in positions]}
        replacement.meta.pop("eager_input_vals", None)  # of the arguments of the replaced node
        items: list[Any] = list(results)
        for at, position in enumerate(positions):
            items[position] = graph.call_function(operator.getitem, (replacement, at))
            items[position].meta = {"val": results[position]}
    _replace(node, pytree.tree_unflatten(items, results_spec))
    return True


def _vmap_allowed() -> Any:
    """Enable vmap, which flex_attention uses, inside a dispatch mode, which excludes vmap's keys."""
    excluded = bindings.excluded_keys()
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode"):
        excluded = excluded.remove(getattr(bindings.DispatchKey, name))
    return bindings.with_keys(bindings.included_keys(), excluded)


def _is_graph(module: torch.fx.GraphModule, leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.fx.Node)
        and leaf.op == "get_attr"
        and isinstance(getattr(module, str(leaf.target), None), torch.fx.GraphModule)
    )


def _replace(node: torch.fx.Node, value: Any) -> None:
    """Replace the items that a graph takes from a node's result with the nodes of a nested tuple, and erase the node."""
    for user in list(node.users):
        if not isinstance(value, (tuple, list, dict)):
            break
        item = value[user.args[1]]  # type: ignore[index]  # pyright: ignore
        if isinstance(item, torch.fx.Node):
            user.replace_all_uses_with(item)
            user.graph.erase_node(user)
        else:
            _replace(user, item)
    if isinstance(value, torch.fx.Node):
        node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _describe(leaf: Any, nodes: list[torch.fx.Node]) -> Any:
    """Describe an argument for the op's name, which identifies the op's code in Inductor's cache and in this process."""
    if isinstance(leaf, torch.fx.Node):
        # Calls that differ only in which arguments are the same tensor need ops of their own.
        return "tensor" if isinstance(leaf.meta.get("val"), torch.Tensor) else "size", nodes.index(leaf)
    if isinstance(leaf, torch.fx.GraphModule):
        constants = [value.tolist() for value in (*leaf.parameters(), *leaf.buffers())]
        return leaf.print_readable(print_output=False), constants
    return repr(leaf)


def _describe_kernel(kernel_index: int, constants_index: int) -> Any:
    """Describe a kernel of a graph and its constant arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(kernel_index)
    configurations = [repr(vars(each)) for each in getattr(kernel, "configs", ())]
    while not hasattr(kernel, "cache_key"):  # below an autotuner
        kernel = kernel.fn
    return kernel.cache_key, configurations, repr(kernel_side_table.get_constant_args(constants_index))


def _launching(launch: Callable[..., Any], device: torch.device, name: str) -> Callable[..., Any]:
    """Return a function that launches a Triton kernel on CPU tensors, at once even if a stream captures."""
    run_now = run_on_device(launch, device, name, ("tensors", "sizes"), written=())

    def run(tensors: list[torch.Tensor], sizes: list[int]) -> Any:
        with tuning_on_copies(), torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                return run_now(tensors, sizes)
            with _beside_captures():
                return run_now(tensors, sizes)

    return run


@contextlib.contextmanager
def _beside_captures() -> Generator[None, None, None]:
    """Run what this thread launches at once although its stream captures."""
    mode = ctypes.c_int(_RELAXED)
    runtime.library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        make_stream: Any = torch.cuda.Stream
        with torch.cuda.stream(make_stream()):
            yield
    finally:
        runtime.library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _define(name: str, schema: str, description: str, function: Callable[..., Any], kernel: Callable[..., Any]) -> Any:
    name += "_" + hashlib.sha256(description.encode()).hexdigest()[:16]
    is_new = name not in _functions
    if is_new:
        library().define(name + schema)
        library().impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=library())
        _functions.add(name)
    op = getattr(torch.ops.simulated_gpu, name).default
    if is_new:
        let_inductor_call(op)
    return op


def let_generators_reach_device_ops() -> None:
    """Let ``graphsafe_run_with_rng_state`` call device ops although they take CPU tensors."""
    from torch._prims import rng_prims

    higher_order: Any = getattr(rng_prims, "graphsafe_run_with_rng_state", None)  # not in torch 2.6
    if higher_order is None:
        return
    keys = bindings.DispatchKey
    original, on_cuda = higher_order.py_kernels[keys.BackendSelect], higher_order.py_kernels[keys.CUDA]

    def select(op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        function = on_cuda if getattr(op, "namespace", None) == NAMESPACE else original
        return function(op, *args, rng_state=rng_state, **kwargs)

    higher_order.py_kernels[keys.BackendSelect] = select
    higher_order._dispatch_cache.clear()
