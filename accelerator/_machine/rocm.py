"""Discovery backend for ROCm: amdsmi and the environment, else the ROCm runtime in a child process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import amdsmi, driver_child, driver_probe, nvml, torch_build, visibility
from .discovery_result import DiscoveredDevice, DiscoveryResult, Failed, failure_of

FROM_AMDSMI = "amdsmi and the environment"
FROM_TORCH = "torch, which has initialized the ROCm runtime in this process"
FROM_CHILD = "the ROCm runtime, asked in a child process"

# The variables that decide what a process sees; a launcher sets the first. HIP reads CUDA's variable if its own is not set.
VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_READ = (*VARIABLES, "CUDA_VISIBLE_DEVICES")


def discover(env: Mapping[str, str]) -> DiscoveryResult:
    """The devices that the ROCm runtime would enumerate in a fresh process with this environment."""
    try:
        listed = amdsmi.gpus()
    except Failed as error:
        return _from_probe(env, str(error))
    if not listed:
        return _result(env, "amdsmi finds no AMD GPU", FROM_AMDSMI)
    devices, hidden_by, selection = _select(env, listed)
    problem = None if devices else _hidden(hidden_by or "", env, selection)
    return _result(env, problem, FROM_AMDSMI, tuple(devices), selection=selection)


def from_torch(module: Any, env: Mapping[str, str]) -> DiscoveryResult:
    """The devices that torch's module for the initialized runtime enumerates, each with amdsmi's entry.

    The runtime read the environment when it was initialized, so the devices are matched by UUID or PCI bus id.
    """
    count: int = module.device_count()
    try:
        listed = amdsmi.gpus()
    except Failed:
        listed = ()
    fresh = discover(env).devices
    devices: list[DiscoveredDevice] = []
    for index in range(count):
        properties = module.get_device_properties(index)
        uuid, bus = _uuid(properties), _pci_bus_id(properties)
        matches = [device for device in listed if device.driver and _is_same(device.driver, uuid, bus)]
        if matches:
            devices.append(matches[0])
        elif len(fresh) == count and not (uuid or bus):
            devices.append(fresh[index])
        else:
            devices.append(
                DiscoveredDevice(
                    None, None, driver_child.DriverDevice(uuid, properties.name, bus, None, int(properties.total_memory))
                )
            )
    problem = None if count else "the ROCm runtime of this process was initialized with no visible device"
    return _result(env, problem, FROM_TORCH, tuple(devices))


def _uuid(properties: Any) -> str | None:
    """The sixteen characters of HIP's UUID, which torch shows as the hexadecimal digits of their bytes."""
    text = str(getattr(properties, "uuid", "")).replace("-", "")
    try:
        return bytes.fromhex(text).decode("ascii").lower() or None
    except ValueError:
        return text.lower() or None


def _pci_bus_id(properties: Any) -> str | None:
    """Domain, bus and device; None if this torch's properties lack them."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"


def _is_same(device: driver_child.DriverDevice, uuid: str | None, bus: str | None) -> bool:
    if uuid and device.uuid:
        return uuid == device.uuid
    return bool(bus and device.pci_bus_id) and bus == nvml.plain_bus(device.pci_bus_id or "")


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


def library_problem() -> str:
    """Why amdsmi cannot read a device that the ROCm runtime enumerates."""
    return failure_of(amdsmi.gpus) or "amdsmi does not list it"


def driver_device(device: DiscoveredDevice) -> driver_child.DriverDevice | None:
    """The description of a device by the driver or by amdsmi's list."""
    return device.driver


def probe_usability(result: DiscoveryResult, *, refresh: bool) -> driver_probe.ProbeResult:
    """Create a context on each device of a discovery result in a child process."""
    environment = {name: result.environment.get(name) for name in _READ}
    return driver_probe.run(environment, use=True, hip=library(), refresh=refresh)


def has_context(index: int) -> bool | None:
    """Whether this process has a context on a device: unknown here."""
    return None


def limiting_variable(env: Mapping[str, str]) -> str:
    """The variable by which an environment limits what a process sees."""
    return VARIABLES[0] if VARIABLES[0] in env else "CUDA_VISIBLE_DEVICES"


def clear() -> None:
    """Discover again at the next query."""
    amdsmi.clear()


_SELF: Any = sys.modules[__name__]  # a Backend


def _result(
    env: Mapping[str, str],
    problem: str | None,
    source: str,
    devices: tuple[DiscoveredDevice, ...] = (),
    *,
    selection: visibility.Selection | None = None,
    is_cacheable: bool = True,
) -> DiscoveryResult:
    return DiscoveryResult(
        *(len(devices), problem, source, devices),
        environment=env,
        accelerator_type="cuda",  # torch's name for ROCm's devices too
        backend=_SELF,
        selection=selection,
        is_cacheable=is_cacheable,
    )


def _select(
    env: Mapping[str, str], listed: Sequence[DiscoveredDevice]
) -> tuple[Sequence[DiscoveredDevice], str | None, visibility.Selection | None]:
    """Apply the variables one after the other, each to the devices that the previous one selected."""
    selection, hidden_by = None, None
    # The driver below HIP reads its own variable first.
    for variable in ("ROCR_VISIBLE_DEVICES", limiting_variable(env)):
        value = env.get(variable)
        if value is not None and listed:
            selection = visibility.select(value, [visibility.Gpu(device.uuid or "GPU-") for device in listed])
            listed, hidden_by = [listed[target.gpu] for target in selection.targets], variable
    return listed, hidden_by, selection


def _hidden(variable: str, env: Mapping[str, str], selection: visibility.Selection | None = None) -> str:
    entry = selection and selection.problem
    because = f": {visibility.quoted(entry.text)} {entry.problem}" if entry else ""
    return f"{variable}={visibility.quoted(env.get(variable, ''))} hides every GPU{because}"


def library() -> str:
    """The ROCm runtime that torch uses: torch's own copy, if it brings one."""
    folder = torch_build.folder()
    candidates = [os.path.join(folder, "lib", "libamdhip64.so")] if folder else []
    candidates.append("/opt/rocm/lib/libamdhip64.so")
    return next((path for path in candidates if os.path.exists(path)), "libamdhip64.so")


def _from_probe(env: Mapping[str, str], amdsmi_problem: str) -> DiscoveryResult:
    probed = driver_probe.run({name: env.get(name) for name in _READ}, hip=library())
    if probed.error or not probed.devices:
        hidden_by = next((name for name in _READ if env.get(name)), None)
        problem = probed.error or (hidden_by and _hidden(hidden_by, env)) or "the ROCm runtime finds no device"
        return _result(env, f"{problem}; {amdsmi_problem}", FROM_CHILD, is_cacheable=False)
    devices = tuple(DiscoveredDevice(None, None, device) for device in probed.devices)
    return _result(env, None, FROM_CHILD, devices, is_cacheable=False)
