"""``python -m tests.support.downstream_code``: what nine projects write today, what it answers, and one line of ours.

Prints README's table. Each piece is the shortest equivalent of the code that the table links to, written anew. It runs in a
fresh process on simulated machines, and so does ours: two GPUs, the second of them chosen by its UUID, a MIG instance chosen
by its own. On the first of them a process that asked then forks, and the child tries to use a GPU.
"""

from __future__ import annotations

import json
import textwrap
from typing import NamedTuple

from tests.support import run, simulated_environment


class Site(NamedTuple):
    """A piece of today's code: whose, where, what it is for, the equivalent, ours."""

    project: str
    link: str
    purpose: str
    today: str
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
        answer = int(listed.split(",")[0]) if listed else 0
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
        answer = pynvml.nvmlDeviceGetCount() if listed is None else len(listed.split(","))
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
        answer = [line.split(",")[1].strip() for line in subprocess.check_output(query, text=True).strip().splitlines()]
        """,
        "[device.name for device in acc.visible_devices()]",
    ),
    Site(
        "Lightning",
        f"{_LIGHTNING}/fabric/accelerators/cuda.py#L84-L140",
        "the devices that really work",
        """
        import torch
        answer = []
        for index in range(torch.cuda.device_count()):
            try:
                torch.tensor(0, device=f"cuda:{index}")
                answer.append(index)
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
        answer = float(text) if text.replace(".", "").isdigit() else 0.0
        """,
        "acc.telemetry(0).fan_speed",
    ),
    Site(
        "transformers",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/utils/import_utils.py#L643-L669",
        "bfloat16",
        """
        import torch
        answer = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        """,
        "acc.is_bf16_supported()",
    ),
    Site(
        "torchtitan",
        f"{_TORCHTITAN}#L27-L33",
        "Hopper or newer",
        """
        import torch
        answer = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
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
        answer = int(lines[0].split()[0])
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
        answer = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(physical)).free >> 20
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
        answer = "done"
        """,
        'acc.empty_cache() or "done"',
    ),
)

_PROGRAM = """
import json, os, subprocess, sys
def told():
    try:
        return ask()
    except Exception as error:
        return type(error).__name__
def ask():
{code}
    return answer
print(json.dumps(told()))
"""

_FORK = """
child = os.fork()
if child == 0:
    os.close(2)
    try:
        import torch
        torch.ones(1, device="cuda").cpu()
    except BaseException:
        os._exit(1)
    os._exit(0)
print(json.dumps(os.waitpid(child, 0)[1] == 0))
"""

_OURS = """
import accelerator as acc
answer = {ours}
"""

_UUIDS = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex({gpu}); "
_MACHINES = {
    "two GPUs": ({"gpus": 2, "name": ["Zero", "One"], "memory": ["8GiB", "16GiB"]}, None),
    "the second, by UUID": (
        {"gpus": 2, "name": ["Zero", "One"], "memory": ["8GiB", "16GiB"]},
        _UUIDS.format(gpu=1) + "print(n.nvmlDeviceGetUUID(h))",
    ),
    "a MIG instance": (
        {"gpus": 2, "name": ["Zero", "One"], "memory": ["8GiB", "16GiB"], "mig": [None, 2]},
        _UUIDS.format(gpu=1) + "print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(h, 2)))",
    ),
}


def answers(code: str) -> tuple[list[object], bool]:
    """What the code answers on each machine, and whether a child forked afterwards can use a GPU of the first."""
    found: list[object] = []
    forks = False
    for options, chosen in _MACHINES.values():
        variables = {"CUDA_VISIBLE_DEVICES": run(chosen, simulated_environment(**options)).strip()} if chosen else {}
        program = _PROGRAM.format(code=textwrap.indent(textwrap.dedent(code).strip(), "    "))
        printed = run(program if chosen else program + _FORK, simulated_environment(variables, **options)).splitlines()
        found.append(json.loads(printed[0]))
        if not chosen:
            forks = json.loads(printed[1])
    return found, forks


def row(site: Site) -> str:
    """A project's row of README's table."""
    theirs, ours = answers(site.today), answers(_OURS.format(ours=site.ours))
    cells = [f"[{site.project}]({site.link}): {site.purpose}", *_cells(theirs), f"`{site.ours}`", *_cells(ours)]
    return "| " + " | ".join(cells) + " |"


def _cells(found: tuple[list[object], bool]) -> tuple[str, str]:
    told = "; ".join(answer if isinstance(answer, str) else json.dumps(answer) for answer in found[0])
    return told, "safe" if found[1] else "poisoned"


if __name__ == "__main__":
    print("| today | answers | fork | one line | answers | fork |")
    print("|---|---|---|---|---|---|")
    for each in SITES:
        print(row(each), flush=True)
