"""Command lines of further Python processes with this one's interpreter flags and module search path.

The child also keeps the entries that its own PYTHONPATH adds: the simulated machine's kernels are loaded through one of them.
"""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = (
    "import importlib, json, os, sys; path, sys.argv[0], module, function = json.loads(sys.argv.pop(1)); "
    "own = os.environ.get('PYTHONPATH', '').split(os.pathsep); "
    "sys.path[:] = path + [each for each in sys.path if each in own and each not in path]; "
    "sys.exit(getattr(importlib.import_module(module), function)())"
)


def command(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command that calls a function of a module with the arguments in ``sys.argv``."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _PROGRAM, json.dumps([sys.path, sys.argv[0], module, function]), *arguments]
