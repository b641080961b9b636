"""Faults in the command line."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
