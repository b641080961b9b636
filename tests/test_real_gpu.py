"""Tests on real GPUs: how the driver reads its variables, forks, NVML, MIG, the time of calls, and what simulated GPUs assume.

They are skipped without a real NVIDIA GPU. They print times and figures even without ``-s``. The tests of what simulated GPUs
assume also run on simulated ones, as slow tests: both must pass.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import accelerator as acc
from accelerator._machine import driver_probe, nvml, visibility
from accelerator._machine.discovery_result import Failed
from tests.ptx.driver import OLDEST_CUDA
from tests.ptx.test_opcodes import all_programs as every_program
from tests.queries.test_visibility import TABLE
from tests.simulation.faults.test_assertions import ASSERT, CALLS
from tests.simulation.faults.test_assertions import PRELUDE as ASSERTIONS
from tests.support import inherited_environment
from tests.support.discovery import CUDA, evaluate, evaluate_simulated, on_simulated_gpus


def _has_gpu() -> bool:
    if sys.platform != "linux" or CUDA is None or acc.simulation.is_simulated():
        return False
    try:
        return len(nvml.gpus()) > 0
    except Failed:
        return False


NEEDED = "needs a real NVIDIA GPU, outside simulation, and a CUDA build of torch"
Machine = Callable[..., Any]


@pytest.fixture(autouse=True)
def _real_gpu(request: pytest.FixtureRequest) -> None:
    if "machine" not in request.fixturenames and not _has_gpu():
        pytest.skip(NEEDED)


@pytest.fixture(params=["real", pytest.param("simulated", marks=[pytest.mark.slow, on_simulated_gpus])])
def machine(request: pytest.FixtureRequest) -> Machine:
    """A function that runs a program on the machine's GPUs, or on a simulated one, and returns the JSON that it prints."""
    if request.param == "simulated":
        return functools.partial(evaluate_simulated, capability="12.0")
    if not _has_gpu():
        pytest.skip(NEEDED)
    return run_on_this_machine


def run_on_this_machine(code: str, *arguments: str, **variables: str) -> Any:
    return evaluate(code, inherited_environment(**variables), *arguments)


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
    uuids = [gpu.uuid for gpu in nvml.gpus() if gpu.uuid]
    upper = uuids[0].upper()
    more = ["GPU-", uuids[0][:6], f" {uuids[0]}", f"{uuids[0]},0", f"0,{uuids[0]}", "0,0", "9,9"]
    more += [upper, upper[:12], f"{uuids[0]},{upper}", "GPU-" + uuids[0][4:].replace("-", ""), f"MIG-{uuids[0][4:]}"]
    more += [uuids[0].lower(), uuids[0][4:], uuids[0] + " ", uuids[0] + "0", "GPU-0x" + uuids[0][4:]]
    values = [real(text) for text, _ in TABLE if text is None or "\udcff" not in text] + more
    rows = run_on_this_machine(ROWS, json.dumps(values))
    wrong = [(value, theirs, ours) for value, (theirs, ours) in zip(values, rows, strict=True) if theirs != ours]
    with capsys.disabled():
        for value, theirs, ours in wrong:
            print(f"\nCUDA_VISIBLE_DEVICES={value!r}: the driver sees {theirs}, we say {ours}")
    assert not wrong, wrong


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
    assert visibility.needs_uuids(f"GPU-{uuids[0]}")


# ---- What simulated GPUs assume. ----


def _skip_old_driver() -> None:
    version = acc.driver_cuda_version()
    if _has_gpu() and version is not None and version < OLDEST_CUDA:
        pytest.skip(f"the driver is of CUDA {version[0]}.{version[1]}, which does not read this PTX")


INSTRUCTIONS = """
    from tests.ptx.driver import find_failures
    from tests.ptx.harness import KernelFailed
    part, step, found = int(sys.argv[1]), int(sys.argv[2]), []
    try:
        found += find_failures(part, step)
    except KernelFailed as failure:  # the context is broken
        found.append(f"nothing ran after the error {failure}")
    print(json.dumps(found))
"""


@pytest.mark.parametrize("part", range(8))
def test_instructions(part: int) -> None:
    """The driver compiles the PTX of the translator's tests, and the GPU computes what these expect."""
    _skip_old_driver()
    wrong = run_on_this_machine(INSTRUCTIONS, str(part), "8")
    assert not wrong, "\n".join(wrong)


def test_a_sample_of_instructions(machine: Machine) -> None:
    _skip_old_driver()
    wrong = machine(INSTRUCTIONS, "0", "60")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [program.name for program in every_program() if program.error])
def test_kernels_that_fail(name: str, machine: Machine) -> None:
    """A kernel's failure has the error that the simulation gives, and the next wait has it again."""
    _skip_old_driver()
    program = "from tests.ptx.driver import run_failing\nprint(json.dumps(run_failing(sys.argv[1])))"
    (expected,) = (each.error for each in every_program() if each.name == name)
    assert machine(program, name) == [expected, expected]


FAILED = r"\.(?:cuh?|h):.*: block: \[\d+,0,0\], thread: \[\d+,0,0\] Assertion `.*%s.*` failed\."


@pytest.mark.parametrize("op", CALLS)
def test_device_side_assertions(op: str, machine: Machine) -> None:
    """The call returns, the assertion is on stderr, and every later call raises the same error."""
    assertion, call = CALLS[op]
    program = """
        import subprocess
        done = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
        print(json.dumps([done.stdout.splitlines(), done.stderr]))
    """
    code = f"""{ASSERTIONS}
{call.replace("bad", "torch.zeros_like(bad)").replace("x + 1", "x").replace("!=", "==").replace("+ 90", "+ 1")}
print(error(lambda: {call}))
print(error(torch.cuda.synchronize))
print(error(lambda: torch.ones(3, device="cuda").cpu()), flush=True)
"""
    lines, errors = machine(program, code)
    assert lines[0] == "None", errors
    assert re.search(FAILED % re.escape(assertion), errors), errors
    assert [line.partition(": ")[2] for line in lines[1:]] == [ASSERT] * 2


STORE = """.version 6.3
.target sm_60
.address_size 64
.visible .entry main(.param .u64 at) {
    .reg .b64 %at; .reg .b32 %x;
    ld.param.u64 %at, [at]; mov.u32 %x, 1; st.global.u32 [%at], %x; ret;
}
"""


@pytest.mark.parametrize(
    ("offset", "text"),
    [(2**40, "an illegal memory access was encountered"), (1, "misaligned address")],
    ids=["outside", "misaligned"],
)
def test_texts_of_sticky_errors(offset: int, text: str, machine: Machine) -> None:
    """torch's error after a kernel that accesses wrong memory has CUDA's text, at each later call too."""
    program = """
        import numpy as np
        import torch
        from tests.ptx.driver import DriverKernel
        from tests.ptx.harness import KernelFailed
        x, texts = torch.zeros(64, device="cuda"), []
        try:
            DriverKernel([sys.argv[1]], "main").run(1, 1, np.uint64(x.data_ptr() + int(sys.argv[2])))
        except KernelFailed as failure:
            texts.append(failure.error)
        for call in (torch.cuda.synchronize, x.cpu, lambda: (x + 1).cpu()):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error).splitlines()[0])
        print(json.dumps(texts))
    """
    code, *texts = machine(program, STORE, str(offset))
    assert code == (716 if offset == 1 else 700)
    assert texts == [f"CUDA error: {text}"] * 3


def test_health_by_nvml(machine: Machine) -> None:
    """NVML has what the simulation tells faults by; a GPU may lack ECC, remapped rows and the recovery action."""
    program = """
        import pynvml as n
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        def code(function, *arguments):
            try:
                function(*arguments)
            except n.NVMLError as error:
                return error.value
            return 0
        events = n.nvmlEventSetCreate()
        types = n.nvmlDeviceGetSupportedEventTypes(handle)
        print(json.dumps({
            "xid": bool(types & n.nvmlEventTypeXidCriticalError),
            "register": code(n.nvmlDeviceRegisterEvents, handle, n.nvmlEventTypeXidCriticalError, events),
            "wait": code(n.nvmlEventSetWait_v2, events, 10),
            "ecc": code(n.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            "rows": code(n.nvmlDeviceGetRemappedRows, handle),
            "recovery": n.nvmlDeviceGetFieldValues(handle, [230])[0].nvmlReturn,
            "free": code(n.nvmlEventSetFree, events),
        }))
    """
    answers = machine(program)
    optional = {name: answers.pop(name) for name in ("ecc", "rows", "recovery")}
    assert answers == {"xid": True, "register": 0, "wait": 10, "free": 0}
    assert set(optional.values()) <= {0, 2, 3}, optional  # invalid argument: an older driver does not know field 230


@pytest.mark.parametrize("records", [True, False])
def test_record_stream(records: bool, machine: Machine) -> None:
    """The allocator gives memory to another tensor only after the streams that were recorded for it."""
    program = """
        import torch
        import accelerator as acc
        records, side = sys.argv[1] == "True", acc.Stream()
        tensor, doubled = torch.ones(2**20, device="cuda"), torch.empty(2**20, device="cuda")
        torch.mul(tensor, 2, out=doubled)  # the driver waits for the GPU when it loads a kernel
        torch.cuda._sleep(1)
        address = tensor.data_ptr()
        side.wait_stream(acc.current_stream())
        with acc.stream(side):
            torch.cuda._sleep(1_000_000_000)  # at least half a second
            torch.mul(tensor, 2, out=doubled)
        if records:
            acc.record_stream(tensor, side)
        del tensor
        again = torch.empty(2**20, device="cuda")
        same = again.data_ptr() == address
        del again
        acc.synchronize()
        again, another = torch.empty(2**20, device="cuda"), torch.empty(2**20, device="cuda")
        print(json.dumps([same, address in (again.data_ptr(), another.data_ptr())]))
    """
    assert machine(program, str(records)) == [not records, True]


def test_memory_pools(machine: Machine) -> None:
    program = """
        import torch
        import accelerator as acc
        pool = acc.create_mem_pool()
        with acc.use_mem_pool(pool):
            x = torch.ones(8, device="cuda")
        y = torch.ones(8, device="cuda")
        segments = torch.cuda.memory_snapshot()
        def pool_of(tensor):
            at = tensor.data_ptr()
            return [list(s["segment_pool_id"]) for s in segments if s["address"] <= at < s["address"] + s["total_size"]]
        pools = [pool_of(x) == [list(pool.id)], pool_of(y) == [[0, 0]]]
        print(json.dumps([*pools, acc.get_allocator_backend(), (x + y).tolist()]))
    """
    assert machine(program) == [True, True, "native", [2.0] * 8]
