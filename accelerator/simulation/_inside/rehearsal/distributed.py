"""How the other modules replace functions of ``torch.distributed``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def replace(c10d: ModuleType, name: str, value: Any) -> None:
    """Replace a name of torch's module, also in ``torch.distributed``, which may have imported it already."""
    original = getattr(c10d, name, None)
    for module in (c10d, sys.modules.get("torch.distributed")):
        if module is not None and original is not None and getattr(module, name, None) is original:
            setattr(module, name, value)
