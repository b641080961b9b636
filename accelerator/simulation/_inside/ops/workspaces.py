"""The workspaces of cuBLAS: torch allocates one for each thread, device and stream at the first product.

Nothing reads them here. They count in the figures of allocated memory, as on a GPU. The sizes follow torch's
CublasHandlePool.cpp.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..._settings.torch_versions import release
from . import bindings
from .bindings import current_stream
from .schemas import short_name

_Key = tuple[int, int, int]
# From torch 2.12 on, Blackwell GPUs have large workspaces too: https://github.com/pytorch/pytorch/pull/175344
_LARGE_ON_BLACKWELL = release(torch.__version__) >= (2, 12)
_BY_CUBLAS = frozenset(
    ("mm", "bmm", "mv", "addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "dot", "vdot", "_addmm_activation")
)
_identify_thread = threading.get_ident
_workspaces: dict[_Key, int] = {}


def has_workspace(op_name: str) -> bool:
    """Return whether cuBLAS computes an op."""
    return op_name in _BY_CUBLAS


def with_workspace(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override, which allocates the workspace first if cuBLAS computes the op."""
    if not has_workspace(short_name(name)):
        return override

    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index = self.get_device()
        if index >= 0 and (key := (_identify_thread(), index, current_stream(index))) not in _workspaces:
            _allocate(key)
        return override(self, *args, **kwargs)

    return run


def _allocate(key: _Key) -> None:
    _, index, stream = key
    with torch.cuda.device(index):
        _workspaces[key] = bindings.allocate(_size(), stream)


def _size() -> int:
    torchs_size = bindings.cublas_workspace_size()
    if torchs_size is not None:
        return torchs_size
    capability = torch.cuda.get_device_capability()
    is_large = capability == (9, 0) or (_LARGE_ON_BLACKWELL and capability[0] in (10, 12))
    default = 32 * 1024**2 if is_large else 4096 * 1024 * 2 + 16 * 1024 * 8
    configuration = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if configuration is None:
        return default
    sizes = re.findall(r":([0-9]+):([0-9]+)", configuration)
    if not sizes:
        warnings.warn(
            f"Could not parse CUBLAS_WORKSPACE_CONFIG, using default workspace size of {default} bytes.", stacklevel=2
        )
        return default
    return sum(int(size) * 1024 * int(count) for size, count in sizes)


def release_with_torch(release_also: Callable[[], object]) -> None:
    """Release the workspaces when torch releases its own, and call a function then."""

    def and_ours(release: Callable[[], None]) -> Callable[[], None]:
        def clear() -> None:
            release()
            release_also()
            while _workspaces:
                bindings.free(_workspaces.popitem()[1])

        return clear

    bindings.replace("_cuda_clearCublasWorkspaces", and_ours)
