"""A whole session on simulated GPUs: pytest runs itself again there."""

from __future__ import annotations

import copy
import os
import types
from typing import Literal

import pytest

from .. import _run
from .._environment import environment
from .._state_folder import state_folder
from . import python


class SimulatedSession:
    """The pytest that replaces this one."""

    def __init__(self, arguments: list[str], gpus: int, memory: str | None, finds_races: bool) -> None:
        self._arguments = arguments
        self._gpus = gpus
        self._memory = memory
        self._finds_races = finds_races

    def run(self) -> int:
        """Run the replacing pytest on this terminal and return its exit status."""
        command = python.command("pytest", "main", "--on-simulated-gpus", *self._arguments)
        races: Literal["report"] | None = "report" if self._finds_races else None
        try:
            with state_folder() as folder:
                child = environment(self._gpus, memory=self._memory, races=races, state=folder / "state")
                return _run.run("pytest", command, child)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        except RuntimeError as error:
            raise pytest.UsageError(f"cannot simulate GPUs: {error}") from None


def take_over(
    config: pytest.Config, parser: pytest.Parser, args: list[str], gpus: int, memory: str | None, finds_races: bool
) -> SimulatedSession:
    """Keep the arguments of this pytest for the one that replaces it, and stop this one from loading and capturing."""
    simulated = SimulatedSession(_arguments(config), gpus, memory, finds_races)
    args.clear()
    inert = parser.parse_known_args([], namespace=copy.copy(config.option))
    inert.noconftest, inert.capture, inert.confcutdir = True, "no", config.known_args_namespace.confcutdir
    config.known_args_namespace = inert
    return simulated


def _arguments(config: pytest.Config) -> list[str]:
    """Return the arguments for the replacing pytest, which reads ``addopts`` itself."""
    plugins: list[str] = []
    for plugin in config.invocation_params.plugins or ():
        if isinstance(plugin, types.ModuleType):
            plugin = plugin.__name__
        if not isinstance(plugin, str):
            raise pytest.UsageError(
                f"--simulate-gpus starts another pytest, which cannot get the plug-in {plugin!r}; name its module with -p"
            )
        plugins += ["-p", plugin]
    return [*plugins, *map(os.fspath, config.invocation_params.args)]
