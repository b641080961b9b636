"""Faults in the simulated machine: its libraries, NCCL, the environment, the pytest plug-in."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
