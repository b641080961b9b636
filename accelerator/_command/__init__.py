"""What ``python -m accelerator`` does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import accelerator as acc
else:
    # This package by whatever name it was vendored: it is what its users call that is checked.
    acc = sys.modules[__name__.rpartition(".")[0]]

__all__ = ["acc"]
