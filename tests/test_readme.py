"""README and the guide agree with the code, and their links and pictures are valid."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import accelerator
from tests.support import ROOT

pytestmark = pytest.mark.torch_free

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
LINKING = PAGES | {path: path.read_text(encoding="utf-8") for path in (ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")}
_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def test_documented_deviations_equal_tested_deviations() -> None:
    pytest.importorskip("torch")
    from tests.mirror.deviations import ROWS

    table = PAGES[ROOT / "docs" / "differences.md"]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert tuple(rows[1:]) == ROWS


def test_readme_commands_create_their_own_environment() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    assert commands[0].endswith("-m accelerator simulate --gpus 2 -- .venv/bin/python -m accelerator check")
    assert commands[1].endswith("-m tests")


def test_documented_keys_equal_report_keys() -> None:
    from accelerator._command import report

    section = PAGES[ROOT / "docs" / "command.md"].partition("## JSON")[2]
    of_all, of_a_device = (set[str](), set[str]())
    for keys, table in zip((of_all, of_a_device), section.split("| key")[1:], strict=True):
        for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE):
            keys.update(re.findall(r"`(\w+)`", cell))
    facts = report.collect()
    assert of_all == set(facts)
    assert all(of_a_device == set(device) for device in facts["devices"])


def test_guide_lists_every_option() -> None:
    """The tables of options have the options that --help lists. The pages also name some of pytest and torchrun."""
    pages = (("simulation", (["simulate"],)), ("command", ([], ["check"])))
    for page, commands in pages:
        listed = set(re.findall(r"`(--[a-z-]+)", PAGES[ROOT / "docs" / f"{page}.md"].partition("\n\n`--watch`")[0]))
        options: set[str] = set()
        for command in commands:
            line = [sys.executable, "-m", "accelerator", *command, "--help"]
            shown = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
            options |= set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE))
        assert options - {"--help", "--version"} <= listed
        assert listed - options <= {
            "--durations",
            "--pdb",
            "--trace",
            "--simulate-gpus",
            "--simulate-memory",
            "--simulate-name",
            "--simulate-races",
            "--rdzv-backend",
            "--rdzv-endpoint",
        }, "an option that is not there"


def test_every_page_begins_with_a_sentence() -> None:
    for path, text in PAGES.items():
        head = re.sub(r"^# .*\n\n", "", text, count=1)
        assert re.match(r"[A-Z`].*\w", head), f"{path.name} begins with {head[:40]!r}"


def test_functions_named_in_docs_are_public() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"`(?:acc\.)?([a-z]\w+)\(\)?`", text)}
    assert len(named) > 30
    of_torch = {"record_stream", "wait_event", "wait_stream"}
    assert named <= {name.rpartition(".")[2] for name in accelerator.__all__} | {"environment"} | of_torch


def test_readme_is_short() -> None:
    prose = _BLOCK.sub("", README)
    assert len(prose.split()) <= 1000


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and myst_parser derive them."""
    prose = _CODE.sub("", text)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", text))


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_local_links_resolve(path: Path) -> None:
    text = LINKING[path]
    dead: list[str] = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if link.startswith("https://"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    assert dead == []


def test_long_description_has_no_relative_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = types.SimpleNamespace(MetadataHookInterface=object)  # hatchling is installed only for builds
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hook)
    module = runpy.run_path(str(ROOT / "distribution" / "long_description.py"))
    metadata: dict[str, Any] = {}
    module["LongDescription"].update(types.SimpleNamespace(root=ROOT), metadata)
    text = metadata["readme"]["text"]
    assert links(text) == []
    assert "The report of" not in text  # from the alternative text of the picture
    assert "docs/install.md has sizes" in text
    assert "(#" not in text
    assert len(text) > 0.9 * len(README)


def test_external_links_use_allowed_hosts() -> None:
    hosts = {link.split("/")[2] for text in LINKING.values() for link in links(text) if "://" in link}
    assert hosts <= {"github.com", "keepachangelog.com", "semver.org"}
    assert all(link.startswith("https://") for text in LINKING.values() for link in links(text) if "://" in link)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_valid_and_used(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "viewBox" in root.attrib  # lets browsers scale the picture to the page
    assert any(path.name in text for text in PAGES.values())
    # The columns of a terminal do not depend on the widths of the viewer's font.
    assert not any("\u00a0\u00a0" in (element.text or "") for element in root.iter())
    if path.name == "report.svg":
        assert f"accelerator\u00a0{accelerator.__version__}\u00a0on" in "".join(root.itertext())


def test_memory_figure_shows_measured_values() -> None:
    bars = json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8"))["memory"]
    assert {"no checkpoint", "torch", "torch, save_on_cpu", "checkpoint", "checkpoint_in_cpu", "partitioned, 2 ranks"} < set(
        bars
    )
    drawn = "".join(ElementTree.parse(ROOT / "docs" / "memory.svg").getroot().itertext()).split("\n")
    assert {*bars, *(f"{mib:.1f}" for pair in bars.values() for mib in pair)} <= {text.strip() for text in drawn}
    # Offload keeps one input of 1 MiB on the device and prefetches the next one.
    assert bars["checkpoint_in_cpu"][0] == pytest.approx(1, rel=0.01)
    assert bars["checkpoint_in_cpu"][1] - bars["torch, save_on_cpu"][1] == pytest.approx(1, rel=0.01)


def test_guide_index_lists_every_page() -> None:
    index = PAGES[ROOT / "docs" / "index.md"]
    listed = {name for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for name in block.split()}
    assert {path.stem for path in PAGES if path.parent == ROOT / "docs"} - {"index"} <= listed
