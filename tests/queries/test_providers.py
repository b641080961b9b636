"""Rare providers, as data: unreadable names and UUIDs, amdsmi's units, the kernel's memory file, other counts of probes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accelerator as acc
from accelerator import discovery, memory_info
from accelerator._machine import amdsmi, cuda, discovery_cache, host_memory, torch_build, torch_probe
from accelerator._machine.discovery_result import DiscoveredDevice, DiscoveryResult, Failed, NotSupported, PhysicalGpu
from accelerator._machine.driver_child import DriverDevice
from accelerator._machine.visibility import Instance
from tests.support.discovery import evaluate_simulated, on_simulated_gpus

GIB = 2**30


@pytest.mark.parametrize("names", [*itertools.product(["A", "B", None], repeat=3), (None,), (None, None), ("A",), ()])
def test_gpus_are_alike_if_all_have_one_known_name(names: tuple[str | None, ...]) -> None:
    gpus = [PhysicalGpu(i, None, None, name) for i, name in enumerate(names)]
    assert cuda._alike(gpus) == (len(names) <= 1 or (None not in names and len(set(names)) == 1))


@pytest.mark.parametrize("instances", [None, (), (Instance("MIG-one", 1, 0, 11),)])
def test_order_of_different_gpus_is_uncertain_while_mig_is_on(instances: tuple[Instance, ...] | None) -> None:
    gpus = [PhysicalGpu(0, None, "GPU-one", "A"), PhysicalGpu(1, None, "GPU-two", "B", instances)]
    assert bool(cuda._uncertain(None, gpus, is_ordered=False)) == (instances is not None)
    assert cuda._uncertain(None, gpus, is_ordered=True) is None


INSTANCES = (Instance("MIG-one", 1, 0, 11), Instance("MIG-two", 2, 0, 12))


@pytest.mark.parametrize("has_uuids", [False, True])
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("kind", [acc.PhysicalDevice, acc.VisibleDevice])
def test_listed_device_is_read_by_its_own_handle(
    has_uuids: bool, position: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By UUID, or by index and MIG instance if the UUIDs cannot be read."""
    instances = INSTANCES if has_uuids else tuple(instance._replace(uuid=None) for instance in INSTANCES)  # type: ignore[arg-type]
    gpus = [PhysicalGpu(i, i, f"GPU-{i}" if has_uuids else None, "A", instances if i == 1 else None) for i in range(3)]
    listed = [DiscoveredDevice(gpus[0]), DiscoveredDevice(gpus[1]), *(DiscoveredDevice(gpus[1], each) for each in instances)]
    listed.append(DiscoveredDevice(gpus[2]))
    backend = SimpleNamespace(read=lambda handle, field: handle)
    monkeypatch.setattr(discovery_cache, "physical", lambda: (backend, tuple(listed)))
    device = listed[position]
    assert device.gpu is not None
    fields = {"uuid": device.uuid, "name": "A", "pci_bus_id": None, "compute_capability": None, "total_memory": None}
    if kind is acc.PhysicalDevice:
        argument = acc.PhysicalDevice(index=device.gpu.physical_index, mig=device.mig, visible_index=None, **fields)  # type: ignore[arg-type]
    else:
        argument = acc.VisibleDevice(index=7, physical_index=device.gpu.physical_index, mig=device.mig, **fields)  # type: ignore[arg-type]
    assert acc.temperature(argument) == device.handle


def test_a_mig_instance_has_the_place_and_the_capability_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML may not report them for the instance, whose name and memory are its own."""
    figures: dict[tuple[int, str], Any] = {(1, "pci_bus_id"): "00000000:3B:00.0", (1, "compute_capability"): (9, 0)}
    figures |= {(1, "numa_node"): 3, (11, "name"): "A MIG 1g.10gb", (11, "memory"): (1, 3, 2)}
    backend: Any = SimpleNamespace(read=lambda handle, field: figures[handle, field])
    devices = (DiscoveredDevice(PhysicalGpu(0, 1, "GPU-one", "A", INSTANCES), INSTANCES[0]),)
    result = DiscoveryResult(1, None, "NVML", devices, environment={}, accelerator_type="cuda", backend=backend)
    monkeypatch.setattr(discovery, "_current", lambda: result)
    assert acc.numa_node(0) == 3
    assert acc.visible_devices()[0][1:] == ("MIG-one", "A MIG 1g.10gb", "00000000:3B:00.0", (9, 0), 3, 0, (1, 0))


MIG = """
    import accelerator as acc
    uuids = [device.uuid for device in acc.physical_devices()]
    def seen(value):
        put({"CUDA_VISIBLE_DEVICES": value})
        return [device.visible_index for device in acc.physical_devices()]
    print(json.dumps([seen(value) for value in (None, "0", "1", "2", "2,0", uuids[3], uuids[1], "0,1")]))
"""


@on_simulated_gpus
def test_visible_index_of_gpus_and_of_mig_instances() -> None:
    """Three GPUs, of which the second has two instances. A process sees at most one instance, and then nothing else."""
    expected = [[None, None, 0, None, None], [0, None, None, None, None], [None, None, 0, None, None],
                [None, None, None, None, 0], [1, None, None, None, 0], [None, None, None, 0, None],
                [None, None, 0, None, None], [None, None, 0, None, None]]  # fmt: skip
    assert evaluate_simulated(MIG, gpus=3, mig=[None, 2, None]) == expected


def test_available_memory_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the free memory, which leaves out what the kernel can evict."""
    figures = {"MemTotal": 64, "MemFree": 3, "MemAvailable": 48, "Buffers": 5, "Cached": 7, "SwapTotal": 99, "SwapFree": 98}
    (tmp_path / "meminfo").write_text("".join(f"{name}:{value * 2**20:>16} kB\n" for name, value in figures.items()))
    monkeypatch.setattr(host_memory, "_MEMORY", str(tmp_path / "meminfo"))
    monkeypatch.setattr(host_memory, "_cgroups", lambda: iter(()))
    assert (host_memory.available(), host_memory.total()) == (48 * GIB, 64 * GIB)


@pytest.mark.parametrize("probed", range(5))
@pytest.mark.parametrize("error", [None, "torch is broken"])
def test_memory_of_a_probe_that_counts_otherwise_is_unknown(
    probed: int, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(DriverDevice(None, "npu", None, None, (i + 1) * GIB) for i in range(probed))
    output = torch_probe.TorchProbeResult(error, "npu", devices, tuple(i * GIB for i in range(probed)))
    monkeypatch.setattr(torch_probe, "run", lambda refresh: output)
    result = DiscoveryResult(2, None, "torch", (), environment={}, accelerator_type="npu")
    if error or probed != 2:
        with pytest.raises(Failed, match=error or "sees other devices"):
            memory_info._figures_of_probe(result, 1)
    else:
        assert memory_info._figures_of_probe(result, 1) == (GIB, 2 * GIB)


# What amdsmi returns by function, in its own units, and what each field is then, in this package's units.
AMDSMI = {
    "amdsmi_get_gpu_activity": {"gfx_activity": 12, "umc_activity": 34},
    "amdsmi_get_gpu_vram_usage": {"vram_total": 1024, "vram_used": 256},
    "amdsmi_get_power_info": {"average_socket_power": 150, "current_socket_power": 160},
    "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
    "amdsmi_get_gpu_fan_speed_max": 250,
    "amdsmi_get_gpu_fan_speed": 100,
    "amdsmi_get_clock_info": {"clk": 1700},
    "amdsmi_topo_get_numa_node_number": 1,
}
UNITS: list[tuple[str, dict[str, Any], Any]] = [
    ("utilization", {}, 12),
    ("memory_usage", {}, 34),
    ("memory", {}, (768 << 20, 1024 << 20, 256 << 20)),
    ("power_draw", {}, 150_000),
    ("power_draw", {"amdsmi_get_power_info": {"average_socket_power": "N/A", "current_socket_power": 160}}, 160_000),
    ("power_limit", {}, 750_000),
    ("power_limit", {"amdsmi_get_power_cap_info": {"power_cap": "N/A"}}, NotSupported),
    ("fan_speed", {}, 40),
    ("fan_speed", {"amdsmi_get_gpu_fan_speed_max": 0}, NotSupported),
    ("clock_rate", {}, 1700),
    ("clock_rate", {"amdsmi_get_clock_info": {"cur_clk": 1600}}, 1600),
    ("numa_node", {}, 1),
    ("numa_node", {"amdsmi_topo_get_numa_node_number": 0}, 0),
    ("numa_node", {"amdsmi_topo_get_numa_node_number": -1}, None),
    ("temperature", {}, 55),
    ("memory_temperature", {}, 66),
]


@pytest.mark.parametrize(("field", "changed", "expected"), UNITS)
def test_fields_of_amdsmi(field: str, changed: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**AMDSMI, **changed}
    functions = {name: lambda *_, value=value: value for name, value in values.items()}
    smi = SimpleNamespace(
        AmdSmiTemperatureType=SimpleNamespace(JUNCTION=55, VRAM=66),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiClkType=SimpleNamespace(GFX=0),
        amdsmi_get_temp_metric=lambda handle, sensor, metric: sensor,
        **functions,
    )
    monkeypatch.setattr(amdsmi, "_session", amdsmi._Session(smi))
    if expected is NotSupported:
        with pytest.raises(NotSupported):
            amdsmi.read("handle", field)
    else:
        assert amdsmi.read("handle", field) == expected


@pytest.mark.parametrize(
    ("value", "loads"), [(None, True), ("1", True), *((text, False) for text in ("0", "2", "", "true", "01"))]
)
@pytest.mark.parametrize("has_failed", [False, True])
def test_plugins_that_torch_loads(
    value: str | None, loads: bool, has_failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch loads them if the variable is "1" or not set. A failed plug-in may have set it, so then it does not count."""
    (tmp_path / "planet-1.dist-info").mkdir()
    (tmp_path / "planet-1.dist-info/entry_points.txt").write_text("[torch.backends]\nplanet = planet:load\n")
    monkeypatch.setattr(torch_build.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch_build.process, "has_torch_import_failed", lambda: has_failed)
    if value is None:
        monkeypatch.delenv(torch_probe.AUTOLOAD, raising=False)
    else:
        monkeypatch.setenv(torch_probe.AUTOLOAD, value)
    assert torch_build._plugins() == (["planet"] if loads or has_failed else [])
