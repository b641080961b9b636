"""When a figure is over its budget, for all benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(rounds: Sequence[float]) -> float:
    """The range between the quartiles of the rounds' figures."""
    low, _, high = statistics.quantiles(rounds, n=4)
    return high - low


def passes(figure: float, budget: float, spread: float) -> bool:
    """Whether a figure is not above its budget both by over 5 % and by over the spread of the rounds it is of."""
    return figure <= max(budget * 1.05, budget + spread)
