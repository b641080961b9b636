"""The determinism check: shape, dtype and device of each saved tensor, and in debug mode its values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from . import checks


class SavedMetadata:
    """The metadata of the tensors that a forward saved, and in debug mode their digests."""

    __slots__ = ("_digests", "_metadata", "_tensors", "largest")

    def __init__(self, determinism_check: str) -> None:
        # Bytes in the largest saved tensor.
        self.largest = 0
        self._metadata: list[tuple[torch.Size, torch.dtype, torch.device]] | None = None if determinism_check == "none" else []
        # In debug mode the digest of each tensor, None for one that is not compared.
        self._digests: list[int | None] | None = [] if determinism_check == "debug" else None
        self._tensors: list[weakref.ref[Tensor]] = []

    def record(self, tensor: Tensor) -> None:
        """Record the next saved tensor of the forward."""
        size = tensor.numel() * tensor.itemsize
        if size > self.largest:
            self.largest = size
        if self._metadata is not None:
            self._metadata.append((tensor.shape, tensor.dtype, tensor.device))
        if self._digests is not None:
            self._digests.append(checks.digest(tensor))
            self._tensors.append(weakref.ref(tensor))

    def forward_ended(self) -> None:
        """Exclude state that the function itself edits, such as running statistics: it differs in each run."""
        if self._digests is None:
            return
        for index, reference in enumerate(self._tensors):
            tensor = reference()
            if tensor is not None and checks.digest(tensor) != self._digests[index]:
                self._digests[index] = None
        self._tensors.clear()

    def compare(self, index: int, tensor: Tensor) -> str | None:
        """Return how a recomputed tensor differs from the saved one, None if it does not."""
        if self._metadata is None:
            return None
        before, now = self._metadata[index], (tensor.shape, tensor.dtype, tensor.device)
        if before != now:
            return f"tensor {index}: {_describe(before)} in forward, {_describe(now)} now"
        digest = None if self._digests is None else self._digests[index]
        if digest is not None and digest != (recomputed := checks.digest(tensor)):
            return f"tensor {index}: {_describe(now)} with digest {digest} in forward, {recomputed} now"
        return None


def _describe(metadata: tuple[Any, ...]) -> str:
    return f"{metadata[1]} {list(metadata[0])} on {metadata[2]}"
