"""What the command lines of ``simulate`` and ``rehearse`` share: options, then after ``--`` the command to run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from ..simulation import _known_gpus
from . import terminal

__all__ = ["RunParser", "report_error", "report_unknown_names"]

_USAGE = 2


class RunParser(terminal.Parser):
    """A parser of options and a command to run."""

    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"python -m accelerator {name}",
            usage="%(prog)s [OPTIONS] -- COMMAND...",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options and the command, which may be empty. Exit if the usage is wrong."""
        # Added last, so that the help lists it after the options.
        self.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --")
        options = self.parse_args(argv)
        command: list[str] = options.command
        return options, command[1:] if command[:1] == ["--"] else command

    def require(self, command: list[str]) -> None:
        """Exit if there is no command."""
        if not command or not command[0]:
            self.error("no command: give one after --")


def report_error(name: str, message: str) -> int:
    """Print one line that says what is wrong, and return the exit status."""
    print(f"python -m accelerator {name}: {message}", file=sys.stderr)
    return _USAGE


def report_unknown_names(name: str, gpus: Iterable[str]) -> None:
    """Print one line for each name of a GPU that sets neither its memory nor its capability."""
    for each in dict.fromkeys(gpus):
        if _known_gpus.find(each) is None:
            report_error(name, f"no GPU named {each!r} is known, so the name sets neither memory nor capability")
