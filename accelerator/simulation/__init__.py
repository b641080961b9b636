"""Simulated GPUs: run the real CUDA build of torch on a machine that has no GPU.

C libraries stand in for the CUDA runtime, the CUDA driver and NVML, so an unchanged torch finds, opens and manages
devices that do not exist: it counts and chooses them, fills their memory and runs out of it, uses streams, events, captured
graphs and random-number states. What torch dispatches to a CUDA kernel is computed by the CPU's, on the simulated memory:
results are the CPU's, random numbers are not a real GPU's. What launches kernels of its own (Triton, an extension) fails.

The libraries have to be there when a process starts, so a simulation is always another process: the command line
``python -m accelerator simulate --gpus 2 -- COMMAND`` starts one, and `environment` gives the environment for
starting one yourself. They are compiled with the system's C compiler at first use; Linux on x86-64 only.

Importing this module compiles nothing and loads nothing.
"""

from ._environment import environment, is_simulated, unavailable_reason

__all__ = ["environment", "is_simulated", "unavailable_reason"]


def __dir__() -> list[str]:
    return __all__
