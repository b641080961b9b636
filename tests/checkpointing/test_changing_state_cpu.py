"""Tests that a recomputation changes no state that the forward has changed: every state is as without a checkpoint."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accelerator import checkpointing
from tests.support import module_rows
from tests.support.checkpointing_cases import Checkpoint, none

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitioned": {"partition_activations": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2},
    "on the host": {"checkpoint_in_cpu": True},
    "compared": {"determinism_check": "debug"},
}


def tensors_of(item: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(item, torch.Tensor):
        return [item]
    return [tensor for each in item for tensor in tensors_of(each)] if isinstance(item, (tuple, list)) else []


def state_of(module: nn.Module) -> dict[str, Any]:
    """Every tensor of a module, also those that are plain attributes."""
    return {
        f"{prefix}.{name}": value.detach().clone()
        for prefix, each in module.named_modules()
        for name, value in {**each._buffers, **each._parameters, **vars(each)}.items()
        if isinstance(value, torch.Tensor)
    }


def train(module: Any, batches: list[tuple[tuple[Any, ...], dict[str, Any]]], ckpt: Checkpoint, steps: int = 3) -> list[Any]:
    """Train for some steps. Each calls the module twice before backward. Return all that must be equal."""
    seen: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        outputs = [tensors_of(ckpt(module, *args, **kwargs)) for args, kwargs in batches]
        seen.append([out.detach().clone() for each in outputs for out in each])
        seen.append(state_of(module))
        losses = [out.float().square().sum() for each in outputs for out in each if out.requires_grad]
        if losses:
            sum(losses).backward()  # type: ignore[union-attr]
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()})
        seen.append([tensor.grad for args, _ in batches for tensor in tensors_of(args)])
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None and parameter.is_floating_point():
                    parameter -= 0.1 * parameter.grad
        seen.append(state_of(module))
    return seen


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape, where
        assert one.dtype == other.dtype, where
        assert torch.equal(one.to_dense().nan_to_num(), other.to_dense().nan_to_num()), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{i}]")


def compare_row(row: Any, training: bool, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    results = []
    for ckpt in (none, checkpointing.checkpoint):
        torch.manual_seed(0)
        module = module_rows.make(row).train(training)
        results.append(train(module, [(row[2](), {}) for _ in range(2)], ckpt))
    assert_same(*results)


def rows(choose: Callable[[str], bool]) -> list[Any]:
    return [row for row in module_rows.ROWS if choose(row[0]) and hasattr(nn, row[0])]


def identify(row: Any) -> str:
    return f"{row[0]}-{row[1]}"


def test_every_class_of_torch_has_a_row() -> None:
    classes = {name for name, cls in vars(nn).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
    assert classes - module_rows.WITHOUT_ROWS <= {row[0] for row in module_rows.ROWS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("row", rows(lambda name: "Norm" in name), ids=identify)
def test_norms_of_torch_change_as_without_a_checkpoint(row: Any, training: bool) -> None:
    for mode in MODES:
        if mode != "compared" or "LazyInstance" not in row[0]:  # the statistics of its first forward have no value before it
            compare_row(row, training, mode)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("row", rows(lambda name: "Norm" not in name), ids=identify)
def test_modules_of_torch_train_as_without_a_checkpoint(row: Any, training: bool) -> None:
    for mode in MODES:
        if mode != "compared" or row[0] not in ("LSTM", "RReLU"):  # they save memory before they write to it
            compare_row(row, training, mode)


class Counts(nn.Module):
    """Counters and an average, changed in place, added to, replaced and written through ``.data``.

    What the results depend on is cloned, or backward would raise an error without a checkpoint too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.n: torch.Tensor
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(3))
        self.register_buffer("replaced", torch.ones(3), persistent=False)
        self.register_buffer("data_of", torch.ones(3))
        self.register_buffer("nothing", None)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        # Each value depends on the state, so a recomputation needs the state that its forward started with.
        out = (h * self.average.clone() * self.n.clone() + self.replaced * self.weight).exp() * self.data_of.clone()
        self.n += 1
        self.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
        self.replaced = 0.9 * self.replaced + 0.1 * h.detach().mean(0)
        self.data_of.data.mul_(0.5)
        return (out * self.average.clone()).sin()


class Quantizer(nn.Module):
    """A codebook that follows its inputs: its forward reads it, then changes it."""

    def __init__(self, codes: int = 5) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.register_buffer("codebook", torch.randn(codes, 3))
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.before(h)
        if not self.started:
            self.codebook[: len(h)].copy_(h.detach()[: len(self.codebook)])
            self.started.fill_(True)
        codebook = self.codebook.clone()
        nearest = torch.cdist(h.detach(), codebook).argmin(1)
        out = (h - codebook[nearest]).square() + h
        self.codebook.index_add_(0, nearest, 0.1 * (h.detach() - codebook[nearest]))
        return out


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.n: torch.Tensor
        self.register_buffer("n", torch.ones(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = (h * self.n.clone() * self.weight).exp()
        self.n.mul_(0.9)
        return out


def spectral(old: bool) -> nn.Module:
    wrap: Any = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh(), wrap(nn.Linear(3, 3), n_power_iterations=2))


def observed() -> nn.Module:
    from torch.ao import quantization

    return nn.Sequential(
        quantization.MinMaxObserver(),
        quantization.MovingAverageMinMaxObserver(),
        quantization.PerChannelMinMaxObserver(ch_axis=1),
        nn.Linear(3, 3),
        quantization.MovingAveragePerChannelMinMaxObserver(ch_axis=1),
        quantization.HistogramObserver(bins=8),
    )


def quantized() -> nn.Module:
    from torch.ao import quantization

    observer = quantization.MovingAverageMinMaxObserver
    return nn.Sequential(
        nn.Linear(3, 3),
        quantization.FakeQuantize(observer, quant_min=0, quant_max=255),
        nn.Tanh(),
        quantization.FusedMovingAvgObsFakeQuantize(observer, quant_min=0, quant_max=255),
        quantization.default_per_channel_weight_fake_quant(),
    )


def module_row(make: Callable[[], nn.Module], *shape: int) -> Callable[[], tuple[nn.Module, list[Any]]]:
    def row() -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(0)
        module = make()
        batches = [((torch.randn(*(shape or (4, 3)), requires_grad=True),), {}) for _ in range(2)]
        return module, batches

    return row


OWN: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "counters": module_row(Counts),
    "a codebook": module_row(Quantizer),
    "a script": module_row(lambda: torch.jit.script(Scripted())),
    "spectral_norm as a hook": module_row(lambda: spectral(True)),
    "spectral_norm as a parametrization": module_row(lambda: spectral(False)),
    "weight_norm": module_row(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
    "orthogonal": module_row(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))),
    "observers": module_row(observed),
    "fake quantization": module_row(quantized),
    "batch norm in a model": module_row(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
    ),
    "the same layer twice": module_row(lambda: nn.Sequential(*[nn.BatchNorm1d(3)] * 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OWN)
def test_state_changes_as_without_a_checkpoint(name: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    module, batches = OWN[name]()
    expected = train(OWN[name]()[0], copy.deepcopy(batches), none)
    assert_same(train(module, batches, checkpointing.checkpoint), expected)


# How a checkpoint reaches the module or the tensors that its function changes.


class Holder:
    """An object that is no module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, h: torch.Tensor) -> Any:
        return self.module(h)

    def call(self, h: torch.Tensor) -> Any:
        return self.module(h)


class Outer(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, h: torch.Tensor) -> Any:
        return self.inner(h)

    def with_argument(self, h: torch.Tensor, module: nn.Module) -> Any:
        return module(h)


GLOBAL: Any = None


def uses_global(h: torch.Tensor) -> Any:
    return GLOBAL(h)


def calls_another(h: torch.Tensor) -> Any:
    return uses_global(h)


def with_default(module: nn.Module) -> Any:
    def function(h: torch.Tensor, which: nn.Module = module) -> Any:
        return which(h)

    return function


def with_keyword_default(module: nn.Module) -> Any:
    def function(h: torch.Tensor, *, which: nn.Module = module) -> Any:
        return which(h)

    return function


def wrapped(module: nn.Module) -> Any:
    @functools.wraps(module.forward)
    def function(*args: Any) -> Any:
        return module(*args)

    return function


WAYS: dict[str, Callable[[Checkpoint, Any], Any]] = {
    "the function": lambda ckpt, m: lambda h: ckpt(m, h),
    "its __call__": lambda ckpt, m: lambda h: ckpt(m.__call__, h),
    "its forward": lambda ckpt, m: lambda h: ckpt(m.forward, h),
    "a lambda": lambda ckpt, m: lambda h: ckpt(lambda h: m(h), h),
    "a lambda in a lambda": lambda ckpt, m: lambda h: ckpt((lambda f: lambda h: f(h))(lambda h: m(h)), h),
    "a list in a closure": lambda ckpt, m: (lambda layers: lambda h: ckpt(lambda h: layers[0](h), h))([m]),
    "a dict in a closure": lambda ckpt, m: (lambda layers: lambda h: ckpt(lambda h: layers["a"](h), h))({"a": m}),
    "a partial": lambda ckpt, m: lambda h: ckpt(functools.partial(m), h),
    "an argument of a partial": lambda ckpt, m: lambda h: ckpt(functools.partial(lambda m, h: m(h), m), h),
    "a keyword of a partial": lambda ckpt, m: lambda h: ckpt(functools.partial(lambda h, m: m(h), m=m), h),
    "an argument": lambda ckpt, m: lambda h: ckpt(lambda h, m: m(h), h, m),
    "an argument in a list": lambda ckpt, m: lambda h: ckpt(lambda h, ms: ms[0](h), h, [m]),
    "a keyword argument": lambda ckpt, m: lambda h: ckpt(lambda h, m: m(h), h, m=m),
    "an inner module": lambda ckpt, m: lambda h: ckpt(Outer(Outer(m)), h),
    "a method of another module": lambda ckpt, m: lambda h: ckpt(Outer(nn.Identity()).with_argument, h, m),
    "a callable object": lambda ckpt, m: lambda h: ckpt(Holder(m), h),
    "a method of an object": lambda ckpt, m: lambda h: ckpt(Holder(m).call, h),
    "a default": lambda ckpt, m: lambda h: ckpt(with_default(m), h),
    "a keyword default": lambda ckpt, m: lambda h: ckpt(with_keyword_default(m), h),
    "a wrapper": lambda ckpt, m: lambda h: ckpt(wrapped(m), h),
    "a global": lambda ckpt, m: lambda h: ckpt(uses_global, h),
    "a function that another calls": lambda ckpt, m: lambda h: ckpt(calls_another, h),
    "a compiled module": lambda ckpt, m: lambda h: ckpt(torch.compile(m, backend="eager"), h),
    "inside of another checkpoint": lambda ckpt, m: lambda h: ckpt(lambda h: ckpt(m, h), h),
    "inside and outside": lambda ckpt, m: lambda h: ckpt(lambda h: ckpt(m, h).exp() * m(h), h),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Counts, lambda: nn.BatchNorm1d(3)], ids=["counters", "batch norm"])
def test_modules_are_found(way: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for ckpt in (none, checkpointing.checkpoint):
        module = make()
        monkeypatch.setitem(globals(), "GLOBAL", module)
        torch.manual_seed(0)
        h = torch.randn(4, 3, requires_grad=True)
        call = WAYS[way](ckpt, module)
        (call(h).sum() + call(h * 2).sum()).backward()
        results.append([h.grad, state_of(module)])
    assert_same(*results)


def functional_norm(ckpt: Checkpoint, how: str) -> list[torch.Tensor]:
    mean, variance = torch.zeros(3), torch.ones(3)
    torch.manual_seed(0)
    h = torch.randn(4, 3, requires_grad=True)

    def with_arguments(h: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(h, mean, variance, training=True).exp()

    def native(h: torch.Tensor) -> torch.Tensor:
        return torch.native_batch_norm(h, None, None, mean, variance, True, 0.1, 1e-5)[0].exp()

    def instance(h: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(h.t()[None], mean, variance, use_input_stats=True).exp()

    calls: dict[str, Callable[[], Any]] = {
        "closure": lambda: ckpt(lambda h: with_arguments(h, mean, variance), h),
        "arguments": lambda: ckpt(with_arguments, h, mean, variance),
        "keywords": lambda: ckpt(with_arguments, h, mean=mean, variance=variance),
        "partial": lambda: ckpt(functools.partial(with_arguments, mean=mean, variance=variance), h),
        "list": lambda: ckpt(lambda h, both: with_arguments(h, *both), h, [mean, variance]),
        "native": lambda: ckpt(native, h),
        "instance": lambda: ckpt(instance, h),
    }
    out = calls[how]()
    out.square().sum().backward()
    return [out.detach(), h.grad, mean, variance]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["closure", "arguments", "keywords", "partial", "list", "native", "instance"])
def test_functional_norms_change_their_statistics_once(how: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    assert_same(functional_norm(checkpointing.checkpoint, how), functional_norm(none, how))


@pytest.mark.parametrize("size", [4, 2**18, 2**19])
def test_large_buffers(size: int) -> None:
    """A buffer of over a mebibyte is copied only as long as forwards change it."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("changes", torch.ones(size))
            self.register_buffer("constant", torch.ones(size))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            out = h * self.changes[0].clone() * self.constant[0]
            self.changes.mul_(0.5)
            return out.exp()

    results = []
    for ckpt in (none, checkpointing.checkpoint):
        module, h = Large(), torch.ones(2, requires_grad=True)
        for _ in range(3):
            (ckpt(module, h).sum() + ckpt(module, h).sum()).backward()
        results.append([h.grad, module.changes, module.constant])
    assert_same(*results)


def test_state_is_restored_if_the_recomputation_raises() -> None:
    module, fails = Counts(), []

    def function(h: torch.Tensor) -> torch.Tensor:
        out = module(h)
        if fails:
            raise KeyError("mine")
        return out

    h = torch.ones(2, 3, requires_grad=True)
    out = checkpointing.checkpoint(function, h)
    before = state_of(module)
    fails.append(1)
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    assert_same(state_of(module), before)


def test_gradients_use_the_state_of_their_forward() -> None:
    """A function that saves its state itself gets the value that its forward saved."""

    class Average(nn.Module):
        def __init__(self, clones: bool) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(2, 3))
            self.clones = clones

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.average.mul_(0.5)
            scaled = h.sin() * (self.average.clone() if self.clones else self.average)
            return scaled * (self.average[0].clone() if self.clones else self.average[0])

    results = []
    for ckpt in (none, checkpointing.checkpoint):
        module, h = Average(ckpt is none), torch.ones(2, 3, requires_grad=True)
        (ckpt(module, h).sum() + ckpt(module, h).sum()).backward()
        results.append([h.grad, module.average])
    assert_same(*results)


def test_versions_do_not_change() -> None:
    """Another part of the graph may have saved the buffer."""
    module = Counts()
    h = torch.ones(2, 3, requires_grad=True)
    out = checkpointing.checkpoint(module, h)
    other = h * module.average
    versions = [buffer._version for buffer in module.buffers()]
    (other.sum() + out.sum()).backward()
    assert versions == [buffer._version for buffer in module.buffers()]
    assert [id(b) for b in module.buffers()] == [id(b) for b in copy.copy(module).buffers()]


def test_buffers_stay_the_same_objects() -> None:
    module = nn.BatchNorm1d(3)
    before = [(id(buffer), buffer.data_ptr()) for buffer in module.buffers()]
    checkpointing.checkpoint(module, torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert before == [(id(buffer), buffer.data_ptr()) for buffer in module.buffers()]


def test_steps_of_accumulation_in_any_order() -> None:
    """Backwards in another order than the forwards, and twice through the same graph."""
    for order in itertools.permutations(range(3)):
        results = []
        for ckpt in (none, checkpointing.checkpoint):
            torch.manual_seed(0)
            module = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
            h = torch.randn(4, 3, requires_grad=True)
            losses = [ckpt(module, h * i).sin().sum() for i in range(3)]
            for place in order:
                losses[place].backward(retain_graph=True)
            losses[order[0]].backward()
            results.append([h.grad, state_of(module), {n: p.grad for n, p in module.named_parameters()}])
        assert_same(*results)
