"""Tests on real GPUs: how the driver reads its variables, forks, NVML, MIG, and the time of calls.

They are skipped without a real NVIDIA GPU. They print times and figures even without ``-s``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import accelerator as acc
from accelerator._machine import driver_probe, grammar, nvml
from accelerator._machine.discovery_result import Failed
from tests.queries.test_grammar import TABLE
from tests.support import plain_environment
from tests.support.discovery import CUDA, evaluate


def _has_gpu() -> bool:
    if sys.platform != "linux" or CUDA is None or acc.simulation.is_simulated():
        return False
    try:
        return len(nvml.gpus()) > 0
    except Failed:
        return False


pytestmark = pytest.mark.skipif(not _has_gpu(), reason="needs a real NVIDIA GPU, outside simulation, and a CUDA build of torch")


def run_on_this_machine(code: str, *arguments: str, **variables: str) -> Any:
    return evaluate(code, plain_environment(**variables), *arguments)


def real(text: str | None) -> str | None:
    """Return a value of the table with the UUIDs of this machine's GPUs in place of the placeholders."""
    for letter, gpu in zip("abcd", nvml.gpus(), strict=False):
        assert gpu.uuid
        short = gpu.uuid[:12]
        text = text and text.replace(f"GPU-{letter * 8}", short).replace(f"GPU-{letter}", short)
    return text


ROWS = """
    import accelerator as acc
    rows = []
    for value in json.loads(sys.argv[1]):
        put({"CUDA_VISIBLE_DEVICES": value})
        rows.append((driver(CUDA_VISIBLE_DEVICES=value), [plain(device.uuid) for device in acc.visible_devices()]))
    print(json.dumps(rows))
"""


def test_visible_devices_grammar_equals_the_drivers(capsys: pytest.CaptureFixture[str]) -> None:
    """The grammar agrees with the driver on every value of the table, also on those that NVIDIA does not document."""
    import json

    uuids = [gpu.uuid for gpu in nvml.gpus() if gpu.uuid]
    more = ["GPU-", "GPU-" + uuids[0][4:6], uuids[0].upper(), f" {uuids[0]}", f"{uuids[0]},0", f"0,{uuids[0]}", "0,0", "9,9"]
    values = [real(text) for text, _ in TABLE if text is None or "\udcff" not in text] + more
    rows = run_on_this_machine(ROWS, json.dumps(values))
    wrong = [(value, theirs, ours) for value, (theirs, ours) in zip(values, rows, strict=True) if theirs != ours]
    with capsys.disabled():
        for value, theirs, ours in wrong:
            print(f"\nCUDA_VISIBLE_DEVICES={value!r}: the driver sees {theirs}, we say {ours}")
    assert wrong == []


def test_device_order_equals_the_drivers() -> None:
    for order in ("FASTEST_FIRST", "PCI_BUS_ID"):
        program = """
            import accelerator as acc
            print(json.dumps([driver(), [plain(device.uuid) for device in acc.visible_devices()]]))
        """
        theirs, ours = run_on_this_machine(program, CUDA_DEVICE_ORDER=order)
        assert theirs == ours


def test_cuda_in_a_forked_child_after_nvml_in_the_parent() -> None:
    program = """
        import accelerator as acc
        count, before = acc.device_count(), acc.telemetry(0)
        import torch
        def child():
            tensor = torch.arange(4, device="cuda")
            return [acc.is_in_bad_fork(), acc.device_count(), (tensor * 2).sum().item(), acc.temperature(0)]
        results = in_child(child)
        print(json.dumps([count, results, acc.is_fork_safe(), acc.is_initialized()]))
    """
    count, (bad, in_child, total, degrees), safe, initialized = run_on_this_machine(program)
    assert (bad, in_child, total) == (False, count, 12)
    assert 0 < degrees < 120
    assert (safe, initialized) == (True, False)


def test_telemetry_in_a_forked_child(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
        import accelerator as acc
        import pynvml
        acc.temperature(0)
        def old_session():
            try:
                return pynvml.nvmlDeviceGetCount()
            except pynvml.NVMLError as error:
                return str(error)
        print(json.dumps([in_child(old_session), in_child(lambda: acc.telemetry(0)), acc.telemetry(0)]))
    """
    old, child, parent = run_on_this_machine(program)
    with capsys.disabled():
        print(f"\nNVML in a forked child without a new nvmlInit: {old}")
    assert len(child) == len(parent)
    assert child[2] is not None


def test_driver_initialization_is_detected() -> None:
    program = """
        import accelerator as acc
        from accelerator._machine import driver
        absent = driver.device_count()
        library = ctypes.CDLL("libcuda.so.1")
        loaded = [driver.device_count(), acc.is_fork_safe(), library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))]
        child_of_loaded = in_child(lambda: [library.cuInit(0), acc.is_in_bad_fork()])
        count = acc.device_count()
        assert library.cuInit(0) == 0
        initialized = [driver.device_count() == count, acc.is_fork_safe(), acc.device_count() == count]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        initialized.append(acc.device_count() == count)
        def bad_fork():
            return [library.cuInit(0), library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())), acc.is_in_bad_fork(),
                    acc.is_available()]
        print(json.dumps([absent, loaded, child_of_loaded, initialized, in_child(bad_fork)]))
    """
    absent, loaded, child_of_loaded, initialized, bad_fork = run_on_this_machine(program)
    assert absent is None
    assert loaded == [None, True, 3]
    assert child_of_loaded == [0, False]
    assert initialized == [True, False, True, True]
    assert bad_fork == [3, 3, True, False]


def test_devices_equal_torchs() -> None:
    program = """
        import accelerator as acc
        before = [(plain(d.uuid), d.name, d.compute_capability) for d in acc.visible_devices()]
        import torch
        torch.cuda.init()
        theirs = []
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            theirs.append((str(p.uuid).replace("-", ""), p.name, (p.major, p.minor)))
        after = [(plain(d.uuid), d.name, d.compute_capability) for d in acc.visible_devices()]
        print(json.dumps([before, theirs, after]))
    """
    before, theirs, after = run_on_this_machine(program)
    assert before == theirs == after


def test_memory_of_both_nvml_versions(capsys: pytest.CaptureFixture[str]) -> None:
    import pynvml

    gpu = nvml.gpus()[0]
    first = nvml.call("nvmlDeviceGetMemoryInfo", gpu.handle)
    second = nvml.call("nvmlDeviceGetMemoryInfo", gpu.handle, version=pynvml.nvmlMemory_v2)
    with capsys.disabled():
        print(f"\nmemory used: {first.used >> 20} MiB by version 1, {second.used >> 20} MiB and a reserve of "
              f"{second.reserved >> 20} MiB by version 2")  # fmt: skip
    assert first.total == second.total
    program = """
        import accelerator as acc
        before = acc.total_memory(0)
        import torch
        torch.cuda.init()
        print(json.dumps([before, acc.total_memory(0), torch.cuda.mem_get_info(0)[1]]))
    """
    before, after, theirs = run_on_this_machine(program)
    with capsys.disabled():
        print(f"total: {before >> 20} MiB before initialization, {after >> 20} MiB after it")
    assert after == theirs
    assert abs(before - after) < 2**27
    assert second.used <= first.used
    assert abs(acc.device_memory_used(0) - second.used) < 2**30 or gpu.instances is not None


def test_telemetry_is_plausible() -> None:
    telemetry = acc.telemetry(0)
    assert telemetry.utilization is None or 0 <= telemetry.utilization <= 100
    assert telemetry.temperature is None or 0 < telemetry.temperature < 120
    assert telemetry.power_draw is None or 1_000 < telemetry.power_draw < 2_000_000
    assert telemetry.clock_rate is None or 100 < telemetry.clock_rate < 5_000
    assert telemetry.device_memory_used is not None
    assert telemetry.power_limit is None or 1_000 < telemetry.power_limit < 2_000_000
    assert telemetry.memory_temperature is None or 0 < telemetry.memory_temperature < 130
    assert telemetry.fan_speed is None or 0 <= telemetry.fan_speed <= 200
    assert telemetry.throttled in (True, False, None)
    assert acc.telemetry(acc.physical_devices()[0])._fields == telemetry._fields


def test_numa_nodes_and_links_are_consistent() -> None:
    node = acc.numa_node(0)
    assert node is None or node >= 0
    assert acc.is_nvlink_connected(0, 0) is True
    for peer in range(acc.device_count()):
        assert acc.is_nvlink_connected(0, peer) == acc.is_nvlink_connected(peer, 0)
    assert acc.usable_devices() == acc.visible_devices()
    assert [device.visible_index for device in acc.physical_devices() if device.mig is None] or acc.visible_devices()[0].mig


def test_strict_availability() -> None:
    assert acc.is_available(strict=True), acc.unavailable_reason(strict=True)


def test_mig() -> None:
    gpus = nvml.gpus()
    if all(gpu.instances is None for gpu in gpus):
        pytest.skip("MIG is off on every GPU")
    values: list[str | None] = [None, "0"]
    for gpu in gpus:
        for instance in gpu.instances or ():
            values += [instance.uuid, instance.uuid[:12], f"MIG-{gpu.uuid}/{instance.gi}/{instance.ci}"]
    import json

    for value, (theirs, ours) in zip(values, run_on_this_machine(ROWS, json.dumps(values)), strict=True):
        assert theirs == ours, value


def test_call_durations(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
        import time
        begin = time.perf_counter()
        import accelerator as acc
        durations = [("import accelerator", time.perf_counter() - begin)]
        def timed(name, call, times=1):
            begin = time.perf_counter()
            for _ in range(times):
                call()
            durations.append((name, (time.perf_counter() - begin) / times))
        import pynvml
        timed("nvmlInit, first", pynvml.nvmlInit)
        timed("nvmlInit, second", pynvml.nvmlInit)
        for name, call in (("device_count", acc.device_count), ("is_available", acc.is_available),
                           ("visible_devices", acc.visible_devices), ("utilization", lambda: acc.utilization(0)),
                           ("device_memory_used", lambda: acc.device_memory_used(0)), ("telemetry", lambda: acc.telemetry(0))):
            timed(name + ", first", call)
            timed(name + ", later", call, 200)
        timed("is_available(strict=True), first", lambda: acc.is_available(strict=True))
        timed("is_available(strict=True), later", lambda: acc.is_available(strict=True), 200)
        print(json.dumps(durations))
    """
    durations = dict(run_on_this_machine(program))
    with capsys.disabled():
        print(*(f"\n{name:>36}: {seconds * 1e6:12.1f} us" for name, seconds in durations.items()), sep="")
    assert durations["device_count, later"] < 1e-4


def test_probe_lists_usable_devices(capsys: pytest.CaptureFixture[str]) -> None:
    def timed(call: Callable[[], driver_probe.ProbeResult]) -> driver_probe.ProbeResult:
        begin = time.perf_counter()
        result = call()
        with capsys.disabled():
            print(f"\nthe driver, probed in a child: {time.perf_counter() - begin:.2f} s")
        return result

    listed = timed(lambda: driver_probe.run({}))
    used = timed(lambda: driver_probe.run({}, use=True))
    assert listed.error is used.error is None
    assert listed.devices == used.devices
    assert used.unusable == (None,) * len(used.devices)
    assert listed.version == acc.driver_cuda_version()
    uuids = [device.uuid and device.uuid.partition("-")[2] for device in acc.visible_devices()]
    assert uuids == [device.uuid for device in listed.devices]
    assert grammar.needs_uuids(f"GPU-{uuids[0]}")
