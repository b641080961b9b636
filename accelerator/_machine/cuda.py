"""Discovery backend for CUDA: the driver if it is initialized in this process, else NVML and the environment, else a probe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import driver, driver_child, driver_probe, nvml, nvml_telemetry, torch_build, visibility
from .discovery_result import DiscoveredDevice, DiscoveryResult, Failed, PhysicalGpu, failure_of

FROM_DRIVER = "the driver, which is initialized in this process"
FROM_NVML = "NVML and the environment"
FROM_CHILD = "the driver, asked in a child process"

# The variables that decide what a process sees; a launcher sets the first.
VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_READ = (*VARIABLES, "CUDA_DEVICE_ORDER")

_NO_DRIVER = f"there is no CUDA driver: NVML is installed, but {driver.NAME} is missing"


def discover(env: Mapping[str, str]) -> DiscoveryResult:
    """The devices that the driver would enumerate in a fresh process with this environment."""
    visible, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")
    try:
        gpus = nvml.gpus()
    except Failed as error:
        if not driver.is_installed():
            return _result(env, FROM_NVML, problem=str(error), is_cacheable=False)
        return _from_probe(env, str(error), None)
    uncertain = None
    try:
        problem = _too_old(nvml.cuda_version())
    except Failed as error:
        if error.code == nvml.LIBRARY_NOT_FOUND or not driver.is_installed():
            # NVML without the driver library, as in a container with the "utility" capability only.
            return _result(env, FROM_NVML, problem=_NO_DRIVER, is_cacheable=False)
        problem, uncertain = None, str(error)
    selection = visibility.select(visible, [visibility.Gpu(gpu.uuid or "", gpu.instances) for gpu in gpus])
    if problem or visibility.hides_all(visible):
        return _result(env, FROM_NVML, problem=problem or _nothing_visible(visible, gpus, selection), selection=selection)
    devices = tuple(DiscoveredDevice(gpus[target.gpu], target.instance) for target in selection.targets)
    problem = None if devices else _nothing_visible(visible, gpus, selection)
    by_nvml = _result(env, FROM_NVML, len(devices), devices, problem=problem, selection=selection)
    is_ordered = order == "PCI_BUS_ID" or visibility.needs_uuids(visible) or _alike(gpus)
    uncertain = uncertain or _uncertain(visible, gpus, is_ordered=is_ordered)
    if uncertain and driver.is_installed():
        return _from_probe(env, uncertain, by_nvml)
    if is_ordered or not devices:
        return by_nvml
    # Only the order of the devices needs a probe, and a count does not need the order.
    return _result(env, FROM_NVML, len(devices), lambda: _in_driver_order(env, gpus, devices), selection=selection)


def from_driver(count: int, env: Mapping[str, str]) -> DiscoveryResult:
    """The devices that the driver of this process, which is initialized, enumerates."""
    library = driver.loaded()
    try:
        problem = _too_old(driver_child.version(library))
    except driver_child.DriverError:  # it enumerates devices all the same
        problem = None
    if not count:
        problem = problem or "the CUDA driver of this process was initialized with no visible device"
    if problem:
        return _result(env, FROM_DRIVER, problem=problem)
    return _result(env, FROM_DRIVER, count, lambda: _joined(driver_child.devices(library, count)))


def physical() -> tuple[DiscoveredDevice, ...]:
    """Every GPU in NVML's order, each followed by its MIG instances.

    Raises:
        Failed: if NVML cannot list them.
    """
    return tuple(
        device
        for gpu in nvml.gpus()
        for device in (DiscoveredDevice(gpu), *(DiscoveredDevice(gpu, instance) for instance in gpu.instances or ()))
    )


read = nvml_telemetry.read


def is_linked(handle: Any, peer: Any) -> bool | None:
    """Whether NVLink connects two GPUs; None if NVML does not know.

    Raises:
        NotSupported, Failed: as ``nvml.call``.
    """
    return nvml_telemetry.is_nvlink_connected(handle, peer)


def library_problem() -> str:
    """Why NVML cannot read a device that the driver enumerates."""
    return failure_of(nvml.gpus) or "NVML does not list it"


def driver_cuda_version(env: Mapping[str, str]) -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver supports; from a probe if NVML does not report it, None if unknown."""
    try:
        return nvml.cuda_version()
    except Failed:
        # The same probe as for the devices, so that one child process answers both.
        return driver_probe.run(_probed_variables(env)).version if driver.is_installed() else None


def driver_device(device: DiscoveredDevice) -> driver_child.DriverDevice | None:
    """The driver's description of a device, from a probe if it is not known yet; None if the driver has none."""
    if device.driver is not None or device.uuid is None:
        return device.driver
    return next(iter(driver_probe.run({"CUDA_VISIBLE_DEVICES": device.uuid}).devices), None)


def probe_usability(result: DiscoveryResult, *, refresh: bool) -> driver_probe.ProbeResult:
    """Create a context on each device of a discovery result in a child process."""
    environment = _probed_variables(result.environment)
    uuids = [device.uuid for device in result.devices]
    if driver.device_count() is not None and None not in uuids:
        # The driver of this process read the environment once, at its initialization. The child must see the same devices.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid in uuids if uuid)
    return driver_probe.run(environment, use=True, refresh=refresh)


def has_context(index: int) -> bool | None:
    """Whether this process has a context on a device; another process's exclusive use is then impossible. None if unknown."""
    return driver.has_context(index)


def limiting_variable(env: Mapping[str, str]) -> str:
    """The variable by which an environment limits what a process sees."""
    return VARIABLES[0]


def clear() -> None:
    """Discover again at the next query."""
    nvml.clear()


_SELF: Any = sys.modules[__name__]  # a Backend


def _result(
    env: Mapping[str, str],
    source: str,
    count: int = 0,
    devices: Any = (),
    *,
    problem: str | None = None,
    selection: visibility.Selection | None = None,
    is_cacheable: bool = True,
) -> DiscoveryResult:
    return DiscoveryResult(
        *(count, problem, source, devices),
        environment=env,
        accelerator_type="cuda",
        backend=_SELF,
        selection=selection,
        is_cacheable=is_cacheable,
    )


def _probed_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    return {name: env.get(name) for name in _READ}


def _alike(gpus: Sequence[PhysicalGpu]) -> bool:
    # CUDA puts the fastest first and keeps the order of equal ones. Only CUDA knows which of different GPUs is faster.
    return len(gpus) <= 1 or (gpus[0].name is not None and all(gpu.name == gpus[0].name for gpu in gpus))


def _uncertain(visible: str | None, gpus: Sequence[PhysicalGpu], *, is_ordered: bool) -> str | None:
    """Why NVML's list does not determine the number of devices, or None."""
    if visibility.needs_uuids(visible) and any(gpu.uuid is None for gpu in gpus):
        return "NVML does not report the UUIDs that CUDA_VISIBLE_DEVICES refers to"
    if not is_ordered and any(gpu.instances is not None for gpu in gpus):
        return "NVML does not report which of different GPUs comes first"
    return next((gpu.problem for gpu in gpus if gpu.problem), None)


def _from_probe(env: Mapping[str, str], nvml_problem: str, by_nvml: DiscoveryResult | None) -> DiscoveryResult:
    """The result of a probe. If the driver does not start in the child, NVML's result, if there is one.

    Args:
        env: the environment.
        nvml_problem: why the driver is asked.
        by_nvml: the result according to NVML's list.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visibility.hides_all(visible):
        return _result(env, FROM_NVML, problem=f"{_hidden(visible)}; {nvml_problem}")
    probed = driver_probe.run(_probed_variables(env))
    # No result is cached here: NVML may work again in a second. The probe's own result is cached for longer.
    if probed.error and by_nvml:
        count, devices, selection = by_nvml.count, by_nvml.devices, by_nvml.selection
        return _result(env, FROM_NVML, count, devices, problem=by_nvml.problem, selection=selection, is_cacheable=False)
    problem = probed.error or (probed.version and _too_old(probed.version))
    if not problem and not probed.devices:
        problem = (by_nvml and by_nvml.problem) or _hidden(visible) or "the CUDA driver finds no device"
    if problem:
        problem = problem if by_nvml else f"{problem}; {nvml_problem}"
        return _result(env, FROM_CHILD, problem=problem, is_cacheable=False)
    return _result(env, FROM_CHILD, len(probed.devices), _joined(probed.devices)[0], is_cacheable=False)


def _in_driver_order(
    env: Mapping[str, str], gpus: Sequence[PhysicalGpu], devices: tuple[DiscoveredDevice, ...]
) -> tuple[tuple[DiscoveredDevice, ...], bool]:
    """GPUs of several models in the driver's order, or in NVML's if the probe fails; and whether the order is certain.

    Returns as many devices as were counted: those that the driver does not know come last.
    """
    probed = driver_probe.run(_probed_variables(env))
    if probed.error:
        return devices, False
    ordered, _ = _joined(probed.devices, gpus)
    uuids = {device.uuid for device in ordered}
    return (*ordered, *(device for device in devices if device.uuid not in uuids))[: len(devices)], bool(probed.devices)


def _joined(
    devices: Sequence[driver_child.DriverDevice], gpus: Sequence[PhysicalGpu] | None = None
) -> tuple[tuple[DiscoveredDevice, ...], bool]:
    """The driver's devices with NVML's entry for each, matched by UUID or else by PCI bus; and whether NVML listed all."""
    is_listed = True
    if gpus is None:
        try:
            gpus = nvml.gpus()
        except Failed:
            gpus, is_listed = (), False
    by_uuid: dict[str | None, DiscoveredDevice] = {
        gpu.uuid.removeprefix("GPU-"): DiscoveredDevice(gpu) for gpu in gpus if gpu.uuid
    }
    for gpu in gpus:
        by_uuid.update(
            (instance.uuid.removeprefix("MIG-"), DiscoveredDevice(gpu, instance)) for instance in gpu.instances or ()
        )
    without_uuid = [gpu for gpu in gpus if not gpu.uuid]
    for gpu in without_uuid:
        bus = nvml.pci_bus_id(gpu.handle)
        by_uuid.update(
            (device.uuid, DiscoveredDevice(gpu))
            for device in devices
            if device.pci_bus_id and bus == nvml.plain_bus(device.pci_bus_id)
        )
    unmatched = [device.uuid for device in devices if device.uuid not in by_uuid]
    matched_gpus = {device.gpu for device in by_uuid.values()}
    unmatched_gpus = [gpu for gpu in without_uuid if gpu not in matched_gpus]
    if len(unmatched) == len(unmatched_gpus) == 1 and len(devices) == len(gpus):
        by_uuid[unmatched[0]] = DiscoveredDevice(unmatched_gpus[0])  # by elimination
    has_problem = any(gpu.problem for gpu in gpus)
    joined = tuple(by_uuid.get(device.uuid, DiscoveredDevice(None))._replace(driver=device) for device in devices)
    return joined, is_listed and not has_problem


def _too_old(driver: tuple[int, int]) -> str | None:
    build = torch_build.read()
    if build is None or build.cuda is None or driver[0] >= int(build.cuda.partition(".")[0]):
        return None
    return (
        f"the NVIDIA driver is too old: it supports CUDA {driver[0]}.{driver[1]} and torch {build.version} is built for CUDA "
        f"{build.cuda}; update the driver, or install a torch built for CUDA {driver[0]}"
    )


def _nothing_visible(visible: str | None, gpus: Sequence[PhysicalGpu], selection: visibility.Selection) -> str:
    if not gpus:
        return "the NVIDIA driver finds no GPU"
    return _hidden(visible, selection.problem) or (
        "MIG is on and has no instance on any GPU; create one with 'nvidia-smi mig -cgi', or turn MIG off"
    )


def _hidden(visible: str | None, entry: visibility.Entry | None = None) -> str | None:
    if visible is None:
        return None
    if visible == "":
        return "CUDA_VISIBLE_DEVICES is set to an empty string, which hides every GPU; unset it or name devices"
    because = f": {visibility.quoted(entry.text)} {entry.problem}" if entry else ""
    return f"CUDA_VISIBLE_DEVICES={visibility.quoted(visible)} hides every GPU{because}"
