"""The memory that CUDA's reductions take: partial results of blocks of threads, and inputs that they convert first.

A reduction over a dimension that is not the fastest in memory keeps partial results for each thread of all blocks that work on
one output. For the gradient of a bias they can exceed all other gradients of its layer. The sizes follow torch's
aten/src/ATen/native/cuda/Reduce.cuh, the types of partial results its Reduce*Kernel.cu, and conversions its ReduceOpsUtils.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

FEW_REDUCED = 2**17 - 1
"""Reductions of at most so many elements are made by one block for each output: each of its 512 threads adds 256 values."""

_MAX_THREADS = 512  # of a block
_WARP = 32
_MAX_VECTOR = 4  # outputs that one thread makes
_MIN_VALUES, _MAX_VALUES = 16, 256  # of one thread
_INT_MAX = 2**31 - 1  # torch splits reductions whose offsets are larger
_SEMAPHORE_BYTES = 4
_INDEX_BYTES = 8

_Arguments = dict[str, Any]
_Dim = tuple[int, int]  # size and stride, in elements


def memory_of_sum(tensor: torch.Tensor, dims: Any, dtype: torch.dtype | None = None) -> list[int]:
    """Return what ``sum`` takes."""
    if dtype is None:
        dtype = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64
    return _memory(tensor, dims, dtype, _accumulated_bytes(dtype))


def count_nonzero(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda: the sum of a mask"""
    tensor = arguments["self"]
    mask = torch.empty_strided(tensor.size(), tensor.stride(), dtype=torch.bool, device="meta")
    return [tensor.numel(), *_memory(mask, arguments.get("dim"), torch.int64, _accumulated_bytes(torch.int64))]


def _accumulated_bytes(dtype: torch.dtype) -> int:
    """Return the size of a number in the type in which CUDA's kernels add numbers of a type."""
    return max(dtype.itemsize, (8 if dtype.is_complex else 4) if dtype.is_floating_point or dtype.is_complex else 0)


def _memory(tensor: torch.Tensor, dims: Any, dtype: torch.dtype, partial_bytes: int) -> list[int]:
    """Return what a reduction takes that computes in a type and has partial results of a size."""
    if tensor.numel() <= FEW_REDUCED or tensor.layout is not torch.strided:
        return []
    # A kernel converts half types to float while it reads them.
    converts = dtype != tensor.dtype and not (dtype is torch.float32 and tensor.dtype in (torch.float16, torch.bfloat16))
    if dims is not None and not isinstance(dims, int):
        dims = tuple(dims)
    size, stride = tuple(tensor.size()), tensor.stride()
    element_bytes = dtype.itemsize if converts else tensor.element_size()
    is_aligned = converts or tensor.is_meta or tensor.data_ptr() // element_bytes % _MAX_VECTOR == 0
    max_threads = _MAX_THREADS // 2 if (dtype if converts else tensor.dtype) is torch.complex128 else _MAX_THREADS
    partial = _partial_results(
        size, stride, dims, element_bytes, is_aligned, max_threads, partial_bytes, *_processors(torch.cuda.current_device())
    )
    return [tensor.numel() * element_bytes, *partial] if converts else list(partial)


@functools.cache
def _processors(device: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.max_threads_per_multi_processor


@functools.lru_cache(4096)
def _partial_results(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dims: int | tuple[int, ...] | None,
    element_bytes: int,
    is_aligned: bool,
    max_threads: int,
    partial_bytes: int,
    processors: int,
    threads_per_processor: int,
) -> tuple[int, ...]:
    """Return the bytes of the partial results and of the semaphores of a reduction."""
    count = len(size)
    chosen = (dims,) if isinstance(dims, int) else dims
    is_reduced = [not chosen or dim in chosen or dim - count in chosen for dim in range(count)]
    # Outputs are contiguous, so the last dimension that is kept is the fastest of them.
    kept = _merge([(size[dim], stride[dim]) for dim in reversed(range(count)) if size[dim] > 1 and not is_reduced[dim]])
    others = [(size[dim], stride[dim]) for dim in range(count) if size[dim] > 1 and is_reduced[dim]]
    reduced = _merge(sorted(others, key=lambda each: each[1]))
    if not kept or not reduced or reduced[0][1] < kept[0][1]:
        return ()  # along the fastest dimension: one partial result for each block
    _split(kept, reduced, element_bytes)
    outputs, inputs = math.prod(each[0] for each in kept), math.prod(each[0] for each in reduced)
    vector = 1
    if kept[0][1] == 1:
        vector = _MAX_VECTOR if is_aligned else 1
        while any(number % vector for number in (kept[0][0], *(each[1] for each in (*kept[1:], *reduced)))):
            vector //= 2
    max_threads //= vector
    width_limit, height_limit = (_last_power(number, max_threads) for number in (outputs // vector, inputs))
    height = min(height_limit, max_threads // min(width_limit, _WARP))
    width = min(width_limit, max_threads // height)
    if inputs < min(height * _MIN_VALUES, _MAX_VALUES):
        return ()  # each thread has an output of its own
    values = -(-inputs // height)
    grid = -(-(outputs // vector) // width)
    target = processors * (threads_per_processor // (width * height))
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    return (partial_bytes * outputs * blocks * width * vector, _SEMAPHORE_BYTES * grid) if blocks > 1 else ()


def _last_power(number: int, most: int) -> int:
    """Return the largest power of two that is at most a number."""
    return most if number >= most else 1 << (max(number, 1).bit_length() - 1)


def _merge(dims: list[_Dim]) -> list[_Dim]:
    """Return dimensions from the fastest to the slowest, of which those that follow each other in memory are one."""
    merged: list[_Dim] = []
    for size, stride in dims:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return merged


def _split(kept: list[_Dim], reduced: list[_Dim], element_bytes: int) -> None:
    """Halve the dimension of the largest extent until 32 bits hold all offsets, as torch does."""
    while sum((size - 1) * stride for size, stride in (*kept, *reduced)) * element_bytes > _INT_MAX:
        dims = max((kept, reduced), key=lambda dims: max((size - 1) * stride for size, stride in dims))
        place = max(range(len(dims)), key=lambda place: (dims[place][0] - 1) * dims[place][1])
        size, stride = dims[place]
        dims[place] = size - size // 2, stride


def _reduction(partial_bytes: Callable[[torch.dtype], int], converts: bool = False) -> Callable[[_Arguments], list[int]]:
    """Return the row of a reduction.

    Args:
        partial_bytes: The size of a partial result of a type.
        converts: Whether the reduction computes in the type of its result.
    """

    def row(arguments: _Arguments) -> list[int]:
        tensor, dims = arguments["self"], arguments.get("dim")
        dtype = tensor.dtype
        if converts:
            out = arguments.get("out")
            dtype = arguments.get("dtype") or (out.dtype if out is not None else dtype)
        return _memory(tensor, dims, dtype, partial_bytes(dtype))

    return row


def _sum(arguments: _Arguments) -> list[int]:
    out = arguments.get("out")
    dtype = arguments.get("dtype") or (out.dtype if out is not None else None)
    return memory_of_sum(arguments["self"], arguments.get("dim"), dtype)


def _norm_bytes(dtype: torch.dtype) -> int:
    return max(dtype.itemsize // (2 if dtype.is_complex else 1), 4)


def _welford_bytes(dtype: torch.dtype) -> int:
    """WelfordData of SharedReduceOps.h: mean and sum of squares in the accumulating type, an integer and a float."""
    return 32 if dtype is torch.float64 else 16


def _pair_bytes(dtype: torch.dtype) -> int:
    """A value and its index, aligned."""
    return 2 * _INDEX_BYTES


_ELEMENT = _reduction(lambda dtype: dtype.itemsize)
_MEAN = _reduction(_accumulated_bytes, converts=True)
_NORM = _reduction(_norm_bytes)
_VARIANCE = _reduction(_welford_bytes)
_INDEXED = _reduction(_pair_bytes)
REDUCTIONS: dict[str, Callable[[_Arguments], list[int]]] = {
    f"aten::{name}": row
    for names, row in (
        ("sum.dim_IntList sum.IntList_out nansum nansum.out prod prod.dim_int prod.int_out", _sum),
        ("mean.dim mean.out", _MEAN),
        ("amax amax.out amin amin.out any.dim any.out any.dims any.dims_out all.dim all.out all.dims all.dims_out", _ELEMENT),
        ("linalg_vector_norm linalg_vector_norm.out norm.ScalarOpt_dim norm.out", _NORM),
        ("norm.ScalarOpt_dim_dtype norm.dtype_out", _NORM),
        ("var.correction var.correction_out std.correction std.correction_out", _VARIANCE),
        ("var_mean.correction std_mean.correction", _VARIANCE),
        ("max.dim max.dim_max min.dim min.dim_min argmax argmax.out argmin argmin.out", _INDEXED),
        ("count_nonzero.dim_IntList", count_nonzero),
    )
    for name in names.split()
}
"""What reductions of more than ``FEW_REDUCED`` elements take."""

ALWAYS_TAKE_MEMORY = frozenset(("aten::count_nonzero.dim_IntList",))
"""Those that take memory along the fastest dimension, too."""
