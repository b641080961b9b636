"""``--pdb`` and ``--trace`` with marked tests: a debugger needs the terminal, which only the session's own process has."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from .._environment import is_simulated
from .._guard import VARIABLE

# They differ between two runs on the same machine.
_STATE, _RUN = "ACCELERATOR_SIM_STATE", VARIABLE

# The parameters of `environment` that describe the machine of a run, not a kind of machine.
_OF_A_RUN = ("state", "base")


def wants_debugger(config: pytest.Config) -> bool:
    """Return whether the session may open a debugger."""
    return bool(config.option.usepdb or config.option.trace)


def is_this_machine(machine: Mapping[str, str], own: Mapping[str, str], *, has_own_state: bool) -> bool:
    """Return whether a process with the environment ``own``, this one's, already runs on a machine.

    Args:
        machine: the environment of the machine's processes.
        own: this process's environment.
        has_own_state: whether the mark names the machine's state file; otherwise any state will do.
    """

    def without_state(environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if name != _RUN and (has_own_state or name != _STATE)}

    return is_simulated() and without_state(machine) == without_state(own)


def note(arguments: Mapping[str, Any], nodeid: str) -> str:
    """Return the section of a failed test's report that says how to debug it.

    Args:
        arguments: those of the test's mark, by parameter.
        nodeid: the test.
    """
    text = "The test ran in a process of its own, which has no terminal for a debugger. "
    words: list[str] = []
    without_option: list[str] = []
    for name, value in arguments.items():
        of_parameter = _OPTIONS[name](value) if name in _OPTIONS else None
        if of_parameter is not None:
            words += of_parameter
        elif name not in _OF_A_RUN:
            without_option.append(name)
    test = shlex.quote(nodeid)
    if without_option:
        return (
            f"{text}simulate has no option for this mark's {', '.join(without_option)}: start pytest with the environment\n"
            f"that accelerator.simulation.environment(...) returns for the mark's arguments; --pdb {test} then works in place"
        )
    options = "".join(f"{word} " for word in map(shlex.quote, words))
    return (
        f"{text}To debug it, start pytest on its machine:\n"
        f"python -m accelerator simulate {options}-- python -m pytest --pdb {test}"
    )


def _each(option: str) -> Callable[[Any], list[str] | None]:
    """Return the words of an option that is repeated for each GPU."""

    def words(value: Any) -> list[str] | None:
        values = [value] if isinstance(value, (int, str)) else list(value)
        return [word for each in values for word in (option, str(each))]

    return words


def _each_or_off(option: str) -> Callable[[Any], list[str] | None]:
    def words(value: Any) -> list[str] | None:
        values = [value] if value is None or isinstance(value, int) else list(value)
        texts = ["off" if each is None or each is False else "all" if each is True else str(each) for each in values]
        return [word for text in texts for word in (option, text)]

    return words


def _numa(value: Any) -> list[str] | None:
    values = [value] if value is None or isinstance(value, int) else list(value)
    if any(type(each) is not int for each in values):
        return None  # several nodes, or none
    return [word for each in values for word in ("--numa", str(each))]


def _without(option: str) -> Callable[[Any], list[str] | None]:
    return lambda value: [] if value else [option]


_OPTIONS: dict[str, Callable[[Any], list[str] | None]] = {
    "gpus": _each("--gpus"),
    "memory": _each("--memory"),
    "name": _each("--name"),
    "capability": _each("--capability"),
    "mig": _each_or_off("--mig"),
    "nvlink": _each_or_off("--nvlink"),
    "numa": _numa,
    "driver": _each("--driver"),
    "nvml": _each("--nvml"),
    "compute": _without("--no-compute"),
    "fill": _each("--fill"),
    "triton": _without("--no-triton"),
    "compile": _each("--compile"),
    "races": lambda value: [] if value is None else ["--races", value],
    "late_copies": lambda value: ["--late-copies"] if value else [],
}
"""The words of simulate's command line for a parameter's value; None if it has no option for this value."""
