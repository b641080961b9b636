"""The memory that CUDA's kernels take from torch's allocator beyond that of their results.

Nothing reads it here. It counts in the figures, as on a GPU. Each row names the source from which its sizes were read: a file
of https://github.com/pytorch/pytorch or of https://github.com/NVIDIA/cudnn-frontend.

``KERNEL_MEMORY`` is what a kernel takes while it runs. An op's kernel override allocates it after its results, and frees it at
once. Rows are here if the memory can exceed 1 % of a training's peak; ``reduction_memory`` has those of reductions. Scans, the
backward of norms and the other loss functions take less: partial sums for each block of threads, or for each channel.

``RESULT_MEMORY`` is what results hold: a kernel that allocates a large result and resizes it leaves the result's storage large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import bindings
from .reduction_memory import FEW_REDUCED, REDUCTIONS, memory_of_sum
from .schemas import binder, schema_of

_Arguments = dict[str, Any]
_FLOAT_BYTES = 4
_FLASH_ROWS = 128  # of a tile
_FEW_INDICES = 3072  # which embedding's backward handles without sorting
_ROWS_PER_THREAD = 10
_SHORT_SORT = 4096  # elements that are sorted in place
_LONG_SORT = 1_000_000  # elements of which each row is sorted alone
_FEW_ROWS = 128  # that are sorted together, as pairs of row and position
_PAIR_BYTES = 8
_MODE_MAX = 2  # of embedding bags
_FEW_LOSSES = 2**16  # elements of a loss before its reduction: less than 1 % of any training's peak
_NO_REDUCTION = 0
_FEW_ELEMENTS = 2**16  # of other arguments
# Each of up to so many slices is split among blocks if it has at least a length.
_SPLIT_SLICES = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400))
_FEW_TO_SELECT = 2**18  # elements from which topk selects with little memory
_SELECTING_BLOCKS, _SELECTING_THREADS, _DIGITS = 6, 256, 256  # blocks of a processor, threads of a block, numbers of 8 bits


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(
    batch: int, queries: int, keys: int, heads: int, key_heads: int, features: int, element_bytes: int
) -> list[int]:
    rows = _round_up(queries, _FLASH_ROWS)
    rounded_features = _round_up(features, 32) if features <= 192 else 256
    softmax_d = batch * heads * rows * _FLOAT_BYTES
    splits = 1
    if bindings.is_deterministic():
        processors = torch.cuda.get_device_properties().multi_processor_count
        splits = (processors + batch * heads - 1) // (batch * heads)
    dq_accum = splits * batch * rows * heads * rounded_features * _FLOAT_BYTES
    expanded = batch * keys * heads * features * element_bytes if key_heads != heads else 0
    return [softmax_d, dq_accum, expanded, expanded]


def _flash_attention_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd and mha_varlen_bwd"""
    query, key = arguments["query"], arguments["key"]
    if query.dim() == 3:  # packed sequences: (all queries, heads, features)
        sequences = arguments["cum_seq_q"].numel() - 1
        queries = arguments["max_q"]
        rows = _round_up(queries, _FLASH_ROWS)
        heads, features = query.size(1), query.size(2)
        rounded_features = _round_up(features, 32) if features <= 192 else 256
        expanded = key.size(0) * heads * features * key.element_size() if key.size(1) != heads else 0
        dq_accum = (query.size(0) + _FLASH_ROWS * sequences) * heads * rounded_features * _FLOAT_BYTES
        return [sequences * heads * rows * _FLOAT_BYTES, dq_accum, expanded, expanded]
    batch, queries, heads, features = query.shape
    return _flash_backward(batch, queries, key.size(1), heads, key.size(2), features, query.element_size())


def _sdpa_flash_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"""
    query, key = arguments["query"], arguments["key"]
    batch, heads, queries, features = query.shape
    return _flash_backward(batch, queries, key.size(2), heads, key.size(1), features, query.element_size())


def _cudnn_attention_backward(arguments: _Arguments) -> list[int]:
    """include/cudnn_frontend/node/scaled_dot_product_flash_attention.h of cudnn-frontend, called by native/cudnn/MHA.cpp"""
    batch, heads, queries, features = arguments["query"].shape
    return [batch * heads * queries * (features + 1) * _FLOAT_BYTES]  # one workspace for the sums of dq and of the softmax


def _embedding_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu"""
    if arguments["indices"].numel() <= _FEW_INDICES and not arguments["scale_grad_by_freq"]:
        return []
    return _embedding_sums(arguments["grad_output"], arguments)


def _embedding_bag_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/EmbeddingBag.cu and EmbeddingBackwardKernel.cu"""
    is_sum = arguments["mode"] != _MODE_MAX and not arguments.get("sparse")
    return _embedding_sums(arguments["grad"], arguments) if is_sum else []


def _embedding_sums(grad: torch.Tensor, arguments: _Arguments) -> list[int]:
    indices = arguments["indices"]
    count, index_bytes = indices.numel(), indices.element_size()
    segments = min(count, arguments["num_weights"])
    partial_segments = count // _ROWS_PER_THREAD + segments
    sums = partial_segments * grad.size(-1) * max(grad.element_size(), _FLOAT_BYTES)
    # Sorted and original indices, the offsets of segments and of their parts, and the sums of the parts.
    return [*(count * index_bytes,) * 3, *(segments * index_bytes,) * 2, partial_segments * index_bytes, sums]


def _sort(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Sort.cpp and SortStable.cu; cub sorts from one copy of keys and values to another"""
    values, dim = arguments["self"], arguments["dim"]
    count = values.numel()
    if not count or not values.dim() or values.size(dim) <= _SHORT_SORT:
        return []
    length, key_bytes, index_bytes = values.size(dim), values.element_size(), torch.int64.itemsize
    copies = [] if values.stride(dim) == 1 else [count * key_bytes, count * key_bytes, count * index_bytes]
    if count == length or length >= _LONG_SORT:
        return [*copies, length * index_bytes, length * (key_bytes + index_bytes)]
    if count // length < _FEW_ROWS:
        return [*copies, *(count * _PAIR_BYTES,) * 2, count * key_bytes, count * (key_bytes + _PAIR_BYTES)]
    return [*copies, count * index_bytes, count * (key_bytes + index_bytes)]


def _ctc_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta"""
    return [arguments["log_alpha"].nbytes]


def _cdist_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, cdist_backward_kernel_impl"""
    x1, x2 = arguments["x1"], arguments["x2"]
    return [x1.nbytes * x2.size(-2)] if arguments["p"] else []


def _pdist_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, pdist_backward_kernel_impl"""
    points = arguments["self"]
    return [points.nbytes * (points.size(0) - 1)] if arguments["p"] and points.numel() else []


def _count_pairs(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the number of elements of two tensors that are broadcast together."""
    return math.prod(torch.broadcast_shapes(first.shape, second.shape))  # type: ignore[no-untyped-call]


def _loss(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/BinaryOps.cpp and Loss.cpp: the losses of all elements, which are then reduced"""
    values, target = arguments["self"], arguments["target"]
    if arguments["reduction"] == _NO_REDUCTION or values.numel() <= _FEW_LOSSES:
        return []
    return [_count_pairs(values, target) * torch.result_type(values, target).itemsize]


def _unique(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/UniqueCub.cu: sorted values, positions before and after the sort, and numbers of segments"""
    values = arguments["self"]
    if values.dtype is torch.bool:
        return []
    positions = values.numel() * torch.int64.itemsize if arguments.get("return_inverse") else 0
    return [values.nbytes, positions, positions, positions]


def _softmax_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: the product of gradient and output"""
    return [arguments["output"].nbytes]


def _convolution_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/Convolution.cpp: the sum that is the bias's gradient, after the other gradients"""
    grad = arguments["grad_output"]
    dims = [0, *range(2, grad.dim())]
    return memory_of_sum(grad, dims) if arguments["output_mask"][2] else []


def _median(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Sorting.cpp, median_impl: all values, sorted"""
    values = arguments["self"]
    flat = torch.empty(values.numel(), dtype=values.dtype, device="meta")
    return [values.nbytes, values.numel() * torch.int64.itemsize, *_sort({"self": flat, "dim": 0})]


def _mode(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/TensorModeKernel.cpp, mode_kernel_impl: the dimension has to be the last"""
    values = arguments["self"]
    return [] if not values.dim() or values.transpose(arguments["dim"], -1).is_contiguous() else [values.nbytes]


def _is_split(slices: int, length: int) -> bool:
    """Return whether several blocks look for the largest values of one slice: should_use_multiblock of TensorTopK.cu."""
    return length >= next(least for most, least in _SPLIT_SLICES if slices <= most)


def _top(values: torch.Tensor, dim: int) -> list[int]:
    """aten/src/ATen/native/cuda/TensorTopK.cu, mbtopk::launch"""
    if values.numel() <= _FEW_TO_SELECT:
        return []
    length = values.size(dim)
    slices = values.numel() // length
    if not _is_split(slices, length):
        return []
    processors = torch.cuda.get_device_properties(values.device).multi_processor_count
    per_thread = -(-values.numel() // (processors * _SELECTING_BLOCKS * _SELECTING_THREADS))
    blocks = slices * -(-length // (min(max(per_thread, 4), 64) * _SELECTING_THREADS))
    counts = [blocks * _DIGITS * 2, slices * _DIGITS * 4, blocks * 4, blocks * 4]
    return [slices * values.element_size(), *(slices * 8,) * 2, slices * 4, *counts]


def _topk(arguments: _Arguments) -> list[int]:
    values = arguments["self"]
    return [_copy_of(values), *_top(values, arguments["dim"])]


def _multinomial(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/Distributions.cpp, multinomial_out: as many random numbers, of which the largest are chosen"""
    weights, count = arguments["self"], arguments["num_samples"]
    if arguments["replacement"] and count > 1:
        return []
    return [weights.nbytes, *(_top(weights, -1) if count > 1 else ())]


def _index_put(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel: linear indices, sorted with their positions"""
    indices = [index for index in arguments["indices"] if index is not None]
    is_sorted = arguments["accumulate"] or bindings.is_deterministic()
    if not is_sorted or not indices or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]
    index_bytes = math.prod(shape) * torch.int64.itemsize
    return [*(index_bytes,) * 4, 2 * index_bytes]


def _im2col(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Im2Col.cu, im2col_cuda: the result begins as large as the argument"""
    values = arguments["self"]
    area = math.prod(arguments["kernel_size"])
    return [values.nbytes] if area > 1 else []


def _copy_of(tensor: torch.Tensor) -> int:
    """Return the size of a contiguous copy, or 0 if the tensor is contiguous."""
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _adaptive_max_pool(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/AdaptiveMaxPooling2d.cu: contiguous argument and results, which are copied to the results"""
    values = arguments["self"]
    if values.is_contiguous():
        return []
    outputs = math.prod(values.shape[:-2]) * math.prod(arguments["output_size"])
    return [values.nbytes, outputs * values.element_size(), outputs * torch.int64.itemsize]


def _adaptive_max_pool_backward(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/AdaptiveMaxPooling2d.cu"""
    return [_copy_of(arguments[name]) for name in ("self", "grad_output", "indices")]


def _antialias(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/UpSampleBilinear2d.cu, upsample_gen2d_aa_out_cuda_template"""
    values = arguments["self"]
    if values.is_contiguous():
        return []
    return [values.nbytes, math.prod((*values.shape[:2], *arguments["output_size"])) * values.element_size()]


def _contiguous_gradient(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/UpSampleBilinear2d.cu and UpSampleBicubic2d.cu"""
    return [_copy_of(arguments["grad_output"])]


KERNEL_MEMORY: dict[str, Callable[[_Arguments], list[int]]] = {
    **REDUCTIONS,
    "aten::median": _median,
    "aten::nanmedian": _median,
    "aten::mode": _mode,
    "aten::topk": _topk,
    "aten::topk.values": _topk,
    "aten::multinomial": _multinomial,
    "aten::multinomial.out": _multinomial,
    "aten::_index_put_impl_": _index_put,
    "aten::im2col": _im2col,
    "aten::adaptive_max_pool2d": _adaptive_max_pool,
    "aten::adaptive_max_pool2d_backward": _adaptive_max_pool_backward,
    "aten::_upsample_bilinear2d_aa": _antialias,
    "aten::_upsample_bilinear2d_aa_backward": _contiguous_gradient,
    "aten::_upsample_bicubic2d_aa": _antialias,
    "aten::_upsample_bicubic2d_aa_backward": _contiguous_gradient,
    "aten::upsample_bicubic2d_backward": _contiguous_gradient,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_softmax_backward_data.out": _softmax_backward,
    "aten::convolution_backward": _convolution_backward,
    "aten::_flash_attention_backward": _flash_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
    "aten::_embedding_bag_dense_backward": _embedding_bag_backward,
    "aten::sort.stable": _sort,
    "aten::sort.values_stable": _sort,
    "aten::_ctc_loss_backward": _ctc_backward,
    "aten::_ctc_loss_backward.Tensor": _ctc_backward,
    "aten::_cdist_backward": _cdist_backward,
    "aten::_pdist_backward": _pdist_backward,
    "aten::mse_loss": _loss,
    "aten::mse_loss.out": _loss,
    "aten::smooth_l1_loss": _loss,
    "aten::smooth_l1_loss.out": _loss,
    "aten::huber_loss": _loss,
    "aten::huber_loss.out": _loss,
    "aten::_unique": _unique,
    "aten::_unique2": _unique,
}


def _result_of_loss(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/BinaryOps.cpp; binary cross entropy: cuda/Loss.cu: as many elements as before the reduction"""
    return [_count_pairs(arguments["self"], arguments["target"])]


def _results_of_unique(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/UniqueCub.cu: as many values and counts as the argument has elements"""
    values = arguments["self"]
    if arguments.get("dim") is not None:
        return [0, 0, 0]
    count = min(values.numel(), 2) if values.dtype is torch.bool else values.numel()
    results = [count, 0]  # the inverse has the argument's size
    return results if "return_counts" not in arguments else [*results, count if arguments["return_counts"] else 0]


def _result_like_argument(arguments: _Arguments) -> list[int]:
    """aten/src/ATen/native/cuda/Im2Col.cu and Col2Im.cu: empty_like(input), resized"""
    return [arguments["self"].numel()]


RESULT_MEMORY: dict[str, Callable[[_Arguments], list[int]]] = {
    "aten::im2col": _result_like_argument,
    "aten::col2im": _result_like_argument,
    "aten::mse_loss": _result_of_loss,
    "aten::smooth_l1_loss": _result_of_loss,
    "aten::binary_cross_entropy": _result_of_loss,
    "aten::_unique": _results_of_unique,
    "aten::_unique2": _results_of_unique,
    "aten::unique_consecutive": _results_of_unique,
}
"""For each new result, the number of elements that its storage has at least."""

CPU_HAS_RESULT_MEMORY = frozenset(("aten::mse_loss", "aten::smooth_l1_loss", "aten::binary_cross_entropy"))
"""The results of these ops have large storages on the CPU, too: the engine keeps them."""


class FewElements(NamedTuple):
    """Calls whose ``argument`` has at most ``most`` elements and whose ``flag``, if there is one, is false.

    ``only_if`` may name another flag or a list of flags: also all calls in which it, or its last flag, is false.
    """

    argument: str
    most: int
    flag: str = ""
    only_if: str = ""


WITHOUT_MEMORY = {
    "aten::embedding_dense_backward": FewElements("indices", _FEW_INDICES, "scale_grad_by_freq"),
    **dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"), FewElements("self", _FEW_LOSSES)),
    **dict.fromkeys(REDUCTIONS, FewElements("self", FEW_REDUCED)),
    **dict.fromkeys(("aten::median", "aten::nanmedian", "aten::mode"), FewElements("self", _FEW_ELEMENTS)),
    **dict.fromkeys(("aten::topk", "aten::topk.values"), FewElements("self", _FEW_TO_SELECT)),
    **dict.fromkeys(("aten::multinomial", "aten::multinomial.out"), FewElements("self", _FEW_ELEMENTS)),
    "aten::_index_put_impl_": FewElements("values", _FEW_ELEMENTS // 2, only_if="accumulate"),
    **dict.fromkeys(
        (
            *("aten::adaptive_max_pool2d", "aten::adaptive_max_pool2d_backward"),
            *("aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa"),
        ),
        FewElements("self", _FEW_ELEMENTS),
    ),
    **dict.fromkeys(
        (
            *("aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward"),
            "aten::upsample_bicubic2d_backward",
        ),
        FewElements("grad_output", _FEW_ELEMENTS),
    ),
    "aten::convolution_backward": FewElements("grad_output", FEW_REDUCED, only_if="output_mask"),
}
"""The calls of these ops that take no memory, so that the engine handles them."""

COPIES_OF_RESULT = frozenset(("aten::_softmax_backward_data", "aten::_softmax_backward_data.out"))
"""These ops take memory of their result's size in all calls. The engine allocates it."""


def with_kernel_memory(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override that allocates what the op's CUDA kernel does, if the table has it."""
    if name not in KERNEL_MEMORY:
        return override
    sizes_of = memory_sizes(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = override(*args, **kwargs)
        take_together(*sizes_of(args, kwargs))
        return result

    return run


def memory_sizes(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[list[int], torch.device]]:
    """Return a function of an op's calls: the sizes of what CUDA's kernel allocates, and the device."""
    sizes_of = KERNEL_MEMORY[name]
    bind = binder(name)
    defaults = {each.name: each.default_value for each in schema_of(name).arguments if each.has_default_value()}
    few = WITHOUT_MEMORY.get(name)
    if few is not None and few.flag:
        few = None  # its row looks at the flag

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], torch.device]:
        arguments = {**defaults, **bind(args, kwargs)}
        # The first argument is None if autograd has no gradient of the output.
        device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
        if few is not None and arguments[few.argument].numel() <= few.most:
            return [], device
        return [size for size in sizes_of(arguments) if size], device

    return run


def take_together(sizes: list[int], device: torch.device) -> None:
    """Allocate memory of these sizes, and free it."""
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    held.clear()
