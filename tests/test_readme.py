"""README says what is so."""

from __future__ import annotations

import re

import pytest

import accelerator
from tests.support import ROOT

pytestmark = pytest.mark.torch_free

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_deviations_is_the_one_that_the_differential_tests_use() -> None:
    pytest.importorskip("torch")
    from tests.mirror.deviations import ROWS

    table = README.partition("## Where it differs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert tuple(rows[1:]) == ROWS


def test_both_commands_set_up_all_that_they_need() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    assert commands[0].endswith("-m accelerator simulate --gpus 2 -- .venv/bin/python -m accelerator check")
    assert commands[1].endswith("-m tests")


def test_the_keys_of_the_report_are_those_that_it_has() -> None:
    from accelerator._command import report

    section = README.partition("## The report's JSON")[2].partition("\n## ")[0]
    of_all, of_a_device = (set[str](), set[str]())
    for keys, table in zip((of_all, of_a_device), section.split("| key")[1:], strict=True):
        for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE):
            keys.update(re.findall(r"`(\w+)`", cell))
    facts = report.collect()
    assert of_all == set(facts)
    assert all(of_a_device == set(device) for device in facts["devices"])


def test_every_area_names_functions_that_there_are() -> None:
    table = README.partition("## The rest in short")[2].partition("\n\n**")[0]
    named = re.findall(r"`(\w+)`", table.partition("|---")[2].partition("\n\n")[0])
    assert len(named) > 60
    assert set(named) <= set(accelerator.__all__)


def test_links_within_the_tree_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("https://")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
