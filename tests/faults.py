"""``python -m tests.faults [NAME...]``: put each fault of ``faults.json`` into the code, and report whether tests notice it.

Faults are realistic mistakes in native code that the tests once did not notice, or might not: no library mutates C. Run this
before a release, in a clean checkout: it edits the files and restores them.

A fault names a file by the end of its path, a function (empty for code outside of functions), and either a text of the
function to ``find``, with its replacement, or a text in the statement to ``remove``. The text must occur once in the function:
a test says which faults no longer fit the code, and they are to be adapted or dropped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT

SIMULATE = [sys.executable, "-m", "accelerator", "simulate"]
PROCESSES = {
    "gpus2": [*SIMULATE, "--gpus", "2", "--"],
    "cpu": [*SIMULATE, "--gpus", "0", "--driver", "absent", "--nvml", "absent", "--"],
    "any": [],
}
DEADLINE_S = 900
# pytest's statuses for tests that pass, for wrong arguments and for no tests at all.
UNNOTICED = (0, 4, 5)


class Stale(Exception):
    """A fault that does not fit the code."""


def read() -> list[dict[str, Any]]:
    """Return all faults."""
    faults: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return faults


def find_file(ending: str) -> Path:
    """Return the file of the package with a path, or the only one whose path ends so."""
    package, parts = ROOT / "accelerator", Path(ending).parts
    if (package / ending).is_file():
        return package / ending
    files = [file for file in package.rglob(parts[-1]) if file.parts[-len(parts) :] == parts]
    if len(files) != 1:
        raise Stale(f"{len(files)} files of the package end with {ending}")
    return files[0]


def apply(fault: dict[str, Any], text: str) -> str:
    """Return the text of a fault's file with the fault."""
    start, end = c_function(text, fault["function"]) if fault["function"] else (0, len(text))
    anchor = fault.get("find") or fault["remove"]
    count = text.count(anchor, start, end)
    if count != 1:
        raise Stale(f"{anchor!r} occurs {count} times in {fault['function'] or 'the file'}")
    at = text.index(anchor, start)
    if "find" in fault:
        return text[:at] + fault["replace"] + text[at + len(anchor) :]
    start, end = c_statement(text, at)
    return text[:start] + ";" + text[end:]


def c_function(text: str, name: str) -> tuple[int, int]:
    """Return where a function of C or C++ begins and ends. A nested one is named alone."""
    found = re.search(rf"^(?!\s*[#/*])[^\n=;]*\b{name}\([^;{{}}]*\)[^;{{}}]*\{{", text, re.MULTILINE)
    if found is None:
        raise Stale(f"there is no {name}")
    depth, end = 1, found.end()
    for match in re.finditer(r'[{}]|"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*|' + r"'(?:\\.|[^'\\\n])+'", text[end:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return found.start(), end + match.end()
    raise Stale(f"{name} has no end")


def c_statement(text: str, at: int) -> tuple[int, int]:
    """Return where the statement at a position begins, with its line, and ends."""
    start = text.rindex("\n", 0, at) + 1
    return start + len(text[start:at]) - len(text[start:at].lstrip()), text.index(";", at) + 1


def outcome(fault: dict[str, Any]) -> str:
    """Return "caught", "SURVIVED", "STALE", or "TOO LONG": the tests hang, or the machine is too busy to tell."""
    try:
        path = find_file(fault["file"])
        text = path.read_text(encoding="utf-8")
        faulty = apply(fault, text)
    except Stale as reason:
        return f"STALE ({reason})"
    command = [*PROCESSES[fault["env"]], sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault["tests"]]
    try:
        path.write_text(faulty, encoding="utf-8")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=False)
        return "SURVIVED" if done.returncode in UNNOTICED else "caught"
    except subprocess.TimeoutExpired:
        return "TOO LONG"
    finally:
        path.write_text(text, encoding="utf-8")


def main(names: list[str]) -> int:
    outcomes: list[str] = []
    for fault in read():
        if not names or fault["name"] in names:
            outcomes.append(outcome(fault))
            print(f"{outcomes[-1]}: {fault['name']}", flush=True)
    print(f"caught {outcomes.count('caught')} of {len(outcomes)}")
    return 0 if set(outcomes) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
