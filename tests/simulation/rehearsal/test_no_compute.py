"""GPUs that compute nothing: ops allocate their results. Each test starts processes of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.support import ROOT, simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("no_compute")]

DEADLINE = 540

# Results whose strides differ: torch's shape rules and the CPU's kernels lay them out in different orders.
OTHER_STRIDES = {
    *("fft.hfft2", "fft.hfftn", "fft.irfft2", "fft.irfftn", "fft.rfft2", "fft.rfftn", "linalg.lstsq"),
    *("linalg.lstsq.grad_oriented", "linalg.svd", "nn.functional.max_unpool2d.grad", "pca_lowrank", "svd_lowrank"),
    "nn.functional.scaled_dot_product_attention",
}
# Shape rules of older versions of torch do not sort dimensions as cuFFT does.
UNSORTED = {f"fft.{name}" for name in ("fft", "hfft", "ifft", "ihfft", "ihfft2", "ihfftn", "irfft", "rfft")}
# What these return, allocate or check depends on values.
DEPENDS_ON_VALUES = {"masked.cumprod"}
EXCEPTIONS = {*OTHER_STRIDES, *DEPENDS_ON_VALUES}
SAMPLE = (
    *("addmm", "cat", "index_put", "linalg.inv", "logcumsumexp", "nn.functional.batch_norm", "nn.functional.ctc_loss"),
    "nn.functional.embedding",
)


def run(code: str, **options: Any) -> str:
    machine = {"gpus": 1, "compute": False, "memory": "80GiB", **options}
    begin = "import torch" if machine["compute"] else "import torch._dynamo"  # torch's shape rules import it
    return support.run(f"{begin}\n{textwrap.dedent(code)}", simulated_environment(**machine))


def measure(module: str, names: list[str], file: Path, compute: bool) -> dict[str, Any]:
    environment = simulated_environment({"PYTHONHASHSEED": "0"}, gpus=1, compute=compute)
    command = [sys.executable, "-m", f"tests.simulation.rehearsal.{module}", str(file), *names]
    subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=DEADLINE, check=True)
    return pickle.loads(file.read_bytes())


def differing(module: str, names: list[str], folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return what computing and rehearsed need, if it differs."""
    computed, rehearsed = (measure(module, names, folder / f"{compute}", compute) for compute in (True, False))
    return {name: (computed[name], rehearsed[name]) for name in computed if computed[name] != rehearsed[name]}


def test_size_limits_of_cudas_kernels() -> None:
    """The libraries have a check for each: a row whose text the installed torch lacks is not refused."""
    code = """
        import importlib
        import torch
        from torch.nn import functional as F
        texts = importlib.import_module("_accelerator_simulation._inside.ops.library_texts")
        large, int_max = 2**31 + 8, 2**31 - 1

        def empty(*shape, dtype=torch.float16):
            return torch.empty(shape, device="cuda", dtype=dtype)

        fits, gradient_fits = (f"{name} tensor must fit into 32-bit index math" for name in ("input", "output gradient"))
        gemm, bgemm = (f"at::cuda::blas::{name}<at::Half> argument" for name in ("gemm", "bgemm"))
        less = "must be non-negative and less than "
        rows = {
            "sort": (lambda: empty(large).sort(), "The dimension being sorted can not have more than INT_MAX elements."),
            "kthvalue": (
                lambda: empty(large).kthvalue(1),
                f"kthvalue(): dimension 0 is too large ({large}). The current CUDA implementation supports",
                "). The current CUDA implementation supports dimension sizes up to ",
            ),
            "unique": (lambda: empty(large).unique(), f"num_inp {large} is too big to for CUB", " is too big to for CUB"),
            "layer_norm": (
                lambda: F.layer_norm(empty(large, 1), (1,)),
                "M should be less than maximum CUDA grid size,   file a support request to support bigger batches",
            ),
            "layer_norm, backward": (
                lambda: F.layer_norm(empty(1, large).requires_grad_(), (large,)).backward(empty(1, large)),
                "Normalized shape should have less than INT_MAX elements,   file a support request to support bigger",
            ),
            "mm, m": (lambda: empty(large, 1) @ empty(1, 1), f"{gemm} n {less}{int_max} but got {large}", f"{gemm} n {less}"),
            "mm, n": (lambda: empty(1, 1) @ empty(1, large), f"{gemm} m {less}{int_max} but got {large}", f"{gemm} m {less}"),
            "mm, k": (lambda: empty(1, large) @ empty(large, 1), f"{gemm} k {less}{int_max} but got", f"{gemm} k {less}"),
            "bmm": (lambda: empty(1, large, 1) @ empty(1, 1, 1), f"{bgemm} n {less}{int_max} but got", f"{bgemm} n {less}"),
            "baddbmm": (
                lambda: empty(1, 1, 1).baddbmm(empty(1, large, 1), empty(1, 1, 1)),
                f"{bgemm} n {less}{int_max} but got",
                f"{bgemm} n {less}",
            ),
            "multinomial": (lambda: empty(2**24 + 1).multinomial(1), "number of categories cannot exceed 2^24"),
            "reflection_pad1d": (lambda: F.pad(empty(1, large), (1, 1), "reflect"), fits),
            "replication_pad2d": (lambda: F.pad(empty(1, 1, large), (1, 1, 1, 1), "replicate"), fits),
            "replication_pad2d, backward": (
                lambda: F.pad(empty(1, 2, 2**29).requires_grad_(), (0, 0, 2, 2), "replicate").backward(empty(1, 6, 2**29)),
                gradient_fits,
            ),
        }
        for name, (call, text, *library_text) in rows.items():
            literal = (library_text or [text])[0]
            if not any(texts.has_text(library, literal) for library in ("libtorch_cuda.so", "libtorch_cpu.so")):
                continue
            try:
                call()
            except RuntimeError as error:
                assert text in str(error), (name, str(error))
            else:
                raise AssertionError(name)
        empty(2**24).multinomial(1)
        empty(2**31 - 1).sort()
    """
    run(code, memory="200GiB")


def test_refused_numbers_and_names_of_kernels() -> None:
    code = """
        import torch
        for call, text in (
            (lambda: torch.ones(1000, device="cuda", dtype=torch.float16).clamp(-1e6, 1e6), ""),
            (lambda: torch.ones(1000, device="cuda", dtype=torch.int8).masked_fill(
                torch.ones(1000, device="cuda", dtype=torch.bool), 1000), "without overflow"),
            (lambda: torch.ones(1000, device="cuda", dtype=torch.complex64).ge(1), '"compare_cuda" not implemented'),
        ):
            try:
                call()
            except RuntimeError as error:
                assert text and text in str(error), str(error)
            else:
                assert not text, text
    """
    run(code)


def test_programs_need_what_computing_needs(tmp_path: Path) -> None:
    module = "tests.simulation.rehearsal.rehearsed_programs"
    program = f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    computed, rehearsed = (tmp_path / f"{compute}" for compute in (True, False))
    for imported, compute, file in (("torch", True, computed), ("torch._dynamo", False, rehearsed)):
        environment = simulated_environment(gpus=1, compute=compute)
        support.run(f"import {imported}\n{program}", environment, str(file), *SAMPLE_OF_PROGRAMS, timeout=DEADLINE)
    assert pickle.loads(rehearsed.read_bytes()) == pickle.loads(computed.read_bytes())


@pytest.mark.slow
def test_operators_allocate_what_computing_allocates(tmp_path: Path) -> None:
    assert differing("rehearsed_operators", [*SAMPLE], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_operator_allocates_what_computing_allocates(tmp_path: Path) -> None:
    import torch._meta_registrations

    exceptions = EXCEPTIONS if hasattr(torch._meta_registrations, "_sort_dims") else EXCEPTIONS | UNSORTED
    # The program of a jiterator operator is compiled at run time and has a name of its own in each process.
    names = {*differing("rehearsed_operators", [], tmp_path)}
    assert {name for name in names if not name.startswith("jiterator")} <= exceptions


SAMPLE_OF_PROGRAMS = ("language_scaler", "sparse_embedding", "selections")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_program_needs_what_computing_needs(tmp_path: Path) -> None:
    assert differing("rehearsed_programs", [], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_model_needs_what_computing_needs(tmp_path: Path) -> None:
    assert differing("rehearsed_models", [], tmp_path) == {}


# SyncBatchNorm selects the statistics of the ranks whose counts are not zero, and the counts are not computed.
EXCEPTIONS_OF_RANKS = {"synchronized_batch_norm"}
SAMPLE_OF_RANKS = ("sharded_sequence_parallel_checkpoints", "pipeline_1f1b", "experts_sharded")


@pytest.mark.slow
@pytest.mark.parametrize("names", [SAMPLE_OF_RANKS, pytest.param((), marks=pytest.mark.exhaustive)])
def test_ranks_together_need_what_computing_needs(names: tuple[str, ...], tmp_path: Path) -> None:
    figures: list[list[dict[str, Any]]] = []
    for compute in (True, False):
        folder = tmp_path / f"{compute}"
        folder.mkdir()
        state = str(folder / "state")
        environment = simulated_environment({"PYTHONHASHSEED": "0"}, gpus=4, memory="16GiB", compute=compute, state=state)
        command = [sys.executable, "-m", "tests.simulation.rehearsal.rehearsed_ranks", str(folder), *names]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        figures.append([pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(4)])
    computed, rehearsed = figures
    errors = {name: error for rank in (*computed, *rehearsed) for name, error in rank.items() if isinstance(error, str)}
    assert errors == {}
    different = {name for ranks in zip(*figures, strict=True) for name in ranks[0] if ranks[0][name] != ranks[1][name]}
    assert different <= EXCEPTIONS_OF_RANKS


def test_computing_takes_no_scratch_memory_from_the_device() -> None:
    run(
        """
        import ctypes
        import torch
        M_MMAP_THRESHOLD = -3
        # Memory that the CPU's kernel frees is unmapped, and its result is often mapped at the same address.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4096) == 1
        x, weight = (torch.randn(*size, device="cuda") for size in ((2, 16, 24, 24), (24, 16, 3, 3)))
        grad = torch.ones(2, 24, 24, 24, device="cuda")
        shape = [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        peaks = []
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.ops.aten.convolution_backward(grad, x, weight, *shape)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert len({*peaks}) == 1, peaks
        """,
        compute=True,
    )


def test_large_model_needs_no_host_memory() -> None:
    run("""
        import resource
        import torch
        model = torch.nn.Linear(65536, 32768, bias=False)  # 8 GiB, initialized on the CPU
        model = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4096, 65536, device="cuda")).sum().backward()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() > 40 * 2**30
        # In KiB. The peak of a forked process includes its parent's, which has imported torch.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20
        assert model.weight.cpu().shape == (32768, 65536)
        """)


def test_values() -> None:
    run(
        """
        import torch
        x = torch.arange(1000.0, device="cuda")
        assert (x + 1).max().item() == 0
        assert torch.full((3,), 7.0, device="cuda").tolist() == [7.0] * 3  # small fills are performed
        assert torch.tensor([1, 2]).cuda().clone().tolist() == [1, 2]  # and small copies
        assert x[x > 3].shape == (0,)  # a mask without values
        y = torch.ones(4, device="cuda")
        assert y.mul_(3) is y and y.tolist() == [3.0] * 4  # small tensors compute
        large = torch.ones(1000, device="cuda")
        assert large.mul_(3) is large and large.tolist() == [0.0] * 1000
        out = torch.empty(0, device="cuda")
        assert torch.add(y, y, out=out) is out and out.shape == (4,)
        assert torch.stack([y, y], out=out).shape == (2, 4)
        large = torch.empty(2**20, device="cuda")
        assert torch.ones(2**20).cuda().sum().item() == 0 and large.copy_(torch.ones(2**20))[0].item() == 0
        assert torch.rand(3)[0] > 0 and 0 < torch.rand(2**18)[-1] < 1 and torch.empty(2**20).normal_().shape == (2**20,)
        assert not torch.isnan(torch.log(y)).any().item()
        full = torch.full((4,), 7.0, device="cuda")
        assert torch.sin(x[:4], out=full) is full and full.tolist() == [0.0] * 4
        assert [part.shape for part in torch._foreach_add([y, out], 1)] == [(4,), (2, 4)]
        assert [part.device.index for part in torch._foreach_add([y, y.to("cuda:1")], 1)] == [0, 1]
        """,
        gpus=2,
    )


def test_values_up_to_exact_sizes() -> None:
    """Each tensor has the size up to which there are values, or one element more. Nobody has written its memory before."""
    run(
        """
        import torch
        def last(floats, integers, copied, more):
            floats, integers, copied, converted = floats + more, integers + more, copied + more, 256 + more
            def on_gpu(count, value):
                tensor = torch.zeros(count, device="cuda")
                tensor[-1:].fill_(value)
                return tensor
            source, on_host = torch.ones(copied), torch.zeros(copied)
            small = torch.ones(converted).cuda()  # a copy from the host, which is performed
            results = {
                "fill of floats": torch.full((floats,), 7.0, device="cuda"),
                "fill of integers": torch.full((integers,), 7, device="cuda"),
                "fill of a mask": torch.ones(8 * integers - 7 * more, dtype=torch.bool, device="cuda"),
                "range": torch.arange(1.0, floats + 1, device="cuda"),
                "random numbers": torch.rand(floats, device="cuda"),
                "op of floats": torch.ones(floats).cuda() + 1,
                "op in place": torch.ones(floats).cuda().add_(1) - 1,
                "ops of a list": torch._foreach_add([torch.ones(floats).cuda()], 1)[0],
                "op of integers": torch.arange(1, integers + 1, device="cuda") * 2,
                "copy from the host": source.cuda(),
                "copy within a GPU": torch.empty(copied, device="cuda").copy_(on_gpu(copied, 7)),
                "copy between GPUs": torch.empty(copied, device="cuda:1").copy_(on_gpu(copied, 7)),
                "copy to the host": on_host.copy_(on_gpu(copied, 7)),
                "copy to another type": small.half(),
            }
            kept.extend((results, source, small))
            return {name for name, tensor in results.items() if tensor[-1].item()}
        kept = []  # so that no memory is used twice
        found = last(128, 2**17, 2**18, 1)
        assert not found, found
        missing = {*kept[0]} - last(128, 2**17, 2**18, 0)
        assert not missing, missing
        """,
        gpus=2,
    )


# Calls of which several have arguments of the same types: floats (40, 50), integers (400, 500), and images.
CALLS = (
    *("x.sum(0)", "x.sum(1)", "x.sum(1, keepdim=True)", "x.sum(0, dtype=torch.float64)", "x.sum(0, dtype=torch.float16)"),
    *("x.sum()", "x.sum((0, 1))", "x[:, :40] * 2", "x[:, :40].t() * 2"),
    *("x.argmax(0)", "x.argmax(1)", "x.argmax(1, True)", "x.topk(2, 1)", "x.topk(3, 1)", "x.topk(3, 0)", "x.double().sum(0)"),
    *("torch.cat([x, x])", "torch.cat([x, x], 1)", "torch.cat([x, x, x])", "torch.stack([x, x])", "torch.stack([x, x], 2)"),
    *("i * 2", "i * 2.5", "i * 2j", "i > 2", "i / 2", "i.int() * 2", "x * 2", "x.half() * 2", "x.t() * 2", "x[:, :25] * 2"),
    *("x[:20] * 2", "x.to(torch.float64)", "x.to(torch.float16)", "x.expand(3, 40, 50) * 2", "torch.where(i > 0, 1, 0)"),
    *("torch.where(i > 0, 1.0, 0.0)", "torch.searchsorted(x[0], x, out_int32=True)", "torch.searchsorted(x[0], x, right=True)"),
    *("F.pad(x, (1, 2))", "F.pad(x, (0, 3))", "F.pad(x, (1, 2), value=3)", "x.repeat(2, 1)", "x.repeat(1, 2)"),
    *("F.conv2d(c, w)", "F.conv2d(c, w, stride=2)", "F.conv2d(c, w, padding=2)", "F.conv2d(c, w[:1])", "F.avg_pool2d(c, 2)"),
    *("F.avg_pool2d(c, 3)", "F.one_hot(i[0], 5)", "F.one_hot(i[0], 7)", "torch._foreach_add([x, i], 1)"),
    *("torch._foreach_add([x], 1)", "torch.empty(2, 3, 0, 5, device=x.device)"),
    "torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, device=x.device)",
    *("torch.empty_strided((2, 3), (1, 2), device=x.device)", "torch.empty(3, dtype=torch.int8, device=x.device)"),
)


def test_results_are_those_of_the_arguments_of_each_call() -> None:
    """Shapes that a call has are used again for later ones with such arguments. The CPU's results have the same."""
    run(
        f"""
        import torch
        import torch.nn.functional as F
        def describe(name, expression):
            x, i = torch.empty(40, 50, device=name), torch.zeros(400, 500, dtype=torch.int64, device=name)
            c, w = torch.empty(2, 3, 16, 16, device=name), torch.empty(4, 3, 3, 3, device=name)
            result = eval(expression, {{**globals(), **locals()}})
            tensors = result if isinstance(result, (tuple, list)) else (result,)
            assert {{str(tensor.device) for tensor in tensors}} == {{name}}, (expression, tensors)
            return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        of_integers = [expression for expression in {CALLS!r} if expression.startswith("i")]
        for default, expressions in ((torch.float32, {CALLS!r} * 2), (torch.float64, of_integers)):
            torch.set_default_dtype(default)
            for expression in expressions:
                expected = describe("cpu", expression)
                for name in ("cuda:0", "cuda:1", "cuda:0"):
                    assert describe(name, expression) == expected, (name, expression, describe(name, expression), expected)
        with torch.cuda.device(1):
            assert torch.empty(3, device="cuda").device.index == torch.ones(3, device="cuda").device.index == 1
            assert torch.empty(3, device="cuda:0").device.index == 0 and torch.cuda.current_device() == 1
        """,
        gpus=2,
    )


def test_random_fills_of_large_tensors_of_the_cpu_write_nothing() -> None:
    run("""
        import torch
        fills = (
            *("normal_()", "uniform_(1, 2)", "random_()", "random_(1000)", "random_(5, 9)", "bernoulli_(1.0)"),
            *("bernoulli_(torch.ones_like(t))", "cauchy_()", "exponential_()", "geometric_(0.5)", "log_normal_()"),
        )
        for fill in fills:
            for count, is_written in ((2**18, True), (2**18 + 1, False)):
                t = torch.zeros(count)
                assert eval(f"t.{fill}") is t and bool(t.any()) == is_written, (fill, count)
        """)


def test_small_integers_do_not_depend_on_earlier_values() -> None:
    run("""
        import torch
        def dirty():
            torch.full((1000,), 77, device="cuda")  # whose memory the next tensor of this size gets
        dirty()
        assert torch.arange(1000, device="cuda").tolist() == [*range(1000)]
        dirty()
        assert {*torch.randint(5, 8, (1000,), device="cuda").tolist()} == {5, 6, 7}
        dirty()
        assert sorted(torch.randperm(1000, device="cuda").tolist()) == [*range(1000)]
        dirty()
        ones = torch.ones(1000, dtype=torch.int32).cuda()
        dirty()
        assert ones.long().tolist() == [1] * 1000
        out = torch.full((1000,), 77, device="cuda")
        assert torch.add(ones, 1, out=out).sum().item() == 2000
        dirty()
        assert (torch.rand(1000, device="cuda") + 1 < 0).sum().item() == 0
        counter = torch.zeros((), dtype=torch.int64, device="cuda")
        assert counter.add_(1).item() == 1
        dirty()
        ids = torch.empty(1000, dtype=torch.int64, device="cuda")  # which a kernel that is not torch's writes on a GPU
        assert ids.tolist() == [0] * 1000
        """)


def test_small_integers_are_computed() -> None:
    run("""
        import torch
        lengths = torch.tensor([3, 5, 2]).cuda()
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        assert (lengths.max().item(), ends.tolist(), ends.diff().amax().item()) == (5, [0, 3, 8, 10], 5)
        assert lengths.prod().item() == 30 and torch.empty(int(lengths.sum()), device="cuda").shape == (10,)
        positions = torch.arange(1000, device="cuda")
        assert torch.nonzero(positions * 2).shape == (999, 1) and positions[positions > 3].shape == (996,)
        padding = torch.arange(6, device="cuda") >= lengths[:, None]
        assert padding.sum().item() == 8 and (~padding).nonzero().shape == (10, 2)
        assert (lengths // 2).tolist() == [1, 2, 1] and lengths.add_(1).tolist() == [4, 6, 3]
        assert lengths.sub_(lengths).tolist() == [0] * 3
        assert (1 // lengths).shape == (3,)  # nothing raises for a number that may have no value
        assert torch.ones(2**20, dtype=torch.int32, device="cuda").sum().item() == 0  # 4 MiB
        """)


def test_masks_of_floats_are_those_of_zeros() -> None:
    """Programs look for numbers that are not finite, and leave out the step if there are any."""
    run("""
        import torch
        for count in (1, 100, 1000, 2**21):
            x = torch.empty(count, device="cuda") + 1
            assert torch.isfinite(x).all().item() and not (~torch.isfinite(x)).any().item(), count
            norm = x.norm()
            assert not (~torch.isfinite(norm) | (norm < 0)).any().item()
            assert not torch.isnan(x).any().item() and not (x != x).any().item() and not torch.isinf(x).any().item()
        assert (torch.full((3,), 7.0, device="cuda") > 3).tolist() == [True] * 3  # a small fill has values
        x = torch.empty(1000, device="cuda") * 2
        assert x[x > 3].shape == (0,) and x[x >= 0].shape == (1000,) and (x == x[:, None]).all().item()
        assert torch.argmax(x[:3] + 1).item() == 0
        torch.full((1000,), 77, device="cuda")  # whose memory the next tensor of this size gets
        x = torch.empty(2000, device="cuda")
        assert (x[:1] == 0).item()
        assert torch.logical_not(x.to(torch.complex32)).all().item() and (x.to(torch.float8_e5m2) == 0).all().item()
        """)


def test_losses_of_sequences_of_any_length() -> None:
    run("""
        import torch
        torch.full((1000, 1000), 3e38, device="cuda")  # no valid index
        lengths = [torch.tensor(values, device="cuda") for values in ((50, 50, 50), (30, 25, 20))]
        for _ in range(3):
            logs = torch.randn(50, 3, 15, device="cuda", requires_grad=True)
            targets = torch.randint(1, 15, (75,), dtype=torch.int32, device="cuda")
            torch.nn.functional.ctc_loss(logs.log_softmax(2), targets, *lengths).backward()
        """)


# What a GPU refuses: expressions of floats, a mask, integers, and indices of which one is out of range.
REFUSED = {
    "logic of floats": "x | x",
    "difference of a mask": "1 - b",
    "difference of masks": "b - b",
    "divisor of floats": "torch.gcd(x, x)",
    "shift of floats": "x << 1",
    "floats in place of integers": "i.add_(x)",
    "floats into integers": "torch.sqrt(x, out=torch.empty(1000, dtype=torch.int64, device='cuda'))",
    "softmax of integers": "i.softmax(0)",
    "layer norm of integers": "F.layer_norm(i, (1000,))",
    "loss of integers": "F.mse_loss(i, i)",
    "linear of two types": "F.linear(x.view(10, 100).half(), x.view(10, 100))",
    "product of two types": "x.view(10, 100).half() @ x.view(100, 10)",
    "decomposition of half types": "torch.linalg.svd(x.view(10, 100).half())",
    "classes that are floats": "F.nll_loss(x.view(10, 100), x[:10])",
}
OUT_OF_RANGE = {
    "index_select": "x.index_select(0, wrong)",
    "index": "x[wrong]",
    "index_put": "x[wrong] = 1",
    "negative index": "x[-1001 + 0 * wrong]",
    "gather": "x.gather(0, wrong)",
    "scatter": "x.scatter(0, wrong, 1.0)",
    "index_add": "x.index_add(0, wrong, x[:3])",
    "take": "x.take(wrong)",
    "embedding": "F.embedding(wrong, x.view(10, 100))",
    "class": "F.cross_entropy(x.view(10, 100)[:3], wrong)",
    "scatter_add": "x.scatter_add(0, wrong, x[:3])",
    "scatter_reduce": "x.scatter_reduce(0, wrong, x[:3], 'sum')",
    "index_copy": "x.index_copy(0, wrong, x[:3])",
    "index_fill": "x.index_fill(0, wrong, 1)",
    "index_reduce": "x.index_reduce(0, wrong, x[:3], 'mean')",
    "put": "x.put(wrong, x[:3])",
    "negative index of all": "x.take(-1001 + 0 * wrong)",
    "index of columns": "x.view(10, 100)[0 * wrong, wrong]",
    "as many as there are": "x[1000 + 0 * wrong]",
    "class of pixels": "F.nll_loss(x[:960].view(1, 10, 8, 12), wrong[:2].view(1, 1, 2).expand(1, 8, 2).repeat(1, 1, 6))",
}


@pytest.mark.parametrize("compute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_gpu_refuses_is_refused(compute: bool) -> None:
    """Where ops compute, an index out of range is a device-side assertion, whose error comes later."""
    run(
        f"""
        import torch
        import torch.nn.functional as F
        x = torch.randn(1000, device="cuda")
        b, i, wrong = x > 0, x.long(), torch.tensor([0, 2000, 3]).cuda()
        for name, code in {REFUSED if compute else {**REFUSED, **OUT_OF_RANGE}!r}.items():
            try:
                exec(code)
            except (RuntimeError, TypeError, IndexError):
                continue
            raise AssertionError(name)
        # These have indices in range.
        x[torch.tensor([-1000, 999]).cuda()], F.nll_loss(x.view(10, 100), torch.full((10,), -100, device="cuda"))
        x.take(torch.tensor([-1000, 999]).cuda()), x.view(10, 100)[:, torch.tensor([-100, 99]).cuda()]
        x.view(10, 100).index_select(1, torch.tensor([0, 99]).cuda())
        F.embedding(torch.tensor([0, 9]).cuda(), x.view(10, 100)), F.cross_entropy(x.view(10, 100)[:1], wrong[:1] + 99)
        """,
        compute=compute,
    )


def test_numbers_on_the_host_are_taken() -> None:
    from tests.simulation.ops.test_host_arguments_simulated import REFUSED as REFUSED_NUMBERS
    from tests.simulation.ops.test_host_arguments_simulated import TAKEN

    run(f"""
        import pytest
        import torch
        from tests.simulation.ops.test_host_arguments_simulated import REFUSED, TAKEN
        x, number = torch.empty(1000, device="cuda")[:3], torch.tensor(1.0)
        for name in {[*TAKEN]!r}:
            assert TAKEN[name](x, number).shape == (3,), name
        for name in {[*REFUSED_NUMBERS]!r}:
            REFUSED[name](x, number.cuda())
            with pytest.raises(RuntimeError, match="same device"):
                REFUSED[name](x, number)
        """)


# Calls with out= tensors without elements, of a transposed tensor of floats, images whose channels are last, and a square.
WITHOUT_ELEMENTS = {
    "sum of two": "torch.add(x, 1, out=out)",
    "function": "torch.sin(x, out=out)",
    "images": "torch.mul(c, c, out=out)",
    "comparison": "torch.eq(x, x, out=out.bool())",
    "where": "torch.where(x > 0, x, x, out=out)",
    "concatenation of images": "torch.cat([c, c], 1, out=out)",
    "reduction": "torch.sum(c, 1, out=out)",
    "product": "torch.mm(x, x.t(), out=out)",
    "sort": "torch.sort(x, 0, out=(out, out.long()))",
    "pool": "torch.ops.aten.max_pool2d_with_indices.out(c, [2, 2], out=out, indices=out.long())",
    "loss": "torch.ops.aten.mse_loss.out(x, x, 0, out=out)",
    "without a shape rule": "torch.logcumsumexp(x, 0, out=out)",
    "nonzero": "torch.nonzero(square, out=out.long())",
    "selection": "torch.masked_select(square, square > 0, out=out)",
    "index": "torch.ops.aten.index.Tensor_out(square, [square[0] > 0], out=out)",
}


def test_results_of_equal_shapes_have_the_strides_of_their_arguments() -> None:
    program = """
        import torch
        x = torch.empty(4, 6, device="cuda")
        y = torch.empty(6, 4, device="cuda").t()
        print([value.exp().stride() for value in (x, y, x)], [(value @ value.t()).stride() for value in (x, y)])
    """
    assert run(program).strip() == "[(6, 1), (1, 4), (6, 1)] [(4, 1), (4, 1)]"


def test_out_arguments_get_the_strides_of_computing() -> None:
    code = f"""
        import torch
        x, c = torch.randn(40, 50).cuda().t(), torch.randn(8, 4, 6, 10).cuda().contiguous(memory_format=torch.channels_last)
        square = torch.eye(3).cuda()
        for name, expression in {WITHOUT_ELEMENTS!r}.items():
            out = torch.empty(0, device="cuda")
            result = eval(expression)
            tensors = result if isinstance(result, tuple) else (result,)
            print(name, [(tuple(tensor.shape), tensor.stride()) for tensor in tensors])
    """
    assert run(code) == run(code, compute=True)


# Ops whose shape rules are the simulation's own: expressions of floats (100, 10), images, and scales of each kind.
OWN_RULES = {
    "fake quantization": "A._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, s, z.int(), s.long() + 1, 0, 255)",
    "fake quantization by numbers": "A.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, 0, 255)",
    "fake quantization of channels": "A.fake_quantize_per_channel_affine_cachemask(x, c, c, 1, 0, 255)",
    "learned quantization": "A._fake_quantize_learnable_per_tensor_affine(x, s, z, 0, 255, 1.0)",
    "learned quantization, backward": "A._fake_quantize_learnable_per_tensor_affine_backward(x, x, s, z, 0, 255, 1.0)",
    "learned quantization of channels": "A._fake_quantize_learnable_per_channel_affine(x, c, c, 1, 0, 255, 1.0)",
    "learned quantization of channels, backward": "A._fake_quantize_learnable_per_channel_affine_backward("
    "x, x, c, c, 1, 0, 255, 1.0)",
    "statistics": "A.batch_norm_update_stats(images, c[:4], c[:4], 0.1)",
    "masked softmax": "A._masked_softmax(x, x > 0, 1, None)",
    "gated units, forward mode": "A.glu_jvp(x[:, :5], x, x, 1)",
    "Dirichlet": "A._sample_dirichlet(x.abs() + 0.1)",
    "Dirichlet, backward": "A._dirichlet_grad(x.abs(), x.abs(), x.abs())",
    "gamma, backward": "A._standard_gamma_grad(x.abs(), x.abs())",
    "binomial": "A.binomial(x.abs().ceil(), x.sigmoid())",
    "convolution": "A._slow_conv2d_forward(images, weight, [3, 3], None, [1, 1], [0, 0])",
    "dilated convolution": "A.slow_conv_dilated2d(images, weight, [3, 3], None, [1, 1], [0, 0], [2, 2])",
    "transposed convolution": "A.slow_conv_transpose3d(images[None], weight[:2, :3, None].contiguous(), [1, 3, 3])",
    "jagged rows": "A._padded_dense_to_jagged_forward(images[0], [torch.tensor([0, 4, 8, 10, 16], device='cuda')], 16)",
    "queries, keys and values": "A._transform_bias_rescale_qkv(images[0, :, :, :12], x[0].new_zeros(12), 2)",
    "compressed weights": "A._cslt_compress(images.half().view(64, 32).contiguous())",
    "packed weights": "A._convert_weight_to_int4pack(torch.zeros(64, 32, dtype=torch.uint8, device='cuda'), 2)",
    "product of packed weights": "A._weight_int4pack_mm(images.bfloat16().view(32, 64), torch.zeros(8, 2, 32, 1,"
    " dtype=torch.int32, device='cuda'), 32, torch.ones(2, 64, 2, dtype=torch.bfloat16, device='cuda'))",
}


@pytest.mark.slow
def test_own_shape_rules_are_those_of_computing() -> None:
    code = f"""
        import torch
        A = torch.ops.aten
        x, c, s = torch.randn(100, 10).cuda(), torch.full((10,), 0.1).cuda(), torch.full((1,), 0.1).cuda()
        z = torch.zeros_like(s)
        images, weight = torch.randn(2, 4, 16, 16).cuda(), torch.randn(3, 4, 3, 3).cuda()
        for name, expression in {OWN_RULES!r}.items():
            result = eval(expression)
            tensors = result if isinstance(result, tuple) else (result,)
            print(name, [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors])
    """
    assert run(code) == run(code, compute=True)


def test_lazily_conjugated_tensors_are_copied() -> None:
    run("""
        import torch
        x = torch.tensor([1 + 2j, 3 - 4j]).cuda()
        assert x.conj().clone().tolist() == x.conj().cpu().tolist() == [1 - 2j, 3 + 4j]
        assert torch.empty_like(x).copy_(x.conj()).imag.neg().clone().tolist() == [2, -4]
        """)


def test_sparse_gradients_of_embedding_bags() -> None:
    run("""
        import torch
        bags = torch.nn.EmbeddingBag(1000, 64, sparse=True).cuda()
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)
        for _ in range(2):
            bags(torch.randint(1000, (500,), device="cuda"), torch.arange(0, 500, 50, device="cuda")).sum().backward()
            optimizer.step()
        assert bags.weight.grad.is_sparse
        """)


def test_errors_are_those_of_computing() -> None:
    run("""
        import pytest
        import torch
        x = torch.ones(3, 4, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, 4)
        with pytest.raises(RuntimeError, match="reduction dim|multiplied"):
            x @ x
        with pytest.raises(RuntimeError, match="broadcast|must match the size"):
            x.add_(torch.ones(5, device="cuda"))
        with pytest.raises(RuntimeError, match="expanded size"):
            x.copy_(torch.ones(5))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**36, device="cuda")
        """)


# Expressions of a tensor of floats, one of integers and one of bfloat16: each is the first op of a process.
FIRST_OPS = {
    "true division": "i / 2",
    "addition": "x + x",
    "comparison": "x > 0",
    "sum": "x.sum()",
    "argmax": "x.argmax(-1)",
    "product of matrices": "x @ x",
    "linear": "torch.nn.functional.linear(h, h, h[0])",
    "convolution": "torch.nn.functional.conv2d(x.view(1, 1, 64, 64), x[:3, :3].view(1, 1, 3, 3))",
    "softmax": "h.softmax(-1)",
    "layer norm": "torch.nn.functional.layer_norm(h, (64,))",
    "attention": "torch.nn.functional.scaled_dot_product_attention(*[h.view(1, 2, 32, 64)] * 3)",
    "embedding": "torch.nn.functional.embedding(i, x)",
    "cross entropy": "torch.nn.functional.cross_entropy(x, i)",
    "sort": "x.sort()",
    "index": "x[i]",
    "mask": "x[x > 0]",
    "concatenation": "torch.cat([x, x])",
    "random numbers": "torch.nn.functional.dropout(x)",
    "list": "torch._foreach_addcdiv([x], [x], [x])",
    "fused optimizer": "torch._fused_sgd_([x], [x], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False,"
    " maximize=False, is_first_step=True)",
    "recurrent net": "torch.nn.GRU(64, 64).cuda()(x)",
    "Fourier transform": "torch.fft.fft(x)",
    "linear algebra": "torch.linalg.cholesky(x)",
    "upsampling": "torch.nn.functional.interpolate(x.view(1, 1, 64, 64), scale_factor=2, mode='bilinear')",
    "complex": "torch.complex(x, x).abs()",
    "autocast": "torch.autocast('cuda', torch.bfloat16).__enter__() and None or x @ x",
    "type": "h.to(torch.float64)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_OPS)
def test_any_op_may_be_the_first(name: str) -> None:
    """torch's shape rules import what they need at the first call, in the middle of a kernel."""
    code = f"""
        import torch
        import sys
        assert "torch._dynamo" not in sys.modules
        x, h = torch.empty(64, 64, device="cuda"), torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
        i = torch.empty(64, dtype=torch.int64, device="cuda")
        {FIRST_OPS[name]}
    """
    support.run(code, simulated_environment(gpus=1, compute=False))


def test_op_without_a_shape_rule_raises() -> None:
    run("""
        import pytest
        import torch
        from _accelerator_simulation._inside.rehearsal import plans
        plans.SHAPE_RULES.clear()
        with pytest.raises(NotImplementedError, match="aten::_logcumsumexp cannot be rehearsed: torch has no shape rule"):
            torch.logcumsumexp(torch.ones(3, device="cuda"), 0)
        """)


def test_captured_graph_allocates_only_when_it_is_captured() -> None:
    run("""
        import torch
        x = torch.ones(1024, 1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x @ x).relu() + 1
        before = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert y.shape == (1024, 1024)
        assert (torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) == before
        """)


def test_convolutions_keep_the_channels_last() -> None:
    run("""
        import torch
        from torch.nn import functional as F
        image, volume = torch.channels_last, torch.channels_last_3d
        contiguous = torch.contiguous_format
        for convolve, sizes, options, last in (
            (F.conv2d, ((2, 8, 16, 16), (8, 8, 3, 3)), {}, image),
            (F.conv2d, ((2, 8, 16, 16), (8, 2, 3, 3)), {"groups": 4}, image),
            (F.conv_transpose2d, ((2, 8, 16, 16), (8, 8, 3, 3)), {}, image),
            (F.conv3d, ((2, 8, 8, 8, 8), (8, 8, 3, 3, 3)), {}, volume),
        ):
            for formats in ((last, contiguous), (contiguous, last), (contiguous, contiguous)):
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    x, weight = (
                        torch.zeros(size, dtype=dtype, device="cuda").contiguous(memory_format=format).requires_grad_()
                        for size, format in zip(sizes, formats)
                    )
                    output = convolve(x, weight, **options)
                    is_last = last in formats and dtype is not torch.float64
                    expected = last if is_last else contiguous
                    gradients = torch.autograd.grad(output, (x, weight), torch.zeros_like(output))
                    if is_last or dtype is not torch.float64:
                        assert all(t.is_contiguous(memory_format=expected) for t in (output, *gradients)), (formats, dtype)
                    else:
                        assert output.is_contiguous(), (formats, dtype)
        """)


def test_a_gradient_in_channels_last_leaves_the_layout_of_a_contiguous_convolution() -> None:
    """The patches of a vision transformer: the result is viewed as rows of channels, and so is its gradient."""
    run("""
        import torch
        x, weight = torch.zeros(2, 3, 32, 32).cuda().requires_grad_(), torch.zeros(8, 3, 16, 16).cuda().requires_grad_()
        output = torch.nn.functional.conv2d(x, weight, stride=16)
        gradient = torch.zeros_like(output, memory_format=torch.channels_last)
        assert all(t.is_contiguous() for t in torch.autograd.grad(output, (x, weight), gradient))
        """)


KERNEL_MEMORY = """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    def added(backward):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autograd.set_multithreading_enabled(False):
            backward()
        return torch.cuda.max_memory_allocated() - before
    for size, rounded in ((64, 64), (192, 192), (200, 256)):
        q, k, v = (torch.zeros(2, n, 200, size, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (8, 4, 4))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gradients = 2 * 200 * size * 2 * (8 + 4 + 4)
        softmax_d, dq_accum, expanded = 2 * 8 * 256 * 4, 2 * 256 * 8 * rounded * 4, 2 * 2 * 200 * 8 * size * 2
        grad = torch.zeros_like(output)
        taken = added(lambda: torch.autograd.grad(output, (q, k, v), grad))
        assert taken >= gradients + softmax_d + dq_accum + expanded, (taken, gradients + softmax_d + dq_accum + expanded)
        assert taken < gradients + softmax_d + dq_accum + expanded + 2**16
    for count, extra in ((3072, 0), (5000, 3 * 5000 * 8 + 2 * 100 * 8 + 600 * 8 + 600 * 32 * 4)):
        weight = torch.zeros(100, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        output = F.embedding(torch.zeros(count, dtype=torch.int64, device="cuda"), weight)
        grad = torch.zeros_like(output)
        taken = added(lambda: torch.autograd.grad(output, weight, grad)) - 100 * 32 * 2
        assert extra <= taken < extra + 2**13, (taken, extra)

    def check(name, function, results, extra):
        taken = added(function)
        assert results + extra <= taken < results + extra + 2**13, (name, taken, results, extra)

    q, k, v = (torch.zeros(2, 8, 256, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(q, k, v)
    grad = torch.zeros_like(output)
    check("cudnn", lambda: torch.autograd.grad(output, (q, k, v), grad), 3 * q.nbytes, 2 * 8 * 256 * (64 + 1) * 4)
    for rows, length, extra in (
        (3, 4096, 0),
        (1, 8192, 8192 * (8 + 4 + 8)),
        (16, 8192, 16 * 8192 * (2 * 8 + 4 + 4 + 8)),
        (128, 8192, 128 * 8192 * (8 + 4 + 8)),
    ):
        x = torch.zeros(rows, length, device="cuda")
        check(f"sort {rows}", lambda: x.sort(-1), x.numel() * (4 + 8), extra)
    out = torch.zeros(128, 8192, device="cuda"), torch.zeros(128, 8192, dtype=torch.int64, device="cuda")
    check("sort to out", lambda: torch.sort(x, dim=-1, stable=True, out=out), 0, extra)
    x = torch.zeros(8192, 200, device="cuda")
    check("sort of columns", lambda: x.sort(0), x.numel() * (4 + 8), x.numel() * ((4 + 4 + 8) + (8 + 4 + 8)))
    x, y = torch.zeros(64, 16, device="cuda", requires_grad=True), torch.zeros(32, 16, device="cuda")
    output = torch.cdist(x, y, p=1.0)
    grad = torch.zeros_like(output)
    check("cdist", lambda: torch.autograd.grad(output, x, grad), x.nbytes, 32 * x.nbytes)
    output = F.pdist(x)
    grad = torch.zeros_like(output)
    check("pdist", lambda: torch.autograd.grad(output, x, grad), x.nbytes, 63 * x.nbytes)
    bag = torch.zeros(100, 32, device="cuda", requires_grad=True)
    output = F.embedding_bag(torch.zeros(500, 10, dtype=torch.int64, device="cuda"), bag, mode="sum")
    grad = torch.zeros_like(output)
    extra = 3 * 5000 * 8 + 2 * 100 * 8 + 600 * 8 + 600 * 32 * 4
    check("bag", lambda: torch.autograd.grad(output, bag, grad), bag.nbytes, extra)
    indices = torch.zeros(5000, dtype=torch.int64, device="cuda")
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    dense = torch.ops.aten._embedding_bag_dense_backward
    bags = torch.zeros(500, dtype=torch.int64, device="cuda")
    of_bags = bags.repeat(10)
    check("dense bag", lambda: dense(grad, indices, of_bags, bags, none, 100, False, 0, None), bag.nbytes, extra)
    x, on_host = torch.zeros(1024, 1024, device="cuda"), torch.zeros(1024, 1024, dtype=torch.float64)
    check("copy to another type", lambda: on_host.copy_(x), 0, 0)
    check("copy to another type later", lambda: on_host.copy_(x, non_blocking=True), 0, on_host.nbytes)
    check("copy of columns", lambda: on_host.copy_(x.t()), 0, x.nbytes)
    check("copy to columns", lambda: x.t().copy_(on_host), 0, x.nbytes)
    check("copy", lambda: x.copy_(on_host.float()), 0, 0)
    for place in ("cpu", "cuda"):
        lengths = torch.full((4,), 50, device=place), torch.full((4,), 20, device=place)
        x = torch.zeros(50, 4, 16, device="cuda", requires_grad=True)
        output = F.ctc_loss(x, torch.ones(4, 20, dtype=torch.int64, device="cuda"), *lengths, reduction="none")
        grad = torch.zeros_like(output)
        check("ctc", lambda: torch.autograd.grad(output, x, grad), x.nbytes, 4 * 50 * 41 * 4)
    q, k, v = (torch.zeros(300, n, 64, dtype=torch.bfloat16, device="cuda") for n in (8, 4, 4))
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    softmax = torch.zeros(8, 300, device="cuda")
    state = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.zeros((), dtype=torch.uint64, device="cuda")
    packed = torch.ops.aten._flash_attention_backward
    run = lambda: packed(q, q, k, v, q, softmax, ends, ends, 200, 200, 0.0, True, *state)
    extra = 2 * 8 * 256 * 4 + (300 + 128 * 2) * 8 * 64 * 4 + 2 * 300 * 8 * 64 * 2
    check("packed flash", run, q.nbytes + k.nbytes + v.nbytes, extra)

    def check_held(name, function, held, extra):
        for _ in range(3):  # the engine handles later calls
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autograd.set_multithreading_enabled(False):
                results = function()
            taken = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
            assert held <= taken[0] <= held + 2**11, (name, taken, held)
            assert held + extra <= taken[1] <= held + extra + 2**11, (name, taken, held + extra)
            del results

    x, y = torch.zeros(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda")
    for loss, held, extra in (
        (F.mse_loss, x.nbytes, x.nbytes),
        (F.smooth_l1_loss, x.nbytes, x.nbytes),
        (F.binary_cross_entropy, x.nbytes, 0),
        (F.huber_loss, 0, x.nbytes),
        (F.soft_margin_loss, x.nbytes, 0),
    ):
        for reduction in ("mean", "sum"):
            check_held(loss.__name__, lambda: loss(x, y, reduction=reduction), held, extra)
        check_held(loss.__name__, lambda: loss(x, y, reduction="none"), x.nbytes, 0)
        check_held(loss.__name__, lambda: loss(x[:8], y[:8]), 8 * 512 * 4 if held else 0, 0)  # few elements
    for rows, columns, blocks in ((1024, 1024, 16), (4096, 3072, 64), (1000, 1003, 0), (1024, 127, 0)):
        x = torch.zeros(rows, columns, device="cuda")
        partial = 4 * columns * blocks * 32 * 4
        for function, outputs, extra in (
            (lambda: x.sum(0), columns, partial),
            (lambda: x.mean(0), columns, partial),
            (lambda: x.norm(dim=0), columns, partial),
            (lambda: x.amax(0), columns, partial),
            (lambda: x.var(0), columns, 4 * partial),
            (lambda: x.t().sum(1), columns, partial),
            (lambda: x.view(rows // 2, 2, columns).sum((0, 1)), columns, partial),
            (lambda: x.sum(1), rows, 0),
            (lambda: x.sum(), 1, 0),
        ):
            check_held(f"reduction {rows}", function, 4 * outputs, extra)
    x = torch.zeros(1024, 1024, device="cuda")
    mask, half = torch.zeros(1024, 1024, dtype=torch.bool, device="cuda"), torch.zeros_like(x, dtype=torch.bfloat16)
    check_held("sum of a mask", lambda: mask.sum(), 0, 8 * mask.numel())
    check_held("sum of a mask's columns", lambda: mask.sum(0), 2**13, 8 * mask.numel() + 2**24)
    check_held("sum in another type", lambda: x.sum(0, dtype=torch.float64), 2**13, 8 * x.numel() + 2**24)
    check_held("sum of halves", lambda: half.sum(0, dtype=torch.float32), 2**12, 2**23)
    check_held("count", lambda: x.count_nonzero(), 0, 9 * x.numel())
    check_held("any", lambda: mask.any(0), 2**10, 2**21)
    layer = torch.nn.Linear(16, 1024, device="cuda")
    output, grad = layer(torch.zeros(1024, 16, device="cuda")), torch.zeros(1024, 1024, device="cuda")
    run = lambda: torch.autograd.grad(output, layer.bias, grad, retain_graph=True)
    check_held("bias of a linear layer", run, 2**12, 2**23)
    for bias in (True, False):
        layer = torch.nn.Conv2d(8, 256, 1, bias=bias, device="cuda").to(memory_format=torch.channels_last)
        output = layer(torch.zeros(4, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last))
        grad = torch.zeros_like(output)
        run = lambda: torch.autograd.grad(output, list(layer.parameters()), grad, retain_graph=True)
        check_held("bias of a convolution", run, layer.weight.nbytes, bias * 2**23)
    for function, extra in ((F.softmax, x.nbytes), (F.log_softmax, 0)):
        output = function(x.requires_grad_(), -1)
        run = lambda: torch.autograd.grad(output, x, grad, retain_graph=True)
        grad = torch.zeros_like(output)
        check_held("softmax", run, x.nbytes, extra)
    x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    check_held("logsigmoid", lambda: F.logsigmoid(x), x.nbytes, 0)
    output = F.logsigmoid(x)
    check_held("logsigmoid", lambda: torch.autograd.grad(output, x, output, retain_graph=True), x.nbytes, 0)
    x, few = torch.zeros(1024, 1024, device="cuda"), torch.zeros(100, device="cuda")
    for function, held, extra in (
        (lambda: x.median(), 0, x.numel() * ((4 + 8) + 8 + (4 + 8))),
        (lambda: x.nanmedian(), 0, x.numel() * ((4 + 8) + 8 + (4 + 8))),
        (lambda: few.median(), 0, 0),
        (lambda: x.mode(0), 2**10 * (4 + 8), x.nbytes),
        (lambda: x.mode(1), 2**10 * (4 + 8), 0),
        (lambda: x.topk(4, 1, sorted=False), 2**12 * (4 + 8), 2**10 * (4 + 8 + 8 + 4 + 512 + 1024 + 4 + 4)),
        (lambda: x[:, :200].topk(4, 1, sorted=False), 2**12 * (4 + 8), 0),
        (lambda: torch.multinomial(x.fill_(1), 1), 2**10 * 8, x.nbytes),
    ):
        check_held("selection", function, held, extra)
    table = torch.zeros(100, 64, device="cuda", requires_grad=True)
    output = table[torch.zeros(4096, dtype=torch.int64, device="cuda")]
    grad = torch.zeros_like(output)
    run = lambda: torch.autograd.grad(output, table, grad, retain_graph=True)
    check_held("index", run, table.nbytes, 4096 * 48)
    x = torch.zeros(2, 16, 32, 32, device="cuda", requires_grad=True)
    columns, folded = F.unfold(x, 3), 16 * 9 * 30 * 30 * 2 * 4
    check_held("unfold", lambda: F.unfold(x, 3), folded, x.nbytes)
    grad = torch.zeros_like(columns)
    check_held("unfold", lambda: torch.autograd.grad(columns, x, grad, retain_graph=True), folded, 0)
    check_held("fold", lambda: F.fold(grad, 32, 3), folded, 0)
    sizes = torch.zeros(4, 64, 64, 64, device="cuda"), torch.zeros(4, 64, 64, 64, device="cuda")
    for x in sizes[0], sizes[1].contiguous(memory_format=torch.channels_last):
        copies = not x.is_contiguous()
        x.requires_grad_()
        pooled, bytes = 4 * 64 * 4 * 4, x.nbytes
        for function, results, held, extra in (
            (lambda: F.adaptive_max_pool2d(x, 4, return_indices=True), 12 * pooled, bytes, 12 * pooled),
            (lambda: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), bytes // 4, 0, bytes // 4),
            (lambda: F.interpolate(x, scale_factor=2, mode="bicubic"), 4 * bytes, 0, 4 * bytes),
        ):
            forward = 0 if held == 0 and results > bytes else copies * (bytes + results)
            check_held("layout", function, results, forward)
            output = function()
            output = output[0] if isinstance(output, tuple) else output
            grad = torch.zeros_like(output)
            run = lambda: torch.autograd.grad(output, x, grad, retain_graph=True)
            check_held("layout", run, bytes, copies * (held + extra))
    numbers = torch.zeros(2**18, dtype=torch.int64, device="cuda")
    check_held("unique", lambda: numbers.unique(), numbers.nbytes, numbers.nbytes)
    of_all = {"return_inverse": True, "return_counts": True}
    check_held("unique", lambda: numbers.unique(**of_all), 3 * numbers.nbytes, 4 * numbers.nbytes)
    check_held("unique", lambda: numbers.bool().unique(), 0, numbers.numel())
    check_held("runs", lambda: numbers.unique_consecutive(return_counts=True), 2 * numbers.nbytes, 0)
"""


@pytest.mark.parametrize("compute", [pytest.param(True, marks=pytest.mark.slow), False])
def test_kernels_take_memory_while_they_run(compute: bool) -> None:
    run(KERNEL_MEMORY, compute=compute)


def test_kernels_take_memory_of_the_device_of_their_arguments() -> None:
    run(
        """
        import torch
        x, on_host = torch.zeros(1024, 1024, device="cuda:1"), torch.zeros(1024, 1024)
        for function, extra in (
            (lambda: x.sum(0), 2**12 + 2**23),
            (lambda: x.median(), 512 + 2**20 * (4 + 8 + 8 + 4 + 8)),
            (lambda: on_host.copy_(x.t()), 2**22),
        ):
            before = torch.cuda.memory_allocated(1)
            torch.cuda.reset_peak_memory_stats(1)
            function()
            taken = torch.cuda.max_memory_allocated(1) - before
            assert extra <= taken <= extra + 2**12, (taken, extra)
        assert torch.cuda.max_memory_allocated(0) == 0 and torch.cuda.current_device() == 0
        """,
        gpus=2,
    )


def test_variables_of_programs_without_ptx_have_memory() -> None:
    run("""
        import ctypes
        import torch
        from tests.simulation.extensions.binaries import Binary
        from tests.simulation.extensions.fat_binaries import CODE, Entry
        torch.cuda.init()
        binary = Binary(Entry(90, kind=CODE))
        variable, runtime = binary.variable("table", 256), binary.runtime
        size, address = ctypes.c_size_t(), ctypes.c_void_p()
        sent, received = ctypes.create_string_buffer(b"values"), ctypes.create_string_buffer(7)
        part = ctypes.c_size_t(7), ctypes.c_size_t(16)
        assert runtime.cudaGetSymbolSize(ctypes.byref(size), variable) == 0 and size.value == 256
        assert runtime.cudaGetSymbolAddress(ctypes.byref(address), variable) == 0 and address.value
        assert runtime.cudaMemcpyToSymbol(variable, sent, *part, 1) == 0
        assert runtime.cudaMemcpyFromSymbol(received, variable, *part, 2) == 0 and received.value == b"values"
        """)


@pytest.mark.slow
@pytest.mark.simulated_machine(1, memory="24GiB", compute=False)
def test_mark_gives_a_test_such_a_machine() -> None:
    import torch

    model = torch.nn.Linear(32768, 32768, bias=False, device="cuda")  # 4 GiB
    model(torch.empty(16, 32768, device="cuda")).sum().backward()
    assert 8 * 2**30 <= torch.cuda.max_memory_allocated() < 9 * 2**30
    assert (model.weight + 1).count_nonzero().item() == 0


@pytest.mark.slow
def test_dynamo_does_not_trace_the_simulation() -> None:
    """Dynamo looks at all code that runs below a function that it does not trace, such as a loop with a graph break."""
    program = """
        import torch
        @torch.compile(backend="eager")
        def function(x):
            for _ in range(2):
                x = x * 2 + torch.rand(8, device="cuda")
                torch._dynamo.graph_break()
            return x
        function(torch.ones(8, device="cuda"))
        print(torch._dynamo.utils.counters["frames"]["total"])
    """
    assert int(run(program)) < 20  # the function, what Dynamo resumes after graph breaks, and little of torch


@pytest.mark.slow
def test_compiled_code_allocates_as_inductor_plans(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = """
        import torch
        def function(x):
            y = (x * 2).exp()
            z = (x + 1).tanh()
            return (y + z) @ x
        x = torch.empty(2048, 2048, device="cuda")
        for compiled, buffers in ((function, 4), (torch.compile(function), 2)):
            peaks = []
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                compiled(x)
                peaks.append(torch.cuda.max_memory_allocated() - before)
            tuning, taken = peaks
            assert taken == buffers * x.nbytes, taken / x.nbytes
            assert compiled is function or tuning > taken, "the first call tunes the kernels, which takes memory"
    """
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    support.run(f"if True:\n{program}", simulated_environment(caches, gpus=1, compute=False), timeout=240)
    assert not [*tmp_path.rglob("*.cubin"), *tmp_path.rglob("*.best_config")], "kernels were compiled, or tuned for later"
