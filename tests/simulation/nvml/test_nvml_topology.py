"""The simulated NVML reports links between GPUs and the host's NUMA nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.simulation import evaluate, linux_only

pytestmark = linux_only

P2P = """
    report([[n.nvmlDeviceGetP2PStatus(a, b, {capability}) for b in handles()] for a in handles()])
"""


def p2p(capability: str, gpus: int, **machine: Any) -> Any:
    """Return NVML's peer-to-peer status of each pair of GPUs."""
    return evaluate(P2P.format(capability=f"n.NVML_P2P_CAPS_INDEX_{capability}"), gpus, **machine)


@pytest.mark.parametrize(
    ("nvlink", "linked"),
    [
        (False, []),
        (True, [(0, 1), (0, 2), (1, 2)]),
        ([0, 1, 0], [(0, 2)]),
        ([None, 5], [(1, 2)]),
        ([None, 5, None], []),
    ],
)
def test_nvlink_connects_the_configured_pairs(nvlink: Any, linked: list[tuple[int, int]]) -> None:
    possible = [[0 if (min(a, b), max(a, b)) in linked else 5 for b in range(3)] for a in range(3)]
    assert p2p("NVLINK", 3, nvlink=nvlink) == possible


def test_pci_peer_access_between_all_gpus() -> None:
    assert p2p("PCI", 2) == [[0, 0], [0, 0]]
    # READ is not tested: the binding's constant for it is a tuple by mistake.
    assert p2p("WRITE", 2) == [[0, 0], [0, 0]]


def test_links_connect_the_gpus_of_a_group() -> None:
    program = """
        ends = []
        for gpu in handles():
            states = [(code(n.nvmlDeviceGetNvLinkState, gpu, link) or n.nvmlDeviceGetNvLinkState(gpu, link))
                      for link in range(19)]
            used = [link for link in range(18) if states[link] == 1]
            pci = [n.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link) for link in used]
            ends.append([states[:4], states[18], [n.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) for link in used],
                         [n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(info.busId)) for info in pci],
                         [n.nvmlDeviceGetNvLinkCapability(gpu, link, n.NVML_NVLINK_CAP_P2P_SUPPORTED) for link in used],
                         n.nvmlDeviceGetFieldValues(gpu, [n.NVML_FI_DEV_NVLINK_LINK_COUNT])[0].value.uiVal])
        report(ends)
    """
    assert evaluate(program, 4, nvlink=[7, 7, None, 7]) == [
        [[1, 1, 0, 0], 3, [0, 0], [1, 3], [1, 1], 2],
        [[1, 1, 0, 0], 3, [0, 0], [0, 3], [1, 1], 2],
        [[3, 3, 3, 3], 3, [], [], [], 0],
        [[1, 1, 0, 0], 3, [0, 0], [0, 1], [1, 1], 2],
    ]


def test_invalid_links_are_an_error() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        report([code(n.nvmlDeviceGetNvLinkState, gpu, 36), code(n.nvmlDeviceGetNvLinkRemotePciInfo, gpu, 36),
                code(n.nvmlDeviceGetNvLinkRemotePciInfo, gpu, 1), code(n.nvmlDeviceGetNvLinkCapability, gpu, 0, 6),
                code(n.nvmlDeviceGetP2PStatus, gpu, gpu, 5), code(n.nvmlDeviceGetP2PStatus, gpu, None, 2)])
    """
    assert evaluate(program, 2, nvlink=True) == [2, 2, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("numa", "nodes"), [(0, [1, 1, 1]), (None, [None] * 3), ([1, 0], [2, 1, 1]), ([(0, 1), 63, None], [3, 2**63, None])]
)
def test_memory_affinity(numa: Any, nodes: list[int | None]) -> None:
    program = """
        values = []
        for gpu in handles():
            failure = code(n.nvmlDeviceGetMemoryAffinity, gpu, 1, n.NVML_AFFINITY_SCOPE_NODE)
            assert failure in (0, 3)
            values.append(None if failure else n.nvmlDeviceGetMemoryAffinity(gpu, 1, n.NVML_AFFINITY_SCOPE_NODE)[0])
        report(values)
    """
    assert evaluate(program, 3, numa=numa) == nodes


@pytest.mark.parametrize("numa", [0, 63])
def test_cpu_affinity_can_be_set(numa: int) -> None:
    program = """
        words = n.nvmlDeviceGetCpuAffinity(n.nvmlDeviceGetHandleByIndex(0), 16)
        cpus = [64 * word + bit for word in range(16) for bit in range(64) if words[word] >> bit & 1]
        os.sched_setaffinity(0, cpus)
        report(cpus)
    """
    cpus = evaluate(program, numa=numa)
    assert set(os.sched_getaffinity(0)) <= set(cpus)
    assert len(cpus) <= (os.cpu_count() or 1) or numa == 0


def test_cpu_affinity_of_an_unknown_node() -> None:
    program = "report([code(n.nvmlDeviceGetCpuAffinity, handles()[0], 1), code(n.nvmlDeviceGetCpuAffinity, handles()[0], 0)])"
    assert evaluate(program, numa=None) == [3, 2]


def test_topology() -> None:
    program = """
        gpus = handles()
        report([[n.nvmlDeviceGetTopologyCommonAncestor(gpus[0], other) for other in gpus],
                [[n.nvmlDeviceGetIndex(h) for h in n.nvmlDeviceGetTopologyNearestGpus(gpus[0], level)]
                 for level in (n.NVML_TOPOLOGY_NODE, n.NVML_TOPOLOGY_SYSTEM, n.NVML_TOPOLOGY_SINGLE,
                               n.NVML_TOPOLOGY_INTERNAL)]])
    """
    assert evaluate(program, 4, numa=[0, 0, 1]) == [[0, 40, 50, 50], [[1], [2, 3], [], []]]


def test_driver_reports_the_numa_node() -> None:
    program = """
        cuda, value, values = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), []
        assert cuda.cuInit(0) == 0
        for device in range(3):
            assert cuda.cuDeviceGetAttribute(ctypes.byref(value), 134, device) == 0
            values.append(value.value)
        report(values)
    """
    assert evaluate(program, 3, numa=[2, (0, 1), None]) == [2, -1, -1]
