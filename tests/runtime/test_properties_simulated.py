"""Properties of devices, access between devices, and torch's architectures, on two simulated GPUs."""

from __future__ import annotations

import pytest
import torch

import accelerator as acc


def test_properties_equal_torchs() -> None:
    for index in range(2):
        ours, theirs = acc.get_device_properties(index), torch.cuda.get_device_properties(index)
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)
        assert ours.total_memory == acc.total_memory(index) == acc.visible_devices()[index].total_memory
        assert ours.name == acc.get_device_name(index)
    acc.set_device(1)
    assert repr(acc.get_device_properties()) == repr(torch.cuda.get_device_properties(1))


@pytest.mark.parametrize(("device", "peer"), [(0, 1), (1, 0), (0, 0), (1, 1), ("cuda:0", torch.device("cuda", 1))])
def test_peer_access_equals_torchs(device: object, peer: object) -> None:
    assert acc.can_device_access_peer(device, peer) is torch.cuda.can_device_access_peer(device, peer)


def test_peer_access_of_the_current_device() -> None:
    acc.set_device(1)
    assert acc.can_device_access_peer(None, 0) is torch.cuda.can_device_access_peer(1, 0)
    assert acc.can_device_access_peer(1, None) is torch.cuda.can_device_access_peer(1, 1)


def test_arch_list_and_gencode_flags() -> None:
    assert acc.get_arch_list() == torch.cuda.get_arch_list() != []
    assert acc.get_gencode_flags() == torch.cuda.get_gencode_flags() != ""


def test_capability() -> None:
    for index in range(2):
        capability = acc.get_device_capability(index)
        assert capability["compute_capability"] == torch.cuda.get_device_capability(index)
        assert {torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool} <= capability["supported_dtypes"]
    assert acc.get_device_capability() is not acc.get_device_capability()
    acc.get_device_capability()["supported_dtypes"].clear()
    assert acc.get_device_capability()["supported_dtypes"]
