"""A whole session on simulated GPUs: pytest runs itself again there."""

from __future__ import annotations

import copy
import os
import types
from typing import Any

import pytest

from .._outside import processes
from .._outside.environment import environment
from .._outside.state_folder import state_folder
from . import python


class SimulatedSession:
    """The pytest that replaces this one, on a machine that arguments of `environment` describe."""

    def __init__(self, arguments: list[str], machine: dict[str, Any]) -> None:
        self._arguments = arguments
        self._machine = machine

    def run(self) -> int:
        """Run the replacing pytest on this terminal and return its exit status."""
        command = python.command("pytest", "main", "--on-simulated-gpus", *self._arguments)
        try:
            with state_folder() as folder:
                return processes.run("pytest", command, environment(**self._machine, state=folder / "state"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        except RuntimeError as error:
            raise pytest.UsageError(f"cannot simulate GPUs: {error}") from None


def take_over(config: pytest.Config, parser: pytest.Parser, args: list[str], machine: dict[str, Any]) -> SimulatedSession:
    """Keep the arguments of this pytest for the one that replaces it, and stop this one from loading and capturing."""
    simulated = SimulatedSession(_arguments(config), machine)
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
