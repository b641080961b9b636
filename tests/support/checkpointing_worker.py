"""One rank of the gloo worlds that ``test_distributed.py`` starts: it runs every case and writes the results to a file."""

from __future__ import annotations

import datetime
import functools
import gc
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accelerator import checkpointing
from accelerator.checkpointing import bindings, partition
from accelerator.checkpointing.buffers import Buffers
from tests.support.checkpointing_memory import modes

MODES = modes(4)
FUNCTIONS = {"checkpoint": checkpointing.checkpoint, "non_reentrant": checkpointing.non_reentrant_checkpoint}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {"odd": (3, 7), "even": (4, 8)}


class Summed(torch.autograd.Function):
    """Sums over all ranks in forward. Backward passes on the gradient of the rank."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        whole = part.float().clone()
        dist.all_reduce(whole)
        return whole.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone()


class Layer(nn.Module):
    """A tensor-parallel layer: input and output are the same on every rank, the random numbers between them differ."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=dtype)
        self.second = nn.Linear(width, width, dtype=dtype)

    def forward(self, h: torch.Tensor, extras: dict[str, Any], scale: float = 1.0) -> torch.Tensor:
        outside = torch.nn.functional.dropout(self.first(h), 0.2)
        with checkpointing.get_cuda_rng_tracker().fork():
            inside = torch.nn.functional.dropout(torch.tanh(outside), 0.3)
            with checkpointing.get_cuda_rng_tracker().fork():
                inside = inside * torch.rand_like(inside)
            inside = torch.nn.functional.dropout(inside, 0.1)
        bias = extras["bias"][0]
        return self.second(Summed.apply(inside)) * scale + h * bias.t().sum() + extras["tiny"]


def run(ckpt: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Run two iterations of three layers, and return the values that must be equal, bit by bit, in all modes."""
    checkpointing.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(5)
    layers = [Layer(shape[1], dtype) for _ in range(3)]
    results: list[torch.Tensor] = []
    for _ in range(2):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        bias = torch.randn(shape[1], shape[0], dtype=dtype).t().requires_grad_()
        tiny = torch.ones(1, dtype=dtype, requires_grad=True)
        h = x * 1
        for layer in layers:
            h = ckpt(layer, h, {"bias": [bias, None], "tiny": tiny}, scale=0.5)
        h.float().square().sum().backward()
        results += [h.detach(), x.grad, bias.grad, tiny.grad, *[p.grad.clone() for m in layers for p in m.parameters()]]
    results += [torch.rand(3), *checkpointing.get_cuda_rng_tracker().get_states().values()]
    checkpointing.get_cuda_rng_tracker().reset()
    return results


def none(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@functools.cache
def without_checkpointing(shape: str, dtype: str) -> list[torch.Tensor]:
    return run(none, SHAPES[shape], DTYPES[dtype])


def same(mode: str, function: str, dtype: str, shape: str) -> None:
    checkpointing.configure(group=dist.group.WORLD, **MODES[mode])
    expected = without_checkpointing(shape, dtype)
    results = run(FUNCTIONS[function], SHAPES[shape], DTYPES[dtype])
    assert len(expected) == len(results)
    for index, (one, other) in enumerate(zip(expected, results, strict=True)):
        assert one.dtype == other.dtype, f"value {index} is of another dtype"
        assert torch.equal(one, other), f"value {index} differs"


def world() -> Any:
    return dist.group.WORLD


def chain(length: int = 3, size: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, generator=generator, requires_grad=True)
    h = x * 1
    for _ in range(length):
        h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
    return x, h


def expected_gradient(length: int = 3, size: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, generator=generator, requires_grad=True)
    h = x * 1
    for _ in range(length):
        h = h.sin().exp()
    return torch.autograd.grad(h.sum(), x)[0]


def raises(error_type: type[Exception], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except error_type as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")
    assert text in message, f"{text!r} is not in {message}"


class Mpu:
    """An mpu, as configure() takes it, whose methods have one prefix."""

    def __init__(self, prefix: str, rank: Any, size: Any, group: Any) -> None:
        setattr(self, f"get_{prefix}_parallel_rank", lambda: rank)
        setattr(self, f"get_{prefix}_parallel_world_size", lambda: size)
        setattr(self, f"get_{prefix}_parallel_group", lambda: group)


def case_groups_of_every_type() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = expected_gradient()
    half = size // 2
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    mine = halves[rank >= half]
    groups: list[dict[str, Any]] = [{"group": world()}, {"group": mesh["tp"]}, {"group": mesh["dp"]}, {"group": mine}]
    groups += [{"mpu_": Mpu(prefix, rank, size, world())} for prefix in ("tensor_model", "slice", "model")]
    for options in groups:
        checkpointing.configure(partition_activations=True, **options)
        x, h = chain()
        h.sum().backward()
        assert torch.equal(x.grad, expected), options
    raises(ValueError, "mesh['tp']", lambda: checkpointing.configure(group=mesh))
    other = halves[rank < half]
    raises((ValueError, TypeError), "group", lambda: checkpointing.configure(group=other))  # type: ignore[arg-type]
    raises(TypeError, "ProcessGroup", lambda: checkpointing.configure(group=3))
    raises(ValueError, "mpu_ says rank 9", lambda: checkpointing.configure(Mpu("model", 9, size, world())))
    raises(ValueError, "has this process as rank", lambda: checkpointing.configure(Mpu("model", 0, size + 1, world())))
    raises(TypeError, "ProcessGroup", lambda: checkpointing.configure(Mpu("model", rank, size, None)))
    raises(ValueError, "both", lambda: checkpointing.configure(Mpu("model", rank, size, world()), group=world()))


def case_partition_without_a_group() -> None:
    checkpointing.configuration.current = checkpointing.configuration.Settings()
    raises(ValueError, "no group", lambda: checkpointing.configure(partition_activations=True))
    raises(ValueError, "no group", lambda: checkpointing.partition_activations_in_checkpoint(True))
    assert not checkpointing.configuration.current.partition_activations


def case_group_of_one_copies_nothing() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    checkpointing.configure(partition_activations=True, group=alone)
    received: list[torch.Tensor] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        received.append(h)
        return h.sin().exp()

    x = torch.ones(8, requires_grad=True)
    checkpointing.checkpoint(function, x).sum().backward()
    assert received[0] is x
    assert received[1] is x


def case_group_destroyed_between_forward_and_backward() -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    checkpointing.configure(partition_activations=True, group=group)
    x, h = chain(1)
    dist.destroy_process_group(group)
    before = torch.get_rng_state()
    raises(RuntimeError, "destroyed between forward and backward", lambda: h.sum().backward())
    assert torch.equal(before, torch.get_rng_state())
    assert x.grad is None
    raises(ValueError, "group cannot be used", lambda: checkpointing.configure(group=group))
    # configure() keeps the group of the last call, but not a destroyed one.
    raises(ValueError, "no group", lambda: checkpointing.configure(partition_activations=True))
    checkpointing.configure(partition_activations=True, group=world())
    x, h = chain()
    h.sum().backward()
    assert torch.equal(x.grad, expected_gradient())


def case_the_group_outlasts_a_call_without_one() -> None:
    checkpointing.configure(group=world())
    checkpointing.configure(partition_activations=True)
    assert checkpointing.get_partition_size(torch.ones(9)) == -(-9 // dist.get_world_size())


def case_forward_decides() -> None:
    settings = [{}, MODES["partition"], MODES["contiguous"], {"checkpoint_in_cpu": True, "profile": True}]
    for first, second in itertools.permutations(settings, 2):
        checkpointing.configure(group=world(), **first)
        x, h = chain()
        checkpointing.configure(group=world(), **second)
        h.sum().backward()
        assert torch.equal(x.grad, expected_gradient())


def case_tensors_of_every_size() -> None:
    checkpointing.configure(partition_activations=True, group=world())
    for numel in range(1, 3 * dist.get_world_size() ** 2):
        x = torch.arange(1.0, numel + 1, requires_grad=True)
        checkpointing.checkpoint(lambda h: h.sin().exp(), x).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0]), numel


def case_layouts_come_back() -> None:
    checkpointing.configure(partition_activations=True, group=world())
    base = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    views = {
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2],
        "expanded": base[0, 0].expand(5, 4),
        "channels last": base.view(1, 6, 8, 4).contiguous(memory_format=torch.channels_last),
        "overlapping": base.reshape(-1).unfold(0, 4, 1),
        "scalar": base[0, 0, 0],
        "empty": base[:0],
    }
    for name, view in views.items():
        received: list[tuple[Any, ...]] = []

        def function(h: torch.Tensor, received: list[tuple[Any, ...]] = received) -> torch.Tensor:
            received.append((h.shape, h.stride(), h.detach().clone(), h.requires_grad))
            return h.sin().exp()

        (results,) = torch.autograd.grad(checkpointing.checkpoint(function, view).sum(), base, retain_graph=True)
        (expected,) = torch.autograd.grad(view.sin().exp().sum(), base, retain_graph=True)
        assert torch.equal(results, expected), name
        if view.numel():
            assert received[0][:2] == received[1][:2], name
            assert torch.equal(received[0][2], received[1][2]), name


def case_the_callers_tensors_stay() -> None:
    for settings in (MODES["partition"], MODES["partition+cpu"], MODES["contiguous"]):
        checkpointing.configure(group=world(), **settings)
        x = torch.arange(24.0).view(4, 6).t().requires_grad_()
        copy, pointer, stride = x.detach().clone(), x.data_ptr(), x.stride()
        out = checkpointing.checkpoint(lambda h: h.sin().exp(), x)
        for _ in range(2):
            assert x.shape == (6, 4)
            assert x.data_ptr() == pointer
            assert x.stride() == stride
            assert torch.equal(x, copy)
            out.sum().backward(retain_graph=True)
        with torch.no_grad():
            checkpointing.checkpoint(lambda h: h.sin(), x)
        assert torch.equal(x, copy)


def case_passed_twice_passed_through_and_nested() -> None:
    checkpointing.configure(partition_activations=True, group=world())

    def gradients(ckpt: Callable[..., Any]) -> torch.Tensor:
        x = torch.linspace(0, 1, 11, requires_grad=True)

        def outer(h: torch.Tensor, again: torch.Tensor) -> Any:
            assert ckpt is none or h is again
            return h, ckpt(lambda a, b: a.sin() * b, h, again) + ckpt(torch.exp, h)

        kept, made = ckpt(outer, x, x)
        return torch.autograd.grad((kept * made).sum(), x)[0]

    assert torch.equal(gradients(none), gradients(checkpointing.checkpoint))


def case_inside_hooks_of_the_caller() -> None:
    checkpointing.configure(partition_activations=True, group=world())
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    x = torch.linspace(0, 1, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = checkpointing.checkpoint(lambda h: h.sin().exp(), x)
    out.sum().backward()
    assert torch.equal(x.grad, x.cos() * x.sin().exp())
    if bindings.innermost_hooks is not None:
        assert packed == [12 // dist.get_world_size()]


def held() -> int:
    """Return the bytes in the storages of all tensors that gc tracks, without small ones such as random states."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.layout is torch.strided:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(size for size in storages.values() if size >= 2**16)


def held_by_layers(settings: dict[str, Any], numel: int, layers: int = 6) -> int:
    """Return the bytes that the inputs of a chain of checkpoints occupy. The leaf tensor and the last output do not count."""
    checkpointing.configure(group=world(), **settings)
    x = torch.zeros(numel, requires_grad=True)
    before = held()
    h = x.detach().requires_grad_() * 1
    for _ in range(layers):
        h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
    total = held() - before - numel * 4
    h.sum().backward()
    del h
    # Only contiguous buffers stay allocated for the next iteration.
    kept = 0 if settings.get("contiguous_checkpointing") is None else total
    # A thread of gloo may release its last tensor shortly after the collective.
    for _ in range(100):
        if held() - before - kept - numel * 4 <= 0:
            return total
        time.sleep(0.05)
    raise AssertionError("bytes are still held after backward")


def case_held_bytes() -> None:
    size = dist.get_world_size()
    # gc skips frozen objects, which makes each call of held() faster.
    gc.collect()
    gc.freeze()
    for numel in (2**18, 2**18 + 1, 2**19 + 7):
        plain = held_by_layers({}, numel)
        parts = held_by_layers(MODES["partition"], numel)
        assert plain == 6 * numel * 4, plain
        assert parts == 6 * 4 * (-(-numel // size)), (plain, parts)
    checkpointing.configure()
    buffers = {**MODES["contiguous"], "num_checkpoints": 6}
    assert held_by_layers(buffers, 2**18) == 6 * 4 * 2**18 // size
    gc.unfreeze()


def case_contiguous_buffers() -> None:
    checkpointing.configure()
    checkpointing.configure(group=world(), **{**MODES["contiguous"], "num_checkpoints": 3})
    pointers = set()
    for _ in range(3):
        x, h = chain()
        buffers = checkpointing.configuration.current.buffers
        assert isinstance(buffers, Buffers)
        assert len(buffers._buffers) == 1
        (buffer,) = buffers._buffers.values()
        assert buffer.memory.numel() == 3 * -(-30 // dist.get_world_size())
        assert not buffer.free
        pointers.add(buffer.memory.data_ptr())
        # All slots of the buffer are in use. Further checkpoints get separate memory.
        more, further = chain()
        further.sum().backward()
        assert torch.equal(more.grad, expected_gradient())
        del further
        raises(RuntimeError, "still wait", checkpointing.reset)
        h.sum().backward()
        assert torch.equal(x.grad, expected_gradient())
        assert len(buffer.free) == 3
        # Forwards without a graph, and graphs that are dropped without a backward, leave no slot in use.
        with torch.no_grad():
            for _ in range(5):
                chain()
        for _ in range(5):
            chain()
    assert len(pointers) == 1
    # If no checkpoint waits for its backward, a new size replaces the buffer.
    for size in (40, 30):
        x, h = chain(size=size)
        (buffer,) = buffers._buffers.values()
        assert buffer.memory.numel() == 3 * -(-size // dist.get_world_size())
        h.sum().backward()
        assert torch.equal(x.grad, expected_gradient(size=size))


def case_an_exception_gives_slots_back() -> None:
    checkpointing.configure()
    checkpointing.configure(group=world(), **{**MODES["contiguous"], "num_checkpoints": 1})
    kept: list[KeyError] = []

    def failing(h: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    def attempt() -> None:
        try:
            checkpointing.checkpoint(failing, torch.ones(30, requires_grad=True))
        except KeyError as error:
            # A kept exception keeps the frames of its traceback alive.
            kept.append(error)

    for _ in range(3):
        attempt()
    assert len(kept) == 3
    chain(1)[1].sum().backward()


def case_exception_in_the_recomputation() -> None:
    checkpointing.configure(partition_activations=True, group=world())
    checkpointing.model_parallel_cuda_manual_seed(3)
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        with checkpointing.get_cuda_rng_tracker().fork():
            h = torch.nn.functional.dropout(h, 0.5)
            if len(runs) == 2:
                raise KeyError("mine")
            return h.sin().exp()

    x = torch.ones(9, requires_grad=True)
    out = checkpointing.checkpoint(function, x)
    tracker = checkpointing.get_cuda_rng_tracker()
    before = [torch.get_rng_state(), *tracker.get_states().values()]
    raises(KeyError, "mine", lambda: out.sum().backward(retain_graph=True))
    after = [torch.get_rng_state(), *tracker.get_states().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    out.sum().backward()
    assert x.grad is not None
    tracker.reset()


def case_gathered_ahead() -> None:
    events: list[str] = []
    original = partition.Gathering

    class Watched(original):  # type: ignore[misc, valid-type]
        def __init__(self, part: torch.Tensor, group: Any) -> None:
            events.append("gather")
            super().__init__(part, group)

    checkpointing.configure(partition_activations=True, group=world())
    partition.Gathering = Watched  # type: ignore[misc]
    try:
        h = torch.ones(10, requires_grad=True)
        for name in "abc":

            def function(h: torch.Tensor, name: str = name) -> torch.Tensor:
                events.append(name)
                return h.sin().exp()

            h = checkpointing.checkpoint(function, h)
        events.clear()
        h.sum().backward()
    finally:
        partition.Gathering = original  # type: ignore[misc]
    # The argument of c is gathered on demand. Those of b and a are gathered early, before c and b are recomputed. None is
    # gathered twice.
    assert events == ["gather", "gather", "c", "gather", "b", "a"], events


def case_arguments_that_differ_between_ranks() -> None:
    checkpointing.configure(partition_activations=True, group=world(), determinism_check="debug")
    x = torch.full((8,), float(dist.get_rank()), requires_grad=True)
    raises(RuntimeError, "argument 0", lambda: checkpointing.checkpoint(torch.exp, x))
    more = [x] if dist.get_rank() else [x, torch.ones(8)]
    raises(RuntimeError, "their counts differ", lambda: checkpointing.checkpoint(lambda *all_of_them: sum(all_of_them), *more))
    same_everywhere = torch.ones(8, requires_grad=True)
    checkpointing.checkpoint(lambda h: h.sin().exp(), same_everywhere).sum().backward()


def case_seeds() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tracker = checkpointing.get_cuda_rng_tracker()
    for group in (mesh, world()):
        checkpointing.configure(group=group)
        assert (checkpointing.mp_rank, checkpointing.mp_size) == (rank, dist.get_world_size())
        checkpointing.model_parallel_cuda_manual_seed(100)
        with tracker.fork():
            assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(100 + 2718 + rank)))
    checkpointing.model_parallel_cuda_manual_seed(100)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(100)))
    with tracker.fork():
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(100 + 2718 + rank)))
    checkpointing.model_parallel_reconfigure_tp_seed(200)
    with tracker.fork():
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(200 + 2718 + rank)))
    tracker.reset()


def case_helpers() -> None:
    checkpointing.configure(group=world())
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(9.0).view(3, 3).requires_grad_()
    part = -(-9 // size)
    assert checkpointing.get_partition_size(x) == part
    assert checkpointing.get_partition_start(x) == part * rank
    for host in (False, True):
        args = [x, "text", torch.arange(9)]
        parts = checkpointing.partition_activations(args, host, False)
        assert parts[0].shape == (part,)
        assert parts[1:] == args[1:]
        assert x.shape == (3, 3)
        pairs = checkpointing.get_partitioned_activations_for_backward(args, parts, False)
        whole = checkpointing.gather_partitioned_activations(pairs)
        assert torch.equal(whole[0], x)
        assert whole[0].requires_grad
        assert whole[1] == "text"
        assert whole[2] is args[2]
    # A tensor with hardly more elements than there are ranks is partitioned and gathered too.
    small = torch.arange(float(size) + 1)
    pairs = checkpointing.get_partitioned_activations_for_backward([small], checkpointing.partition_activations([small]))
    assert torch.equal(checkpointing.gather_partitioned_activations(pairs)[0], small)


EXTRA = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}


def cases(size: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases of a world of two or four ranks. Of the modes, four ranks run only those that partition."""
    modes = list(MODES) if size == 2 else ["partition", "contiguous"]
    functions = list(FUNCTIONS) if size == 2 else ["checkpoint"]
    for mode, function, dtype, shape in itertools.product(modes, functions, DTYPES, SHAPES):
        yield f"same-{mode}-{function}-{dtype}-{shape}", lambda a=(mode, function, dtype, shape): same(*a)
    # groups_of_every_type divides the world into halves. Only the halves of four ranks have several ranks.
    yield from (item for item in EXTRA.items() if size > 2 or item[0] != "groups_of_every_type")


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, str] = {}
    for name, case in cases(size):
        started = time.perf_counter()
        try:
            case()
            results[name] = ""
            print(f"{time.perf_counter() - started:6.2f} s {name}", flush=True)
        except Exception:
            results[name] = traceback.format_exc()
        checkpointing.configuration.current = checkpointing.configuration.Settings()
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(results, file)
        Path(file.name).replace(folder / f"{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
