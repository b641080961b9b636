"""Queries in signal handlers that interrupt other queries."""

from __future__ import annotations

import pytest

from tests import support
from tests.support import discovery
from tests.support.discovery import on_simulated_gpus

HANDLER = """
    import signal, time
    import accelerator as acc

    query, handler_query = (eval(name) for name in sys.argv[1:3])
    calls = []

    def handle(number, frame):
        # Limit the nesting: the timer may fire again before a query ends.
        if len(calls) < 4:
            calls.append(None)
            handler_query()
            calls.append(None)

    signal.signal(signal.SIGALRM, handle)
    signal.signal(signal.SIGPROF, lambda *_: os._exit(7))
    end = time.monotonic() + 60
    if sys.argv[3:] != ["first"]:
        query()
    for _ in range(3):
        calls.clear()
        acc.refresh()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        while len(calls) < 2 and time.monotonic() < end:
            query()
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(len(calls) >= 2))
"""


@discovery.simulated_driver
@pytest.mark.parametrize(
    ("query", "handler", "machine"),
    [
        ("acc.usable_devices", "acc.usable_devices", {}),
        ("acc.device_count", "acc.device_count", {"nvml": "broken"}),
        pytest.param("lambda: acc.is_available(strict=True)", "acc.usable_devices", {}, marks=pytest.mark.slow),
        pytest.param("acc.visible_devices", "acc.visible_devices", {"name": ["One", "Other"]}, marks=pytest.mark.slow),
    ],
    ids=["usable", "nvml broken", "strict", "unlike"],
)
def test_query_in_a_signal_handler_does_not_deadlock(query: str, handler: str, machine: dict[str, object]) -> None:
    assert discovery.evaluate_simulated(HANDLER, query, handler, gpus=2, **machine) is True


@discovery.simulated_driver
@pytest.mark.parametrize("processes", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_handler_that_interrupts_first_imports_does_not_raise(processes: int) -> None:
    for _ in range(processes):
        output = discovery.evaluate_simulated(HANDLER, "acc.usable_devices", "acc.usable_devices", "first", gpus=2)
        assert output is True


FIRST_IMPORT = """
    import signal, threading, time
    import accelerator as acc

    def attempt(delay, threaded):
        results = []
        def handle(number, frame):
            try:
                results.append(acc.device_count())
            except RuntimeError as error:
                results.append(str(error))
        signal.signal(signal.SIGALRM, handle)
        if threaded:  # then the kernel may deliver the signal to this thread while the main thread has blocked it
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        signal.setitimer(signal.ITIMER_REAL, delay)
        results.append(acc.device_count())
        while len(results) < 2:
            time.sleep(0.001)
        return results

    print(json.dumps([in_child(attempt, 0.001 * (i + 1), sys.argv[1] == "threaded") for i in range(0, 40, int(sys.argv[2]))]))
"""


@on_simulated_gpus
@pytest.mark.parametrize("threads", ["single", "threaded"])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_handler_during_the_first_import_answers_or_raises_the_documented_error(threads: str, step: int) -> None:
    results = [each for pair in discovery.evaluate_simulated(FIRST_IMPORT, threads, str(step), gpus=2) for each in pair]
    others = [result for result in results if result != 2]
    assert len(results) == 80 // step
    assert threads == "threaded" or others == []
    assert [text for text in others if "interrupted the first import of" not in str(text)] == []


# CPython leaves such a module while it imports importlib.
PARTIAL_IMPORTLIB = """
    import types
    from importlib.machinery import ModuleSpec
    import accelerator as acc

    sys.modules["importlib"] = types.ModuleType("importlib")
    sys.modules["importlib"].__spec__ = ModuleSpec("importlib", None)
    sys.modules["importlib"].__spec__._initializing = True
    try:
        acc.device_count()
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


@on_simulated_gpus
def test_handler_during_the_import_of_importlib_raises_the_documented_error() -> None:
    expected = "a signal handler interrupted the first import of importlib; query once before you set it"
    assert discovery.evaluate_simulated(PARTIAL_IMPORTLIB, gpus=2) == expected


TEARDOWN = """
    import types
    import accelerator as acc
    if sys.argv[1] == "imported":
        acc.device_count  # imports the modules, and queries nothing

    class Late:
        def __init__(self, write=os.write):
            self.call, self.write = lambda: acc.device_count(), write
        def __del__(self):
            try:
                result = repr(self.call())
            except RuntimeError as error:
                result = f"RuntimeError: {error}"
            except BaseException as error:
                result = f"unexpected {type(error).__name__}: {error}"
            self.write(1, result.encode())

    # Its module is known to sys.modules only, so the object ends when the interpreter has cleared that.
    sys.modules["holder"] = holder = types.ModuleType("holder")
    holder.late = Late()
    del holder
"""


@discovery.simulated_driver
@pytest.mark.parametrize("state", ["new", "imported"])
def test_first_query_while_the_interpreter_shuts_down(state: str) -> None:
    code = support.with_prelude(discovery.DRIVER, TEARDOWN)
    done = support.python(code, support.simulated_environment(gpus=2), state)
    assert done.returncode == 0
    if state == "new":
        assert done.stdout.startswith("RuntimeError: ")
        assert done.stdout.endswith("cannot be imported while the interpreter shuts down; use it before")
    else:
        assert done.stdout == "0"


LIBRARY_LOCK = """
    import signal
    import time
    import accelerator as acc
    import pynvml

    acc.device_count()

    def handle(number, frame):
        results.append(acc.temperature(1))

    results = []
    signal.signal(signal.SIGALRM, handle)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    with pynvml.libLoadLock:  # as during the first call
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not results:
            time.sleep(0.01)
    print(json.dumps(results))
"""


@on_simulated_gpus
@discovery.simulated_driver
def test_handler_that_interrupts_pynvml_does_not_deadlock() -> None:
    assert discovery.evaluate_simulated(LIBRARY_LOCK, gpus=2) == [31]
