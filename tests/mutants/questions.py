"""Faults in the questions and what they stand on."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
