"""``python -m accelerator``: report what this machine has, check that it works, or run a command on simulated GPUs.

The command ``fault`` breaks GPUs of a simulated machine that runs, and ``rehearse`` says what memory a program needs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from . import __version__
from ._command import terminal


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit status."""
    command = arguments[0] if arguments and not arguments[0].startswith("-") else "report"
    rest = arguments[1:] if arguments[:1] == [command] else arguments
    try:
        if command == "simulate":
            from ._command import simulate

            return simulate.main(rest)
        if command == "fault":
            from ._command import fault

            return fault.main(rest)
        if command == "rehearse":
            from ._command import rehearse

            return rehearse.main(rest)
        if command == "check":
            return _check(rest)
        if command == "report":
            return _report(rest)
    except terminal.OutputError as error:
        print(f"python -m accelerator: {error}", file=sys.stderr)
        return 1
    _parser("").error(f"unknown command {command!r}: there are report, check, simulate, fault and rehearse")


def _parser(command: str, **options: Any) -> terminal.Parser:
    parser = terminal.Parser(prog=f"python -m accelerator {command}".rstrip(), allow_abbrev=False, **options)
    parser.add_argument("--version", action="version", version=f"accelerator {__version__}")
    return parser


def _report(arguments: list[str]) -> int:
    parser = _parser(
        "",
        usage="python -m accelerator [report|check|simulate|fault|rehearse] [OPTIONS]",
        description="report, the default: print what this machine has, without importing torch or initializing the driver.",
        epilog="'check' exercises every area on every device, 'simulate -- COMMAND' runs a command on simulated GPUs, "
        "'fault WHAT' breaks those of one that runs, 'rehearse -- COMMAND' says what memory it needs; "
        "each has its own --help.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one document a line")
    parser.add_argument("--strict", action="store_true", help="let a child process try to use each device")
    parser.add_argument("--id", metavar="IDS", help="report only these devices: indices or UUIDs, separated by commas")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="repeat the report every SECONDS, or every 2 seconds, until q or Ctrl-C",
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when to write colors (default: auto)"
    )
    options = parser.parse_args(arguments)
    from ._command import report

    try:
        if options.watch is None:
            terminal.write(_text(options))
        else:
            _watch(options)
    except KeyboardInterrupt:
        pass
    except report.UnknownDevice as error:
        parser.error(str(error))
    return 0


def _watch(options: argparse.Namespace) -> None:
    write = terminal.redraw if terminal.takes_escapes() and not options.json else terminal.write
    with terminal.single_keys():
        while write(_text(options)) and not terminal.is_quit_pressed(options.watch):
            pass


def _text(options: argparse.Namespace) -> str:
    from ._command import report, report_text

    facts = report.collect(strict=options.strict, ids=options.id)
    watched = options.watch is not None
    if options.json:
        return json.dumps(facts, indent=None if watched else 2) + "\n"
    color = terminal.has_color(options.color)
    text = report_text.format_report(facts, color=color, brief=watched, selected=options.id is not None)
    return text + "\n" if watched and not terminal.takes_escapes() else text


def _seconds(text: str) -> float:
    # float alone would also take other scripts' digits, and "1_0".
    seconds = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+", text) else 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2 or 0.5")
    return seconds


def _check(arguments: list[str]) -> int:
    parser = _parser(
        "check",
        description="Exercise every area on every visible device, or on the CPU if there is none. The exit status is 1 if an "
        "area failed. Under torchrun each process checks the device of its LOCAL_RANK, and rank 0 prints one table.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks wait for each other under torchrun (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    from ._command import check, cluster_check

    if cluster_check.is_rank():
        return cluster_check.main(as_json=options.json, timeout=options.timeout)

    return check.main(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
