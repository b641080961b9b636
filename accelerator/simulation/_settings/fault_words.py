"""Faults of simulated GPUs: the words in which a user writes them, and the table of Xids.

``native/faults`` does what a row of a fault says. Processes on a simulated machine load this module by file name, so it imports
nothing else of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_SECOND = 10**9
_ANY = -1
_UNITS = {"us": 10**3, "ms": 10**6, "s": _SECOND}

# Values of NVML's field 230.
_NO_ACTION, _RESET, _REBOOT, _DRAIN_AND_RESET = 0, 1, 2, 4

# What a fault leaves behind in NVML's counters: `fault_mark` of native/common/faults.h.
_ECC, _REMAP, _REMAP_FAILED, _CORRECTED = 1, 2, 4, 8

# CUDA's errors.
_ECC_UNCORRECTABLE, _NVLINK_UNCORRECTABLE, _ILLEGAL_ADDRESS, _LAUNCH_FAILED, _UNKNOWN = 214, 220, 700, 719, 999


class Xid(NamedTuple):
    """What an Xid does. docs/faults.md names the sources.

    Attributes:
        text: What the kernel's log says after the number.
        kind: "error", "lost", "hang" or "note".
        scope: Which processes the error reaches: "process", the one that fires it; "users" of the GPU at that time; "reset",
            these and all new ones until the GPU is reset.
        error: The code that CUDA's calls return.
        marks: What NVML counts.
        recovery: The recovery action that NVML recommends.
        duration: Seconds until the driver notices a hang.
    """

    text: str
    kind: str = "error"
    scope: str = "process"
    error: int = 0
    marks: int = 0
    recovery: int = _NO_ACTION
    duration: int = 0


XIDS = {
    13: Xid("Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Illegal Instruction Encoding", error=_LAUNCH_FAILED),
    31: Xid("MMU Fault: ENGINE GRAPHICS faulted. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ", error=_ILLEGAL_ADDRESS),
    43: Xid("Reset Channel Verif Error on channel 8", error=_LAUNCH_FAILED),
    45: Xid("Preemptive Channel Removal on channel 8", error=_LAUNCH_FAILED),
    48: Xid(
        "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer",
        scope="reset",
        error=_ECC_UNCORRECTABLE,
        marks=_ECC,
        recovery=_RESET,
    ),
    63: Xid("Row Remapper: New row marked for remapping, reset to activate", "note", marks=_REMAP, recovery=_DRAIN_AND_RESET),
    64: Xid("Row Remapper: Failed to remap a row", "note", marks=_REMAP_FAILED, recovery=_RESET),
    74: Xid("NVLink: fatal error detected on link 0", scope="users", error=_NVLINK_UNCORRECTABLE),
    79: Xid("GPU has fallen off the bus", "lost", "users", _UNKNOWN, recovery=_REBOOT),
    92: Xid("High single-bit ECC error rate", "note", marks=_CORRECTED),
    94: Xid(
        "Contained: SM (0x1). RST: No, D-RST: No", error=_ECC_UNCORRECTABLE, marks=_ECC | _REMAP, recovery=_DRAIN_AND_RESET
    ),
    95: Xid(
        "Uncontained: LTC TAG (0x2). RST: Yes, D-RST: No",
        scope="reset",
        error=_ECC_UNCORRECTABLE,
        marks=_ECC | _REMAP,
        recovery=_RESET,
    ),
    109: Xid("CTX SWITCH TIMEOUT", "hang", error=_LAUNCH_FAILED, recovery=_RESET, duration=2),
    119: Xid("Timeout after 45s of waiting for RPC response from GPU0 GSP!", "hang", "reset", _UNKNOWN, 0, _RESET, 45),
    120: Xid("GSP Error: Task 1 raised error code 0x5", "hang", "reset", _UNKNOWN, 0, _RESET, 45),
}
"""The Xids that can be simulated."""

_KINDS = "xid=N, hang, slow=TIME such as 20ms, link, flip=BIT, kill"
_WITHOUT_VALUE = ("hang", "link", "kill")
_NUMBERS = ("gpu", "node", "rank", "after_ops", "after_collectives", "after_launches", "seed")
_KEYS = (*_NUMBERS[:3], "after_ops", "after_collectives", "after_seconds", "after_launches", "for", "probability", "seed")
_CLOCKS = {"after_ops": "ops", "after_collectives": "collectives", "after_launches": "launches", "after_seconds": "seconds"}
_MAXIMUM_NUMBER = 2**31 - 1


class Fault(NamedTuple):
    """A fault as it was written: what, and the keys with their texts."""

    what: str
    value: str
    keys: dict[str, str]

    @property
    def words(self) -> str:
        """The fault in one word of a command line."""
        what = self.what if self.what in _WITHOUT_VALUE else f"{self.what}={self.value}"
        return ",".join((what, *(f"{key}={value}" for key, value in self.keys.items())))

    @property
    def gpu(self) -> int | None:
        """The number of its GPU, if it names one."""
        return int(self.keys["gpu"]) if "gpu" in self.keys else None

    @property
    def node(self) -> int | None:
        """The number of its node, if it names one."""
        return int(self.keys["node"]) if "node" in self.keys else None


def parse(given: str | Mapping[str, Any]) -> Fault:
    """Read a fault: "xid=94,gpu=1,after_ops=400", or a mapping with the same keys.

    Raises:
        TypeError: It is neither.
        ValueError: It is no fault. The message says which words there are.
    """
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        pairs = [(name, value) for name, _, value in (part.partition("=") for part in parts)]
    elif isinstance(given, Mapping):
        pairs = [(str(name), "" if value is True else _text(value)) for name, value in given.items() if value is not False]
        given = ",".join(name + (f"={value}" if value else "") for name, value in pairs)
    else:
        raise TypeError(f'a fault must be a str such as "xid=94,gpu=1", or a mapping, not {type(given).__name__}')

    def refuse(problem: str) -> ValueError:
        return ValueError(f"fault {given!r}: {problem}")

    found = [(name, value) for name, value in pairs if name in ("xid", "slow", "flip", *_WITHOUT_VALUE)]
    if len(found) != 1:
        wrong = f"{len(found)} faults in one" if found else f"{pairs[0][0]!r} is no fault" if pairs[0][0] else "it is empty"
        raise refuse(f"{wrong}; a fault has one of {_KINDS}")
    what, value = found[0]
    keys = dict(pair for pair in pairs if pair != found[0])
    if len(keys) != len(pairs) - 1:
        raise refuse("a key is given twice")
    for key, text in keys.items():
        if key not in _KEYS:
            raise refuse(f"there is no key {key!r}; the keys are {', '.join(_KEYS)}")
        if key in _NUMBERS and not (re.fullmatch("[0-9]+", text) and int(text) <= _MAXIMUM_NUMBER):
            raise refuse(f"{key}={text!r} is not a whole number from 0 to {_MAXIMUM_NUMBER}")
        if key in ("after_seconds", "for", "probability") and not re.fullmatch(r"[0-9]{1,8}(\.[0-9]{1,9})?|\.[0-9]{1,9}", text):
            raise refuse(f"{key}={text!r} is not a number such as 0.5")
    _check(what, value, keys, refuse)
    return Fault(what, value, keys)


def _check(what: str, value: str, keys: Mapping[str, str], refuse: Any) -> None:
    """Check what a fault says beyond the form of its words."""
    if what in _WITHOUT_VALUE and value:
        raise refuse(f"{what} takes no value")
    if what == "xid" and not (re.fullmatch("[0-9]{1,4}", value) and int(value) in XIDS):
        raise refuse(f"Xid {value or 'without a number'} is not simulated; these are: {', '.join(map(str, XIDS))}")
    if what == "slow" and _time(value) is None:
        raise refuse(f"slow={value!r} is not a time such as 20ms, 500us or 1.5s")
    if what == "flip" and not (re.fullmatch("[0-9]{1,2}", value) and int(value) < 64):
        raise refuse(f"flip={value!r} is not the number of a bit from 0 to 63")
    if len(keys.keys() & _CLOCKS.keys()) > 1:
        raise refuse(f"it begins at one of {', '.join(_CLOCKS)}, not at several")
    if "probability" in keys and not 0 < float(keys["probability"]) <= 1:
        raise refuse(f"probability={keys['probability']!r} is not more than 0 and at most 1")
    if "seed" in keys and "probability" not in keys:
        raise refuse("seed belongs to probability")
    lasts = what in ("hang", "slow", "link") or (what == "xid" and XIDS[int(value)].duration > 0)
    if "for" in keys and not lasts:
        raise refuse("it does not last; for= is for hang, slow, link and Xids 109, 119 and 120")
    if "for" in keys and float(keys["for"]) == 0:
        raise refuse("for= is more than 0 seconds")
    if "gpu" in keys and what == "kill":
        raise refuse("kill ends a process, and takes rank or node, not gpu")


def parse_gpu(words: Iterable[str]) -> tuple[int | None, int | None]:
    """Return the numbers that "gpu=N" and "node=N" give, each None without.

    Raises:
        ValueError: Another word is given, or a key twice.
    """
    numbers: dict[str, int | None] = {"gpu": None, "node": None}
    for word in words:
        key, _, text = word.partition("=")
        if key not in numbers or re.fullmatch("[0-9]{1,4}", text) is None:
            raise ValueError(f"{word!r} is neither gpu=N nor node=N")
        if numbers[key] is not None:
            raise ValueError(f"{word!r}: {key} is given twice")
        numbers[key] = int(text)
    return numbers["gpu"], numbers["node"]


def _text(value: Any) -> str:
    """Return a value of JSON as it is written on a command line, without an exponent."""
    return f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _time(text: str) -> int | None:
    """Return nanoseconds, or None if the text is no time."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(us|ms|s)", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def encode(faults: Iterable[Fault]) -> str:
    """Return the rows that ``native/faults/parse.c`` reads."""
    return ";".join(map(_row, faults))


def _row(fault: Fault) -> str:
    what, value, keys = fault
    xid = XIDS[int(value)] if what == "xid" else Xid("", what, "users")
    clock = next((_CLOCKS[key] for key in keys if key in _CLOCKS), "none")
    start = next((float(keys[key]) for key in keys if key in _CLOCKS), 0.0)
    chance = int(float(keys["probability"]) * 2**32) or 1 if "probability" in keys else 0
    if clock == "none" and (chance or what in ("flip", "kill")):
        clock = "ops"  # an op is what it happens to
    gpu = keys.get("gpu", _ANY if "rank" in keys or (what in ("link", "kill") and "node" in keys) else 0)
    amount = _time(value) if what == "slow" else value if what == "flip" else 0
    duration = int(float(keys.get("for", xid.duration)) * _SECOND)
    scope = "process" if what == "kill" and "node" not in keys else xid.scope
    at = int(start * _SECOND) if clock == "seconds" else int(start)
    numbers = (
        *(xid.kind, scope, clock, xid.marks, value if what == "xid" else 0, xid.error, xid.recovery),
        *(_ANY if what == "kill" else gpu, keys.get("node", _ANY), keys.get("rank", _ANY)),
        *(at, chance, keys.get("seed", 0), amount, duration),
    )
    return f"{' '.join(map(str, numbers))}|{fault.words}|{xid.text}"
