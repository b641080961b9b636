"""The current device, device contexts and the names of devices, on two simulated GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import accelerator as acc

WAYS = [1, "cuda:1", torch.device("cuda", 1)]


def on_device_1() -> list[Any]:
    return [*WAYS, torch.empty(1, device="cuda:1")]


@pytest.mark.parametrize("set_current", [acc.set_device_index, acc.set_device])
@pytest.mark.parametrize("device", WAYS, ids=repr)
def test_set_current_device(set_current: Callable[[Any], None], device: Any) -> None:
    set_current(device)
    assert torch.cuda.current_device() == 1
    assert acc.current_device_index() == acc.current_device() == 1
    assert type(acc.current_device()) is int
    assert acc.current_device_name() == "cuda:1"
    set_current(-1)
    assert torch.cuda.current_device() == 1


@pytest.mark.parametrize("way", range(4))
def test_device_context_switches_and_restores(way: int) -> None:
    with acc.device_index(on_device_1()[way]) as nothing:
        assert nothing is None
        assert torch.cuda.current_device() == 1
        with acc.device_index(0):
            assert torch.cuda.current_device() == 0
            with acc.device_index(None), acc.device_index(-1), acc.device_index("cuda"):
                assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_context_exit_overrides_device_set_inside() -> None:
    with acc.device_index(1):
        acc.set_device_index(0)
    assert torch.cuda.current_device() == 0
    acc.set_device_index(1)
    with acc.device_index(1):
        acc.set_device_index(0)
    assert torch.cuda.current_device() == 1


@pytest.mark.parametrize("way", range(4))
def test_reentrant_context(way: int) -> None:
    context = acc.device_index(on_device_1()[way])
    with context:
        acc.set_device_index(0)
        with context:
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        with context:
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with context:
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_context_restores_on_exceptions() -> None:
    for exception in (ValueError, KeyboardInterrupt):
        with pytest.raises(exception), acc.device_index(1), acc.device_index(0):
            raise exception
        assert torch.cuda.current_device() == 0
    with ExitStack() as stack:
        stack.enter_context(acc.device_index(1))
        with pytest.raises(ValueError, match="out of range"):
            stack.enter_context(acc.device_index(2))
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_each_thread_has_its_own_current_device() -> None:
    barrier = threading.Barrier(4)

    def work(offset: int) -> list[int]:
        results = []
        for turn in range(50):
            with acc.device_index((offset + turn) % 2):
                barrier.wait(30)
                results.append(torch.cuda.current_device() == (offset + turn) % 2)
        return results

    with ThreadPoolExecutor(4) as pool:
        assert all(all(results) for results in pool.map(work, range(4)))
    assert torch.cuda.current_device() == 0


def test_device_of() -> None:
    tensor = torch.empty(4, device="cuda:1")
    for obj in (tensor, tensor[1:], torch.nn.Parameter(tensor), tensor.untyped_storage()):
        with acc.device_of(obj):
            assert torch.cuda.current_device() == 1
        with torch.cuda.device_of(obj):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0


def test_device_of_a_typed_storage_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    untyped = torch.empty(4, device="cuda:1").untyped_storage()
    storage = torch.TypedStorage(wrap_storage=untyped, dtype=torch.float32, _internal=True)
    with acc.device_of(storage):
        assert torch.cuda.current_device() == 1
    assert not recwarn.list


def test_device_of_tensors_on_other_devices() -> None:
    acc.set_device_index(1)
    for obj in (torch.empty(1), torch.empty(1).untyped_storage(), torch.empty(1, device="meta")):
        with acc.device_of(obj):
            assert torch.cuda.current_device() == 1
    with acc.device_of(torch.empty(1, device="cuda:0")):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1


@pytest.mark.parametrize("obj", [None, 1, "cuda:1", torch.device("cuda", 1), [torch.ones(1)]], ids=repr)
def test_device_of_rejects_non_tensors(obj: Any) -> None:
    with pytest.raises(TypeError, match="takes a tensor or a storage"):
        acc.device_of(obj)


def test_device_objects_and_names() -> None:
    assert acc.device() == torch.device("cuda")
    assert acc.device().index is None
    assert acc.device(1) == acc.device("cuda:1") == acc.device(device_index=torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert acc.device_name() == acc.device_name("cuda") == "cuda"
    assert acc.device_name(0) == "cuda:0"
    assert acc.device_name(device_index="cuda:1") == "cuda:1"
    acc.set_device(1)
    assert acc.device() == torch.device("cuda")
    assert torch.empty(1, device=acc.device()).device == torch.device("cuda", 1)


def test_device_as_context_sets_the_default_device() -> None:
    with acc.device(1):
        assert torch.cuda.current_device() == 0
        assert torch.empty(1).device == torch.device("cuda", 1)


def test_current_accelerator() -> None:
    assert acc.current_accelerator() == acc.current_accelerator(check_available=True) == torch.device("cuda")


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)(*arguments)


def device_in_context(tensor: torch.Tensor, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with acc.device_index(device):
        return tensor + 1, torch.empty(1, device="cuda")


@pytest.mark.parametrize("way", range(4))
def test_compiled_context(way: int) -> None:
    device = on_device_1()[way]
    tensor, made_inside = compiled(device_in_context, torch.ones(2), device)
    assert tensor.tolist() == [2, 2]
    assert made_inside.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("device", [None, -1, "cuda"], ids=repr)
def test_compiled_context_with_current_device(device: Any) -> None:
    acc.set_device_index(1)
    assert compiled(device_in_context, torch.ones(2), device)[1].device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 1


def test_compiled_devices() -> None:
    def program(tensor: torch.Tensor, there: torch.Tensor) -> tuple[Any, ...]:
        with acc.device_of(there), acc.device_of(tensor):
            made = torch.empty(1, device=acc.device())
        return made, acc.device(1), acc.device("cuda:1"), acc.device_name(1), acc.is_synchronized_device(), tensor + 1

    made, *rest = compiled(program, torch.ones(2), torch.empty(1, device="cuda:1"))
    assert made.device == torch.device("cuda", 1)
    assert rest[:4] == [torch.device("cuda", 1), torch.device("cuda", 1), "cuda:1", False]
    assert torch.cuda.current_device() == 0


if not torch.__version__.startswith("2.6."):  # torch 2.6 traces neither

    def test_compiled_current_device() -> None:
        acc.set_device_index(1)
        assert compiled(lambda tensor: (acc.current_device(), acc.current_device_index(), tensor + 1), torch.ones(2))[:2] == (
            1,
            1,
        )

    @pytest.mark.parametrize("current", [0, 1])
    def test_compiled_stream(current: int) -> None:
        acc.set_device_index(current)
        side = torch.cuda.Stream(1)

        def program(tensor: torch.Tensor) -> torch.Tensor:
            with acc.stream(side), acc.stream(None):
                return tensor + 1

        assert compiled(program, torch.empty(2, device="cuda:1")).device == torch.device("cuda", 1)
        # Before torch 2.10, the compiled context restores the stream of the current device, not of the stream's device. The
        # nodes of the graph that did so are gone since: https://github.com/pytorch/pytorch/issues/176154.
        is_restored = current == 1 or torch.__version__ >= (2, 10)
        assert torch.cuda.current_stream(1) == (torch.cuda.default_stream(1) if is_restored else side)
