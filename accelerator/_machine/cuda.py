"""Which CUDA devices a process sees: from the driver once it is up, before that from NVML and the environment, and from the
driver in a child process where NVML cannot tell. One of the two backends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import driver, driver_child, grammar, nvml, probe, telemetry, torch_build
from .discovery_result import DiscoveredDevice, DiscoveryResult, Failed, Gpu

FROM_DRIVER = "the driver, which is initialized in this process"
FROM_NVML = "NVML and the environment"
FROM_CHILD = "the driver, asked in a child process"

# The variables that decide what a process sees, the one to set first.
VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_READ = (*VARIABLES, "CUDA_DEVICE_ORDER")

_NO_DRIVER = f"there is no CUDA driver: {driver.NAME} is missing beside NVML"


def discover(env: Mapping[str, str]) -> DiscoveryResult:
    """Which devices the driver would enumerate in a fresh process with this environment."""
    visible, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")
    try:
        gpus = nvml.gpus()
    except Failed as error:
        if not driver.is_installed():
            return _none(str(error), FROM_NVML, is_cacheable=False)
        return _of_child(visible, order, str(error), None)
    unsure = None
    try:
        problem = _too_old(nvml.cuda_version())
    except Failed as error:
        if error.code == nvml.LIBRARY_NOT_FOUND or not driver.is_installed():
            # NVML came without the driver library, as in a container that was given the "utility" capability only.
            return _none(_NO_DRIVER, FROM_NVML, is_cacheable=False)
        problem, unsure = None, str(error)
    selection = grammar.select(visible, [grammar.Gpu(gpu.uuid or "", gpu.instances) for gpu in gpus])
    if problem or grammar.hides_all(visible):
        return _none(problem or _nothing_visible(visible, gpus, selection), FROM_NVML, selection)
    seen = tuple(DiscoveredDevice(gpus[target.gpu], target.instance) for target in selection.targets)
    by_nvml = DiscoveryResult(len(seen), None, FROM_NVML, seen, backend=_SELF, selection=selection)
    if not seen:
        by_nvml = _none(_nothing_visible(visible, gpus, selection), FROM_NVML, selection)
    ordered = order == "PCI_BUS_ID" or grammar.needs_uuids(visible) or _alike(gpus)
    unsure = unsure or _unsure(visible, gpus, ordered=ordered)
    if unsure and driver.is_installed():
        return _of_child(visible, order, unsure, by_nvml)
    if ordered or not seen:
        return by_nvml
    in_order = lambda: _in_the_driver_s_order(visible, order, gpus, seen)  # noqa: E731
    return DiscoveryResult(len(seen), None, FROM_NVML, in_order, backend=_SELF, selection=selection)


def from_driver(count: int) -> DiscoveryResult:
    """What the driver that is up in this process enumerates."""
    library = driver.loaded()
    try:
        problem = _too_old(driver_child.version(library))
    except driver_child.DriverError:  # it enumerates devices all the same
        problem = None
    if not count:
        problem = problem or "the CUDA driver of this process was initialized with no visible device"
    if problem:
        return _none(problem, FROM_DRIVER)
    return DiscoveryResult(count, None, FROM_DRIVER, lambda: _joined(driver_child.devices(library, count)), backend=_SELF)


def physical() -> tuple[DiscoveredDevice, ...]:
    """Every GPU in NVML's order, each followed by its MIG instances.

    Raises:
        Failed: if NVML cannot list them.
    """
    return tuple(
        seen
        for gpu in nvml.gpus()
        for seen in (DiscoveredDevice(gpu), *(DiscoveredDevice(gpu, instance) for instance in gpu.instances or ()))
    )


read = telemetry.read


def is_linked(handle: Any, peer: Any) -> bool | None:
    """Whether NVLink connects two GPUs; None where NVML does not know.

    Raises:
        NotSupported, Failed: as ``nvml.call``.
    """
    return telemetry.is_nvlink_connected(handle, peer)


def driver_device(seen: DiscoveredDevice) -> driver_child.Device | None:
    """What the driver says of a device, in a child process where it is not known yet; None where it does not."""
    if seen.driver is not None or seen.uuid is None:
        return seen.driver
    return next(iter(probe.run({"CUDA_VISIBLE_DEVICES": seen.uuid}).devices), None)


def probe_usability(found: DiscoveryResult, *, refresh: bool) -> probe.ProbeResult:
    """Have a child process create a context on each device of an answer, which is this process's own."""
    environment = {name: os.environ.get(name) for name in _READ}
    uuids = [seen.uuid for seen in found.devices]
    if driver.device_count() is not None and None not in uuids:
        # The driver of this process read the environment once for all; another has to see the same devices.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid in uuids if uuid)
    return probe.run(environment, use=True, refresh=refresh)


def uses_already(index: int) -> bool:
    """Whether this process has a context on a device, so that it does not matter that no other can have one."""
    return driver.has_context(index)


def limiting(env: Mapping[str, str]) -> str:
    """The variable by which an environment limits what a process sees."""
    return VARIABLES[0]


def clear() -> None:
    """Look anew at the next question."""
    nvml.clear()


_SELF = sys.modules[__name__]


def _none(
    problem: str, source: str, selection: grammar.Selection | None = None, *, is_cacheable: bool = True
) -> DiscoveryResult:
    return DiscoveryResult(0, problem, source, backend=_SELF, selection=selection, is_cacheable=is_cacheable)


def _alike(gpus: Sequence[Gpu]) -> bool:
    # CUDA puts the fastest first and keeps the order of like ones; which of unlike ones is faster, only it knows.
    return len(gpus) <= 1 or (gpus[0].name is not None and all(gpu.name == gpus[0].name for gpu in gpus))


def _unsure(visible: str | None, gpus: Sequence[Gpu], *, ordered: bool) -> str | None:
    """Why NVML's list does not even tell how many devices there are, or None."""
    if grammar.needs_uuids(visible) and any(gpu.uuid is None for gpu in gpus):
        return "NVML does not tell the UUIDs that CUDA_VISIBLE_DEVICES refers to"
    if not ordered and any(gpu.instances is not None for gpu in gpus):
        return "NVML does not tell which of unlike GPUs comes first"
    return next((gpu.problem for gpu in gpus if gpu.problem), None)


def _of_child(visible: str | None, order: str | None, nvml_problem: str, by_nvml: DiscoveryResult | None) -> DiscoveryResult:
    """The driver's answer from a child; where it does not start, NVML's, if it has one.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES.
        order: the value of CUDA_DEVICE_ORDER.
        nvml_problem: why the driver is asked.
        by_nvml: how NVML's list is to be read as far as it goes.
    """
    if grammar.hides_all(visible):
        return _none(f"{_hidden(visible)}; {nvml_problem}", FROM_NVML)
    answer = probe.run({"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order})
    if answer.error and by_nvml:
        return DiscoveryResult(
            by_nvml.count,
            by_nvml.problem,
            FROM_NVML,
            by_nvml.devices,
            backend=_SELF,
            selection=by_nvml.selection,
            is_cacheable=False,
        )
    problem = answer.error or (answer.version and _too_old(answer.version))
    if not problem and not answer.devices:
        problem = (by_nvml and by_nvml.problem) or _hidden(visible) or "the CUDA driver finds no device"
    # What NVML failed at it may do in a second; the child's answer is remembered for longer.
    if problem:
        return _none(problem if by_nvml else f"{problem}; {nvml_problem}", FROM_CHILD, is_cacheable=False)
    number = len(answer.devices)
    return DiscoveryResult(number, None, FROM_CHILD, _joined(answer.devices)[0], backend=_SELF, is_cacheable=False)


def _in_the_driver_s_order(
    visible: str | None, order: str | None, gpus: Sequence[Gpu], seen: tuple[DiscoveredDevice, ...]
) -> tuple[tuple[DiscoveredDevice, ...], bool]:
    """Unlike GPUs as a child process finds them, in NVML's order where that fails; and whether it did not.

    There are as many as were counted: what the driver does not know comes last.
    """
    answer = probe.run({"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order})
    if answer.error:
        return seen, False
    found, _ = _joined(answer.devices, gpus)
    listed = {device.uuid for device in found}
    return (*found, *(device for device in seen if device.uuid not in listed))[: len(seen)], bool(answer.devices)


def _joined(
    devices: Sequence[driver_child.Device], gpus: Sequence[Gpu] | None = None
) -> tuple[tuple[DiscoveredDevice, ...], bool]:
    """What the driver says of devices with what NVML has of them, by UUID or else by PCI bus; and whether NVML answered."""
    answered = True
    if gpus is None:
        try:
            gpus = nvml.gpus()
        except Failed:
            gpus, answered = (), False
    known: dict[str | None, DiscoveredDevice] = {
        gpu.uuid.removeprefix("GPU-"): DiscoveredDevice(gpu) for gpu in gpus if gpu.uuid
    }
    for gpu in gpus:
        known.update((instance.uuid.removeprefix("MIG-"), DiscoveredDevice(gpu, instance)) for instance in gpu.instances or ())
    nameless = [gpu for gpu in gpus if not gpu.uuid]
    for gpu in nameless:
        bus = nvml.pci_bus_id(gpu.handle)
        known.update(
            (device.uuid, DiscoveredDevice(gpu))
            for device in devices
            if device.pci_bus_id and bus == nvml.plain_bus(device.pci_bus_id)
        )
    lost = [device.uuid for device in devices if device.uuid not in known]
    matched = {seen.gpu for seen in known.values()}
    unmatched = [gpu for gpu in nameless if gpu not in matched]
    if len(lost) == len(unmatched) == 1 and len(devices) == len(gpus):
        known[lost[0]] = DiscoveredDevice(unmatched[0])  # by elimination
    failing = any(gpu.problem for gpu in gpus)
    joined = tuple(known.get(device.uuid, DiscoveredDevice(None))._replace(driver=device) for device in devices)
    return joined, answered and not failing


def _too_old(driver: tuple[int, int]) -> str | None:
    build = torch_build.read()
    if build is None or build.cuda is None or driver[0] >= int(build.cuda.partition(".")[0]):
        return None
    return (
        f"the NVIDIA driver is too old: it supports CUDA {driver[0]}.{driver[1]} and torch {build.version} is built for CUDA "
        f"{build.cuda}; update the driver, or install a torch built for CUDA {driver[0]}"
    )


def _nothing_visible(visible: str | None, gpus: Sequence[Gpu], selection: grammar.Selection) -> str:
    if not gpus:
        return "the NVIDIA driver finds no GPU"
    return _hidden(visible, selection.problem) or (
        "MIG is on and has no instance on any GPU; create one with 'nvidia-smi mig -cgi', or turn MIG off"
    )


def _hidden(visible: str | None, entry: grammar.Entry | None = None) -> str | None:
    if visible is None:
        return None
    if visible == "":
        return "CUDA_VISIBLE_DEVICES is set to an empty text, which hides every GPU; unset it or name devices"
    because = f": {grammar.quoted(entry.text)} {entry.problem}" if entry else ""
    return f"CUDA_VISIBLE_DEVICES={grammar.quoted(visible)} hides every GPU{because}"
