"""State of ops that a second step restores: a third tensor on another device, and an op that raises while it draws."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.mark.parametrize("devices", [(0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)])
def test_ops_over_lists_on_several_devices(devices: tuple[int, ...]) -> None:
    tensors = [torch.full((2,), float(number), device=f"cuda:{index}") for number, index in enumerate(devices)]
    results = torch._foreach_add(tensors, 1)
    assert [result.tolist() for result in results] == [[1, 1], [2, 2], [3, 3]]
    assert [result.device.index for result in results] == list(devices)
    torch._foreach_mul_(tensors, [1.0, 2.0, 3.0])
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [2, 2], [6, 6]]


def test_generator_of_the_cpu_is_restored_if_an_op_raises() -> None:
    def fail() -> None:
        torch.rand(3)
        raise RuntimeError("the kernel failed")

    torch.cuda.init()
    state, draw = torch.get_rng_state(), sys.modules["_accelerator_simulation._kernels.random"].draw
    with pytest.raises(RuntimeError, match="the kernel failed"):
        draw(torch.cuda.default_generators[0], fail, [], {})
    assert torch.equal(torch.get_rng_state(), state)
