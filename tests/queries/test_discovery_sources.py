"""Discovery without one of its sources: NVML, its binding, torch, or a child process that ends in time."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.discovery import CUDA, evaluate, evaluate_simulated, on_simulated_gpus, original_pynvml, simulated_driver

RETRY = """
    import time
    import accelerator as acc
    now = [0.0]
    time.monotonic = lambda: now[0]
    counts, reason = [acc.device_count()], acc.unavailable_reason()
    for library in sys.argv[2:]:
        os.symlink(library, os.path.join(sys.argv[1], os.path.basename(library)))
    for now[0] in (0.9, 1.1):
        counts.append(acc.device_count())
    print(json.dumps([counts, reason, acc.unavailable_reason()]))
"""


@on_simulated_gpus
@pytest.mark.parametrize("late", ["nvml", "both"])
def test_failed_library_load_is_cached_for_one_second(late: str, tmp_path: Path) -> None:
    environment = simulated_environment(gpus=2)
    driver, nvml = environment["LD_LIBRARY_PATH"].split(":")[:2]
    others = environment["LD_LIBRARY_PATH"].split(":")[2:]
    environment["LD_LIBRARY_PATH"] = ":".join([str(tmp_path), *others])
    libraries = [f"{driver}/libcuda.so.1", f"{nvml}/libnvidia-ml.so.1"]
    counts, before, after = evaluate(RETRY, environment, str(tmp_path), *libraries[late == "nvml" :])
    if late == "nvml":
        # NVML was installed, but the driver's library is still missing.
        assert counts == [0, 0, 0]
        assert after == "there is no CUDA driver: NVML is installed, but libcuda.so.1 is missing"
        return
    assert counts == [0, 0, 2]
    assert before.startswith("no NVIDIA driver is installed")
    assert after is None


TORCHLESS = """
    import accelerator as acc
    def outcome(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    results = [acc.is_available(), acc.device_count(), acc.unavailable_reason(), acc.visible_devices(), acc.get_device_name(),
               acc.is_initialized(), acc.is_in_bad_fork(), acc.is_fork_safe(), acc.is_available(strict=True)]
    results += [acc.driver_version(), acc.driver_cuda_version(), acc.communication_backend_name(), acc.export_envs(),
                acc.visible_devices_envs(), acc.communication_backend_version()]
    results += [outcome(lambda: acc.utilization(0)), outcome(lambda: acc.memory_allocated()).split(":")[0]]
    # Schedulers list the GPUs without torch.
    physical = [[device.index, device.name, device.visible_index] for device in acc.physical_devices()]
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy"))
    print(json.dumps([results, loaded, physical, acc.temperature(acc.physical_devices()[1])]))
"""


def bare_python(environment: dict[str, str], *folders: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment and the command of a Python whose only packages are NVML's binding and those in the folders."""
    folders[0].mkdir(exist_ok=True)
    if not (folders[0] / "pynvml.py").exists():
        (folders[0] / "pynvml.py").symlink_to(original_pynvml())
    path = os.pathsep.join((environment["PYTHONPATH"].split(os.pathsep)[0], *map(str, folders)))
    return {**environment, "PYTHONPATH": path}, (sys.executable, "-S")


@simulated_driver
def test_queries_without_torch_installed(tmp_path: Path) -> None:
    environment, python = bare_python(simulated_environment(gpus=2), tmp_path / "site")
    results, modules, physical, celsius = evaluate(TORCHLESS, environment, python=python)
    reason = "torch is not installed in this Python; install it with 'pip install torch'"
    assert results[:9] == [False, 0, reason, [], "cpu", False, False, True, False]
    assert results[9:15] == ["595.45.04", [13, 2], "gloo", [], ["CUDA_VISIBLE_DEVICES"], None]
    assert results[15:] == [f"RuntimeError: There is no device to read from: {reason}", "ModuleNotFoundError"]
    assert physical == [[0, "Simulated GPU", None], [1, "Simulated GPU", None]]
    assert celsius == 31
    assert modules == []


def make_torch(folder: Path, version: str) -> Path:
    """Create a torch that cannot be imported and whose version file can be read; return its folder."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise ImportError('not a torch to import')")
    (folder / "torch/version.py").write_text(version)
    return folder


@simulated_driver
@pytest.mark.parametrize(
    ("version", "count", "reason"),
    [
        ("__version__ = '9.0'\ncuda = '13.9'\nhip = None\n", 2, None),
        ("__version__ = '9.0+cpu'\ncuda = None\n", 0, "torch 9.0+cpu is a CPU build; install one that is built for the"),
        ("__version__ = '9.0'\ncuda = '14.0'\n", 0, "the NVIDIA driver is too old: it supports CUDA 13.2 and torch 9.0 is"),
        ("raise SystemError", 0, "torch is not installed in this Python; install it with 'pip install torch'"),
    ],
)
def test_torch_build_is_read_without_importing_torch(version: str, count: int, reason: str | None, tmp_path: Path) -> None:
    folders = (tmp_path / "site", make_torch(tmp_path / "stand-in", version))
    environment, python = bare_python(simulated_environment(gpus=2), *folders)
    output = evaluate(
        "import accelerator as acc; print(json.dumps([acc.device_count(), acc.unavailable_reason()]))",
        environment,
        python=python,
    )
    assert output[0] == count
    assert output[1] is None if reason is None else output[1].startswith(reason)


HIDDEN = """
    import accelerator as acc
    messages = []
    for _ in range(2):
        try:
            acc.synchronize()
        except RuntimeError as error:
            messages.append(str(error))
    print(json.dumps([acc.device_count(), acc.unavailable_reason(), messages, "torch" in sys.modules]))
"""


@simulated_driver
@pytest.mark.parametrize("version", [True, False])
def test_reason_names_a_file_that_hides_torch(version: bool, tmp_path: Path) -> None:
    """A query runs neither the file nor a file ``version.py`` beside it."""
    (tmp_path / "torch.py").write_text("open('executed', 'w')\n")
    if version:
        (tmp_path / "version.py").write_text("open('executed', 'w')\n__version__, cuda = '9.0', '13.9'\n")
    environment, python = bare_python(simulated_environment(gpus=2), tmp_path / "site")
    path = environment["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), *path))
    output = evaluate(f"os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(HIDDEN), environment, python=python)
    reason = f"the file {tmp_path}/torch.py hides torch, because it has the same name; rename it"
    assert output == [0, reason, [reason] * 2, False]
    assert not (tmp_path / "executed").exists()


@simulated_driver
def test_discovery_without_pynvml_uses_a_probe(tmp_path: Path) -> None:
    """Without nvidia-ml-py, one child process for each environment queries the driver."""
    environment, python = bare_python(simulated_environment(gpus=3, log=tmp_path / "log"), tmp_path / "site")
    (tmp_path / "site/pynvml.py").unlink()
    make_torch(tmp_path / "stand-in", "__version__ = '9.0'\ncuda = '13.9'\n")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path / "stand-in")
    program = """
        import accelerator as acc
        counts = []
        for value in (None, "1", None, "1", None, "1"):
            put({"CUDA_VISIBLE_DEVICES": value})
            counts += [acc.device_count(), acc.device_count(), len(acc.visible_devices())]
        children = len(open(sys.argv[1]).readlines())
        device = acc.visible_devices()[0]
        try:
            acc.temperature()
        except RuntimeError as error:
            failure = str(error)
        print(json.dumps([counts, children, device, failure, acc.driver_version()]))
    """
    counts, children, device, failure, version = evaluate(program, environment, str(tmp_path / "log"), python=python)
    assert counts == [3, 3, 3, 1, 1, 1] * 3
    assert children == 2
    assert device[2:] == ["Simulated GPU", "00000000:02:00.0", [9, 0], 8 * 2**30, None, None]
    assert device[1].startswith("GPU-c9")
    assert failure.startswith("The temperature of device 0, Simulated GPU, cannot be read: only the driver knows it")
    assert version is None


@simulated_driver
def test_reason_names_hanging_or_missing_probe(tmp_path: Path) -> None:
    environment, python = bare_python(simulated_environment(gpus=1, nvml="absent"), tmp_path / "site")
    make_torch(tmp_path / "stand-in", "__version__ = '9.0'\ncuda = '13.9'\n")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path / "stand-in")
    program = """
        import accelerator as acc
        from accelerator._machine import limits
        results = []
        def query():
            acc.refresh()
            results.append([acc.device_count(), acc.unavailable_reason()])
        os.environ["ACCELERATOR_SIM_INIT_DELAY"] = "cuInit:600000"
        limits.DRIVER_DEADLINE_S = 0.5
        query()
        del os.environ["ACCELERATOR_SIM_INIT_DELAY"]
        executable, sys.executable = sys.executable, "/nonexistent/python"
        query()
        sys.executable = ""
        query()
        sys.executable, sys.frozen = executable, True
        query()
        del sys.frozen
        sys.executable = "/bin/true"
        query()
        sys.executable, limits.DRIVER_DEADLINE_S = executable, 60.0
        query()
        print(json.dumps(results))
    """
    hung, absent, nameless, frozen, mute, well = evaluate(program, environment, python=python)
    assert hung[0] == 0
    assert hung[1].startswith("the CUDA driver did not answer a child process within 0.5 s; ")
    assert absent[1].startswith("no child process could be started to ask the CUDA driver (")
    assert nameless[1].startswith("the CUDA driver can only be asked in a child process, and there is no Python executable")
    assert frozen[1] == nameless[1]
    assert mute[1].startswith("the child process that asked the CUDA driver ended with status 0 ('')")
    assert well == [1, None]


@on_simulated_gpus
def test_get_device_name_rejects_invalid_arguments() -> None:
    program = """
        import accelerator as acc
        def outcome(device):
            try:
                return acc.get_device_name(device)
            except Exception as error:
                return type(error).__name__
        class Index:
            def __index__(self): return 1
        given = [None, 0, 1, Index(), "cuda", "cuda:1", 2, -1, 10**30, "cuda:2", "xpu:0", "cpu"]
        given += [True, 1.0, b"cuda", [], "x", ""]
        print(json.dumps([[outcome(device) for device in given], "torch" in sys.modules]))
    """
    names, torch = evaluate_simulated(program, gpus=2, name=["Zero", "One"])
    assert names[:6] == ["Zero", "Zero", "One", "One", "Zero", "One"]
    assert names[6:12] == ["ValueError"] * 6
    assert names[12:16] == ["TypeError"] * 4
    assert names[16:] == ["RuntimeError"] * 2
    assert not torch


@on_simulated_gpus
def test_driver_versions() -> None:
    program = "import accelerator as acc; print(json.dumps([acc.driver_version(), acc.driver_cuda_version()]))"
    assert evaluate_simulated(program, gpus=0) == ["595.45.04", [13, 2]]
    assert evaluate_simulated(program, nvml="absent") == [None, [13, 2]]
    assert evaluate_simulated(program, nvml="absent", driver="absent") == [None, None]
    assert evaluate_simulated(program, nvml="absent", driver="broken") == [None, [13, 2]]
    assert evaluate_simulated(program, driver_cuda="12.4")[1] == [12, 4]


@on_simulated_gpus
def test_driver_of_older_cuda_major_is_too_old() -> None:
    """A driver is too old if its CUDA major version is below torch's. The minor versions do not matter."""
    assert CUDA
    program = "import accelerator as acc; print(json.dumps(acc.device_count()))"
    assert evaluate_simulated(program, driver_cuda=f"{CUDA}.0") == 1
    assert evaluate_simulated(program, driver_cuda=f"{CUDA - 1}.9") == 0
    assert evaluate_simulated(program, driver_cuda=f"{CUDA + 1}.0") == 1
    initialized = """
        import accelerator as acc
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        print(json.dumps([acc.device_count(), acc.unavailable_reason()]))
    """
    count, reason = evaluate_simulated(initialized, driver_cuda=f"{CUDA - 1}.9")
    assert count == 0
    assert reason.startswith("the NVIDIA driver is too old")
