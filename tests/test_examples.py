"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import accelerator

ROOMS = [
    module.name
    for module in pkgutil.walk_packages(accelerator.__path__, "accelerator.")
    if not module.name.endswith("__main__")
    # Those of the simulation show what is so on simulated GPUs.
    and (accelerator.simulation.is_simulated() or not module.name.startswith("accelerator.simulation."))
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("room", ROOMS)
def test_examples(room: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(room), optionflags=doctest.ELLIPSIS)
    assert failed == 0
