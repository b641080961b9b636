"""Ops on simulated GPUs support the types that CUDA's kernels support."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from accelerator.simulation._settings.torch_versions import release
from tests.simulation.ops import operators
from tests.simulation.ops.make_dtype_tables import STATED, samples

# Entries and types that fail here, although CUDA supports them according to torch's database, and why.
FAILING = {
    ("prod", torch.complex32): "its gradient at zeros is a cumulative product, which an H100 refuses",
}
if release(torch.__version__) < (2, 14):  # later, cuFFT refuses the sizes of its samples first
    FAILING["stft", torch.bfloat16] = "its gradient is viewed as a complex type that torch does not have"


def find_error(op: Any, sample: Any, backward: bool) -> str | None:
    try:
        operators._call(op, sample, backward)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return None


def find_first_error(op: Any, dtype: torch.dtype, backward: bool = False) -> str | None:
    """Return the first error of an entry's samples, or None."""
    errors = (find_error(op, sample, backward) for sample in samples(op, dtype, backward))
    # cuFFT refuses other sizes of half types. The database has samples of bfloat16 with such sizes.
    return next((error for error in errors if error and "sizes are powers of two" not in error), None)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_dtypes_of_every_operator(chunk: int) -> None:
    failing: dict[tuple[str, torch.dtype], str] = {}
    running: list[tuple[str, torch.dtype]] = []
    examined: set[tuple[str, torch.dtype]] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, op in sorted(operators.entries().items())[chunk::4]:
            if name.startswith("jiterator"):
                continue
            cpu, cuda = op.supported_dtypes("cpu"), op.supported_dtypes("cuda")
            for dtype in cuda - cpu:
                examined.add((name, dtype))
                if error := find_first_error(op, dtype):
                    failing[name, dtype] = error
            running += [
                (name, dtype)
                for dtype in (cpu - cuda) & STATED
                if samples(op, dtype, False) and find_first_error(op, dtype) is None
            ]
            if op.supports_autograd:
                for dtype in op.supported_backward_dtypes("cuda") - op.supported_backward_dtypes("cpu"):
                    examined.add((name, dtype))
                    if error := find_first_error(op, dtype, True):
                        failing[name, dtype] = error
    assert {pair: failing.get(pair) for pair in failing.keys() ^ (FAILING.keys() & examined)} == {}
    assert running == []


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mm": (lambda: ints(2, 2) @ ints(2, 2), "\"addmm_cuda\" not implemented for 'Int'"),
    "linear": (
        lambda: F.linear(ints(2, 2, dtype=torch.int64), ints(2, 2, dtype=torch.int64)),
        "\"addmm_cuda\" not implemented for 'Long'",
    ),
    "bmm": (lambda: torch.bmm(ints(1, 2, 2), ints(1, 2, 2)), "\"baddbmm_cuda\" not implemented for 'Int'"),
    "mv": (lambda: ints(2, 2) @ ints(2), "\"addmv_impl_cuda\" not implemented for 'Int'"),
    "dot": (lambda: torch.dot(ints(2), ints(2)), "\"dot\" not implemented for 'Int'"),
    "max_pool2d": (
        lambda: F.max_pool2d(ints(1, 4, 4, dtype=torch.uint8), 2),
        "\"max_pool2d_with_indices_out_cuda_frame\" not implemented for 'Byte'",
    ),
    "avg_pool2d": (
        lambda: F.avg_pool2d(ints(1, 4, 4, dtype=torch.int64), 2),
        "\"avg_pool2d_out_cuda_frame\" not implemented for 'Long'",
    ),
    "antialiased upsampling": (
        lambda: F.interpolate(ints(1, 1, 4, 4, dtype=torch.uint8), scale_factor=2, mode="bicubic", antialias=True),
        "\"upsample_bilinear2d_out_frame\" not implemented for 'Byte'",
    ),
    "histc": (lambda: torch.histc(torch.ones(4, device="cuda").half()), "\"histc\" not implemented for 'Half'"),
    "mul": (lambda: ints(2, dtype=torch.uint16) * ints(2, dtype=torch.uint16), "\"mul_cuda\" not implemented for 'UInt16'"),
    "mul of float8": (
        lambda: torch.mul(ints(2, dtype=torch.float8_e4m3fn), ints(2, dtype=torch.float8_e4m3fn)),
        "\"mul_cuda\" not implemented for 'Float8_e4m3fn'",
    ),
    "and": (lambda: ints(2, dtype=torch.uint32) & 1, "\"bitwise_and_cuda\" not implemented for 'UInt32'"),
    "or": (lambda: ints(2, dtype=torch.uint16) | 1, "\"bitwise_or_cuda\" not implemented for 'UInt16'"),
    "xor": (lambda: ints(2, dtype=torch.uint16).__ixor__(1), "\"bitwise_xor_cuda\" not implemented for 'UInt16'"),
    "index": (lambda: ints(2, dtype=torch.uint16)[ints(1)], "\"index_cuda\" not implemented for 'UInt16'"),
    "sort": (lambda: ints(2, dtype=torch.uint32).sort(), "\"sort\" not implemented for 'UInt32'"),
    "roll": (lambda: ints(2, dtype=torch.float8_e4m3fn).roll(1), "\"roll_cuda\" not implemented for 'Float8_e4m3fn'"),
    "mm of float8": (
        lambda: ints(2, 2, dtype=torch.float8_e4m3fn) @ ints(2, 2, dtype=torch.float8_e4m3fn),
        "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'",
    ),
    "abs of float8": (
        lambda: ints(2, dtype=torch.float8_e4m3fn).abs(),
        "\"abs_cuda\" not implemented for 'Float8_e4m3fn'",
    ),
    "cumprod": (lambda: ints(2, dtype=torch.complex32).cumprod(0), "\"cumprod_cuda\" not implemented for 'ComplexHalf'"),
    "addcmul": (
        lambda: torch.addcmul(*[ints(2, dtype=torch.complex32)] * 3),
        "\"addcmul_cuda\" not implemented for 'ComplexHalf'",
    ),
    "gradient of dropout": (
        lambda: torch.ops.aten.native_dropout_backward(ints(2, dtype=torch.complex64), ints(2, dtype=torch.bool), 1.0),
        "\"masked_scale\" not implemented for 'ComplexFloat'",
    ),
    "median of bool": (lambda: ints(2, dtype=torch.bool).median(0), "\"median_out_impl\" not implemented for 'Bool'"),
    "dropout": (lambda: F.dropout(ints(8)), "\"fused_dropout\" not implemented for 'Int'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_dtypes_raise_cudas_error(name: str) -> None:
    call, message = REFUSED[name]
    for _ in range(2):  # the first call does not take the fast path
        with pytest.raises(NotImplementedError) as caught:
            call()
        assert str(caught.value) == message


def test_products_are_refused_by_the_type_of_the_result() -> None:
    x = torch.tensor([1, 2], dtype=torch.uint16, device="cuda")
    assert (x * 2.5).tolist() == [2.5, 5.0]
    assert (2.5 * x).tolist() == [2.5, 5.0]
    assert x[:0].roll(1).sort().values.shape == (0,)


def move(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    index = torch.tensor([2, 0, 1], device=x.device)
    return [
        x.gather(0, index),
        x.take_along_dim(index, 0),
        x.scatter(0, index, y),
        x.clone().scatter_(0, index[:1], 1),
        x.flip(0),
        x.index_select(0, index),
        torch.channel_shuffle(x[:2].view(1, 2, 1), 2),
        F.channel_shuffle(x[:2].view(1, 2, 1, 1), 2),
        torch.eye(2, dtype=x.dtype, device=x.device),
    ]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex32])
def test_values_are_moved_in_types_that_the_cpu_lacks(dtype: torch.dtype) -> None:
    x, y = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    for _ in range(2):
        for result, expected in zip(move(x.to(dtype).cuda(), y.to(dtype).cuda()), move(x, y), strict=True):
            assert result.dtype is dtype
            assert result.is_cuda
            assert torch.equal(result.cpu().to(torch.complex64), expected.to(torch.complex64))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn])
def test_values_are_counted_and_compared_in_types_that_the_cpu_lacks(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 0.0, 3.0]).to(dtype).cuda()
    assert x.count_nonzero().item() == 2
    assert x.count_nonzero().dtype is torch.int64
    assert x.view(1, 3).count_nonzero(0).dtype is torch.int64
    assert torch.isin(x, x[1:]).tolist() == [False, True, True]
    if not dtype.is_floating_point:
        diagonal = x.view(3, 1).expand(3, 2).contiguous()
        assert diagonal.trace().item() == 1
        assert diagonal.trace().dtype is torch.int64


def test_numbers_of_complex_half() -> None:
    x = torch.tensor([1 + 2j, 3], dtype=torch.complex32, device="cuda")
    assert torch.equal(x, x.clone()) is True
    assert torch.equal(x, x.conj()) is False
    assert x.ldexp(torch.tensor([1, 2], device="cuda")).tolist() == [2 + 4j, 12]


@pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
def test_median_of_bool(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = function(torch.tensor([True, False, True], device="cuda"))
    assert result.dtype is torch.bool
    assert result.item() is True


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bool, torch.uint8, torch.uint16, torch.complex64, torch.int64]
)
def test_indices_of_triangles(dtype: torch.dtype) -> None:
    for function in (torch.tril_indices, torch.triu_indices):
        result = function(3, 4, 1, dtype=dtype, device="cuda")
        assert result.dtype is dtype
        assert torch.equal(result.cpu().to(torch.complex64), function(3, 4, 1).to(dtype).to(torch.complex64))


def test_convolution_of_integers_raises() -> None:
    with pytest.raises(RuntimeError, match=r"getCudnnDataTypeFromScalarType\(\) not supported for Long"):
        F.conv2d(ints(1, 1, 4, 4, dtype=torch.int64), ints(1, 1, 2, 2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_scatter_reductions_of_unsupported_dtypes_raise(dtype: torch.dtype) -> None:
    x, index = torch.ones(3, dtype=dtype, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    type_name = {torch.bool: "Bool", torch.complex64: "ComplexFloat"}[dtype]
    message = f"\"cuda_scatter_gather_base_kernel_func\" not implemented for '{type_name}'"
    for reduce in ("prod", "amax", "amin"):
        with pytest.raises(NotImplementedError, match=message):
            x.scatter_reduce(0, index, x, reduce)
    with pytest.raises(NotImplementedError, match=message):
        x.clone().scatter_(0, index, x, reduce="multiply")
    assert x.scatter_reduce(0, index, x, "sum")[0].item() in (True, 4)


def test_dtype_of_other_arguments_is_not_checked() -> None:
    """An op refuses only the type of its first tensor."""
    pooled, indices = F.max_pool2d(torch.rand(1, 4, 4, device="cuda"), 2, return_indices=True)
    assert indices.dtype == torch.int64
    assert F.max_unpool2d(pooled, indices, 2).shape == (1, 4, 4)
    assert torch.nn.Embedding(3, 2).cuda()(ints(2)).shape == (2, 2)


def test_unsupported_dtype_after_a_supported_dtype() -> None:
    x = torch.ones(2, 2, device="cuda")
    for _ in range(3):
        x @ x
    with pytest.raises(NotImplementedError, match="addmm_cuda"):
        x.int() @ x.int()


def assert_rounded_once(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, wide: torch.dtype) -> None:
    result, expected = function(x.cuda()), function(x.to(wide))
    assert result.is_cuda
    assert torch.equal(result.cpu(), expected.to(result.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_half_types_are_rounded_once(dtype: torch.dtype, backward: bool) -> None:
    def pool(x: torch.Tensor) -> torch.Tensor:
        if not backward:
            return F.avg_pool3d(x, 2)
        x = x.clone().requires_grad_()
        return torch.autograd.grad(F.avg_pool3d(x, 2).square().sum(), x)[0]

    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    if backward:
        torch.testing.assert_close(pool(x.cuda()).cpu(), pool(x.float()).to(dtype), rtol=0.02, atol=0.02)
    else:
        assert_rounded_once(pool, x, torch.float32)


def test_complex_half() -> None:
    x = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).to(torch.complex32)
    for function in (torch.exp, torch.sin, torch.sum, lambda x: x / x.flip(0)):
        result = function(x.cuda())
        assert result.dtype == torch.complex32
        torch.testing.assert_close(result.cpu().to(torch.complex64), function(x.to(torch.complex64)), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compressed_sparse_products(dtype: torch.dtype) -> None:
    matrix = torch.tensor([[0, 1.5], [2, 0]], dtype=dtype)
    sparse, dense = matrix.cuda().to_sparse_csr(), torch.full((2, 2), 3.0, dtype=dtype, device="cuda")
    blocks = torch.eye(4, dtype=dtype, device="cuda").to_sparse_bsr((2, 2))
    results = [
        sparse @ dense,
        dense @ sparse,
        torch.addmm(dense, sparse, dense),
        sparse @ dense[0],
        blocks @ dense.repeat(2, 2),
    ]
    wide = [[[4.5, 4.5], [6, 6]], [[6, 4.5], [6, 4.5]], [[7.5, 7.5], [9, 9]], [4.5, 6], [[3] * 4] * 4]
    assert [(result.dtype, result.tolist()) for result in results] == [(dtype, expected) for expected in wide]
    assert (sparse @ sparse).to_dense().tolist() == [[3, 0], [0, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_without_meta_kernel(dtype: torch.dtype) -> None:
    scores = torch.rand(4, generator=torch.Generator().manual_seed(1)).to(dtype)
    target = torch.tensor([1, 0, -1, 2])
    gradients = []
    for device, computed in (("cpu", torch.float32), ("cuda", dtype)):
        leaf = scores.to(device, computed, copy=True).requires_grad_()
        F.multilabel_margin_loss(leaf, target.to(device)).backward()
        gradients.append(leaf.grad.cpu().to(dtype))
    assert torch.equal(*gradients)


def test_integer_and_bool_ops() -> None:
    x = torch.tensor([1, 2, 2, 5])
    assert torch.histc(x.int().cuda(), 4, 1, 5).tolist() == [1, 2, 0, 1]
    assert torch.histc(x.int().cuda(), 4, 1, 5).dtype == torch.int32
    assert torch.tensor([True, False], device="cuda").abs().tolist() == [True, False]
    assert torch.ones(2, 2, dtype=torch.bool, device="cuda").trace().item() == 2


def test_complex_half_in_place_and_out() -> None:
    x = torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).to(torch.complex32)
    expected = torch.view_as_real(x.to(torch.complex64).exp().to(torch.complex32))
    there = x.cuda()
    assert there.exp_() is there
    assert torch.equal(torch.view_as_real(there.cpu()), expected)
    out = torch.empty(0, dtype=torch.complex32, device="cuda")
    assert torch.exp(x.cuda(), out=out) is out
    assert torch.equal(torch.view_as_real(out.cpu()), expected)


def test_graph_replay_of_half_computes_current_values() -> None:
    x = torch.zeros(1, 2, 2, 2, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.avg_pool3d(x, 2)
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert y.item() == value


class TestFourier:
    @pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "ihfft", "fft2", "fftn"])
    def test_half(self, name: str) -> None:
        function = getattr(torch.fft, name)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).half()
        result = function(x.cuda())
        assert result.dtype == torch.complex32
        torch.testing.assert_close(result.cpu().to(torch.complex64), function(x.float()), rtol=0.01, atol=0.05)

    def test_half_round_trip(self) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).half()
        back = torch.fft.irfft(torch.fft.rfft(x.cuda()))
        assert back.dtype == torch.float16
        torch.testing.assert_close(back.cpu(), x, rtol=0.01, atol=0.01)

    def test_half_size_that_is_no_power_of_two_raises(self) -> None:
        with pytest.raises(RuntimeError, match=r"sizes are powers of two when computing in half precision.*\[6\]"):
            torch.fft.fft(torch.ones(6, device="cuda").half())


def test_nansum_of_complex() -> None:
    x = torch.tensor([1 + 2j, complex("nan"), 3j], device="cuda")
    assert torch.nansum(x).item() == 1 + 5j


def test_lu_without_pivoting() -> None:
    matrix = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, lower, upper = torch.linalg.lu(matrix.cuda(), pivot=False)
    torch.testing.assert_close((lower @ upper).cpu(), matrix)
    factors, pivots = torch.linalg.lu_factor(matrix.cuda(), pivot=False)
    assert pivots.tolist() == [[1, 2, 3, 4]] * 2
    torch.testing.assert_close(factors.cpu().triu()[:, :4], upper.cpu())
    assert torch.linalg.lu_factor_ex(torch.zeros(2, 2, device="cuda"), pivot=False).info.item() == 1


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9)])
def test_scaled_mm_requires_compute_capability(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    x, scale = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn), torch.ones((), device="cuda")

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(x, x.t(), scale, scale, out_dtype=torch.bfloat16)

    if capability == (8, 9):
        assert multiply()[0, 0].item() == 16
    else:
        with pytest.raises(RuntimeError, match=r"only supported on CUDA devices with compute capability >= 9\.0 or 8\.9"):
            multiply()
