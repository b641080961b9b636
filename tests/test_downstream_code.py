"""The guide's table of code in other projects and its results on three machines, next to those of this package.

``python -m tests.test_downstream_code`` prints the table. Each row has the shortest equivalent of the code to which it links. A
process on the first machine sees two GPUs, on the second the GPU that a UUID selects, on the third the MIG instance that a UUID
selects. On the first machine, the process then forks and the child tries to use a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from tests.support import ROOT, simulated_environment
from tests.support.discovery import on_simulated_gpus


class Site(NamedTuple):
    """A project's code: its link, its purpose, the shortest equivalent, and the call that replaces it."""

    project: str
    link: str
    purpose: str
    theirs: str
    ours: str


_ACCELERATE = "https://github.com/huggingface/accelerate/blob/16cb6eb80dd9aa8b4df1a63ef57863e455d53b83/src/accelerate/utils"
_LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning/blob/7f0c3436cd3f6ad3753125672024fc415cbcb414/src/lightning"
_DIFFUSERS = "https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/utils"
_RAY = "https://github.com/ray-project/ray/blob/00501e2bd10f17c70dc12cdf54a203cf2db02a09/python/ray/_private/accelerators"
_VLLM = "https://github.com/vllm-project/vllm/blob/c77619938d1cca436ad7e674241811f9e6ea539f/vllm/platforms/interface.py"
_AUTOGLUON = (
    "https://github.com/autogluon/autogluon/blob/f34ebb4f664c7d632a8ea7db1de74bdfc64c3625/common/src/autogluon/common/utils"
)
_DEEPSPEED = (
    "https://github.com/deepspeedai/DeepSpeed/blob/edaa7221267243c7be7fb49c5d5f5c4fb97b4641/accelerator/cuda_accelerator.py"
)
_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/torchtitan/tools/utils.py"

SITES = (
    Site(
        "vLLM",
        f"{_VLLM}#L177-L190",
        "NVML's index of device 0",
        """
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        result = int(listed.split(",")[0]) if listed else 0
        """,
        "acc.visible_devices()[0].physical_index",
    ),
    Site(
        "Ray",
        f"{_RAY}/nvidia_gpu.py#L28-L54",
        "how many GPUs a worker may use",
        """
        import pynvml
        pynvml.nvmlInit()
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        result = pynvml.nvmlDeviceGetCount() if listed is None else len(listed.split(","))
        pynvml.nvmlShutdown()
        """,
        "acc.device_count()",
    ),
    Site(
        "accelerate",
        f"{_ACCELERATE}/environment.py#L166-L181",
        "the GPUs' names",
        """
        query = ["nvidia-smi", "--query-gpu=count,name", "--format=csv,noheader"]
        result = [line.split(",")[1].strip() for line in subprocess.check_output(query, text=True).strip().splitlines()]
        """,
        "[device.name for device in acc.visible_devices()]",
    ),
    Site(
        "Lightning",
        f"{_LIGHTNING}/fabric/accelerators/cuda.py#L84-L140",
        "the devices that really work",
        """
        import torch
        result = []
        for index in range(torch.cuda.device_count()):
            try:
                torch.tensor(0, device=f"cuda:{index}")
                result.append(index)
            except RuntimeError:
                pass
        """,
        "[device.index for device in acc.usable_devices()]",
    ),
    Site(
        "Lightning",
        f"{_LIGHTNING}/pytorch/accelerators/cuda.py#L122-L177",
        "fan speed of device 0",
        """
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        query = ["nvidia-smi", "--query-gpu=fan.speed", "--format=csv,nounits,noheader", f"--id={ids[0]}"]
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        result = float(text) if text.replace(".", "").isdigit() else 0.0
        """,
        "acc.telemetry(0).fan_speed",
    ),
    Site(
        "transformers",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/utils/import_utils.py#L643-L669",
        "bfloat16",
        """
        import torch
        result = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        """,
        "acc.is_bf16_supported()",
    ),
    Site(
        "torchtitan",
        f"{_TORCHTITAN}#L27-L33",
        "Hopper or newer",
        """
        import torch
        result = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        """,
        "(acc.compute_capability() or (0, 0)) >= (9, 0)",
    ),
    Site(
        "AutoGluon",
        f"{_AUTOGLUON}/resource_utils.py#L131-L160",
        "free memory of device 0, MiB",
        """
        query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv"]
        lines = subprocess.check_output(query, text=True).strip().splitlines()[1:]
        result = int(lines[0].split()[0])
        """,
        "acc.available_memory() >> 20",
    ),
    Site(
        "DeepSpeed",
        f"{_DEEPSPEED}#L178-L201",
        "the same, through NVML",
        """
        import pynvml
        pynvml.nvmlInit()
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        physical = int(listed.split(",")[0]) if listed else 0
        result = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(physical)).free >> 20
        """,
        "acc.available_memory(0) >> 20",
    ),
    Site(
        "diffusers",
        f"{_DIFFUSERS}/torch_utils.py#L323-L346",
        "empty the cache",
        """
        import torch
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        result = "done"
        """,
        'acc.empty_cache() or "done"',
    ),
)

# Imports torch once, then runs each piece of code in a forked child, which prints its result and whether fork is still safe.
_SERVER = """
import json, os, subprocess, sys
import torch
from tests.programs import in_child

def run(code, variables, then_fork):
    os.environ.update(variables)
    namespace = {"os": os, "subprocess": subprocess}
    try:
        exec(code, namespace)
        result = namespace["result"]
    except Exception as error:
        result = type(error).__name__
    return result, not then_fork or in_child(use_gpu) == "used"

def use_gpu():
    os.close(2)
    try:
        torch.ones(1, device="cuda").cpu()
    except RuntimeError:
        return "refused"
    return "used"

for line in sys.stdin:
    print(json.dumps(in_child(run, *json.loads(line))), flush=True)
"""

_OURS = "import accelerator as acc\nresult = {ours}"
_UUIDS = """
import pynvml as n
n.nvmlInit()
second = n.nvmlDeviceGetHandleByIndex(1)
result = n.nvmlDeviceGetUUID(second)
"""
_MIG_UUIDS = f"{_UUIDS}result = n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(second, 2))"


class Server:
    """A process on a simulated machine that runs code in forked children."""

    def __init__(self, **machine: Any) -> None:
        environment = simulated_environment(gpus=2, name=["Zero", "One"], memory=["8GiB", "16GiB"], **machine)
        command = [sys.executable, "-c", _SERVER]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, visible: str | None = None, *, then_fork: bool = False) -> tuple[object, bool]:
        """Return the result of the code or the type of its error, and whether a child forked afterwards can use a GPU."""
        assert self._process.stdin
        assert self._process.stdout
        variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        self._process.stdin.write(json.dumps([textwrap.dedent(code), variables, then_fork]) + "\n")
        self._process.stdin.flush()
        result, is_fork_safe = json.loads(self._process.stdout.readline())
        return result, is_fork_safe

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def make_rows() -> list[str]:
    """Run the code of every project, and the call that replaces it, and return the rows of the guide's table."""
    plain, divided = Server(), Server(mig=[None, 2])
    try:
        second, instance = str(plain.run(_UUIDS)[0]), str(divided.run(_MIG_UUIDS)[0])

        def make_cells(code: str) -> tuple[str, str]:
            first, is_fork_safe = plain.run(code, then_fork=True)
            results = [first, plain.run(code, second)[0], divided.run(code, instance)[0]]
            text = "; ".join(result if isinstance(result, str) else json.dumps(result) for result in results)
            return text, "safe" if is_fork_safe else "broken"

        return [
            " | ".join(
                (
                    f"| [{site.project}]({site.link}): {site.purpose}",
                    *make_cells(site.theirs),
                    f"`{site.ours}`",
                    *make_cells(_OURS.format(ours=site.ours)),
                )
            )
            + " |"
            for site in SITES
        ]
    finally:
        plain.close()
        divided.close()


@pytest.mark.slow
@on_simulated_gpus
def test_porting_table_equals_results_of_the_code() -> None:
    lines = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in make_rows() if row not in lines] == []


if __name__ == "__main__":
    print("| code | results | fork | replaced by | results | fork |", "|---|---|---|---|---|---|", *make_rows(), sep="\n")
