"""Memory and compute capability of data center GPUs, as ``nvidia-smi`` and torch report them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KnownGpu", "find"]


class KnownGpu(NamedTuple):
    """One model of GPU; the memory is nvidia-smi's total."""

    name: str
    memory_mib: int
    capability: str


_GPUS = {
    "T4": KnownGpu("Tesla T4", 15360, "7.5"),
    "V100-16GB": KnownGpu("Tesla V100-SXM2-16GB", 16384, "7.0"),
    "V100-32GB": KnownGpu("Tesla V100-SXM2-32GB", 32768, "7.0"),
    "A10": KnownGpu("NVIDIA A10", 23028, "8.6"),
    "A10G": KnownGpu("NVIDIA A10G", 23028, "8.6"),
    "A40": KnownGpu("NVIDIA A40", 46068, "8.6"),
    "A100-40GB": KnownGpu("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
    "A100": KnownGpu("NVIDIA A100-SXM4-80GB", 81920, "8.0"),
    "L4": KnownGpu("NVIDIA L4", 23034, "8.9"),
    "L40S": KnownGpu("NVIDIA L40S", 46068, "8.9"),
    "H100": KnownGpu("NVIDIA H100 80GB HBM3", 81559, "9.0"),
    "H100-NVL": KnownGpu("NVIDIA H100 NVL", 95830, "9.0"),
    "H200": KnownGpu("NVIDIA H200", 143771, "9.0"),
    "B200": KnownGpu("NVIDIA B200", 183359, "10.0"),
}


def find(name: str) -> KnownGpu | None:
    """Return the GPU of a short name, with or without "NVIDIA", or of a full name; else None."""
    wanted = name.casefold()
    short_name = wanted.removeprefix("nvidia ")
    return next((gpu for short, gpu in _GPUS.items() if short.casefold() == short_name or gpu.name.casefold() == wanted), None)


def names() -> str:
    """Return the short names, for messages."""
    return ", ".join(_GPUS)
