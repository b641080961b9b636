"""Pinned memory under the CPU fallback: new tensors are not pinned, and pinning returns the same tensor."""

from __future__ import annotations

import pytest
import torch

import accelerator as acc


def test_pin_memory_returns_the_same_tensor() -> None:
    tensor = torch.ones(3)
    assert acc.pin_memory(tensor) is tensor
    assert acc.pin_memory(tensor, align_bytes=4096) is tensor
    assert acc.is_pinned(tensor) is False
    assert acc.unpin_memory(tensor) is None
    assert acc.pin_memory_alignment() == 1
    with pytest.raises(ValueError, match="align_bytes"):
        acc.pin_memory(tensor, -1)


def test_pin_empty_returns_unpinned_tensors() -> None:
    tensor = acc.pin_empty(2, 3, dtype=torch.int16)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.int16, "cpu")
    assert acc.pin_empty((4,)).dtype == torch.get_default_dtype()
    assert acc.pin_empty_like(tensor).dtype == torch.int16
    assert acc.pin_empty_like(tensor, "cpu", torch.int8).shape == (2, 3)
    with pytest.raises(ValueError, match="cpu"):
        acc.pin_empty(1, device="meta")
    with pytest.raises(ValueError, match="cpu"):
        acc.pin_empty_like(tensor, device="cuda")


def test_register_host_memory_has_no_effect() -> None:
    tensor = torch.ones(8)
    assert acc.register_host_memory(tensor.data_ptr(), tensor.nbytes) is False
    assert acc.unregister_host_memory(tensor.data_ptr()) is None


def test_pin_memory_without_copy_allocates() -> None:
    tensor = torch.ones(2, 3, dtype=torch.int16)
    like, flat = acc.pin_memory(tensor, make_copy=False), acc.pin_memory(tensor, make_copy=False, match_shape=False)
    assert (like.shape, like.dtype) == ((2, 3), torch.int16)
    assert (flat.shape, flat.dtype) == ((6,), torch.int16)
    assert tensor.data_ptr() not in (like.data_ptr(), flat.data_ptr())
