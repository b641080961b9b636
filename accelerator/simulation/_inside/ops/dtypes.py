"""The types that CUDA's kernels support, by op, where they differ from the CPU's, and the error for others.

Each table in ``dtypes.json`` is named after the first version of torch that it describes. CUDA refuses some types that the
CPU's kernel supports. It supports others that the CPU's kernel does not support: those are computed in a wider type and rounded
once. Tests generate the tables from PyTorch's operator database (``python -m tests.simulation.ops.make_dtype_tables``).
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import NamedTuple

import torch

from ..._build.cache import announce_once
from ..._settings.torch_versions import NEWEST_TORCH, release
from .bindings import DispatchKey


class DtypeRules(NamedTuple):
    """The types that an op refuses on CUDA, and those that are computed in a wider type."""

    refused: frozenset[torch.dtype] = frozenset()
    widened: frozenset[torch.dtype] = frozenset()


# The name that CUDA's error contains, if it differs from the op's name.
ERROR_NAMES = {
    "mm": "addmm_cuda",
    "addbmm": "addmm_cuda",
    "addmm": "addmm_cuda",
    "_addmm_activation": "addmm_cuda",
    "bmm": "baddbmm_cuda",
    "baddbmm": "baddbmm_cuda",
    "mv": "addmv_impl_cuda",
    "addmv": "addmv_impl_cuda",
    "abs": "abs_cuda",
    "addcmul": "addcmul_cuda",
    "cumprod": "cumprod_cuda",
    "index": "index_cuda",
    "_unsafe_index": "index_cuda",
    "linalg_vector_norm": "norm_cuda",
    "mul": "mul_cuda",
    "bitwise_and": "bitwise_and_cuda",
    "bitwise_or": "bitwise_or_cuda",
    "bitwise_xor": "bitwise_xor_cuda",
    "roll": "roll_cuda",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "max_pool3d_with_indices": "max_pool3d_with_indices_out_frame",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "avg_pool3d": "avg_pool3d_out_cuda",
    "igamma": "igamma_cuda",
    "igammac": "igammac_cuda",
    "upsample_bilinear2d": "upsample_bilinear2d_out_frame",
    "upsample_bicubic2d": "upsample_bicubic2d_out_frame",
    "_upsample_bicubic2d_aa": "upsample_bilinear2d_out_frame",
    "_upsample_bilinear2d_aa": "upsample_bilinear2d_out_frame",
    "native_dropout": "fused_dropout",
    "native_dropout_backward": "masked_scale",
    "scatter_reduce": "cuda_scatter_gather_base_kernel_func",
    "scatter_value": "cuda_scatter_fill_base_kernel_func",
    "triangular_solve": "triangular_solve_out_sparse_csr_cuda_impl",  # of compressed matrices
}
_SCALAR_TYPE_NAMES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_FLOAT8_TYPES = frozenset(getattr(torch, name) for name in dir(torch) if re.fullmatch(r"float8_e\d+m\d+\w*", name))
_UNSIGNED_TYPES = frozenset((torch.uint16, torch.uint32, torch.uint64))
TYPES_WITHOUT_PRODUCTS = _UNSIGNED_TYPES | _FLOAT8_TYPES
"""CUDA's pointwise kernels of products and bits do not support these."""
_SCALAR_TYPE_NAMES.update({dtype: str(dtype).removeprefix("torch.").capitalize() for dtype in _FLOAT8_TYPES})
_SCALAR_TYPE_NAMES.update({dtype: str(dtype).removeprefix("torch.").replace("uint", "UInt") for dtype in _UNSIGNED_TYPES})
_BY_CUDNN = frozenset(("convolution", "_convolution"))

# The CPU multiplies compressed sparse matrices (CSR, BSR) only in float and double; the database has few samples of them.
_PRODUCTS = frozenset(("addmm", "addmv", "baddbmm", "bmm", "mm", "mv"))
_HALF_TYPES = frozenset((torch.float16, torch.bfloat16))

# Measured on an H100 with torch 2.11: the database does not say which of these types CUDA supports.
_COMPLEX_HALF = frozenset((torch.complex32,))
_ALSO_REFUSED = {
    **dict.fromkeys(("mm", "addmm", "_addmm_activation", "addbmm", "abs", "linalg_vector_norm"), _FLOAT8_TYPES),
    **dict.fromkeys(("addcmul", "cumprod"), _COMPLEX_HALF),
    **dict.fromkeys(("index", "_unsafe_index"), _UNSIGNED_TYPES),
    "native_dropout_backward": frozenset((torch.complex32, torch.complex64, torch.complex128)),
}
_MOVED_TYPES = _FLOAT8_TYPES | _UNSIGNED_TYPES | _COMPLEX_HALF
_ALSO_WIDENED = {
    **dict.fromkeys(("gather", "scatter", "flip", "index_select", "channel_shuffle", "eye"), _MOVED_TYPES),
    **dict.fromkeys(("isin", "count_nonzero"), _FLOAT8_TYPES | _UNSIGNED_TYPES),
    "trace": _UNSIGNED_TYPES,
    **dict.fromkeys(("median", "nanmedian"), frozenset((torch.bool,))),
    **dict.fromkeys(("equal", "ldexp"), _COMPLEX_HALF),
}

_WIDE_INTEGERS = {"histc": torch.float64}  # the CPU's kernel supports no integers
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
    **dict.fromkeys(_UNSIGNED_TYPES, torch.int64),
    **dict.fromkeys(_FLOAT8_TYPES, torch.float32),
}
# The CPU has almost no kernels for this type, which results from Fourier transforms of bfloat16.
WITHOUT_KERNELS: torch.dtype | None = getattr(torch, "bcomplex32", None)
if WITHOUT_KERNELS is not None:
    _WIDE[WITHOUT_KERNELS] = torch.complex64


def report_newer_torch() -> None:
    """Say once for each cache directory that the installed torch is newer than the tables, whose newest one is used then."""
    version = ".".join(map(str, release(torch.__version__)))
    if release(torch.__version__) > NEWEST_TORCH:
        known = ".".join(map(str, NEWEST_TORCH))
        announce_once(
            f"accelerator/newer-torch-{version}",
            f"torch {version} is newer than {known}, which simulated GPUs follow: the types that an op refuses may differ",
        )


@functools.cache
def _table() -> dict[str, DtypeRules]:
    """Return the rules by op of the newest table that is not newer than this torch, or of the oldest."""
    with open(os.path.join(os.path.dirname(__file__), "dtypes.json"), encoding="utf-8") as file:
        tables = {release(name): table for name, table in json.load(file).items()}
    version = max((v for v in tables if v <= release(torch.__version__)), default=min(tables))
    refused, widened = (_by_op(tables[version][part]) for part in ("refused", "widened"))
    none: frozenset[torch.dtype] = frozenset()
    rules = {name: DtypeRules(refused.get(name, none), widened.get(name, none)) for name in {*refused, *widened}}
    for name in {*_ALSO_REFUSED, *_ALSO_WIDENED}:
        rule, also_refused = rules.get(name, DtypeRules()), _ALSO_REFUSED.get(name, none)
        also_widened = _ALSO_WIDENED.get(name, none)
        rules[name] = DtypeRules(rule.refused | also_refused, (rule.widened | also_widened) - also_refused)
    return rules


def _by_op(ops_by_dtypes: dict[str, str]) -> dict[str, frozenset[torch.dtype]]:
    """Return the types by op from a table that groups ops by their types."""
    by_op: dict[str, frozenset[torch.dtype]] = {}
    for dtypes, names in ops_by_dtypes.items():
        supported = frozenset(getattr(torch, name) for name in dtypes.split() if hasattr(torch, name))
        by_op.update(dict.fromkeys(names.split(), supported))
    return by_op


def dtype_rules(short_name: str, key: DispatchKey = DispatchKey.CPU) -> DtypeRules:
    """Return the rules of an op, which its variants in place and with out= share."""
    base_name = short_name.removesuffix("_")
    rules = _table().get(short_name) or _table().get(base_name, DtypeRules())
    if key == DispatchKey.SparseCPU and base_name == "_sparse_sparse_matmul":
        return rules._replace(widened=_HALF_TYPES)
    if key == DispatchKey.SparseCsrCPU and base_name in _PRODUCTS:
        return rules._replace(widened=_HALF_TYPES)
    if key == DispatchKey.SparseCsrCPU and base_name == "triangular_solve":
        return DtypeRules(refused=_HALF_TYPES)
    return rules


def scalar_type_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type in errors, such as "Half"."""
    return _SCALAR_TYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def raise_unsupported_dtype(short_name: str, dtype: torch.dtype) -> None:
    """Raise CUDA's error for a type that an op does not support."""
    short_name = short_name.removesuffix("_")
    type_name = _SCALAR_TYPE_NAMES[dtype]
    if short_name in _BY_CUDNN:
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {type_name}")
    raise NotImplementedError(f"\"{ERROR_NAMES.get(short_name, short_name)}\" not implemented for '{type_name}'")


def widen(dtype: torch.dtype, first: torch.dtype, short_name: str) -> torch.dtype:
    """Return the type to which an op converts an argument of a type, if the type of its first tensor is widened."""
    if dtype == first and not (dtype.is_floating_point or dtype.is_complex):
        return _WIDE_INTEGERS.get(short_name, torch.int64)
    is_narrow = dtype.is_floating_point or dtype.is_complex
    return _WIDE.get(dtype, dtype) if is_narrow and (first.is_floating_point or first.is_complex) else dtype
