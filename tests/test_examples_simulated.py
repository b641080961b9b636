"""Every example in a docstring runs and prints the output that it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import accelerator
from accelerator import checkpointing
from tests.support import run, simulated_environment

PACKAGE = Path(accelerator.__file__).parent
# Their examples need a process in which nothing has initialized the driver. One injects a fault, which would fire later.
IN_CHILDREN = (
    *("discovery", "identity", "launching", "memory_info", "monitoring", "out_of_memory"),
    "simulation._outside.machine_faults",
)


def find_modules() -> list[str]:
    """Return the modules whose docstrings have examples, without importing any."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "    >>> " in file.read_text(encoding="utf-8")]
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if name not in IN_CHILDREN]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("module", find_modules())
def test_examples_of_runtime_functions(module: str) -> None:
    failed, tried = doctest.testmod(
        importlib.import_module(f"accelerator.{module}"),
        extraglobs={"acc": accelerator, "torch": torch, "checkpointing": checkpointing},
        optionflags=doctest.ELLIPSIS,
    )
    assert tried
    assert failed == 0


@pytest.mark.parametrize("module", IN_CHILDREN)
def test_examples_in_children(module: str) -> None:
    """Run each example in its own child."""
    program = """
    import torch
    import accelerator as acc, doctest, importlib, os, sys
    module = importlib.import_module(sys.argv[1])
    found = doctest.DocTestFinder().find(module, extraglobs={"acc": acc, "torch": torch})
    tests = [test for test in found if test.examples]
    failed = []
    for test in tests:
        sys.stdout.flush()
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
    run(program, simulated_environment(gpus=2), f"accelerator.{module}")
