"""Every block of code in README and docs/ runs and prints the output that it shows.

Python blocks run on two simulated GPUs, under pytest if they have tests. Shell blocks run in a copy of tests/miniature, without
a GPU. Their ``pytest`` only collects the tests, because test_miniature.py runs them.

The comment ``<!-- run: never, REASON -->`` before a block excludes it. ``<!-- run: needs MODULE -->`` marks a block that needs
a module and no GPU. ``<!-- run: file NAME -->`` makes a block a file that the shell blocks of its page find.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import ROOT, plain_environment, run, simulated_environment
from tests.support.discovery import on_simulated_gpus

PLUGIN = ("-m", "pytest", "-q", "-p", "accelerator.simulation.pytest_plugin", "-p", "no:cacheprovider")
_BLOCK = re.compile(
    r"(?:^ *<!-- run: (?P<how>.*?) -->\n)?^ *```(?P<language>\w+)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$|^# (.*)$", re.MULTILINE)


class Block(NamedTuple):
    where: str
    language: str
    code: str
    how: str
    page: str


def _blocks() -> list[Block]:
    blocks: list[Block] = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            code = textwrap.dedent(match["code"])
            blocks.append(Block(f"{path.name}:{line}", match["language"], code, match["how"] or "", text))
    return blocks


BLOCKS = _blocks()
PYTHON, SHELL, WORKFLOWS = (
    [block for block in BLOCKS if block.language == it and not block.how] for it in ("python", "sh", "yaml")
)


def with_slow_guide(blocks: list[Block]) -> list[Any]:
    """Return the parameters of a test. The blocks of the guide are slow tests, and those of README that run pytest."""

    def marks(block: Block) -> list[pytest.MarkDecorator]:
        if block.where.startswith("README") and "pytest" not in block.code:
            return []
        return [pytest.mark.slow]

    return [pytest.param(block, id=block.where, marks=marks(block)) for block in blocks]


# The maximum length of a line that fits the page, in a browser and in a terminal.
WIDTH = 88
NEEDING = [block for block in BLOCKS if block.how.startswith("needs ")]
FILES = [block for block in BLOCKS if block.how.startswith("file ")]


def test_docs_contain_code_blocks() -> None:
    assert len(PYTHON) > 10
    assert len(SHELL) > 2
    assert len(WORKFLOWS) == 1
    assert {block.language for block in BLOCKS} <= {"python", "sh", "toml", "yaml", "text"}


def test_block_lines_fit_the_page_width() -> None:
    """The reports of races and the lines of the kernel's log are longer: they are what the commands print."""
    shown = [block for block in BLOCKS if not block.how.startswith("never") and "CONTRIBUTING" not in block.where]
    lines = [
        (block.where, line)
        for block in shown
        if not re.search("^(race|NVRM):", block.code, re.MULTILINE)
        for line in block.code.splitlines()
    ]
    assert [(where, line) for where, line in lines if len(line) > WIDTH] == []


def test_skipped_blocks_give_a_reason() -> None:
    left_out = [block.how for block in BLOCKS if block.how and block not in NEEDING + FILES]
    assert all(re.fullmatch(r"never, \S.{10,}", how) for how in left_out), left_out
    assert {block.language for block in NEEDING} == {"python"}


# Runs a file or a module after the import of torch, which is cheap in a fork of a process that has imported it.
_START = """
import torch
import os, runpy, sys

sys.path[0] = os.path.dirname(sys.argv[-1])
os.chdir(sys.path[0])
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@on_simulated_gpus
@pytest.mark.parametrize("block", with_slow_guide(PYTHON))
def test_python(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(block.code, encoding="utf-8")
    environment = simulated_environment(gpus=2)
    if block is PYTHON[0] or "sys.modules" in block.code:  # these show that queries do not import torch
        printed = _run([sys.executable, str(program)], tmp_path, environment)
    else:
        start = ["-m", "pytest", *PLUGIN[2:], str(program)] if "def test_" in block.code else [str(program)]
        printed = run(_START, environment, *start, timeout=300)
    _assert_prints_expected(block.code, printed)


@on_simulated_gpus
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize(
    ("visible", "expected"),
    [pytest.param("0,1", "cuda:1", id="all GPUs"), pytest.param("1", "cuda:0", id="its own GPU", marks=pytest.mark.slow)],
)
def test_device_recipes(launcher: str, visible: str, expected: str) -> None:
    name = {"torchrun": "LOCAL_RANK", "slurm": "SLURM_LOCALID"}[launcher]
    (block,) = (block for block in PYTHON if f'"{name}"' in block.code and "set_device_index" in block.code)
    variables = {"CUDA_VISIBLE_DEVICES": visible, name: "1"}
    program = f"import torch\n{block.code}"
    if launcher == "slurm":
        variables |= {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
        program += "\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
    printed = run(program, simulated_environment(variables, gpus=2)).splitlines()
    assert printed == ([expected] if launcher == "torchrun" else [expected, "1 2"])


@pytest.mark.slow
@on_simulated_gpus
@pytest.mark.parametrize(("gpu", "fits"), [("H100", "yes"), ("A100-40GB", "no")])
def test_rehearsal_of_readme(gpu: str, fits: str, tmp_path: Path) -> None:
    """README's example prints its table. Figures of GPUs are within 3 %: they differ between versions of torch."""
    readme = PYTHON[0].page
    (program,) = re.findall(r"```python\n([^`]*TransformerEncoder[^`]*)```", readme)
    (command,) = re.findall(r"^python -m (accelerator rehearse .*) -- python train\.py$", readme, re.MULTILINE)
    (table,) = re.findall(r"```text\n(rank .*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    line = [sys.executable, "-m", *command.replace("H100", gpu).split(), "--", sys.executable, "train.py"]
    done = subprocess.run(line, cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, timeout=300, check=False)
    head, row = (re.findall(rf"^ *{start} .*$", done.stderr, re.MULTILINE)[0] for start in ("rank", "0"))
    assert row.split()[-1] == fits, done.stderr
    assert done.returncode == 0
    if fits == "no":
        assert re.search(r"is out of memory: aten::\w+ at \S*train\.py:12 in <module>", done.stderr), done.stderr
        assert "it went on and needs" in done.stderr
        return
    shown = table.splitlines()
    assert head == shown[0]
    figures, expected = ([float(figure) for figure in re.findall(r"[\d.]+(?= GiB)", text)] for text in (row, shown[1]))
    assert figures[:3] == pytest.approx(expected[:3], rel=0.03)
    assert figures[3] == pytest.approx(expected[3], rel=0.5)
    assert (tmp_path / "memory.svg").exists()


@pytest.mark.slow
@on_simulated_gpus
def test_race_of_readme(tmp_path: Path) -> None:
    """README's example is reported in these words, and the line that README names mends it."""
    readme = PYTHON[0].page
    (program,) = re.findall(r"```python\n([^`]*copies = [^`]*)```", readme)
    (command,) = re.findall(r"^python -m (accelerator simulate --races .*) -- python train\.py$", readme, re.MULTILINE)
    (report,) = re.findall(r"```text\n(race: .*?)```", readme, re.DOTALL)
    (wait,) = re.findall(r"`(\S*wait_stream\(copies\))`", readme)
    file = tmp_path / "train.py"
    line = [sys.executable, "-m", *command.split(), "--", sys.executable, file.name]
    for code, expected, status in ((program, report, 1), (program.replace("\nprint", f"\n{wait}\nprint"), "", 0)):
        file.write_text(code, encoding="utf-8")
        done = subprocess.run(
            line, cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == status, done.stderr
        found = done.stderr.replace(f"{tmp_path}{os.sep}", "")
        assert expected in found
        assert ("race:" in found) == bool(expected)


def test_recipes_on_the_cpu() -> None:
    """The second rank runs on the CPU, and pinning memory only with an accelerator does not warn."""
    pytest.importorskip("torch")
    (device,) = (block for block in PYTHON if '"LOCAL_RANK"' in block.code and "set_device_index" in block.code)
    (pinned,) = (block for block in PYTHON if "batch.is_pinned()" in block.code)
    program = f"import torch\nimport warnings\nwarnings.simplefilter('error')\n{device.code}\n{pinned.code}"
    assert run(program, plain_environment(LOCAL_RANK="1")).splitlines() == ["cpu", "False", "6.0"]


@pytest.mark.slow
def test_first_example_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (without_one,) = re.findall(r"without a GPU the same lines print `(.*)` and `(.*)`", PYTHON[0].page)
    assert _run([sys.executable, "-c", PYTHON[0].code], tmp_path, plain_environment()).splitlines() == list(without_one)


@pytest.mark.slow
@on_simulated_gpus
def test_mixed_precision_recipe_without_bfloat16() -> None:
    (block,) = (block for block in PYTHON if "GradScaler" in block.code)
    environment = simulated_environment(gpus=1, capability="7.5")
    program = block.code + "\nprint(scaler.is_enabled())\n"
    assert run("import torch\n" + program, environment).splitlines() == ["torch.float16 True", "True"]


@pytest.mark.parametrize("block", NEEDING, ids=lambda block: block.where)
def test_python_that_needs_something(block: Block, tmp_path: Path) -> None:
    module = block.how.removeprefix("needs ")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    program = tmp_path / "block.py"
    program.write_text(block.code, encoding="utf-8")
    _assert_prints_expected(block.code, _run([sys.executable, str(program)], tmp_path, plain_environment()))


@on_simulated_gpus
@pytest.mark.parametrize("block", with_slow_guide(SHELL))
def test_shell(block: Block, tmp_path: Path) -> None:
    files = {file.how.removeprefix("file "): file.code for file in FILES if file.page == block.page}
    _assert_prints_expected(block.code, _run_in_miniature_library(block.code, tmp_path, files))


@on_simulated_gpus
@pytest.mark.parametrize("block", with_slow_guide(WORKFLOWS))
def test_workflow(block: Block, tmp_path: Path) -> None:
    """Run the commands of a workflow, except those that install."""
    steps = re.findall(r"^ +- run: (.*)$", block.code, re.MULTILINE)
    installs = [step for step in steps if step.startswith("pip install ")]
    assert steps[: len(installs)] == installs
    assert len(steps) > len(installs) > 0
    _run_in_miniature_library("\n".join(steps[len(installs) :]), tmp_path)


def test_workflow_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = WORKFLOWS
    read = yaml.safe_load(block.code)
    assert set(read) == {"name", True, "jobs"}  # YAML 1.1 reads the key "on" as True
    for job in read["jobs"].values():
        assert set(job) == {"runs-on", "steps"}
        assert all(set(step) <= {"uses", "with", "run"} for step in job["steps"])


def _sphinx_settings() -> dict[str, Any]:
    pytest.importorskip("sphinx")
    conf = ROOT / "docs" / "conf.py"
    settings: dict[str, Any] = {"__file__": str(conf)}
    exec(compile(conf.read_text(encoding="utf-8"), conf, "exec"), settings)  # Sphinx executes the file in the same way
    return settings


def test_functions_are_linked_from_a_summary(tmp_path: Path) -> None:
    settings = _sphinx_settings()
    page = tmp_path / "monitoring.rst"
    settings["_write"](page, "Monitoring", "accelerator", ["utilization", "Telemetry"])
    summary, entry, telemetry = page.read_text(encoding="utf-8").split(".. auto")[1:]
    assert re.findall(r"^   (\w+)$", summary, re.MULTILINE) == ["utilization", "Telemetry"]
    assert entry.startswith("function:: utilization")
    # The class's docstring describes its fields. Sphinx would add "Alias for field number 0".
    assert ":members:" not in telemetry
    assert all(title[0].isupper() for _, title in settings["PAGES"].values())


@pytest.mark.parametrize("name", ["int", "ValueError", "typing.Any", "torch.device"])
def test_external_types_are_linked(name: str) -> None:
    settings = _sphinx_settings()
    nodes = pytest.importorskip("docutils.nodes")
    link = settings["_resolve_foreign"](None, None, {"reftarget": name}, nodes.Text(name))
    assert link["refuri"].endswith(f"?q={name}")


def _run_in_miniature_library(script: str, directory: Path, files: dict[str, str] | None = None) -> str:
    work, programs = directory / "work", directory / "bin"
    shutil.copytree(ROOT / "tests" / "miniature", work, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (files or {}).items():
        (work / name).write_text(text, encoding="utf-8")
    programs.mkdir()
    commands = {"python": "", "pytest": " ".join((*PLUGIN, "--collect-only")), "torchrun": "-m torch.distributed.run"}
    for name, arguments in commands.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])
    return _run(["bash", "-euo", "pipefail", "-c", script], work, plain_environment(PATH=path))


def _run(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _assert_prints_expected(code: str, output: str) -> None:
    for match in _PRINTED.finditer(code):
        expected = match[1] or match[2]
        assert expected in output.splitlines(), f"{expected!r} is not a line of {output!r}"
