"""Which CUDA devices a process sees: from the driver once it is up, before that from NVML and the environment, and from the
driver in a child process where NVML cannot tell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import driver, grammar, nvml, probe, torch_build

FROM_DRIVER = "the driver, which is initialized in this process"
FROM_NVML = "NVML and the environment"
FROM_CHILD = "the driver, asked in a child process"

_NO_DRIVER = f"there is no CUDA driver: {driver.NAME} is missing beside NVML"


class Seen(NamedTuple):
    """A visible device: what NVML has about it, what the driver said of it, or both."""

    gpu: nvml.Gpu | None
    instance: grammar.Instance | None = None
    driver: probe.Device | None = None

    @property
    def handle(self) -> Any:
        """The handle of the instance, else of the GPU, of the library that lists it; None where only the driver knows it."""
        return self.instance.handle if self.instance else self.gpu.handle if self.gpu else None


class Found(NamedTuple):
    """What is visible.

    Attributes:
        number: how many devices torch could use.
        problem: one sentence on why there is none, or None.
        source: who said so.
        lasting: whether it stays true while the environment does; what failed to start may start in a second.
        devices: the devices in CUDA's order; None where only the count was asked for, or where nobody could list them.
        selection: how the environment was read, where it was read here.
    """

    number: int
    problem: str | None
    source: str
    devices: tuple[Seen, ...] | None = None
    selection: grammar.Selection | None = None
    lasting: bool = True


class _Undecided(Exception):
    """NVML answers, but the order of unlike GPUs is the driver's own affair."""


def count(visible: str | None, order: str | None) -> Found:
    """How many devices the driver would enumerate for these values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""
    return _find(visible, order, only_count=True)


def devices(visible: str | None, order: str | None) -> Found:
    """Which devices the driver would enumerate, in its order."""
    return _find(visible, order, only_count=False)


def of_driver(count: int) -> Found:
    """What the driver that is up in this process enumerates."""
    library = driver.loaded()
    try:
        problem = _too_old(probe.version(library))
    except probe.DriverError:  # it enumerates devices all the same
        problem = None
    if problem:
        return Found(0, problem, FROM_DRIVER, ())
    if not count:
        return Found(0, "the CUDA driver of this process was initialized with no visible device", FROM_DRIVER, ())
    return Found(count, None, FROM_DRIVER, tuple(_matched(probe.devices(library, count))))


def _find(visible: str | None, order: str | None, *, only_count: bool) -> Found:
    try:
        try:
            problem = _too_old(nvml.cuda_version())
        except nvml.Unavailable as error:
            if error.code == nvml.LIBRARY_NOT_FOUND and nvml.is_up():
                # NVML came without the driver library, as in a container that was given the "utility" capability only.
                return Found(0, _NO_DRIVER, FROM_NVML, (), lasting=False)
            raise
        gpus, selection = _select(visible, order, only_count=only_count)
    except _Undecided:
        return _asked(visible, order, None)
    except nvml.Unavailable as error:
        if driver.is_installed():
            return _asked(visible, order, str(error))
        return Found(0, str(error), FROM_NVML, (), lasting=False)
    if problem is None and not selection.targets:
        problem = _nothing_visible(visible, gpus, selection)
    if problem:
        return Found(0, problem, FROM_NVML, (), selection)
    found = tuple(Seen(gpus[target.gpu], target.instance) for target in selection.targets)
    return Found(len(found), None, FROM_NVML, None if only_count else found, selection)


def _select(visible: str | None, order: str | None, *, only_count: bool) -> tuple[list[nvml.Gpu], grammar.Selection]:
    gpus = list(nvml.gpus())
    by_uuid = grammar.needs_uuids(visible)
    if by_uuid and any(gpu.uuid is None for gpu in gpus):
        raise nvml.Unavailable("NVML does not tell the UUIDs that CUDA_VISIBLE_DEVICES refers to", 0)
    # CUDA puts the fastest first and keeps the order of like ones; which of unlike ones is faster, only it knows.
    alike = len(gpus) <= 1 or (gpus[0].name is not None and all(gpu.name == gpus[0].name for gpu in gpus))
    ordered = order == "PCI_BUS_ID" or by_uuid or alike
    if not ordered and not (only_count and all(gpu.instances is None for gpu in gpus)):
        raise _Undecided
    return gpus, grammar.select(visible, [grammar.Gpu(gpu.uuid or "", gpu.instances) for gpu in gpus])


# What child processes answered, by the environment that they were asked in: each is asked once.
_answers: dict[tuple[str | None, str | None], probe.Answer] = {}


def forget() -> None:
    """Drop what child processes answered."""
    _answers.clear()


def _asked(visible: str | None, order: str | None, nvml_problem: str | None) -> Found:
    if (visible, order) not in _answers:
        _answers[visible, order] = probe.ask({"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order})
    answer = _answers[visible, order]
    problem = answer.error or (answer.version and _too_old(answer.version)) or None
    if problem or not answer.devices:
        problem = problem or _hidden(visible) or "the CUDA driver finds no device"
        return Found(0, f"{problem}; {nvml_problem}" if nvml_problem else problem, FROM_CHILD, (), lasting=not nvml_problem)
    return Found(len(answer.devices), None, FROM_CHILD, tuple(_matched(answer.devices)))


def _matched(devices: tuple[probe.Device, ...]) -> list[Seen]:
    """Join what the driver says with what NVML has, by UUID, the one identity that both share."""
    try:
        gpus = nvml.gpus()
    except nvml.Unavailable:
        gpus = ()
    known: dict[str | None, Seen] = {gpu.uuid.removeprefix("GPU-"): Seen(gpu) for gpu in gpus if gpu.uuid}
    for gpu in gpus:
        known.update((instance.uuid.removeprefix("MIG-"), Seen(gpu, instance)) for instance in gpu.instances or ())
    return [known.get(device.uuid, Seen(None))._replace(driver=device) for device in devices]


def _too_old(driver: tuple[int, int]) -> str | None:
    build = torch_build.read()
    if build is None or build.cuda is None or driver[0] >= int(build.cuda.partition(".")[0]):
        return None
    return (
        f"the NVIDIA driver is too old: it supports CUDA {driver[0]}.{driver[1]} and torch {build.version} is built for CUDA "
        f"{build.cuda}; update the driver, or install a torch built for CUDA {driver[0]}"
    )


def _nothing_visible(visible: str | None, gpus: list[nvml.Gpu], selection: grammar.Selection) -> str:
    if not gpus:
        return "the NVIDIA driver finds no GPU"
    if visible is None:
        return "MIG is on and has no instance on any GPU; create one with 'nvidia-smi mig -cgi', or turn MIG off"
    return _hidden(visible, selection.problem) or ""


def _hidden(visible: str | None, entry: grammar.Entry | None = None) -> str | None:
    if visible is None:
        return None
    if visible == "":
        return "CUDA_VISIBLE_DEVICES is set to an empty text, which hides every GPU; unset it or name devices"
    because = f": {entry.text!r} {entry.problem}" if entry else ""
    return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU{because}"
