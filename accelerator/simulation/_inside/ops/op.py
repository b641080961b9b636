"""What a kernel override knows about an op: its schema, the arguments it writes, and the CPU function that computes it."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import bindings, schemas
from .aliases import cpu_alias
from .bindings import DispatchKey
from .decompositions import DECOMPOSITIONS
from .dtypes import dtype_rules
from .error_texts import refused_host_scalars
from .kernel_memory import RESULT_MEMORY
from .library_texts import device_checks
from .shape_rules import RULES_OF_CUDA
from .waits import condition_of, host_mask_waits

_INDEXING = frozenset(
    ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put")
)
# Arguments of these ops may be CPU tensors: all of them, or those of these names.
_HOST_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_INDEXING, ("indices",)),
    **dict.fromkeys(("copy_", "set_", "_foreach_copy_", "_foreach_copy"), ()),
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward", "_pack_padded_sequence", "tensor_split"), ()),
    "bernoulli_": ("p",),
    # The state of the generator, which is on the host unless a graph was captured.
    **dict.fromkeys(
        (
            *("_efficient_attention_backward", "_scaled_dot_product_efficient_attention_backward"),
            *("_flash_attention_backward", "_scaled_dot_product_flash_attention_backward"),
        ),
        ("philox_seed", "philox_offset", "rng_state", "unused"),
    ),
}
_WITH_HOST_ARGUMENTS = ("_nested",)
# These ops check their devices in the kernel, and take no CPU tensors.
_CHECKED_BY_KERNEL = frozenset(("binary_cross_entropy", "binomial", "convolution", "_convolution"))


# The CUDA kernels of these ops wait for the stream, but torch does not tag all their overloads as data-dependent.
_DATA_DEPENDENT = frozenset(
    ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc", "_unique", "histc")
)
# These ops update running statistics beside returning new tensors. The schemas of some do not say so.
UPDATES_STATISTICS = frozenset(
    (
        "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "batch_norm_update_stats",
    )
)  # fmt: skip
SCALARS = (int, float, complex)  # bool is an int
# For these ops torch itself converts numbers into tensors.
_CONVERTS_SCALARS = frozenset(("add", "sub", "mul", "div", "floor_divide", "true_divide", "divide", "multiply", "subtract"))
_COMPOSITE_KEYS = (
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeImplicitAutograd,
)


def names_of_check(name: str, key: DispatchKey) -> set[str]:
    """Return what torch may call the function that checks the devices of an op's tensors before it calls the CUDA kernel."""
    base, _, overload = name.partition("::")[2].partition(".")
    # The name of a structured kernel ends with the overload, and others begin with it.
    structured = (f"{base}_{overload}", f"{base}_out_{overload}") if overload else (base,)
    prefix = f"wrapper_{key.name.replace('CPU', 'CUDA')}_"
    return {prefix + other for other in (*structured, f"{overload}_{base}", f"{overload}_{base}_out")}


def not_simulated(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not simulated")


def _registered_key(name: str, key: DispatchKey) -> DispatchKey:
    """Return the key under which the kernel for a key is registered: its own or a composite one."""
    for candidate in (key, *_COMPOSITE_KEYS):
        if bindings.has_kernel(name, candidate.name):
            return candidate
    raise not_simulated(name)


def _source_of(result: Any, written: dict[str, Any]) -> str | None:
    """Return the name of the argument that a result is, or None for a new tensor."""
    before = result.alias_info.before_set if result.alias_info is not None else set[str]()
    return next((name for name, argument in written.items() if argument.alias_info.before_set & before), None)


class Op:
    """One op of torch."""

    def __init__(self, name: str, key: DispatchKey = DispatchKey.CPU) -> None:
        self.name = name
        self.short_name = short_name = schemas.short_name(name)
        operator, by_key, tags = bindings.get_overload(*schemas.split(name))
        self.tags = frozenset(tags)
        self.schema = schema = schemas.schema_of(name)
        self.operator: Callable[..., Any] = operator
        decomposition = DECOMPOSITIONS.get(name)
        # The CPU's kernel itself. The dispatcher has already handled autograd, autocast and the like for the CUDA tensors.
        self.key = key
        self._kernel: Callable[..., Any] = decomposition or functools.partial(by_key, _registered_key(name, key))
        self.compute = self._compute
        self.is_decomposed = decomposition is not None
        self.names = [argument.name for argument in schema.arguments]
        written = {a.name: a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.written = frozenset(written)
        # The arguments that the op may resize. Only addbmm_ resizes in place.
        self.out = frozenset(n for n, a in written.items() if a.kwarg_only or short_name == "addbmm_")
        # For each result the name of the argument that it is, or None for a new tensor.
        self.results = [_source_of(result, written) for result in schema.returns]
        # Arguments that stay as they are if there is no memory for the results: CUDA's kernels allocate before they write.
        updates_statistics = short_name in UPDATES_STATISTICS
        self.state = frozenset(n for n in self.names if updates_statistics and n.startswith("running_"))
        self.has_generator = "generator" in self.names
        # A decomposition may take a generator even if the op does not.
        self.takes_generator = self.has_generator or (
            decomposition is not None and "generator" in inspect.signature(decomposition).parameters
        )
        self.is_random = self.has_generator or torch.Tag.nondeterministic_seeded in tags
        self._set_host_arguments(key)
        self._scalar_overloads: dict[frozenset[str], Op | None] = {}
        self.tensor_names = frozenset(a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))
        self.wait_condition = condition_of(short_name, self.tensor_names)
        self.dtype_rules = dtype_rules(short_name, key)
        self.is_copy = short_name == "copy_"
        self.is_foreach = short_name.startswith("_foreach_")
        self.is_dense = key == DispatchKey.CPU
        self.is_indexing = short_name in _INDEXING
        self.is_data_dependent = short_name in _DATA_DEPENDENT or bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
        )

    def _set_host_arguments(self, key: DispatchKey) -> None:
        of_op = () if self.short_name.startswith(_WITH_HOST_ARGUMENTS) else _HOST_ARGUMENTS.get(self.short_name)
        # The arguments that may be CPU tensors.
        self.host_arguments = frozenset(() if of_op is None else of_op or self.names) & {*self.names}
        # The arguments that may be CPU tensors without dimensions: TensorIterator takes them, unless torch has checked devices.
        checks = names_of_check(self.name, key) & device_checks()
        takes_none = self.short_name in _CHECKED_BY_KERNEL or bool(checks)
        self.host_scalars = frozenset(() if takes_none else {*self.names}.difference(refused_host_scalars(self.short_name)))
        # The function of torch that checks the devices of the op's tensors before it calls the CUDA kernel, if there is one.
        self.device_check = min(checks, default="")

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on the CPU."""
        return self._call(self._kernel, args, kwargs, lambda overload: overload.compute)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op with meta tensors."""
        return self._call(self.operator, args, kwargs, lambda overload: overload.operator)

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function_of: Callable[[Op], Callable[..., Any]],
    ) -> Any:
        """Call a function of this op, or that of its overload that takes numbers for some tensor arguments.

        If an op gets a number and a tensor, torch wraps the number into a tensor that does not decide the result's type. A
        kernel in Python gets a plain number instead.
        """
        tensors = self.tensor_names
        scalars = [n for n, v in zip(self.names, args, strict=False) if isinstance(v, SCALARS) and n in tensors]
        if kwargs:
            scalars += [n for n, v in kwargs.items() if isinstance(v, SCALARS) and n in tensors]
        # torch itself converts numbers for some ops.
        if not scalars or self.short_name.rstrip("_") in _CONVERTS_SCALARS:
            return function(*args, **kwargs)
        if (overload := self._scalar_overload(frozenset(scalars))) is not None:
            return function_of(overload)(*args, **kwargs)
        converted = [as_tensor(v) if n in scalars else v for n, v in zip(self.names, args, strict=False)]
        return function(*converted, **{n: as_tensor(v) if n in scalars else v for n, v in kwargs.items()})

    def waits_for_stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the host reads results, their sizes or error codes, so that a call waits for its stream."""
        if self.wait_condition is not None:
            return self.wait_condition(self.bind(args, kwargs))
        if self.is_indexing:
            return self._reads_indices(self.bind(args, kwargs), host_mask_waits())
        return self.reads_results(args, kwargs)

    def reads_results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the values of arguments decide the sizes of results, or the host gets a value."""
        if self.is_indexing:
            return self._reads_indices(self.bind(args, kwargs), True)
        # The host need not read the size of the output if the caller gives it.
        is_sized = self.short_name == "repeat_interleave" and self.bind(args, kwargs).get("output_size") is not None
        return self.is_data_dependent and not is_sized

    def _reads_indices(self, arguments: dict[str, Any], reads_host_masks: bool) -> bool:
        indices = [index for index in arguments["indices"] if index is not None]
        is_mask = [index.dtype in (torch.bool, torch.uint8) for index in indices]
        if any(index.is_cpu and (reads_host_masks or not mask) for index, mask in zip(indices, is_mask, strict=True)):
            return True  # torch first copies it to the device
        # A mask becomes indices, whose number the host reads.
        reads_masks = any(mask and not index.is_cpu for index, mask in zip(indices, is_mask, strict=True))
        values = arguments.get("values")
        if values is not None and values.is_cpu and values.numel() == 1 and not arguments.get("accumulate"):
            return reads_masks and not all(is_mask)  # torch fills through the masks and needs no indices
        return reads_masks

    def result_elements(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Return for each result how many elements its storage has at least."""
        elements = RESULT_MEMORY.get(self.name)
        if elements is None:
            return [0] * len(self.results)
        defaults = {a.name: a.default_value for a in self.schema.arguments if a.has_default_value()}
        return elements({**defaults, **self.bind(args, kwargs)})

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call draws random numbers. Without dropout, flash and memory-efficient attention draw none."""
        if not self.is_random or "dropout_p" not in self.names or "cudnn" in self.name:
            return self.is_random
        return bool(self.bind(args, kwargs).get("dropout_p"))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return schemas.bind(self.names, args, kwargs)

    def _scalar_overload(self, scalars: frozenset[str]) -> Op | None:
        """Return the overload that takes numbers for these arguments, or None."""
        if scalars not in self._scalar_overloads:
            self._scalar_overloads[scalars] = self._find_scalar_overload(scalars)
        return self._scalar_overloads[scalars]

    def _find_scalar_overload(self, scalars: frozenset[str]) -> Op | None:
        base, _ = schemas.split(self.name)
        for overload in bindings.get_overloads(base)[1]:
            arguments = bindings.get_schema(base, overload).arguments
            taken = {a.name for a in arguments if str(a.type) in ("number", "Optional[number]")}
            tensors = {a.name for a in arguments if "Tensor" in str(a.type)}
            if [a.name for a in arguments] != self.names or not scalars <= taken or tensors != {*self.tensor_names} - taken:
                continue
            try:
                return Op(f"{base}.{overload}" if overload else base, self.key)
            except NotImplementedError:
                continue
        return None

    def without_out(self) -> Op | None:
        """Return the overload that returns new tensors in place of the ``out=`` arguments, or None."""
        base, _ = schemas.split(self.name)
        names = [name for name in self.names if name not in self.out]
        for overload in bindings.get_overloads(base)[1]:
            schema = bindings.get_schema(base, overload)
            is_new = all(result.alias_info is None for result in schema.returns) and len(schema.returns) == len(self.results)
            if is_new and [argument.name for argument in schema.arguments] == names:
                types = [str(argument.type) for argument in schema.arguments]
                if types == [str(argument.type) for argument in self.schema.arguments if argument.name in names]:
                    return Op(f"{base}.{overload}" if overload else base, self.key)
        return None

    def infer_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the results and the arguments as meta tensors, which have sizes, strides and types.

        If torch has no meta kernel, the CPU computes on copies, whose values do not matter.
        """

        def compute(prepare: Callable[[Any], Any], function: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
            prepared_args = [prepare(value) for value in args]
            prepared_kwargs = {name: prepare(value) for name, value in kwargs.items()}
            return function(*prepared_args, **prepared_kwargs), self.bind(tuple(prepared_args), prepared_kwargs)

        import_dynamo()
        try:
            returned, arguments = compute(to_meta, RULES_OF_CUDA.get(self.name, self.operator))
        except NotImplementedError:
            returned, arguments = compute(_to_cpu_copy, self.compute)
        results = [] if not self.results else [returned] if len(self.results) == 1 else list(returned)
        return results, arguments


def _needs_torch_function_in_import() -> bool:
    source = Path(torch.__file__).parent / "_dynamo/variables/torch_function.py"
    return "\npopulate_builtin_to_tensor_fn_map()" in source.read_text(encoding="utf-8")


# Until torch 2.7, the import of Dynamo records which functions of tensors Python's operators call, and kernels disable that.
_HAS_TO_IMPORT_DYNAMO = _needs_torch_function_in_import()


def import_dynamo() -> None:
    """Import Dynamo if this torch cannot import it inside a kernel, as the shape rules of some ops do."""
    if _HAS_TO_IMPORT_DYNAMO and "torch._dynamo" not in sys.modules:
        with bindings.with_torch_function():
            importlib.import_module("torch._dynamo")


def as_tensor(value: complex) -> torch.Tensor:
    """Return a tensor of a number that a kernel in Python gets in place of a tensor."""
    return torch.scalar_tensor(value, dtype=_scalar_dtype(value), device="cpu")


def _scalar_dtype(value: complex) -> torch.dtype:
    if isinstance(value, (bool, int)):
        return torch.bool if isinstance(value, bool) else torch.int64
    default = torch.get_default_dtype()
    return default if isinstance(value, float) else default.to_complex()


def to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cuda":
            return value
        result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return result.conj() if value.is_conj() else result
    if isinstance(value, (list, tuple)):
        return [to_meta(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _to_cpu_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return cpu_alias(value).clone() if value.device.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return [_to_cpu_copy(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value
