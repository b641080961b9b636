"""What computing refuses is refused in a rehearsal, too: types that an op does not support, and indices that are out of range.

torch's shape rules check few types. So the CPU's kernel is called once for each combination of types, with tensors of at most
two elements a dimension; whatever else fails there does not matter. Indices are compared with sizes if their values are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ..ops import bindings
from ..ops.aliases import cpu_alias
from ..ops.error_texts import computes_wider, cuda_error
from ..ops.op import Op
from .known_values import KNOWN, state_of

_Tensor = torch.Tensor
# Other ops than pointwise ones whose kernels take tensors of any size. They get no sizes as numbers, and draw nothing.
_CHECKED = frozenset(
    (
        *("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "vdot", "_softmax", "_log_softmax", "native_layer_norm"),
        *("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "topk", "median", "mode", "nanmedian", "kthvalue"),
        *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward", "nll_loss2d_forward"),
        *("mean", "sum", "prod", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "amax", "amin", "argmax"),
        "argmin",
        *("_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex", "cat"),
        *("gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy", "embedding", "multi_margin_loss"),
    )
)
_ABOUT_TYPES = re.compile(
    r"not implemented for|d[- ]?type|scalar type|bool tensor|can't be cast|[Ee]xpected .* to be (Long|Int|Byte)"
    r"|without overflow"
)
_MOST_LENGTH = 2
_IGNORED = -100  # the default of losses


def check_types(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the error of the CPU's kernel if it does not support the types of the arguments."""
    is_pointwise = torch.Tag.pointwise in op.tags
    if op.is_random or op.is_foreach or not (is_pointwise or op.short_name.rstrip("_") in _CHECKED):
        return
    with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
        try:
            shrunk_args, shrunk_kwargs = [_shrunk(value) for value in args], {n: _shrunk(v) for n, v in kwargs.items()}
            op.compute(*shrunk_args, **shrunk_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            is_computed = _is_widened(op, (*args, *kwargs.values())) or computes_wider(op.short_name, error, args)
            if not _ABOUT_TYPES.search(str(error)) or is_computed:
                return
            raise cuda_error(op.short_name, error) from None


def _is_widened(op: Op, values: tuple[Any, ...]) -> bool:
    """Return whether CUDA's kernel supports the types nevertheless, or may do so: the CPU has few kernels for some."""
    tensors = [value for value in values if isinstance(value, _Tensor)]
    if any((tensor.itemsize == 1 and tensor.is_floating_point()) or tensor.dtype is torch.complex32 for tensor in tensors):
        return True
    return bool(tensors) and tensors[0].dtype in op.dtype_rules.widened


def _shrunk(value: Any) -> Any:
    if isinstance(value, _Tensor):
        if value.is_cpu:
            return value
        result = torch.zeros([min(length, _MOST_LENGTH) for length in value.shape], dtype=value.dtype, device="cpu")
        return result.conj() if value.is_conj() else result
    if isinstance(value, (list, tuple)):
        return [_shrunk(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


# ---- Indices. ----

_Arguments = dict[str, Any]
_Limits = list[tuple[torch.Tensor, int, int, int]]  # indices, the dimension, its least index and its size


def _along_dim(arguments: _Arguments) -> _Limits:
    tensor, dim = arguments["self"], arguments["dim"]
    return [(arguments["index"], dim, 0, tensor.size(dim))] if tensor.dim() else []


def _of_embedding(arguments: _Arguments) -> _Limits:
    return [(arguments["indices"], 0, 0, arguments["weight"].size(0))]


def _of_classes(arguments: _Arguments) -> _Limits:
    tensor, target = arguments["self"], arguments["target"]
    dim = min(1, tensor.dim() - 1)
    with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
        ignored = arguments.get("ignore_index", _IGNORED)
        if target.is_cuda and state_of((target,)) == KNOWN:
            values = cpu_alias(target)
            target = values[values != ignored]
    return [(target, dim, 0, tensor.size(dim))]


def _of_all(arguments: _Arguments) -> _Limits:
    count = arguments["self"].numel()
    return [(arguments["index"], 0, -count, count)]


def _of_dims(arguments: _Arguments) -> _Limits:
    tensor = arguments["self"]
    indices = [
        index if index is None or index.dtype not in (torch.bool, torch.uint8) else None for index in arguments["indices"]
    ]
    if len(indices) > tensor.dim() or any(index is not None and index.dtype is torch.bool for index in arguments["indices"]):
        return []  # a mask takes several dimensions
    return [(index, dim, -tensor.size(dim), tensor.size(dim)) for dim, index in enumerate(indices) if index is not None]


_LIMITS: dict[str, Callable[[_Arguments], _Limits]] = {
    **dict.fromkeys(("index_select", "gather", "scatter", "scatter_add", "scatter_reduce"), _along_dim),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce"), _along_dim),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"), _of_dims),
    **dict.fromkeys(("take", "put"), _of_all),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _of_classes),
    "embedding": _of_embedding,
}
_RUNTIME_ERRORS = frozenset(("gather", "scatter", "scatter_add", "scatter_reduce"))


def has_indices(op: Op) -> bool:
    """Return whether `check_indices` knows the indices of an op."""
    return op.short_name.rstrip("_") in _LIMITS


def check_indices(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the error of the CPU's kernel if an index is out of range whose value is known."""
    short_name = op.short_name.rstrip("_")
    for indices, dim, least, size in _LIMITS[short_name](op.bind(args, kwargs)):
        if not indices.numel() or state_of((indices,)) != KNOWN:
            continue
        with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
            values = cpu_alias(indices) if indices.is_cuda else indices
            smallest, largest = (int(each) for each in torch.aminmax(values))
        if smallest < least or largest >= size:
            kind = RuntimeError if short_name in _RUNTIME_ERRORS else IndexError
            wrong = largest if largest >= size else smallest
            raise kind(f"index {wrong} is out of bounds for dimension {dim} with size {size}")
