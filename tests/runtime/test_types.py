"""The types of public names: type hints at run time, and strict type checkers on a file that uses every public name."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelerator as acc
from tests.support import ROOT, plain_environment, run

# The start of the file. A generated call of each function follows, with arguments of the annotated types.
HEADER = """\
# pyright: reportUnusedImport=false, reportDeprecated=false
import os
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Literal

import torch

import accelerator as acc
from accelerator import Device, PhysicalDevice, VisibleDevice

AnyDevice = Device | VisibleDevice | PhysicalDevice
Environment = MutableMapping[str, str]
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
CaptureErrorMode = Literal["default", "global", "thread_local", "relaxed"]

"""
BY_HAND = """
def use_values() -> None:
    stream: torch.Stream = acc.Stream()
    event: torch.Event = acc.Event(enable_timing=True)
    graph = acc.Graph(pool=(1, 2))
    with acc.stream(stream), acc.device_index(1), graph:
        event.record()
    with torch.cuda.graph(acc.create_graph()):
        pass
    module: ModuleType = acc.random()
    acc.random.manual_seed(1)
    version: str = acc.__version__
    domain: bool = acc.supports_nvtx_domain
    reading: acc.Telemetry = acc.telemetry(acc.visible_devices()[0])
    users: tuple[acc.Process, ...] = acc.processes()
    simulated: bool = acc.simulation.is_simulated()
    failure: type[Exception] = acc.OutOfMemoryError
    races: tuple[acc.simulation.Race, ...] = acc.simulation.races()
    total: torch.Tensor = acc.checkpointing.checkpoint(torch.add, torch.ones(1), torch.ones(1))
    total = acc.checkpointing.non_reentrant_checkpoint(torch.add, total, total)
    tracker: acc.checkpointing.CudaRNGStatesTracker = acc.checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        print(acc.checkpointing.CheckpointFunction)
    times: dict[str, acc.checkpointing.RegionTimes] = acc.checkpointing.region_times(clear=True)
    devices: tuple[acc.Device, acc.VisibleDevice, acc.PhysicalDevice]
    devices = "cuda:1", acc.visible_devices()[0], acc.physical_devices()[0]
    print(module, version, domain, reading, users, simulated, failure, races, total, times, devices)
"""


def public_names() -> list[tuple[str, str]]:
    """Return the public names of the package and its two public modules: as users write them, and as identifiers."""
    modules = {"acc": acc.__all__, "acc.checkpointing": acc.checkpointing.__all__, "acc.simulation": acc.simulation.__all__}
    return [(f"{module}.{name}", f"{module}.{name}".replace(".", "_")) for module, names in modules.items() for name in names]


def user_file() -> str:
    calls = []
    for path, name in public_names():
        function = eval(path, {"acc": acc})
        if not inspect.isfunction(function):
            continue
        parameters, arguments = [], []
        for parameter in inspect.signature(function).parameters.values():
            prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            annotation = str(parameter.annotation)
            parameters.append(f"{prefix}{parameter.name}: {annotation}")
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            arguments.append(f"{prefix}{f'{parameter.name}=' if by_name else ''}{parameter.name}")
        if "_P.args" in "".join(parameters):
            continue  # callers cannot write this type, so BY_HAND calls these functions
        calls.append(f"def use_{name}({', '.join(parameters)}) -> None:\n    {path}({', '.join(arguments)})\n\n")
    return HEADER + "\n".join(calls) + BY_HAND


def test_user_code_covers_every_public_name() -> None:
    text = user_file()
    assert [path for path, _ in public_names() if not re.search(rf"\b{re.escape(path)}\b", text)] == []


def test_type_hints_of_every_public_name() -> None:
    run(
        """
        import inspect, typing, torch
        import accelerator as acc
        for module in (acc, acc.checkpointing, acc.simulation):
            for name in module.__all__:
                value = getattr(module, name)
                methods = [each for each in vars(value).values() if inspect.isfunction(each)] if isinstance(value, type) else []
                for each in (value, *methods):
                    if inspect.isfunction(each) or isinstance(each, type):
                        typing.get_type_hints(inspect.unwrap(each))
        """,
        plain_environment(),
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_user_code_passes_mypy(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(user_file())
    program = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(file)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    checked = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=900)
    assert checked.returncode in (0, 1), checked.stderr  # 1: there are errors, which may be in other files
    assert [line for line in checked.stdout.splitlines() if line.startswith("user.py")] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="needs pyright")
def test_user_code_passes_pyright(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(user_file())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}))
    program = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    checked = subprocess.run(program, capture_output=True, text=True, check=False, timeout=900)
    result = json.loads(checked.stdout)
    assert result["summary"]["filesAnalyzed"] == 1
    assert [problem["message"] for problem in result["generalDiagnostics"]] == []
