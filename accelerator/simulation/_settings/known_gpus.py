"""Memory, compute capability and speed of known GPUs.

A GPU has two totals. The driver reserves a part of the memory that ``nvidia-smi`` and NVML report, and programs get the rest:
the total of ``cudaMemGetInfo``, of torch's ``total_memory`` and of out-of-memory errors. The reserve differs between drivers
by up to 0.3 GiB. The figures are those of drivers 535 and newer if there is a choice.

Sources: public logs. The totals of ``nvidia-smi`` are those that ``nvidia-smi --query-gpu=name,memory.total`` printed. The
comment at each row says where CUDA's total comes from:

- P: the text of ``torch.cuda.get_device_properties``, in MiB.
- U: the first line of Ultralytics' commands, which print torch's ``total_memory`` in MiB.
- E: torch's out-of-memory errors ("GPU 0 has a total capacity of 23.56 GiB"), which give hundredths of a GiB.
- B: ``torch.cuda.mem_get_info`` or NVML's free memory of an idle GPU, in bytes.
- A: by analogy with a GPU of the same chip and memory.

The fifth figure of a row is the peak in single precision in TFLOPS: twice the cores times the boost clock, from NVIDIA's data
sheets. By default CUDA enumerates the fastest GPU first. NVIDIA says of its rule only that it is a simple heuristic. The rule
here is that of ``gpuGetMaxGflopsDeviceId`` in NVIDIA's samples: cores times clock.

`_build` writes the table into a header of the libraries. Fans, PCIe and power limits are those of NVIDIA's data sheets.
"""

from __future__ import annotations

from typing import NamedTuple

_MIB = 2**20


class KnownGpu(NamedTuple):
    """One model of GPU.

    Attributes:
        name: the full name, as CUDA and NVML report it.
        memory: the total that programs get, in bytes.
        nvml_memory: the total of NVML and ``nvidia-smi``, in bytes.
        capability: the compute capability.
        speed: the peak in single precision, in GFLOPS.
        pcie_generation: of its link to the host.
        power_limit: the default and the maximum, in watts; 0 if unknown.
        has_fan: whether it has one.
    """

    name: str
    memory: int
    nvml_memory: int
    capability: str
    speed: int
    pcie_generation: int
    power_limit: int
    has_fan: bool

    @property
    def reserve(self) -> int:
        """What the driver reserves, in bytes."""
        return self.nvml_memory - self.memory


def _gpu(
    name: str, memory_mib: float, nvml_mib: int, capability: str, tflops: float, pcie: int, watts: int, has_fan: bool = False
) -> KnownGpu:
    speed = round(tflops * 1000)
    return KnownGpu(name, int(memory_mib * _MIB), nvml_mib * _MIB, capability, speed, pcie, watts, has_fan)


_GPUS = {
    "T4": _gpu("Tesla T4", 15102, 15360, "7.5", 8.1, 3, 70),  # P
    "V100-16GB": _gpu("Tesla V100-SXM2-16GB", 16151, 16384, "7.0", 15.7, 3, 300),  # U
    "V100-32GB": _gpu("Tesla V100-SXM2-32GB", 32494, 32768, "7.0", 15.7, 3, 300),  # U
    "A10": _gpu("NVIDIA A10", 23_604_690_944 / _MIB, 23028, "8.6", 31.2, 4, 150),  # B, driver 535
    "A10G": _gpu("NVIDIA A10G", 22587, 23028, "8.6", 31.5, 4, 300),  # P
    "A30": _gpu("NVIDIA A30", 24164, 24576, "8.0", 10.3, 4, 165),  # U
    "A40": _gpu("NVIDIA A40", 45416, 46068, "8.6", 37.4, 4, 300),  # P
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", 42_298_834_944 / _MIB, 40960, "8.0", 19.5, 4, 400),  # B
    "A100": _gpu("NVIDIA A100-SXM4-80GB", 81153, 81920, "8.0", 19.5, 4, 400),  # U; E has 79.25
    "L4": _gpu("NVIDIA L4", 22563, 23034, "8.9", 30.3, 4, 72),  # U
    "L40": _gpu("NVIDIA L40", 45495, 46068, "8.9", 90.5, 4, 300),  # A: L40S
    "L40S": _gpu("NVIDIA L40S", 45495, 46068, "8.9", 91.6, 4, 350),  # U
    "H20": _gpu("NVIDIA H20", 97285, 97871, "9.0", 44.0, 5, 500),  # P
    "H100": _gpu("NVIDIA H100 80GB HBM3", 81089, 81559, "9.0", 66.9, 5, 700),  # P; E has 79.19 to 79.25
    "H100-PCIE": _gpu("NVIDIA H100 PCIe", 81008, 81559, "9.0", 51.2, 5, 350),  # P
    "H100-NVL": _gpu("NVIDIA H100 NVL", 95320, 95830, "9.0", 60.0, 5, 400),  # U
    "H200": _gpu("NVIDIA H200", 143156, 143771, "9.0", 66.9, 5, 700),  # P
    "GH200": _gpu("NVIDIA GH200 480GB", 96768, 97871, "9.0", 66.9, 5, 0),  # E: 94.50
    "B200": _gpu("NVIDIA B200", 182631, 183359, "10.0", 75.0, 5, 1000),  # P; E has 178.35
    "RTX3090": _gpu("NVIDIA GeForce RTX 3090", 24125, 24576, "8.6", 35.6, 4, 350, has_fan=True),  # E: 23.56
    "RTX4090": _gpu("NVIDIA GeForce RTX 4090", 24081, 24564, "8.9", 82.6, 4, 450, has_fan=True),  # U; E has 23.52
    "RTX5090": _gpu("NVIDIA GeForce RTX 5090", 32120, 32607, "12.0", 104.8, 5, 575, has_fan=True),  # U; E has 31.36 and 31.37
    "A5000": _gpu("NVIDIA RTX A5000", 24114, 24564, "8.6", 27.8, 4, 230, has_fan=True),  # P
    "A6000": _gpu("NVIDIA RTX A6000", 48676, 49140, "8.6", 38.7, 4, 300, has_fan=True),  # P
    "RTX6000-ADA": _gpu("NVIDIA RTX 6000 Ada Generation", 48539, 49140, "8.9", 91.1, 4, 300, has_fan=True),  # U
    "RTXPRO6000": _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97250, 97887, "12.0", 120.0, 5, 600),  # P; E has 94.97
}


def find(name: str) -> KnownGpu | None:
    """Return the GPU of a short name, with or without "NVIDIA" and with or without blanks, or of a full name; else None."""
    wanted = name.casefold()
    short_name = wanted.removeprefix("nvidia ").removeprefix("geforce ").replace(" ", "")
    return next((gpu for short, gpu in _GPUS.items() if short.casefold() == short_name or gpu.name.casefold() == wanted), None)


def smallest(memory: int) -> str | None:
    """Return the short name of the GPU with the least memory that has this many bytes for programs; None if none has."""
    fitting = [(gpu.memory, name) for name, gpu in _GPUS.items() if gpu.memory >= memory]
    return min(fitting)[1] if fitting else None


def models() -> list[KnownGpu]:
    """Return all, for the libraries."""
    return list(_GPUS.values())


def names() -> str:
    """Return the short names, for messages."""
    return ", ".join(_GPUS)
