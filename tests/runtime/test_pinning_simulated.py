"""Pinned memory with simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc


def test_pinned_copies_hold_the_same_data() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    pinned = acc.pin_memory(tensor)
    assert torch.equal(pinned, tensor)
    assert acc.is_pinned(pinned)
    assert pinned.is_pinned()
    assert not acc.is_pinned(tensor)
    assert acc.pin_memory(pinned) is pinned
    assert acc.unpin_memory(pinned) is None
    assert torch.equal(pinned, tensor)


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).view(2, 3), torch.arange(5), torch.tensor(3, dtype=torch.int8), torch.empty(0)]
)
def test_pin_memory_aligns_addresses(tensor: torch.Tensor) -> None:
    # Four buffers, because one may be aligned by chance.
    kept = [acc.pin_memory(tensor, align_bytes=1 << 21) for _ in range(4)]
    for pinned in kept:
        assert pinned.data_ptr() % (1 << 21) == 0
        assert torch.equal(pinned, tensor)
        assert tensor.numel() == 0 or acc.is_pinned(pinned)


@pytest.mark.parametrize("align", [1, 2, 3, 6, 7, 64, 96, 4096, 4100, 12288])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_pin_memory_aligns_any_dtype_to_any_number(dtype: torch.dtype, align: int) -> None:
    """The address is a multiple of the alignment and of the dtype's size, neither of which need divide the other."""
    for shape in ((), (0,), (1,), (3, 5), (1025,)):
        tensor = torch.ones(shape, dtype=dtype)
        # Three of each, because one may be aligned by chance.
        kept = [acc.pin_memory(tensor, align, make_copy=copies) for copies in (True, False) for _ in range(3)]
        for pinned in kept:
            assert pinned.data_ptr() % align == 0
            assert pinned.data_ptr() % dtype.itemsize == 0
            assert (pinned.shape, pinned.dtype) == (tensor.shape, dtype)
        for pinned in kept:
            pinned.copy_(tensor)
        assert all(torch.equal(pinned, tensor) for pinned in kept)


def test_pin_memory_rejects_gpu_tensors_and_zero_alignment() -> None:
    with pytest.raises(RuntimeError, match="pin"):
        acc.pin_memory(torch.empty(1, device="cuda"))
    with pytest.raises(ValueError, match="align_bytes"):
        acc.pin_memory(torch.empty(1), 0)


def test_pin_empty_returns_pinned_tensors() -> None:
    for tensor in (acc.pin_empty(2, 3, dtype=torch.int16), acc.pin_empty((2, 3), dtype=torch.int16)):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.int16, "cpu")
        assert acc.is_pinned(tensor)
    assert acc.pin_empty(1).dtype == torch.get_default_dtype()
    like = acc.pin_empty_like(torch.empty(4, 5, device="cuda:1", dtype=torch.float64).t())
    assert (like.shape, like.dtype, like.device.type) == ((5, 4), torch.float64, "cpu")
    assert acc.is_pinned(like)
    assert acc.pin_empty_like(like, dtype=torch.int8).dtype == torch.int8


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta", torch.device("cuda", 1)])
def test_pin_empty_rejects_other_devices(device: object) -> None:
    with pytest.raises(ValueError, match="cpu"):
        acc.pin_empty(1, device=device)
    with pytest.raises(ValueError, match="cpu"):
        acc.pin_empty_like(torch.empty(1), device=device)


def test_memory_can_be_registered_once_at_a_time() -> None:
    tensor = torch.ones(4096)
    address = tensor.data_ptr()
    assert acc.register_host_memory(address, tensor.nbytes) is True
    assert acc.is_pinned(tensor)
    with pytest.raises(RuntimeError, match="CUDA refused"):
        acc.register_host_memory(address, tensor.nbytes)
    torch.zeros(2, device="cuda")
    acc.unregister_host_memory(address)
    assert not acc.is_pinned(tensor)
    with pytest.raises(RuntimeError, match="CUDA refused"):
        acc.unregister_host_memory(address)
    torch.zeros(2, device="cuda")  # would raise if the errors above were still pending in CUDA


def test_refused_registration_leaves_no_error_in_cuda() -> None:
    torch.zeros(2, device="cuda")  # the allocator keeps this memory, so that small tensors need no call of CUDA
    for device in range(2):
        torch.cuda.empty_cache()
        torch.cuda.set_device(device)
        torch.zeros(2, device="cuda")
        with pytest.raises(RuntimeError, match="CUDA refused"):
            acc.unregister_host_memory(torch.ones(4096).data_ptr())
        assert torch.cuda.current_device() == device
        torch.empty(64 << 20, device=f"cuda:{1 - device}")  # checks for errors
    torch.cuda.set_device(0)


def test_default_alignment_is_one() -> None:
    assert acc.pin_memory_alignment() == 1


@pytest.mark.parametrize("align", [1, 4096, 1 << 21])
@pytest.mark.parametrize("default", ["cpu", "meta", "cuda", "cuda:1"])
def test_default_device_does_not_affect_pinning(default: str, align: int) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    with torch.device(default):
        kept = [acc.pin_memory(tensor, align_bytes=align) for _ in range(4)]
        empty, like = acc.pin_empty(3), acc.pin_empty_like(tensor)
        new = acc.pin_memory(tensor, align_bytes=align, make_copy=False)
    for pinned in kept:
        assert pinned.device.type == "cpu"
        assert pinned.tolist() == tensor.tolist()
    for made in (*kept, empty, like, new):
        assert acc.is_pinned(made)


def test_pin_memory_keeps_strides() -> None:
    images = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    transposed = torch.arange(6.0).view(2, 3).t()
    for tensor in (images, transposed):
        for align in (1, 4096, 1 << 21):
            for pinned in [acc.pin_memory(tensor, align_bytes=align) for _ in range(4)]:
                assert pinned.stride() == tensor.stride()
                assert torch.equal(pinned, tensor)
                assert pinned.data_ptr() % align == 0


def test_pin_memory_without_copy_allocates_pinned_memory() -> None:
    template = torch.ones(2, 3, dtype=torch.int16, device="cuda:1").t()
    like, flat = acc.pin_memory(template, make_copy=False), acc.pin_memory(template, make_copy=False, match_shape=False)
    assert (like.shape, flat.shape) == ((3, 2), (6,))
    for made in (like, flat):
        assert made.dtype == torch.int16
        assert made.is_contiguous()
        assert acc.is_pinned(made)


@pytest.mark.parametrize("wrong", [None, 3, [1.0], "tensor"], ids=repr)
@pytest.mark.parametrize("function", [acc.pin_memory, acc.is_pinned, acc.pin_empty_like, acc.on_accelerator])
def test_pinning_functions_reject_non_tensors(function: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) takes a tensor, not {type(wrong).__name__}$"):
        function(wrong)


@pytest.mark.parametrize("wrong", [None, 1.5, "0", b""], ids=repr)
def test_addresses_and_sizes_of_wrong_type_raise(wrong: Any) -> None:
    for call in (lambda: acc.register_host_memory(wrong, 1), lambda: acc.register_host_memory(0, wrong),
                 lambda: acc.unregister_host_memory(wrong)):  # fmt: skip
        with pytest.raises(TypeError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 2**63, 2**70])
def test_addresses_and_sizes_out_of_range_raise(wrong: int) -> None:
    calls = {
        "address": (lambda: acc.register_host_memory(wrong, 1), lambda: acc.unregister_host_memory(wrong)),
        "size": (lambda: acc.register_host_memory(4096, wrong),),
    }
    for what, functions in calls.items():
        for function in functions:
            with pytest.raises(ValueError) as caught:
                function()
            assert str(caught.value) == f"The {what} of memory must be from 0 to 2**63 - 1, not {wrong}"


def test_pin_memory_of_an_expanded_tensor() -> None:
    for align_bytes in (1, 4096):
        pinned = acc.pin_memory(torch.ones(1).expand(4), align_bytes)
        assert pinned.is_pinned()
        assert pinned.tolist() == [1.0] * 4
        assert pinned.is_contiguous()
        assert pinned.data_ptr() % align_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda dense: dense.to_sparse_bsr((2, 2)),
        lambda dense: dense.to_sparse_bsc((2, 2)),
        lambda dense: torch.nested.nested_tensor(list(dense)),
        lambda dense: torch.nested.nested_tensor(list(dense), layout=torch.jagged),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore")
def test_pin_memory_of_other_layouts(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.eye(4))
    pinned = acc.pin_memory(tensor)
    assert pinned.layout == tensor.layout
    assert acc.is_pinned(pinned) is pinned.is_pinned() is True
    assert not acc.is_pinned(tensor)
    dense, expected = (torch.stack(each.unbind()) if each.is_nested else each.to_dense() for each in (pinned, tensor))
    assert torch.equal(dense, expected)
    with pytest.raises(ValueError, match="align_bytes=64 needs a dense tensor"):
        acc.pin_memory(tensor, 64)
