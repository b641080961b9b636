"""A folder of tests, which pytest runs with the plug-in in a process of its own. The fixture ``suite`` makes it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import plain_environment

PLUGIN = "accelerator.simulation.pytest_plugin"


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return the counts of pytest's last line, such as {"passed": 2}."""
    last = [line for line in done.stdout.splitlines() if re.search(r" in [0-9.]+s", line)]
    assert last, done.stdout + done.stderr
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|xpassed|error)", last[-1])}


class Suite:
    """Writes test files and runs them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, source: str, name: str = "test_it.py") -> Path:
        path = self.path / name
        path.write_text("from __future__ import annotations\n\n" + textwrap.dedent(source))
        return path

    def hide_torch(self) -> None:
        """Keep the servers of machines from importing torch, which takes longer than tests that do not use it."""
        (self.path / "conftest.py").write_text("import sys\nsys.modules['torch'] = None\n")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run pytest with the plug-in on the folder."""
        options = ["-p", PLUGIN, "-p", "no:cacheprovider", "--rootdir", str(self.path)]
        environment = plain_environment(**variables)
        environment.pop("PYTEST_XDIST_WORKER", None)  # set if xdist runs this test
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        return subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=240, check=False)

    def check(self, expected: dict[str, int], *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the suite, and check the counts of pytest's last line."""
        done = self.run(*arguments, **variables)
        assert counts(done) == expected, done.stdout + done.stderr
        return done
