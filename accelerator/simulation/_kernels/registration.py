"""Which ops of torch get kernels of ours, and how they get them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .compositions import COMPOSITIONS
from .dispatch import kernel
from .operations import not_simulated

__all__ = ["install"]

# What allocates, what looks at tensors, what changes their sizes, what reads one number: torch's own on every device.
_TORCHS_OWN = frozenset(
    (
        "empty", "empty_strided", "set_", "resize_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory",
        "_assert_async", "is_set_to", "_efficientzerotensor", "_fused_sdp_choice", "_cudnn_rnn_flatten_weight",
    )
)  # fmt: skip
# These have one kernel for all devices, which looks inside for the device of its tensors.
_BESIDES = ("aten::convolution", "aten::convolution_backward", "aten::_convolution")

_libraries: list[Any] = []


def install() -> None:
    """Replace torch's CUDA kernels in this process. Initializes nothing."""
    library = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    with _overriding_in_silence():
        for name in _replaced():
            library.impl(name, torch._C.DispatchKey.CUDA, _kernel(name))
    torch._C._set_cudnn_enabled(False)


def _replaced() -> list[str]:
    names = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        if name.startswith("aten::") and name[6:].partition(".")[0] not in _TORCHS_OWN and not _is_view(name)
    ]
    return [*names, *_BESIDES]


def _is_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    returns = torch._C._get_schema(base, overload).returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _kernel(name: str) -> Callable[..., Any]:
    if name in COMPOSITIONS or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        return kernel(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise not_simulated(name)

    return refuse


@contextlib.contextmanager
def _overriding_in_silence() -> Iterator[None]:
    """Without torch 2.6's warning that a kernel is replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        yield
