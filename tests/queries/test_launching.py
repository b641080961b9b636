"""The environment variables for processes that a launcher starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import accelerator as acc
from tests.support import plain_environment
from tests.support.discovery import evaluate, evaluate_simulated, on_simulated_gpus

pytestmark = pytest.mark.torch_free

BEYOND = """
    import accelerator as acc

    def chosen(env, ids):
        try:
            return acc.set_visible_devices_envs(env, ids)["CUDA_VISIBLE_DEVICES"]
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    print(json.dumps([chosen({}, [1, 0]), chosen({}, [5]), chosen({"CUDA_VISIBLE_DEVICES": 1}, [0])]))
"""


@on_simulated_gpus
def test_ids_beyond_the_machines_devices_raise() -> None:
    inside, beyond, wrong = evaluate_simulated(BEYOND, gpus=2)
    assert inside == "1,0"
    assert beyond == "ValueError: Device 5 is out of range: the number of visible devices is 2"
    assert wrong == "TypeError: The variable CUDA_VISIBLE_DEVICES must be a str, not int (1)"


@on_simulated_gpus
def test_any_id_is_accepted_on_a_machine_without_devices() -> None:
    """The processes may run on another machine."""
    assert evaluate_simulated(BEYOND, gpus=0)[:2] == ["1,0", "5"]


STARTED = """
    import subprocess
    import accelerator as acc
    results = []
    for value in (None, "2,0", "GPU-2,GPU-7,GPU-c"):
        for ids in ([0], [1], [1, 0], []):
            environment = dict(os.environ) if value is None else {**os.environ, "CUDA_VISIBLE_DEVICES": value}
            try:
                acc.set_visible_devices_envs(environment, ids)
            except ValueError:
                continue
            there = [plain(d.uuid) for d in acc.visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value})]
            wanted = [there[i] for i in ids]
            observed = driver(CUDA_VISIBLE_DEVICES=environment["CUDA_VISIBLE_DEVICES"])
            results.append((value, ids, wanted, observed, [plain(d.uuid) for d in acc.visible_devices(environment)]))
    names = [acc.communication_backend_name(), acc.communication_backend_version(), acc.export_envs()]
    names.append(acc.visible_devices_envs())
    quiet = "torch" not in sys.modules
    os.environ["ACCELERATOR_BACKEND"] = "cpu"
    names.append([acc.communication_backend_name(), acc.communication_backend_version(), acc.export_envs()])
    print(json.dumps([results, names, quiet]))
"""


@on_simulated_gpus
def test_started_process_sees_the_selected_devices() -> None:
    results, names, quiet = evaluate_simulated(STARTED, gpus=3)
    assert len(results) == 12
    for value, ids, wanted, observed, output in results:
        assert wanted == observed == output, (value, ids)
    assert names[:1] == ["nccl"]
    assert len(names[1]) == 3
    assert names[2:4] == [["NCCL"], ["CUDA_VISIBLE_DEVICES"]]
    assert names[4] == ["gloo", None, []]
    assert quiet


@on_simulated_gpus
def test_backend_version_of_torch() -> None:
    """The version that a process without torch reads equals torch's. A torch that is built without nccl has none."""
    program = """
        import torch
        import subprocess
        import accelerator as acc
        read = "import accelerator as acc, sys; print(list(acc.communication_backend_version()), 'torch' in sys.modules)"
        apart = subprocess.run([sys.executable, "-c", read], stdout=subprocess.PIPE, check=True).stdout.decode()
        versions = [acc.communication_backend_version(), torch.cuda.nccl.version()]
        del torch._C._nccl_version
        print(json.dumps([apart, *versions, acc.communication_backend_version()]))
    """
    apart, ours, theirs, without = evaluate_simulated(program, gpus=1)
    assert ours == theirs
    assert apart == f"{theirs} False\n"
    assert without is None


# The part of a torch for another accelerator that these queries read.
OTHER = {
    "version.py": "__version__ = '9.0+{name}'\ncuda = hip = None\nxpu = '20260000'\n",
    "__init__.py": """class {name}:
    device_count = staticmethod(lambda: 4)
    is_initialized = staticmethod(lambda: False)
""",
    "_C.py": "class Device:\n    type = '{name}'\n\n_accelerator_exchangeDevice = None\n_accelerator_getAccelerator = Device\n",
    "accelerator.py": "import torch._C\ncurrent_accelerator = torch._C.Device\n",
    "distributed.py": "class Backend:\n    default_device_backend_map = {{'{name}': 'registered'}}\n",
}
READ_ENVS = """
    import accelerator as acc

    def chosen():
        try:
            return dict(acc.set_visible_devices_envs({}, [1]))
        except RuntimeError as error:
            return f"RuntimeError: {error}"

    before = acc.communication_backend_name()
    acc.device_count()
    import torch.distributed
    print(json.dumps([acc.visible_devices_envs(), chosen(), before, acc.communication_backend_name(), acc.export_envs()]))
"""


def other_environment(name: str, folder: Path) -> dict[str, str]:
    (folder / "torch").mkdir()
    for file, text in OTHER.items():
        (folder / "torch" / file).write_text(text.format(name=name))
    environment = plain_environment()
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    return environment


@pytest.mark.parametrize(
    ("name", "variable", "backend", "prefixes"),
    [
        ("xpu", "ZE_AFFINITY_MASK", "xccl", ["CCL", "ZE"]),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", "hccl", ["ASCEND", "HCCL", "LD_LIBRARY", "PATH"]),
        ("sdaa", "SDAA_VISIBLE_DEVICES", "tccl", ["NCCL", "LD_LIBRARY", "PATH"]),
        ("supa", "SUPA_VISIBLE_DEVICES", "bccl", ["BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH"]),
        ("openreg", None, "gloo", []),
    ],
)
def test_variables_and_backend_of_each_vendor(
    name: str, variable: str | None, backend: str, prefixes: list[str], tmp_path: Path
) -> None:
    environment = other_environment(name, tmp_path)
    names, env, before, registered, exported = evaluate(READ_ENVS, environment, python=(sys.executable, "-S"))
    if variable is None:
        assert (names, env) == ([], f"RuntimeError: No variable is known that decides which {name} devices a process sees")
    else:
        assert (names, env) == ([variable], {variable: "1"})
    assert (before, registered) == (backend, "registered")
    assert exported == prefixes


MASKS = [
    ({}, [1], "1"),
    ({"ZE_AFFINITY_MASK": "2,3"}, [1], "3"),
    ({"ZE_AFFINITY_MASK": "0.1,1.1"}, [0], "0.1"),
    ({"ZE_AFFINITY_MASK": "1.0,0.1"}, [0], "0.1"),
    ({"ZE_AFFINITY_MASK": "10,2"}, [0], "2"),
    ({"ZE_AFFINITY_MASK": "1.0,0,10.1"}, [2, 0], "10.1,0"),
    ({"ZE_AFFINITY_MASK": "0.0,0.1,1.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [0], "0.0,0.1"),
    ({"ZE_AFFINITY_MASK": "0.0,0.1,1.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [1], "1.1"),
    ({"ZE_AFFINITY_MASK": "", "CUDA_VISIBLE_DEVICES": "4,5"}, [], ""),
    ({"ZE_AFFINITY_MASK": "0.1"}, [1], "ValueError: Device 1 is out of range: ZE_AFFINITY_MASK='0.1' lists 1"),
    (
        {"ZE_AFFINITY_MASK": "0.1.2"},
        [0],
        "ValueError: ZE_AFFINITY_MASK='0.1.2' is not a list of devices; unset it",
    ),
]


def test_xpu_ids_select_tiles_of_the_affinity_mask(tmp_path: Path) -> None:
    environment = other_environment("xpu", tmp_path)
    program = f"""
        import accelerator as acc
        def chosen(env, ids):
            try:
                return acc.set_visible_devices_envs(env, ids)["ZE_AFFINITY_MASK"]
            except ValueError as error:
                return f"ValueError: {{error}}"

        output = [chosen(env, ids) for env, ids, _ in {MASKS!r}]
        print(json.dumps([output, acc.visible_devices_envs(), acc.communication_backend_name(), acc.export_envs()]))
    """
    output, names, backend, prefixes = evaluate(program, environment, python=(sys.executable, "-S"))
    assert output == [expected for _, _, expected in MASKS]
    assert (names, backend, prefixes) == (["ZE_AFFINITY_MASK"], "xccl", ["CCL", "ZE"])


def test_backend_of_this_process_is_available_in_torch() -> None:
    distributed = pytest.importorskip("torch.distributed")
    name = acc.communication_backend_name()
    if sys.platform == "linux":
        assert distributed.is_backend_available(name)
    if not acc.is_available():
        assert (name, acc.communication_backend_version(), acc.export_envs()) == ("gloo", None, ())
