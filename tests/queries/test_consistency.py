"""Each result of a query belongs to one environment, even if other threads change the environment during the query."""

from __future__ import annotations

import pytest

from tests.support.discovery import evaluate_simulated, on_simulated_gpus

QUERIES = """
    import itertools, threading
    import accelerator as acc
    from accelerator._machine import host_memory

    host_memory.available, host_memory.total = (lambda: 11), (lambda: 22)
    visible, chosen = (None, "0", "2,1"), (None, "cpu")

    queries = {
        "is_available": acc.is_available, "device_count": acc.device_count, "unavailable_reason": acc.unavailable_reason,
        "visible_devices": acc.visible_devices, "usable_devices": acc.usable_devices,
        "physical_devices": acc.physical_devices, "strict": lambda: acc.unavailable_reason(strict=True),
        "device_name": lambda: acc.device_name(1), "get_device_index": lambda: acc.get_device_index("cuda:1"),
        "get_device_name": lambda: acc.get_device_name(1), "compute_capability": lambda: acc.compute_capability(1),
        "is_nvlink_connected": lambda: acc.is_nvlink_connected(0, 1), "numa_node": lambda: acc.numa_node(1),
        "total_memory": lambda: acc.total_memory(1), "get_memory_info": lambda: acc.get_memory_info(1),
        "available_memory": lambda: acc.available_memory(1), "device_memory_used": lambda: acc.device_memory_used(1),
        "utilization": lambda: acc.utilization(1), "temperature": lambda: acc.temperature(1),
        "telemetry": lambda: acc.telemetry(1), "list_gpu_processes": lambda: acc.list_gpu_processes(1),
        "communication_backend_name": acc.communication_backend_name, "export_envs": acc.export_envs,
        "any name": acc.device_name, "first name": acc.get_device_name, "first memory": acc.total_memory,
    }

    def outcome(call):
        try:
            return repr(call())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def choose(devices, backend):
        put({"CUDA_VISIBLE_DEVICES": devices, "ACCELERATOR_BACKEND": backend})
"""
# Another thread changes the environment continuously.
FLIPS = (
    QUERIES
    + """
    expected = {name: set() for name in queries}
    for each in itertools.product(visible, chosen):
        choose(*each)
        for name, query in queries.items():
            expected[name].add(outcome(query))

    sys.setswitchinterval(1e-5)
    calls, wrong, ended = int(sys.argv[1]), {}, []

    def change():
        for devices, backend in itertools.cycle([(v, c) for v in visible for c in (*chosen, None)]):
            if len(ended) == 8:
                return
            put({"CUDA_VISIBLE_DEVICES": devices})
            put({"ACCELERATOR_BACKEND": backend})

    def read(thread):
        for name in itertools.islice(itertools.cycle(queries), thread * 3, thread * 3 + calls):
            result = outcome(queries[name])
            if result not in expected[name]:
                wrong.setdefault(name, set()).add(result)
        ended.append(thread)

    threads = [threading.Thread(target=change), *(threading.Thread(target=read, args=(i,)) for i in range(8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unlike = {name: len(results) for name, results in expected.items()}
    print(json.dumps([{name: sorted(results) for name, results in wrong.items()}, unlike]))
"""
)
# The environment changes once, right after a query has read it.
CHANGES = (
    QUERIES
    + """
    from accelerator._machine import discovery_cache, visibility_variables

    def change_after_the_read(read, new):
        def changing():
            values = read()
            discovery_cache._environment = read
            choose(*new)
            return values
        return changing

    all_environments = list(itertools.product(visible, chosen))
    expected = {}
    for each in all_environments:
        choose(*each)
        expected[each] = {name: outcome(query) for name, query in queries.items()}
    wrong, changed = {}, set()
    for name, query in queries.items():
        for old, new in itertools.permutations(all_environments, 2):
            choose(*old)
            discovery_cache._environment = change_after_the_read(visibility_variables.snapshot, new)
            result = outcome(query)
            if discovery_cache._environment is visibility_variables.snapshot:
                changed.add(name)
            discovery_cache._environment = visibility_variables.snapshot
            if result not in (expected[old][name], expected[new][name]):
                wrong[name] = result
    print(json.dumps([wrong, sorted(queries.keys() - changed)]))
"""
)
MACHINE = {
    "gpus": 3,
    "name": ["One", "Two", "Three"],
    "memory": ["4GiB", "8GiB", "16GiB"],
    "capability": ["8.0", "9.0", "10.0"],
}


@on_simulated_gpus
@pytest.mark.parametrize("calls", [40, pytest.param(5_000, marks=pytest.mark.slow)])
def test_each_result_belongs_to_one_environment(calls: int) -> None:
    wrong, distinct = evaluate_simulated(FLIPS, str(calls), variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, **MACHINE)
    assert wrong == {}
    # The results differ between the environments. Otherwise the test could not fail.
    assert distinct["total_memory"] == distinct["get_device_name"] == 3


@on_simulated_gpus
def test_environment_change_during_query_does_not_mix_results() -> None:
    wrong, without_read = evaluate_simulated(CHANGES, variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, **MACHINE)
    assert wrong == {}
    assert without_read == []
