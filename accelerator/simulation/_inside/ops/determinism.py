"""Errors of ops whose CUDA kernels are not deterministic, if ``torch.use_deterministic_algorithms`` is on.

The names are those of CUDA's errors. Ops and conditions follow the documentation of ``torch.use_deterministic_algorithms``.
An error of `_ALERTS` applies if the installed torch has its text: torch's kernels become deterministic one by one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..._settings.torch_versions import release
from .bindings import is_deterministic, is_deterministic_warn_only
from .library_texts import has_string, has_text
from .schemas import binder, short_name

# The backward of max_pool3d is deterministic from torch 2.13 on: https://github.com/pytorch/pytorch/issues/85425. Its name
# remains in the library.
_MAX_POOL3D_IS_DETERMINISTIC = release(torch.__version__) >= (2, 13)

# The name in CUDA's error by op; all overloads of an op share it.
_ALERTS = {
    **{
        name: f"{name.removeprefix('_')}_cuda"
        for name in (
            *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
            *("avg_pool3d_backward", "fractional_max_pool2d_backward"),
            *("fractional_max_pool3d_backward", "grid_sampler_3d_backward"),
            *("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"),
            "reflection_pad2d_backward",
        )
    },
    **{
        name: f"{name.removeprefix('_')}_out_cuda"
        for name in (
            *("reflection_pad1d_backward", "reflection_pad3d_backward", "upsample_linear1d_backward"),
            *("upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
            *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
        )
    },
    **dict.fromkeys(("index_reduce", "index_reduce_"), "index_reduce_cuda"),
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "kthvalue": "kthvalue CUDA",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "max_unpool3d": "max_unpooling3d_forward_out",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "nll_loss2d_backward": "nll_loss2d_backward_out_cuda_template",
}
if not _MAX_POOL3D_IS_DETERMINISTIC:
    _ALERTS["max_pool3d_with_indices_backward"] = "max_pool3d_with_indices_backward_cuda"

_Arguments = dict[str, Any]


def _median(arguments: _Arguments) -> str | None:
    return "median CUDA with indices output" if "dim" in arguments else None


def _bincount(arguments: _Arguments) -> str | None:
    return "_bincount_cuda" if arguments.get("weights") is not None else None


def _put(arguments: _Arguments) -> str | None:
    # Without accumulation the CPU's kernel raises the error.
    return "put_" if arguments.get("accumulate") else None


def _embedding_bag(arguments: _Arguments) -> str | None:
    return "embedding_bag_backward_cuda_max" if arguments.get("mode") == 2 else None


def _scatter_reduce(arguments: _Arguments) -> str | None:
    # Sums and means have a deterministic kernel, and maxima and minima do not depend on the order. The documentation of
    # torch 2.15 says otherwise, but its libraries contain the error of products only.
    return "scatter_reduce_cuda_prod_" if arguments.get("reduce") == "prod" else None


def _histc(arguments: _Arguments) -> str | None:
    kernel = "_histc_cuda with floating point input"  # until torch 2.7 integers were refused, too
    if not _has_error(kernel):
        return "_histc_cuda"
    return kernel if arguments["self"].is_floating_point() else None


def _grid_sampler(arguments: _Arguments) -> str | None:
    tensor = arguments["input"]
    options = (arguments["interpolation_mode"], arguments["padding_mode"], arguments["align_corners"])
    by_cudnn = (
        torch.backends.cudnn.enabled
        and options == (0, 0, True)
        and tensor.dtype in (torch.float16, torch.float32, torch.float64)
        and tensor.numel() > 0
        and tensor.size(1) <= 1024
    )
    return None if by_cudnn else "grid_sampler_2d_backward_cuda"


def _index_numbers(arguments: _Arguments) -> None:
    """The deterministic kernel is `index_put_`, which refuses tensors without dimensions."""
    if not arguments["self"].dim():
        raise IndexError("too many indices for tensor of dimension 0 (got 1)")


# Ops that are nondeterministic only with some arguments.
_CONDITIONS: dict[str, Callable[[_Arguments], str | None]] = {
    "median": _median,
    "nanmedian": _median,
    "bincount": _bincount,
    "put_": _put,
    "histc": _histc,
    "_histc": _histc,
    "grid_sampler_2d_backward": _grid_sampler,
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), _index_numbers),
    "_embedding_bag_backward": _embedding_bag,
    "_embedding_bag_dense_backward": _embedding_bag,
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
}
_BY_CUBLAS = frozenset(("mm", "bmm", "mv", "addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "dot", "vdot"))
_CUBLAS_CONFIGURATIONS = (":4096:8", ":16:8")


def has_alert(op_name: str) -> bool:
    """Return whether an op has an error or a warning with some arguments."""
    return op_name in _ALERTS or op_name in _CONDITIONS or op_name in _BY_CUBLAS


def alert_for(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override, with CUDA's error or warning if the op is not deterministic."""
    op_name = short_name(name)
    if op_name in _ALERTS:
        kernel_name = _ALERTS[op_name]
        find: Callable[[_Arguments], str | None] = lambda _: kernel_name if _has_error(kernel_name) else None  # noqa: E731
    elif op_name in _CONDITIONS:
        find = _CONDITIONS[op_name]
    elif op_name in _BY_CUBLAS:
        return _cublas_alert(override)
    else:
        return override
    bind = binder(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_deterministic() and (kernel := find(bind(args, kwargs))):
            _alert(kernel)
        return override(*args, **kwargs)

    return run


def _has_error(kernel: str) -> bool:
    return has_string("libtorch_cuda.so", kernel)


def _alert(kernel: str) -> None:
    support_request = (
        "file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic support for this"
        " operation."
    )
    if is_deterministic_warn_only():
        warnings.warn(
            f"{kernel} does not have a deterministic implementation, but you set"
            f" 'torch.use_deterministic_algorithms(True, warn_only=True)'. You can {support_request}",
            stacklevel=2,
        )
        return
    raise RuntimeError(
        f"{kernel} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'."
        " You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's"
        f" acceptable for your application. You can also {support_request}"
    )


def _cublas_alert(override: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if (
            is_deterministic()
            and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_CONFIGURATIONS
            and has_text("libtorch_cpu.so", "CUBLAS_WORKSPACE_CONFIG")
        ):
            message = (
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or"
                " `at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses"
                " CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment"
                " variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or"
                " CUBLAS_WORKSPACE_CONFIG=:16:8. For more information, go to"
                " https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"
            )
            if not is_deterministic_warn_only():
                raise RuntimeError(message)
            warnings.warn(message, stacklevel=2)
        return override(*args, **kwargs)

    return run
