"""Ops that run on the simulated GPU inside code that was compiled for the CPU.

Such an op has the schema of a CUDA op and takes CPU tensors. It calls the CUDA op on CUDA tensors over the same memory and
copies the results. It is used for random ops, which draw from the GPU's generator, for ops without a CPU kernel, for
collectives, and for ops of other libraries, whose CUDA kernel may differ from their CPU kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops import bindings, runtime

__all__ = [
    "NAMESPACE",
    "alias_on",
    "cpu_arguments",
    "device_op",
    "let_inductor_call",
    "library",
    "run_on_device",
    "runs_on_device",
]

NAMESPACE = "simulated_gpu"
_COMPILED_NAMESPACES = ("prims", "inductor", "_inductor_test", "quantized_decomposed", NAMESPACE)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_DROPOUT_PROBABILITIES = ("dropout_p", "p")

_library: Any = None  # made at first use
_ops: dict[str, Any] = {}
_originals: dict[str, Any] = {}  # the CUDA op of each device op; a program may define an op of its own again


def runs_on_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op of a graph runs on the simulated GPU."""
    if not isinstance(op, bindings.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return not _draws_nothing(op, args, kwargs) or not _has_cpu_kernel(op)
    if op.namespace == "aten":
        return not _has_cpu_kernel(op)
    return op.namespace not in _COMPILED_NAMESPACES and op._opname != "wait_tensor"


def _has_cpu_kernel(op: Any) -> bool:
    return bindings.has_computed_kernel(op.name(), "CPU")


def _draws_nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op draws random numbers only for dropout, and its probability is zero."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name in _DROPOUT_PROBABILITIES:
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return isinstance(value, float) and value == 0.0 and "attention" in op.name()
    return False


def library() -> Any:
    """Return the library of the device ops."""
    global _library
    if _library is None:
        make: Any = torch.library.Library
        _library = make(NAMESPACE, "FRAGMENT")
    return _library


def cpu_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the places of the arguments that are CPU tensors, for an op in a graph traced on the GPU.

    A place is the name of the argument, or ``name_position`` for an item of a list.
    """
    places: list[str] = []

    def add(place: str, value: Any) -> None:
        tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            places.append(place)

    _map_arguments(add, _argument_names(op), args, kwargs)
    for name, index in kwargs.items():  # an op that changes its arguments, called by auto_functionalized_v2
        if (match := re.fullmatch("_(.+)_base_index", name)) and index is not None:
            add(match[1], kwargs["_all_bases"][index])
    return places


def _argument_names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _map_arguments(function: Callable[[str, Any], Any], names: Sequence[str], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call a function with the place and the value of each argument, and of each item of a list."""

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items: Any = value
            return [function(f"{name}_{position}", item) for position, item in enumerate(items)]
        return function(name, value)

    converted = [convert(name, value) for name, value in zip(names, args, strict=False)]
    return converted, {name: convert(name, value) for name, value in kwargs.items()}


def device_op(op: Any, index: int, on_cpu: Sequence[str] = ()) -> Any:
    """Return the op that runs a CUDA op on a GPU, takes and returns CPU tensors, and leaves some arguments on the CPU."""
    schema = str(op._schema)
    signature = schema[schema.index("(") :]
    name = re.sub(r"\W+", "_", "_".join([op.name(), str(index), *on_cpu]))
    if op.namespace != "aten":
        name += "_" + hashlib.sha256(signature.encode()).hexdigest()[:8]
    _originals[name] = op
    if name not in _ops:

        def newest(*args: Any, **kwargs: Any) -> Any:
            return _originals[name](*args, **kwargs)

        function = _waiting(op) if op.namespace in _COLLECTIVES else newest
        if op.namespace == "aten":
            function = _with_strides(op)
        library().define(name + signature, tags=tuple(op.tags))
        # Kernels that are not torch's take device memory only, and compiled code keeps what it computes in the CPU's.
        written = None
        if op.namespace != "aten" and op.namespace not in _COLLECTIVES:
            written = {each.name for each in op._schema.arguments if each.alias_info and each.alias_info.is_write}
        kernel = run_on_device(function, torch.device("cuda", index), op.name(), _argument_names(op), on_cpu, written)
        library().impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", newest, lib=library())
        _ops[name] = getattr(torch.ops.simulated_gpu, name).default
        let_inductor_call(_ops[name])
    return _ops[name]


def let_inductor_call(op: Any) -> None:
    """Register an op's lowering with Inductor: without ``config.implicit_fallbacks``, Inductor rejects ops that have none."""
    from torch._inductor import lowering

    functions: Any = lowering
    functions.make_fallback(op, functions.tag_to_layout_constraint(torch.Tag.needs_exact_strides), warn=False)


def _waiting(op: Any) -> Callable[..., Any]:
    """Return a collective that waits for its results."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, op(*args, **kwargs))

    return run


def _with_strides(op: Any) -> Callable[..., Any]:
    """Return an op whose results have the strides of its meta kernel's results, because compiled code relies on them."""
    known: dict[Any, list[Any]] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.size(), value.stride(), value.dtype
        return value if isinstance(value, Hashable) else None

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def strides(args: Any, kwargs: Any) -> list[Any]:
        key = tuple(map(describe, pytree.tree_leaves((args, kwargs))))
        if key not in known:
            try:
                meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
                results = pytree.tree_leaves(op(*meta_args, **meta_kwargs))
            except NotImplementedError:  # no meta kernel
                results = []
            known[key] = [each.stride() if isinstance(each, torch.Tensor) else None for each in results]
        return known[key]

    def run(*args: Any, **kwargs: Any) -> Any:
        results, spec = pytree.tree_flatten(op(*args, **kwargs))
        for position, stride in enumerate(strides(args, kwargs)):
            result = results[position]
            if isinstance(result, torch.Tensor) and stride is not None and result.stride() != stride:
                results[position] = torch.empty_strided(result.size(), stride, dtype=result.dtype, device=result.device).copy_(
                    result
                )
        return pytree.tree_unflatten(results, spec)

    return run


def run_on_device(
    function: Callable[..., Any],
    device: torch.device,
    name: str,
    arguments: Sequence[str],
    on_cpu: Sequence[str] = (),
    written: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls another one with CUDA tensors for its CPU tensors, and returns CPU tensors.

    With ``written``, the arguments that the function changes, it gets copies of what is not in the memory of the device.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of storages, by address, because arguments may overlap
        changed: set[int] = set()

        def to_device(place: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or place in on_cpu:
                return device if isinstance(value, torch.device) else value
            if written is None or not value.numel() or runtime.is_memory_of_gpus(value.data_ptr()):
                return alias_on(value, device)
            storage = value.untyped_storage()
            address = storage.data_ptr()
            if address not in copies:
                memory = torch.empty(0, dtype=torch.uint8, device=device)
                memory.set_(bindings.storage_at(address, device, storage.nbytes()))
                copies[address] = memory, memory.clone()
            if place in written or place.rpartition("_")[0] in written:
                changed.add(address)
            copy = torch.empty(0, dtype=value.dtype, device=device)
            return copy.set_(copies[address][1].untyped_storage(), value.storage_offset(), value.size(), value.stride())

        with torch.cuda.device(device):
            if runtime.wait_unless_capturing(device):
                raise NotImplementedError(f"{name} is not simulated in compiled code while a stream captures")
            args, kwargs = _map_arguments(to_device, arguments, args, kwargs)
            results = function(*args, **kwargs)
            for address in changed:
                memory, copy = copies[address]
                memory.copy_(copy)
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, results)

    return run


def alias_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of a device over the memory of a CPU tensor: simulated device memory is host memory."""
    if not tensor.numel():
        return tensor.to(device)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    storage = bindings.storage_at(tensor.data_ptr(), device, elements * tensor.element_size())
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, 0, tensor.size(), tensor.stride())
