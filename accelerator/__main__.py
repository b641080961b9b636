"""``python -m accelerator``: report what this machine has, check that it works, or run a command on simulated GPUs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

_COMMANDS = ("report", "check", "simulate")


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit status."""
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else None
    rest = arguments[1:] if command else arguments
    if command == "simulate":
        from .simulation import _run

        return _run.main(rest)
    if command == "check":
        return _check(rest)
    return _report(rest)


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m accelerator",
        description="Print what this machine has for torch, without importing torch or starting the driver.",
        epilog="Other commands: 'check' exercises every area on the device that is there, "
        "'simulate -- COMMAND' runs a command on simulated GPUs; each has its own --help.",
    )
    parser.add_argument("command", nargs="?", choices=["report"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print it for programs")
    parser.add_argument("--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS", help="print it again and again (2)")
    options = parser.parse_args(arguments)
    if options.watch is None:
        _print_report(as_json=options.json)
        return 0
    try:
        while True:
            if not options.json and sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            _print_report(as_json=options.json)
            time.sleep(options.watch)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever read this has read enough; nor is there anything left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError
    return seconds


def _print_report(*, as_json: bool) -> None:
    from ._command import report

    facts = report.collect()
    text = json.dumps(facts, indent=2) + "\n" if as_json else report.render(facts, report.processes())
    print(text, end="", flush=True)


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m accelerator check",
        description="Exercise every area on the accelerator that is there, on the CPU if there is none. "
        "One line an area; the exit status is 1 if one failed.",
    )
    parser.parse_args(arguments)
    from ._command import check

    return check.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
