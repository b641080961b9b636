"""What NVML says of a known model, as recorded on an H100 80GB HBM3 with driver 580.159.04, and what it does not invent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.simulation import evaluate, linux_only

pytestmark = [linux_only, pytest.mark.torch_free]

H100 = "NVIDIA H100 80GB HBM3"
VALUES = """
import inspect
h = n.nvmlDeviceGetHandleByIndex(0)
def read(name, *arguments):
    try:
        value = getattr(n, "nvmlDeviceGet" + name)(h, *arguments)
    except n.NVMLError as error:
        return f"error {error.value}"
    return [getattr(value, field[0]) for field in value._fields_] if hasattr(value, "_fields_") else value
"""

# The call and its arguments: the value, or NVML's error.
OF_AN_H100 = {
    ("Brand",): 14,
    ("FanSpeed",): "error 3",
    ("FanSpeed_v2", 0): "error 2",
    ("NumFans",): 0,
    ("MinMaxFanSpeed",): "error 2",
    ("FanSpeedRPM",): "error 2",
    ("MaxClockInfo", 0): 1980,
    ("MaxClockInfo", 1): 1980,
    ("MaxClockInfo", 2): 2619,
    ("MaxClockInfo", 3): 1545,
    ("ApplicationsClock", 0): 1980,
    ("ApplicationsClock", 2): 2619,
    ("DefaultApplicationsClock", 1): 1980,
    ("MaxCustomerBoostClock", 0): 1980,
    ("PowerManagementDefaultLimit",): 700000,
    ("PowerManagementLimitConstraints",): [200000, 700000],
    ("TemperatureThreshold", 0): 95,
    ("TemperatureThreshold", 1): 89,
    ("MarginTemperature",): 87 - 30,
    ("MaxPcieLinkGeneration",): 5,
    ("GpuMaxPcieLinkGeneration",): 5,
    ("CurrPcieLinkGeneration",): 5,
    ("MaxPcieLinkWidth",): 16,
    ("CurrPcieLinkWidth",): 16,
    ("PcieLinkMaxSpeed",): 5,
    ("PcieSpeed",): 32000,
    ("NumGpuCores",): 16896,
    ("MemoryBusWidth",): 5120,
    ("RowRemapperHistogram",): [2560, 0, 0, 0, 0],
}
# These do not depend on the model. A GPU is idle.
OF_ALL = {
    ("PowerManagementMode",): 1,
    ("PowerSource",): 0,
    ("PowerState",): 0,
    ("DisplayActive",): 0,
    ("DisplayMode",): 1,
    ("BusType",): 2,
    ("MultiGpuBoard",): 0,
    ("BoardId",): 0x100,
    ("VirtualizationMode",): 0,
    ("PcieReplayCounter",): 0,
    ("PcieThroughput", 0): 0,
    ("PcieThroughput", 1): 0,
    ("EncoderUtilization",): [0, 100000],
    ("DecoderUtilization",): [0, 100000],
    ("JpgUtilization",): [0, 100000],
    ("OfaUtilization",): [0, 100000],
    ("EncoderStats",): [0, 0, 0],
    ("EncoderSessions",): [],
    ("FBCStats",): [0, 0, 0],
    ("FBCSessions",): [],
    ("AccountingMode",): 0,
    ("AccountingBufferSize",): 4000,
    ("AccountingPids",): [],
    ("DetailedEccErrors", 0, 0): [0, 0, 0, 0],
    ("DetailedEccErrors", 1, 1): [0, 0, 0, 0],
    ("Clock", 1, 0): 1000,
    ("GpuInstanceId",): "error 2",
    ("ComputeInstanceId",): "error 2",
    # Not supported on the H100 either.
    ("RetiredPages", 0): "error 3",
    ("RetiredPagesPendingStatus",): "error 3",
    ("AutoBoostedClocksEnabled",): "error 3",
    ("NvLinkState", 0): "error 3",
    # Not known.
    ("Serial",): "error 3",
    ("VbiosVersion",): "error 3",
}


def values(calls: Mapping[Any, object], **machine: Any) -> dict[Any, object]:
    found = evaluate(f"{VALUES}\nreport([read(*call) for call in {list(calls)!r}])", **machine)
    return dict(zip(calls, found, strict=True))


def test_an_h100() -> None:
    assert values(OF_AN_H100, name=H100) == OF_AN_H100
    assert values(OF_ALL, name=H100) == OF_ALL


def test_an_unknown_model() -> None:
    assert values(OF_ALL) == OF_ALL
    invented: dict[tuple[object, ...], object] = {
        ("FanSpeed",): 25,
        ("NumFans",): 1,
        **{("MaxClockInfo", clock): rate for clock, rate in enumerate((1500, 1500, 3100, 1400))},
        ("PowerManagementDefaultLimit",): 700000,
        ("PowerManagementLimitConstraints",): [200000, 700000],
    }
    expected = {call: invented.get(call, "error 3") for call in OF_AN_H100 if call != ("FanSpeed_v2", 0)}
    assert values(expected) == expected


def test_limits_of_a_model_with_another_power() -> None:
    expected = {
        ("PowerManagementLimit",): 72000,
        ("EnforcedPowerLimit",): 72000,
        ("PowerManagementDefaultLimit",): 72000,
        ("PowerManagementLimitConstraints",): "error 3",
        ("MaxPcieLinkGeneration",): 4,
        ("NumFans",): 0,
    }
    assert values(expected, name="NVIDIA L4") == expected
    assert values({("NumFans",): 1}, name="NVIDIA GeForce RTX 4090") == {("NumFans",): 1}


def test_ids_and_the_window_of_an_h100() -> None:
    program = f"{VALUES}\ninfo = n.nvmlDeviceGetPciInfo(h)\nbar1 = n.nvmlDeviceGetBAR1MemoryInfo(h)\n"
    program += "report([info.pciDeviceId, info.pciSubSystemId, bar1.bar1Total, bar1.bar1Free + bar1.bar1Used])"
    assert evaluate(program, name=H100) == [0x233010DE, 0x16C110DE, 2**37, 2**37]


def test_energy_grows() -> None:
    program = """
        import time
        h = n.nvmlDeviceGetHandleByIndex(0)
        start = time.monotonic(), n.nvmlDeviceGetTotalEnergyConsumption(h)
        time.sleep(0.3)
        end = time.monotonic(), n.nvmlDeviceGetTotalEnergyConsumption(h)
        fields = n.nvmlDeviceGetFieldValues(h, [83, 191])
        report([(end[1] - start[1]) / (end[0] - start[0]) / n.nvmlDeviceGetPowerUsage(h),
                [field.valueType for field in fields], fields[0].value.ullVal >= end[1]])
    """
    ratio, types, grows = evaluate(program)
    assert (types, grows) == ([3, 3], True)
    assert 0.9 < ratio < 1.1


def test_types_of_fields() -> None:
    """Of an H100: [result, type, value]."""
    expected = {
        1: [0, 3, 1],
        2: [0, 3, 1],
        3: [0, 3, 0],
        91: [3, 1, 0],
        94: [0, 1, 0],
        95: [0, 1, 0],
        142: [0, 3, 0],
        143: [0, 3, 0],
        144: [0, 3, 0],
        145: [0, 3, 0],
        186: [0, 1, 60000],
        187: [0, 1, 200000],
        188: [0, 1, 700000],
        189: [0, 1, 700000],
        190: [0, 1, 700000],
        192: [0, 1, 700000],
        193: [0, 5, 2**32 - 8],
        194: [0, 5, 2**32 - 2],
        195: [0, 5, 0],
        196: [0, 5, 0],
        230: [0, 1, 0],
    }
    program = f"""
        h = n.nvmlDeviceGetHandleByIndex(0)
        report([[v.nvmlReturn, v.valueType, v.value.ullVal] for v in n.nvmlDeviceGetFieldValues(h, {list(expected)})])
    """
    assert dict(zip(expected, evaluate(program, name=H100), strict=True)) == expected
