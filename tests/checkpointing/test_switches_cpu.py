"""Tests that a recomputation has the forward's generators, modes, and switches of torch, and leaves the caller's alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accelerator import checkpointing
from accelerator.checkpointing import bindings
from tests.support.checkpointing_cases import Checkpoint, none

SETTINGS: list[dict[str, Any]] = [
    {},
    {"partition_activations": True},
    {"checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2},
    {"profile": True, "synchronize": True},
]

_c: Any = torch._C


@pytest.fixture(autouse=True)
def _same_switches_afterwards() -> Iterator[None]:
    before = bindings.read_switches(True)
    yield
    bindings.set_switches(True, before)
    assert bindings.read_switches(True) == before
    assert bindings.modes() == bindings.NO_MODES


# Setters of torch._C that are no switches on which the result of a forward depends, by the reason.
OTHER_SETTERS = {
    "warnings and messages": (
        "autograd_fallback_mode backcompat_broadcast_warn backcompat_keepdim_warn print_stack_traces_on_fatal_signal "
        "should_use_format_with_string_table storage_access_error_msg storage_data_ptr_access_error_msg "
        "throw_on_mutable_data_ptr warn_deprecated_on_mutable_data_ptr warnAlways warn_on_accumulate_grad_stream_mismatch "
        "thread_name dtensor_allow_implicit_replication"
    ),
    "attributes of one tensor or object": (
        "conj neg fake_constant tensor_metadata value_trace generator_metaclass worker_pids worker_signal_handlers"
    ),
    "autograd, autocast, tracing and modes, which checkpoints restore or which are inside of them": (
        "cached_tensors_enabled dispatch_mode fwd_grad_enabled grad_enabled graph_exec_group graph_executor_optimize "
        "meta_in_tls_dispatch_include multithreading_enabled only_lift_cpu_tensors skip_next_torch_function "
        "torch_function_state tracing_state view_replay_enabled override_stale_capture_stream "
        "grad_layout_enforcement_enabled"
    ),
    "memory": "default_mobile_cpu_allocator",
    "checks": "check_sparse_tensor_invariants",
    "libraries that are chosen for a program": "blas_preferred_backend linalg_preferred_backend rocm_fa_preferred_backend",
    "another setter sets the same": "default_tensor_type cublas_allow_tf32 cudnn_allow_tf32 onednn_allow_tf32",
}

# Names whose getter is not the name of the setter.
SDP = {"flash", "math", "mem_efficient", "cudnn", "overrideable", "fa3", "fa4"}


def test_every_switch_of_torch_is_restored_or_excluded() -> None:
    """A new switch of torch fails here, until it is added to the one or the other list."""
    names = {name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")}
    excluded = {name for each in OTHER_SETTERS.values() for name in each.split()}
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        excluded -= {"cublas_allow_tf32", "cudnn_allow_tf32"}
    changed = set()
    for name in names - excluded:
        function = getattr(torch._C, f"_set_{name}")
        before = bindings.read_switches(True)
        try:
            try:
                set_another(name, function)
            except RuntimeError:
                changed.add(name)  # this build or machine has it not, so it cannot differ
            if bindings.read_switches(True) != before:
                changed.add(name)
        finally:
            bindings.set_switches(True, before)
        assert bindings.read_switches(True) == before, name
    assert names - excluded - changed == set()


def set_another(name: str, function: Callable[..., None]) -> None:
    """Set a switch to another value than it has."""
    special: dict[str, Callable[[], None]] = {
        "default_dtype": lambda: torch.set_default_dtype(torch.float64),
        "deterministic_algorithms": lambda: function(True, warn_only=True),
        "float32_matmul_precision": lambda: function("high"),
        "fp32_precision_setter": lambda: function("cuda", "conv", "ieee"),
        "sdp_priority_order": lambda: function(list(reversed(_c._get_sdp_priority_order()))),
        "sm_carveout_experimental": lambda: function(4),
        "qengine": lambda: function(next(e for e in _c._supported_qengines() if e != _c._get_qengine())),
    }
    if name in special:
        special[name]()
        return
    short = name.removeprefix("sdp_use_")
    getter = getattr(torch._C, f"_get_{short}_sdp_enabled" if short in SDP else f"_get_{name}")
    present = getter()
    if isinstance(present, tuple):
        function(*[not each for each in present])
    elif isinstance(present, bool):
        function(not present)
    else:
        function(next(each for each in other_values(present) if each != present))


def other_values(present: Any) -> list[Any]:
    return list(type(present).__members__.values()) if hasattr(type(present), "__members__") else ["cudnn", "native", "auto"]


def test_flags_of_backends_are_restored() -> None:
    """Each flag of torch.backends that is an attribute, as far as this build of torch can set it."""
    tried = set()
    for backend in ("cudnn", "mkldnn", "miopen", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"):
        module = functools.reduce(lambda item, name: getattr(item, name, None), backend.split("."), torch.backends)
        names = [n for n, v in vars(type(module)).items() if type(v).__name__ == "ContextProp"] or [
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
            "fp32_precision",
        ]
        for name in names:
            present = getattr(module, name, None)
            # A limit of the search for the fastest algorithm; a flag whose getter returns nothing.
            if name == "benchmark_limit" or present is None or (name == "allow_tf32" and "fp32_precision" in names):
                continue
            before = bindings.read_switches(True)
            values = [not present] if isinstance(present, bool) else ["ieee", "tf32", "cudnn", "native"]
            for value in values:
                with contextlib.suppress(RuntimeError, ValueError):
                    setattr(module, name, value)
            if getattr(module, name) != present:
                tried.add(f"{backend}.{name}")
                bindings.set_switches(True, before)
                assert getattr(module, name) == present, f"{backend}.{name}"
    assert {"cudnn.enabled", "cudnn.deterministic", "cudnn.benchmark", "mkldnn.enabled"} <= tried


def read_all() -> list[Any]:
    """What a function can observe on a machine without an accelerator."""
    return bindings.read_switches(False)


@contextlib.contextmanager
def switched(name: str, function: Callable[..., None]) -> Iterator[None]:
    before = bindings.read_switches(True)
    set_another(name, function)
    try:
        yield
    finally:
        bindings.set_switches(True, before)


@contextlib.contextmanager
def attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "float32_matmul_precision": lambda: switched("float32_matmul_precision", _c._set_float32_matmul_precision),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "nnpack": lambda: torch.backends.nnpack.flags(enabled=False),
    "fast path": lambda: fastpath(not torch.backends.mha.get_fastpath_enabled()),
    "filled memory": lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "reduced precision of the math kernel": lambda: switched(
        "math_sdp_allow_fp16_bf16_reduction", _c._set_math_sdp_allow_fp16_bf16_reduction
    ),
}
if hasattr(torch._C, "_get_fp32_precision_getter"):
    CONTEXTS["precision of all"] = lambda: torch.backends.flags(fp32_precision="tf32")
    CONTEXTS["precision of convolutions"] = lambda: attribute(torch.backends.mkldnn.conv, "fp32_precision", "tf32")


def test_switches_of_recomputations_in_one_backward() -> None:
    """One run of backward recomputes with three dtypes in turn, and one inside of another's recomputation."""
    seen: list[torch.dtype] = []

    def function(h: torch.Tensor, inner: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(torch.get_default_dtype())
        # Unpacks a saved tensor of another checkpoint, which is recomputed for it.
        return h.sin() if inner is None else h.sin() * inner.grad_fn._saved_result.detach().sum()  # type: ignore[union-attr]

    def run(dtype: torch.dtype, *args: Any) -> torch.Tensor:
        torch.set_default_dtype(dtype)
        try:
            return checkpointing.checkpoint(lambda *args: function(*args).exp(), *args)
        finally:
            torch.set_default_dtype(torch.float32)

    out = torch.ones(2, requires_grad=True)
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float16, torch.float64, torch.float32]
    for each in dtypes:
        out = run(each, out)
    other = run(torch.float32, torch.ones(2, requires_grad=True))
    out = run(torch.float64, out, other)
    assert seen == [*dtypes, torch.float32, torch.float64, torch.float32]
    seen.clear()
    out.sum().backward()
    assert seen == [torch.float64, torch.float32, *dtypes[::-1]]
    assert torch.get_default_dtype() is torch.float32


@contextlib.contextmanager
def fastpath(value: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: " ".join(each))
@pytest.mark.parametrize("name", CONTEXTS)
def test_recomputation_has_the_switches_of_its_forward(name: str, settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    for forward, backward in ((name, "nothing"), ("nothing", name), (name, name), (name, "sdpa_kernel")):
        seen: list[list[Any]] = []

        def function(h: torch.Tensor, seen: list[list[Any]] = seen) -> torch.Tensor:
            seen.append(read_all())
            return h.sin().exp()

        x = torch.ones(2, requires_grad=True)
        with CONTEXTS[forward]():
            out = checkpointing.checkpoint(lambda h, f=function: f(h), x)
        with CONTEXTS[backward]():
            before = read_all()
            out.sum().backward()
            assert read_all() == before
        assert len(seen) == 2
        assert seen[0] == seen[1], (forward, backward)


# Modes.


class Doubles(TorchFunctionMode):
    """Doubles the result of ``torch.sin``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.Tensor.sin) else out


class DoublesOps(TorchDispatchMode):
    """Doubles the result of ``aten.cos``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.cos.default else out


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reading a random state allocates a tensor; torch 2.6 saves the arguments with another one.
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "no mode": contextlib.nullcontext,
    "a function mode": Doubles,
    "a dispatch mode": DoublesOps,
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("outer", MODES)
def test_recomputation_has_the_modes_of_its_forward(outer: str, inner: str, backward: str) -> None:

    def run(ckpt: Checkpoint) -> list[torch.Tensor]:
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        with MODES[outer](), MODES[inner]():
            out = ckpt(lambda h: torch.sin(h.cos().exp()).exp().exp(), x)
        with MODES[backward]():
            before = bindings.modes()
            out.sum().backward()
            assert bindings.modes() == before
        return [out.detach(), x.grad]  # type: ignore[list-item]

    expected = run(none)
    for settings in SETTINGS:
        checkpointing.configure(**settings)
        assert all(torch.equal(one, other) for one, other in zip(run(checkpointing.checkpoint), expected, strict=True))


def test_modes_do_not_see_the_copies_of_state() -> None:
    results = []
    for ckpt in (none, checkpointing.checkpoint):
        module = torch.nn.BatchNorm1d(3)
        h = torch.randn(4, 3, requires_grad=True)
        with Counts() as mode:
            out = ckpt(module, h)
        results.append(mode.seen)
        out.sum().backward()
    # The rest is the recomputation, which detaches what it saves.
    assert results[0] == results[1][: len(results[0])]
    assert set(results[1]) - {"aten.detach.default"} == set(results[0])


def test_modes_are_restored_if_the_recomputation_raises() -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("mine")
        return h.sin().exp()

    x = torch.ones(2, requires_grad=True)
    with Doubles(), DoublesOps(), sdpa_kernel(SDPBackend.MATH):
        out = checkpointing.checkpoint(function, x)
    before = bindings.modes(), bindings.read_switches(False)
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    assert before == (bindings.modes(), bindings.read_switches(False))


# Generators.


def draw(h: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (h * torch.rand(h.shape, generator=generator)).exp()


class Pack:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def draw(self, h: torch.Tensor) -> torch.Tensor:
        return draw(h, self.generator)


GENERATORS: dict[str, Callable[[Checkpoint, torch.Tensor, torch.Generator], Any]] = {
    "argument": lambda ckpt, h, g: ckpt(draw, h, g),
    "keyword": lambda ckpt, h, g: ckpt(draw, h, generator=g),
    "list": lambda ckpt, h, g: ckpt(lambda h, gs: draw(h, gs[0]), h, [g]),
    "dict": lambda ckpt, h, g: ckpt(lambda h, gs: draw(h, gs["g"][0]), h, {"g": (g,)}),
    "closure": lambda ckpt, h, g: ckpt(lambda h: draw(h, g), h),
    "partial": lambda ckpt, h, g: ckpt(functools.partial(draw, generator=g), h),
    "method": lambda ckpt, h, g: ckpt(Pack(g).draw, h),
    "nested checkpoints": lambda ckpt, h, g: ckpt(lambda h, g: ckpt(draw, h, g), h, g),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: " ".join(each))
@pytest.mark.parametrize("where", GENERATORS)
def test_recomputation_draws_from_generators_again(where: str, settings: dict[str, Any]) -> None:
    """Report: pytorch 84864."""
    checkpointing.configure(**settings)
    results = []
    for ckpt in (none, checkpointing.checkpoint):
        generator = torch.Generator().manual_seed(1)
        h = torch.ones(3, requires_grad=True)
        outs = [GENERATORS[where](ckpt, h, generator) for _ in range(2)]
        between = torch.rand(2, generator=generator)
        sum(out.sum() for out in outs).backward()
        after = torch.rand(2, generator=generator)
        results.append([h.grad, between, after, *outs])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
