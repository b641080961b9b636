"""The grammar of ``CUDA_VISIBLE_DEVICES``: its value and the machine's GPUs determine what a process sees. Pure functions.

NVIDIA documents ordinals, UUIDs, unique prefixes, and that the first invalid entry ends the list. For undocumented cases
(repeats, mixed entries, blanks) this follows torch's parser.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BLANKS = " \t\n\v\f\r"
_INTEGER = re.compile(r"([+-]?)([0-9]+)")


class Instance(NamedTuple):
    """A MIG instance: its UUID, GPU instance id, compute instance id, and the caller's handle."""

    uuid: str
    gi: int
    ci: int
    handle: object = None


class Gpu(NamedTuple):
    """A physical GPU; ``instances`` is None while MIG is off."""

    uuid: str
    instances: tuple[Instance, ...] | None = None


class Target(NamedTuple):
    """A visible device: the position of its GPU in CUDA's order, and the MIG instance if it is one."""

    gpu: int
    instance: Instance | None = None


class Entry(NamedTuple):
    """One entry of the list: its text, what it selects, and, if it selects nothing, why."""

    text: str
    target: Target | None
    problem: str | None = None


class Selection(NamedTuple):
    """The visible devices, and how each entry of the list was read; ``entries`` is empty if the variable is not set."""

    targets: tuple[Target, ...]
    entries: tuple[Entry, ...] = ()

    @property
    def problem(self) -> Entry | None:
        """The first entry that selects nothing: the one that ended the list, or emptied it."""
        return next((entry for entry in self.entries if entry.problem), None)


def select(text: str | None, gpus: Sequence[Gpu]) -> Selection:
    """Apply the variable to the GPUs that exist.

    Args:
        text: the value of the variable, None if it is not set.
        gpus: all physical GPUs in CUDA's order.

    Returns:
        The visible devices in order, and how each entry was read.
    """
    if text is None:
        return Selection(_one_instance(Target(i, _first(gpu)) for i, gpu in enumerate(gpus) if gpu.instances != ()))
    if text == "":
        return Selection(())
    texts = text.split(",")
    if text.startswith("GPU-"):
        entries = _read(texts, [_gpu_uuid(entry, gpus) for entry in texts], texts)
    elif text.startswith("MIG-"):
        entries = _read(texts, [_instance(entry, gpus) for entry in texts], texts)
    else:
        ordinals = [_parse_integer(entry) for entry in texts]
        entries = _read(texts, [_ordinal(ordinal, gpus) for ordinal in ordinals], ordinals)
    return Selection(_one_instance(entry.target for entry in entries if entry.target), entries)


def quoted(text: str) -> str:
    """Quote a user's text for a one-line message. A long text is cut."""
    return repr(text) if len(text) <= 200 else f"{text[:100]!r}... ({len(text)} characters)"


def needs_uuids(text: str | None) -> bool:
    """Whether the variable can only be read with the UUIDs of the GPUs."""
    return text is not None and text.startswith(("GPU-", "MIG-"))


def hides_all(text: str | None) -> bool:
    """Whether the variable hides every device, whatever the machine has."""
    return text is not None and not listed(text)


def listed(text: str) -> tuple[str, ...]:
    """The entries of a list, up to the first that is invalid on any machine, in normal form."""
    entries: list[str] = []
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if text.startswith(prefix)), None)
    for entry in text.split(","):
        ordinal = _parse_integer(entry)
        if not entry.startswith(prefix) if prefix else ordinal is None or ordinal < 0:
            break
        normal = entry if prefix else str(ordinal)
        if normal in entries:
            return ()
        entries.append(normal)
    return tuple(entries)


def _read(texts: Sequence[str], items: Sequence[Target | str], keys: Sequence[object]) -> tuple[Entry, ...]:
    """The entries as CUDA reads them: the first invalid entry ends the list, and a repeat empties it."""
    repeated = _repeated(items, keys)
    if repeated is not None:
        problem = "repeats an earlier entry, which empties the whole list"
        return tuple(Entry(text, None, problem if i == repeated else None) for i, text in enumerate(texts))
    end = next((i for i, item in enumerate(items) if isinstance(item, str)), len(items))
    return tuple(
        Entry(text, item)
        if i < end and isinstance(item, Target)
        else Entry(text, None, f"{item}, which ends the list" if i == end else None)
        for i, (text, item) in enumerate(zip(texts, items, strict=True))
    )


def _repeated(items: Sequence[Target | str], keys: Sequence[object]) -> int | None:
    """The position of the first entry that repeats an earlier text, unknown devices included, or an earlier device."""
    spellings: set[object] = set()
    for i, (item, key) in enumerate(zip(items, keys, strict=True)):
        if key in spellings:
            return i
        if isinstance(item, _Malformed):
            break
        spellings.add(key)
    devices: set[object] = set()
    for i, item in enumerate(items):
        if isinstance(item, str):
            break
        device = item.gpu, item.instance and item.instance.uuid
        if device in devices:
            return i
        devices.add(device)
    return None


class _Malformed(str):
    """Why an entry is malformed: reading ends there, and later repeats do not count."""


def _parse_integer(text: str) -> int | None:
    match = _INTEGER.match(text.strip(_BLANKS))
    if match is None:
        return None
    prefix, digits = match.groups()
    # Python refuses to convert thousands of digits. Like strtol, this stops at the largest long.
    value = min(int(digits.lstrip("0")[:20] or "0"), sys.maxsize)
    return -value if prefix == "-" else value


def _ordinal(ordinal: int | None, gpus: Sequence[Gpu]) -> Target | str:
    if ordinal is None:
        return _Malformed("is not a number")
    if ordinal < 0:
        return _Malformed("is negative")
    if ordinal >= len(gpus):
        return f"is beyond the {len(gpus)} GPUs of this machine" if len(gpus) != 1 else "is beyond the only GPU of this machine"
    return _whole(ordinal, gpus)


def _gpu_uuid(text: str, gpus: Sequence[Gpu]) -> Target | str:
    if not text.startswith("GPU-"):
        return _Malformed("is not the UUID of a GPU, as the first entry is")
    matches = [i for i, gpu in enumerate(gpus) if gpu.uuid.startswith(text)]
    if len(matches) != 1:
        return "matches several GPUs" if matches else "matches no GPU"
    return _whole(matches[0], gpus)


def _instance(text: str, gpus: Sequence[Gpu]) -> Target | str:
    if not text.startswith("MIG-"):
        return _Malformed("is not the UUID of a MIG instance, as the first entry is")
    matches = [
        Target(i, instance)
        for i, gpu in enumerate(gpus)
        for instance in gpu.instances or ()
        if instance.uuid.startswith(text) or text == f"MIG-{gpu.uuid}/{instance.gi}/{instance.ci}"
    ]
    if len(matches) != 1:
        return "matches several MIG instances" if matches else "matches no MIG instance"
    return matches[0]


def _whole(position: int, gpus: Sequence[Gpu]) -> Target | str:
    gpu = gpus[position]
    return "is a GPU with MIG on and no instance" if gpu.instances == () else Target(position, _first(gpu))


def _first(gpu: Gpu) -> Instance | None:
    return gpu.instances[0] if gpu.instances else None


def _one_instance(targets: Iterable[Target]) -> tuple[Target, ...]:
    """A process that sees a MIG instance sees no other device."""
    targets = tuple(targets)
    instances = tuple(target for target in targets if target.instance)
    return instances[:1] or targets
