"""The package works vendored, zipped, and with another sys.path. Freezing tools find its modules, type checkers its types."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from modulefinder import ModuleFinder
from pathlib import Path

import pytest

from tests.support import ROOT, plain_environment, python, simulated_environment
from tests.support.discovery import on_simulated_gpus

PACKAGE = ROOT / "accelerator"
PYTHON_FILES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))

# Some queries start a child process, which must find its program wherever the package is installed.
QUERIES = textwrap.dedent("""
    import importlib, json, os, sys
    acc = importlib.import_module(sys.argv[1])
    results = [acc.device_count(), len(acc.visible_devices()), acc.is_available(strict=True), acc.telemetry(1).temperature]
    if sys.argv[2] == "runtime":
        results += [acc.FloatTensor([1.0]).device.type, acc.checkpointing.is_configured(), acc.simulation.is_simulated(),
                    acc.__name__, "accelerator" in sys.modules]
    print(json.dumps(results))
    """)


def run_queries(folder: Path, name: str, layer: str = "runtime") -> list[object]:
    environment = simulated_environment(gpus=2, name=["A", "B"])
    environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, "-c", QUERIES, name, layer]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result: list[object] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@on_simulated_gpus
def test_vendored_package(tmp_path: Path) -> None:
    target = tmp_path / "project/mylib/_vendor"
    shutil.copytree(PACKAGE, target / "accelerator", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__init__.py").touch()
    # A child process must not import the parents of the vendored package.
    (target.parent / "__init__.py").write_text("import sys\nassert not sys.flags.isolated, 'imported in the child'\n")
    output = run_queries(tmp_path / "project", "mylib._vendor.accelerator")
    assert output == [2, 2, True, 31, "cuda", False, True, "mylib._vendor.accelerator", False]
    program = """
        import torch
        import sys
        sys.modules["accelerator"] = None
        sys.path.insert(0, sys.argv[1])
        from mylib._vendor.accelerator.__main__ import main
        sys.exit(main(["check"]))
    """
    done = python(textwrap.dedent(program), simulated_environment(gpus=2), str(tmp_path / "project"), timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all areas passed")


@on_simulated_gpus
def test_queued_seeds_keep_their_order_in_a_vendored_package(tmp_path: Path) -> None:
    target = tmp_path / "mylib/_vendor"
    shutil.copytree(PACKAGE, target / "accelerator", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__init__.py").touch()
    (target.parent / "__init__.py").touch()
    program = """
        import torch
        import sys
        sys.modules["accelerator"] = None
        sys.path.insert(0, sys.argv[1])
        from mylib._vendor import accelerator as acc
        acc.manual_seed_all(1)
        with acc.fork_rng():
            acc.manual_seed_all(2)
        print([acc.initial_seed(number) for number in range(2)])
        try:
            acc.no_such_name
        except AttributeError as error:
            print(error)
    """
    done = python(textwrap.dedent(program), simulated_environment(gpus=2), str(tmp_path), timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 1]", "module 'mylib._vendor.accelerator' has no attribute 'no_such_name'"]


@on_simulated_gpus
@pytest.mark.parametrize("layer", ["queries", pytest.param("runtime", marks=pytest.mark.slow)])
def test_zipped_package(layer: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
        for path in PYTHON_FILES:
            archive.write(ROOT / path, path)
    expected = [2, 2, True, 31, "cuda", False, True, "accelerator", True]
    assert run_queries(tmp_path / "packages.zip", "accelerator", layer) == expected[: None if layer == "runtime" else 4]


@on_simulated_gpus
def test_compiled_package_needs_no_compiler_and_no_home(tmp_path: Path) -> None:
    """As in a container: a wheel that contains the libraries, no compiler, no home, a package that nothing is written to."""
    from accelerator.simulation._build import libraries

    package, built = tmp_path / "site/accelerator", libraries.ensure_built()
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in libraries.COMPILED:
        target = package / "simulation" / libraries.PREBUILT_FOLDER / built.name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built / path, target)  # without the mode of a program, which an archive may lose
    (tmp_path / "temporary").mkdir()
    variables = {"PATH": "", "HOME": "/proc/none", "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(package.parent)}
    environment = {**plain_environment(), **variables, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("XDG_CACHE_HOME", "CC"):
        environment.pop(name, None)
    files = sorted(package.rglob("*"))
    program = "import accelerator as acc; print(acc.device_count(), acc.__file__)"
    simulate = [sys.executable, "-m", "accelerator", "simulate", "--gpus", "2", "--", sys.executable, "-c", program]
    for _ in range(2):
        done = subprocess.run(simulate, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert (done.stdout, done.stderr, done.returncode) == (f"2 {package / '__init__.py'}\n", "", 0)
    assert sorted(package.rglob("*")) == files

    # The libraries of other sources are not used.
    with (package / "simulation/native/smi/main.c").open("a") as source:
        source.write("/* changed */\n")
    done = subprocess.run(simulate, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, "need a C compiler" in done.stderr) == (2, True), done.stderr


@on_simulated_gpus
def test_probe_ignores_working_directory_and_pythonpath(tmp_path: Path) -> None:
    """A child process ignores modules in its parent's working directory, and the variables of Python."""
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of the library')")
    (tmp_path / "ctypes.py").write_text("raise SystemExit('not the ctypes of the library')")
    program = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(tmp_path)!r}]; sys.path.append({str(ROOT)!r})\n"
    environment = simulated_environment(gpus=2, nvml="absent")
    environment.update(PYTHONPATH=str(tmp_path), PYTHONSTARTUP=str(tmp_path / "json.py"), PYTHONSAFEPATH="1")
    command = [
        sys.executable,
        "-S",
        "-c",
        program + "import accelerator; from accelerator._machine import driver_probe; print(len(driver_probe.run({}).devices))",
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.slow
def test_static_analysis_finds_every_module(tmp_path: Path) -> None:
    """PyInstaller and similar tools follow the import statements in the code."""
    script = tmp_path / "program.py"
    script.write_text("import accelerator\n")
    finder = ModuleFinder(path=[str(ROOT), *sys.path], excludes=["torch", "numpy", "pynvml", "deepspeed", "pytest", "_pytest"])
    finder.run_script(str(script))
    actual = {name for name in finder.modules if name.partition(".")[0] == "accelerator"}
    shipped = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in PYTHON_FILES}
    # Programs that import the package do not need the modules of the command line and of the pytest plug-in.
    own = {
        name for name in shipped if name.startswith("accelerator._command") or name.endswith((".__main__", ".pytest_plugin"))
    }
    own |= {"accelerator.simulation._outside.processes"}
    assert {name for name in shipped - actual - own if not name.startswith("accelerator.simulation._")} == set()


REJECTED = """
import accelerator as acc
acc.utilization(1.5)
acc.set_device_index(b"cuda")
acc.memory_allocated([])
acc.get_memory_info(1.0)
acc.compute_capability({})
acc.is_nvlink_connected(0, 1.5)
acc.visible_devices(3)
"""

ACCEPTED = """
import torch
import accelerator as acc
device: acc.Device = torch.device("cuda", 1)
acc.utilization(device), acc.utilization(1), acc.utilization("cuda:1"), acc.utilization(None)
acc.telemetry(acc.visible_devices()[0]).throttled, acc.temperature(acc.physical_devices()[0])
acc.set_device_index(0)
acc.memory_allocated(device), acc.get_memory_info(torch.tensor(1))
count: int = acc.device_count()
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_rejects_wrong_devices(checker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}")
    (tmp_path / "rejected.py").write_text(REJECTED)
    (tmp_path / "accepted.py").write_text(ACCEPTED)
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent"]
    else:
        command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    files = [str(tmp_path / name) for name in ("rejected.py", "accepted.py")]
    done = subprocess.run(
        [*command, *files], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    errors = [line for line in done.stdout.splitlines() if "error" in line and ".py:" in line]
    lines = {int(line.partition("rejected.py:")[2].partition(":")[0]) for line in errors if "rejected.py:" in line}
    assert lines == set(range(3, 10)), done.stdout + done.stderr
    assert [line for line in errors if "accepted.py" in line] == []
