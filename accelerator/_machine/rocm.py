"""Which devices a process sees on a ROCm build: from amdsmi and the environment, else from the ROCm runtime in a child
process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from . import amdsmi, grammar, nvml, probe, torch_build
from .cuda import Found, Seen

FROM_AMDSMI = "amdsmi and the environment"
FROM_CHILD = "the ROCm runtime, asked in a child process"

_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# What child processes answered, by the environment that they were asked in: each is asked once.
_answers: dict[tuple[str | None, ...], probe.Answer] = {}


def forget() -> None:
    """Drop what is remembered of the devices."""
    _answers.clear()
    amdsmi.forget()


def find(env: Mapping[str, str]) -> Found:
    """Which devices the ROCm runtime would enumerate in a process with this environment."""
    try:
        gpus = amdsmi.gpus()
    except nvml.Unavailable as error:
        return _asked(env, str(error))
    if not gpus:
        return Found(0, "amdsmi finds no AMD GPU", FROM_AMDSMI, ())
    selected, hidden_by, selection = _select(env, gpus)
    if not selected:
        return Found(0, _hidden(hidden_by or "", env, selection), FROM_AMDSMI, (), selection)
    return Found(len(selected), None, FROM_AMDSMI, tuple(_device(gpu) for gpu in selected), selection)


def _device(gpu: amdsmi.Gpu) -> Seen:
    about = gpu.about
    return Seen(nvml.Gpu(gpu.physical_index, gpu.handle, about.uuid and f"GPU-{about.uuid}", about.name, None), None, about)


def _select(
    env: Mapping[str, str], gpus: Sequence[amdsmi.Gpu]
) -> tuple[Sequence[amdsmi.Gpu], str | None, grammar.Selection | None]:
    """Apply the variables one after the other, each to what the one before it left."""
    # The driver below HIP reads its own first. HIP takes CUDA's variable for its own where that is not set.
    own = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
    selection, hidden_by = None, None
    for variable in ("ROCR_VISIBLE_DEVICES", own):
        value = env.get(variable)
        if value is not None and gpus:
            selection = grammar.select(value, [grammar.Gpu(f"GPU-{gpu.about.uuid or ''}") for gpu in gpus])
            gpus, hidden_by = [gpus[target.gpu] for target in selection.targets], variable
    return gpus, hidden_by, selection


def _hidden(variable: str, env: Mapping[str, str], selection: grammar.Selection | None) -> str:
    entry = selection and selection.problem
    because = f": {entry.text!r} {entry.problem}" if entry else ""
    return f"{variable}={env.get(variable)!r} hides every GPU{because}"


def library() -> str:
    """The ROCm runtime that torch uses: its own where it brings one."""
    folder = torch_build.folder()
    candidates = [os.path.join(folder, "lib", "libamdhip64.so")] if folder else []
    candidates.append("/opt/rocm/lib/libamdhip64.so")
    return next((path for path in candidates if os.path.exists(path)), "libamdhip64.so")


def _asked(env: Mapping[str, str], amdsmi_problem: str) -> Found:
    key = tuple(env.get(variable) for variable in _VARIABLES)
    if key not in _answers:
        _answers[key] = probe.ask(dict(zip(_VARIABLES, key, strict=True)), hip=library())
    answer = _answers[key]
    if answer.error or not answer.devices:
        hidden = next((f"{name}={value!r} hides every GPU" for name, value in zip(_VARIABLES, key, strict=True) if value), None)
        problem = answer.error or hidden or "the ROCm runtime finds no device"
        return Found(0, f"{problem}; {amdsmi_problem}", FROM_CHILD, (), lasting=False)
    return Found(len(answer.devices), None, FROM_CHILD, tuple(Seen(None, None, device) for device in answer.devices))
