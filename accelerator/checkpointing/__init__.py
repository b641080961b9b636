"""Activation checkpointing: recompute activations in backward to save memory.

The inputs of checkpoints can be partitioned across ranks and offloaded to the host. The names and parameters are those of
``deepspeed.checkpointing``; the guarantees are those of torch's own checkpoints. Importing this module needs torch. Its
functions are fork-safe and initialize nothing, except as their docstrings say.
"""

from __future__ import annotations

from typing import Any

from . import configuration as _configuration
from .checkpoint_call import checkpoint, non_reentrant_checkpoint
from .configuration import configure, is_configured, partition_activations_in_checkpoint, reset, set_num_layers
from .deepspeed.helpers import (
    CheckpointFunction,
    detach_variable,
    extract_tensors,
    gather_partitioned_activations,
    get_cpu_activations_for_backward,
    get_partition_size,
    get_partition_start,
    get_partitioned_activations_for_backward,
    is_activation_to_checkpoint,
    merge_tensors,
    partition_activations,
)
from .deepspeed.offload_engine import get_offloaded_activations_for_backward, restore_offloaded_activations
from .deepspeed.seeds import model_parallel_cuda_manual_seed, model_parallel_reconfigure_tp_seed
from .rng_tracker import CudaRNGStatesTracker, get_cuda_rng_tracker
from .timing import RegionTimes, region_times

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "RegionTimes",
    "checkpoint",
    "configure",
    "detach_variable",
    "extract_tensors",
    "gather_partitioned_activations",
    "get_cpu_activations_for_backward",
    "get_cuda_rng_tracker",
    "get_offloaded_activations_for_backward",
    "get_partition_size",
    "get_partition_start",
    "get_partitioned_activations_for_backward",
    "is_activation_to_checkpoint",
    "is_configured",
    "merge_tensors",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations",
    "partition_activations_in_checkpoint",
    "region_times",
    "reset",
    "restore_offloaded_activations",
    "set_num_layers",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # DeepSpeed's users read its settings as globals of the module.
    try:
        return _configuration.deepspeed_globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
