"""Ops on a tensor whose storage was freed, as FSDP frees parameters: an illegal memory access, as on a GPU."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("freed storages")]

PRELUDE = """
import torch, sys

def error(call):
    try:
        call()
        torch.cuda.synchronize()
    except RuntimeError as raised:
        return str(raised).partition("\\n")[0]
"""
# Sizes and an offset beyond the first pages of the address space too. Each call has a GPU of its own, which it breaks.
PROGRAM = """
print("next call", file=sys.stderr, flush=True)
with torch.cuda.device({gpu}):
    whole = torch.ones(3 * 2**20, device="cuda")
    x, y = whole[{start}:], torch.ones(3 * 2**20 - {start}, device="cuda")
    whole.untyped_storage().resize_(0)
    print(error(lambda: {call}), error(lambda: y.neg()), sep="|")
"""
CALLS = {
    "x + 1": "aten::add.Tensor accesses self",
    "torch.add(y, x)": "aten::add.Tensor accesses other",
    "x.mul_(2)": "aten::mul_.Tensor accesses self",
    "torch.add(y, 1, out=x)": "aten::add.out accesses out",
    "torch.cat([y, x])": "aten::cat accesses tensors",
    "x.sum()": "aten::sum.dim_IntList accesses self",
    "torch._foreach_add_([y, x], 1)": "aten::_foreach_add_.Scalar accesses self",
}


STARTS = (0, 5, 2**20)


@cache
def outcomes(cases: tuple[tuple[str, int], ...], by_engine: bool) -> dict[tuple[str, int], list[str]]:
    """Run calls in one process, and return the two errors of each and what it writes to stderr."""
    first = "x = y = torch.ones(3, device='cuda')\n" + "".join(f"{call}\n" * 2 for call in CALLS) if by_engine else ""
    programs = (PROGRAM.format(gpu=gpu, call=call, start=start) for gpu, (call, start) in enumerate(cases))
    done = support.python(PRELUDE + first + "".join(programs), simulated_environment(gpus=len(cases)))
    assert done.returncode == 0, done.stderr
    lines, parts = done.stdout.splitlines(), done.stderr.split("next call\n")[1:]
    return {case: [*line.split("|"), part] for case, line, part in zip(cases, lines, parts, strict=True)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_op_on_freed_memory_breaks_the_context(call: str, by_engine: bool, start: int) -> None:
    if by_engine:  # which handles the calls of an op from the second in a process on
        cases = tuple(itertools.product(CALLS, STARTS))
    elif call == "torch.add(y, x)":  # the op of x + 1
        cases = ((call, start),)
    else:
        cases = tuple((each, start) for each in CALLS if each != "torch.add(y, x)")
    *errors, said = outcomes(cases, by_engine)[call, start]
    assert errors == ["CUDA error: an illegal memory access was encountered"] * 2
    assert f"{CALLS[call]} on cuda:{cases.index((call, start))}, whose memory was freed" in said


def test_sizes_views_and_new_memory_of_a_freed_storage() -> None:
    program = """
import torch

x = torch.ones(6, device="cuda")
x + 1, x + 1
storage, view, empty = x.untyped_storage(), x[2:], x[3:3]
size = storage.nbytes()
storage.resize_(0)
assert view.shape == torch.empty_like(view).shape == torch.zeros_like(view).shape
assert (empty + 1).shape == (0,) and empty.sum().item() == 0
storage.resize_(size)
x.fill_(3)
assert (view + 1).tolist() == [4] * 4
assert (torch._efficientzerotensor(3, device="cuda") + 1).tolist() == [1] * 3
torch.cuda.synchronize()
"""
    done = support.python(program, simulated_environment(gpus=1))
    assert (done.returncode, done.stderr) == (0, "")
