"""Output to a terminal, a file or a pipe, and keys from a terminal. Handles missing Unicode, closed pipes and full disks."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

# Text is made for terminals of this many columns; wider ones are not filled.
_NARROWEST, _WIDEST = 60, 80

_USAGE = 2

# Replacements for terminals without Unicode.
_ASCII = str.maketrans({"✓": "+", "✗": "x", "°": " ", "…": "~", "─": "-", "█": "#", "░": "."})

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class OutputError(Exception):
    """The output cannot be written, for another reason than a closed pipe; the message says why."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, and prints its help with ``write``."""

    def error(self, message: str) -> NoReturn:
        """Report wrong usage and exit."""
        self.exit(_USAGE, f"{self.prog}: {message} (--help explains)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments; an unknown option is wrong usage, with the option that is most like it."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return options

    def _suggestion(self, unknown: list[str]) -> str:
        import difflib  # imported late: only wrong usage needs it

        word = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        close = difflib.get_close_matches(word, self._option_string_actions, n=1) if word else []
        return f"; did you mean {close[0]}?" if close else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            write(message)
        else:
            super()._print_message(message, file)


def write(text: str) -> bool:
    """Write to standard output and flush it.

    Returns:
        False if the reader has closed the pipe, as ``| head -1`` does; else True.

    Raises:
        OutputError: if the output cannot be written for another reason, such as a full disk.
    """
    out = sys.stdout
    try:
        text.encode("ascii" if _is_dumb() else getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError as error:
        text = text.translate(_ASCII).encode(error.encoding, "replace").decode(error.encoding)
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        _discard_buffer(out)
        return False
    except OSError as error:
        _discard_buffer(out)
        raise OutputError(f"cannot write the output: {error.strerror}") from None
    return True


def _discard_buffer(out: object) -> None:
    """Redirect the stream to the null device, because Python flushes its buffer at exit and would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, out.fileno())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    os.close(null)


def _is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


def takes_escapes() -> bool:
    """Whether standard output is a terminal with colors and a movable cursor."""
    return sys.stdout.isatty() and not _is_dumb()


def width() -> int:
    """Return the number of columns for text: the terminal's, within limits; 80 for a file or a pipe."""
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def has_color(choice: str = "auto") -> bool:
    """Whether to write colors.

    Args:
        choice: "always", "never" or "auto". "auto" writes colors to a terminal that has them, or anywhere if ``FORCE_COLOR`` is
            set, but never if ``NO_COLOR`` is set.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or takes_escapes()


def styled(text: str, style: str | None, color: bool) -> str:
    """Return the text in a style if ``color`` is true, else unchanged."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if color and style else text


def redraw(text: str) -> bool:
    """Overwrite the terminal with the lines of the text that fit. Return the result of ``write``."""
    height = max(shutil.get_terminal_size().lines - 1, 1)
    lines = text.splitlines()
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    # Clearing the rest of each line, and the lines below, flickers less than clearing the terminal first.
    return write("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J")


@contextmanager
def single_keys() -> Generator[None, None, None]:
    """Make keys readable before Return is pressed, if standard input is a terminal."""
    if sys.platform == "win32" or not sys.stdin or not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    saved = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def is_quit_pressed(seconds: float) -> bool:
    """Wait until the time is over, ``q`` is pressed or the terminal is closed. Return False if the time is over."""
    if sys.platform == "win32" or not sys.stdin or not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    import select

    deadline = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(deadline - time.monotonic(), 0))[0]:
        key = os.read(sys.stdin.fileno(), 1)
        if key in (b"q", b"Q"):
            return True
        if not key:  # the terminal was closed
            time.sleep(max(deadline - time.monotonic(), 0))
            return True
    return False
