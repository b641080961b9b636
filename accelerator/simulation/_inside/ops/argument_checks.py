"""Checks of CUDA's kernels that depend on more than the type of the first tensor.

The texts follow torch's sources, such as ScatterGatherKernel.cu and Blas.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .dtypes import TYPES_WITHOUT_PRODUCTS, raise_unsupported_dtype, scalar_type_name
from .error_texts import HOST_SCALARS, in_cuda_library, refused_host_scalars
from .schemas import binder, short_name

_Arguments = dict[str, Any]
_MOST_DIMENSIONS = 25
_INT_MAX = 2**31 - 1
_SMALL_SORT = 4096
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_HAS_SECOND_SCALED_MM = hasattr(torch.ops.aten, "_scaled_mm_v2")
_BLAS_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.float16: "at::Half",
    torch.bfloat16: "at::BFloat16",
}
_WITHOUT_PRODUCTS = frozenset((torch.bool, torch.complex64, torch.complex128))


def _check_scatter(arguments: _Arguments) -> None:
    """For bool and complex numbers, CUDA supports only sums in scatter."""
    tensor = arguments["self"]
    if tensor.dtype in _WITHOUT_PRODUCTS and arguments.get("reduce") in ("multiply", "prod", "amax", "amin", "mean"):
        fills = isinstance(arguments.get("value"), (bool, int, float, complex))
        raise_unsupported_dtype("scatter_value" if fills else "scatter_reduce", tensor.dtype)


def _require(condition: bool, *text: object, error: type[Exception] = RuntimeError) -> None:
    """Raise CUDA's error if a condition is not met, and CUDA's libraries have the first part of its text."""
    if not condition and in_cuda_library(str(text[0])):
        raise error("".join(map(str, text)))


# ---- Products. ----


def _check_scaled_mm(arguments: _Arguments) -> None:
    left, right = arguments["self"], arguments["mat2"]
    is_second = "recipe_a" in arguments
    device_error = NotImplementedError if is_second else RuntimeError
    if torch.cuda.get_device_capability(left.device) < (8, 9):
        raise device_error(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )
    error = ValueError if is_second else RuntimeError
    out, bias = arguments.get("out"), arguments.get("bias")
    if left.dim() != 2 or right.dim() != 2:
        if is_second:
            return  # the CPU's kernel has this check
        raise RuntimeError(f"mat{1 if left.dim() != 2 else 2} must be a matrix")
    (rows, inner), (other, columns) = left.shape, right.shape
    if inner != other or not left.numel() or not right.numel():
        if inner != other and not is_second:
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows}x{inner} and {other}x{columns})")
        return
    if not is_second:
        _check_scales(left, right, arguments["scale_a"], arguments["scale_b"])
        length = columns if bias is None else bias.numel()
        _require(length == columns, "Bias must be size ", columns, " but got ", length)
    factor = 2 if left.dtype is _FLOAT4 else 1
    mat1, mat2 = f"{rows}x{factor * inner}", f"{other}x{columns}"
    text = "Expected trailing dimension of mat1 to be divisible by 16 "
    _require(factor * inner % 16 == 0, text, f"but got mat1 shape: ({mat1}).", error=error)
    _require(columns % 16 == 0, "mat2 shape (", mat2, ") must be divisible by 16", error=error)
    if out is not None:
        _require(arguments.get("out_dtype") in (None, out.dtype), "out_dtype must match output matrix type", error=error)
    both_e5m2 = left.dtype is right.dtype is torch.float8_e5m2
    text = "Multiplication of two Float8_e5m2 matrices is not supported"
    _require(not both_e5m2, text, error=ValueError if _HAS_SECOND_SCALED_MM else RuntimeError)
    if bias is not None:
        dtype = out.dtype if out is not None else arguments.get("out_dtype") or (torch.bfloat16 if is_second else left.dtype)
        half, bfloat16 = torch.float16, torch.bfloat16
        name, given = (scalar_type_name(each) for each in (dtype, bias.dtype))
        is_bfloat16 = dtype in (torch.float32, bfloat16)
        text = "Bias is not supported when out_dtype is set to Float32"
        _require(dtype is not torch.float32, text, error=error)
        _require(bias.dtype in (half, bfloat16), "Bias must be BFloat16 or Half, but got ", given, error=error)
        text = f" output, but got {given}"
        _require(not is_bfloat16 or bias.dtype is bfloat16, "Bias must be BFloat16 to compute ", name, text, error=error)
        _require(dtype is not half or bias.dtype is half, "Bias must be Float16 to compute ", name, text, error=error)
    has_layouts = left.stride(1) == 1 and right.stride(0) == 1
    _require(has_layouts, "Only multiplication of row-major and column-major matrices is supported by cuBLASLt")


def _check_scales(left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor) -> None:
    """Raise CUDA's error if the scales are neither of tensors nor of rows nor of blocks."""
    (rows, inner), columns = left.shape, right.size(1)
    blocks = [-(-extent // 128) for extent in (rows, inner, columns)]
    sizes = left_scale.shape, right_scale.shape
    known = [
        ((rows, 1), (1, columns)),
        ((rows, blocks[1]), (blocks[1], columns)),
        ((blocks[0], blocks[1]), (blocks[1], columns)),
        ((rows, blocks[1]), (blocks[1], blocks[2])),
    ]
    are_float8 = all(matrix.dtype.itemsize == 1 and matrix.dtype.is_floating_point for matrix in (left, right))
    are_float = are_float8 and left_scale.dtype is right_scale.dtype is torch.float32
    if are_float and (left_scale.numel() == right_scale.numel() == 1 or sizes in known):
        return
    if are_float8 and any(scale.dtype.itemsize == 1 for scale in (left_scale, right_scale)):
        return  # blocks of 16 or 32
    _require(
        False,
        "Invalid scaling configuration.\n- For TensorWise scaling, a and b should be float8, scales should be float and"
        " singletons.",
        f"\n- For RowWise scaling, a and b should be float8, scales should be float, scale_a should be ({rows}, 1) and scale_b"
        f" should be (1, {columns}), and both should be contiguous.\nGot",
        *(
            f" {name}.dtype()={scalar_type_name(scale.dtype)}, {name}.size()={list(scale.shape)}"
            for name, scale in (("scale_a", left_scale), ("scale_b", right_scale))
        ),
    )


def _check_int_mm(arguments: _Arguments) -> None:
    left, right = arguments["self"], arguments["mat2"]
    for name, matrix in (("self", left), ("mat2", right)):
        _require(matrix.dim() == 2, f"Expected {name} to be of dimension 2 but got ", matrix.dim())
    if left.dim() != 2 or right.dim() != 2:
        return  # the CPU's kernel has this check
    (rows, inner), (other, columns) = left.shape, right.shape
    multiple = " needs to be greater than 0 and a multiple of 8, but got "
    _require(rows > 16, "self.size(0) needs to be greater than 16, but got ", rows)
    _require(inner > 0 and inner % 8 == 0, f"self.size(1){multiple}", inner)
    _require(inner == other, "self.size(1) needs to match mat2.size(0) but got ", inner, " and ", other)
    _require(columns > 0 and columns % 8 == 0, f"mat2.size(1){multiple}", columns)


def _check_blas(function: str, left: str, right: str) -> Callable[[_Arguments], None]:
    """Return a check that a product's sizes are integers of 32 bits, as cuBLAS takes them. Its matrices are transposed."""

    def check(arguments: _Arguments) -> None:
        first, second = arguments[left], arguments[right]
        name = _BLAS_TYPES.get(first.dtype)
        if name is None or min(first.dim(), second.dim()) < 2:
            return
        for size, value in (("m", second.size(-1)), ("n", first.size(-2)), ("k", second.size(-2))):
            text = f"at::cuda::blas::{function}<{name}> argument {size} must be non-negative and less than "
            _require(value <= _INT_MAX, text, _INT_MAX, " but got ", value)

    return check


# ---- Sizes and dimensions. ----


def _check_sort(arguments: _Arguments) -> None:
    tensor = arguments["self"]
    _require(not tensor.is_complex(), "Sort currently does not support complex dtypes on CUDA.")
    size = tensor.size(arguments.get("dim", -1)) if tensor.dim() else 1
    _require(size <= _INT_MAX, "The dimension being sorted can not have more than INT_MAX elements.")
    if size <= _SMALL_SORT:  # larger ones are sorted by cub
        _check_dimensions(arguments)


def _check_dimensions(arguments: _Arguments) -> None:
    """Raise the error of torch's TensorInfo.cuh, despite its text, for a tensor of 25 dimensions."""
    if arguments["self"].dim() >= _MOST_DIMENSIONS and arguments["self"].numel():
        raise RuntimeError(f"CUDA Tensors cannot have more than {_MOST_DIMENSIONS} dimensions")


def _check_dropout(arguments: _Arguments) -> None:
    if arguments.get("train") and 0 < arguments["p"] < 1:
        _check_dimensions({"self": arguments["input"]})


def _at_most_dimensions(*text: str) -> Callable[[_Arguments], None]:
    """Return a check of dimensions that a kernel makes before it describes its tensors."""

    def check(arguments: _Arguments) -> None:
        _require(arguments["self"].dim() <= _MOST_DIMENSIONS, *text)
        _check_dimensions(arguments)

    return check


def _check_nonzero(arguments: _Arguments) -> None:
    text = "nonzero is not supported for tensor with more than "
    _require(arguments["self"].dim() <= _MOST_DIMENSIONS, text, _MOST_DIMENSIONS, " dimensions")
    text = "nonzero is not supported for tensors with more than INT_MAX elements"
    _require(arguments["self"].numel() < _INT_MAX, text)


def _check_kthvalue(arguments: _Arguments) -> None:
    tensor, dim = arguments["self"], arguments.get("dim", -1)
    if tensor.dim():
        size, dim = tensor.size(dim), dim % tensor.dim()
        if size > _INT_MAX and in_cuda_library("). The current CUDA implementation supports dimension sizes up to "):
            raise RuntimeError(
                f"kthvalue(): dimension {dim} is too large ({size}). The current CUDA implementation supports dimension sizes"
                f" up to {_INT_MAX}"
            )
    _at_most_dimensions("cannot operate on more than ", f"{_MOST_DIMENSIONS} dimensions")(arguments)


def _check_unique(arguments: _Arguments) -> None:
    count = arguments["self"].numel()
    if count > _INT_MAX and in_cuda_library(" is too big to for CUB"):
        raise RuntimeError(f"num_inp {count} is too big to for CUB")


def _check_multinomial(arguments: _Arguments) -> None:
    if arguments["self"].dim() and arguments["self"].size(-1) > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_normalized(arguments: _Arguments) -> None:
    tensor = arguments["input"]
    elements = math.prod(arguments["normalized_shape"])
    rows = tensor.numel() // elements if elements else 0
    request = ",   file a support request to support bigger "
    _require(rows <= _INT_MAX, f"M should be less than maximum CUDA grid size{request}batches")
    if "grad_out" in arguments:
        text = f"Normalized shape should have less than INT_MAX elements{request}normalized shapes"
        _require(elements <= _INT_MAX, text)


def _check_padding(arguments: _Arguments) -> None:
    for name, text in (("self", "input"), ("grad_output", "output gradient")):
        tensor = arguments.get(name)
        if tensor is not None:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            fits = tensor.numel() < _INT_MAX and last < _INT_MAX
            _require(fits or not tensor.numel(), f"{text} tensor must fit into 32-bit index math")


# ---- Other arguments. ----


def _check_addcmul(arguments: _Arguments) -> None:
    for name in refused_host_scalars("addcmul"):
        if _is_host_scalar(arguments[name]):
            swap = " However, CPU Scalar support for tensor2 is supported, please swap your tensor1 and tensor2 terms."
            text = HOST_SCALARS.format(name, "addcmul")
            raise RuntimeError(text + (swap if name == "tensor1" else ""))


def _is_host_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu and not value.dim()


def _check_spatial_loss(arguments: _Arguments) -> None:
    for name, dims, text in (
        ("target", 3, "only batches of spatial targets supported (3D tensors) but got targets of size: : "),
        ("self", 4, "only batches of spatial inputs supported (4D tensors), but got input of size: "),
    ):
        _require(arguments[name].dim() == dims, text, list(arguments[name].shape))


def _check_ldl_solve(arguments: _Arguments) -> None:
    is_refused = arguments.get("hermitian") and arguments["LD"].is_complex()
    _require(not is_refused, "torch.linalg.ldl_solve: complex tensors with hermitian=True flag are not supported on CUDA.")


def _check_product(name: str) -> Callable[[_Arguments], None]:
    """Return a check of the type in which an op of two tensors or numbers computes."""

    def check(arguments: _Arguments) -> None:
        dtype = torch.result_type(arguments["self"], arguments["other"])
        if dtype in TYPES_WITHOUT_PRODUCTS:
            raise_unsupported_dtype(name, dtype)

    return check


def _both(first: Callable[[_Arguments], None], second: Callable[[_Arguments], None]) -> Callable[[_Arguments], None]:
    def check(arguments: _Arguments) -> None:
        first(arguments)
        second(arguments)

    return check


def _check_elements(name: str) -> Callable[[_Arguments], None]:
    """Return a check of the first tensor's type that a tensor without elements passes."""

    def check(arguments: _Arguments) -> None:
        tensor = arguments["self"]
        if tensor.dtype in TYPES_WITHOUT_PRODUCTS and tensor.numel():
            raise_unsupported_dtype(name, tensor.dtype)

    return check


def _check_median(arguments: _Arguments) -> None:
    if "dim" not in arguments:
        return
    _at_most_dimensions("median() cannot operate on more than ", f"{_MOST_DIMENSIONS} dimensions")(arguments)
    if arguments["self"].dtype is torch.bool:
        raise_unsupported_dtype("median_out_impl", torch.bool)


def _check_lstsq(arguments: _Arguments) -> None:
    if arguments.get("driver") not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")


def _check_batch_norm(arguments: _Arguments) -> None:
    out, is_training = arguments["save_invstd"], arguments.get("training", True)
    if is_training and out.size() == arguments["input"].shape[1:2] and not out.is_contiguous():
        raise RuntimeError(
            "out_invstd.dim() == 1 && out_invstd.is_contiguous() && out_invstd.sizes()[0] INTERNAL ASSERT FAILED at"
            ' "/pytorch/aten/src/ATen/native/cuda/Normalization.cuh", please report a bug to PyTorch.'
        )


_PRODUCTS = ("mul", "bitwise_and", "bitwise_or", "bitwise_xor")
_BATCH_NORMS = ("native_batch_norm.out", "_native_batch_norm_legit.out", "_native_batch_norm_legit.no_stats_out")
_NO_TYPES: frozenset[torch.dtype] = frozenset()  # the engine leaves such sizes, and other CPU tensors, to Python
_PADS = [f"reflection_pad{n}d" for n in (1, 2, 3)] + [f"replication_pad{n}d" for n in (2, 3)]
_ALL_TYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


class _Check(NamedTuple):
    """A check of an op's arguments, and the types of a first tensor for which it is made."""

    raise_if_refused: Callable[[_Arguments], None]
    dtypes: frozenset[torch.dtype]


# By the name of an op, or of an overload.
_CHECKS = {
    **dict.fromkeys(("scatter", "scatter_", "scatter_reduce", "scatter_reduce_"), _Check(_check_scatter, _WITHOUT_PRODUCTS)),
    **{name + suffix: _Check(_check_product(name), TYPES_WITHOUT_PRODUCTS) for name in _PRODUCTS for suffix in ("", "_")},
    "roll": _Check(_check_elements("roll"), TYPES_WITHOUT_PRODUCTS),
    "sort": _Check(_both(_check_elements("sort"), _check_sort), TYPES_WITHOUT_PRODUCTS),
    **dict.fromkeys(("median", "nanmedian"), _Check(_check_median, frozenset((torch.bool,)))),
    **dict.fromkeys(_BATCH_NORMS, _Check(_check_batch_norm, _ALL_TYPES)),
    "linalg_lstsq": _Check(_check_lstsq, _ALL_TYPES),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), _Check(_check_scaled_mm, _ALL_TYPES)),
    "_int_mm": _Check(_check_int_mm, _ALL_TYPES),
    "mm": _Check(_check_blas("gemm", "self", "mat2"), _NO_TYPES),
    "bmm": _Check(_check_blas("bgemm", "self", "mat2"), _NO_TYPES),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _Check(_check_blas("bgemm", "batch1", "batch2"), _NO_TYPES)),
    **dict.fromkeys(("topk", "index_select", "tril", "triu", "tril_", "triu_"), _Check(_check_dimensions, _NO_TYPES)),
    **dict.fromkeys(
        ("index_add", "index_add_", "index_reduce", "index_reduce_"),
        _Check(_at_most_dimensions("tensor has too many (>", f"{_MOST_DIMENSIONS}) dims"), _NO_TYPES),
    ),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive"), _Check(_check_unique, _NO_TYPES)),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        _Check(_check_normalized, _NO_TYPES),
    ),
    **{name + suffix: _Check(_check_padding, _NO_TYPES) for name in _PADS for suffix in ("", "_backward")},
    "native_dropout": _Check(_check_dropout, _NO_TYPES),
    "nonzero": _Check(_check_nonzero, _NO_TYPES),
    "nll_loss2d_forward": _Check(_check_spatial_loss, _NO_TYPES),
    "kthvalue": _Check(_check_kthvalue, _NO_TYPES),
    "multinomial": _Check(_check_multinomial, _NO_TYPES),
    **dict.fromkeys(("addcmul", "addcmul_"), _Check(_check_addcmul, _NO_TYPES)),
    "linalg_ldl_solve": _Check(_check_ldl_solve, frozenset((torch.complex64, torch.complex128))),
}


def _find_check(name: str) -> _Check | None:
    return _CHECKS.get(short_name(name)) or _CHECKS.get(name.removeprefix("aten::"))


def checked_dtypes(name: str) -> frozenset[torch.dtype]:
    """Return the types of a first tensor for which ``with_argument_checks`` checks an op."""
    check = _find_check(name)
    return check.dtypes if check is not None else frozenset()


def with_argument_checks(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override with the op's check, if it has one."""
    check = _find_check(name)
    if check is None:
        return override
    bind = binder(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        check.raise_if_refused(bind(args, kwargs))
        return override(*args, **kwargs)

    return run
