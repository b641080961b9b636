"""The process that turns the PTX of one kernel, or the variables of a program, into C and compiles it.

The simulated runtime starts it: ``main([KERNEL, TARGET])`` with the PTX on standard input. A copy of this package that lies
beside the compiled libraries does it, in a Python that needs nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .compiler import build, lock
from .errors import Refused
from .generator import generate
from .images import read_texts
from .program import Program
from .variables import generate_variables

REFUSED = 3  # the exit status that native/runtime/translation.c knows, too
"""The exit status of a kernel that is not translated. Standard output says why."""


def main(arguments: Sequence[str]) -> int:
    """Translate a kernel, or, if its name is empty, the program's variables."""
    kernel, target = arguments[0], Path(arguments[1])
    sys.setrecursionlimit(100_000)
    try:
        program = Program(read_texts(sys.stdin.buffer))
        source = generate(program, kernel) if kernel else generate_variables(program)
        with lock(target):
            if not target.exists():
                build(source, target)
    except Refused as error:
        print(error)
        return REFUSED
    except OSError as error:
        print(f"{error.filename or target}: {error.strerror}")
        return REFUSED
    return 0
