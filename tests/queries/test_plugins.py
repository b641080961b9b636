"""Plug-ins of torch that raise, exit or hang when they are loaded: queries detect this in a child process.

``tests/backend/test_plugins.py`` tests plug-ins that work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accelerator as acc
from accelerator._machine import child_process, discovery_cache, torch_build, torch_child, torch_probe
from accelerator._machine.driver_child import DriverDevice
from tests.support import plain_environment, python, simulated_environment
from tests.support.discovery import DRIVER, evaluate, on_simulated_gpus

pytestmark = pytest.mark.skipif(torch_build.read() is None, reason="needs torch")

QUERIES = """
    import time
    import accelerator as acc
    begin = time.monotonic()
    if sys.argv[1] == "deadline":
        from accelerator._machine import limits
        limits.TORCH_DEADLINE_S = 2.0

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def state():
        return [acc.is_available(), acc.device_count(), acc.unavailable_reason(), [list(d) for d in acc.visible_devices()]]

    before = [state(), state()]
    extra = [outcome(lambda: acc.get_memory_info(1)), outcome(lambda: acc.total_memory(0)), acc.is_fork_safe()]
    torch_free = "torch" not in sys.modules
    message = None
    if sys.argv[1] == "":
        try:
            import torch
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
    print(json.dumps([before, extra, torch_free, message, acc.unavailable_reason()]))
"""


def install(plugin: str, folder: Path) -> None:
    (folder / "planet_plugin.py").write_text(plugin)
    metadata = folder / "planet-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planet\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nplanet = planet_plugin:load\n")


# What "pip install -e" leaves in site-packages if setuptools builds a package whose modules lie beside pyproject.toml.
FINDER_PTH = "import __editable___planet_1_finder; __editable___planet_1_finder.install()\n"
FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

MAPPING = {mapping!r}

class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return spec_from_file_location(fullname, MAPPING[fullname]) if fullname in MAPPING else None

def install():
    if not any(finder == _EditableFinder for finder in sys.meta_path):
        sys.meta_path.append(_EditableFinder)
"""


def install_editable(plugin: str, folder: Path) -> Path:
    """Install a plug-in into a new virtual environment as ``pip install -e`` does, and return the environment's Python."""
    project, python = folder / "project", folder / "venv/bin/python"
    project.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    install(plugin, site)
    (site / "planet_plugin.py").rename(project / "planet_plugin.py")
    (site / "__editable__.planet-1.pth").write_text(FINDER_PTH)
    mapping = {"planet_plugin": str(project / "planet_plugin.py")}
    (site / "__editable___planet_1_finder.py").write_text(FINDER.format(mapping=mapping))
    (site / "others.pth").write_text("\n".join(filter(os.path.isdir, sys.path)))
    return python


EDITABLE = """
    import accelerator as acc
    before = [acc.device_count(), acc.unavailable_reason(), "torch" in sys.modules]
    import torch
    print(json.dumps([before, "planet_plugin" in sys.modules, acc.device_count()]))
"""


@pytest.mark.slow
@on_simulated_gpus
def test_editable_plugin_is_imported_in_the_probe(tmp_path: Path) -> None:
    interpreter = install_editable("def load():\n    pass\n", tmp_path)
    before, is_loaded, after = evaluate(EDITABLE, simulated_environment(gpus=2), python=(str(interpreter),))
    assert before == [2, None, False]
    assert is_loaded
    assert after == 2


@pytest.mark.slow
@on_simulated_gpus
def test_query_in_a_pth_file_starts_one_probe(tmp_path: Path) -> None:
    """Every interpreter of the environment runs the file, the probe's child too, which must not start a child of its own."""
    interpreter = install_editable("def load():\n    pass\n", tmp_path)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    log = tmp_path / "counts"
    (site / "zz_query.pth").write_text("import zz_query\n")
    (site / "zz_query.py").write_text(
        f"import accelerator\ncount = accelerator.device_count()\nprint(count, file=open({str(log)!r}, 'a'))\n"
    )
    before, _, after = evaluate(EDITABLE, simulated_environment(gpus=2), python=(str(interpreter),))
    assert before[:2] == [2, None]
    assert after == 2
    assert log.read_text().split() == ["2", "2"]


def query(plugin: str, folder: Path, environment: dict[str, str], mode: str = "") -> Any:
    install(plugin, folder)
    environment["PYTHONPATH"] += f":{folder}"
    return evaluate(QUERIES, environment, mode)


BROKEN = {
    "raises": ("def load():\n    raise OSError('libplanet.so: cannot open shared object file')\n", "libplanet.so"),
    "is missing": ("import no_such_library\n\ndef load():\n    pass\n", "no_such_library"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plugin", BROKEN)
def test_a_plugin_that_cannot_be_imported(plugin: str, tmp_path: Path) -> None:
    text, cause = BROKEN[plugin]
    (first, second), _, torch_free, message, later = query(text, tmp_path, plain_environment())
    assert first == second
    assert first[:2] == [False, 0]
    assert first[2].startswith("torch cannot be imported: ")
    assert cause in first[2]
    assert "planet" in first[2]
    assert torch_free
    # torch's own message, which this package does not change.
    assert message is not None
    assert "planet" in message
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in message
    assert later == first[2]


def test_torch_may_be_importable_in_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "read", lambda: torch_build.Build("2.9", "12.8", None, None))
    monkeypatch.setattr(torch_build, "_plugins", lambda: [] if os.environ.get(torch_probe.AUTOLOAD) == "0" else ["planet"])
    for name in ("is_torch_imported", "has_torch_import_failed"):
        monkeypatch.setattr(torch_build.process, name, lambda: False)
    for name in ("_type", "_import_error"):
        monkeypatch.setattr(torch_build, name, None)
    probes = iter([torch_probe.TorchProbeResult("OSError: libplanet.so")])
    monkeypatch.setattr(torch_probe, "run", lambda environment={}: next(probes))
    monkeypatch.delenv(torch_probe.AUTOLOAD, raising=False)
    for _ in range(2):
        assert (torch_build.accelerator_type(), torch_build.import_error()) == (None, "OSError: libplanet.so")
    assert not discovery_cache._without_accelerator("torch cannot be imported", {}).is_cacheable
    monkeypatch.setenv(torch_probe.AUTOLOAD, "0")
    assert (torch_build.accelerator_type(), torch_build.import_error()) == ("cuda", None)


@pytest.mark.slow
def test_plugin_that_is_not_loaded_any_more(tmp_path: Path) -> None:
    install(BROKEN["raises"][0], tmp_path)
    environment = plain_environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    first, reason = evaluate(
        """
        import time
        import accelerator as acc
        first = acc.unavailable_reason()
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        reason, until = first, time.monotonic() + 30
        while reason == first and time.monotonic() < until:  # a failure is cached for a second
            time.sleep(0.05)
            reason = acc.unavailable_reason()
        print(json.dumps([first, reason]))
        """,
        environment,
    )
    assert "libplanet.so" in first
    assert "libplanet.so" not in reason


@pytest.mark.slow
@on_simulated_gpus
def test_broken_plugin_on_a_machine_with_gpus(tmp_path: Path) -> None:
    text, cause = BROKEN["raises"]
    (first, second), _, torch_free, message, later = query(text, tmp_path, simulated_environment(gpus=2))
    assert first == second
    assert first[:2] == [False, 0]
    assert cause in first[2] == later
    assert torch_free
    assert message is not None


@pytest.mark.slow
def test_a_plugin_that_exits(tmp_path: Path) -> None:
    (first, second), _, torch_free, _, _ = query(
        "import os, sys\n\ndef load():\n    if '-c' != sys.argv[0] or len(sys.argv) != 2:\n        os._exit(3)\n",
        tmp_path,
        plain_environment(),
    )
    assert first == second
    assert first[2] == "torch cannot be imported: the child process that asked torch ended with status 3 (''); it loads planet"
    assert torch_free


@pytest.mark.slow
def test_a_plugin_that_hangs(tmp_path: Path) -> None:
    (first, second), _, torch_free, _, _ = query(
        "import time\n\ndef load():\n    time.sleep(600)\n", tmp_path, plain_environment(), "deadline"
    )
    assert first == second
    assert first[2] == "torch cannot be imported: torch did not answer a child process within 2 s; it loads planet"
    assert torch_free


@pytest.mark.slow
def test_reason_names_the_cause_of_a_failed_torch_import(tmp_path: Path) -> None:
    """A plug-in that fails may leave TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, as torch_npu does. It then is not loaded again."""
    text = "import os\n\ndef load():\n    os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n    raise OSError('libplanet.so')"
    install(text, tmp_path)
    environment = plain_environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    own, available, reason, *errors = evaluate(
        """
        import accelerator as acc
        def message(call):
            try:
                call()
            except RuntimeError as error:
                return str(error)
        own = message(lambda: __import__("torch"))
        errors = [message(lambda: acc.synchronize()) for _ in range(2)]
        print(json.dumps([own, acc.is_available(), acc.unavailable_reason(), *errors]), flush=True)
        os._exit(0)  # some versions of torch crash at exit if their import failed
        """,
        environment,
    )
    assert "Failed to load the backend extension: planet" in own
    assert available is False
    assert reason.startswith("torch cannot be imported: ")
    assert "libplanet.so" in reason
    assert errors == [reason, reason]


ARCHITECTURES = """
    import accelerator as acc
    import torch
    ours = [acc.get_arch_list(), acc.get_gencode_flags()]
    with open(sys.argv[1], "w") as file:  # the plug-in prints to the standard output
        json.dump([ours, [torch.cuda.get_arch_list(), torch.cuda.get_gencode_flags()]], file)
"""


@pytest.mark.slow
@on_simulated_gpus
def test_arch_list_ignores_what_a_plugin_prints(tmp_path: Path) -> None:
    install("def load():\n    print('planet 1.0 sm_1')\n", tmp_path)
    environment = simulated_environment(gpus=1)
    environment["PYTHONPATH"] += f":{tmp_path}"
    done = python(DRIVER + textwrap.dedent(ARCHITECTURES), environment, str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads((tmp_path / "results").read_text())
    assert ours == theirs
    assert "sm_1" not in ours[0] != []


def test_error_quotes_last_output_of_a_crashed_child() -> None:
    program = "import os\nos.write(2, b'start\\nWARNING\\nF0 Check failed:\\n  no library\\n== trace ==\\n)\\n')\nos._exit(1)"
    with pytest.raises(child_process.ChildError) as error:
        child_process.run(program, (), {}, subject="torch", deadline_s=60)
    assert str(error.value) == (
        "the child process that asked torch ended with status 1 ('F0 Check failed: no library == trace == )')"
    )


def test_chained_error_is_described_once() -> None:
    def fail() -> None:
        try:
            raise ImportError("libplanet.so")
        except ImportError as error:
            try:
                raise ImportError("libplanet.so") from error
            except ImportError as again:
                raise RuntimeError("Failed to load planet") from again

    with pytest.raises(RuntimeError) as error:
        fail()
    description = torch_child._describe_error(error.value)
    assert description == "RuntimeError: Failed to load planet; caused by ImportError: libplanet.so"


@pytest.mark.parametrize(("device_type", "calls"), [("xpu", 0), ("npu", 1)])
def test_probe_counts_if_torchs_count_may_initialize(device_type: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.xpu may initialize Level Zero to count its devices, which would break fork."""
    counted: list[None] = []
    module = SimpleNamespace(device_count=lambda: counted.append(None) or 2, is_initialized=lambda: False)
    monkeypatch.setattr(discovery_cache.process, "torch_device_module", lambda: module)
    devices = (DriverDevice(None, device_type, None, None, None),) * 2
    monkeypatch.setattr(
        discovery_cache.torch_probe, "run", lambda: discovery_cache.torch_probe.TorchProbeResult(None, devices=devices)
    )
    assert discovery_cache._from_torch(device_type, {}).count == 2
    assert len(counted) == calls


def test_given_environment_is_discovered_in_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only torch knows the devices, a child process with the variables of that environment counts them."""
    masks: list[str | None] = []

    def probe(environment: dict[str, str | None]) -> Any:
        masks.append(environment["ZE_AFFINITY_MASK"])
        return discovery_cache.torch_probe.TorchProbeResult(None, devices=(DriverDevice(None, "xpu", None, None, None),))

    monkeypatch.setattr(discovery_cache.torch_build, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(discovery_cache.torch_probe, "run", probe)
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    assert len(acc.visible_devices({"ZE_AFFINITY_MASK": "1"})) == 1
    assert masks == ["1"]
    # What this process has chosen, failed at or initialized does not matter to another one.
    for change in (
        lambda patch: patch.setenv("ACCELERATOR_BACKEND", "cpu"),
        lambda patch: patch.setattr(discovery_cache, "_failure", "no initialization"),
        lambda patch: patch.setattr(discovery_cache.process, "is_initialized", lambda: True),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert len(acc.visible_devices({})) == 1
            assert masks.pop() is None
