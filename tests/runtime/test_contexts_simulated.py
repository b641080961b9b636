"""The contexts of devices and streams, entered twice, used by several threads, and left in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import accelerator as acc

MAKE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device_index": lambda: acc.device_index(1),
    "device_index, a string": lambda: acc.device_index("cuda:1"),
    "device_of": lambda: acc.device_of(torch.empty(1, device="cuda:1")),
    "stream": lambda: acc.stream(torch.Stream("cuda:1")),
}
each = pytest.mark.parametrize("name", MAKE)


@pytest.fixture(autouse=True)
def _initialized() -> None:
    acc.init()


def current() -> int:
    return torch.cuda.current_device()


@each
def test_context_is_reentrant(name: str) -> None:
    context = MAKE[name]()
    with context:
        torch.cuda.set_device(0)
        with context:
            assert current() == 1
            with acc.device_index(0), context:
                assert current() == 1
            assert current() == 1
            with context:
                torch.cuda.set_device(0)
            assert current() == 1
        assert current() == 0
    assert current() == 0


@each
def test_contexts_exited_out_of_order(name: str) -> None:
    first, second = MAKE[name](), acc.device_index(0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current() == 0
    second.__exit__(None, None, None)
    assert current() == 1
    torch.cuda.set_device(0)


@each
@pytest.mark.parametrize("made_here", [True, False])
def test_context_object_shared_by_threads(name: str, made_here: bool) -> None:
    made: list[AbstractContextManager[Any]] = []
    if made_here:
        made.append(MAKE[name]())
    else:
        # The thread that creates the context ends before others enter it.
        creator = threading.Thread(target=lambda: made.append(MAKE[name]()))
        creator.start()
        creator.join()
    context = made[0]
    ready, wrong = threading.Barrier(4), []

    def use(home: int) -> None:
        torch.cuda.set_device(home)
        for _ in range(50):
            ready.wait()
            with context:
                ready.wait()
                inside = current()
                with acc.device_index(0), context:
                    ready.wait()
                inside += current()
            if inside != 2 or current() != home:
                wrong.append((inside, current(), home))

    threads = [threading.Thread(target=use, args=(home,)) for home in (0, 1, 0)]
    for thread in threads:
        thread.start()
    use(0)
    for thread in threads:
        thread.join()
    assert wrong == []


@each
def test_context_restores_after_an_exception(name: str) -> None:
    with pytest.raises(KeyError), MAKE[name]():
        raise KeyError
    assert current() == 0


def test_index_out_of_range_raises_at_construction() -> None:
    with pytest.raises(ValueError, match="Device index 9 is out of range: 2 cuda devices are visible"):
        acc.device_index(9)
    assert current() == 0
