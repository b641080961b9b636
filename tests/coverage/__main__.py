"""``python -m tests.coverage [--append] [pytest arguments]``: print the lines of ``accelerator/`` that the suite does not run.

It measures all processes that the tests start. ``--append`` adds to an earlier measurement, such as of another torch build.
"""

from __future__ import annotations

import signal
import sys
import sysconfig
from pathlib import Path

import coverage

from tests import __main__ as suite
from tests.coverage import measured


def main(arguments: list[str]) -> int:
    starter = Path(sysconfig.get_path("purelib")) / "accelerator_coverage.pth"
    whole = coverage.Coverage(config_file=str(measured.ROOT / "pyproject.toml"))
    if arguments[:1] == ["--append"]:
        arguments = arguments[1:]
    else:
        whole.erase()
    # Remove the file whatever ends this process: every Python process of the environment reads it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    starter.write_text(f"import runpy; runpy.run_path({measured.__file__!r})\n")
    try:
        failed = suite.main(arguments)
    finally:
        starter.unlink()
    whole.combine()
    whole.save()
    whole.report(show_missing=True, skip_covered=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
