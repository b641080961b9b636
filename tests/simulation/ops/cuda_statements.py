"""Makes the operator database of a CPU build of torch list CUDA's types, as on a GPU of compute capability 9.0.

Import it before ``operators``, in a process of its own: it patches torch.
"""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.version.cuda else "cpu"
if DEVICE == "cpu":
    import torch._dynamo  # reads torch.version.cuda when it is imported, so import it before the change

    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getDeviceCount = lambda: 1  # type: ignore[attr-defined]
