"""Probes: forks and changes of the environment during a probe, and children that miss the deadline."""

from __future__ import annotations

import pytest

from tests.support.discovery import evaluate_simulated, simulated_driver

# Makes the child of a probe slow, and records the processes that are started.
SLOW = """
    import signal, subprocess, threading, time
    from accelerator._machine import driver_child, driver_probe, limits

    source, started, children = driver_probe._source(), threading.Event(), []

    def slow(seconds):
        text = source.replace("def main(", f"import time; time.sleep({seconds})\\ndef main(", 1)
        return lambda: started.set() or text

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            children.append(self)

    subprocess.Popen = Recorded
"""


@pytest.mark.slow
@simulated_driver
def test_a_child_forked_during_a_probe_can_probe() -> None:
    program = (
        SLOW
        + """
    driver_probe._source = slow(3)
    thread = threading.Thread(target=lambda: driver_probe.run({}))
    thread.start()
    assert started.wait(60)
    driver_probe._source = lambda: source

    def query():
        signal.alarm(20)
        return len(driver_probe.run({}, use=True).devices)

    print(json.dumps(in_child(query)))
    thread.join()
    """
    )
    assert evaluate_simulated(program, gpus=2) == 2


@simulated_driver
def test_variable_removed_while_a_probe_is_started() -> None:
    program = """
    from collections import UserDict
    from accelerator._machine import driver_probe, torch_probe

    class Changing(UserDict):
        def __iter__(self):
            names = list(self.data)
            self.data.pop("REMOVED", None)
            return iter(names)

    os.environ = Changing({**os.environ, "REMOVED": "1"})
    devices = len(driver_probe.run({}).devices)
    os.environ["REMOVED"] = "1"
    torch_probe._run_child = lambda environment: "ran"
    print(json.dumps([devices, torch_probe.run()]))
    """
    assert evaluate_simulated(program, gpus=2) == [2, "ran"]


@simulated_driver
def test_probe_runs_while_tokenize_is_partially_imported() -> None:
    program = """
    from types import ModuleType
    from accelerator._machine import driver_probe

    sys.modules["tokenize"] = ModuleType("tokenize")
    print(json.dumps(len(driver_probe.run({}).devices)))
    """
    assert evaluate_simulated(program, gpus=2) == 2


@simulated_driver
def test_a_child_that_misses_the_deadline_is_killed() -> None:
    program = (
        SLOW
        + """
    driver_probe._source, limits.DRIVER_DEADLINE_S = slow(600), 0.5
    result = driver_probe.run({})
    (child,) = children
    print(json.dumps([result.error, child.returncode]))
    """
    )
    error, status = evaluate_simulated(program, gpus=2)
    assert "did not answer a child process within 0.5 s" in error
    assert status == -9
