"""Processes on a simulated machine load the simulated kernels with torch, and report it if they cannot."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from accelerator._machine import torch_build
from accelerator.simulation import environment
from tests import support
from tests.support import run, simulated_environment
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [linux_only, needs_cuda_torch]

ADDS = "import torch; print((torch.ones(2, device='cuda') + 1).tolist())"


def python(program: str, *flags: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.slow
def test_kernels_compute_without_warnings() -> None:
    # torch itself warns if NumPy is missing.
    flags = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    done = python(ADDS, *flags, env=simulated_environment(gpus=1))
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_loading_kernels_changes_no_warning_filter() -> None:
    program = """
        import warnings
        warnings.filterwarnings("error", "mine")
        import torch
        print([(action, str(message)) for action, message, *_ in warnings.filters])
    """
    outputs = [python(program, env=simulated_environment(gpus=1, compute=compute)).stdout for compute in (True, False)]
    assert outputs[0] == outputs[1] != ""


def test_importing_torch_initializes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import torch, os
        assert "_accelerator_simulation._inside.ops" in __import__("sys").modules
        assert not torch.cuda.is_initialized()
        child = os.fork()
        if child == 0:
            os._exit(0 if (torch.ones(2, device="cuda") + 1).tolist() == [2.0, 2.0] else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    run(program, simulated_environment(gpus=1, log=log))
    processes = {line.split()[0] for line in log.read_text().splitlines()}
    assert len(processes) == 1, "the child alone initialized"


def test_queries_do_not_import_torch() -> None:
    program = """
        import sys
        import accelerator as acc
        acc.is_available(), acc.is_available(strict=True), acc.device_count(), acc.unavailable_reason()
        acc.visible_devices(), acc.physical_devices(), acc.usable_devices(), acc.compute_capability(0)
        acc.get_device_index(0), acc.is_initialized(), acc.is_in_bad_fork(), acc.is_fork_safe(), acc.get_device_name(0)
        acc.driver_version(), acc.driver_cuda_version(), acc.telemetry(0), acc.utilization(0), acc.processes(0)
        acc.communication_backend_name(), acc.visible_devices_envs(), acc.get_memory_info(0), acc.total_memory(0)
        assert acc.device_count() == 2
        assert "torch" not in sys.modules
    """
    done = python(program, env=simulated_environment(gpus=2))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_another_plugin_is_still_loaded(tmp_path: Path) -> None:
    metadata = tmp_path / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text("[torch.backends]\nother = other:load\n")
    (tmp_path / "other.py").write_text(f"def load(): open({str(tmp_path / 'loaded')!r}, 'w').close()\n")
    env = simulated_environment(gpus=1)
    env["PYTHONPATH"] += f":{tmp_path}"
    done = python("import sys, accelerator as acc; assert acc.device_count() == 1; assert 'torch' not in sys.modules", env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loaded").exists()  # by a child process, because only the plug-in knows if it provides an accelerator


@pytest.mark.slow
def test_a_node_writes_whole_lines() -> None:
    program = (
        "import subprocess, sys, torch\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('begin', end=' ', file=stream)\n"
        "subprocess.run(['sh', '-c', 'echo other; echo other >&2'], check=True)\n"
        "print('end')\nprint('end', file=sys.stderr)\n"
        "subprocess.run(['sh', '-c', 'echo last'], check=True)"
    )
    variables = {"ACCELERATOR_SIM_NODE": "0", "PYTHONUNBUFFERED": "1"}
    done = python(program, env={**simulated_environment(gpus=1), **variables})
    assert done.stdout == "other\nbegin end\nlast\n", done.stderr
    assert done.stderr == "other\nbegin end\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (["-I"], {}, "this Python does not search PYTHONPATH, as with -I or -E"),
        (["-E"], {}, "this Python does not search PYTHONPATH, as with -I or -E"),
        ([], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD is '0'"),
        ([], {"PYTHONPATH": str(REPOSITORY)}, "PYTHONPATH lacks the plug-in's folder"),
    ],
)
def test_launch_without_the_plugin_says_why_it_is_missing(arguments: list[str], variables: dict[str, str], reason: str) -> None:
    program = (
        "import torch\nfor dtype in (torch.float32, torch.int64):\n"
        "    try:\n        torch.ones(2, device='cuda', dtype=dtype)\n"
        "    except RuntimeError as error:\n        print('operation not supported' in str(error))"
    )
    done = python(program, *arguments, env={**simulated_environment(gpus=1), **variables})
    assert done.stdout == "True\nTrue\n", done.stderr
    lines = done.stderr.splitlines()
    problem = f"torch did not load the plug-in with the simulated kernels: {reason}"
    assert len(lines) == 2
    assert all(re.fullmatch(rf"kernel .* is not simulated: {re.escape(problem)}", line) for line in lines)


def test_nested_simulation_has_one_plugin() -> None:
    inner = environment(1, compute=False, base=environment(2))
    assert inner["PYTHONPATH"].count("entry_point") == 1
    for outer in ("", "/older/simulation/_plugin:"):  # where older versions had it
        path = environment(1, base={"PYTHONPATH": f"{outer}/mine"})["PYTHONPATH"]
        assert path.endswith("/simulation/_inside/entry_point:/mine")
        assert "_plugin" not in path


@pytest.mark.slow
def test_torch_can_be_imported_if_kernels_fail_to_load(tmp_path: Path) -> None:
    import pathlib
    import shutil

    from accelerator.simulation._outside import environment

    broken, plugin = tmp_path / "simulation", pathlib.Path(environment._PLUGIN)
    shutil.copytree(plugin, broken / "_inside/entry_point")
    shutil.copytree(plugin.parents[1] / "_settings", broken / "_settings")
    (broken / "_inside/compiled").mkdir()
    (broken / "_inside/compiled/__init__.py").write_text("raise OSError('a broken disk')")
    env = simulated_environment(gpus=1)
    env["PYTHONPATH"] = str(broken / "_inside/entry_point")
    done = python("import torch; print('imported'); torch.ones(2, device='cuda')", env=env)
    assert done.stdout == "imported\n"
    assert "is not simulated: OSError: a broken disk" in done.stderr


@pytest.mark.slow
def test_kernels_of_a_vendored_package_compute(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(REPOSITORY / "accelerator", tmp_path / "mylib/_vendor/acc", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("mylib", "mylib/_vendor"):
        (tmp_path / package / "__init__.py").touch()
    program = f"""
        import subprocess, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from mylib._vendor.acc.simulation import environment
        done = subprocess.run([sys.executable, "-c", {ADDS!r}], env=environment(1), cwd="/", capture_output=True, text=True)
        assert done.stdout == "[2.0, 2.0]\\n", done.stderr
    """
    done = python(program, env=environment(0))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_error_names_the_run_time_compiled_kernel() -> None:
    program = """
        import torch, ctypes
        torch.cuda.init()
        torch.empty(1, device="cuda")
        cuda = ctypes.CDLL("libcuda.so.1")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuModuleLoadData(ctypes.byref(module), b"\177ELF" + bytes(60)) == 0
        assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"triton_poi_fused_0") == 0
        for _ in range(2):
            assert cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == EXPECTED
        torch.cuda._sleep(1000)
    """
    done = support.python(textwrap.dedent(program.replace("EXPECTED", "801")), simulated_environment(gpus=1))
    assert done.returncode == 0, done.stderr
    line = r"kernel triton_poi_fused_0 is not simulated: simulated GPUs run kernels from PTX, and its module is machine.*\n"
    assert re.fullmatch(line, done.stderr), "one line for each kernel"
    done = support.python(textwrap.dedent(program.replace("EXPECTED", "0")), simulated_environment(gpus=1, compute=False))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [[], ["--no-compute"]])
def test_no_compute_option_sets_the_environment(flags: list[str]) -> None:
    command = [sys.executable, "-m", "accelerator", "simulate", *flags, "--", sys.executable, "-c"]
    program = "import os; print(os.environ['ACCELERATOR_SIM_COMPUTE'], 'entry_point' in os.environ.get('PYTHONPATH', ''))"
    done = subprocess.run([*command, program], cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == ("0 True\n" if flags else "1 True\n")


# Removes a name from torch before the plug-in is loaded, as if torch were newer.
SITECUSTOMIZE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "_accelerator_simulated_kernels":
            delattr(sys.modules["torch._C"], {name!r})

sys.meta_path.insert(0, Finder())
"""
# Of rehearsals, and of both.
OF_REHEARSALS, OF_BOTH = "_dispatch_keyset_full_after", "_jit_override_can_fuse_on_gpu"


def without(name: str, folder: Path, **options: bool) -> dict[str, str]:
    """Return the environment of a simulated machine whose torch lacks a name."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(name=name))
    env = simulated_environment(gpus=1, **options)
    return {**env, "PYTHONPATH": f"{folder}:{env['PYTHONPATH']}"}


def problem(name: str) -> str:
    build = torch_build.read()
    assert build is not None
    return (
        "the kernels of simulated GPUs cannot be installed in this torch: RuntimeError: "
        f"torch {build.version} has no torch._C.{name}, which simulated GPUs need: use a release of torch that this version of"
        " accelerator supports\n"
    )


# Programs that do not begin with the import of torch run in a new process.
IMPORTING = {
    "process": "import os\nimport torch\nassert os.environ['ACCELERATOR_SIM_TOLD'] == '1'",
    "child": "import subprocess, sys\nimport torch\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importing", "name", "compute"),
    [("process", OF_BOTH, True), ("child", OF_BOTH, True), ("child", OF_BOTH, False), ("child", OF_REHEARSALS, False)],
)
def test_a_failed_installation_is_told_once(importing: str, name: str, compute: bool, tmp_path: Path) -> None:
    done = python(IMPORTING[importing], env=without(name, tmp_path, compute=compute))
    assert (done.returncode, done.stderr) == (0, f"accelerator: {problem(name)}")


@pytest.mark.slow
def test_a_run_tells_a_failed_installation_once(tmp_path: Path) -> None:
    """Also if its processes have no parent that has imported torch."""
    without(OF_BOTH, tmp_path)
    script = f"export PYTHONPATH={tmp_path}:$PYTHONPATH; for each in 1 2; do {sys.executable} -c 'import torch'; done"
    command = [sys.executable, "-m", "accelerator", "simulate", "--", "sh", "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, f"accelerator: {problem(OF_BOTH)}")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "status"), [("import torch", 2), ("import torch; raise SystemExit(3)", 3)])
def test_a_rehearsal_without_kernels_fails_with_the_reason(command: str, status: int, tmp_path: Path) -> None:
    without(OF_REHEARSALS, tmp_path)
    script = f"PYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} -c '{command}'"
    words = [sys.executable, "-m", "accelerator", "rehearse", "--", "sh", "-c", script]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)
    expected = f"accelerator: {problem(OF_REHEARSALS)}python -m accelerator rehearse: {problem(OF_REHEARSALS)}"
    assert (done.returncode, done.stderr) == (status, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"driver": "absent"}, {"driver": "absent", "compute": False}, {"gpus": 0}])
def test_a_machine_without_a_driver_or_gpu_has_no_problem(options: dict[str, Any]) -> None:
    done = python("import torch", env=simulated_environment(**options))
    assert (done.returncode, done.stderr) == (0, "")
