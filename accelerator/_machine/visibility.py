"""The grammar of ``CUDA_VISIBLE_DEVICES``: its value and the machine's GPUs determine what a process sees. Pure functions.

NVIDIA documents ordinals, UUIDs, unique prefixes, and that the first invalid entry ends the list. The rest is what the driver
of CUDA 13.0 does: a device that is repeated before that end empties the list; UUIDs are compared digit by digit. Blanks before
ordinals and GPUs with MIG on follow torch's parser. The simulated driver has the same grammar in C (``driver/visible.c``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

_BLANKS = " \t\n\v\f\r"
_INTEGER = re.compile(r"([+-]?)([0-9]+)")
_UUID = re.compile(r"(?:GPU|MIG)-(?=.)-*((?:[0-9A-Fa-f]-*){0,32})", re.DOTALL)
_OLD_INSTANCE = re.compile(r"MIG-(GPU-[^/]*)/([0-9]+)/([0-9]+)")


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
    if needs_uuids(text):
        read = _read(texts, [_by_uuid(entry, gpus) for entry in texts])
    else:
        read = _read(texts, [_ordinal(_parse_integer(entry), gpus) for entry in texts])
    return Selection(_one_instance(entry.target for entry in read if entry.target), read)


def quoted(text: str) -> str:
    """Quote a user's text for a one-line message. A long text is cut."""
    return repr(text) if len(text) <= 200 else f"{text[:100]!r}... ({len(text)} characters)"


def needs_uuids(text: str | None) -> bool:
    """Whether the variable can only be read with the UUIDs of the GPUs."""
    return text is not None and text.startswith(("GPU-", "MIG-"))


def hides_all(text: str | None) -> bool:
    """Whether the variable hides every device, whatever the machine has."""
    if text is None:
        return False
    first = [_key(entry) for entry in entries(text)[:2]]
    return not first or first[0] in first[1:]  # a repeat of the first entry empties the list, or that entry does not exist


def listed(text: str) -> tuple[str, ...]:
    """The entries of a list, or none if one is repeated, which empties the list where all of them exist."""
    found = entries(text)
    return found if len(set(map(_key, found))) == len(found) else ()


def entries(text: str) -> tuple[str, ...]:
    """The entries of a list, up to the first that is invalid on any machine; ordinals in normal form."""
    if needs_uuids(text):
        return tuple(takewhile(lambda entry: _OLD_INSTANCE.fullmatch(entry) or _digits(entry) is not None, text.split(",")))
    ordinals = map(_parse_integer, text.split(","))
    return tuple(str(ordinal) for ordinal in takewhile(lambda ordinal: ordinal is not None and ordinal >= 0, ordinals))


def _key(entry: str) -> str:
    """What two entries share that are the same to the driver of every machine.

    With the digits of a MIG instance, ``MIG-`` selects it and ``GPU-`` selects nothing, so that these are no repeat there.
    """
    digits = _digits(entry)
    return entry if digits is None else entry[: len("GPU-")] + digits


def _digits(text: str) -> str | None:
    """The hexadecimal digits of a UUID or its beginning, as the driver reads them; None if another character is among them.

    Their case does not matter, nor whether the text begins with GPU- or MIG-, nor where dashes are, nor what follows 32 digits.
    """
    match = _UUID.match(text)
    if match is None:
        return None
    digits = match[1].replace("-", "").lower()
    return digits if len(digits) == 32 or match.end() == len(text) else None


def _read(texts: Sequence[str], items: Sequence[Target | str]) -> tuple[Entry, ...]:
    """The entries as CUDA reads them: the first invalid entry ends the list, and a repeat before it empties the list."""
    end = next((i for i, item in enumerate(items) if isinstance(item, str)), len(items))
    repeated = _repeated(items[:end])
    if repeated is not None:
        problem = "repeats an earlier entry, which empties the whole list"
        return tuple(Entry(text, None, problem if i == repeated else None) for i, text in enumerate(texts))
    return tuple(
        Entry(text, item)
        if i < end and isinstance(item, Target)
        else Entry(text, None, f"{item}, which ends the list" if i == end else None)
        for i, (text, item) in enumerate(zip(texts, items, strict=True))
    )


def _repeated(targets: Sequence[Target | str]) -> int | None:
    """The position of the first target that is an earlier one, too."""
    return next((i for i, target in enumerate(targets) if target in targets[:i]), None)


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
        return "is not a number"
    if ordinal < 0:
        return "is negative"
    if ordinal >= len(gpus):
        return f"is beyond the {len(gpus)} GPUs of this machine" if len(gpus) != 1 else "is beyond the only GPU of this machine"
    return _whole(ordinal, gpus)


def _by_uuid(text: str, gpus: Sequence[Gpu]) -> Target | str:
    if not needs_uuids(text):
        return "is not a UUID, as the first entry is"
    is_instance = text.startswith("MIG-")
    digits = _digits(text)
    matches: list[Target | str] = []
    for i, gpu in enumerate(gpus):
        if is_instance and gpu.instances is not None:
            matches += [Target(i, instance) for instance in gpu.instances if _names_instance(text, digits, gpu, instance)]
        elif digits is not None and (_digits(gpu.uuid) or "").startswith(digits):
            matches.append(_whole(i, gpus))
    if len(matches) != 1:
        kind = "MIG instance" if is_instance else "GPU"
        return f"matches several {kind}s" if matches else f"matches no {kind}"
    return matches[0]


def _names_instance(text: str, digits: str | None, gpu: Gpu, instance: Instance) -> bool:
    """Whether the text begins the UUID of an instance, or is its name of before driver 470."""
    old = _OLD_INSTANCE.fullmatch(text)
    if old:
        return (old[1], int(old[2]), int(old[3])) == (gpu.uuid, instance.gi, instance.ci)
    return digits is not None and (_digits(instance.uuid) or "").startswith(digits)


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
