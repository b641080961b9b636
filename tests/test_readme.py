"""README says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.deviations import ROWS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_table_of_deviations_is_the_one_that_the_differential_tests_use() -> None:
    table = README.partition("## Where it differs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert tuple(rows[1:]) == ROWS


def test_both_commands_set_up_all_that_they_need() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    assert commands[0].endswith("-m accelerator simulate --gpus 2 -- .venv/bin/python -m accelerator check")
    assert commands[1].endswith("-m tests")
