"""Writes lists of the functions that NVIDIA's libraries export. Functions that are not simulated get stubs from them.

    python -m tests.simulation.exported_names DIRECTORY...

Each directory holds installed or unpacked CUDA wheels: those of the runtime and of CUPTI for each CUDA major, NVML's
headers (nvidia-nvml-dev) and NCCL. The names come from the symbol tables of the libraries. No wheel contains the driver or
NVML, so their names come from their headers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.simulation.native.elf import ElfSymbols

NATIVE = Path(__file__).parents[2] / "accelerator/simulation/native"
LISTS = {
    "cudart": "exported/runtime.h",
    "cupti": "exported/cupti.h",
    "nccl": "exported/nccl.h",
    "cuda": "exported/driver.h",
    "nvml": "exported/nvml.h",
}
LIBRARIES = {
    "cudart": {"12": "libcudart.so.12", "13": "libcudart.so.13"},
    "cupti": {"13": "libcupti.so.13"},
    "nccl": {"2": "libnccl.so.2"},
}


def symbols(path: Path) -> set[str]:
    """Return the functions that a library exports."""
    return {symbol.name for symbol in ElfSymbols(path).defined if re.match(r"_{0,2}(cuda|cupti|p?nccl)[A-Z]", symbol.name)}


def driver_functions(header: str) -> set[str]:
    """Return the functions that cuda.h declares, and their variants for another default stream."""
    declared = set(re.findall(r"\bCUresult\s+(?:CUDAAPI\s+)?(cu[A-Z]\w*)\s*\(", header))
    declared |= set(re.findall(r"#define\s+cu[A-Z]\w*\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w*)", header))
    variants = {f"{name}_{suffix.lower()}" for suffix, name in re.findall(r"__CUDA_API_(PT[SD][ZS])\((cu[A-Z]\w*)\)", header)}
    return declared | variants


def management_functions(header: str) -> dict[str, bool]:
    """Return the functions that nvml.h declares, and whether their first argument is a device."""
    declarations = re.findall(r"\b(?:nvmlReturn_t|char\*)\s+(?:DECLDIR\s+)?(nvml\w+)\s*\(\s*(?:const\s+)?(\w+)", header)
    return {name: argument.startswith("nvmlDevice_t") for name, argument in declarations}


def stub(function: str, exported: set[str]) -> str:
    """Return the line that lists a function.

    The line of a variant (for another default stream or NCCL's profiler) also names the original function.
    """
    function_of_variant = re.sub(r"_pt[sd][zs]$", "", function.removeprefix("p") if function.startswith("pnccl") else function)
    if function_of_variant != function and function_of_variant in exported:
        return f"VARIANT({function}, {function_of_variant})"
    return f"NAME({function})"


def merge(lines: dict[str, set[str]]) -> list[str]:
    """Merge the lists of a library's majors: a line that some of them lack gets the major in the name of its macro."""
    common = set.intersection(*lines.values())
    return [*common, *(line.replace("(", f"_{major}(", 1) for major, own in lines.items() for line in own - common)]


def write(name: str, lines: list[str]) -> None:
    ordered = sorted(lines)
    rows = [" ".join(ordered[start : start + 10]) for start in range(0, len(ordered), 10)]
    text = "\n".join(("/* Written by tests/simulation/exported_names.py. */", *rows, ""))
    (NATIVE / LISTS[name]).write_text(text)


def main(directories: list[str]) -> None:
    files = [path for directory in directories for path in Path(directory).rglob("*") if path.is_file()]
    for name, libraries in LIBRARIES.items():
        lines = {}
        for major, library in libraries.items():
            exported = set().union(*(symbols(path) for path in files if path.name == library))
            lines[major] = {stub(function, exported) for function in exported}
        write(name, merge(lines))
    driver = set().union(*(driver_functions(path.read_text()) for path in files if path.name == "cuda.h"))
    write("cuda", [stub(function, driver) for function in driver])
    management = {
        key: value for path in files if path.name == "nvml.h" for key, value in management_functions(path.read_text()).items()
    }
    write("nvml", [f"{'DEVICE_NAME' if takes_device else 'NAME'}({function})" for function, takes_device in management.items()])


if __name__ == "__main__":
    main(sys.argv[1:])
