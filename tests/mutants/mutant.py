"""What a fault is: what is replaced where, and which tests must fail then."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        file: the file below ``accelerator/``.
        old: text that occurs there exactly once.
        new: what takes its place.
        tests: pytest's names of tests below ``tests/``, of which at least one must fail; all in files that run on one machine.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
