"""Queries never break fork. If other code broke it, runtime functions raise an error that names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.discovery import evaluate_simulated, initializations, on_simulated_gpus

pytestmark = on_simulated_gpus

QUERIES = """
    import warnings
    import accelerator as acc

    def query_everything():
        acc.is_available(), acc.device_count(), acc.unavailable_reason(), acc.visible_devices(), acc.get_device_name(0)
        acc.is_available(strict=True), acc.is_initialized(), acc.is_in_bad_fork(), acc.is_fork_safe(), acc.refresh()
        acc.driver_version(), acc.driver_cuda_version(), acc.telemetry(1), acc.utilization(0), acc.device_memory_used(0)
        acc.list_gpu_processes(1), acc.communication_backend_name(), acc.communication_backend_version(), acc.export_envs()
        acc.set_visible_devices_envs({}, [0]), acc.is_available()
        from accelerator._command import report, report_text
        report_text.format_report(report.collect())

    def outcome(call):
        try:
            value = call()
            return value if isinstance(value, (str, int, float, list, type(None))) else type(value).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"
"""

DATA_LOADER = (
    "    import torch\n"
    + QUERIES
    + """
    from torch.utils.data import DataLoader, Dataset

    class OnDevice(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            # Uses the device, then copies to the host: a forked worker cannot send tensors of a device.
            return (torch.arange(4).to(f"cuda:{index % 2}").cpu() + index).sum().item()

    def load():
        batches = iter(DataLoader(OnDevice(), num_workers=2, collate_fn=list, multiprocessing_context="fork", timeout=60))
        try:
            return sum(item for batch in batches for item in batch)
        finally:
            batches._shutdown_workers()  # after an error in one worker, the others would outlive this process

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        query_everything()
    events = open(sys.argv[1]).read() if os.path.exists(sys.argv[1]) else ""
    ours = outcome(load)

    def through_torch():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.is_available()
        return outcome(load)

    def loaded_only():
        ctypes.CDLL("libcuda.so.1")
        safe = acc.is_fork_safe()
        return [safe, in_child(lambda: [acc.is_in_bad_fork(), torch.ones(2, device="cuda").device.index])]

    def grandchild():
        torch.cuda.init()
        return in_child(lambda: in_child(lambda: [acc.is_in_bad_fork(), acc.is_available(), acc.is_fork_safe()]))

    print(json.dumps([os.getpid(), events, ours, in_child(through_torch), in_child(loaded_only), in_child(grandchild)]))
"""
)


def test_forked_workers_use_the_accelerator_after_queries(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid, events, ours, theirs, loaded, grandchild = evaluate_simulated(DATA_LOADER, str(log), gpus=2, log=log)
    assert not [line for line in events.splitlines() if line.startswith(f"{pid} ") and "nvml" not in line]
    # Item i is (0+i) + (1+i) + (2+i) + (3+i).
    assert ours == 4 * 6 + 4 * (0 + 1 + 2 + 3)
    # After torch's own query the same workers fail, so this test can fail.
    assert "Cannot re-initialize CUDA in forked subprocess" in theirs
    assert loaded == [True, [False, 0]]
    assert grandchild == [True, False, False]
    assert initializations(log, pid) == []


def test_forked_child_initializes_nvml_again(tmp_path: Path) -> None:
    # NVML's session belongs to the process that started it. If a child used its parent's session, the simulated NVML would
    # report "uninitialized", which the package handles by a retry. Real NVML may behave differently.
    log = tmp_path / "log"
    program = """
    import accelerator as acc
    from accelerator._machine import nvml
    def child():
        return [nvml._session is None, acc.temperature(1), os.getpid()]
    first = acc.temperature(1)
    print(json.dumps([os.getpid(), first, in_child(child), acc.temperature(1)]))
    """
    pid, first, (is_new, second, child), third = evaluate_simulated(program, gpus=2, log=log)
    assert is_new
    assert first == second == third
    starts = [line.split()[0] for line in log.read_text().splitlines() if "nvmlInit" in line]
    assert starts == [str(pid), str(child)]


BAD_FORK = (
    "    import torch\n"
    + QUERIES
    + """
    library = ctypes.CDLL("libcuda.so.1")
    assert acc.device_count() == 2 and acc.is_fork_safe()
    assert library.cuInit(0) == 0
    parent = [acc.is_fork_safe(), acc.is_initialized(), acc.is_available(), torch.cuda.is_initialized()]

    needing = {
        name: getattr(acc, name)
        for name in (
            "current_device_index current_device current_stream default_stream synchronize empty_cache get_memory_info "
            "get_device_capability get_device_properties memory_allocated memory_stats reset_peak_memory_stats init "
            "initial_seed get_rng_state default_generator graph_pool_handle Graph "
            "create_graph total_memory available_memory is_bf16_supported is_fp16_supported supported_dtypes ipc_collect "
            "empty_host_cache max_memory_reserved memory_summary memory_snapshot current_blas_handle "
            "is_current_stream_capturing"
        ).split()
        if name in dir(acc)
    }
    needing["set_device_index"] = lambda: acc.set_device_index(0)
    needing["device_index"] = lambda: acc.device_index(1).__enter__()
    needing["FloatTensor"] = lambda: acc.FloatTensor([1.0])
    needing["can_device_access_peer"] = lambda: acc.can_device_access_peer(0, 1)
    needing["set_rng_state"] = lambda: acc.set_rng_state(torch.get_rng_state())
    needing["pin_memory"] = lambda: acc.pin_memory(torch.ones(1))
    needing["Stream"] = lambda: acc.Stream()
    needing["Event"] = lambda: acc.Event()

    def child():
        failures = {name: outcome(call) for name, call in needing.items()}
        output = [
            acc.is_in_bad_fork(), acc.is_fork_safe(), acc.is_available(), acc.is_available(strict=True), acc.device_count(),
            acc.unavailable_reason(), acc.is_initialized(), len(acc.visible_devices()), acc.get_device_name(1),
            len(acc.usable_devices())]
        monitored = [acc.utilization(1), acc.temperature("cuda:1"), acc.device_memory_used(0), acc.telemetry(1).power_draw]
        return [failures, output, monitored, os.getpid()]

    print(json.dumps([parent, in_child(child)]))
"""
)


def test_child_forked_after_driver_initialization_is_in_bad_fork(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent, (failures, output, monitored, pid) = evaluate_simulated(BAD_FORK, gpus=2, name=["Zero", "One"], log=log)
    # The driver was initialized without torch, so torch does not know it.
    assert parent == [False, False, True, False]
    reason = output[5]
    assert "was forked after its parent had initialized the accelerator" in reason
    assert "'spawn' or 'forkserver'" in reason
    assert output == [True, False, False, False, 2, reason, False, 2, "One", 0]
    assert monitored == [20, 31, 0, 61000]
    wrong = {
        name: message
        for name, message in failures.items()
        if message != f"RuntimeError: The accelerator cannot be used: {reason}"
    }
    assert wrong == {}
    assert len(failures) > 30
    assert initializations(log, pid) == []


LATE = """
    import torch
    {initialize}
    def child():
        import accelerator as acc
        return [acc.is_in_bad_fork(), acc.is_available(), acc.is_fork_safe()]
    first = in_child(child)
    print(json.dumps(first))
"""


@pytest.mark.parametrize(
    ("initialize", "expected"),
    [("torch.cuda.init()", [True, False, False]), ("pass", [False, True, True])],
)
def test_package_imported_only_after_the_fork(initialize: str, expected: list[bool]) -> None:
    """The package was imported after the fork, so it relies on what torch knows."""
    assert evaluate_simulated(LATE.format(initialize=initialize), gpus=1) == expected


TORCHLESS = """
    import accelerator as acc
    library = ctypes.CDLL("libcuda.so.1")
    read = [acc.device_count(), acc.is_fork_safe(), acc.temperature(1), acc.visible_devices()[0].uuid]

    def child():
        first = [acc.is_in_bad_fork(), acc.device_count(), acc.is_available(), acc.temperature(1)]
        first.append(acc.visible_devices()[0].uuid)
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        return first, [acc.device_count(), acc.temperature(0)]

    clean = in_child(child)
    own = in_child(lambda: library.cuInit(0))
    assert library.cuInit(0) == 0
    is_bad_fork = in_child(child)
    refused = in_child(lambda: library.cuInit(0))
    print(json.dumps([read, clean, own, is_bad_fork, refused, "torch" in sys.modules]))
"""


def test_forks_without_torch() -> None:
    read, clean, own, is_bad_fork, refused, torch = evaluate_simulated(TORCHLESS, gpus=2)
    assert read[:3] == [2, True, 31]
    # The parent's session of NVML does not work in the child, which starts its own.
    assert clean == [[False, 2, True, 31, read[3]], [1, 31]]
    assert is_bad_fork == [[True, 2, False, 31, read[3]], [1, 31]]
    assert (own, refused) == (0, 3)
    assert not torch


FIRST_QUERIES = """
    import random, signal, threading, time
    import accelerator as acc

    # Each attempt is a process that has imported only the package. It forks while a thread runs the first query.
    def attempt(seed):
        random.seed(seed)
        query = random.choice(["device_count", "telemetry", "get_memory_info", "export_envs", "physical_devices"])
        thread = threading.Thread(target=lambda: getattr(acc, query)(), daemon=True)
        thread.start()
        time.sleep(random.random() * 0.04)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            acc.device_count(), acc.utilization(1), acc.get_memory_info(1), acc.export_envs()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        thread.join()
        return status

    statuses = [in_child(attempt, seed) for seed in range(*map(int, sys.argv[1:]))]
    print(json.dumps([len(statuses), sum(status != 0 for status in statuses)]))
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_fork_during_first_query_does_not_hang(rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A child inherits the lock of a module that a thread is importing, so a fork waits until the import is done."""
    forks, hangs = 0, 0
    for turn in range(rounds):
        counted = evaluate_simulated(FIRST_QUERIES, str(10 * turn), str(10 * turn + 10), gpus=2)
        forks, hangs = forks + counted[0], hangs + counted[1]
    with capsys.disabled():
        print(f"\n{forks} forks beside a first query: {hangs} hangs", end="")
    assert (forks, hangs) == (10 * rounds, 0)


PIECES = """
    import importlib
    import accelerator as acc
    whole, pieces = importlib.import_module, []

    def counted(name, package=None):
        before = set(sys.modules)
        module = whole(name, package)
        pieces.append([name, sorted(n for n in set(sys.modules) - before if n.startswith(("accelerator", "pynvml")))])
        return module

    importlib.import_module = counted
    acc.device_count(), acc.telemetry(1), acc.get_memory_info(1), acc.export_envs()
    print(json.dumps(pieces))
"""


def test_import_lock_covers_one_module_at_a_time() -> None:
    """Each import loads one module, because a fork waits for one import at most."""
    pieces = evaluate_simulated(PIECES, gpus=2)
    assert [(name, opened) for name, opened in pieces if len(opened) > 1] == []
    assert sum(len(opened) for _, opened in pieces) > 15


FORKS_AT_ONCE = """
    import threading, time
    os.register_at_fork(before=lambda: time.sleep(0.3))  # registered first, so that it runs after ours
    import accelerator as acc
    results = []

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    threads = [threading.Thread(target=fork) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    asking = threading.Thread(target=lambda: results.append(acc.device_count()), daemon=True)
    asking.start()
    asking.join(60)
    print(json.dumps(results))
"""


def test_concurrent_forks_release_their_locks() -> None:
    """If a fork waits in vain for another fork, no lock stays held."""
    assert evaluate_simulated(FORKS_AT_ONCE, gpus=2) == [2]


THREADS = """
    import threading
    import accelerator as acc
    acc.telemetry(1)  # imports the modules: one that a thread is importing would stay locked in the child
    stop = threading.Event()
    def work():
        while not stop.is_set():
            acc.refresh(), acc.device_count(), acc.telemetry(1)
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    results = [in_child(lambda: [acc.device_count(), acc.temperature(1), acc.is_in_bad_fork()]) for _ in range(20)]
    stop.set()
    [thread.join() for thread in threads]
    print(json.dumps(results))
"""


def test_fork_while_other_threads_query() -> None:
    """The child inherits no lock that is held by a thread of its parent."""
    assert evaluate_simulated(THREADS, gpus=2) == [[2, 31, False]] * 20


LOADING = """
    import threading
    import accelerator as acc
    sys.setswitchinterval(1e-6)
    count = acc.device_count()
    def evaluate():
        for _ in range(10_000):
            acc.device_count()
    threads = [threading.Thread(target=evaluate, daemon=True) for _ in range(3)]
    [thread.start() for thread in threads]
    loads = 0
    while any(thread.is_alive() for thread in threads):
        ctypes.PyDLL("libm.so.6")  # calls the loader with the GIL held, as the import of an extension module does
        loads += 1
    print(json.dumps([count, loads > 0]))
"""


def test_concurrent_queries_and_library_loads_do_not_deadlock() -> None:
    """A search for the driver and a thread that loads a library do not wait for each other forever."""
    assert evaluate_simulated(LOADING, gpus=2, driver="absent") == [0, True]
