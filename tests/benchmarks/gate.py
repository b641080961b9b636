"""Comparison of figures with their budgets, for all benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(rounds: Sequence[float]) -> float:
    """Return the interquartile range of the rounds."""
    low, _, high = statistics.quantiles(rounds, n=4)
    return high - low


def passes(figure: float, budget: float, spread: float) -> bool:
    """Return whether a figure exceeds its budget by at most 5 %, or by at most the spread of its rounds."""
    return figure <= max(budget * 1.05, budget + spread)
