"""Queries and runtime functions use the same discovery result, even if the environment changes after initialization."""

from __future__ import annotations

from tests.support.discovery import evaluate_simulated, on_simulated_gpus

pytestmark = on_simulated_gpus

LATE = """
    import torch
    import accelerator as acc

    def state():
        return [
            acc.device_count(), acc.is_available(), acc.device_name(1), acc.get_device_index("cuda:1"), str(acc.device(1)),
            len(acc.visible_devices()), acc.get_device_name(1), acc.total_memory(1) > 0, acc.get_memory_info(1)[1] > 0,
            str(acc.current_accelerator()), acc.communication_backend_name(), acc.unavailable_reason(),
        ]

    def initialized_by(initialize):
        before = state()
        initialize()
        os.environ["ACCELERATOR_BACKEND"] = "cpu"
        after = state()
        acc.set_device_index(1)
        del os.environ["ACCELERATOR_BACKEND"]
        return [before, after, state(), acc.current_device_index()]

    print(json.dumps([in_child(initialized_by, acc.init), in_child(initialized_by, torch.cuda.init)]))
"""


def test_cpu_backend_set_after_initialization_has_no_effect() -> None:
    for before, after, unset, current in evaluate_simulated(LATE, gpus=2):
        assert before[:6] == [2, True, "cuda:1", 1, "cuda:1", 2]
        assert after == before
        assert unset == before
        assert current == 1


EARLY = """
    import torch
    import accelerator as acc

    def chosen_before(query):
        os.environ["ACCELERATOR_BACKEND"] = "cpu"
        if query:
            acc.device_count()
        torch.cuda.init()
        counts = [acc.device_count()]
        del os.environ["ACCELERATOR_BACKEND"]
        return [*counts, acc.device_count(), acc.device_name()]

    def unset_before():
        os.environ["ACCELERATOR_BACKEND"] = "cpu"
        count = acc.device_count()
        del os.environ["ACCELERATOR_BACKEND"]
        torch.cuda.init()
        return [count, acc.device_count(), acc.device_name()]

    print(json.dumps([in_child(chosen_before, False), in_child(chosen_before, True), in_child(unset_before)]))
"""


def test_cpu_backend_set_before_initialization_is_used() -> None:
    without_query, with_query, unset = evaluate_simulated(EARLY, gpus=2)
    assert without_query == with_query == [0, 0, "cpu"]
    assert unset == [0, 2, "cuda"]
