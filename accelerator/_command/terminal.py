"""Where the commands write: to a terminal, a file or a pipe, which may be narrow, full, closed, or know no Unicode."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import NoReturn

WIDTH = 80

_USAGE = 2

# For a terminal that knows ASCII or a code page only.
_PLAIN = str.maketrans({"✓": "+", "✗": "x", "°": " ", "…": "~", "─": "-"})

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32"}


class Unwritable(Exception):
    """The output cannot be written, and somebody wants it; the message says why."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Report wrong usage."""
        self.exit(_USAGE, f"{self.prog}: {message} (--help explains)\n")


def write(text: str) -> bool:
    """Write to standard output, at once.

    Returns:
        False once nobody reads it any more, as after ``| head -1``.

    Raises:
        Unwritable: if it cannot be written for another reason, such as a full disk.
    """
    out = sys.stdout
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError as error:
        text = text.translate(_PLAIN).encode(error.encoding, "replace").decode(error.encoding)
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        _leave(out)
        return False
    except OSError as error:
        _leave(out)
        raise Unwritable(f"cannot write the output: {error.strerror}") from None
    return True


def _leave(out: object) -> None:
    """Let what is still in a stream's buffer go nowhere, where Python's own end would fail on it once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, out.fileno())  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    os.close(null)


def is_terminal() -> bool:
    """Whether a person looks at it."""
    return sys.stdout.isatty()


def has_color() -> bool:
    """Whether the output goes to a terminal that takes colors and a person who wants them."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, color: bool) -> str:
    """A text in a style, where there are colors."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if color else text


def redraw(text: str) -> bool:
    """Write over what stood on the terminal before, as many lines as it has; gives what `write` gives."""
    height = max(shutil.get_terminal_size().lines - 1, 1)
    lines = text.splitlines()
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    # Each line is cleared to its end, and after the last one everything below: nothing flickers.
    return write("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J")
