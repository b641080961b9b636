"""The commands of ``python -m accelerator``: report, check, simulate, rehearse and fault."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import accelerator as acc
else:
    # This package may be vendored under another name; the commands use the public names that its users call.
    acc = sys.modules[__name__.rpartition(".")[0]]

__all__ = ["acc"]
