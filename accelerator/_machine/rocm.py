"""Which devices a process sees on a ROCm build: from amdsmi and the environment, else from the ROCm runtime in a child
process. One of the two backends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import amdsmi, driver_child, grammar, probe, torch_build
from .discovery_result import DiscoveredDevice, DiscoveryResult, Failed

FROM_AMDSMI = "amdsmi and the environment"
FROM_CHILD = "the ROCm runtime, asked in a child process"

# The variables that decide what a process sees, the one to set first; HIP takes CUDA's for its own where that is not set.
VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_READ = (*VARIABLES, "CUDA_VISIBLE_DEVICES")


def discover(env: Mapping[str, str]) -> DiscoveryResult:
    """Which devices the ROCm runtime would enumerate in a fresh process with this environment."""
    try:
        listed = amdsmi.gpus()
    except Failed as error:
        return _of_child(env, str(error))
    if not listed:
        return _none("amdsmi finds no AMD GPU", FROM_AMDSMI)
    seen, hidden_by, selection = _select(env, listed)
    if not seen:
        return _none(_hidden(hidden_by or "", env, selection), FROM_AMDSMI, selection)
    return DiscoveryResult(len(seen), None, FROM_AMDSMI, tuple(seen), backend=_SELF, selection=selection)


def physical() -> tuple[DiscoveredDevice, ...]:
    """Every GPU, in HIP's order.

    Raises:
        Failed: if amdsmi cannot list them.
    """
    return amdsmi.gpus()


read = amdsmi.read


def is_linked(handle: Any, peer: Any) -> bool | None:
    """Whether XGMI connects two GPUs.

    Raises:
        NotSupported, Failed: as ``read``.
    """
    return amdsmi.is_linked(handle, peer)


def driver_device(seen: DiscoveredDevice) -> driver_child.Device | None:
    """What is known of a device beside what is read by its handle."""
    return seen.driver


def probe_usability(found: DiscoveryResult, *, refresh: bool) -> probe.ProbeResult:
    """Have a child process create a context on each device of an answer, which is this process's own."""
    return probe.run({name: os.environ.get(name) for name in _READ}, use=True, hip=library(), refresh=refresh)


def uses_already(index: int) -> bool:
    """Whether this process has a context on a device: never known here."""
    return False


def limiting(env: Mapping[str, str]) -> str:
    """The variable by which an environment limits what a process sees."""
    return VARIABLES[0] if VARIABLES[0] in env else "CUDA_VISIBLE_DEVICES"


def clear() -> None:
    """Look anew at the next question."""
    amdsmi.clear()


_SELF = sys.modules[__name__]


def _none(
    problem: str, source: str, selection: grammar.Selection | None = None, *, is_cacheable: bool = True
) -> DiscoveryResult:
    return DiscoveryResult(0, problem, source, backend=_SELF, selection=selection, is_cacheable=is_cacheable)


def _select(
    env: Mapping[str, str], listed: Sequence[DiscoveredDevice]
) -> tuple[Sequence[DiscoveredDevice], str | None, grammar.Selection | None]:
    """Apply the variables one after the other, each to what the one before it left."""
    selection, hidden_by = None, None
    # The driver below HIP reads its own first.
    for variable in ("ROCR_VISIBLE_DEVICES", limiting(env)):
        value = env.get(variable)
        if value is not None and listed:
            selection = grammar.select(value, [grammar.Gpu(seen.uuid or "GPU-") for seen in listed])
            listed, hidden_by = [listed[target.gpu] for target in selection.targets], variable
    return listed, hidden_by, selection


def _hidden(variable: str, env: Mapping[str, str], selection: grammar.Selection | None = None) -> str:
    entry = selection and selection.problem
    because = f": {grammar.quoted(entry.text)} {entry.problem}" if entry else ""
    return f"{variable}={grammar.quoted(env.get(variable, ''))} hides every GPU{because}"


def library() -> str:
    """The ROCm runtime that torch uses: its own where it brings one."""
    folder = torch_build.folder()
    candidates = [os.path.join(folder, "lib", "libamdhip64.so")] if folder else []
    candidates.append("/opt/rocm/lib/libamdhip64.so")
    return next((path for path in candidates if os.path.exists(path)), "libamdhip64.so")


def _of_child(env: Mapping[str, str], amdsmi_problem: str) -> DiscoveryResult:
    answer = probe.run({name: env.get(name) for name in _READ}, hip=library())
    if answer.error or not answer.devices:
        hidden_by = next((name for name in _READ if env.get(name)), None)
        problem = answer.error or (hidden_by and _hidden(hidden_by, env)) or "the ROCm runtime finds no device"
        return _none(f"{problem}; {amdsmi_problem}", FROM_CHILD, is_cacheable=False)
    devices = tuple(DiscoveredDevice(None, None, device) for device in answer.devices)
    return DiscoveryResult(len(devices), None, FROM_CHILD, devices, backend=_SELF, is_cacheable=False)
