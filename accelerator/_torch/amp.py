"""Mixed precision for one device type, without the deprecated classes of ``torch.cuda.amp`` and ``torch.cpu.amp``."""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch


@cache
def amp_module(device_type: str) -> ModuleType:
    """Return a module with the names and parameters of ``torch.cuda.amp``, made of ``torch.amp`` for a device type."""

    def autocast(enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> torch.amp.autocast:
        return torch.amp.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(device_type, *args, **kwargs)

    module = ModuleType(f"amp of {device_type}", f"torch.amp for {device_type}")
    custom = {name: partial(getattr(torch.amp, name), device_type=device_type) for name in ("custom_fwd", "custom_bwd")}
    vars(module).update(autocast=autocast, GradScaler=GradScaler, **custom)
    return module
