"""Devices and their properties under the CPU fallback."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import accelerator as acc

AFFINITY = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()


def test_cpu_is_the_only_device() -> None:
    assert acc.current_device_index() == acc.current_device() == 0
    assert type(acc.current_device()) is int
    assert acc.current_accelerator(check_available=True) is None
    for set_current in (acc.set_device_index, acc.set_device):
        assert set_current(0) is None
        assert set_current("cpu:0") is None
        assert set_current(-1) is None
        assert set_current(3) is None
        assert set_current(torch.device("cpu")) is None
    assert acc.current_device_index() == acc.current_device() == 0


def test_current_device_ignores_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert acc.current_device() == 0


def test_device_objects_and_names() -> None:
    assert acc.device() == acc.device(0) == acc.device(3) == acc.device("cpu") == torch.device("cpu")
    assert acc.device_name() == acc.device_name(0) == acc.device_name(7) == acc.current_device_name() == "cpu"
    assert acc.device_name("3") == "cpu"
    with acc.device(0):
        assert torch.empty(1).device == torch.device("cpu")


def test_contexts_have_no_effect() -> None:
    context = acc.device_index(0)
    with context as nothing, context, acc.device_index("cpu"), acc.device_index(torch.ones(1)), acc.device_of(torch.ones(1)):
        assert nothing is None
        assert acc.current_device_index() == 0
    with pytest.raises(KeyError), acc.device_index(0):
        raise KeyError


@pytest.mark.parametrize("obj", [None, 1, "cpu", torch.device("cpu")], ids=repr)
def test_device_of_rejects_non_tensors(obj: Any) -> None:
    with pytest.raises(TypeError, match="takes a tensor or a storage"):
        acc.device_of(obj)


@pytest.mark.parametrize("device", [0, None, "cpu", "cpu:0", torch.device("cpu"), torch.ones(1)], ids=repr)
def test_compiled_contexts_on_the_cpu(device: Any) -> None:
    def program(tensor: torch.Tensor, device: Any) -> tuple[Any, ...]:
        with acc.device_index(device), acc.device_of(tensor), acc.stream(None):
            return tensor + 1, acc.current_device_index(), acc.device(), acc.is_synchronized_device()

    torch._dynamo.reset()
    tensor, index, made, synchronized = torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2), device)
    assert tensor.tolist() == [2, 2]
    assert (index, made, synchronized) == (0, torch.device("cpu"), True)


def test_properties() -> None:
    properties = acc.get_device_properties()
    assert properties.name == "cpu"
    assert properties.total_memory == acc.total_memory() > 0
    assert properties.multi_processor_count == (len(AFFINITY) or os.cpu_count())


@pytest.mark.skipif(not AFFINITY, reason="needs processor affinity")
def test_processors_are_those_of_the_process() -> None:
    one = {min(AFFINITY)}
    os.sched_setaffinity(0, one)
    try:
        assert acc.get_device_properties().multi_processor_count == 1
    finally:
        os.sched_setaffinity(0, AFFINITY)


def test_peer_access() -> None:
    assert acc.can_device_access_peer(0, 0) is False


def test_arch_list_and_gencode_flags() -> None:
    built_for_cuda = torch.version.cuda is not None
    assert bool(acc.get_arch_list()) == bool(acc.get_gencode_flags()) == built_for_cuda


def test_capability() -> None:
    capability = acc.get_device_capability()
    assert set(capability) == {"supported_dtypes"}
    for dtype in capability["supported_dtypes"]:
        assert torch.empty(1, dtype=dtype).dtype == dtype
