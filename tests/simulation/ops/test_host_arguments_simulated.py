"""Which arguments of an op on a simulated GPU may be CPU tensors: those that the installed torch takes on a GPU.

torch's wrappers of CUDA kernels check devices unless native_functions.yaml says otherwise. Then TensorIterator takes CPU
tensors without dimensions, or the kernel itself takes CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

MISMATCH = "Expected all tensors to be on the same device, but (found at least two devices, cuda:0 and cpu|got .* is on cpu)"

Function = Callable[[torch.Tensor, torch.Tensor], Any]
# Functions of a vector and a number without dimensions, which may be on the host.
TAKEN: dict[str, Function] = {
    "add": lambda x, n: x + n,
    "addcdiv": lambda x, n: torch.addcdiv(x, n, n),
    "addcmul": lambda x, n: torch.addcmul(x, x, n),
    "atan2": torch.atan2,
    "copysign_": lambda x, n: x.clone().copysign_(n),
    "eq_": lambda x, n: x.clone().eq_(n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "floor_divide": lambda x, n: x // n,
    "floor_divide_": lambda x, n: x.clone().floor_divide_(n),
    "foreach_mul": lambda x, n: torch._foreach_mul([x], n)[0],
    "index_fill": lambda x, n: x.index_fill(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "index_put": lambda x, n: x.index_put((torch.zeros(1, dtype=torch.int64),), n),
    "lerp": lambda x, n: torch.lerp(x, x + 1, n),
    "linspace": lambda x, n: torch.linspace(n, n + 1, 3, device=x.device),
    "list of numbers": lambda x, n: torch._foreach_add([x], [n])[0],
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "maximum": torch.maximum,
    "pow": lambda x, n: x**n,
    "probabilities": lambda x, n: x.clone().bernoulli_(n.expand(3).clone()),
    "rsub": torch.rsub,
    "where": lambda x, n: torch.where(x > 1, n, x),
    "xlogy": torch.xlogy,
}
REFUSED: dict[str, Function] = {
    "bucketize": lambda x, n: torch.bucketize(x, n.expand(2).clone()),
    "clamp": lambda x, n: x.clamp(min=n),
    "clamp_max": lambda x, n: x.clamp_max(n),
    "gcd": lambda x, n: torch.gcd(x.int(), n.int()),
    "isin": lambda x, n: torch.isin(x, n),
    "list of vectors": lambda x, n: torch._foreach_add([x], [n.expand(3).clone()]),
    "logaddexp": torch.logaddexp,
    "loss": lambda x, n: F.binary_cross_entropy(x[0] * 0.5, n * 0.5),
    "matrix": lambda x, n: x.view(1, 3) @ n.expand(3, 1),
    "nextafter": torch.nextafter,
    "output": lambda x, n: torch.add(x[0], 1, out=n.clone()),
    "put_": lambda x, n: x.clone().put_(torch.zeros(1, dtype=torch.int64, device=x.device), n.view(1)),
    "scatter": lambda x, n: x.scatter(0, torch.zeros(1, dtype=torch.int64, device=x.device), n.view(1)),
    "vector": lambda x, n: x + n.expand(3),
    "written number": lambda x, n: n.clone().add_(x[0]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_numbers_on_the_host_are_taken(name: str) -> None:
    x, number = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(1.0)
    expected = TAKEN[name](x, number)
    for _ in range(2):  # the first call runs in Python
        torch.testing.assert_close(TAKEN[name](x.cuda(), number).cpu(), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_on_the_host_are_refused(name: str) -> None:
    x, number = torch.tensor([1.0, 2.0, 3.0], device="cuda"), torch.tensor(1.0)
    REFUSED[name](x, number.cuda())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=MISMATCH):
            REFUSED[name](x, number)


@pytest.mark.parametrize("name", ["mm", "mm_of_the_host", "dot", "cat", "clamp"])
def test_text_of_torchs_device_checks(name: str) -> None:
    """torch changed it in 2.7 or 2.8: its library has one of the two texts."""
    x, y = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    call, argument, check = {
        "mm": (lambda: y @ x, "mat2", "wrapper_CUDA_mm"),
        "mm_of_the_host": (lambda: x @ y, "mat2", "wrapper_CUDA_mm"),
        "dot": (lambda: y[0].dot(x[0]), "tensor", "wrapper_CUDA__dot"),
        "cat": (lambda: torch.cat([y, x]), "tensors", "wrapper_CUDA_cat"),
        "clamp": (lambda: y.clamp(x), "min", "wrapper_CUDA_clamp_Tensor"),
    }[name]
    common, other = ("cpu", "cuda:0") if name == "mm_of_the_host" else ("cuda:0", "cpu")
    texts: Any = sys.modules["_accelerator_simulation._inside.ops.library_texts"]
    is_new = texts.has_text("libtorch_cpu.so", "different from other tensors on")
    expected = (
        f"Expected all tensors to be on the same device, but got {argument} is on {other}, different from other tensors on"
        f" {common} (when checking argument in method {check})"
        if is_new
        else f"Expected all tensors to be on the same device, but found at least two devices, {common} and {other}!"
        f" (when checking argument for argument {argument} in method {check})"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == expected


def test_text_of_checks_in_kernels() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    text = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    for call in (lambda: x + y, lambda: y + x, lambda: torch.where(y > 1, x, y), lambda: torch.add(y, x, out=y)):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == text
    with pytest.raises(RuntimeError, match="masked_fill_: Expected inputs to be on same device"):
        x.masked_fill_(x > 1, y[0, 0])
    with pytest.raises(
        RuntimeError, match="expected self and mask to be on the same device, but got mask on cpu and self on cuda:0"
    ):
        y.masked_fill_(x > 1, 1.0)


def test_generator_state_of_attention_may_be_on_the_host() -> None:
    """xformers passes the state as CPU tensors to the backward of memory-efficient attention."""
    query, key, value = (torch.randn(1, 4, 2, 8, device="cuda", requires_grad=True) for _ in range(3))
    attend = torch.ops.aten._efficient_attention_forward.default
    out, logsumexp, seed, offset, *_ = attend(query, key, value, None, None, None, None, None, 0.0, 0, True)
    arguments = (torch.ones_like(out), query, key, value, None, out, None, None, 4, 4, logsumexp, 0.0)
    backward = torch.ops.aten._efficient_attention_backward.default
    expected = backward(*arguments, seed, offset, 0, False)
    results = backward(*arguments, seed.cpu(), offset.cpu(), 0, False)
    for result, other in zip(results[:3], expected[:3], strict=True):
        torch.testing.assert_close(result, other)


def test_every_check_of_torch_belongs_to_an_op() -> None:
    """The names of checks are read from torch's library. A name that no op has would mean that torch spells them otherwise."""
    texts: Any = sys.modules["_accelerator_simulation._inside.ops.library_texts"]
    ops: Any = sys.modules["_accelerator_simulation._inside.ops.op"]
    checks = {name for name in texts.device_checks() if name.startswith("wrapper_CUDA_")}
    assert len(checks) > 400
    texts_of_ops = {
        name
        for op in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        for name in ops.names_of_check(op, torch._C.DispatchKey.CPU)
    }
    assert checks <= texts_of_ops
