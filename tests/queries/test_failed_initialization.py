"""After a function could not initialize the accelerator, queries say so and functions act on the CPU until ``refresh()``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.discovery import evaluate_simulated, on_simulated_gpus

pytestmark = on_simulated_gpus

# What fails first. Each starts with listed devices.
ATTEMPTS = {
    "init": "acc.init()",
    "FloatTensor": "acc.FloatTensor([1.0])",
    "set_device": "acc.set_device(1)",
    "default_stream": "acc.default_stream()",
    "context": "context.__enter__()",
}
# Whether the package is imported and used before torch is.
ORDERS = {
    "after torch": "import torch\n    import accelerator as acc",
    "before torch": "import accelerator as acc\n    import torch",
    "query before torch": "import accelerator as acc\n    acc.device_count()\n    import torch",
    "query after torch": "import accelerator as acc\n    import torch\n    acc.device_count()",
}
PROGRAM = """
    {order}
    context = acc.device_index(1) if {attempt!r}.startswith("context") else None

    def outcome(call):
        try:
            value = call()
            return value if isinstance(value, (bool, int, str, list, type(None))) else str(value)
        except Exception as error:
            return f"{{type(error).__name__}}: {{error}}"

    def state():
        return [acc.is_available(), acc.is_available(strict=True), acc.device_count(), len(acc.visible_devices()),
                str(acc.device()), str(acc.current_accelerator()), acc.current_accelerator(True) is None,
                len(acc.usable_devices()), acc.device_name(1)]

    def runtime():
        acc.synchronize(), acc.empty_cache(), acc.set_device_index(1), acc.manual_seed_all(3), acc.init()
        with acc.device_index(1), acc.stream(acc.Stream()):
            values = acc.FloatTensor([1.0, 2.0])
        if context:
            with context:
                pass
        return [str(values.device), acc.current_device_index(), acc.memory_allocated(), acc.initial_seed(),
                acc.current_stream().device.type, len(acc.physical_devices())]

    error = outcome(lambda: {attempt})
    reason = acc.unavailable_reason()
    failed = [state(), outcome(runtime)]
    monitored = outcome(lambda: acc.temperature(0))
    acc.refresh()
    listed = [acc.is_available(), acc.unavailable_reason(), acc.device_count()]
    again = outcome(acc.init).partition(":")[0], acc.is_available(), acc.unavailable_reason() == reason
    print(json.dumps([error, reason, failed, monitored, listed, again, acc.is_initialized()]))
"""
ON_CPU = [[False, False, 0, 0, "cpu", "cuda", True, 0, "cpu"], ["cpu", 0, 0, 3, "cpu", 2]]


def fail(attempt: str, order: str, **machine: Any) -> Any:
    program = PROGRAM.format(order=ORDERS[order], attempt=ATTEMPTS[attempt])
    return evaluate_simulated(program, gpus=2, **{"driver": "broken", **machine})


@pytest.mark.parametrize(
    ("attempt", "order"),
    [
        # The import of torch takes longer than the rest. In these it is imported already.
        ("init", "after torch"),
        pytest.param("init", "query after torch", marks=pytest.mark.slow),
        ("FloatTensor", "after torch"),
        *(pytest.param(name, "before torch", marks=pytest.mark.slow) for name in ATTEMPTS),
        pytest.param("init", "query before torch", marks=pytest.mark.slow),
    ],
)
def test_functions_act_on_the_cpu_after_a_failed_initialization(attempt: str, order: str) -> None:
    error, reason, failed, monitored, listed, again, initialized = fail(attempt, order)
    assert "CUDA unknown error" in error
    assert reason.startswith("torch could not initialize the accelerator in this process: CUDA unknown error")
    assert reason.endswith("; refresh() allows another attempt")
    assert "\n" not in reason
    assert failed == ON_CPU
    assert monitored == f"RuntimeError: There is no device to read from: {reason}"
    # The devices are listed again until the next attempt fails.
    assert listed == [True, None, 2]
    assert again == ["RuntimeError", False, True]
    assert not initialized


QUEUED = """
    import accelerator as acc
    import torch

    def fail():
        raise ValueError("planet")

    torch.cuda._lazy_call(fail)
    reasons = []
    for _ in range(2):
        acc.refresh()
        try:
            acc.init()
        except Exception as error:
            reasons.append([acc.unavailable_reason(), str(acc.device())])
    torch.cuda._queued_calls.clear()
    values = torch.ones(2, device="cuda")
    print(json.dumps([reasons, acc.unavailable_reason(), str(acc.device()), acc.device_count(),
                      torch.cuda._lazy_init.__module__, acc.FloatTensor([1.0]).device.type]))
"""


@pytest.mark.slow
def test_initialization_that_succeeds_later_ends_the_cpu_fallback() -> None:
    """A queued call fails at first. Nothing of torch is replaced."""
    reasons, reason, device, count, module, tensor = evaluate_simulated(QUEUED, gpus=2)
    assert len(reasons) == 2
    for failure, fallback in reasons:
        assert "CUDA call failed lazily at initialization with error: planet" in failure
        assert fallback == "cpu"
    assert (reason, device, count, tensor) == (None, "cuda", 2, "cuda")
    assert module == "torch.cuda"


FORKED = """
    import torch
    import accelerator as acc
    parent = acc.device_count()
    exec(sys.argv[1])
    def child():
        try:
            acc.init()
            error = None
        except RuntimeError as failure:
            error = str(failure)
        return [error, acc.device_count(), acc.unavailable_reason()]
    first = in_child(child)
    print(json.dumps([parent, first, acc.device_count(), acc.unavailable_reason()]))
"""


def test_failure_belongs_to_one_process() -> None:
    """A child in a bad fork keeps its count, and names the fork. The failure of a child is not the parent's."""
    for first in ("torch.cuda.init()", "ctypes.CDLL('libcuda.so.1').cuInit(0)"):  # the latter without torch's knowledge
        parent, (error, count, reason), after, own = evaluate_simulated(FORKED, first, gpus=2)
        assert (parent, count, after, own) == (2, 2, 2, None)
        assert "was forked after its parent had initialized" in reason
        assert reason.partition(";")[0] in error
    parent, (error, count, reason), after, own = evaluate_simulated(FORKED, "", gpus=2, driver="broken")
    assert "CUDA unknown error" in error
    assert (parent, count, after, own) == (2, 0, 2, None)
    assert "could not initialize" in reason


TORCHS_OWN = """
    import torch
    import accelerator as acc
    try:
        torch.cuda.init()
    except RuntimeError:
        print(json.dumps([acc.is_available(), acc.is_available(strict=True), acc.device_count()]))
"""


def test_failure_of_torch_itself_is_noticed_by_strict_queries() -> None:
    assert evaluate_simulated(TORCHS_OWN, gpus=2, driver="broken") == [True, False, 2]
