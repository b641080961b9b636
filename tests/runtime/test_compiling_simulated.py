"""Triton on two simulated GPUs of compute capability 9.0. ``test_capability.py`` tests other capabilities."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import accelerator as acc
from accelerator._machine import triton


def test_triton_is_not_supported_if_its_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATOR_SIM_TRITON", "0")
    assert not acc.is_triton_supported()
    assert not acc.prefer_triton_grouped_mm()


@pytest.mark.parametrize("compute", ["0", "1"])
def test_triton_is_supported_if_it_is_installed(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATOR_SIM_COMPUTE", compute)
    assert acc.is_triton_supported() is (importlib.util.find_spec("triton") is not None)


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("has_grouped", [True, False])
def test_grouped_mm_of_torch_is_preferred_on_hopper(
    has_triton: bool, has_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "is_usable", lambda: has_triton)
    monkeypatch.setattr(torch, "_grouped_mm", print, raising=False)
    if not has_grouped:
        monkeypatch.delattr(torch, "_grouped_mm")
    assert acc.is_triton_supported() is has_triton
    assert acc.prefer_triton_grouped_mm() is (has_triton and not has_grouped)
