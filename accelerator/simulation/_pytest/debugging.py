"""``--pdb`` and ``--trace`` with marked tests: a debugger needs the terminal, which only the session's own process has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from .. import _settings
from .._outside.environment import is_simulated

# They differ between two runs on the same machine.
_STATE, _RUN = _settings.variable("state"), _settings.variable("run")


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
        setting = _settings.find(name)
        option = setting.type.format_option(setting.flag, value) if setting.simulate is not None else None
        if option is not None:
            words += option
        elif not setting.is_of_a_run:
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
