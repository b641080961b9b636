"""What CUDA's kernels refuse, and the CPU's kernels compute or refuse with another error.

Each row names a text that the installed libraries with CUDA's kernels contain if these kernels have the check. A row whose text
the installed torch lacks is skipped: that torch computes or raises another error.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

HALF, INT8, LONG, COMPLEX = torch.float16, torch.int8, torch.int64, torch.complex64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=LONG)


def many_dimensions(count: int) -> torch.Tensor:
    return ones(*[1] * count)


def float8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return ones(rows, columns).to(dtype)


def scaled_mm(m: int, k: int, n: int, dtype: torch.dtype = E4M3, *, is_row_major: bool = False, **options: Any) -> torch.Tensor:
    right = float8(k, n, dtype) if is_row_major else float8(n, k, dtype).t()
    scales = [options.pop(name, ones(1)[0]) for name in ("scale_a", "scale_b")]
    return torch._scaled_mm(float8(m, k, dtype), right, *scales, **options)


def second_scaled_mm(
    m: int, k: int, n: int, dtype: torch.dtype = E4M3, *, is_row_major: bool = False, **options: Any
) -> torch.Tensor:
    if not hasattr(F, "scaled_mm"):
        pytest.skip("torch before 2.10 has no scaled_mm")
    right = float8(k, n, dtype) if is_row_major else float8(n, k, dtype).t()
    recipe = F.ScalingType.TensorWise
    return F.scaled_mm(float8(m, k, dtype), right, ones(1)[0], recipe, ones(1)[0], recipe, **options)


def int_mm(m: int, k: int, n: int) -> torch.Tensor:
    return torch._int_mm(ones(m, k, dtype=INT8), ones(k, n, dtype=INT8))


class Row(NamedTuple):
    """A call that CUDA refuses, and its error, whose first part the library has."""

    text: str
    rest: str
    call: Callable[[], Any]
    library: str = ""  # what the library has in place of the first part


HOST = torch.tensor(2.0)
SINGLETONS = (
    "Invalid scaling configuration.\n- For TensorWise scaling, a and b should be float8, scales should be float and singletons."
)
TRAILING = "Expected trailing dimension of mat1 to be divisible by 16 "
BIAS_FLOAT = "Bias is not supported when out_dtype is set to Float32"
LAYOUTS = "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
BOTH_E5M2 = "Multiplication of two Float8_e5m2 matrices is not supported"
MULTIPLE = "needs to be greater than 0 and a multiple of 8, but got "
HOST_SELF = "CPU Scalar support for self argument is not supported when calling addcmul on CUDA tensors."
HOST_TENSOR1 = HOST_SELF.replace("self", "tensor1") + " However, CPU Scalar support for tensor2 is supported"
TENSOR_INFO = "CUDA Tensors cannot have more than 25 dimensions"
POWERS = "cuFFT only supports dimensions whose sizes are powers of two when computing in {} precision"
HALF_ROWS: Any = {"bias": ones(32, dtype=HALF) if torch.cuda.is_available() else None}
ROWS: dict[str, Row] = {
    "scaled_mm, k": Row(TRAILING, "but got mat1 shape: (16x41).", lambda: scaled_mm(16, 41, 16)),
    "scaled_mm, n": Row("mat2 shape (", "48x20) must be divisible by 16", lambda: scaled_mm(16, 48, 20)),
    "scaled_mm, layout": Row(LAYOUTS, "", lambda: scaled_mm(16, 48, 32, is_row_major=True)),
    "scaled_mm, e5m2": Row(BOTH_E5M2, "", lambda: scaled_mm(16, 48, 32, E5M2)),
    "scaled_mm, float bias": Row(BIAS_FLOAT, "", lambda: scaled_mm(16, 48, 32, bias=ones(32), out_dtype=torch.float32)),
    "scaled_mm, bias of other type": Row(
        "Bias must be BFloat16 or Half, but got ", "Float", lambda: scaled_mm(16, 48, 32, bias=ones(32), out_dtype=HALF)
    ),
    "scaled_mm, half bias": Row(
        "Bias must be BFloat16 to compute ",
        "BFloat16 output, but got Half",
        lambda: scaled_mm(16, 48, 32, bias=ones(32, dtype=HALF), out_dtype=torch.bfloat16),
    ),
    "scaled_mm, size of bias": Row(
        "Bias must be size ", "32 but got 31", lambda: scaled_mm(16, 48, 32, bias=ones(31, dtype=HALF), out_dtype=HALF)
    ),
    "scaled_mm, scales": Row(SINGLETONS, "", lambda: scaled_mm(16, 48, 32, scale_a=ones(3, 1), scale_b=ones(1, 3))),
    "scaled_mm, float": Row(SINGLETONS, "", lambda: torch._scaled_mm(ones(16, 16), ones(16, 16).t(), ones(1)[0], ones(1)[0])),
    "scaled_mm, out": Row(
        "out_dtype must match output matrix type",
        "",
        lambda: scaled_mm(16, 16, 16, out_dtype=HALF, out=ones(16, 16)),
    ),
    "F.scaled_mm, k": Row(TRAILING, "but got mat1 shape: (16x41).", lambda: second_scaled_mm(16, 41, 16)),
    "F.scaled_mm, n": Row("mat2 shape (", "48x20) must be divisible by 16", lambda: second_scaled_mm(16, 48, 20)),
    "F.scaled_mm, layout": Row(LAYOUTS, "", lambda: second_scaled_mm(16, 48, 32, is_row_major=True)),
    "F.scaled_mm, e5m2": Row(BOTH_E5M2, "", lambda: second_scaled_mm(16, 48, 32, E5M2)),
    "F.scaled_mm, bias": Row(BIAS_FLOAT, "", lambda: second_scaled_mm(16, 48, 32, bias=ones(32), output_dtype=torch.float32)),
    "int_mm, m": Row("self.size(0) needs to be greater than 16, but got ", "16", lambda: int_mm(16, 32, 32)),
    "int_mm, k": Row(f"self.size(1) {MULTIPLE}", "33", lambda: int_mm(32, 33, 32)),
    "int_mm, n": Row(f"mat2.size(1) {MULTIPLE}", "33", lambda: int_mm(32, 32, 33)),
    "addcmul, self": Row(HOST_SELF, "", lambda: torch.addcmul(HOST, ones(3), ones(3))),
    "addcmul, tensor1": Row(HOST_TENSOR1, "", lambda: torch.addcmul(ones(3), HOST, ones(3))),
    "addcmul_, tensor1": Row(HOST_TENSOR1, "", lambda: ones(3).addcmul_(HOST, ones(3))),
    "addcmul, out": Row(HOST_SELF, "", lambda: torch.addcmul(HOST, ones(3), ones(3), out=ones(3))),
    "ldl_solve": Row(
        "torch.linalg.ldl_solve: complex tensors with hermitian=True flag are not supported on CUDA.",
        "",
        lambda: torch.linalg.ldl_solve(
            ones(1, 1, dtype=COMPLEX), ones(1, dtype=torch.int32), ones(1, 1, dtype=COMPLEX), hermitian=True
        ),
    ),
    "sspaddmm": Row(
        "NYI: CUDA sspaddmm is not implemented",
        "",
        lambda: torch.sspaddmm(ones(3, 3).to_sparse(), ones(3, 3).to_sparse(), ones(3, 3)),
    ),
    "solver of sparse matrices": Row(
        "Calling linear solver with sparse tensors requires compiling ",
        "PyTorch with CUDA cuDSS",
        lambda: torch.linalg.solve(torch.eye(3, device="cuda").to_sparse_csr(), ones(3)),
    ),
    "fft of bfloat16": Row(POWERS.format("bfloat16"), "", lambda: torch.fft.fft(ones(3, dtype=torch.bfloat16))),
    "fft of half": Row(POWERS.format("half"), "", lambda: torch.fft.rfft(ones(3, dtype=HALF))),
    "sort of complex numbers": Row(
        "Sort currently does not support complex dtypes on CUDA.", "", lambda: ones(3, dtype=COMPLEX).sort()
    ),
    # 25 or more dimensions
    **{
        f"{name} in 25 dimensions": Row(TENSOR_INFO, "", lambda call=call: call(many_dimensions(25)))  # type: ignore[misc]
        for name, call in {
            "sort": lambda x: x.sort(),
            "topk": lambda x: x.topk(1),
            "kthvalue": lambda x: x.kthvalue(1),
            "median": lambda x: x.median(0),
            "nanmedian": lambda x: x.nanmedian(0),
            "index_select": lambda x: x.index_select(0, zeros(1)),
            "index_add": lambda x: x.index_add(0, zeros(1), x),
            "index_reduce": lambda x: x.index_reduce(0, zeros(1), x, "prod"),
            "tril": lambda x: x.tril(),
            "triu_": lambda x: x.triu_(),
            "dropout": lambda x: F.dropout(x),
        }.items()
    },
    "kthvalue in 26 dimensions": Row("cannot operate on more than ", "25 dimensions", lambda: many_dimensions(26).kthvalue(1)),
    "median in 26 dimensions": Row(
        "median() cannot operate on more than ", "25 dimensions", lambda: many_dimensions(26).median(0)
    ),
    "index_add in 26 dimensions": Row(
        "tensor has too many (>", "25) dims", lambda: many_dimensions(26).index_add(0, zeros(1), many_dimensions(26))
    ),
    "nonzero in 26 dimensions": Row(
        "nonzero is not supported for tensor with more than ", "25 dimensions", lambda: many_dimensions(26).nonzero()
    ),
    # both refuse, with other texts
    "mm of two types": Row(
        "expected mat1 and mat2 to have the same dtype, but got: ",
        "float != double",
        lambda: torch.mm(ones(3, 3), ones(3, 3, dtype=torch.float64)),
    ),
    "masked_scatter of two types": Row(
        "masked_scatter_: expected self and source to have same dtypes but got ",
        "Float and Double",
        lambda: ones(3).masked_scatter(ones(3) > 0, ones(3, dtype=torch.float64)),
    ),
    "histc without bins": Row("bins must be > 0", "", lambda: ones(3).histc(0)),
    "histc of an empty range": Row("max must be larger than min", "", lambda: ones(3).histc(3, 2, 1)),
    "adaptive_avg_pool3d": Row(
        "adaptive_avg_pool3d_cuda(): Expected 4D or 5D tensor, but got ",
        "",
        lambda: torch.ops.aten._adaptive_avg_pool3d(ones(4, 4), [2, 2, 2]),
    ),
    "nll_loss2d, target": Row(
        "only batches of spatial targets supported (3D tensors) but got targets of size: : ",
        "[1, 3, 3, 3]",
        lambda: F.nll_loss(ones(1, 3, 3, 3), zeros(1, 3, 3, 3)),
    ),
    "bernoulli_ of integers": Row(
        "expected probabilities tensor to have floating type, got ", "Long", lambda: ones(3).bernoulli_(zeros(3))
    ),
    "LSTM, hx": Row("rnn: hx is not contiguous", "", lambda: lstm(state(1, 5, 2).transpose(1, 2), state(1, 2, 5))),
    "LSTM, cx": Row("rnn: cx is not contiguous", "", lambda: lstm(state(1, 2, 5), state(1, 5, 2).transpose(1, 2))),
    "GRU, hx": Row("rnn: hx is not contiguous", "", lambda: nn.GRU(4, 5).cuda()(ones(3, 2, 4), state(1, 5, 2).transpose(1, 2))),
    "backward of LSTM in evaluation": Row(
        "cudnn RNN backward can only be called in training mode", "", lambda: differentiate_evaluated(nn.LSTM(4, 5))
    ),
    "backward of RNN in evaluation": Row(
        "cudnn RNN backward can only be called in training mode", "", lambda: differentiate_evaluated(nn.RNN(4, 5))
    ),
}


def state(*shape: int) -> torch.Tensor:
    return ones(*shape)


def lstm(hx: torch.Tensor, cx: torch.Tensor) -> Any:
    return nn.LSTM(4, 5).cuda()(ones(3, 2, 4), (hx, cx))


def differentiate_evaluated(net: nn.Module) -> None:
    torch.autograd.backward(net.cuda().eval()(ones(3, 2, 4).requires_grad_())[0].sum())


def has_text(text: str) -> bool:
    texts: Any = importlib.import_module("_accelerator_simulation._inside.ops.library_texts")
    return any(texts.has_text(library, text) for library in ("libtorch_cuda.so", "libtorch_cuda_linalg.so"))


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    row = ROWS[name]
    if not has_text(row.text):
        pytest.skip(f"torch {torch.__version__} lacks the text")
    for _ in range(2):  # the first call runs in Python, others in the engine
        with pytest.raises((RuntimeError, ValueError), match=re.escape(row.text + row.rest)):
            row.call()


class TestAccepted:
    """Calls beside those that are refused."""

    def test_products(self) -> None:
        assert scaled_mm(16, 48, 32, out_dtype=HALF, bias=ones(32, dtype=HALF)).shape == (16, 32)
        assert scaled_mm(16, 48, 32, scale_a=ones(16, 1), scale_b=ones(1, 32), out_dtype=torch.bfloat16).shape == (16, 32)
        assert scaled_mm(3, 48, 32)[0, 0].item() == 48.0
        assert int_mm(17, 32, 40).tolist() == [[32] * 40] * 17

    def test_addcmul_with_a_number_on_the_host(self) -> None:
        for _ in range(2):
            assert torch.addcmul(ones(3), ones(3), HOST).tolist() == [3.0] * 3

    def test_24_dimensions(self) -> None:
        x = many_dimensions(24)
        for _ in range(2):
            assert x.sort().values.item() == x.kthvalue(1).values.item() == x.index_add(0, zeros(1), x).item() - 1 == 1.0

    def test_recurrent_nets(self) -> None:
        net = nn.LSTM(4, 5).cuda()
        torch.autograd.backward(net(ones(3, 2, 4))[0].sum())
        assert net.weight_ih_l0.grad is not None
        net.eval()
        assert net(ones(3, 2, 4))[0].shape == (3, 2, 5)
        with torch.backends.cudnn.flags(enabled=False):  # torch's own kernels have neither check
            differentiate_evaluated(nn.GRU(4, 5))
            lstm(state(1, 5, 2).transpose(1, 2), state(1, 2, 5))


WIDE = 988328483643648370
# What the CPU's kernels refuse and CUDA's compute, and the results.
COMPUTED: dict[str, tuple[Callable[[], torch.Tensor], list[float]]] = {
    "clamp": (lambda: ones(2, dtype=HALF).clamp(-1e6, 1e6), [1.0, 1.0]),
    "clamp_max_": (lambda: ones(2, dtype=HALF).clamp_max_(1e6), [1.0, 1.0]),
    "clamp_min, out": (lambda: torch.clamp_min(ones(2, dtype=HALF), -1e6, out=ones(2, dtype=HALF)), [1.0, 1.0]),
    "hardtanh": (lambda: F.hardtanh(ones(2, dtype=HALF), -1e6, 1e6), [1.0, 1.0]),
    "add": (lambda: torch.add(ones(2, dtype=HALF), 0.001 * ones(2, dtype=HALF), alpha=1e6), [1001.0, 1001.0]),
    "sub": (lambda: torch.sub(ones(2, dtype=HALF), ones(2, dtype=HALF), alpha=1e6), [float("-inf")] * 2),
    "addcmul": (
        lambda: torch.addcmul(*[ones(2, dtype=torch.int16)] * 3, value=WIDE),
        [float(((WIDE + 1 + 2**15) % 2**16) - 2**15)] * 2,
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_of_a_wider_type(name: str) -> None:
    call, expected = COMPUTED[name]
    for _ in range(2):
        result = call()
        assert result.tolist() == pytest.approx(expected, rel=2e-3)


def test_gradient_between_limits_of_a_wider_type() -> None:
    x = ones(2, dtype=HALF).requires_grad_()
    torch.autograd.backward(F.hardtanh(x, -1e6, 1e6).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_numbers_that_cuda_refuses_too() -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ones(2, dtype=HALF).fill_(1e6),
        lambda: torch.add(ones(2, dtype=INT8), ones(2, dtype=INT8), alpha=1000),
        lambda: F.threshold(ones(2, dtype=HALF), 1e6, 1e6),
    )
    for call in calls:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="without overflow"):
                call()


DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor_divide": lambda x, y: x // y,
    "floor_divide_": lambda x, y: x.clone().floor_divide_(y),
    "remainder": lambda x, y: x % y,
    "remainder_": lambda x, y: x.clone().remainder_(y),
    "fmod": torch.fmod,
    "fmod_": lambda x, y: x.clone().fmod_(y),
    "div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div_": lambda x, y: x.clone().div_(y, rounding_mode="floor"),
    "fmod, out": lambda x, y: torch.fmod(x, y, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_divided_by_zero(name: str) -> None:
    """A GPU raises nothing, and the quotient may be any value (pytorch 178013)."""
    dividends, divisors = torch.arange(7, 4007), torch.arange(3, 4003)
    divisors[::2] = 0
    expected = DIVISIONS[name](dividends[1::2], divisors[1::2])
    for _ in range(2):
        results = DIVISIONS[name](dividends.cuda(), divisors.cuda())
        assert results[1::2].tolist() == expected.tolist()
    (ones(3, dtype=LONG) // 0).tolist()


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_products_of_sparse_matrices_of_half_types(dtype: torch.dtype) -> None:
    sparse = torch.tensor([[1.0, 0.0], [2.0, 3.0]], device="cuda", dtype=dtype).to_sparse()
    product = torch.sparse.mm(sparse, sparse)
    assert product.dtype == dtype
    assert product.to_dense().tolist() == [[1.0, 0.0], [8.0, 9.0]]


def test_weights_of_no_scores() -> None:
    """CUDA's loss of nothing does not look at them (pytorch 171931)."""
    for _ in range(2):
        assert F.nll_loss(ones(0, 0), zeros(0), ones(0, dtype=HALF)).isnan().item()


def test_first_offset_of_embedding_bags() -> None:
    """CUDA's kernel takes it as 0 (pytorch 33589)."""
    weight = torch.arange(12.0, device="cuda").reshape(4, 3)
    indices = torch.tensor([0, 1, 2], device="cuda")
    bags = F.embedding_bag(indices, weight, torch.tensor([1, 2], device="cuda"), mode="sum")
    assert bags.tolist() == [[3.0, 5.0, 7.0], [6.0, 7.0, 8.0]]
    bags = F.embedding_bag(indices, weight, torch.tensor([1, 2, 2], device="cuda"), mode="sum", include_last_offset=True)
    assert bags.tolist() == [[3.0, 5.0, 7.0], [6.0, 7.0, 8.0]]


def test_engine_after_errors() -> None:
    """An error leaves arguments, results and generators of later calls as they are."""
    x, generator = ones(3), torch.Generator("cuda").manual_seed(3)
    expected = torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.add(x, ones(2))
        with pytest.raises(RuntimeError):
            torch.mm(x.view(1, 3), ones(2, 2))
    assert (x + x).tolist() == [2.0] * 3
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), expected)
