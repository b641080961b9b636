"""Copies in a rehearsal: small ones move data."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ..ops import accesses, bindings, dispatch, runtime
from ..ops.bindings import DispatchKey
from ..ops.dispatch import kernel_override
from ..ops.runtime import streams_need_checks
from .computing import SMALL_COPY, Tensor, computing_threads, is_small
from .known_values import UNKNOWN, copied_to_host, state_of, written

CPU_KEY = DispatchKey.CPU


def copy_override(key: DispatchKey = CPU_KEY) -> Callable[..., Any]:
    """Return the kernel override of ``copy_``, which performs small copies and allocates what torch's kernel does."""
    compute = kernel_override("aten::copy_", key)
    copy = dispatch.copy_override(key)
    by_key = bindings.get_overload("aten::copy_", "")[1]
    torch_key = DispatchKey.CompositeExplicitAutograd

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(src, Tensor):
            return self.fill_(src)
        if computing_threads and get_ident() in computing_threads:
            return copy(self, src, non_blocking)
        expanded = src.expand_as(self)  # raises torch's error for other sizes
        is_on_one_device = self.device == src.device
        copies_bytes = self.dtype == src.dtype and _is_laid_out_alike(self, expanded)
        state = UNKNOWN
        if self.nbytes <= SMALL_COPY and src.nbytes <= SMALL_COPY and (copies_bytes or not is_on_one_device):
            if streams_need_checks.value:
                runtime.wait_for_pending(self.device if self.is_cuda else src.device)
            by_key(torch_key, self, src, non_blocking)
            state = state_of((src,))
        elif is_on_one_device and self.is_cuda and is_small(self):
            compute(self, expanded, non_blocking)
            state = state_of((src,))
        elif not is_on_one_device:
            if accesses.FINDS_RACES:
                accesses.skipped_transfer(self, expanded, non_blocking)
            if not copies_bytes:
                _take_temporary_memory(self, src, non_blocking)
        if self.is_cuda:
            written(self, state)
        elif self.is_cpu:
            copied_to_host(self, state)
        return self

    return run


def _take_temporary_memory(self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
    """Allocate and free what torch takes for a copy to or from the host of another type or layout.

    torch copies through contiguous tensors. It converts where the source is, but waits and converts on the host.
    """
    if self.is_cuda and not self.is_contiguous():
        torch.empty_like(self, memory_format=torch.contiguous_format)
    if src.is_cuda:
        converts = self.is_cuda or non_blocking
        (src.to(self.dtype) if converts else src).expand_as(self).contiguous()


def _is_laid_out_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have their elements in the same order, without gaps, and neither changes their sign lazily."""
    if first.is_conj() != second.is_conj() or first.is_neg() != second.is_neg():
        return False
    if first.stride() == second.stride():
        return first.is_contiguous() or first.untyped_storage().nbytes() == first.nbytes == second.untyped_storage().nbytes()
    return first.is_contiguous() and second.is_contiguous()
