"""Which errors of the usability probe make a device unusable: products of the error, its owner, and how devices are matched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerator._machine import driver_probe, usability
from accelerator._machine.discovery_result import DiscoveredDevice, DiscoveryResult, PhysicalGpu
from accelerator._machine.driver_child import DriverDevice

pytestmark = pytest.mark.torch_free

BUSY = ("cuDevicePrimaryCtxRetain returned CUDA_ERROR_OUT_OF_MEMORY (2)", "hipFree returned hipErrorOutOfMemory (2)",
        "cuDevicePrimaryCtxRetain returned CUDA_ERROR_DEVICE_UNAVAILABLE (46)")  # fmt: skip
BROKEN = ("cuDevicePrimaryCtxRetain returned CUDA_ERROR_ECC_UNCORRECTABLE (214)", "cuCtx returned CUDA_ERROR_UNKNOWN (999)")


def probed(errors: list[str | None], *, owned: set[int] = frozenset(), order: list[int] | None = None) -> DiscoveryResult:  # type: ignore[assignment]
    """A discovery result of which the probe reports these errors, by device; the driver lists the devices in an order."""
    count = len(errors)
    order = list(range(count)) if order is None else order
    driver = tuple(DriverDevice(f"uuid-{i}", f"GPU {i}", None, None, None) for i in order)
    result = driver_probe.ProbeResult(None, (13, 0), driver, tuple(errors[i] for i in order))
    backend: Any = SimpleNamespace(probe_usability=lambda result_, refresh: result, has_context=lambda index: index in owned)
    devices = tuple(DiscoveredDevice(PhysicalGpu(i, None, f"GPU-uuid-{i}", f"GPU {i}")) for i in range(count))
    return DiscoveryResult(count, None, "a test", devices, environment={}, accelerator_type="cuda", backend=backend)


@pytest.mark.parametrize("error", [None, *BUSY, *BROKEN])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_a_busy_device_of_this_process_is_usable_in_spite_of_its_error(
    error: str | None, owned: bool, position: int
) -> None:
    errors = [error if i == position else None for i in range(3)]
    for order in ([0, 1, 2], [2, 0, 1]):
        result = probed(errors, owned={position} if owned else {(position + 1) % 3}, order=order)
        is_usable = error is None or (owned and error in BUSY)
        assert usability.usable(result) == [is_usable if i == position else True for i in range(3)]
        problem = usability.problem(result)
        if is_usable:
            assert problem is None
        else:
            state = "is busy: full, or another process uses it exclusively" if error in BUSY else "is broken"
            assert problem == f"cuda:{position} (GPU {position}) {state}: {error}"
