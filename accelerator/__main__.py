"""``python -m accelerator``: report what this machine has, check that it works, or run a command on simulated GPUs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from . import __version__
from ._command import terminal


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit status."""
    command = arguments[0] if arguments and not arguments[0].startswith("-") else "report"
    rest = arguments[1:] if arguments[:1] == [command] else arguments
    if command == "simulate":
        from ._command import simulate

        return simulate.main(rest)
    try:
        if command == "check":
            return _check(rest)
        if command == "report":
            return _report(rest)
    except terminal.Unwritable as error:
        print(f"python -m accelerator: {error}", file=sys.stderr)
        return 1
    _parser("").error(f"unknown command {command!r}: there are report, check and simulate")


def _parser(command: str, **words: Any) -> terminal.Parser:
    parser = terminal.Parser(prog=f"python -m accelerator {command}".rstrip(), allow_abbrev=False, **words)
    parser.add_argument("--version", action="version", version=f"accelerator {__version__}")
    return parser


def _report(arguments: list[str]) -> int:
    parser = _parser(
        "",
        usage="python -m accelerator [report | check | simulate] [OPTIONS]",
        description="report, the default: print what this machine has, without importing torch or starting the driver.",
        epilog="'check' exercises every area on every device that is there, 'simulate -- COMMAND' runs a command on simulated "
        "GPUs; each has its own --help.",
    )
    parser.add_argument("--json", action="store_true", help="print it for programs, with --watch one document a line")
    parser.add_argument("--strict", action="store_true", help="also let a child process try to use each device")
    parser.add_argument("--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS", help="print it again and again (2)")
    options = parser.parse_args(arguments)
    if options.watch is None:
        terminal.write(_text(options))
        return 0
    try:
        redrawn = terminal.is_terminal() and not options.json
        while (terminal.redraw if redrawn else terminal.write)(_text(options)):
            time.sleep(options.watch)
    except KeyboardInterrupt:
        pass
    return 0


def _text(options: argparse.Namespace) -> str:
    from ._command import report, report_text

    facts = report.collect(strict=options.strict)
    watched = options.watch is not None
    if options.json:
        return json.dumps(facts, indent=None if watched else 2) + "\n"
    text = report_text.draw(facts, color=terminal.has_color(), brief=watched)
    return text + "\n" if watched and not terminal.is_terminal() else text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2 or 0.5")
    return seconds


def _check(arguments: list[str]) -> int:
    parser = _parser(
        "check",
        description="Exercise every area on every device that is there, on the CPU if there is none. The exit status is 1 if "
        "one failed. Under torchrun each process checks the device of its LOCAL_RANK, and the first prints one table of all.",
    )
    parser.add_argument("--json", action="store_true", help="print one document for programs")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long torchrun's processes wait for each other (60)",
    )
    options = parser.parse_args(arguments)
    from ._command import check, cluster_check

    if cluster_check.is_one():
        return cluster_check.main(as_json=options.json, timeout=options.timeout)

    return check.main(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
