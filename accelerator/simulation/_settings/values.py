"""The types of the values that settings of simulated GPUs have (`_settings`).

A type checks the value of a parameter, encodes it for the variable that simulated processes read, converts the words of an
option to the value of the parameter, and formats a value as the words of an option.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from . import fault_words

_MINIMUM_MEMORY, _MAXIMUM_MEMORY = 2**20, 2**48
_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


class ValueType:
    """A type of values. By default they are texts that nothing checks."""

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        """Check the value of a parameter, and return the text of its variable, or None if the variable stays unset.

        Raises:
            TypeError: The value has the wrong type.
            ValueError: The value is impossible.
        """
        return None if value is None else str(value)

    def parse(self, words: Sequence[str]) -> Any:
        """Return the value of a parameter for the words of an option, one for each time that the option is given.

        Raises:
            ValueError: A word is impossible; the message does not name the option.
        """
        return words[-1]

    def format_option(self, option: str, value: Any) -> list[str] | None:
        """Return the words of a command line that give a value, or None if the option cannot express it."""
        return [option, str(value)]


class Count(ValueType):
    """An integer from a minimum to a maximum."""

    def __init__(self, noun: str, minimum: int, maximum: int) -> None:
        self._noun = noun
        self._minimum, self._maximum = minimum, maximum

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        return _bounded(argument, value, self._minimum, self._maximum)

    def parse(self, words: Sequence[str]) -> int:
        # `int` alone also takes other scripts' digits, and "1_0".
        if re.fullmatch(r"-?[0-9]+", words[-1]) is None:
            raise ValueError(f"{words[-1]!r} is not a number of {self._noun}")
        return int(words[-1])


class Choice(ValueType):
    """One of several words."""

    def __init__(self, *choices: str, is_optional: bool = False) -> None:
        self.choices = choices
        self._is_optional = is_optional

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        if value is None and self._is_optional:
            return None
        if not isinstance(value, str):
            raise TypeError(f"{argument} must be a str, not {_type_name(value)}")
        if value not in self.choices:
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, self.choices))}, not {value!r}")
        return value

    def format_option(self, option: str, value: Any) -> list[str]:
        return [] if value is None else [option, value]


class Flag(ValueType):
    """True or False. The option takes no word and gives the value that is not the default."""

    def __init__(self, option_gives: bool, is_unset_if_false: bool = False) -> None:
        self.option_gives = option_gives
        self._is_unset_if_false = is_unset_if_false

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be True or False, not {value!r}")
        return None if self._is_unset_if_false and not value else str(int(value))

    def parse(self, words: Sequence[str]) -> bool:
        return self.option_gives

    def format_option(self, option: str, value: Any) -> list[str]:
        return [option] if value is self.option_gives else []


class PerGpu(ValueType):
    """One value for all GPUs, or a sequence with one value for each GPU, whose last value repeats."""

    def __init__(self, item: ValueType, separator: str = ",") -> None:
        self._item = item
        self._separator = separator

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        values = _as_sequence(value)
        if values is None:
            return str(self._item.encode(argument, value, gpus))
        if not values:
            raise ValueError(f"{argument} is an empty sequence: give one value for all GPUs, or one for each")
        if len(values) > max(gpus, 1):
            raise ValueError(f"{argument} has {len(values)} values for {gpus} GPU{'' if gpus == 1 else 's'}")
        return self._separator.join(str(self._item.encode(argument, item, gpus)) for item in values)

    def parse(self, words: Sequence[str]) -> Any:
        return [self._item.parse([each]) for each in self._split(words)]

    def _split(self, words: Sequence[str]) -> list[str]:
        """Split words at the separator. A name may contain commas, and no option of names splits them at semicolons."""
        if self._separator != ",":
            return list(words)
        return [part.strip() for word in words for part in word.split(",")]

    def format_option(self, option: str, value: Any) -> list[str] | None:
        values = _as_sequence(value)
        of_values = [self._item.format_option(option, each) for each in ([value] if values is None else values)]
        found = [words for words in of_values if words is not None]
        return [word for words in found for word in words] if len(found) == len(of_values) else None


class MemorySize(ValueType):
    """Bytes, or text such as "8GiB", "512MiB" or "1GB"."""

    def encode(self, argument: str, value: Any, gpus: int) -> str:
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


class GpuName(ValueType):
    """A GPU's name; ';' separates the names in the variable."""

    def __init__(self, maximum_length: int) -> None:
        self._maximum_length = maximum_length

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{argument} must be a str, not {_type_name(value)}")
        if re.fullmatch(rf"(?! *$)[ -:<-~]{{1,{self._maximum_length}}}", value) is None:
            raise ValueError(
                f"{argument} must be 1 to {self._maximum_length} printable ASCII characters without ';', not {value!r}"
            )
        return value


class ComputeCapability(ValueType):
    """A compute capability such as "9.0"."""

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        return _version(argument, value, "9.0")


class CudaVersion(ValueType):
    """A CUDA version such as "13.2", or None."""

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        return None if value is None else _version(argument, value, "13.2")


class Speed(ValueType):
    """A relative speed: CUDA enumerates the fastest GPU first by default."""

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        _check_int(argument, value)
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{argument} must fit 32 bits, not {value}")
        return str(value)

    def parse(self, words: Sequence[str]) -> int:
        if re.fullmatch("-?[0-9]+", words[-1]) is None:
            raise ValueError(f"{words[-1]!r} is not a speed")
        return int(words[-1])


class MigInstances(ValueType):
    """A number of MIG instances: None if MIG is off, 0 if it is on without an instance."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        if value is None:
            return "off"
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{argument} must be None or an int, not {_type_name(value)}")
        if not 0 <= value <= self._maximum:
            raise ValueError(f"{argument} must be None or between 0 and {self._maximum}, not {value}")
        return str(value)

    def parse(self, words: Sequence[str]) -> int | None:
        return _number_or_off(words[-1], "a number of instances or off")

    def format_option(self, option: str, value: Any) -> list[str]:
        return [option, "off" if value is None else str(value)]


def check_mig(migs: str, capabilities: str) -> None:
    """Check that only GPUs of compute capability 8.0 or more have MIG on, by the texts of the two variables."""
    modes, versions = migs.split(","), capabilities.split(",")
    for gpu in range(max(len(modes), len(versions))):
        version = versions[min(gpu, len(versions) - 1)]
        if modes[min(gpu, len(modes) - 1)] != "off" and int(version.partition(".")[0]) < 8:
            raise ValueError(f"mig needs compute capability 8.0 or more, and GPU {gpu} has {version}")


class _NvLinkGroup(ValueType):
    """An NVLink group: True for one group of all GPUs, False or None for no NVLink, or a group number."""

    def __init__(self, groups: int) -> None:
        self._groups = groups

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        if isinstance(value, bool) or value is None:
            return "0" if value else "off"
        return _bounded(argument, value, 0, self._groups - 1)

    def parse(self, words: Sequence[str]) -> int | None:
        return _number_or_off(words[-1], "all, off, or a group for each GPU")

    def format_option(self, option: str, value: Any) -> list[str]:
        return [option, "all" if value is True else "off" if value is None or value is False else str(value)]


class NvLinkGroups(PerGpu):
    """The NVLink group of each GPU, or one value for all GPUs."""

    def __init__(self, groups: int) -> None:
        super().__init__(_NvLinkGroup(groups))

    def parse(self, words: Sequence[str]) -> Any:
        groups = self._split(words)
        if groups == ["all"]:
            return True
        if "all" in groups:
            raise ValueError("nvlink must be all, or off or a group for each GPU, not both")
        return super().parse(words)


class NumaNodes(ValueType):
    """The NUMA nodes nearest to a GPU: one, a sequence, or None for unknown. The variable has a mask of their bits."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        if value is None:
            return "0"
        several = _as_sequence(value)
        nodes = [value] if several is None else several
        return str(sum({1 << int(_bounded(argument, node, 0, self._nodes - 1)) for node in nodes}))

    def parse(self, words: Sequence[str]) -> int:
        if re.fullmatch("[0-9]+", words[-1]) is None:
            raise ValueError(f"{words[-1]!r} is not a node for each GPU")
        return int(words[-1])

    def format_option(self, option: str, value: Any) -> list[str] | None:
        return [option, str(value)] if type(value) is int else None


class ClockReasons(ValueType):
    """A mask of NVML's reasons for throttled clocks."""

    def encode(self, argument: str, value: Any, gpus: int) -> str:
        return _bounded(argument, value, 0, 2**32 - 1)


class InjectedErrors(ValueType):
    """Injected failures: ``{"cuInit": 999, "cuMemAlloc_v2@1": 2}``, the same as text, or None."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        if value is None:
            return None
        if isinstance(value, str):
            entries = [entry for entry in value.split(",") if entry]
        elif isinstance(value, Mapping):
            entries = [f"{function}:{code}" for function, code in cast("Mapping[object, object]", value).items()]
        else:
            raise TypeError(f"{argument} must be a mapping of functions to codes, or a str, not {_type_name(value)}")
        if len(entries) > self._maximum:
            raise ValueError(f"{argument} has {len(entries)} entries; at most {self._maximum} are possible")
        for entry in entries:
            match = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?(?:@([0-9]+))?:[0-9]+", entry)
            if match is None:
                raise ValueError(
                    f"{argument} has {entry!r}: an entry is function:code or function@gpu:code,"
                    ' as in "nvmlInit*:18" or "cuMemAlloc_v2@1:2"'
                )
            if match[1] is not None and int(match[1]) >= gpus:
                raise ValueError(f"{argument} has {entry!r}, but there are {gpus} GPUs, numbered from 0")
        return ",".join(entries) or None


class Faults(ValueType):
    """Faults, as text or mappings, or None. The words of the option are files of JSON that hold such a list."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        faults = _as_sequence(() if value is None else value)
        if faults is None:
            raise TypeError(f"{argument} must be a sequence of faults, not {_type_name(value)}")
        if len(faults) > self._maximum:
            raise ValueError(f"{argument} has {len(faults)} faults; at most {self._maximum} are possible")
        parsed = [fault_words.parse(fault) for fault in faults]
        for fault in parsed:
            if fault.gpu is not None and fault.gpu >= gpus:
                raise ValueError(f"fault {fault.words!r}: there are {gpus} GPUs, numbered from 0")
        return fault_words.encode(parsed) or None

    def parse(self, words: Sequence[str]) -> Any:
        faults: list[Any] = []
        for word in words:
            try:
                with open(word, encoding="utf-8") as file:
                    content = json.load(file)
            except (OSError, ValueError) as error:
                raise ValueError(f"{word!r} cannot be read: {error}") from None
            if not isinstance(content, list):
                raise ValueError(f"{word!r} holds no list of faults")
            faults += content
        return faults

    def format_option(self, option: str, value: Any) -> list[str]:
        return [word for fault in value for word in ("--fault", fault_words.parse(fault).words)]


class FaultWords(ValueType):
    """Faults, one for each time that the option is given."""

    def encode(self, argument: str, value: Any, gpus: int) -> None:
        for fault in value:
            fault_words.parse(fault)

    def parse(self, words: Sequence[str]) -> list[str]:
        return list(words)


class OutputFile(ValueType):
    """A file that child processes write, or None. The variable has its absolute path: they may change their directory."""

    def encode(self, argument: str, value: Any, gpus: int) -> str | None:
        if value is None:
            return None
        path = os.path.abspath(os.fspath(value))
        exists = os.path.exists(path)
        writable = path if exists else os.path.dirname(path)
        mode = os.W_OK if exists else os.W_OK | os.X_OK
        if os.path.isdir(path) or not os.path.exists(writable) or not os.access(writable, mode):
            raise ValueError(f"{argument} must be a file that can be written to, not {path!r}")
        return path


class Environment(ValueType):
    """The variables of a process, or None."""

    def encode(self, argument: str, value: Any, gpus: int) -> None:
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{argument} must be a mapping of variables to values, not {_type_name(value)}")


def _as_sequence(value: Any) -> Sequence[Any] | None:
    """Return a value if it is a sequence and no text, else None."""
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def _number_or_off(word: str, noun: str) -> int | None:
    if re.fullmatch("off|[0-9]+", word) is None:
        raise ValueError(f"{word!r} is not {noun}")
    return None if word == "off" else int(word)


def _check_int(argument: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an int, not {_type_name(value)}")


def _bounded(argument: str, value: Any, minimum: int, maximum: int) -> str:
    """Check an integer."""
    _check_int(argument, value)
    if not minimum <= value <= maximum:
        raise ValueError(f"{argument} must be between {minimum} and {maximum}, not {value}")
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
