"""Triton under the CPU fallback."""

from __future__ import annotations

import pytest

import accelerator as acc
from accelerator._machine import triton


def test_triton_is_not_supported_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_triton in (True, False):
        monkeypatch.setattr(triton, "is_usable", lambda has=has_triton: has)
        assert acc.is_triton_supported() is False
        assert acc.prefer_triton_grouped_mm() is False
