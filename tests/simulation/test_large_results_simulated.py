"""Ops with large results and ops on lists of tensors return the CPU's values. Large results are not copied."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
# Missing on a GPU that is not simulated, where this module is collected too.
aliases: Any = sys.modules.get("_accelerator_simulation._kernels.aliases")
dispatch: Any = sys.modules.get("_accelerator_simulation._kernels.dispatch")

Function = Callable[[torch.Tensor], Any]
# Functions of a tensor of 8 x 6 x 40 x 40 floats. The results of the first table are computed in device memory. Those of the
# second are computed in host memory and copied.
COMPUTED_IN_PLACE: dict[str, Function] = {
    "add": lambda x: x + x,
    "sub": lambda x: torch.sub(x, x, alpha=2),
    "mul": lambda x: x * x,
    "div": lambda x: x / x,
    "pow": lambda x: x**2,
    "number": lambda x: x * 2,
    "number_": lambda x: x.clone().div_(3),
    "subtracted_number": lambda x: torch.sub(x, 2.5, alpha=2),
    "relu": lambda x: x.relu(),
    "threshold_backward": lambda x: aten.threshold_backward(x, x, 0),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_backward": lambda x: aten.gelu_backward(x, x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh_backward": lambda x: aten.tanh_backward(x, x),
    "leaky_relu": F.leaky_relu,
    "mm": lambda x: x.view(-1, 240) @ x.view(240, -1),
    "addmm": lambda x: torch.addmm(x.view(-1)[:240], x.view(-1, 40), x.view(40, -1)[:, :240]),
    "batch_norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "eval_batch_norm": lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 1].abs()),
    "max_pool": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "strided_max_pool": lambda x: F.max_pool2d(x, (3, 2), (1, 3), return_indices=True),
    "max_pool_backward": lambda x: aten.max_pool2d_with_indices_backward(
        x[..., ::2, ::2].contiguous(), x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]
    ),
}  # fmt: skip
COPIED: dict[str, Function] = {
    "broadcast": lambda x: x + x[:1],
    "promoted": lambda x: x * x.double(),
    "transposed": lambda x: x.transpose(-1, -2) + x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last).relu(),
    "complex_number": lambda x: x * 2j,
    "complex_exponent": lambda x: x**2j,
    "padded_max_pool": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "dilated_max_pool": lambda x: F.max_pool2d(x, 2, 2, 0, 3, return_indices=True),
    "ceiled_max_pool": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
    "max_pool_of_three_dimensions": lambda x: F.max_pool2d(x.flatten(0, 1), 2, return_indices=True),
    "divided_integers_by_a_number": lambda x: x.int() / 2,
    "integers": lambda x: x.int() + x.int(),
    "divided_integers": lambda x: x.int() / x.int(),
    "half": lambda x: x.half() + x.half(),
    "complex": lambda x: torch.complex(x, x) * torch.complex(x, x),
    "mixed_batch_norm": lambda x: F.batch_norm(x.bfloat16(), torch.zeros(6).to(x), torch.ones(6).to(x), training=True),
}


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def assert_same(there: Any, here: Any) -> None:
    pairs = zip(there, here, strict=True) if isinstance(here, (tuple, list)) else [(there, here)]
    for a, b in pairs:
        assert a.is_cuda
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", [*COMPUTED_IN_PLACE, *COPIED])
def test_values(name: str) -> None:
    function = {**COMPUTED_IN_PLACE, **COPIED}[name]
    x = random_tensor(8, 6, 40, 40)
    for _ in range(2):  # the first call does not take the fast path
        assert_same(function(x.cuda()), function(x))


@pytest.mark.parametrize("name", COMPUTED_IN_PLACE)
def test_large_results_are_not_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor(8, 6, 40, 40).cuda()
    function = COMPUTED_IN_PLACE[name]
    function(x)
    copies: list[int] = []
    copy = dispatch._copy_many
    for module in (dispatch, aliases):
        monkeypatch.setattr(module, "_copy_many", lambda to, of, nbytes: (copies.append(nbytes), copy(to, of, nbytes)))
    result = function(x)
    assert len(copies) == (1 if name == "max_pool_backward" else 0)  # contiguous() copies the slice
    assert result is not None


def test_fast_path_raises_torchs_errors() -> None:
    x = random_tensor(300, 200).cuda()
    x + x, x @ x.t()  # later calls take the fast path
    with pytest.raises(RuntimeError, match="must match the size"):
        x + random_tensor(300, 199).cuda()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x @ x
    images = random_tensor(2, 3, 80, 80).cuda()
    F.max_pool2d(images, 2)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        F.max_pool2d(images, 81)
    for step in (0, -1):
        with pytest.raises(RuntimeError, match="stride"):
            F.max_pool2d(images, 2, step)
    with pytest.raises(RuntimeError, match="Boolean inputs not supported"):
        torch.ones(300, 600, dtype=torch.bool, device="cuda").relu()


def test_second_device_and_gradients() -> None:
    x = random_tensor(8, 6, 40, 40)
    there = x.to("cuda:1").requires_grad_()
    here = x.clone().requires_grad_()
    for tensor in (there, here):
        (F.max_pool2d(tensor.relu() * tensor, 2).tanh() ** 2).sum().backward()
    assert there.grad is not None
    assert there.grad.device == torch.device("cuda:1")
    torch.testing.assert_close(there.grad.cpu(), here.grad)


LISTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "add": lambda xs: torch._foreach_add(xs, 1.5),
    "add_lists": lambda xs: torch._foreach_add(xs, xs, alpha=2),
    "add_": lambda xs: torch._foreach_add_(xs, 2) or xs,
    "mul_scalars": lambda xs: torch._foreach_mul(xs, [1.0, 2.0, 3.0][: len(xs)]),
    "addcdiv_": lambda xs: torch._foreach_addcdiv_(xs, [x + 3 for x in xs], [x * x + 1 for x in xs], 0.5) or xs,
    "lerp_": lambda xs: torch._foreach_lerp_(xs, [x * 2 for x in xs], 0.25) or xs,
    "sqrt": lambda xs: torch._foreach_sqrt([x.abs() for x in xs]),
    "norm": torch._foreach_norm,
    "cat": lambda xs: torch.cat([x.flatten() for x in xs]),
    "copy_": lambda xs: torch._foreach_copy_([torch.zeros_like(x) for x in xs], xs) or xs,
}
INPUTS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "tensors": lambda: [random_tensor(3), random_tensor(2, 4), random_tensor(1, 1)],
    "parameters": lambda: [nn.Parameter(random_tensor(3)), nn.Parameter(random_tensor(5))],
    "transposed": lambda: [random_tensor(3, 4).t(), random_tensor(4)[::2]],
    "empty": lambda: [random_tensor(3), random_tensor(0)],
    "mixed": lambda: [random_tensor(3), random_tensor(3).double(), random_tensor(3).half()],
    "complex": lambda: [random_tensor(3), torch.complex(random_tensor(3), random_tensor(3))],
    "offset": lambda: [random_tensor(9)[1:], random_tensor(9)[3:]],
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, inputs: str) -> None:
    if name == "lerp_" and inputs in ("mixed", "complex"):
        pytest.skip("torch does not interpolate half on the CPU in 2.6")
    with torch.no_grad():
        for _ in range(2):
            here = INPUTS[inputs]()
            there = [nn.Parameter(x.cuda()) if isinstance(x, nn.Parameter) else x.cuda() for x in here]
            expected, actual = LISTS[name](here), LISTS[name](there)
            pairs = zip(actual, expected, strict=True) if isinstance(expected, (list, tuple)) else [(actual, expected)]
            for a, b in pairs:
                assert a.is_cuda
                torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=1e-5)


def test_lists_on_two_devices() -> None:
    xs = [random_tensor(3).cuda(), random_tensor(3).to("cuda:1")]
    results = torch._foreach_add(xs, 1.0)
    assert [result.device for result in results] == [x.device for x in xs]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.cat(xs)


def test_large_result_kernels_replace_one_decomposition() -> None:
    """Such a kernel must return what the decomposition does. `test_kernels_simulated` compares both sizes of batch norm."""
    large_results = sys.modules["_accelerator_simulation._kernels.large_results"]
    decompositions = sys.modules["_accelerator_simulation._kernels.decompositions"]
    assert large_results._KERNELS.keys() & decompositions.DECOMPOSITIONS.keys() == {"aten::native_batch_norm"}
