"""Initialization and low-level functions on two simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accelerator as acc


@pytest.fixture(autouse=True)
def _reset_sync_debug_mode() -> Iterator[None]:
    acc.init()
    yield
    torch._C._cuda_set_sync_debug_mode(0)


def test_init() -> None:
    acc.init()
    acc.init()
    assert acc.is_initialized()
    assert torch.cuda.is_initialized()


def test_lazy_call_runs_immediately_once_initialized() -> None:
    called: list[int] = []
    assert acc.lazy_call(lambda: called.append(1)) is None
    assert called == [1]
    with pytest.raises(ZeroDivisionError):
        acc.lazy_call(lambda: 1 // 0)


@pytest.mark.parametrize("callback", [None, 1, "print"])
def test_lazy_call_rejects_non_callables(callback: Any) -> None:
    with pytest.raises(TypeError, match="takes a callable"):
        acc.lazy_call(callback)


def test_ipc_collect() -> None:
    assert acc.ipc_collect() is None


def test_cudart_equals_torchs() -> None:
    assert acc.cudart() is torch.cuda.cudart()
    assert acc.cudart().cudaMemGetInfo(1) == acc.get_memory_info(1)


def outcome(function: Any) -> Any:
    try:
        return function()
    except RuntimeError as error:
        return type(error), str(error)


def test_blas_handle_equals_torchs() -> None:
    # Both raise an error, because simulated GPUs have no cuBLAS.
    assert outcome(acc.current_blas_handle) == outcome(torch.cuda.current_blas_handle)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_sync_debug_mode() -> None:
    for value, word in enumerate(("default", "warn", "error")):
        for mode in (value, word):
            acc.set_sync_debug_mode((value + 1) % 3)
            acc.set_sync_debug_mode(mode)
            assert acc.get_sync_debug_mode() == torch.cuda.get_sync_debug_mode() == value
    torch.cuda.set_sync_debug_mode("warn")
    assert acc.get_sync_debug_mode() == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_sync_debug_mode_error_raises_on_synchronization() -> None:
    acc.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()
    acc.set_sync_debug_mode("default")
    torch.ones(1, device="cuda").item()


@pytest.mark.parametrize(
    ("mode", "error"),
    [(3, RuntimeError), (-1, RuntimeError), (2**70, RuntimeError), ("loud", RuntimeError), ("", RuntimeError),
     ("1", RuntimeError), (1.0, TypeError), (None, TypeError), (True, TypeError), (b"warn", TypeError)],
)  # fmt: skip
def test_wrong_sync_debug_mode_raises(mode: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        acc.set_sync_debug_mode(mode)
    assert torch.cuda.get_sync_debug_mode() == 0


def test_setting_the_current_sync_debug_mode_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    acc.set_sync_debug_mode(0)
    assert not recwarn.list
