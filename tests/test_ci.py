"""CI: the workflow has a job for each part of ``.ci/run``, and the configuration files are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
RUN = ROOT / ".ci" / "run"

pytestmark = [
    pytest.mark.torch_free,
    pytest.mark.skipif(not WORKFLOW.exists(), reason="a source distribution has no CI"),
]


def run_ci(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", RUN, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_workflow_has_a_job_for_each_part() -> None:
    parts = run_ci("--list").stdout.split()
    assert len(parts) > 5
    matrix = re.search(r"^ +part: \[(.*)\]$", WORKFLOW.read_text(encoding="utf-8"), re.MULTILINE)
    assert matrix
    assert matrix[1].split(", ") == parts


def test_each_part_is_a_function() -> None:
    text = RUN.read_text(encoding="utf-8")
    for part in run_ci("--list").stdout.split():
        assert re.search(rf"^{re.escape(part)}\(\) {{", text, re.MULTILINE), part


def test_an_unknown_part_is_an_error() -> None:
    done = run_ci("nonsense")
    assert done.returncode == 2
    assert "no part 'nonsense'" in done.stderr


def test_distributions_need_a_folder() -> None:
    done = run_ci("distributions")
    assert done.returncode == 2
    assert "distributions takes a folder" in done.stderr


def test_a_release_is_built_as_ci_builds_it() -> None:
    text = (WORKFLOW.parent / "release.yml").read_text(encoding="utf-8")
    assert ".ci/run distributions dist" in text
    package = (ROOT / "accelerator" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)  # as the workflow reads it
    assert version
    assert f"## [{version[1]}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def check_schema(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_workflows_match_the_github_schema(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    workflows = sorted(WORKFLOW.parent.glob("*.yml"))
    assert len(workflows) > 1
    for workflow in workflows:
        done = check_schema(workflow)
        assert done.returncode == 0, done.stdout
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOW.read_text(encoding="utf-8").replace("runs-on:", "runs_on:"), encoding="utf-8")
    assert check_schema(broken).returncode != 0


def test_pre_commit_hooks_are_valid_and_local() -> None:
    hooks = ROOT / ".pre-commit-config.yaml"
    assert "rev:" not in hooks.read_text(encoding="utf-8")
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(hooks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
