"""Small trainings have the same losses on simulated GPUs as on the CPU."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import support
from tests.simulation.trainings import trainings
from tests.simulation.trainings.trainings import assert_same_losses, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def compare(
    make: Callable[[], nn.Module],
    data: tuple[torch.Tensor, torch.Tensor],
    tolerance: float = 1e-4,
    expected: list[float] | None = None,
    **options: Any,
) -> None:
    expected = expected or train(make, data, "cpu", **options)
    losses_on_gpu = train(make, data, "cuda", **options)
    print([round(loss, 5) for loss in losses_on_gpu])
    assert_same_losses(losses_on_gpu, expected, tolerance)


class TestConvolutional:
    def test_images(self) -> None:
        compare(trainings.Images, trainings.pictures())

    def test_volumes(self) -> None:
        compare(trainings.Volumes, trainings.pictures("cpu", 2, 7, 7, 7))

    def test_channels_last(self) -> None:
        inputs, target = trainings.pictures()
        wrap: Callable[[nn.Module], Any] = lambda model: model.to(memory_format=torch.channels_last)  # noqa: E731
        compare(trainings.Images, (inputs.to(memory_format=torch.channels_last), target), wrap=wrap)

    def test_with_cudnn_enabled(self) -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            compare(trainings.Images, trainings.pictures())


class TestRecurrent:
    @pytest.mark.parametrize("module_class", [nn.LSTM, nn.GRU, nn.RNN])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_layers": 2, "bidirectional": True},
            {"packed": True},
            {"packed": True, "bidirectional": True, "bias": False},
        ],
        ids=["plain", "bidirectional", "packed", "packed-bidirectional"],
    )
    def test_nets(self, module_class: type[nn.RNNBase], options: dict[str, Any]) -> None:
        compare(partial(trainings.Recurrent, module_class, **options), trainings.tokens())

    def test_projected(self) -> None:
        compare(partial(trainings.Recurrent, nn.LSTM, proj_size=3), trainings.tokens())

    @pytest.mark.parametrize("module_class", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
    def test_cells(self, module_class: type[nn.RNNCellBase]) -> None:
        compare(partial(trainings.Cells, module_class), trainings.tokens())

    @pytest.mark.parametrize("module_class", [nn.LSTM, nn.GRU])
    def test_with_cudnn_enabled(self, module_class: type[nn.RNNBase]) -> None:
        with torch.backends.cudnn.flags(enabled=True):
            compare(partial(trainings.Recurrent, module_class, num_layers=2), trainings.tokens())


SWITCHES = ["flash", "mem_efficient", "cudnn", "math"]


@pytest.fixture
def switches() -> Iterator[Callable[[str, bool], None]]:
    """Yield a function that sets a switch of ``torch.backends.cuda``, and restore the switches after the test."""
    before = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SWITCHES}
    yield lambda name, on: getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)
    for name, on in before.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


class TestTransformer:
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_encoder(self, norm_first: bool) -> None:
        compare(partial(trainings.Encoder, norm_first), trainings.tokens())

    def test_hand_written_transformer(self) -> None:
        compare(trainings.Language, trainings.tokens())

    @pytest.mark.parametrize("off", SWITCHES[:3])
    @pytest.mark.parametrize("dtype", support.sample([None, torch.bfloat16], torch.bfloat16))
    def test_training_with_one_sdp_kernel_disabled(
        self, switches: Callable[[str, bool], None], off: str, dtype: torch.dtype | None
    ) -> None:
        expected = train(trainings.Language, trainings.tokens(), "cpu")
        switches(off, False)
        compare(trainings.Language, trainings.tokens(), 0.02 if dtype else 1e-4, expected, autocast=dtype)

    @pytest.mark.parametrize("on", SWITCHES)
    def test_training_with_only_one_sdp_kernel_enabled(self, switches: Callable[[str, bool], None], on: str) -> None:
        expected = train(trainings.Language, trainings.tokens(), "cpu")
        for name in SWITCHES:
            switches(name, name == on)
        # Flash and cuDNN attention support only half types.
        dtype = torch.bfloat16 if on in ("flash", "cudnn") else None
        compare(trainings.Language, trainings.tokens(), 0.02 if dtype else 1e-4, expected, autocast=dtype)

    @pytest.mark.parametrize(
        "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    )
    def test_training_with_each_sdp_kernel_selected(self, backend: SDPBackend) -> None:
        expected = train(trainings.Language, trainings.tokens(), "cpu")
        with sdpa_kernel(backend):
            losses_on_gpu = train(trainings.Language, trainings.tokens(), "cuda", autocast=torch.bfloat16)
        assert_same_losses(losses_on_gpu, expected, 0.02)

    def test_training_with_attention_dropout_is_reproducible(self) -> None:
        make = partial(trainings.Language, dropout=0.3)
        first, again = (train(make, trainings.tokens(), "cuda") for _ in range(2))
        without = train(trainings.Language, trainings.tokens(), "cuda")
        assert first == again != without
        assert first[-1] < first[0]


class TestEmbeddings:
    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    def test_bags(self, mode: str) -> None:
        inputs, _ = trainings.tokens()
        compare(partial(trainings.Bags, mode), (inputs, torch.tensor([0, 1, 2, 3, 4, 0])))

    def test_sparse_gradients(self) -> None:
        inputs, _ = trainings.tokens()
        sgd = partial(torch.optim.SGD, lr=0.5)
        compare(partial(trainings.Bags, "sum", sparse=True), (inputs, torch.tensor([0, 1, 2, 3, 4, 0])), optimizer=sgd)


class TestMixedPrecision:
    @pytest.mark.parametrize("make", [trainings.Language, trainings.Images], ids=["transformer", "convolutional"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        data = trainings.tokens() if make is trainings.Language else trainings.pictures()
        expected = train(make, data, "cpu")
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        losses_on_gpu = train(make, data, "cuda", autocast=dtype, scaler=scaler)
        assert_same_losses(losses_on_gpu, expected, 0.05)

    def test_recurrent_autocast(self) -> None:
        make = partial(trainings.Recurrent, nn.LSTM)
        expected = train(make, trainings.tokens(), "cpu")
        losses_on_gpu = train(make, trainings.tokens(), "cuda", autocast=torch.float16, scaler=torch.amp.GradScaler("cuda"))
        assert_same_losses(losses_on_gpu, expected, 0.05)

    def test_too_large_loss_scale_is_reduced(self) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
        losses = train(trainings.Language, trainings.tokens(), "cuda", autocast=torch.float16, scaler=scaler, steps=20)
        assert 1 < scaler.get_scale() < 2.0**30
        assert losses[0] == losses[1]
        assert losses[-1] < losses[0]

    def test_half_weights(self) -> None:
        make: Callable[[], nn.Module] = lambda: trainings.Language().to(torch.bfloat16)  # noqa: E731
        compare(make, trainings.tokens(), 0.05)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 0.01}),
    ("ASGD", {"lr": 0.1}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.001, "momentum": 0.5}),
    ("Rprop", {"lr": 0.01}),
    ("Adafactor", {"lr": 0.05}),
    ("LBFGS", {"lr": 0.5, "max_iter": 3}),
]


class TestOptimizers:
    @pytest.mark.parametrize(
        ("name", "options", "way"),
        [
            pytest.param(
                *(name, options, way),
                id=f"{way}-{name}",
                marks=() if way == "default" or name in ("SGD", "AdamW") else pytest.mark.slow,
            )
            for way in ("default", "foreach", "fused", "single")
            for name, options in OPTIMIZERS
        ],
    )
    def test_each_optimizer(self, name: str, options: dict[str, Any], way: str) -> None:
        optimizer_class = getattr(torch.optim, name)
        if way != "default":
            options = {**options, **({"foreach": False} if way == "single" else {way: True})}
        probe = nn.Parameter(torch.zeros(1, device="cuda"))
        probe.grad = torch.zeros_like(probe)
        try:
            optimizer_class([probe], **options).step(lambda: probe.sum())
        except NotImplementedError:
            raise
        except (TypeError, RuntimeError) as error:
            pytest.skip(f"torch refuses: {error}")
        usual = {key: value for key, value in options.items() if key not in ("foreach", "fused")}
        expected = train(trainings.Language, trainings.tokens(), "cpu", optimizer=partial(optimizer_class, **usual))
        losses_on_gpu = train(trainings.Language, trainings.tokens(), "cuda", optimizer=partial(optimizer_class, **options))
        assert_same_losses(losses_on_gpu, expected, 1e-3)

    def test_gradients_are_clipped(self) -> None:
        norms = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            model = trainings.Language().to(device)
            inputs, target = trainings.tokens(device)
            trainings.cross_entropy(model(inputs), target).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        assert norms[:2] == pytest.approx(norms[2:], rel=1e-4)
        assert norms[1] == pytest.approx(0.01, rel=1e-3)


class TestCaptured:
    @pytest.mark.parametrize("make", [trainings.Language, partial(trainings.Recurrent, nn.LSTM)], ids=["transformer", "lstm"])
    def test_captured_training_step(self, make: Callable[[], nn.Module]) -> None:
        inputs, target = trainings.tokens()
        batches = [(inputs.roll(n, 0), target.roll(n, 0)) for n in range(trainings.STEPS)]

        def prepared(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = make().to(device)
            capturable = {"capturable": True} if device == "cuda" else {}
            return model, torch.optim.Adam(model.parameters(), lr=0.01, **capturable)

        model, optimizer = prepared("cpu")
        expected = []
        for batch, wanted in batches:
            optimizer.zero_grad()
            loss = trainings.cross_entropy(model(batch), wanted)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())

        model, optimizer = prepared("cuda")
        batch, wanted = torch.zeros_like(inputs, device="cuda"), torch.zeros_like(target, device="cuda")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                optimizer.zero_grad()
                trainings.cross_entropy(model(batch), wanted).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(before[name])
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = trainings.cross_entropy(model(batch), wanted)
            loss.backward()
            optimizer.step()
        losses_on_gpu = []
        for new_batch, new_wanted in batches:
            batch.copy_(new_batch)
            wanted.copy_(new_wanted)
            graph.replay()
            losses_on_gpu.append(loss.item())
        assert_same_losses(losses_on_gpu, expected, 1e-3)

    def test_graphed_callables(self) -> None:
        inputs, _ = trainings.pictures("cpu", 32)

        def wrap(model: nn.Module) -> Any:
            if next(model.parameters()).device.type == "cpu":
                return model
            return torch.cuda.make_graphed_callables(model, (inputs.to("cuda"),))

        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 5))

        compare(make, trainings.pictures("cpu", 32), wrap=wrap)


class TestCompiled:
    @pytest.mark.parametrize("make", [trainings.Language, trainings.Images], ids=["transformer", "convolutional"])
    @pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
    def test_compiled(self, make: Callable[[], nn.Module], backend: str) -> None:
        data = trainings.tokens() if make is trainings.Language else trainings.pictures()
        expected = train(make, data, "cpu")
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses_on_gpu = train(make, data, "cuda", wrap=lambda model: torch.compile(model, backend=backend))
        assert_same_losses(losses_on_gpu, expected)

    def test_dynamo_does_not_trace_the_simulation(self) -> None:
        """Dynamo gives up a frame that breaks the graph in a loop, and watches what the ops in it call."""

        @torch.compile(backend="eager")
        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                torch._dynamo.graph_break()
                x = x.softmax(-1) + torch.arange(4, device="cuda")
            return x

        torch.compiler.reset()
        assert function(torch.ones(4, 4, device="cuda")).sum().item() == pytest.approx(28)

    def test_torch_finds_triton_if_it_is_installed(self) -> None:
        from torch.utils._triton import has_triton

        assert has_triton() == (importlib.util.find_spec("triton") is not None)


class TestTwoDevices:
    def test_layers_on_two_devices(self) -> None:
        class Split(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 5)

            def to(self, device: Any) -> Split:  # type: ignore[override]
                self.first.to(device)
                self.second.to("cuda:1" if device == "cuda" else device)
                return self

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x).relu()
                return self.second(x.to(self.second.weight.device)).to(self.first.weight.device)

        compare(Split, trainings.pictures("cpu", 12))

    def test_data_parallel(self) -> None:
        def wrap(model: nn.Module) -> nn.Module:
            return nn.DataParallel(model) if next(model.parameters()).is_cuda else model

        compare(trainings.Language, trainings.tokens(), wrap=wrap)
