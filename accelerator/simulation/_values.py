"""Validates the description of a simulated machine and encodes it for the C libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CACHE_NAME",
    "MAXIMUM_GPUS",
    "NEWEST_TORCH",
    "capability",
    "check_mig",
    "choice",
    "clock_reasons",
    "count",
    "cuda_version",
    "errors",
    "file",
    "flag",
    "gpus_of_option",
    "memory",
    "mig",
    "name",
    "numa",
    "nvlink",
    "per_gpu",
    "release",
    "runs_compiled_code",
    "speed",
]

CACHE_NAME = "accelerator/simulation-"
NEWEST_TORCH = (2, 15)
"""The newest release of torch that the tables of simulated GPUs describe: the newest one in ``_kernels/dtypes.json``."""
"""Start of a build's path below the user's cache directory; the hash of the sources follows."""

MAXIMUM_GPUS = 128
_OLDEST_COMPILING_TORCH = (2, 8)
_MAXIMUM_MIG = 7
_MAXIMUM_NAME = 80
_MINIMUM_MEMORY, _MAXIMUM_MEMORY = 2**20, 2**48
_MAXIMUM_ERRORS = 60
_MAXIMUM_NODES = 64
_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


def release(torch_version: str) -> tuple[int, int]:
    """Return the major and minor version of a torch."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)


def runs_compiled_code(torch_version: str) -> bool:
    """Return whether a torch has the functions of Dynamo, Inductor and Triton that the simulation replaces."""
    return release(torch_version) >= _OLDEST_COMPILING_TORCH


def count(gpus: object) -> int:
    """Check the number of GPUs."""
    if not isinstance(gpus, int) or isinstance(gpus, bool):
        raise TypeError(f"gpus must be an int, not {_type_name(gpus)}")
    if not 0 <= gpus <= MAXIMUM_GPUS:
        raise ValueError(f"gpus must be between 0 and {MAXIMUM_GPUS}, not {gpus}")
    return gpus


def gpus_of_option(text: str) -> int:
    """Convert the number of GPUs of an option, for argparse. `int` alone also takes other scripts' digits, and "1_0"."""
    import argparse  # imported late: most programs that import this module have no options

    if re.fullmatch(r"-?[0-9]+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def per_gpu(argument: str, value: object, gpus: int, convert: Callable[[str, Any], str], separator: str = ",") -> str:
    """Encode one value for all GPUs, or a sequence with one value for each GPU whose last value repeats."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return convert(argument, value)
    values = cast("Sequence[object]", value)
    if not values:
        raise ValueError(f"{argument} is an empty sequence: give one value for all GPUs, or one for each")
    if len(values) > max(gpus, 1):
        raise ValueError(f"{argument} has {len(values)} values for {gpus} GPU{'' if gpus == 1 else 's'}")
    return separator.join(convert(argument, item) for item in values)


def memory(argument: str, value: object) -> str:
    """Convert a size: bytes, or text such as "8GiB", "512MiB" or "1GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f'{argument} must be bytes or a size such as "8GiB", "512MiB" or "1GB", not {value!r}')
        size = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    else:
        raise TypeError(f'{argument} must be an int or a size such as "8GiB", not {_type_name(value)}')
    if not _MINIMUM_MEMORY <= size <= _MAXIMUM_MEMORY:
        number = str(value).strip()
        lacks_unit = number.isdigit() and 0 < size < _MINIMUM_MEMORY
        given = f'{number} bytes; did you mean "{number}GiB"?' if lacks_unit else repr(value)
        raise ValueError(f"{argument} must be at least 1 MiB and at most 256 TiB, not {given}")
    return str(size)


def name(argument: str, value: object) -> str:
    """Check a GPU's name; ';' separates the names that the libraries get."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {_type_name(value)}")
    if re.fullmatch(rf"(?! *$)[ -:<-~]{{1,{_MAXIMUM_NAME}}}", value) is None:
        raise ValueError(f"{argument} must be 1 to {_MAXIMUM_NAME} printable ASCII characters without ';', not {value!r}")
    return value


def capability(argument: str, value: object) -> str:
    """Check a compute capability such as "9.0"."""
    return _version(argument, value, "9.0")


def speed(argument: str, value: object) -> str:
    """Check a relative speed: CUDA enumerates the fastest GPU first by default."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an int, not {_type_name(value)}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{argument} must fit 32 bits, not {value}")
    return str(value)


def mig(argument: str, value: object) -> str:
    """Check a number of MIG instances: None if MIG is off, 0 if it is on without an instance."""
    if value is None:
        return "off"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be None or an int, not {_type_name(value)}")
    if not 0 <= value <= _MAXIMUM_MIG:
        raise ValueError(f"{argument} must be None or between 0 and {_MAXIMUM_MIG}, not {value}")
    return str(value)


def check_mig(migs: str, capabilities: str) -> None:
    """Check that only GPUs of compute capability 8.0 or more have MIG on."""
    modes, versions = migs.split(","), capabilities.split(",")
    for gpu in range(max(len(modes), len(versions))):
        version = versions[min(gpu, len(versions) - 1)]
        if modes[min(gpu, len(modes) - 1)] != "off" and int(version.partition(".")[0]) < 8:
            raise ValueError(f"mig needs compute capability 8.0 or more, and GPU {gpu} has {version}")


def nvlink(argument: str, value: object) -> str:
    """Check an NVLink group: True for one group of all GPUs, False or None for no NVLink, or a group number."""
    if isinstance(value, bool) or value is None:
        return "0" if value else "off"
    return _bounded(argument, value, MAXIMUM_GPUS)


def numa(argument: str, value: object) -> str:
    """Encode NUMA nodes as a bit mask; None means unknown."""
    if value is None:
        return "0"
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    nodes = cast("Sequence[object]", value) if several else [value]
    return str(sum({1 << int(_bounded(argument, node, _MAXIMUM_NODES)) for node in nodes}))


def clock_reasons(argument: str, value: object) -> str:
    """Check a mask of NVML's clock event reasons."""
    return _bounded(argument, value, 2**32)


def cuda_version(argument: str, value: object) -> str:
    """Check a CUDA version such as "13.2"."""
    return _version(argument, value, "13.2")


def choice(argument: str, value: object, choices: tuple[str, ...]) -> str:
    """Check a word against the allowed ones."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {_type_name(value)}")
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def flag(argument: str, value: object) -> str:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, not {value!r}")
    return str(int(value))


def errors(value: object, gpus: int) -> list[str]:
    """Check injected failures: ``{"cuInit": 999, "cuMemAlloc_v2@1": 2}`` or the same as text."""
    if value is None:
        return []
    if isinstance(value, str):
        entries = [entry for entry in value.split(",") if entry]
    elif isinstance(value, Mapping):
        entries = [f"{function}:{code}" for function, code in cast("Mapping[object, object]", value).items()]
    else:
        raise TypeError(f"errors must be a mapping of functions to codes, or a str, not {_type_name(value)}")
    if len(entries) > _MAXIMUM_ERRORS:
        raise ValueError(f"errors has {len(entries)} entries; at most {_MAXIMUM_ERRORS} are possible")
    for entry in entries:
        match = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?(?:@([0-9]+))?:[0-9]+", entry)
        if match is None:
            raise ValueError(
                f"errors has {entry!r}: an entry is function:code or function@gpu:code,"
                ' as in "nvmlInit*:18" or "cuMemAlloc_v2@1:2"'
            )
        if match[1] is not None and int(match[1]) >= gpus:
            raise ValueError(f"errors has {entry!r}, but there are {gpus} GPUs, numbered from 0")
    return entries


def file(argument: str, value: Any) -> str:
    """Check a file that child processes write; return its absolute path, since they may change their directory."""
    path = os.path.abspath(os.fspath(value))
    exists = os.path.exists(path)
    writable = path if exists else os.path.dirname(path)
    if os.path.isdir(path) or not os.path.exists(writable) or not os.access(writable, os.W_OK if exists else os.W_OK | os.X_OK):
        raise ValueError(f"{argument} must be a file that can be written to, not {path!r}")
    return path


def _bounded(argument: str, value: object, limit: int) -> str:
    """Check an integer from 0 to limit - 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an int, not {_type_name(value)}")
    if not 0 <= value < limit:
        raise ValueError(f"{argument} must be between 0 and {limit - 1}, not {value}")
    return str(value)


def _version(argument: str, value: object, example: str) -> str:
    """Check a version of two parts."""
    if not isinstance(value, str):
        raise TypeError(f'{argument} must be a str such as "{example}", not {_type_name(value)}')
    if re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,2}", value) is None:
        raise ValueError(f'{argument} must be two numbers as in "{example}", not {value!r}')
    return value


def _type_name(value: object) -> str:
    """Return the name of a wrong argument's type."""
    return type(value).__name__
