"""What work that does not pass torch's dispatcher must do before it touches device memory."""

from __future__ import annotations

import torch

from .._kernels import capture

__all__ = ["captures_or_waits"]


def captures_or_waits(device: torch.device) -> bool:
    """Return whether the device's current stream captures. If it does not, wait for the collectives that it waits for."""
    if not capture.captures.value:
        return False
    if capture.is_capturing(device):
        return True
    capture.wait_for_pending(device)
    return False
