"""NVML's session: locks after a fork, GPUs that fail temporarily, and a session that ends during or between calls."""

from __future__ import annotations

import pytest

from accelerator._machine import nvml
from tests.support.discovery import evaluate_simulated, on_simulated_gpus, simulated_driver

FORK = """
    import signal, threading
    import accelerator as acc
    import pynvml
    from accelerator._machine import nvml

    acc.device_count()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    lock = pynvml.libLoadLock if sys.argv[1] == "binding" else nvml._lock
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def query():
        signal.alarm(20)
        return acc.temperature(1)

    print(json.dumps(in_child(query)))
    done.set()
"""


@on_simulated_gpus
@simulated_driver
@pytest.mark.parametrize("lock", ["ours", "binding"])
def test_a_lock_held_at_a_fork_does_not_block_the_child(lock: str) -> None:
    assert evaluate_simulated(FORK, lock, gpus=2) == 31


RECOVERS = """
    import time
    import accelerator as acc
    from accelerator._machine import nvml
    import pynvml

    mig_mode, lost = pynvml.nvmlDeviceGetMigMode, [True]

    def failing(handle):
        if lost and pynvml.nvmlDeviceGetIndex(handle) == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return mig_mode(handle)

    pynvml.nvmlDeviceGetMigMode = failing
    now = [0.0]
    time.monotonic = lambda: now[0]
    problems = []
    for now[0] in (10.0, 10.9, 11.1, 30.0):
        problems.append([gpu.problem for gpu in nvml.gpus()])
        if now[0] == 10.0:
            lost.clear()
    print(json.dumps(problems))
"""


@simulated_driver
def test_failed_gpu_is_retried_after_one_second() -> None:
    at_once, within_the_second, after, later = evaluate_simulated(RECOVERS, gpus=2)
    assert at_once[0] is None
    assert "GPU_IS_LOST" in at_once[1]
    assert within_the_second == at_once
    assert after == later == [None, None]


CLEARED = """
    import accelerator as acc
    import pynvml

    utilization, left = pynvml.nvmlDeviceGetUtilizationRates, [int(sys.argv[1])]

    def interrupted(handle):
        if left[0]:
            left[0] -= 1
            acc.refresh()
        return utilization(handle)

    pynvml.nvmlDeviceGetUtilizationRates = interrupted
    print(json.dumps([acc.utilization(1), left[0]]))
"""


@on_simulated_gpus
@simulated_driver
@pytest.mark.parametrize("times", [1, 3])
def test_nvml_shutdown_during_a_call_is_repaired(times: int) -> None:
    assert evaluate_simulated(CLEARED, str(times), gpus=2) == [20, 0]


UNINITIALIZED = """
    import accelerator as acc
    import pynvml

    def failing(handle):
        calls.append(handle)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    calls, pynvml.nvmlDeviceGetUtilizationRates = [], failing
    try:
        acc.utilization(1)
    except RuntimeError as error:
        print(json.dumps([str(error), len(calls)]))
"""


@on_simulated_gpus
@simulated_driver
def test_nvml_is_initialized_again_once_per_call() -> None:
    message, calls = evaluate_simulated(UNINITIALIZED, gpus=2)
    assert message.endswith("NVML_ERROR_UNINITIALIZED, 1")
    assert calls == 2


ENDED = """
    import accelerator as acc
    import pynvml
    from accelerator._machine import nvml

    fetched, by_uuid = [], pynvml.nvmlDeviceGetHandleByUUID

    def fetch(uuid):
        fetched.append(uuid)
        return by_uuid(uuid)

    def read():
        fetched.clear()
        acc.temperature(1)
        return len(fetched)

    pynvml.nvmlDeviceGetHandleByUUID = fetch
    read()
    before = read()
    {"shutdown": pynvml.nvmlShutdown, "clear": nvml.clear}[sys.argv[1]]()
    print(json.dumps([before, read(), read()]))
"""


@on_simulated_gpus
@simulated_driver
@pytest.mark.parametrize("end", ["shutdown", "clear"])
def test_a_new_session_fetches_its_own_handles_once(end: str) -> None:
    assert evaluate_simulated(ENDED, end, gpus=2) == [0, 1, 0]


@pytest.mark.parametrize("bus", ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", "00000000:3b:00.0"])
def test_bus_ids_are_normalized(bus: str) -> None:
    padded = bus if bus.count(":") == 2 else f"0000:{bus}"
    assert nvml.plain_bus(padded) == "00000000:3B:00.0"
