"""Every example in a docstring runs, and answers what it says."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil

import pytest

import accelerator
from tests.support import run

ROOMS = [
    module.name.removeprefix("accelerator.")
    for module in pkgutil.walk_packages(accelerator.__path__, "accelerator.")
    if not module.name.endswith("__main__")
]
# Their examples show what is so before anything has initialized the driver.
QUESTIONS = ("discovery", "monitoring", "memory_info", "launching")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("room", [room for room in ROOMS if room not in QUESTIONS])
def test_actions(room: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"accelerator.{room}"), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("room", QUESTIONS)
def test_questions(room: str) -> None:
    # Each in a child of its own, as some initialize the driver.
    program = f"""
    import doctest, os, sys, accelerator.{room} as room
    tests = [test for test in doctest.DocTestFinder().find(room) if test.examples]
    failed = []
    for test in tests:
        child = os.fork()
        if not child:
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            status = min(runner.run(test).failed, 1)
            sys.stdout.flush()
            os._exit(status)
        if os.waitpid(child, 0)[1]:
            failed.append(test.name)
    assert tests and not failed, failed
    """
    run(program, dict(os.environ))
