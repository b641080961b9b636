"""Ops on simulated GPUs fail in the same modes and with the same arguments as on real GPUs."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.simulation_driver import make_busy

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def tensor(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


def differentiate(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Callable[[], Any]:
    return lambda: function(tensor(*shape).requires_grad_()).sum().backward()


def embedding_bag() -> None:
    bag = nn.EmbeddingBag(4, 3, mode="max").cuda()
    bag(torch.tensor([0, 1, 2], device="cuda"), torch.tensor([0], device="cuda")).sum().backward()


def ctc_loss() -> None:
    scores = tensor(5, 1, 4).requires_grad_()
    targets, lengths = torch.tensor([[1, 2]], device="cuda"), torch.tensor([2], device="cuda")
    F.ctc_loss(scores.log_softmax(-1), targets, torch.tensor([5], device="cuda"), lengths).backward()


def unpool(dimensions: int) -> Callable[[], Any]:
    pools = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
    unpools = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
    pool, back = pools[dimensions - 1], unpools[dimensions - 1]
    return lambda: back(*pool(tensor(1, 1, *[4] * dimensions), 2, return_indices=True), 2)


def interpolate(mode: str, dimensions: int) -> Callable[[], Any]:
    # Call the op directly, because F.interpolate replaces some of these ops in deterministic mode.
    name = {"linear": "upsample_linear1d", "bilinear": "upsample_bilinear2d", "bicubic": "upsample_bicubic2d"}.get(mode)
    op = getattr(torch.ops.aten, f"{name or 'upsample_trilinear3d'}_backward")
    return lambda: op(tensor(1, 1, *[4] * dimensions), [4] * dimensions, [1, 1, *[2] * dimensions], False)


# Ops that raise on CUDA according to the documentation of torch.use_deterministic_algorithms.
NONDETERMINISTIC: dict[str, Callable[[], Any]] = {
    "avg_pool3d": differentiate(lambda x: F.avg_pool3d(x, 2), 1, 4, 4, 4),
    "adaptive_avg_pool2d": differentiate(lambda x: F.adaptive_avg_pool2d(x, 2), 1, 5, 5),
    "adaptive_avg_pool3d": differentiate(lambda x: F.adaptive_avg_pool3d(x, 2), 1, 5, 5, 5),
    "adaptive_max_pool2d": differentiate(lambda x: F.adaptive_max_pool2d(x, 2), 1, 5, 5),
    "fractional_max_pool2d": differentiate(lambda x: F.fractional_max_pool2d(x, 2, output_size=2), 1, 5, 5),
    "fractional_max_pool3d": differentiate(lambda x: F.fractional_max_pool3d(x, 2, output_size=2), 1, 5, 5, 5),
    "max_unpool1d": unpool(1),
    "max_unpool2d": unpool(2),
    "max_unpool3d": unpool(3),
    "linear": interpolate("linear", 1),
    "bilinear": interpolate("bilinear", 2),
    "bicubic": interpolate("bicubic", 2),
    "trilinear": interpolate("trilinear", 3),
    "reflection_pad1d": differentiate(lambda x: F.pad(x, (1, 1), "reflect"), 1, 4),
    "reflection_pad3d": differentiate(lambda x: F.pad(x, (1,) * 6, "reflect"), 1, 4, 4, 4),
    "nll_loss": lambda: F.nll_loss(tensor(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64, device="cuda")),
    "ctc_loss": ctc_loss,
    "embedding_bag": embedding_bag,
    "antialiased bilinear": differentiate(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True), 1, 1, 4, 4
    ),
    "antialiased bicubic": differentiate(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), 1, 1, 4, 4
    ),
    "put": lambda: tensor(4).put_(torch.tensor([1], device="cuda"), tensor(1)),
    "put_accumulate": lambda: tensor(4).put_(torch.tensor([1], device="cuda"), tensor(1), accumulate=True),
    "histc": lambda: torch.histc(tensor(4)),
    "bincount": lambda: torch.bincount(torch.tensor([1, 2], device="cuda"), tensor(2)),
    "median": lambda: tensor(4).median(0),
    "grid_sample": differentiate(lambda x: F.grid_sample(x, tensor(1, 2, 2, 2)), 1, 1, 4, 4),
    "scatter_reduce": lambda: tensor(4).scatter_reduce(0, torch.zeros(2, dtype=torch.int64, device="cuda"), tensor(2), "prod"),
}


def test_names_in_torchs_library_are_whole_strings() -> None:
    texts: Any = importlib.import_module("_accelerator_simulation._inside.ops.library_texts")
    name = "max_unpooling2d_forward_out"
    assert texts.has_string("libtorch_cuda.so", name)
    for part in (name[:-1], name[1:]):
        assert texts.has_text("libtorch_cuda.so", part)
        assert not texts.has_string("libtorch_cuda.so", part)


CUBLAS = "it uses CuBLAS and you have CUDA"


class TestDeterminism:
    @pytest.fixture(autouse=True)
    def _restore(self) -> Iterator[None]:
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("name", NONDETERMINISTIC)
    def test_nondeterministic_op_raises(self, name: str) -> None:
        call = NONDETERMINISTIC[name]
        call()
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            call()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            call()

    @pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
    def test_scatter_reductions_without_an_error_in_torchs_libraries(self, reduce: str) -> None:
        torch.use_deterministic_algorithms(True)
        index = torch.zeros(2, dtype=torch.int64, device="cuda")
        assert tensor(4).scatter_reduce(0, index, tensor(2), reduce).shape == (4,)

    def test_histograms(self) -> None:
        """From torch 2.7 or 2.8 on, only those of floating-point numbers are refused."""
        torch.use_deterministic_algorithms(True)
        texts: Any = importlib.import_module("_accelerator_simulation._inside.ops.library_texts")
        only_floats = texts.has_string("libtorch_cuda.so", "_histc_cuda with floating point input")
        kernel = "_histc_cuda with floating point input" if only_floats else "_histc_cuda"
        with pytest.raises(RuntimeError, match=f"^{kernel} does not have"):
            torch.histc(tensor(4))
        with contextlib.nullcontext() if only_floats else pytest.raises(RuntimeError, match=f"^{kernel} does not have"):
            torch.histc(tensor(4).int())

    @pytest.mark.skipif(VERSION < (2, 8), reason="torch 2.6 does not have this error")
    @pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
    def test_reductions_by_index(self, reduce: str) -> None:
        torch.use_deterministic_algorithms(True)
        index = torch.zeros(2, dtype=torch.int64, device="cuda")
        for call in (tensor(4).index_reduce, tensor(4).index_reduce_):
            with pytest.raises(RuntimeError, match="index_reduce_cuda does not have a deterministic implementation"):
                call(0, index, tensor(2), reduce)

    def test_additions_to_a_number(self) -> None:
        """The deterministic kernels index the tensor, which has no dimensions."""
        number, index = torch.zeros((), device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        for call in (number.index_add_, number.index_copy_):
            call(0, index, tensor(1)[0])
            torch.use_deterministic_algorithms(True)
            with pytest.raises(IndexError, match="too many indices for tensor of dimension 0"):
                call(0, index, tensor(1)[0])
            torch.use_deterministic_algorithms(False)

    def test_gradients_without_an_error(self) -> None:
        torch.use_deterministic_algorithms(True)
        differentiate(lambda x: F.adaptive_max_pool3d(x, 2), 1, 5, 5, 5)()
        differentiate(lambda x: F.grid_sample(x, tensor(1, 2, 2, 2), align_corners=True), 1, 1, 4, 4)()  # by cuDNN
        with torch.backends.cudnn.flags(enabled=False), pytest.raises(RuntimeError, match="grid_sampler_2d_backward_cuda"):
            differentiate(lambda x: F.grid_sample(x, tensor(1, 2, 2, 2), align_corners=True), 1, 1, 4, 4)()

    def test_exactly_the_documented_ops_raise(self) -> None:
        """Each op raises if and only if this version's documentation says so. Versions of torch differ in these ops."""
        calls = {
            "torch.cumsum": lambda: tensor(4).cumsum(0),
            "torch.bincount": NONDETERMINISTIC["bincount"],
            "torch.nn.NLLLoss": NONDETERMINISTIC["nll_loss"],
            "torch.kthvalue": lambda: tensor(4).kthvalue(1),
            "torch.histc": NONDETERMINISTIC["histc"],
            "torch.nn.CTCLoss": NONDETERMINISTIC["ctc_loss"],
            "torch.nn.functional.grid_sample": NONDETERMINISTIC["grid_sample"],
            "torch.nn.MaxPool3d": differentiate(lambda x: F.max_pool3d(x, 2), 1, 4, 4, 4),
            "torch.nn.AdaptiveAvgPool2d": NONDETERMINISTIC["adaptive_avg_pool2d"],
            "torch.nn.AvgPool3d": NONDETERMINISTIC["avg_pool3d"],
            "torch.median": NONDETERMINISTIC["median"],
            "torch.nn.EmbeddingBag": NONDETERMINISTIC["embedding_bag"],
            "torch.nn.ReflectionPad1d": NONDETERMINISTIC["reflection_pad1d"],
        }
        _, _, raising = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a")
        # torch.cumsum is excluded: its kernel is deterministic (2.6's ScanKernels.cpp), and its documentation is outdated.
        lines = [line for line in raising.split("* ") if "MPS" not in line]
        documented = {name for name in calls if any(f"`{name}`" in line for line in lines)} - {"torch.cumsum"}
        torch.use_deterministic_algorithms(True)
        for name in documented:
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                calls[name]()
        for name in calls.keys() - documented:
            calls[name]()

    def test_deterministic_ops_run(self) -> None:
        torch.use_deterministic_algorithms(True)
        x = tensor(4)
        assert x.median().item() <= x.max().item()
        assert torch.bincount(torch.tensor([1, 2], device="cuda")).tolist() == [0, 1, 1]
        assert torch.arange(3, device="cuda").cumsum(0).tolist() == [0, 1, 3]
        assert torch.ones(3, device="cuda").cumsum(0).tolist() == [1, 2, 3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.conv2d(tensor(1, 1, 4, 4), tensor(1, 1, 2, 2))

    @pytest.mark.parametrize("configuration", ["", ":4096:2", ":4096:8", ":16:8"])
    def test_matmul_requires_cublas_workspace_as_documented(self, monkeypatch: pytest.MonkeyPatch, configuration: str) -> None:
        """Older versions of torch raise without one of two workspaces of cuBLAS, newer ones set it by themselves."""
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", configuration)
        is_documented = "CUBLAS_WORKSPACE_CONFIG" in str(torch.use_deterministic_algorithms.__doc__)
        is_refused = is_documented and not configuration.endswith(":8")
        for warn_only, refused in ((False, pytest.raises(RuntimeError, match=CUBLAS)), (True, pytest.warns(match=CUBLAS))):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            with refused if is_refused else contextlib.nullcontext():
                assert (tensor(2, 2) @ tensor(2, 2)).shape == (2, 2)


SYNCHRONIZING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "bytes_as_mask": lambda x: x[(x > 0).byte()],
    "second_index_a_mask": lambda x: x.diag()[torch.ones_like(x, dtype=torch.int64), x > 0],
    "second_index_bytes": lambda x: x.diag()[:, (x > 0).byte()],
    "masked_select": lambda x: x.masked_select(x > 0),
    "bytes_as_mask_of_an_assignment": lambda x: x.__setitem__((x > 0).byte(), x[:1].expand(3)),
    "mask_assignment": lambda x: x.__setitem__(x > 0, x[:1].expand(3)),
    "mask_assignment_of_one": lambda x: x.__setitem__(x > 0, x[0]),
    "index_on_the_host": lambda x: x[torch.tensor([0, 2])],
    "second_index_on_the_host": lambda x: x.diag()[torch.ones_like(x, dtype=torch.int64), torch.tensor([0, 2, 1])],
    "assignment_by_an_index_on_the_host": lambda x: x.__setitem__(torch.tensor([0, 2]), x[0].clone()),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "equal": lambda x: x.equal(x.clone()),
    "equal_transpose_of_the_same_memory": lambda x: (lambda square: square.equal(square.T))(x.diag()),
    "bincount": lambda x: torch.bincount(x.long()),
    "to_sparse": lambda x: x.to_sparse(),
    "cpu": lambda x: x.cpu(),
    # The results of these are checked on the host.
    "svd": lambda x: torch.linalg.svd(x.diag()),
    "svdvals": lambda x: torch.linalg.svdvals(x.diag()),
    "nuclear_norm": lambda x: torch.linalg.norm(x.diag(), "nuc"),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x.diag()),
    "pinv": lambda x: torch.linalg.pinv(x.diag()),
    "cond": lambda x: torch.linalg.cond(x.diag()),
    "svd_lowrank": lambda x: torch.svd_lowrank(x.diag()),
    "eigh": lambda x: torch.linalg.eigh(x.diag()),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x.diag()),
    "eig": lambda x: torch.linalg.eig(x.diag()),
    "eigvals": lambda x: torch.linalg.eigvals(x.diag()),
    "eig_of_nothing": lambda x: torch.linalg.eig(x.new_empty(0, 0)),
    "cholesky_ex_with_check": lambda x: torch.linalg.cholesky_ex(x.diag(), check_errors=True),
    "inv_ex_with_check": lambda x: torch.linalg.inv_ex(x.diag(), check_errors=True),
    "lu_factor_ex_with_check": lambda x: torch.linalg.lu_factor_ex(x.diag(), check_errors=True),
    "solve_ex_with_check": lambda x: torch.linalg.solve_ex(x.diag(), x, check_errors=True),
    "ldl_factor_ex_with_check": lambda x: torch.linalg.ldl_factor_ex(x.diag(), check_errors=True),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.diag()),
    "normal_of_deviations": lambda x: torch.normal(0.0, x),
    "isin_of_many": lambda x: torch.isin(x, x.repeat(9)),
    "index_fill_of_a_tensor": lambda x: x.index_fill_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), x[0]),
    "masked_fill_of_a_tensor": lambda x: x.masked_fill_(x > 0, x[0]),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.full((1,), 3, device="cuda")),
}
NOT_SYNCHRONIZING: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + x,
    "mask_to_scalar": lambda x: x.masked_fill_(x > 0, 1.0),
    "mask_assignment_of_a_number": lambda x: x.__setitem__(x > 0, 1.0),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(),
    "index": lambda x: x[torch.ones_like(x, dtype=torch.int64)],
    "repeat": lambda x: x.repeat_interleave(torch.full((3,), 2, device="cuda"), output_size=6),
    "equal_of_other_sizes": lambda x: x.equal(x[:2]),
    "equal_of_nothing": lambda x: x[:0].equal(x[:0].clone()),
    "equal_to_itself": lambda x: x.equal(x),
    "svd_of_nothing": lambda x: torch.linalg.svd(x.new_empty(0, 3)),
    "eigh_of_nothing": lambda x: torch.linalg.eigh(x.new_empty(0, 0)),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x.diag()),
    "inv_ex": lambda x: torch.linalg.inv_ex(x.diag()),
    "lu_factor_ex": lambda x: torch.linalg.lu_factor_ex(x.diag()),
    "solve_ex": lambda x: torch.linalg.solve_ex(x.diag(), x),
    "qr": lambda x: torch.linalg.qr(x.diag()),
    "matrix_exp_of_numbers": lambda x: torch.linalg.matrix_exp(x.view(3, 1, 1)),
    "normal_of_means": lambda x: torch.normal(x, 1.0),
    "isin_of_few": lambda x: torch.isin(x, x),
    "isin_of_many_unique": lambda x: torch.isin(x, x.repeat(9), assume_unique=True),
    "index_fill_of_a_number": lambda x: x.index_fill_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), 1.0),
    "masked_fill_of_a_host_tensor": lambda x: x.masked_fill_(x > 0, torch.tensor(1.0)),
    "segment_reduce_unchecked": lambda x: torch.segment_reduce(
        x, "max", lengths=torch.full((1,), 3, device="cuda"), unsafe=True
    ),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
class TestSyncDebugMode:
    @pytest.fixture(autouse=True)
    def _restore(self) -> Iterator[None]:
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("name", SYNCHRONIZING)
    def test_synchronizing_op_raises(self, name: str) -> None:
        x = torch.ones(3, device="cuda")
        SYNCHRONIZING[name](x)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            SYNCHRONIZING[name](x)
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            SYNCHRONIZING[name](x)

    @pytest.mark.parametrize("name", NOT_SYNCHRONIZING)
    def test_non_synchronizing_op_runs(self, name: str) -> None:
        x = torch.ones(3, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        NOT_SYNCHRONIZING[name](x)

    def test_mask_on_the_host(self) -> None:
        """Its indices are copied from pinned memory from torch 2.10 on."""
        x, mask = torch.ones(3, device="cuda"), torch.tensor([True, False, True])
        torch.cuda.set_sync_debug_mode("error")
        waits = pytest.raises(RuntimeError, match="called a synchronizing CUDA operation")
        for call in (lambda: x[mask], lambda: x.index_put_((mask,), x[:1].expand(2))):
            with waits if VERSION < (2, 10) else contextlib.nullcontext():
                call()

    def test_nonzero_waits_for_its_stream(self) -> None:
        x = torch.ones(3, device="cuda")

        def submit(cycles: int) -> torch.cuda.Event:
            torch.cuda._sleep(cycles)
            return torch.cuda.current_stream().record_event()

        event = make_busy(submit, 200)
        x.nonzero()
        assert event.query()


@pytest.mark.parametrize("where", ["both", "second"])
def test_indices_on_another_device(where: str) -> None:
    x, index = tensor(3, 4, 5), torch.tensor([0, 1], device="cuda:1")
    with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device as .* \(cuda:0\)"):
        x[index if where == "both" else index.cpu(), index]


class TestCapture:
    def test_indexing_is_captured(self) -> None:
        x, index = torch.arange(4.0, device="cuda"), torch.tensor([3, 1], device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x[index]
            x[index] = y * 2
        graph.replay()
        assert y.tolist() == [3.0, 1.0]
        assert x.tolist() == [0.0, 2.0, 2.0, 6.0]

    def test_unregistered_generator(self) -> None:
        """A capture that draws from it is refused until torch 2.11. Torch 2.12 registers it by itself."""
        generator = torch.Generator("cuda")
        pool = torch.cuda.graph_pool_handle()
        raises = pytest.raises(RuntimeError, match="generator not in capture mode")
        graph = torch.cuda.CUDAGraph()
        with raises if VERSION < (2, 12) else contextlib.nullcontext(), torch.cuda.graph(graph, pool=pool):
            x = torch.rand(3, device="cuda", generator=generator)
        if VERSION >= (2, 12):
            graph.replay()
            first = x.tolist()
            graph.replay()
            assert x.tolist() != first

    def test_registered_generator(self) -> None:
        generator = torch.Generator("cuda")
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            x = torch.rand(8, device="cuda", generator=generator)
        graph.replay()
        first = x.tolist()
        graph.replay()
        assert x.tolist() != first


class TestArguments:
    def test_lstsq_driver(self) -> None:
        a, b = torch.eye(3, device="cuda"), tensor(3, 1)
        with pytest.raises(RuntimeError, match="`driver` other than `gels` is not supported on CUDA"):
            torch.linalg.lstsq(a, b, driver="gelsd")
        assert torch.equal(torch.linalg.lstsq(a, b, driver="gels").solution, b)

    @pytest.mark.parametrize("function", [torch.median, torch.nanmedian])
    def test_median_of_many_dimensions(self, function: Callable[..., Any]) -> None:
        with pytest.raises(RuntimeError, match="CUDA Tensors cannot have more than 25 dimensions"):
            function(torch.ones([1] * 25, device="cuda"), 0)
        assert function(torch.ones([1] * 24, device="cuda"), 0).values.dim() == 23

    def test_singular_vectors_are_laid_out_as_by_cusolver(self) -> None:
        matrix = tensor(4, 3)
        for _ in range(2):
            _, _, right = torch.linalg.svd(matrix, full_matrices=False)
            assert right.stride() == (3, 1)
        outs = [torch.empty(0, device="cuda") for _ in range(3)]
        torch.linalg.svd(matrix, full_matrices=False, out=outs)
        assert outs[2].stride() == (3, 1)
        torch.testing.assert_close(outs[0] * outs[1] @ outs[2], matrix)

    def test_batch_norm_into_gaps(self) -> None:
        out, mean, deviation = tensor(2, 3), tensor(3), tensor(6)[::2]
        options: Any = (None, None, None, None, True, 0.1, 1e-5)
        with pytest.raises(RuntimeError, match=r"out_invstd\.is_contiguous\(\)"):
            torch.ops.aten.native_batch_norm.out(tensor(2, 3), *options, out=out, save_mean=mean, save_invstd=deviation)

    def test_index_put_of_host_values_raises(self) -> None:
        x, index = torch.zeros(3, device="cuda"), torch.tensor([1])
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x.index_put_((index.cuda(),), torch.ones(1))
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x[torch.tensor([0, 1], device="cuda")] = torch.ones(2)
        x[index] = torch.tensor(2.0)
        x[index.cuda()] = 3.0
        assert x.tolist() == [0.0, 3.0, 0.0]

    def test_indexing_host_tensor_by_device_tensor_raises(self) -> None:
        message = r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"
        with pytest.raises(RuntimeError, match=message):
            torch.ones(3)[torch.tensor([1], device="cuda")]

    def test_assert_async(self) -> None:
        torch._assert_async(torch.ones(1, device="cuda"))
        torch._assert_async(torch.ones(1, device="cuda"), "message")
        torch.cuda.synchronize()

    def test_scripted_pointwise_functions(self) -> None:
        function = torch.jit.CompilationUnit("def f(x, y):\n    return (x * y + x).relu().sigmoid()\n").f
        x = torch.randn(8)
        for _ in range(4):
            torch.testing.assert_close(function(x.cuda(), x.cuda()).cpu(), function(x, x))


class TestQuantized:
    @pytest.mark.parametrize("per_channel", [False, True])
    def test_values(self, per_channel: bool) -> None:
        x = torch.linspace(-1, 1, 12).reshape(3, 4)

        def quantize(x: torch.Tensor) -> torch.Tensor:
            if not per_channel:
                return torch.quantize_per_tensor(x, 0.1, 2, torch.qint8)
            scales = torch.tensor([0.1, 0.2, 0.3], device=x.device)
            return torch.quantize_per_channel(x, scales, torch.zeros(3, dtype=torch.int64, device=x.device), 0, torch.qint8)

        quantize(x.cuda())  # only later calls take the fast path
        here, there = quantize(x), quantize(x.cuda())
        assert there.is_quantized
        assert there.is_cuda
        assert torch.equal(there.int_repr().cpu(), here.int_repr())
        assert torch.equal(there.dequantize().cpu(), here.dequantize())
        assert torch.equal(there.cpu().dequantize(), here.dequantize())

    def test_ops(self) -> None:
        here = torch.quantize_per_tensor(torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4), 0.1, 0, torch.quint8)
        there = here.cuda()
        for function in (torch.relu, lambda q: F.max_pool2d(q, 2), lambda q: F.adaptive_avg_pool2d(q, 2), lambda q: q[0]):
            torch.testing.assert_close(function(there).cpu().dequantize(), function(here).dequantize())

    def test_quantized_op_without_cuda_kernel_raises_torchs_error(self) -> None:
        q = torch.quantize_per_tensor(tensor(4), 0.1, 0, torch.qint8)
        with pytest.raises(NotImplementedError, match=r"aten::add.*QuantizedCUDA"):
            q + q
