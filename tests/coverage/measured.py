"""Start coverage in every Python process while ``tests.coverage`` runs, also with another environment or without ``site``.

The probe's child runs without ``site``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
DRIVER_CHILD = ROOT / "accelerator/_machine/driver_child.py"

# The start of a program that runs without site-packages.
_WITHOUT_SITE = """\
import sys
sys.path.insert(0, {packages!r})
import runpy
runpy.run_path({this!r})
sys.path.remove({packages!r})
exec(compile({program!r}, {file!r}, "exec"), globals())
"""


def start() -> None:
    import coverage

    # Children start coverage themselves, and tests compare environments.
    variables = {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "ACCELERATOR_ROOT": str(ROOT)}
    os.environ.update(variables)
    try:
        coverage.process_startup()
    finally:
        for name in variables:
            del os.environ[name]
    start_process, leave = subprocess.Popen.__init__, os._exit
    packages = str(Path(coverage.__file__).parents[1])

    def measured(self: Any, args: Any, *others: Any, **options: Any) -> None:
        if isinstance(args, (list, tuple)) and "-S" in args[1:4] and "-c" in args[:5]:
            at = list(args).index("-c") + 1
            file = str(DRIVER_CHILD) if args[at] == DRIVER_CHILD.read_text() else "<string>"
            program = _WITHOUT_SITE.format(packages=packages, this=__file__, program=args[at], file=file)
            args = [*args[:at], program, *args[at + 1 :]]
        start_process(self, args, *others, **options)

    def saved(status: int) -> NoReturn:
        # Coverage's own patch would also save the parent's data in a forked child.
        current = coverage.Coverage.current()
        if current is not None:
            current.save()
        leave(status)

    subprocess.Popen.__init__ = measured  # type: ignore[method-assign]
    os._exit = saved


if "coverage" not in sys.modules:
    start()
