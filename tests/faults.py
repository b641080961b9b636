"""``python -m tests.faults [NAME...]``: put each fault of ``faults.json`` into the code, and report whether tests notice it.

A fault is a text of a file and its replacement, with the tests that must fail: realistic mistakes that the tests once did not
notice, or might not. Run it before a release, in a clean checkout: it edits the files and restores them. A fault whose text is
gone from the code is stale, and is to be adapted or removed.
"""

from __future__ import annotations

import json
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


def outcome(fault: dict[str, Any]) -> str:
    """Return "caught", "SURVIVED", "STALE", or "TOO LONG": the tests hang, or the machine is too busy to tell."""
    path = Path(ROOT, fault["file"])
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(fault["old"]) != 1:
        return "STALE"
    command = [*PROCESSES[fault["env"]], sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault["tests"]]
    try:
        path.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=False)
        return "SURVIVED" if done.returncode in UNNOTICED else "caught"
    except subprocess.TimeoutExpired:
        return "TOO LONG"
    finally:
        path.write_text(text, encoding="utf-8")


def main(names: list[str]) -> int:
    faults = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    outcomes: list[str] = []
    for fault in faults:
        if not names or fault["name"] in names:
            outcomes.append(outcome(fault))
            print(f"{outcomes[-1]}: {fault['name']}", flush=True)
    print(f"caught {outcomes.count('caught')} of {len(outcomes)}")
    return 0 if set(outcomes) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
