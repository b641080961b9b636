"""What one op is: its schema, which of its arguments are written, which function computes it on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .compositions import COMPOSITIONS

__all__ = ["Operation", "not_simulated"]

# These take tensors of the host beside those of the device, as their CUDA kernels do.
_MIXES_DEVICES = frozenset(
    (
        "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put",
        "ctc_loss", "_ctc_loss", "_ctc_loss_backward", "_use_cudnn_ctc_loss", "_cudnn_ctc_loss", "_cudnn_rnn",
        "_cudnn_rnn_backward", "_nested_from_padded", "_nested_view_from_buffer", "_nested_from_padded_tensor",
        "_pack_padded_sequence", "tensor_split", "copy_", "set_",
    )
)  # fmt: skip
_MIXES_NUMBERS = frozenset(
    (
        "fill_", "fill", "masked_fill_", "masked_fill", "index_fill_", "index_fill", "lerp", "lerp_", "where", "clamp", "clamp_",
        "clamp_min", "clamp_max", "bucketize", "searchsorted", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "linspace", "logspace", "isin", "quantize_per_tensor", "_amp_update_scale_", "xlogy", "copysign",
        "_thnn_fused_lstm_cell", "nextafter", "heaviside", "addcmul", "addcdiv", "put_", "masked_scatter_",
    )
)  # fmt: skip


_FOR_MANY_KEYS = (
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)


def not_simulated(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not simulated")


def _registered_key(name: str, key: torch._C.DispatchKey) -> torch._C.DispatchKey:
    """Under which key the kernel for a key stands: its own, or one for many keys."""
    for candidate in (key, *_FOR_MANY_KEYS):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, candidate.name):
            return candidate
    raise not_simulated(name)


class Operation:
    """One op of torch, as its kernel on simulated GPUs needs to know it."""

    def __init__(self, name: str, key: torch._C.DispatchKey = torch._C.DispatchKey.CPU) -> None:
        self.name = name
        base, _, overload = name.partition(".")
        short = base.partition("::")[2]
        operator, by_key, tags = torch._C._get_operation_overload(base, overload)
        self.schema = schema = torch._C._get_schema(base, overload)
        self.call_anywhere: Callable[..., Any] = operator
        composition = COMPOSITIONS.get(name)
        # The CPU's kernel itself, past what the dispatcher does above it, all of which was done for the CUDA tensors.
        self.compute: Callable[..., Any] = composition or functools.partial(by_key, _registered_key(name, key))
        self.names = [argument.name for argument in schema.arguments]
        written = {a.name: a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.written = frozenset(written)
        self.out = frozenset(n for n, a in written.items() if a.kwarg_only)
        # For each result the name of the argument that it is, or None for a new tensor.
        self.results: list[str | None] = []
        for result in schema.returns:
            info = result.alias_info
            same = [n for n, a in written.items() if info is not None and a.alias_info.before_set & info.before_set]
            self.results.append(same[0] if same else None)
        self.has_generator = "generator" in self.names
        self.is_random = self.has_generator or torch.Tag.nondeterministic_seeded in tags
        self.takes_host_tensors = short in _MIXES_DEVICES or short.startswith(("_foreach", "_fused_", "_nested", "_amp"))
        self.takes_host_numbers = (
            self.takes_host_tensors
            or torch.Tag.pointwise in tags
            or short in _MIXES_NUMBERS
        )
        self.numbers_as_tensors = any("Tensor" in str(a.type) for a in schema.arguments)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}
