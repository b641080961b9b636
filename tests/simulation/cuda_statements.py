"""Makes a torch without CUDA state CUDA's types in its operator database, as on a GPU of capability 9.0.

Import it before ``operators``, in a process that does nothing else.
"""

from __future__ import annotations

import torch
import torch._dynamo  # reads the version of CUDA when it is imported

DEVICE = "cuda" if torch.version.cuda else "cpu"
if DEVICE == "cpu":
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getDeviceCount = lambda: 1  # type: ignore[attr-defined]
