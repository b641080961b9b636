"""Faults in the simulated kernels."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
