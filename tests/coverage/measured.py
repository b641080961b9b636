"""What a Python begins with while ``tests.coverage`` measures it: every process that tests start, whatever they leave of the
environment, and those that are told to leave out ``site``, as the child is that asks the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
DRIVER_CHILD = ROOT / "accelerator/_machine/driver_child.py"

# In front of a program that a Python without site-packages is given; a program with a file of its own is told by its text.
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

    # Not for children: each has this start of its own, and tests look at the environment.
    variables = {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "ACCELERATOR_ROOT": str(ROOT)}
    os.environ.update(variables)
    try:
        coverage.process_startup()
    finally:
        for name in variables:
            del os.environ[name]
    begin, leave = subprocess.Popen.__init__, os._exit
    packages = str(Path(coverage.__file__).parents[1])

    def measured(self: Any, args: Any, *others: Any, **options: Any) -> None:
        if isinstance(args, (list, tuple)) and "-S" in args[1:4] and "-c" in args[:5]:
            at = list(args).index("-c") + 1
            file = str(DRIVER_CHILD) if args[at] == DRIVER_CHILD.read_text() else "<string>"
            program = _WITHOUT_SITE.format(packages=packages, this=__file__, program=args[at], file=file)
            args = [*args[:at], program, *args[at + 1 :]]
        begin(self, args, *others, **options)

    def saved(status: int) -> NoReturn:
        # Coverage's own patch would save what a forked child's parent had, too, and both into one file.
        current = coverage.Coverage.current()
        if current is not None:
            current.save()
        leave(status)

    subprocess.Popen.__init__ = measured  # type: ignore[method-assign]
    os._exit = saved


if "coverage" not in sys.modules:
    start()
