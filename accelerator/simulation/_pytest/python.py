"""Another Python like this one: with its flags and its path, as what runs there is to be the same tests."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = (
    "import importlib, json, sys; sys.path[:], sys.argv[0], module, function = json.loads(sys.argv.pop(1)); "
    "sys.exit(getattr(importlib.import_module(module), function)())"
)


def command(module: str, function: str, *arguments: str) -> list[str]:
    """The command that calls a function of a module, which finds the arguments in ``sys.argv``."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _PROGRAM, json.dumps([sys.path, sys.argv[0], module, function]), *arguments]
