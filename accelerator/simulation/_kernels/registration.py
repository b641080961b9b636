"""Which ops of torch get kernels of ours, and how they get them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch

from .decompositions import CUDNN_SELECTION, DECOMPOSITIONS
from .dispatch import copy_kernel, kernel
from .ops import not_simulated

__all__ = ["install"]


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


# What allocates, what looks at tensors, what changes their sizes, what reads one number: torch's own on every device.
_TORCHS_OWN = frozenset(
    (
        "empty", "empty_strided", "set_", "resize_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory",
        "_assert_async", "is_set_to", "_efficientzerotensor", "_fused_sdp_choice",
    )
)  # fmt: skip
# These have one kernel for all devices, which looks inside for the device of its tensors.
_BESIDES = (
    *("aten::convolution", "aten::convolution_backward", "aten::_convolution"),
    *("aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_"),
    *("aten::conj_physical_", "aten::mode.values"),
)

# Of the kernels for sparse and nested tensors most do their work by dense ops; these have device code of their own.
_BY_PARTS = (
    (
        torch._C.DispatchKey.SparseCUDA,
        torch._C.DispatchKey.SparseCPU,
        _names(
            "_coalesce add.out sub.out addmm addmm_ addmm.out bmm bmm.out hspmm hspmm.out mul.out mul.Tensor mul_.Tensor"
            " mm mm.out mv sspaddmm.out _sparse_mask_projection sparse_mask _sparse_sparse_matmul _sparse_softmax"
            " _sparse_log_softmax _sparse_softmax_backward_data _sparse_log_softmax_backward_data _sparse_sum_backward"
            " add.Tensor add_.Tensor sub.Tensor sub_.Tensor index_select _to_dense div.Tensor div.out div_.Tensor any sum"
            " sum.dim_IntList"
        ),
    ),
    (
        torch._C.DispatchKey.SparseCsrCUDA,
        torch._C.DispatchKey.SparseCsrCPU,
        _names(
            "add.out add.Tensor add_.Tensor addmm addmm.out addmv.out baddbmm.out mm mm.out mv bmm.out triangular_solve.X"
            " _sparse_csr_sum.dim_dtype _sparse_csr_prod.dim_dtype sparse_sampled_addmm sparse_sampled_addmm.out mul.Tensor"
            " mul.out mul_.Tensor sparse_mask _to_dense _to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc"
            " _to_sparse_bsr _to_sparse_bsc select.int sum index_select _spsolve _sparse_mm_reduce_impl"
        ),
    ),
    (
        torch._C.DispatchKey.NestedTensorCUDA,
        torch._C.DispatchKey.NestedTensorCPU,
        _names("bmm bmm.out to_padded_tensor _nested_tensor_softmax_with_shape softmax.int _softmax native_layer_norm matmul"),
    ),
)

_libraries: list[Any] = []


def install() -> None:
    """Replace torch's CUDA kernels in this process. Initializes nothing."""
    _leave_out_those_in_python()
    library = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    with _overriding_in_silence():
        for name in _replaced():
            library.impl(name, torch._C.DispatchKey.CUDA, _kernel(name))
        library.impl("aten::copy_", torch._C.DispatchKey.CUDA, copy_kernel())
        for key, cpu_key, names in _BY_PARTS:
            for name in _registered(key) & names:
                library.impl(name, key, kernel(name, cpu_key))
    torch._C._set_cudnn_enabled(False)


def _leave_out_those_in_python() -> None:
    """Without the kernels that torch, from 2.11 on, has in languages that are compiled at the first call.

    torch registers them when it has loaded its plug-ins, which would put them before ours: so they are loaded here already.
    """
    if importlib.util.find_spec("torch._native") is not None:
        importlib.import_module("torch._native")
        importlib.import_module("torch._native.registry").deregister_op_overrides(disable_dispatch_keys="CUDA")


def _replaced() -> list[str]:
    names = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        if name.startswith("aten::") and name[6:].partition(".")[0] not in _TORCHS_OWN and not _is_view(name)
    ]
    known = set(torch._C._dispatch_get_all_op_names())
    return [*names, *filter(_stands_for_itself, _BESIDES), *(CUDNN_SELECTION.keys() & known - set(names))]


def _stands_for_itself(name: str) -> bool:
    """Whether a kernel may be given to an op beside the registered ones: autograd does not go through its parts."""
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _registered(key: torch._C.DispatchKey) -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key.name))


def _is_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    returns = torch._C._get_schema(base, overload).returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _kernel(name: str) -> Callable[..., Any]:
    if name in CUDNN_SELECTION:
        return CUDNN_SELECTION[name]
    if name in DECOMPOSITIONS or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        return kernel(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise not_simulated(name)

    return refuse


@contextlib.contextmanager
def _overriding_in_silence() -> Generator[None]:
    """Without torch 2.6's warning that a kernel is replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        yield
