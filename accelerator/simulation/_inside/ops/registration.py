"""Registers the kernel overrides with torch's dispatcher."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from . import accesses, bindings, dispatch, random
from .argument_checks import with_argument_checks
from .bindings import DispatchKey
from .compositions import with_compositions
from .decompositions import CUDNN_SELECTION, DECOMPOSITIONS, separate_flag
from .determinism import alert_for
from .dtypes import report_newer_torch
from .engine import OVERRIDE_KEY, engine, with_memory
from .op import not_simulated
from .recurrent_checks import RECURRENT_NETS, recurrent_net
from .schemas import schema_of, short_name
from .version_counters import with_versions
from .workspaces import release_with_torch, with_workspace


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


# torch's own kernels work: these ops allocate, describe or resize tensors, or read one number.
_NOT_OVERRIDDEN = frozenset(
    (
        "empty", "empty_strided", "set_", "resize_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory",
        "is_set_to", "_efficientzerotensor", "_fused_sdp_choice",
    )
)  # fmt: skip
# These have one kernel for all devices, and its code depends on the device.
_COMPOSITE_WITH_DEVICE_CODE = (
    *("aten::convolution", "aten::convolution_backward", "aten::_convolution"),
    *("aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_"),
    *("aten::conj_physical_", "aten::mode.values"),
)

# Most kernels of sparse, nested and quantized tensors call dense ops. These have device code of their own.
_OTHER_LAYOUTS = (
    (
        DispatchKey.SparseCUDA,
        DispatchKey.SparseCPU,
        _names(
            "_coalesce add.out sub.out addmm addmm_ addmm.out bmm bmm.out hspmm hspmm.out mul.out mul.Tensor mul_.Tensor"
            " mm mm.out mv _sparse_mask_projection sparse_mask _sparse_sparse_matmul _sparse_softmax"
            " _sparse_log_softmax _sparse_softmax_backward_data _sparse_log_softmax_backward_data _sparse_sum_backward"
            " add.Tensor add_.Tensor sub.Tensor sub_.Tensor index_select _to_dense div.Tensor div.out div_.Tensor any sum"
            " sum.dim_IntList"
        ),
    ),
    (
        DispatchKey.SparseCsrCUDA,
        DispatchKey.SparseCsrCPU,
        _names(
            "add.out add.Tensor add_.Tensor addmm addmm.out addmv.out baddbmm.out mm mm.out mv bmm.out triangular_solve.X"
            " _sparse_csr_sum.dim_dtype _sparse_csr_prod.dim_dtype sparse_sampled_addmm sparse_sampled_addmm.out mul.Tensor"
            " mul.out mul_.Tensor sparse_mask _to_dense _to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc"
            " _to_sparse_bsr _to_sparse_bsc select.int sum index_select _sparse_mm_reduce_impl"
        ),
    ),
    (
        DispatchKey.NestedTensorCUDA,
        DispatchKey.NestedTensorCPU,
        _names(
            "bmm bmm.out to_padded_tensor _nested_tensor_softmax_with_shape softmax.int _softmax native_layer_norm matmul"
            " native_layer_norm_backward _transform_bias_rescale_qkv"
        ),
    ),
    (
        DispatchKey.QuantizedCUDA,
        DispatchKey.QuantizedCPU,
        _names(
            "_adaptive_avg_pool2d _index_put_impl_ clone dequantize.self fill_.Scalar fill_.Tensor flip gelu index_select"
            " index_select.out int_repr masked_fill_.Scalar masked_fill_.Tensor max.dim min.dim quantized_max_pool2d relu relu_"
        ),
    ),
)

# What kernel overrides do beside computing, from the inside to the outside.
_EXTENSIONS = (with_versions, with_memory, with_compositions, with_workspace, with_argument_checks, alert_for)

_libraries: list[Any] = []


class Overrides(NamedTuple):
    """What makes the kernel overrides of a process: of one that computes, unless others are given."""

    make: Callable[..., Callable[..., Any]] = dispatch.kernel_override
    make_copy: Callable[..., Callable[..., Any]] = dispatch.copy_override
    of_empty: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    """Overrides of ops for which torch's own kernels work otherwise."""
    extensions: tuple[Callable[[str, Callable[..., Any]], Callable[..., Any]], ...] = ()
    """What overrides do beside that, the outermost last."""


def install(overrides: Overrides | None = None) -> None:
    """Replace torch's CUDA kernels in this process. Initializes nothing."""
    make, make_copy, of_empty, extensions = overrides or Overrides()
    report_newer_torch()
    if accesses.FINDS_RACES:
        accesses.install()
    _remove_python_kernels()
    library = bindings.make_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    with _without_override_warning():
        for name in _names_to_override():
            if _has_override(name):
                _register(library, name, _extended(name, make(name), (*_EXTENSIONS, *extensions)))
            else:
                library.impl(name, DispatchKey.CUDA, CUDNN_SELECTION.get(name) or _not_simulated(name))
        for name in RECURRENT_NETS:
            for key in (DispatchKey.CUDA, DispatchKey.AutogradCUDA):
                library.impl(name, key, recurrent_net(name))
        _register(library, "aten::copy_", make_copy())
        for name, override in of_empty.items():
            library.impl(name, DispatchKey.CUDA, _extended(name, override, extensions))
        library.impl("aten::copy_", DispatchKey.QuantizedCUDA, make_copy(DispatchKey.QuantizedCPU))
        for key, cpu_key, names in _OTHER_LAYOUTS:
            for name in _registered(key) & names:
                library.impl(name, key, make(name, cpu_key))
    # Renews torch's CPU threads in a forked child, before two threads do it at once: one of them would get an error.
    bindings.call_once_initialized(torch.get_num_threads)
    random.track_registrations()
    release_with_torch(engine.release_workspaces if engine is not None else lambda: None)
    separate_flag()
    bindings.allow_fuser(False)  # the fuser compiles CUDA kernels at run time


def _extended(name: str, override: Callable[..., Any], extensions: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    for extend in extensions:
        override = extend(name, override)
    return override


def _remove_python_kernels() -> None:
    """Remove the CUDA kernels that torch 2.11 and later compile from Python at the first call.

    torch registers them after it has loaded its plug-ins. That would replace the overrides, so this loads them first.
    """
    registry = bindings.python_kernels()
    if registry is not None:
        registry.deregister_op_overrides(disable_dispatch_keys="CUDA")


def _names_to_override() -> list[str]:
    names = [
        name
        for name in bindings.op_names_of_key("CUDA")
        if name.startswith("aten::") and short_name(name) not in _NOT_OVERRIDDEN and not _is_view(name)
    ]
    known = set(bindings.all_op_names())
    return [*names, *filter(_has_autograd_formula, _COMPOSITE_WITH_DEVICE_CODE), *(CUDNN_SELECTION.keys() & known - set(names))]


def _has_autograd_formula(name: str) -> bool:
    """Return whether autograd has a formula for the op itself, so that the op may be overridden as a whole."""
    return not bindings.has_kernel(name, "CompositeImplicitAutograd")


def _registered(key: DispatchKey) -> set[str]:
    return set(bindings.op_names_of_key(key.name))


def _is_view(name: str) -> bool:
    returns = schema_of(name).returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _has_override(name: str) -> bool:
    has_kernel = name in DECOMPOSITIONS or bindings.has_computed_kernel(name, "CPU")
    return has_kernel and name not in CUDNN_SELECTION


def _register(library: Any, name: str, override: Callable[..., Any]) -> None:
    """Register an op's kernel override in Python: with the engine, under the key at which the engine finds it."""
    if engine is None:
        library.impl(name, DispatchKey.CUDA, override)
        return
    library.impl(name, OVERRIDE_KEY, override)
    engine.override(name)
    if accesses.FINDS_RACES and (flags := accesses.flags_of(name)):
        engine.describe_races(name, flags)


def _not_simulated(name: str) -> Callable[..., Any]:
    def raise_not_simulated(*args: Any, **kwargs: Any) -> Any:
        raise not_simulated(name)

    return raise_not_simulated


@contextlib.contextmanager
def _without_override_warning() -> Generator[None]:
    """Suppress torch 2.6's warning that a kernel is replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        yield
