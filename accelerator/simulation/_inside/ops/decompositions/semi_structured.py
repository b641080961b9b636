"""Products of 2:4 sparse matrices, in the formats of CUTLASS (values and metadata) and cuSPARSELt (one compressed matrix)."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT8 = torch.float8_e4m3fn
_COMPRESSED = (torch.int8, torch.float16, torch.bfloat16, torch.float32, _FLOAT8)
_BITS_OF_PAIR = 4  # two positions of two bits, for each group of four values


def _dense(values: Tensor, meta: Tensor) -> Tensor:
    from torch.sparse import _semi_structured_conversions as conversions

    dense: Tensor = conversions.sparse_semi_structured_to_dense_cutlass(values, meta)  # type: ignore[no-untyped-call]
    return dense


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in the type that the GPU accumulates in: int32 for integers, else float32."""
    wide = torch.float32 if left.dtype.is_floating_point else torch.int32
    return left.to(wide) @ right.to(wide)


def sparse_mm(mat1: Tensor, mat1_meta: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    return _wide_product(_dense(mat1, mat1_meta), mat2).to(out_dtype or mat2.dtype)


def sparse_addmm(
    input: Tensor,
    mat1: Tensor,
    mat1_meta: Tensor,
    mat2: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    product = _wide_product(_dense(mat1, mat1_meta), mat2) * alpha
    if beta != 0:
        # The input has one value for each row of the result.
        product = product + input.to(product.dtype).reshape(-1, 1) * beta
    return product.to(out_dtype or mat2.dtype)


def compressed_columns(dtype: torch.dtype, columns: int) -> int:
    """Return the columns of a compressed matrix: half for the values, the rest for their positions."""
    return columns * (10 if dtype.itemsize == 1 else 9) // 16


def cslt_compress(input: Tensor) -> Tensor:
    """Compress as cuSPARSELt does in size; the order inside is this module's, as cuSPARSELt documents none.

    A row holds the two values of each group of four, then their positions. If a group has more than two values, the first two
    are kept. torch before 2.11 flattens the rows, but reads only their number of elements.
    """
    if input.dtype not in _COMPRESSED:
        raise RuntimeError("Unsupported dtype for cuSPARSELt/hipSparseLt compressed matrix")
    rows, columns = input.shape
    if columns % 8:
        raise NotImplementedError(f"aten::_cslt_compress of {columns} columns, no multiple of 8, is not simulated")
    groups = input.reshape(rows, -1, 4)
    is_zero = (groups.float() == 0).to(torch.uint8)
    positions = is_zero.argsort(dim=-1, stable=True)[..., :2].sort(-1).values
    values = groups.view(_bits(input.dtype)).gather(-1, positions).view(torch.uint8).reshape(rows, -1)
    pairs = (positions[..., 0] | positions[..., 1] << 2).reshape(rows, -1, 2)
    metadata = (pairs[..., 0] | pairs[..., 1] << _BITS_OF_PAIR).to(torch.uint8)
    compressed = torch.zeros(rows, compressed_columns(input.dtype, columns) * input.itemsize, dtype=torch.uint8)
    compressed[:, : values.size(1)] = values
    compressed[:, values.size(1) : values.size(1) + metadata.size(1)] = metadata
    return compressed.view(input.dtype)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Return the integer type of the same size, which every kernel of the CPU supports."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def _decompress(compressed: Tensor, columns: int) -> Tensor:
    rows = compressed.numel() // compressed_columns(compressed.dtype, columns)
    content = compressed.reshape(rows, -1).view(torch.uint8)
    size = columns // 2 * compressed.itemsize
    values = content[:, :size].view(_bits(compressed.dtype)).reshape(rows, -1, 2)
    metadata = content[:, size : size + columns // 8].to(torch.int64)
    pairs = torch.stack((metadata & 15, metadata >> _BITS_OF_PAIR), -1).reshape(rows, -1)
    positions = torch.stack((pairs & 3, pairs >> 2), -1)
    dense = torch.zeros(rows, columns // 4, 4, dtype=values.dtype).scatter_(-1, positions, values)
    return dense.view(compressed.dtype).reshape(rows, columns)


def cslt_mm(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    alg_id: int = 0,
    split_k: int = 1,
    split_k_option: int = -1,
) -> Tensor:
    is_eight_bit = compressed_A.itemsize == 1
    if out_dtype is not None and not is_eight_bit:
        raise RuntimeError("out_dtype support only available for int8/fp8 inputs")
    product = _wide_product(_decompress(compressed_A, dense_B.size(0)), dense_B)
    if alpha is not None:
        product = product * alpha.float().reshape(-1, 1)
    if bias is not None:
        # One value for each row of the result.
        product = product + bias.to(product.dtype).reshape(-1, 1)
    dtype = out_dtype or dense_B.dtype
    if dtype == torch.int8:
        product = product.round().clamp(-128, 127) if product.is_floating_point() else product.clamp(-128, 127)
    result = product.to(dtype)
    return result.t().contiguous() if transpose_result else result


def cslt_mm_search(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
) -> int:
    return 0  # the default algorithm


DECOMPOSITIONS = {
    "aten::_sparse_semi_structured_mm": sparse_mm,
    "aten::_sparse_semi_structured_addmm": sparse_addmm,
    "aten::_cslt_compress": cslt_compress,
    "aten::_cslt_sparse_mm": cslt_mm,
    "aten::_cslt_sparse_mm_search": cslt_mm_search,
}
