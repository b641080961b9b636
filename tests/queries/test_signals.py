"""Queries in signal handlers that interrupt other queries."""

from __future__ import annotations

import pytest

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
        ("lambda: acc.is_available(strict=True)", "acc.usable_devices", {}),
        ("acc.device_count", "acc.device_count", {"nvml": "broken"}),
        ("acc.visible_devices", "acc.visible_devices", {"name": ["One", "Other"]}),
    ],
    ids=["usable", "strict", "nvml broken", "unlike"],
)
def test_query_in_a_signal_handler_does_not_deadlock(query: str, handler: str, machine: dict[str, object]) -> None:
    assert discovery.evaluate_simulated(HANDLER, query, handler, gpus=2, **machine) is True


@discovery.simulated_driver
def test_handler_that_interrupts_first_imports_does_not_raise() -> None:
    for _ in range(3):
        output = discovery.evaluate_simulated(HANDLER, "acc.usable_devices", "acc.usable_devices", "first", gpus=2)
        assert output is True


LIBRARY_LOCK = """
    import signal
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
        signal.pause()
    print(json.dumps(results))
"""


@on_simulated_gpus
@discovery.simulated_driver
def test_handler_that_interrupts_pynvml_does_not_deadlock() -> None:
    assert discovery.evaluate_simulated(LIBRARY_LOCK, gpus=2) == [31]
