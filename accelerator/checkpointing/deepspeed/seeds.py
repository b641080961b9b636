"""The seeds of model parallelism: one that all ranks share, and one for each rank."""

from __future__ import annotations

from ...random import default_generator
from .. import configuration
from ..rng_tracker import MODEL_PARALLEL, check_seed, tracker

# Rank r has the shared seed + this offset + r. Megatron-LM has the same offset, on which its checkpoints rely.
_MODEL_PARALLEL_OFFSET = 2718


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator for model parallelism: the default generator alike on all ranks, a random stream for each rank.

    The default generator of the current device gets ``seed``. The RNG tracker is reset and gets the random stream
    "model-parallel-rng" with ``seed + 2718 + rank``. The rank is this process's in the configured group or mpu, else 0.

    Args:
        seed: the seed that all ranks share.

    Raises:
        TypeError: if the seed is not an integer.
        RuntimeError: if called inside the tracker's ``fork()``; nothing is seeded then.

    Initializes: the accelerator.

    Example:
        >>> checkpointing.model_parallel_cuda_manual_seed(1)
        >>> with checkpointing.get_cuda_rng_tracker().fork():
        ...     inside = torch.rand(1)
        >>> inside == torch.rand(1)
        tensor([False])
        >>> checkpointing.get_cuda_rng_tracker().reset()
    """
    check_seed(seed)
    tracker.reset()
    default_generator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL, seed + _MODEL_PARALLEL_OFFSET + configuration.rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the random stream "model-parallel-rng" again, with ``seed + 2718 + rank``.

    Args:
        seed: the seed that all ranks share.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if the tracker has no such stream; ``model_parallel_cuda_manual_seed`` adds it.

    Initializes: the accelerator.

    Example:
        >>> checkpointing.model_parallel_cuda_manual_seed(1)
        >>> checkpointing.model_parallel_reconfigure_tp_seed(2)
        >>> checkpointing.get_cuda_rng_tracker().reset()
    """
    check_seed(seed)
    with tracker.fork():
        default_generator().manual_seed(seed + _MODEL_PARALLEL_OFFSET + configuration.rank())
