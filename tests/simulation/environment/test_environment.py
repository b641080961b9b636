"""Tests the environment variables that describe a simulated machine, and the compilation of its libraries."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import accelerator.simulation
from accelerator.simulation import _settings
from accelerator.simulation._build import libraries
from accelerator.simulation._build.cache import is_intact
from tests.support import environment, sample
from tests.support.simulation import DEADLINE, FAKE_BUILD, REPOSITORY, linux_only, make_compiler, plain, python
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, pytest.mark.torch_free]

PRINT_IS_SIMULATED = "from accelerator.simulation import is_simulated; print(is_simulated())"
BUILD = "from accelerator.simulation._build import libraries; print(libraries.ensure_built())"


def variable(name: str, *arguments: Any, **machine: Any) -> str | None:
    """Return the value of a variable ``ACCELERATOR_SIM_...`` for a machine."""
    return environment(*arguments, **machine).get("ACCELERATOR_SIM_" + name)


# The module


def test_public_names() -> None:
    assert accelerator.simulation.__all__ == [
        *("Race", "environment", "inject_fault", "is_simulated", "races", "unavailable_reason")
    ]
    assert dir(accelerator.simulation) == accelerator.simulation.__all__


def test_importing_loads_no_modules_and_writes_no_files(tmp_path: Path) -> None:
    program = "import sys, accelerator; before = set(sys.modules); import accelerator.simulation; "
    program += "print({'ctypes', 'subprocess', 'torch', 'pynvml'} & (set(sys.modules) - before))"
    # -S skips the site module, because installed packages may use it to import modules in every process.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**plain(), "XDG_CACHE_HOME": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"
    assert list(tmp_path.iterdir()) == []


# environment(): values


def test_default_machine() -> None:
    child = environment()
    assert {key: value for key, value in child.items() if key.startswith("ACCELERATOR_SIM_")} == {
        "ACCELERATOR_SIM_GPUS": "1",
        "ACCELERATOR_SIM_MEMORY": str(8 * 2**30),
        "ACCELERATOR_SIM_NAMES": "Simulated GPU",
        "ACCELERATOR_SIM_CAPABILITIES": "9.0",
        "ACCELERATOR_SIM_SPEEDS": "0",
        "ACCELERATOR_SIM_MIG": "off",
        "ACCELERATOR_SIM_NVLINK": "off",
        "ACCELERATOR_SIM_NUMA": "1",
        "ACCELERATOR_SIM_CLOCK_REASONS": "0",
        "ACCELERATOR_SIM_COMPUTE": "1",
        "ACCELERATOR_SIM_FILL": "zero",
        "ACCELERATOR_SIM_KERNELS": "run",
        "ACCELERATOR_SIM_PYTHON": sys.executable,
        "ACCELERATOR_SIM_KERNEL_CACHE": str(libraries.kernel_cache()),
        "ACCELERATOR_SIM_TRITON": "1",
    }


def test_processors_with_other_instructions_share_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {libraries.kernel_cache()}
    monkeypatch.setattr(libraries, "processor_flags", lambda: ["-mfma"])
    found.add(libraries.kernel_cache())
    assert len(found) == 2
    assert all(path is not None and path.is_relative_to(tmp_path) and path.is_dir() for path in found)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (2**20, "1048576"),
        (2**40, str(2**40)),
        ("1048576", "1048576"),
        ("512MiB", str(512 * 2**20)),
        ("8GiB", str(8 * 2**30)),
        ("8 gib", str(8 * 2**30)),
        ("1GB", "1000000000"),
        ("1536.5KiB", "1573376"),
        ("2TiB", str(2 * 2**40)),
        ("7000000B", "7000000"),
        (["1GiB", 5 << 20], f"{2**30},5242880"),
    ],
)
def test_memory(memory: Any, expected: str) -> None:
    assert variable("MEMORY", 2, memory=memory) == expected


def test_a_value_for_each_gpu() -> None:
    machine: dict[str, Any] = {
        "name": ["A", "B, C"],
        "capability": ("8.6", "9.0"),
        "speed": [1, -2, 3],
        "mig": [None, 0, 7],
    }
    child = environment(3, **machine)
    values = {key: child["ACCELERATOR_SIM_" + key] for key in ("NAMES", "CAPABILITIES", "SPEEDS", "MIG")}
    assert values == {"NAMES": "A;B, C", "CAPABILITIES": "8.6,9.0", "SPEEDS": "1,-2,3", "MIG": "off,0,7"}


def test_nvlink_numa_and_clock_reasons() -> None:
    assert [variable("NVLINK", 3, nvlink=value) for value in (True, [0, 0, None])] == ["0", "0,0,off"]
    assert [variable("NUMA", 3, numa=value) for value in (1, None, [0, 63, (1, 2)])] == ["2", "0", f"1,{2**63},6"]
    assert variable("CLOCK_REASONS", 2, clock_reasons=[0, 0x44]) == "0,68"


def test_errors_of_driver_and_nvml() -> None:
    assert variable("ERRORS") is None
    assert variable("ERRORS", driver="broken") == "cuInit:999"
    assert variable("ERRORS", nvml="broken") == "nvmlInit*:9"
    assert variable("ERRORS", nvml="mismatch", driver="broken") == "cuInit:999,nvmlInit*:18"
    assert variable("ERRORS", errors={"cuInit": 3, "nvmlDevice*@0": 15}) == "cuInit:3,nvmlDevice*@0:15"
    # The first matching entry counts, so the caller's entries come first.
    assert variable("ERRORS", errors="nvmlInit_v2:4,", nvml="broken") == "nvmlInit_v2:4,nvmlInit*:9"


def test_driver_version() -> None:
    assert variable("DRIVER_CUDA") is None
    assert variable("DRIVER_CUDA", driver="old") == "11.4"
    assert variable("DRIVER_CUDA", driver="old", driver_cuda="12.4") == "12.4"
    assert variable("DRIVER_CUDA", driver_cuda="13.0") == "13.0"


@pytest.mark.parametrize(
    ("cuda", "branch"),
    [("11.4", "470"), ("12.0", "525"), ("12.4", "550"), ("12.7", "560"), ("12.8", "570"), ("13.0", "580"), ("13.1", "590")],
)
def test_a_driver_has_the_version_of_its_cuda(cuda: str, branch: str) -> None:
    version = variable("DRIVER_VERSION", driver_cuda=cuda)
    assert version is not None
    assert version.partition(".")[0] == branch


def test_a_cuda_version_beyond_the_table_has_the_nearest_driver() -> None:
    assert variable("DRIVER_VERSION", driver_cuda="99.0") == variable("DRIVER_VERSION", driver_cuda="13.2") == "595.45.04"
    assert variable("DRIVER_VERSION", driver_cuda="9.2") == variable("DRIVER_VERSION", driver_cuda="11.0")


@pytest.mark.parametrize("argument", ["state", "log"])
def test_unwritable_state_or_log_file_raises(argument: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no/file"):
        with pytest.raises(ValueError, match=f"{argument} must be a file that can be written to, not"):
            environment(**{argument: path})


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert variable("LOG", log="log") == str(tmp_path / "log")
    assert variable("STATE", state=Path("state")) == str(tmp_path / "state")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": -1}, "gpus must be between 0 and 120, not -1"),
        ({"gpus": 121}, "gpus must be between 0 and 120, not 121"),
        ({"memory": "8 gigs"}, "memory must be bytes or a size such as"),
        ({"memory": "-1GiB"}, "memory must be bytes or a size such as"),
        ({"memory": "\uff18GiB"}, "memory must be bytes or a size such as"),
        ({"memory": "8\N{KELVIN SIGN}iB"}, "memory must be bytes or a size such as"),
        ({"memory": 0}, "memory must be at least 1 MiB and at most 256 TiB, not 0"),
        ({"memory": 8}, 'not 8 bytes; did you mean "8GiB"?'),
        ({"memory": " 80 "}, 'not 80 bytes; did you mean "80GiB"?'),
        ({"memory": 2**20 - 1}, "memory must be at least 1 MiB and at most 256 TiB, not 1048575"),
        ({"gpus": 2, "memory": ["8GiB", "16KiB"]}, "memory must be at least 1 MiB and at most 256 TiB, not '16KiB'"),
        ({"memory": "1000000TiB"}, "at most 256 TiB"),
        ({"memory": []}, "memory is an empty sequence"),
        ({"memory": [1, 2]}, "memory has 2 values for 1 GPU"),
        ({"gpus": 2, "speed": [1, 2, 3]}, "speed has 3 values for 2 GPUs"),
        ({"name": "a;b"}, "name must be 1 to 80 printable ASCII characters without ';', not 'a;b'"),
        ({"name": " "}, "name must be 1 to 80"),
        ({"name": "x" * 81}, "name must be 1 to 80"),
        ({"capability": "9"}, "capability must be two numbers as in \"9.0\", not '9'"),
        ({"speed": 2**31}, "speed must fit 32 bits"),
        ({"mig": 8}, "mig must be None or between 0 and 7, not 8"),
        ({"mig": 1, "capability": "7.5"}, "mig needs compute capability 8.0 or more, and GPU 0 has 7.5"),
        ({"gpus": 3, "mig": [None, 1], "capability": ["9.0", "8.0", "7.5"]}, "GPU 2 has 7.5"),
        ({"nvlink": [128]}, "nvlink must be between 0 and 119, not 128"),
        ({"numa": 64}, "numa must be between 0 and 63, not 64"),
        ({"numa": [[0, -1]]}, "numa must be between 0 and 63, not -1"),
        ({"clock_reasons": 2**32}, "clock_reasons must be between 0"),
        ({"driver": "gone"}, "driver must be one of 'present', 'absent', 'old', 'broken', not 'gone'"),
        ({"nvml": "old"}, "nvml must be one of 'present', 'absent', 'broken', 'mismatch', not 'old'"),
        ({"driver_cuda": "thirteen"}, "driver_cuda must be two numbers"),
        ({"fill": "ones"}, "fill must be one of 'zero', 'nan', not 'ones'"),
        ({"kernels": "ptx"}, "kernels must be one of 'run', 'refuse', not 'ptx'"),
        ({"errors": "cuInit"}, "errors has 'cuInit': an entry is function:code or function@gpu:code"),
        ({"errors": {"cu Init": 3}}, "errors has 'cu Init:3'"),
        ({"errors": {"cuInit@1": 3}}, "errors has 'cuInit@1:3', but there are 1 GPUs, numbered from 0"),
        ({"errors": {f"f{i}": 1 for i in range(61)}}, "errors has 61 entries"),
    ],
)
def test_impossible_values_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        environment(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": "2"}, "gpus must be an int, not str"),
        ({"gpus": True}, "gpus must be an int, not bool"),
        ({"memory": 1.5}, 'memory must be an int or a size such as "8GiB", not float'),
        ({"memory": True}, "not bool"),
        ({"name": 3}, "name must be a str, not int"),
        ({"name": [b"x"]}, "name must be a str, not bytes"),
        ({"capability": 9.0}, 'capability must be a str such as "9.0", not float'),
        ({"speed": "fast"}, "speed must be an int, not str"),
        ({"mig": "off"}, "mig must be None or an int, not str"),
        ({"nvlink": "all"}, "nvlink must be an int, not str"),
        ({"numa": "0"}, "numa must be an int, not str"),
        ({"clock_reasons": "power"}, "clock_reasons must be an int, not str"),
        ({"driver": None}, "driver must be a str, not NoneType"),
        ({"driver_cuda": 13.2}, "driver_cuda must be a str"),
        ({"errors": 3}, "errors must be a mapping of functions to codes, or a str, not int"),
        ({"compute": 2}, "compute must be True or False, not 2"),
        ({"compute": "no"}, "compute must be True or False, not 'no'"),
        ({"triton": 1}, "triton must be True or False, not 1"),
        ({"fill": 0}, "fill must be a str, not int"),
        ({"base": 3}, "base must be a mapping of variables to values, not int"),
        ({"log": 3}, "expected str, bytes or os.PathLike object, not int"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        environment(**arguments)


# environment(): libraries


def test_base_environment_is_extended_but_not_modified() -> None:
    base = {"PATH": "/bin", "LD_PRELOAD": "/x/liba.so /y/libb.so", "LD_LIBRARY_PATH": "/lib:"}
    before = dict(base)
    child = environment(base=base)
    assert base == before
    assert re.fullmatch(r"[^:]*/bin:/bin", child["PATH"])
    assert child["LD_PRELOAD"].endswith("libnccl.so.2:/x/liba.so /y/libb.so")
    assert child["LD_LIBRARY_PATH"].endswith("/nvml:/lib:")
    assert environment()["HOME"] == os.environ["HOME"]
    # torch would wait 10 seconds at each exit.
    assert child["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] == "1"
    own = {"TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "7"}
    assert environment(base=own)["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] == "7"


def test_nccl_timeout_of_the_user_is_kept() -> None:
    base = {"ACCELERATOR_SIM_NCCL_TIMEOUT": "5", "ACCELERATOR_SIM_MIG": "1"}
    child = environment(base=base)
    assert child["ACCELERATOR_SIM_NCCL_TIMEOUT"] == "5"
    assert child["ACCELERATOR_SIM_MIG"] != "1"


def test_triton_and_caches_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    base = {"TORCH_COMPILE_CACHE_KEY_TAG": "mine"}
    child = environment(base=base)
    assert child["TORCH_COMPILE_CACHE_KEY_TAG"] == "mine-simulated-gpu"
    inner = environment(base=child, triton=False)
    assert inner["TORCH_COMPILE_CACHE_KEY_TAG"] == "mine-simulated-gpu"
    assert environment(base=child, compute=False)["TORCH_COMPILE_CACHE_KEY_TAG"] == "mine"
    assert "TRITON_INTERPRET" not in {**child, **inner}
    assert environment(base={"TRITON_INTERPRET": "1"})["TRITON_INTERPRET"] == "1"


def test_nested_environment_replaces_the_outer_one() -> None:
    base = {"LD_PRELOAD": "/x/liba.so", "LD_LIBRARY_PATH": "/lib"}
    outer = environment(4, driver="broken", log="log", state="state", base=base)
    other_version = "/home/me/.cache/accelerator/simulation-0123456789abcdef"
    outer["LD_PRELOAD"] = f"{other_version}/preload/libcudart.so.13 {outer['LD_PRELOAD']}"
    outer["LD_LIBRARY_PATH"] += f":{other_version}/nvml"
    assert environment(2, base=outer) == environment(2, base=base)
    assert environment(2, base=environment(3, base={})) == environment(2, base={})


def test_nested_simulation_in_a_child_process() -> None:
    program = "import subprocess, sys; from tests.support import environment; "
    program += "print(environment(2)['LD_PRELOAD'] == environment(2, base={})['LD_PRELOAD'], flush=True); "
    program += "sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]], env=environment(2)))"
    count = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    done = python(program, count, env=environment(5, nvml="absent", base=plain()))
    assert done.stdout.split() == ["True", "2"], done.stderr


def test_both_driver_names_load_one_library() -> None:
    program = (
        "import ctypes; a, b = (ctypes.CDLL(name) for name in ('libcuda.so', 'libcuda.so.1')); print(a._handle == b._handle)"
    )
    assert python(program, env=environment(base=plain())).stdout == "True\n"


@pytest.mark.parametrize(
    ("argument", "library"), [("driver", "libcuda.so.1"), ("driver", "libcuda.so"), ("nvml", "libnvidia-ml.so.1")]
)
def test_absent_driver_hides_a_real_library(argument: str, library: str, tmp_path: Path) -> None:
    root = Path(environment()["LD_LIBRARY_PATH"].split(":")[0]).parent
    shutil.copy(next(root.glob(f"[dn]*/{library}")), tmp_path)
    base = {**plain(), "LD_LIBRARY_PATH": str(tmp_path)}
    program = f"import ctypes; ctypes.CDLL({library!r})"
    assert python(program, env=base).returncode == 0
    assert python(program, env=environment(base=base)).returncode == 0
    absent: dict[str, Any] = {argument: "absent"}
    assert "OSError" in python(program, env=environment(base=base, **absent)).stderr


@pytest.mark.parametrize("machine", [{}, {"gpus": 0}, {"driver": "absent", "nvml": "absent"}, {"driver": "broken"}])
def test_is_simulated_inside(machine: dict[str, Any]) -> None:
    assert python(PRINT_IS_SIMULATED, env=environment(**machine, base=plain())).stdout == "True\n"


def test_is_simulated_ignores_later_environment_changes() -> None:
    # The variables without the libraries make no simulation, and removing the variables does not end one.
    inside = environment(base=plain())
    variables = {key: value for key, value in inside.items() if key.startswith("ACCELERATOR_SIM_")}
    assert python(PRINT_IS_SIMULATED, env={**plain(), **variables}).stdout == "False\n"
    assert python("import os; os.environ.clear(); " + PRINT_IS_SIMULATED, env=inside).stdout == "True\n"


def test_unavailable_reason(tmp_path: Path) -> None:
    program = "from accelerator import simulation; print(simulation.unavailable_reason())\n"
    program += "try: simulation.environment(); print('given')\nexcept RuntimeError as error: print(error)"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    version = tmp_path / "torch/version.py"
    env = {**plain(), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    version.write_text("__version__ = '2.9.1'\ncuda = '13.0'\n")
    assert python(program, env=env).stdout == "None\ngiven\n"
    bare = {**env, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": "/nowhere", "CC": ""}
    no_compiler = "simulated GPUs need a C compiler, and none of cc, gcc and clang was found; install one or set CC"
    assert python(program, env=bare).stdout == f"{no_compiler}\n" * 2
    version.write_text("__version__ = '2.9.1'\ncuda = None\n")
    cpu = f"torch 2.9.1 of {sys.executable} is built for the CPU alone; install a CUDA build"
    assert python(program, env=bare).stdout == f"{cpu}\n" * 2


def test_build_from_a_zip_archive(tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "application"), "zip", REPOSITORY, "accelerator")
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**plain(), "PYTHONPATH": archive, "XDG_CACHE_HOME": str(tmp_path), "CC": str(make_compiler(tmp_path, FAKE_BUILD))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert Path(done.stdout.strip(), "driver/libcuda.so.1").is_file(), done.stderr


def test_is_simulated_in_a_child_of_this_process() -> None:
    # Not in this process: faults of a machine load its driver, too.
    program = "from accelerator.simulation import is_simulated; print(is_simulated(), open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    answer, _, maps = done.stdout.partition(" ")
    assert answer == str("/accelerator/simulation-" in maps), done.stderr


# Compiling


def compilations(directory: Path) -> int:
    """Return how many libraries were compiled."""
    calls = directory / "calls"
    return calls.read_text().count(" -o ") if calls.exists() else 0


def test_second_build_compiles_nothing(tmp_path: Path) -> None:
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": str(make_compiler(tmp_path, FAKE_BUILD))}
    first = python(BUILD, env=env)
    assert first.returncode == 0, first.stderr
    assert compilations(tmp_path) == len(libraries._LIBRARIES)
    root = Path(first.stdout.strip())
    assert root.parent == tmp_path / "cache/accelerator"
    second = python(BUILD, env=env)
    assert second.stdout == first.stdout
    assert compilations(tmp_path) == len(libraries._LIBRARIES)
    # A program that cleans caches may delete single files.
    (root / "driver/libcuda.so.1").unlink()
    assert python(BUILD, env=env).stdout == first.stdout
    assert (root / "driver/libcuda.so.1").is_file()


def test_compiler_that_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF, and no more")
    broken.chmod(0o755)
    done = python(BUILD, env={**plain(), "XDG_CACHE_HOME": str(tmp_path), "CC": str(broken)})
    assert f"RuntimeError: the C compiler {broken} does not start: Exec format error" in done.stderr


def test_existing_build_needs_no_compiler(tmp_path: Path) -> None:
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path), "CC": str(make_compiler(tmp_path, FAKE_BUILD))}
    built = python(BUILD, env=env).stdout
    assert python(BUILD, env={**env, "PATH": "/nowhere", "CC": "no-such-compiler"}).stdout == built


def test_an_existing_build_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.ensure_built()
    looks: list[Path] = []

    def look(build: Any, directory: Path) -> bool:
        looks.append(directory)
        return is_intact(build, directory)

    monkeypatch.setattr(libraries, "is_intact", look)
    accelerator.simulation.environment(gpus=1)
    assert len(looks) == 1


@pytest.mark.slow
def test_prebuilt_directory_needs_no_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerator", "simulate", "--build", str(tmp_path / "prebuilt")]
    compiler = {**plain(), **dict.fromkeys(("CC", "CXX"), str(make_compiler(tmp_path, FAKE_BUILD)))}
    built = subprocess.run(command, env=compiler, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)
    assert built.returncode == 0, built.stderr
    env = {**plain(), "PATH": "/nowhere", "ACCELERATOR_SIM_LIBRARIES": str(tmp_path / "prebuilt")}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    second = python(BUILD, env=env)
    assert second.stdout == built.stdout, second.stderr
    assert not (tmp_path / "cache").exists()
    nested = "from tests.support import environment; child = environment(1); "
    nested += "print(child['LD_PRELOAD'], environment(2, base=child)['ACCELERATOR_SIM_LIBRARIES'])"
    assert python(nested, env=env).stdout.startswith(built.stdout.strip())
    # Changed libraries are refused, like those of another version.
    (Path(built.stdout.strip()) / "driver/libcuda.so.1").write_bytes(b"")
    failed = python(BUILD, env=env).stderr.splitlines()[-1]
    assert failed.startswith("RuntimeError: ACCELERATOR_SIM_LIBRARIES names ")
    assert failed.endswith("build them with python -m accelerator simulate --build " + str(tmp_path / "prebuilt"))


def truncate(root: Path) -> None:
    library = root / "driver/libcuda.so.1"
    library.write_bytes(library.read_bytes()[:-1])


def open_a_library(root: Path) -> None:
    (root / "nvml/libnvidia-ml.so.1").chmod(0o666)


def open_a_directory(root: Path) -> None:
    (root / "driver").chmod(0o777)


def open_the_cache(root: Path) -> None:
    root.parent.chmod(0o777)


def replace_by_a_link(root: Path) -> None:
    library = root / "driver/libcuda.so.1"
    library.rename(root.parent / "elsewhere")
    library.symlink_to(root.parent / "elsewhere")


def leave_a_killed_build(root: Path) -> None:
    (root.parent / ".building-abc").mkdir()
    (root.parent / ".building-abc/part").touch()
    (root / "SHA256SUMS").unlink()


@pytest.mark.parametrize(
    "harm",
    sample(
        [truncate, open_a_library, open_a_directory, open_the_cache, replace_by_a_link, leave_a_killed_build],
        *(truncate, leave_a_killed_build),
    ),
    ids=lambda harm: harm.__name__,
)
def test_untrusted_build_is_replaced(harm: Callable[[Path], None], tmp_path: Path) -> None:
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path), "CC": str(make_compiler(tmp_path, FAKE_BUILD))}
    root = Path(python(BUILD, env=env).stdout.strip())
    sound = (root / "driver/libcuda.so.1").read_bytes()
    harm(root)
    again = python(BUILD, env=env)
    assert again.stdout.strip() == str(root), again.stderr
    assert (root / "driver/libcuda.so.1").read_bytes() == sound
    parts = [root.parent, root, *root.rglob("*")]
    assert [part for part in parts if part.lstat().st_mode & 0o022 or part.is_symlink()] == []
    assert {part.name for part in root.parent.iterdir()} <= {root.name, ".simulation.lock", "elsewhere"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_cache_owned_by_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "home/.cache/accelerator").mkdir(parents=True)
    env = {**plain(), "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    env["CC"] = str(make_compiler(tmp_path, FAKE_BUILD))
    env.pop("XDG_CACHE_HOME", None)
    (tmp_path / "tmp").mkdir()
    os.chown(tmp_path / "home/.cache/accelerator", 1, 1)
    done = python(BUILD, env=env)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / f"tmp/accelerator-{os.geteuid()}"), done.stderr
    os.chown(tmp_path / f"tmp/accelerator-{os.geteuid()}/accelerator", 1, 1)
    assert "belongs to another user" in python(BUILD, env=env).stderr.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("theirs_is", ["directory", "link"])
def test_cache_directory_created_by_another_user_is_an_error(theirs_is: str, tmp_path: Path) -> None:
    """The owner of the directory that contains the cache could replace the cache after it was checked."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    theirs = tmp_path / f"tmp/accelerator-{os.geteuid()}"
    (theirs if theirs_is == "directory" else tmp_path / "elsewhere").mkdir()
    if theirs_is == "link":
        theirs.symlink_to(tmp_path / "elsewhere")
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path / "file/cache"), "TMPDIR": str(tmp_path / "tmp")}
    env["CC"] = str(make_compiler(tmp_path, FAKE_BUILD))
    (tmp_path / "file").touch()
    theirs.chmod(0o777)
    done = python(BUILD, env=env)
    if theirs_is == "directory":  # this user owns it, so the build makes it private
        assert Path(done.stdout.strip()).is_relative_to(theirs), done.stderr
        assert theirs.stat().st_mode & 0o022 == 0
    os.chown(theirs, 1, 1, follow_symlinks=False)
    assert "belongs to another user" in python(BUILD, env=env).stderr.splitlines()[-1]


def test_first_build_prints_one_line(tmp_path: Path) -> None:
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path), "CC": str(make_compiler(tmp_path, FAKE_BUILD))}
    first, second = python(BUILD, env=env), python(BUILD, env=env)
    assert re.fullmatch(r"accelerator: compiling the simulated driver, about \d+ s, once\n", first.stderr)
    assert (second.stdout, second.stderr) == (first.stdout, "")
    shutil.rmtree(tmp_path / "accelerator")
    closed = python("import sys; sys.stderr.close(); " + BUILD, env=env)
    assert closed.stdout == first.stdout


def test_concurrent_builds_compile_once(tmp_path: Path) -> None:
    env = {**plain(), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": str(make_compiler(tmp_path, FAKE_BUILD))}
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(python, BUILD, env=env) for _ in range(4)]
    done = [job.result() for job in jobs]
    assert [process.returncode for process in done] == [0] * 4, done[0].stderr
    assert len({process.stdout for process in done}) == 1
    assert compilations(tmp_path) == len(libraries._LIBRARIES)
    names = {entry.name for entry in (tmp_path / "cache/accelerator").iterdir()}
    assert names == {Path(done[0].stdout.strip()).name, ".simulation.lock"}


@needs_cuda_torch
def test_a_machine_has_as_many_gpus_as_torch_is_compiled_for() -> None:
    build = importlib.util.find_spec("torch")
    assert build is not None
    assert build.origin is not None
    header = (Path(build.origin).parent / "include" / "c10" / "cuda" / "CUDAMacros.h").read_text()
    assert re.findall(r"#define C10_COMPILE_TIME_MAX_GPUS (\d+)", header)[-1] == str(_settings.LIMITS["GPUS"])
