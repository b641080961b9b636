"""Which lines a report names, and how it words the memory."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_cuda_torch

both = pytest.mark.parametrize("compute", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["compute", "no-compute"])

_REPORT = """
from accelerator import simulation
for race in simulation.races():
    print(race.message.splitlines()[0])
    print(race.first)
    print(race.second)
"""
_HOST = """
import torch, sys
sys.path.insert(0, {folder!r})
host = torch.empty({count}).pin_memory()
x = torch.ones({count}, device="cuda")
host.copy_(x, non_blocking=True)
{read}
"""
_OPS = """
import torch, sys
sys.path.insert(0, {folder!r})
from mylib import ops
side = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    x.mul_(2)
ops.outer(x)
"""
_LIBRARY = """
def outer(x):
    return inner(x)

def inner(x):
    return x + 1
"""


def run(program: str, **machine: Any) -> list[str]:
    done = support.python(program + _REPORT, simulated_environment(gpus=2, races="report", **machine))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A library in a folder of installed packages."""
    package = tmp_path / "site-packages/mylib"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(_LIBRARY)
    return package.parent


def test_a_host_access_in_numpy_is_the_programs() -> None:
    pytest.importorskip("numpy")
    _, first, second = run(_HOST.format(folder="", count=1000, read="host.numpy().mean()"))
    assert first.endswith("writes it: <string>:6 in <module>")
    line, _, library = second.partition(", through ")
    assert line == "the host reads byte 0 of it: <string>:7 in <module>"
    assert "/numpy/_core/_methods.py:" in library
    assert library.endswith(" in _mean")


def test_a_host_access_in_the_standard_library_is_the_programs() -> None:
    _, _, second = run(_HOST.format(folder="", count=1000, read="import statistics; statistics.fmean(host.numpy())"))
    line, _, library = second.partition(", through ")
    assert line == "the host reads byte 0 of it: <string>:7 in <module>"
    assert "/statistics.py:" in library


@both
def test_an_op_in_a_library_is_the_programs(installed: Path, compute: bool) -> None:
    _, first, second = run(_OPS.format(folder=str(installed)), compute=compute)
    assert first.endswith("writes it: <string>:9 in <module>")
    assert second.endswith(f"reads it: <string>:10 in <module>, through {installed}/mylib/ops.py:6 in inner")


@both
def test_without_a_line_of_the_program_the_librarys_is_named(installed: Path, compute: bool) -> None:
    """As in a thread that a library has started."""
    program = _OPS.format(folder=str(installed)).replace("ops.outer(x)", "").replace("import torch", "import torch, threading")
    (installed / "mylib/ops.py").write_text(
        f"import threading\n{_LIBRARY}\nclass Thread(threading.Thread):\n    def run(self):\n        inner(self.x)\n"
    )
    _, _, second = run(program + "thread = ops.Thread(); thread.x = x; thread.start(); thread.join()", compute=compute)
    assert second.endswith(f"reads it: {installed}/mylib/ops.py:7 in inner")


@both
def test_an_op_of_a_backward_pass_is_autograds(compute: bool) -> None:
    program = """
import torch
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = x
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor
side, x, y = torch.cuda.Stream(), *(torch.ones(1000, device="cuda", requires_grad=True) for _ in range(2))
total = (x * x).sum() + Double.apply(y).sum()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    x.data.zero_()
    y.data.zero_()
total.backward()
"""
    lines = run(program, compute=compute)
    found = {first.rpartition(": ")[2]: second for first, second in zip(lines[1::3], lines[2::3], strict=True)}
    reads = "aten::mul on the default stream of cuda:0 reads it"
    assert found == {
        "<string>:15 in <module>": f"{reads}: the backward pass, in MulBackward0",
        "<string>:16 in <module>": f"{reads}: <string>:10 in backward",
    }


POSSIBLE = {
    "index_select": "table.index_select(0, rows)",
    "index": "table[rows]",
    "gather": "table.gather(0, rows[:, None])",
    "take": "table.take(rows)",
    "embedding": "torch.nn.functional.embedding(rows, table)",
    "masked_select": "table.masked_select(mask)",
    "take_along_dim": "table.take_along_dim(rows[:, None], 0)",
    "embedding_bag": "torch.nn.functional.embedding_bag(rows[None], table)",
    "index_put_": "table.index_put_((rows,), added)",
    "scatter_": "table.scatter_(0, rows[:, None], 2.0)",
    "masked_fill_": "table.masked_fill_(mask, 2.0)",
    "put_": "table.put_(rows, added[:, 0])",
}
CERTAIN = {
    "all of the copy": "table.index_add(0, rows, added)",
    "the indices": "added.index_select(0, changed)",
    "what is added": "added.index_add_(0, rows, table[:5])",
    "all": "table.sum()",
}


def test_values_decide_only_which_part_of_the_first_tensor_is_used() -> None:
    program = f"""
import torch
side = torch.cuda.Stream()
for calls in ({POSSIBLE!r}, {CERTAIN!r}):
    for name, call in calls.items():
        table, added = torch.ones(100, 10, device="cuda"), torch.ones(5, 10, device="cuda")
        rows, changed = torch.arange(5, device="cuda"), torch.arange(5, device="cuda")
        mask = torch.zeros(100, 10, dtype=torch.bool, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            table.mul_(2)
            changed.add_(0)
        exec(compile(call, name, "exec"))
        torch.cuda.synchronize()
"""
    lines = run(program)
    names = [second.rpartition(": ")[2].removesuffix(":1 in <module>") for second in lines[2::3]]
    found = dict(zip(names, lines[0::3], strict=True))
    assert [found.pop(name).startswith("race: possible, depending on values: ") for name in POSSIBLE] == [True] * len(POSSIBLE)
    assert [found.pop(name).startswith("race: possible") for name in CERTAIN] == [False] * len(CERTAIN)
    assert not found


DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "bfloat16", "complex64"]


@both
def test_types(compute: bool) -> None:
    program = f"""
import torch
side = torch.cuda.Stream()
names = [name for name in {DTYPES!r} if hasattr(torch, name)]
tensors = [torch.zeros(64, dtype=torch.uint8, device="cuda").view(getattr(torch, name)) for name in names]
torch.cuda.synchronize()
for name, x in zip(names, tensors):
    with torch.cuda.stream(side):
        x.zero_()
    exec(compile("x.clone()", name, "exec"))  # two lines are reported once
print(names)
"""
    *lines, names = (line for line in reversed(run(program, compute=compute)) if line.startswith(("race: ", "[")))
    assert [line.partition(" of a")[2].partition(" tensor")[0].strip() for line in reversed(lines)] == ast.literal_eval(names)


LARGE = """
import torch
copies = torch.cuda.Stream()
torch.cuda.synchronize()
"""
TRANSFERS = {
    "to_device": """
host = torch.empty({side}, {side}, pin_memory=True)
with torch.cuda.stream(copies):
    batch = host.to("cuda", non_blocking=True)
{wait}
batch @ batch
""",
    "to_host": """
x = torch.ones({side}, {side}, device="cuda")
host = torch.empty({side}, {side}, pin_memory=True)
torch.cuda.synchronize()
with torch.cuda.stream(copies):
    host.copy_(x, non_blocking=True)
{wait}
x.add_(1)
""",
    "host_reads": """
x = torch.ones({side}, {side}, device="cuda")
host = torch.empty({side}, {side}, pin_memory=True)
host.copy_(x, non_blocking=True)
{synchronize}
host[0].tolist()
""",
    "host_writes": """
host = torch.empty({side}, {side}, pin_memory=True)
x = host.to("cuda", non_blocking=True)
{synchronize}
host[0].fill_(0)
""",
    "between_devices": """
x = torch.ones({side}, {side}, device="cuda")
y = torch.empty({side}, {side}, device="cuda:1")
torch.cuda.synchronize()
with torch.cuda.stream(copies):
    y.copy_(x, non_blocking=True)
{wait}
x.add_(1)
""",
    "converted": """
x = torch.ones({side}, {side}, device="cuda")
host = torch.empty({side}, {side}, pin_memory=True, dtype=torch.float64)
torch.cuda.synchronize()
with torch.cuda.stream(copies):
    host.copy_(x, non_blocking=True)
{wait}
x.add_(1)
""",
}


def in_one_process(programs: dict[str, str]) -> str:
    """Return a program that runs others, each as the file of its name."""
    return f"""
import torch
for name, program in {programs!r}.items():
    names = {{}}
    exec(compile(program, name, "exec"), names)
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("side", support.sample([512, 513, 1500], 513))
def test_large_transfers_of_rehearsals(side: int) -> None:
    """Those of over 1 MiB are not performed."""
    racy, ordered = (
        in_one_process(
            {
                name: LARGE
                + program.format(
                    side=side,
                    wait="torch.cuda.current_stream().wait_stream(copies)" if is_ordered else "",
                    synchronize="torch.cuda.synchronize()" if is_ordered else "",
                )
                for name, program in TRANSFERS.items()
            }
        )
        for is_ordered in (False, True)
    )
    assert run(ordered, compute=False) == []
    found = run(racy, compute=False)
    for place in (found[1::3], found[2::3]):
        assert [line.rpartition(": ")[2].partition(":")[0] for line in place] == list(TRANSFERS)
    assert found == run(racy)


WAITING = ("x.cpu()", "host.copy_(x)", "x.copy_(host)", "plain.copy_(x, non_blocking=True)")


@pytest.mark.slow
def test_waiting_transfers_of_rehearsals_order() -> None:
    """A copy without ``non_blocking``, or to pageable memory, is over when it returns."""
    programs = {
        call: f"""
import torch
x = torch.ones(1000, 1000, device="cuda")
host, plain = torch.empty(1000, 1000, pin_memory=True), torch.empty(1000, 1000)
side = torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    {call}
host[0].fill_(1)
host[0].tolist()
x.add_(1)
"""
        for call in WAITING
    }
    program = in_one_process(programs)
    assert run(program, compute=False) == run(program) == []


@pytest.mark.slow
def test_streams_have_numbers_of_their_gpu() -> None:
    program = """
import torch
for gpu, streams in ((0, 2), (1, 1)):
    x = torch.ones(1000, device=f"cuda:{gpu}")
    torch.cuda.synchronize(gpu)
    for _ in range(streams):
        stream = torch.cuda.Stream(gpu)
        with torch.cuda.stream(stream):
            y = x * 2
        torch.cuda.synchronize(gpu)
with torch.cuda.stream(stream):
    x.mul_(2)
x.sum()
for race in simulation.races():
    print(race.advice)
"""
    done = support.python("from accelerator import simulation\n" + program, simulated_environment(gpus=2, races="report"))
    assert done.returncode == 0, done.stderr
    [advice] = done.stdout.splitlines()
    assert "call wait_stream() or wait_event() on the default stream of cuda:1, for stream 1 of cuda:1" in advice


def test_threads_of_an_op_of_the_cpu_have_its_line() -> None:
    """A thread of OpenMP, which knows no line, may touch the memory first."""
    reads = "host.copy_(x, non_blocking=True); host.sum(); torch.cuda.synchronize()\n"
    program = f"""
import torch
torch.set_num_threads(4)
x = torch.ones(1 << 20, device="cuda")
host = torch.empty(1 << 20).pin_memory()
{reads * 8}"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("  the host reads")]
    assert lines == [f"the host reads byte 0 of it: <string>:{number} in <module>" for number in range(6, 14)], done.stderr
