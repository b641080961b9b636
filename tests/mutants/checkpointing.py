"""Faults in activation checkpointing."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
