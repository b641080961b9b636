"""Simulated GPUs: run the real CUDA build of torch on a machine that has no GPU.

Simulated C libraries replace the CUDA runtime, the CUDA driver, NVML and NCCL, so that an unchanged torch counts, opens
and uses devices that do not exist: memory and its exhaustion, streams, events, captured graphs, random-number states.
The CPU's kernels compute torch's ops on the simulated memory: results are the CPU's, and random numbers differ from a real
GPU's. ``torch.compile`` and Triton compile as for a GPU. Kernels that torch did not write (Triton, extensions, NVRTC) run from
their PTX.

The libraries must be loaded when a process starts, so a simulation is always another process.
``python -m accelerator simulate --gpus 2 -- COMMAND`` starts one, and `environment` returns the environment for starting
one yourself. The system's C compiler builds the libraries at first use. Linux on x86-64 only.

Importing this module compiles nothing and loads nothing.
"""

from ._outside.environment import environment, is_simulated, unavailable_reason
from ._outside.found_races import Race, races
from ._outside.machine_faults import inject_fault

__all__ = ["Race", "environment", "inject_fault", "is_simulated", "races", "unavailable_reason"]


def __dir__() -> list[str]:
    return __all__
