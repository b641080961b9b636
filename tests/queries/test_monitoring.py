"""Telemetry is that of the right device before and after initialization, and a field that fails does not affect others."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.discovery import evaluate_simulated, initializations, on_simulated_gpus

pytestmark = on_simulated_gpus

GIB, MIB = 2**30, 2**20

FUNCTIONS = textwrap.dedent("""
    import accelerator as acc
    NAMES = ["utilization", "memory_usage", "device_memory_used", "temperature", "power_draw", "clock_rate"]

    def outcome(call):
        try:
            return call()
        except Exception as error:
            kind = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
            return f"{kind}: {error}"

    def query(device):
        return [outcome(lambda: getattr(acc, name)(device)) for name in NAMES]

    def telemetry(device):
        output = acc.telemetry(device)._asdict()
        return [output[name] for name in NAMES]
    """)


def figures(gpu: int) -> list[int]:
    """Return the figures of a simulated GPU whose memory nothing uses, by the documented formulas."""
    return [(7 * gpu + 13) % 101, (5 * gpu + 7) % 101, 0, 30 + gpu % 50, 60000 + 1000 * gpu, 1000 + 15 * gpu]


def monitored(program: str, *arguments: str, **machine: Any) -> Any:
    return evaluate_simulated(FUNCTIONS + textwrap.dedent(program), *arguments, **machine)


EVERY_DEVICE = """
    def every():
        return [[query(i), query(f"cuda:{i}"), telemetry(i)] for i in range(acc.device_count())]

    before, none = every(), query(None)
    quiet = "torch" not in sys.modules
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,1"
    moved = every()
    del os.environ["CUDA_VISIBLE_DEVICES"]
    events = open(sys.argv[1]).read()

    import torch
    def theirs(i):
        return [outcome(lambda: getattr(torch.cuda, name)(i)) for name in NAMES if hasattr(torch.cuda, name)]
    compared = [name for name in NAMES if hasattr(torch.cuda, name) and name != "device_memory_used"]
    torch.cuda.init()
    torch.cuda.set_device(2)
    held = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda:2")
    after, current = every(), query(None)
    equal = [[getattr(acc, name)(i) == getattr(torch.cuda, name)(i) for name in compared] for i in range(4)]
    texts = [[acc.list_gpu_processes(i), torch.cuda.list_gpu_processes(i)] for i in (0, 2)]
    used = acc.processes(2)
    device = acc.utilization(torch.device("cuda", 3)), acc.utilization(torch.device("cuda"))
    print(json.dumps([before, none, quiet, moved, events, after, current, equal, texts, used, device, os.getpid(),
                      len(compared)]))
"""


@pytest.mark.parametrize("order", ["after torch", pytest.param("before torch", marks=pytest.mark.slow)])
def test_every_field_before_and_after_initialization(order: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    begin = "import torch\n" if order == "after torch" else ""
    results = evaluate_simulated(begin + FUNCTIONS + textwrap.dedent(EVERY_DEVICE), str(log), gpus=4, log=log)
    before, none, quiet, moved, events, after, current, equal, texts, used, device, pid, compared = results
    assert before == [[figures(i)] * 3 for i in range(4)]
    assert none == figures(0)
    assert moved == [[figures(i)] * 3 for i in (3, 1)]
    assert quiet == (order == "before torch")
    assert not [line for line in events.splitlines() if line.startswith(f"{pid} ") and "nvml" not in line]
    assert compared == 5
    assert equal == [[True] * 5] * 4
    # Device 2 now has a context and 64 MiB. The other devices have not changed.
    assert [row[0] for i, row in enumerate(after) if i != 2] == [figures(i) for i in (0, 1, 3)]
    assert after[2][0][2] >= 64 * MIB
    assert current == after[2][0] == after[2][2]
    for ours, theirs in texts:
        assert ours == theirs
    assert [(process[0], process[2]) for process in used] == [(pid, after[2][0][2])]
    assert "python" in used[0][1]
    assert device == [figures(3)[0], figures(2)[0]]


def test_failing_field_does_not_affect_other_fields() -> None:
    """The error names NVML's code. Other fields, other devices and telemetry() still work."""
    functions = {
        "nvmlDeviceGetUtilizationRates": [0, 1],
        "nvmlDeviceGetTemperature*": [3],
        "nvmlDeviceGetPowerUsage": [4],
        "nvmlDeviceGetClockInfo": [5],
    }
    errors = {f"{name}@{gpu}": code for gpu, (name, code) in enumerate(zip(functions, (3, 999, 15, 13), strict=True))}
    program = """
        print(json.dumps([[query(i), telemetry(i), acc.is_available()] for i in range(4)]))
    """
    names = ["NVML_ERROR_NOT_SUPPORTED, 3", "NVML_ERROR_UNKNOWN, 999)", "NVML_ERROR_GPU_IS_LOST, 15"]
    names.append("NVML_ERROR_FUNCTION_NOT_FOUND, 13")
    for gpu, (single, together, available) in enumerate(monitored(program, gpus=4, errors=errors)):
        lacking = list(functions.values())[gpu]
        assert available
        assert together == [None if i in lacking else value for i, value in enumerate(figures(gpu))]
        for i, value in enumerate(figures(gpu)):
            if i in lacking:
                assert single[i].startswith(
                    "RuntimeError: Device 0, Simulated GPU, does not report its " if gpu == 0 else "RuntimeError: The "
                )
                assert single[i].endswith(names[gpu])
            else:
                assert single[i] == value


MEMORY = """
    import pynvml
    library = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    def allocate():
        assert library.cuInit(0) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert library.cuCtxSetCurrent(context) == 0
        assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(256 * 2**20)) == 0
    first, total = outcome(acc.device_memory_used), acc.visible_devices()[0].total_memory
    allocate()
    second = outcome(acc.device_memory_used)
    from accelerator._machine import host_memory
    host = host_memory.total() - host_memory.available()
    print(json.dumps([first, second, host, acc.telemetry().device_memory_used, total,
                      host_memory.total(), outcome(acc.processes), acc.telemetry().processes]))
"""


def test_memory_of_both_nvml_versions() -> None:
    first, second, *_ = monitored(MEMORY)
    assert first == 0
    assert 256 * MIB <= second < 1024 * MIB
    # If the driver lacks the second version (13) or refuses its structure (25), the first version includes reserved memory.
    reserve = (15360 - 15102) * MIB
    for code in (13, 25):
        older, then, *_ = monitored(MEMORY, name="T4", errors={"nvmlDeviceGetMemoryInfo_v2": code})
        assert older == reserve
        assert then == second + reserve
    failed, *_, together, _, _, _, _ = monitored(MEMORY, errors={"nvmlDeviceGetMemoryInfo*": 15})
    cannot = "RuntimeError: The memory of device 0, Simulated GPU, cannot be read: NVML's nvmlDeviceGetMemoryInfo returned"
    assert failed == f"{cannot} NVML_ERROR_GPU_IS_LOST, 15"
    assert together is None


def test_memory_usage_of_integrated_device_is_the_hosts() -> None:
    """If no version of the function supports the device, the figures are the host's."""
    for errors in ({"nvmlDeviceGetMemoryInfo*": 3}, {"nvmlDeviceGetMemoryInfo_v2": 13, "nvmlDeviceGetMemoryInfo": 3}):
        first, second, host, together, total, host_total, *_ = monitored(MEMORY, errors=errors)
        for used in (first, second, together):
            assert abs(used - host) < GIB
        assert total == host_total


ZEROS = """
    import pynvml
    class Zeros:
        total = free = used = reserved = 0
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle, version=None: Zeros
    from accelerator._machine import host_memory
    print(json.dumps([acc.device_memory_used(), host_memory.total() - host_memory.available(),
                      acc.visible_devices()[0].total_memory, host_memory.total()]))
"""


def test_zero_memory_from_nvml_means_host_memory() -> None:
    used, host, total, host_total = monitored(ZEROS)
    assert abs(used - host) < GIB
    assert total == host_total


def test_processes_with_older_nvml_functions() -> None:
    *_, processes, together = monitored(MEMORY, errors={"nvmlDeviceGetComputeRunningProcesses_v3": 13})
    assert len(processes) == 1
    assert processes[0][2] >= 256 * MIB
    assert processes == together
    *_, processes, together = monitored(MEMORY, errors={"nvmlDeviceGetComputeRunningProcesses*": 3})
    assert processes.startswith("RuntimeError: Device 0, Simulated GPU, does not report its processes: NVML's ")
    assert processes.endswith("returned NVML_ERROR_NOT_SUPPORTED, 3")
    assert together is None
    *_, processes, together = monitored(MEMORY, errors={"nvmlSystemGetProcessName": 6})
    assert processes[0][1] is None


def test_processes_lists_other_processes(tmp_path: Path) -> None:
    program = """
        def child():
            library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
            return [os.getpid(), acc.processes(1)]
        print(json.dumps([acc.processes(1), in_child(child), acc.list_gpu_processes(1)]))
        assert acc.list_gpu_processes(1) == acc.list_gpu_processes(acc.visible_devices()[1])
    """
    nobody, (pid, actual), text = monitored(program, gpus=2, state=tmp_path / "state")
    assert nobody == []
    assert [process[0] for process in actual] == [pid]
    assert text == "GPU:1\nno processes are running"


def test_mig_instances() -> None:
    program = """
        program = [query(0), telemetry(0), acc.get_device_name(0), acc.visible_devices()[0]]
        library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        print(json.dumps([*program, query(0)[2:3], acc.processes(0), os.getpid()]))
    """
    single, together, name, device, memory, processes, pid = monitored(
        program, gpus=2, mig=[None, 3], variables={"CUDA_VISIBLE_DEVICES": "1"}
    )
    fields = ("utilization", "memory usage", "temperature", "power draw", "clock rate")
    for message, what in zip((value for i, value in enumerate(single) if i != 2), fields, strict=True):
        assert message.startswith(f"RuntimeError: Device 0, Simulated GPU, does not report its {what}: NVML's ")
        assert message.endswith(" returned NVML_ERROR_NOT_SUPPORTED, 3")
    assert together == [None, None, 0, None, None, None]
    assert name == "Simulated GPU MIG 1g"
    assert device[1].startswith("MIG-")
    assert device[5:] == [GIB, 1, [1, 0]]
    assert memory[0] >= 0
    assert [process[0] for process in processes] == [pid]


def test_telemetry_of_physical_and_visible_devices() -> None:
    """physical_devices() lists each GPU and then its MIG instances. Hidden devices can be monitored too."""
    program = """
        listed, observed = acc.physical_devices(), acc.visible_devices()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        hidden = [[device.visible_index for device in acc.physical_devices()], acc.unavailable_reason() is None]
        os.environ["ACCELERATOR_BACKEND"] = "cpu"
        hidden.append(len(acc.physical_devices()))
        figures = [[telemetry(device), outcome(lambda: acc.temperature(device))] for device in (*listed, *observed)]
        try:
            acc.temperature(listed[0]._replace(uuid="GPU-another"))
        except RuntimeError as error:
            hidden.append(str(error))
        print(json.dumps([listed, observed, hidden, figures]))
    """
    variables = {"CUDA_VISIBLE_DEVICES": "2,0"}
    listed, observed, hidden, read = monitored(program, gpus=3, mig=[None, 2, None], variables=variables)
    assert [(entry[0], entry[6], entry[7]) for entry in listed] == [
        (0, None, 1),
        (1, None, None),
        (1, [1, 0], None),
        (1, [2, 0], None),
        (2, None, 0),
    ]
    assert [entry[1][:4] for entry in listed] == ["GPU-", "GPU-", "MIG-", "MIG-", "GPU-"]
    assert [entry[5] for entry in listed] == [8 * GIB, 8 * GIB, GIB, GIB, 8 * GIB]
    assert [entry[6] for entry in observed] == [2, 0]
    assert hidden[:3] == [[None] * 5, False, 5]
    assert hidden[3] == "Simulated GPU (GPU-another) cannot be read: NVML does not list it"
    for (output, celsius), gpu in zip(read, (0, 1, None, None, 2, 2, 0), strict=True):
        if gpu is None:
            assert output == [None, None, 0, None, None, None]
            assert celsius.startswith("RuntimeError: GPU 1, instance (")
        else:  # NVML reports no utilization of a whole GPU with MIG on
            assert (output, celsius) == ([None, None, *figures(1)[2:]] if gpu == 1 else figures(gpu), figures(gpu)[3])


def test_monitoring_rejects_wrong_or_missing_devices() -> None:
    program = """
        given = [2, -1, "cuda:7", "cpu", "xpu:0", True, 1.5, b"cuda", "nonsense"]
        wrong = [[outcome(lambda: getattr(acc, name)(device)).split(":")[0] for device in given]
                 for name in (*NAMES, "processes", "telemetry", "list_gpu_processes")]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        none = [outcome(lambda: getattr(acc, name)()) for name in (*NAMES, "processes", "telemetry", "list_gpu_processes")]
        print(json.dumps([wrong, none, outcome(lambda: acc.utilization(5)).split(":")[0], "torch" in sys.modules]))
    """
    wrong, none, beyond, torch = monitored(program, gpus=2)
    assert wrong == [["ValueError"] * 5 + ["TypeError"] * 3 + ["RuntimeError"]] * 9
    assert len(set(none)) == 1
    assert none[0].startswith("RuntimeError: There is no device to read from: CUDA_VISIBLE_DEVICES is set to an empty string")
    assert beyond == "RuntimeError"  # every index is valid for the CPU, which has no telemetry
    assert not torch


def test_nvml_is_restarted_after_a_foreign_shutdown() -> None:
    """After one nvmlShutdown too many by another library, the package initializes NVML again."""
    program = """
        import pynvml
        before = telemetry(1)
        pynvml.nvmlShutdown()
        single = acc.temperature(1)
        pynvml.nvmlShutdown()
        print(json.dumps([before, single, telemetry(1), acc.visible_devices()[1].name, acc.device_count()]))
    """
    before, single, after, name, count = monitored(program, gpus=2)
    assert before == after == figures(1)
    assert (single, name, count) == (31, "Simulated GPU", 2)


def test_telemetry_after_a_fork(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        parent = [telemetry(0), telemetry(1)]
        def child():
            first = [telemetry(0), telemetry(1)]
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"
            return [first, telemetry(0), os.getpid()]
        print(json.dumps([parent, in_child(child), [telemetry(0), telemetry(1)]]))
    """
    parent, (first, second, pid), again = monitored(program, gpus=2, log=log)
    assert parent == first == again == [figures(0), figures(1)]
    assert second == figures(1)
    assert initializations(log, pid) == []
