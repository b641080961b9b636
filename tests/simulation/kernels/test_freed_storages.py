"""Ops on a tensor whose storage was freed, as FSDP frees parameters: an illegal memory access, as on a GPU."""

from __future__ import annotations

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch]

# Sizes and an offset beyond the first pages of the address space too. The engine handles calls from the second on.
PROGRAM = """
import torch

{first}
whole = torch.ones(3 * 2**20, device="cuda")
x, y = whole[{start}:], torch.ones(3 * 2**20 - {start}, device="cuda")
whole.untyped_storage().resize_(0)
try:
    {call}
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).partition("\\n")[0])
try:
    y + 1
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).partition("\\n")[0])
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


@pytest.mark.parametrize("start", [0, 5, 2**20])
@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_op_on_freed_memory_breaks_the_context(call: str, by_engine: bool, start: int) -> None:
    first = "x = y = torch.ones(3, device='cuda')\n" + f"{call}\n" * 2 if by_engine else ""
    program = PROGRAM.format(first=first, call=call, start=start)
    done = support.python(program, simulated_environment(gpus=1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CUDA error: an illegal memory access was encountered"] * 2
    assert f"{CALLS[call]} on cuda:0, whose memory was freed" in done.stderr


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
