"""Changes of torch that cannot be read from the installed torch: whether it has each, and where torch made it."""

from __future__ import annotations

import torch

# init_process_group takes the device of any accelerator as device_id, before only CUDA's.
# https://github.com/pytorch/pytorch/pull/143735
TORCH_2_7 = torch.__version__ >= "2.7"

# Synchronizing a device restores the current one without making a context on it. Torch 2.10 makes one.
TORCH_2_14 = torch.__version__ >= "2.14"

# Emptying the cache of a host allocator does nothing if the accelerator has none. Before, the process crashes.
# https://github.com/pytorch/pytorch/pull/197593
TORCH_2_15 = torch.__version__ >= "2.15"
