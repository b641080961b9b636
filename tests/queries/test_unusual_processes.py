"""Queries in processes with a replaced os.environ, without file descriptors, in sub-interpreters, and after GPUs appear."""

from __future__ import annotations

import sys

import pytest

from tests.support.discovery import evaluate_simulated, on_simulated_gpus, simulated_driver

REPLACED = """
    import accelerator as acc
    before = acc.device_count()
    os.environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    first = [acc.device_count(), len(acc.visible_devices()), len(acc.usable_devices()), acc.visible_devices()[0].physical_index]
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"
    print(json.dumps([before, first, acc.device_count(), [d.physical_index for d in acc.usable_devices()]]))
"""


@on_simulated_gpus
def test_queries_read_a_replaced_os_environ() -> None:
    assert evaluate_simulated(REPLACED, gpus=3) == [3, [1, 1, 1, 1], 2, [2, 0]]


APPEARS = """
    import pynvml
    import accelerator as acc

    # NVML enumerates the GPUs when it is initialized.
    listed, present, users = [0], [1], [0]
    initialize, shut_down = pynvml.nvmlInit, pynvml.nvmlShutdown

    def nvml_init():
        users[0] += 1
        if users[0] == 1:
            listed[0] = present[0]
        initialize()

    def nvml_shutdown():
        users[0] -= 1
        shut_down()

    pynvml.nvmlInit, pynvml.nvmlShutdown = nvml_init, nvml_shutdown
    pynvml.nvmlDeviceGetCount = lambda: listed[0]
    counts = [acc.device_count()]
    present[0] = 2
    counts.append(acc.device_count())
    acc.refresh()
    counts.append(acc.device_count())
    print(json.dumps([counts, acc.temperature(1), users]))
"""


@on_simulated_gpus
def test_refresh_finds_a_new_gpu() -> None:
    assert evaluate_simulated(APPEARS, gpus=2) == [[1, 1, 2], 31, [1]]


DESCRIPTORS = """
    import resource
    import accelerator as acc
    from accelerator._machine import discovery_cache, torch_build

    acc.device_count  # imports its module
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    without = [acc.device_count(), acc.unavailable_reason()]
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    import time
    deadline = time.monotonic() + 60  # the failure is cached for a second
    while not acc.device_count() and time.monotonic() < deadline:
        time.sleep(0.05)
    print(json.dumps([without, acc.device_count()]))
"""


@on_simulated_gpus
def test_reason_names_exhausted_file_descriptors() -> None:
    (count, reason), later = evaluate_simulated(DESCRIPTORS, gpus=2)
    assert count == 0
    assert "oo many open files" in reason
    assert "not installed" not in reason
    assert later == 2


SUB_INTERPRETER = """
    import _xxsubinterpreters as interpreters
    code = '''if True:
        import sys
        sys.path[:] = {path!r}
        import accelerator as acc
        results = [acc.device_count(), acc.is_available(), acc.unavailable_reason(strict=True), len(acc.usable_devices())]
        with open({file!r}, "w") as file:
            file.write(repr(results))
    '''.format(path=sys.path, file=sys.argv[1])
    interpreter = interpreters.create()
    interpreters.run_string(interpreter, code)
    interpreters.destroy(interpreter)
    print(json.dumps(eval(open(sys.argv[1]).read())))
"""


@on_simulated_gpus
@simulated_driver
@pytest.mark.skipif(sys.version_info[:2] > (3, 12), reason="the module of sub-interpreters has another name")
def test_queries_in_a_sub_interpreter_do_not_hang(tmp_path: object) -> None:
    count, available, reason, usable = evaluate_simulated(SUB_INTERPRETER, f"{tmp_path}/results", gpus=2)
    assert (count, available, usable) == (2, True, 0)
    assert "no child process could be started" in reason
