"""Ops on two simulated GPUs return the CPU's results and raise CUDA's errors."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support import sample
from tests.support.simulation_driver import end_invalidated_capture, loaded_runtime, make_busy


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture(autouse=True, scope="module")
def _call_once() -> None:
    """Call some ops once, because the tests are about the fast path and an op's first call does not take it."""
    x = torch.ones(2, 2, device="cuda")
    for op in (torch.add, torch.mul, torch.mm, torch.cumsum):
        op(x, x if op is not torch.cumsum else 0)
    x.add_(x).exp()
    x.max(0)


def both(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Assert that a function and its gradients have the same results on both devices."""
    results = []
    for device in ("cpu", "cuda"):
        inputs = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*inputs)
        gradients = torch.autograd.grad(result.sum(), [t for t in inputs if t.requires_grad]) if result.requires_grad else ()
        assert result.device.type == device
        results.append([result.detach().cpu(), *(g.cpu() for g in gradients)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here)
        assert there.stride() == here.stride()


def ops_that_take_scalars() -> list[tuple[Any, list[bool]]]:
    """Return overloads that take numbers where another overload takes tensors, and which arguments are numbers."""
    overloads = []
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        types = [str(a.type) for a in schema.arguments if not a.has_default_value()]
        # CUDA does not support _add_relu.
        if name == schema.name or name.startswith("_add_relu") or {*types} != {"Tensor", "number"}:
            continue
        names = [a.name for a in schema.arguments]
        for overload in torch._C._jit_get_operation(schema.name)[1]:
            other = torch._C._get_schema(schema.name, overload).arguments
            if [a.name for a in other] == names and {str(a.type) for a in other[: len(types)]} == {"Tensor"}:
                op = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
                overloads.append((op, [type_name == "number" for type_name in types]))
                break
    return overloads


def outcome(op: Any, values: list[Any], device: str) -> Any:
    """Return the op's result with its type, or the type of its error."""
    try:
        result = op(*(v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for v in values))
    except RuntimeError:
        return RuntimeError
    return (result.dtype, result.nan_to_num().tolist()) if isinstance(result, torch.Tensor) else result


class TestArguments:
    @pytest.mark.parametrize("scalar", [97, 2.5, True])
    @pytest.mark.parametrize("op", ["remainder", "fmod", "pow", "mul", "eq", "floor_divide", "atan2", "maximum"])
    def test_scalar_for_tensor(self, op: str, scalar: float) -> None:
        function = getattr(torch, op)
        for dtype in (torch.int64, torch.float16, torch.float32, torch.float64):
            tensor = torch.arange(1, 300, 7, dtype=torch.int64).to(dtype)
            for shaped in (tensor, tensor[3]):
                try:
                    here = function(shaped, scalar)
                except (TypeError, RuntimeError):
                    with pytest.raises((TypeError, RuntimeError)):
                        function(shaped.cuda(), scalar)
                    continue
                there = function(shaped.cuda(), scalar)
                assert there.dtype == here.dtype
                assert torch.equal(there.cpu(), here)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.int64, torch.bool])
    def test_scalars_in_every_argument_position(self, dtype: torch.dtype) -> None:
        ops = ops_that_take_scalars()
        assert len(ops) > 100
        for op, positions in ops:
            for tensor, scalar in itertools.product([torch.tensor(3), torch.arange(1, 4)], [2, 1.5, True]):
                values = [scalar if is_scalar else tensor.to(dtype) for is_scalar in positions]
                here, there = (outcome(op, values, device) for device in ("cpu", "cuda"))
                assert there == here, (op, values)

    @pytest.mark.parametrize("op", ["add_", "logical_xor_", "logical_and_", "eq_", "atan2_", "clamp_min_"])
    def test_in_place_op_does_not_resize(self, op: str) -> None:
        for device in ("cpu", "cuda"):
            x = torch.ones(3, 1, device=device)
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                getattr(x, op)(torch.ones(3, 4, device=device))
            assert x.size() == (3, 1)
            assert getattr(x, op)(torch.ones(3, 1, device=device)) is x

    @pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
    def test_op_that_resizes_in_place(self) -> None:
        one, other = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
        x, neighbor = torch.ones(1, device="cuda"), torch.ones(1, device="cuda")
        assert x.addbmm_(one.cuda(), other.cuda()) is x
        torch.testing.assert_close(x.cpu(), torch.ones(1).addbmm_(one, other))
        assert neighbor.item() == 1

    def test_loss_uses_the_default_reduction(self) -> None:
        x, y = torch.randn(5), torch.randn(5)
        for loss in (F.smooth_l1_loss, F.huber_loss, F.mse_loss):
            for _ in range(2):
                torch.testing.assert_close(loss(x.cuda(), y.cuda()).cpu(), loss(x, y))

    def test_remainder_by_a_scalar(self) -> None:
        assert (torch.arange(200, device="cuda") % 97).cpu().equal(torch.arange(200) % 97)

    def test_conj_physical_in_place(self) -> None:
        x = torch.randn(5, dtype=torch.complex64)
        assert torch.equal(x.cuda().conj_physical_().cpu(), x.conj_physical())

    def test_mode_with_out(self) -> None:
        x = torch.tensor([[1.0, 2, 2], [3, 1, 3]])
        values, indices = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
        torch.mode(x.cuda(), 1, out=(values, indices))
        assert (values.tolist(), indices.tolist()) == tuple(result.tolist() for result in torch.mode(x, 1))

    def test_result_strides_equal_the_cpus(self) -> None:
        both(lambda x: x * 2, torch.randn(2, 3, 4).permute(2, 0, 1))
        both(torch.exp, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        both(lambda x: x.max(0).values * x, torch.randn(4, 3, 2).permute(0, 2, 1))
        both(lambda x: x.expand(4, 3).exp(), torch.randn(1, 3))

    def test_views_with_offsets_and_strides(self) -> None:
        base = torch.arange(24.0)
        for view in (base[5:17:3], base.view(4, 6)[1:, ::2], base.as_strided((3, 3), (1, 2), 4)):
            there = base.cuda().as_strided(view.size(), view.stride(), view.storage_offset())
            assert (there + 1).cpu().equal(view + 1)

    def test_out_with_a_storage_offset(self) -> None:
        """The CPU's kernel gets an alias of the whole storage, because it may have to resize the result."""
        whole = torch.zeros(4, 6, device="cuda")
        torch.add(torch.ones(2, 3, device="cuda"), 1, out=whole[1:3, 2:5])
        expected = torch.zeros(4, 6)
        expected[1:3, 2:5] = 2
        assert torch.equal(whole.cpu(), expected)

    def test_conjugate_and_negative_views(self) -> None:
        z = torch.randn(5, 5, dtype=torch.complex64)
        there = z.cuda()
        assert torch.equal((there.conj() * 2).cpu(), z.conj() * 2)
        torch.testing.assert_close((there.mH @ there).cpu(), z.mH @ z)
        assert torch.equal((there.conj().imag + 1).cpu(), z.conj().imag + 1)
        assert torch.equal((there.conj().imag + there.real).cpu(), z.conj().imag + z.real)
        for _ in range(2):
            solution = torch.linalg.solve_triangular(there.conj().imag, torch.ones(5, 1, device="cuda"), upper=True)
            torch.testing.assert_close(
                solution.cpu(), torch.linalg.solve_triangular(z.conj().imag, torch.ones(5, 1), upper=True), rtol=1e-3, atol=1e-3
            )

    def test_in_place_ops_on_views(self) -> None:
        there, here = torch.zeros(6, device="cuda"), torch.zeros(6)
        for tensor in (there, here):
            tensor[1:4].add_(2).mul_(3)
            tensor.index_fill_(0, torch.tensor([0, 5], device=tensor.device), 7)
            tensor[tensor > 6] -= 1
        assert there.cpu().equal(here)

    def test_bmm_outer_product(self) -> None:
        both(torch.bmm, torch.randn(3, 4, 1), torch.randn(3, 1, 5))

    def test_zeroing_a_large_part(self) -> None:
        whole = torch.ones(1024, 2048, device="cuda")
        assert whole[:, ::2].zero_().sum() == 0
        assert whole[:, 1::2].eq(1).all()
        assert whole[1:].zero_().sum() == 0
        assert whole[0, 1::2].eq(1).all()

    def test_out_is_resized_if_needed(self) -> None:
        x = torch.randn(4, 4, device="cuda")
        wanted = x.cpu() + 1
        empty, fitting, strided = (
            torch.empty(0, device="cuda"),
            torch.empty(4, 4, device="cuda"),
            torch.empty(4, 8, device="cuda")[:, ::2],
        )
        for out in (empty, fitting, strided):
            assert torch.add(x, 1, out=out) is out
            assert torch.equal(out.cpu(), wanted)
        with pytest.warns(UserWarning, match="was resized"):
            small = torch.add(x, 1, out=torch.empty(2, device="cuda"))
        assert torch.equal(small.cpu(), wanted)

    def test_out_that_is_a_view_is_resized(self) -> None:
        whole = torch.zeros(64, device="cuda")
        part = whole[:4]
        with pytest.warns(UserWarning, match="resized"):
            torch.add(torch.ones(100, device="cuda"), 1, out=part)
        assert part.size() == (100,)
        assert part.eq(2).all()

    def test_function_modes_get_only_calls_of_the_user(self) -> None:
        calls = []

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(function)
                return function(*args, **(kwargs or {}))

        x = torch.ones(3, device="cuda")
        with Mode():
            y = torch.add(x, x)
        assert calls == [torch.add]
        assert y.tolist() == [2.0] * 3
        with torch.device("cuda:1"):
            assert (x * 2).device == x.device

    def test_function_modes_get_no_calls_of_compiled_code(self) -> None:
        """torch disables a mode while it handles a call from Python, but not while compiled code runs."""
        calls = []

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(function)
                return function(*args, **(kwargs or {}))

        compiled = torch.jit.CompilationUnit("def squared(x):\n    return x.mul(x)\n").squared
        x = torch.full((3,), 3.0, device="cuda")
        with Mode():
            y = compiled(x)
        assert calls == []
        assert y.tolist() == [9.0] * 3

    def test_cpu_autocast_does_not_affect_gpu_ops(self) -> None:
        x = torch.randn(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            there = x.cuda() @ x.cuda()
        assert there.dtype == torch.float32
        torch.testing.assert_close(there.cpu(), x @ x)


class TestDevices:
    def test_tensors_on_two_devices_raise(self) -> None:
        x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for call in (lambda: x + y, lambda: torch.outer(x, y), lambda: torch.cat([x, y]), lambda: x.add_(y)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                call()

    def test_host_tensors_raise(self) -> None:
        x, y = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
        for call in (lambda: x + y, lambda: x @ y, lambda: torch.where(x > 0, y, x), lambda: F.linear(y, x)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                call()

    def test_host_scalars_are_accepted(self) -> None:
        x = torch.ones(3, device="cuda")
        assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3
        assert torch.where(x > 0, torch.tensor(5.0), x).tolist() == [5.0] * 3

    def test_host_indices_are_accepted(self) -> None:
        x = torch.arange(5.0, device="cuda")
        assert x[torch.tensor([4, 0])].tolist() == [4.0, 0.0]
        x[torch.tensor([1, 2])] = torch.tensor([9.0, 8.0], device="cuda")
        assert x.tolist() == [0.0, 9.0, 8.0, 3.0, 4.0]

    def test_results_are_on_the_arguments_device(self) -> None:
        x = torch.ones(3, device="cuda:1")
        for result in (x + 1, x + x, x.cumsum(0), *x.max(0)):
            assert result.device == torch.device("cuda:1")
        assert (x + x).tolist() == [2.0] * 3
        assert torch.cuda.current_device() == 0
        assert torch.tril_indices(3, 3, device="cuda:1").device == torch.device("cuda:1")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_copies_between_devices_with_strides_and_types(self, dtype: torch.dtype) -> None:
        x = torch.randn(4, 6)
        there = torch.zeros(6, 4, device="cuda:1", dtype=dtype)
        there.copy_(x.to("cuda:0").t())
        assert torch.equal(there.cpu(), x.t().to(dtype))

    def test_op_on_a_side_stream_waits_for_its_stream(self) -> None:
        x = torch.randn(4, 4, device="cuda")
        stream, results = torch.cuda.Stream(), []
        stream.wait_stream(torch.cuda.current_stream())

        def submit(cycles: int) -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                results.append(x @ x)
                return stream.record_event()

        make_busy(submit, 200).synchronize()
        torch.testing.assert_close(results[-1].cpu(), x.cpu() @ x.cpu())

    def test_ops_in_several_threads(self) -> None:
        x = torch.randn(16, 16)
        wanted, wrong = x @ x, []

        def work(device: int) -> None:
            there = x.to(f"cuda:{device}")
            wrong.extend(device for _ in range(50) if not torch.allclose((there @ there).cpu(), wanted, atol=1e-5))

        threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestRandom:
    def test_restored_rng_state_repeats_draws(self) -> None:
        x = torch.ones(1000, device="cuda")
        state = torch.cuda.get_rng_state()
        first = [F.dropout(x), torch.rand(5, device="cuda"), torch.randperm(9, device="cuda"), torch.bernoulli(x / 2)]
        torch.cuda.set_rng_state(state)
        again = [F.dropout(x), torch.rand(5, device="cuda"), torch.randperm(9, device="cuda"), torch.bernoulli(x / 2)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(F.dropout(x), first[0])

    def test_equal_seeds_repeat_and_other_seeds_differ(self) -> None:
        def draw(seed: int, device: str = "cuda") -> list[float]:
            torch.cuda.manual_seed_all(seed)
            return torch.randn(4, device=device).tolist()

        assert draw(1) == draw(1) == draw(1, "cuda:1")
        assert draw(1) != draw(2)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda generator: torch.rand(8, device="cuda", generator=generator),
            lambda generator: torch.empty(8, device="cuda").normal_(generator=generator),
            lambda generator: torch.randperm(20, device="cuda", generator=generator),
        ],
    )
    def test_consecutive_draws_differ(self, draw: Callable[[torch.Generator | None], torch.Tensor]) -> None:
        for generator in (None, torch.Generator("cuda").manual_seed(5)):
            draws = [tuple(draw(generator).tolist()) for _ in range(8)]
            assert len(set(draws)) == len(draws)

    def test_consecutive_dropout_masks_differ(self) -> None:
        x = torch.ones(64, device="cuda")
        masks = [tuple(F.dropout(x).tolist()) for _ in range(8)]
        assert len(set(masks)) == len(masks)

    @pytest.mark.parametrize(
        "draw",
        [
            F.dropout,
            torch.bernoulli,
            torch.rand_like,
            lambda x: F.rrelu(x, training=True),
            lambda x: torch.multinomial(x[:1000], x.numel(), replacement=True),
            lambda x: torch.randperm(x.numel(), device="cuda"),
        ],
    )
    def test_failed_calls_draw_nothing(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """CUDA's kernels allocate before they draw."""
        x = torch.ones(2**22, device="cuda")
        draw(x)  # in Python
        draw(x)  # in the engine
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
        try:
            state = torch.cuda.get_rng_state()
            with pytest.raises(torch.OutOfMemoryError):
                draw(x)
            assert torch.equal(torch.cuda.get_rng_state(), state)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def test_generator_argument_is_used(self) -> None:
        generator = torch.Generator("cuda").manual_seed(5)
        default = torch.cuda.get_rng_state()
        first = torch.randn(4, device="cuda", generator=generator)
        assert torch.equal(torch.cuda.get_rng_state(), default)
        assert generator.get_offset() > 0
        assert torch.equal(first, torch.randn(4, device="cuda", generator=generator.manual_seed(5)))
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            torch.randn(4, device="cuda", generator=torch.Generator())

    def test_cpu_generator_is_not_used(self) -> None:
        before = torch.get_rng_state()
        F.dropout(torch.ones(9, device="cuda"))
        torch.rand(3, device="cuda")
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    )
    def test_dropout_does_not_use_the_cpu_generator(self, backend: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """Dropout does not use the CPU's default generator, from which another thread could draw meanwhile."""
        monkeypatch.delattr(sys.modules["_accelerator_simulation._inside.ops.random"], "draw")
        x = torch.ones(2, 2, 8, 8, device="cuda", dtype=torch.float16)
        dropped = F.dropout(x, 0.25)
        assert set(dropped.unique().tolist()) == {0, torch.tensor(1 / 0.75).half().item()}
        assert torch.equal(F.dropout(x, 1.0), x * 0)
        assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)
        with sdpa_kernel(backend):
            assert F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).unique().numel() > 1

    def test_dropout_probability_and_gradient(self) -> None:
        x = torch.ones(10_000, device="cuda", requires_grad=True)
        y = F.dropout(x, 0.25)
        assert 0.72 < (y != 0).float().mean().item() < 0.78
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())


class TestCudnn:
    def test_cudnn_enabled_flag(self) -> None:
        cudnn, x = torch.backends.cudnn, torch.ones(2, device="cuda")
        assert cudnn.enabled
        assert cudnn.is_acceptable(x)
        with cudnn.flags(enabled=False):
            assert not cudnn.enabled
            assert not cudnn.is_acceptable(x)
        assert cudnn.enabled

    @pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
    def test_recurrent_nets(self, name: str) -> None:
        """If torch's own flag were on, torch would call cuDNN's recurrent nets without the dispatcher."""
        net, x = getattr(nn, name)(3, 4, 2), torch.randn(5, 2, 3)
        torch.testing.assert_close(copy.deepcopy(net).cuda()(x.cuda())[0].cpu(), net(x)[0])


class TestWorkspaces:
    """The first product of a thread and stream allocates memory for cuBLAS."""

    @pytest.fixture(autouse=True)
    def _release(self) -> Iterator[None]:
        torch._C._cuda_clearCublasWorkspaces()
        yield
        torch._C._cuda_clearCublasWorkspaces()

    def allocated_by(self, call: Callable[[], object], device: int = 0) -> int:
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.memory_allocated(device) - before

    def test_one_workspace_per_device_stream_and_thread(self) -> None:
        size = 32 * 1024**2 if torch.cuda.get_device_capability() == (9, 0) else 8_519_680
        x, there = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda:1")
        assert self.allocated_by(lambda: x @ x) == size
        assert self.allocated_by(lambda: torch.addmm(x, x, x)) == 0
        assert self.allocated_by(lambda: there @ there) == 0
        torch._C._cuda_clearCublasWorkspaces()
        assert self.allocated_by(lambda: there @ there, 1) == size
        assert self.allocated_by(lambda: x @ x) == size
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert self.allocated_by(lambda: x @ x) == size
        thread = threading.Thread(target=lambda: x @ x)
        assert self.allocated_by(lambda: (thread.start(), thread.join())) == size
        assert self.allocated_by(torch._C._cuda_clearCublasWorkspaces) == -3 * size

    @pytest.mark.skipif(hasattr(torch._C, "_cuda_getCublasWorkspaceSize"), reason="torch answers, and reads the variable once")
    @pytest.mark.parametrize(("configuration", "kib"), [(":4096:8", 32768), (":16:8", 128), (":128:8:64:16:32:32", 3072)])
    def test_workspace_size_follows_the_configuration(
        self, monkeypatch: pytest.MonkeyPatch, configuration: str, kib: int
    ) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", configuration)
        x = torch.ones(2, device="cuda")
        assert self.allocated_by(lambda: torch.dot(x, x)) == kib * 1024

    @pytest.mark.skipif(not hasattr(torch._C, "_cuda_getCublasWorkspaceSize"), reason="torch lacks cublas_workspace_size")
    def test_workspace_size_follows_torchs_setting(self) -> None:
        x = torch.ones(2, device="cuda")
        before = torch._C._cuda_getCublasWorkspaceSize()
        torch._C._cuda_setCublasWorkspaceSize(3 << 20)
        try:
            assert self.allocated_by(lambda: torch.dot(x, x)) == 3 << 20
        finally:
            torch._C._cuda_setCublasWorkspaceSize(before)

    def test_no_workspace_without_products(self) -> None:
        x = torch.ones(1, 1, 4, 4, device="cuda")
        assert self.allocated_by(lambda: (x + x, F.conv2d(x, x).sum())) == 0


class TestGraphs:
    def test_replay_computes_current_values(self) -> None:
        layer, x = nn.Linear(4, 4).cuda(), torch.zeros(2, 4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = layer(x).relu()
            z, picked = torch.cat([y, y]), x.sum(0).mul_(2)
        for _ in range(2):
            x.normal_()
            graph.replay()
            wanted = copy.deepcopy(layer).cpu()(x.cpu()).relu()
            torch.testing.assert_close(y.cpu(), wanted)
            torch.testing.assert_close(z.cpu(), torch.cat([wanted, wanted]))
            torch.testing.assert_close(picked.cpu(), x.cpu().sum(0) * 2)

    @pytest.mark.skipif(not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"), reason="torch without the method")
    def test_a_graph_keeps_the_ops_of_one_that_it_launches(self) -> None:
        x = torch.zeros(1, device="cuda")
        inner, outer, other = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(inner):
            x.add_(1)
        with torch.cuda.graph(outer):
            for _ in range(2):  # replay() of some releases refuses
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                assert loaded_runtime().cudaGraphLaunch(ctypes.c_void_p(inner.raw_cuda_graph_exec()), stream) == 0
        del inner
        gc.collect()
        computations = sys.modules["_accelerator_simulation._inside.ops.capture"]._computations
        with torch.cuda.graph(other):  # which drops computations that no graph needs
            x.mul_(1)
        outer.replay()
        assert x.item() == 2
        before = len(computations)
        del outer, other
        gc.collect()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.mul_(1)
        assert len(computations) == before - 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex32])  # complex32 is computed in a wider type
    def test_captured_temporaries_are_reused(self, dtype: torch.dtype) -> None:
        x = torch.ones(10_000, device="cuda").to(dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x.exp()
            address = y.data_ptr()
            z = y.exp()
            del y
            again = x.exp()
        assert again.data_ptr() == address
        graph.replay()
        assert again.real[0].item() == pytest.approx(math.e, rel=1e-2)
        assert z.real[0].item() == pytest.approx(math.exp(math.e), rel=1e-2)

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("aten::add.Tensor", lambda x, other: x + 1),
            ("aten::add.Tensor", lambda x, other: other + x),
            ("aten::cat", lambda x, other: torch.cat([other, x])),
            ("aten::add.out", lambda x, other: torch.add(other, 1, out=x)),
        ],
        ids=["first", "second", "in a list", "by name"],
    )
    def test_replay_after_an_argument_was_freed_raises(
        self, name: str, call: Callable[..., torch.Tensor], capfd: pytest.CaptureFixture[str]
    ) -> None:
        x, other = (torch.ones(3 << 20, device="cuda") for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(x, other)
        assert y.numel() >= x.numel()
        if y is x:
            del y
        gc.collect()  # the first capture of a process imports modules, which may leave frames in cycles
        held = torch.cuda.memory_allocated()
        del x
        assert torch.cuda.memory_allocated() == held - (12 << 20)
        graph.replay()  # torch's allocator still has the memory in its cache
        torch.cuda.empty_cache()
        with pytest.raises(RuntimeError, match="CUDA error"):
            graph.replay()
        assert f"an argument of {name} was freed" in capfd.readouterr().err

    def test_captured_results_of_every_form(self) -> None:
        """Several results, a list, ``out=`` that the capture enlarges, and results beside arguments that the op changes."""

        def compute(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[Any]:
            out = torch.empty(0, device=x.device)
            torch.mul(x, 3, out=out)
            lists = [*torch._foreach_add([x, x[0]], [1.0, 2.0]), *torch.split_with_sizes_copy(x, [1, 3], 1)]
            return [out, *torch.topk(x, 2), *lists, *torch.aminmax(x, dim=0), F.batch_norm(x, mean, variance, training=True)]

        def statistics(device: str) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(4, device=device), torch.ones(4, device=device)

        x, there, here = torch.zeros(3, 4, device="cuda"), statistics("cuda"), statistics("cpu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = compute(x, *there)
        assert [each.tolist() for each in there] == [[0.0] * 4, [1.0] * 4], "the capture computes nothing"
        for _ in range(2):
            values = torch.randn(3, 4)
            x.copy_(values)
            graph.replay()
            torch.testing.assert_close([each.cpu() for each in (*results, *there)], [*compute(values, *here), *here])

    def test_captured_draws_are_of_the_tensors_device(self) -> None:
        """Also if another device is current, where the op is called."""
        states = [torch.cuda.get_rng_state(index) for index in range(2)]
        with torch.cuda.device(1):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                like = torch.zeros(4, device="cuda")
                with torch.cuda.device(0):
                    drawn = torch.rand_like(like)
            graph.replay()
            first = drawn.tolist()
            graph.replay()
        assert first != drawn.tolist()
        has_drawn = [not torch.equal(torch.cuda.get_rng_state(index), state) for index, state in enumerate(states)]
        assert has_drawn == [False, True]

    def test_captured_ops_run_only_at_replay(self) -> None:
        one = torch.ones(3, device="cuda")
        x = torch.zeros(3, device="cuda").add_(one)  # only later calls of an op take the fast path
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(one)
        assert x.tolist() == [1.0] * 3
        graph.replay()
        graph.replay()
        assert x.tolist() == [3.0] * 3

    def test_replays_draw_new_values_and_states_repeat(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            r, d = torch.rand(4, device="cuda"), F.dropout(torch.ones(64, device="cuda"))
        state, draws = torch.cuda.get_rng_state(), []
        for _ in range(2):
            graph.replay()
            draws.append((r.tolist(), d.tolist()))
        assert draws[0][0] != draws[1][0]
        assert draws[0][1] != draws[1][1]
        torch.cuda.set_rng_state(state)
        graph.replay()
        assert (r.tolist(), d.tolist()) == draws[0]

    def test_a_captured_training_step(self) -> None:
        def make() -> nn.Module:
            torch.manual_seed(5)
            return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

        here, there = make(), make().cuda()
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        sx, sy = x.cuda(), y.cuda()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (here, there)]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for p in there.parameters():
                p.grad = torch.zeros_like(p)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizers[1].zero_grad(set_to_none=False)
            loss = F.mse_loss(there(sx), sy)
            loss.backward()
            optimizers[1].step()
        for _ in range(5):
            optimizers[0].zero_grad()
            wanted = F.mse_loss(here(x), y)
            wanted.backward()
            optimizers[0].step()
            graph.replay()
            torch.testing.assert_close(loss.cpu(), wanted)

    def test_synchronizing_op_during_capture_raises(self) -> None:
        x = torch.ones(3, device="cuda")
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph, pool=pool):
            x.nonzero()
        end_invalidated_capture(pool)
        torch.cuda.empty_cache()

    def test_captured_computations_are_freed_with_the_graph(self) -> None:
        import sys

        held = sys.modules["_accelerator_simulation._inside.ops.capture"]._computations
        x = torch.ones(3, device="cuda")

        def capture() -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x.add_(1)
            return graph

        kept = capture()
        before = len(held)
        for _ in range(3):
            capture()
            gc.collect()
        assert len(held) <= before + 1
        kept.replay()

    @pytest.mark.parametrize("count", sample([63, 64, 65, 127, 128, 129, 200], 65))
    def test_next_capture_frees_any_number_of_computations(self, count: int) -> None:
        import sys

        held = sys.modules["_accelerator_simulation._inside.ops.capture"]._computations
        x = torch.ones(3, device="cuda")

        def capture(ops: int) -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(ops):
                    x.add_(1)

        for _ in range(2):
            capture(1)
            gc.collect()
        before = len(held)
        capture(count)
        assert len(held) >= count
        gc.collect()
        capture(1)
        assert len(held) <= before

    def test_op_error_at_replay_raises(self, capfd: pytest.CaptureFixture[str]) -> None:
        x = torch.ones(3, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.div(x, x, rounding_mode="floor")
        graph.replay()
        x.zero_()
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            graph.replay()
        assert "ZeroDivisionError" in capfd.readouterr().err


class TestNotSimulated:
    def test_error_names_op(self) -> None:
        with pytest.raises(NotImplementedError, match="aten::_to_sparse_semi_structured is not simulated"):
            torch.ops.aten._to_sparse_semi_structured(torch.ones(4, 4, device="cuda"))

    def test_op_without_cuda_kernel_raises_torchs_error(self) -> None:
        with pytest.raises(NotImplementedError, match="Could not run"):
            torch.histogram(torch.ones(4, device="cuda"), 3)


class TestSparseAndNested:
    def test_sparse(self) -> None:
        here = torch.eye(4).mul(torch.arange(1, 5)).to_sparse()
        x = torch.randn(4, 4)
        there = here.cuda()
        torch.testing.assert_close((there @ x.cuda()).cpu(), here @ x)
        assert (there + there).to_dense().cpu().equal((here + here).to_dense())
        assert torch.sparse.sum(there, 0).to_dense().cpu().equal(torch.sparse.sum(here, 0).to_dense())
        uncoalesced = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (3,), device="cuda")
        assert uncoalesced.coalesce().values().tolist() == [3.0, 3.0]
        csr = torch.eye(4).to_sparse_csr().cuda()
        torch.testing.assert_close((csr @ x.cuda()).cpu(), x)

    def test_gradients_of_a_sparse_embedding(self) -> None:
        here = nn.Embedding(10, 3, sparse=True)
        there = copy.deepcopy(here).cuda()
        index = torch.tensor([1, 4, 4, 9])
        for module, where in ((here, "cpu"), (there, "cuda")):
            module(index.to(where)).pow(2).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        torch.testing.assert_close(there.weight.detach().cpu(), here.weight.detach())

    def test_nested(self) -> None:
        parts = [torch.randn(2, 3), torch.randn(4, 3)]
        here, there = torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, device="cuda")
        torch.testing.assert_close((there * 2).to_padded_tensor(0.0).cpu(), (here * 2).to_padded_tensor(0.0))
        layer = nn.Linear(3, 5)
        torch.testing.assert_close(
            copy.deepcopy(layer).cuda()(there).to_padded_tensor(0.0).cpu(), layer(here).to_padded_tensor(0.0)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_encoder_in_evaluation_packs_padded_sequences(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        here = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval().to(dtype)
        there = copy.deepcopy(here).cuda()
        x = torch.randn(2, 4, 8, dtype=dtype)
        is_padding = torch.tensor([[False] * 4, [False] * 2 + [True] * 2])
        with torch.no_grad():
            expected = here(x, src_key_padding_mask=is_padding)
            actual = there(x.cuda(), src_key_padding_mask=is_padding.cuda())
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)

    def test_gradients_of_layer_norm_of_nested_tensors(self) -> None:
        layer = nn.LayerNorm(3)
        gradients = []
        for device in ("cpu", "cuda"):
            parts = [torch.linspace(-1, 2, n * 3).reshape(n, 3).square().to(device).requires_grad_() for n in (2, 4)]
            nested = torch.nested.as_nested_tensor(parts)
            result = copy.deepcopy(layer).to(device)(nested).to_padded_tensor(0.0)
            weights = torch.linspace(0, 1, result.numel(), device=device).view_as(result)
            gradients.append([gradient.cpu() for gradient in torch.autograd.grad((result * weights).sum(), parts)])
        torch.testing.assert_close(gradients[1], gradients[0])


def test_training_losses_equal_the_cpus() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10),
        )  # fmt: skip

    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    losses = []
    for device in ("cpu", "cuda"):
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] / 2


def test_first_calls_of_an_op_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's threads, one for each device, may call an op for the first time at the same time."""
    dispatch = sys.modules["_accelerator_simulation._inside.ops.dispatch"]
    x = torch.ones(3, device="cuda")
    results: list[Any] = []

    describe = dispatch._describe

    def describe_during_another_call(*arguments: Any) -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: results.append(override(x)))
        thread.start()
        thread.join()
        return describe(*arguments)

    monkeypatch.setattr(dispatch, "_describe", describe_during_another_call)
    override = dispatch.kernel_override("aten::sin")
    results.append(override(x))
    assert [result.tolist() for result in results] == [x.cpu().sin().tolist()] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_with_weights_of_the_inputs_type_and_float_statistics(dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, dtype=dtype, device="cuda")
    module, reference = nn.BatchNorm1d(3).cuda(), nn.BatchNorm1d(3).cuda()
    for name in ("weight", "bias"):
        setattr(module, name, nn.Parameter(getattr(module, name).to(dtype)))
    for training in (True, False):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [m.train(training)(i) for m, i in zip((module, reference), inputs, strict=True)]
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        assert module.weight.grad.dtype == dtype
        torch.testing.assert_close(module.weight.grad.float(), reference.weight.grad, rtol=0.02, atol=0.1)
    assert torch.equal(module.running_var, reference.running_var)
    # Its backward works for channels that are next to each other in memory, and then only.
    images = torch.randn(2, 3, 4, 4, dtype=dtype, device="cuda", requires_grad=True)
    two_dimensional = nn.BatchNorm2d(3).cuda()
    two_dimensional.weight = nn.Parameter(two_dimensional.weight.to(dtype))
    two_dimensional.bias = nn.Parameter(two_dimensional.bias.to(dtype))
    two_dimensional(images.contiguous(memory_format=torch.channels_last)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected running_mean to have type"):
        two_dimensional(images).sum().backward()


@pytest.mark.parametrize("op", [torch.native_batch_norm, torch._native_batch_norm_legit])
@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 5), (torch.float16, 5), (torch.float32, 100_000)])
def test_batch_norm_in_evaluation_returns_running_statistics(op: Callable[..., Any], dtype: torch.dtype, length: int) -> None:
    x = torch.randn(4, 3, length, dtype=dtype, device="cuda", requires_grad=True)
    weight, bias, mean, variance = (torch.rand(3, dtype=dtype, device="cuda") + 0.5 for _ in range(4))
    result, saved_mean, saved_invstd = op(x, weight, bias, mean, variance, False, 0.1, 1e-5)
    assert torch.equal(saved_mean, mean.float())  # CUDA saves the statistics of half types as float
    torch.testing.assert_close(saved_invstd, (variance.float() + 1e-5).rsqrt())
    torch.testing.assert_close(result, F.batch_norm(x, mean, variance, weight, bias))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, (weight * (variance + 1e-5).rsqrt()).view(3, 1).expand_as(gradient))
