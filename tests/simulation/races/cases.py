"""Small programs with a race, and others without one. Each runs on streams and memory of its own.

In a function marked `racy`, the comments ``# first`` and ``# second`` are at the lines that a report must name.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.support.simulation_driver import loaded_runtime

N = 1000


class Case(NamedTuple):
    """A program."""

    run: Callable[[], object]
    advice: str  # a part of the advice that the report must give; empty if there is no race
    is_possible: bool
    gpus: int

    def lines(self) -> tuple[int, int]:
        """Return the numbers of the two lines that the report must name."""
        source, start = inspect.getsourcelines(self.run)
        first, second = (next(i for i, line in enumerate(source) if f"# {word}" in line) for word in ("first", "second"))
        return start + first, start + second


CASES: dict[str, Case] = {}


def racy(advice: str, *, is_possible: bool = False, gpus: int = 1) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Mark a program that has one race."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        CASES[run.__name__] = Case(run, advice, is_possible, gpus)
        return run

    return add


def silent(run: Callable[[], object]) -> Callable[[], object]:
    """Mark a program that has no race."""
    CASES[run.__name__] = Case(run, "", False, 2 if "gpus" in run.__name__ else 1)
    return run


def _tensor(*shape: int, device: str = "cuda") -> torch.Tensor:
    tensor = torch.ones(*(shape or (N,)), device=device)
    torch.cuda.synchronize(device)
    return tensor


def _pinned(size: int = N) -> torch.Tensor:
    return torch.ones(size).pin_memory()


def _words(*arguments: int) -> list[ctypes.c_size_t]:
    """Return the arguments of a function of the CUDA runtime, which a program calls at its own line."""
    return [ctypes.c_size_t(each) for each in arguments]


# ---- Two streams. ----


@racy("wait_stream")
def same_tensor() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x * 2  # first
    x.add_(1)  # second


@silent
def same_tensor_ordered() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x * 2
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)


@racy("wait_stream")
def statistics_of_a_norm() -> None:
    """The op's schema does not say that it writes them."""
    x, side = _tensor(4, 3, 5), torch.cuda.Stream()
    norm = torch.nn.BatchNorm1d(3).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        norm(x)  # first
    norm.running_mean + 1  # second


@silent
def statistics_of_a_norm_that_does_not_train() -> None:
    x, side = _tensor(4, 3, 5), torch.cuda.Stream()
    norm = torch.nn.BatchNorm1d(3).cuda().eval()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        norm(x)
    norm.running_mean + 1


@racy("wait_stream")
def produced_on_side_stream() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2  # first
    y + 1  # second


@silent
def produced_on_side_stream_ordered() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2
        done = side.record_event()
    done.wait()
    y + 1


@racy("wait_stream")
def event_too_early() -> None:
    x, side, event = _tensor(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        event.record()
        x.mul_(2)  # first
    event.wait()
    x + 1  # second


@silent
def event_after_work() -> None:
    x, side, event = _tensor(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x.mul_(2)
        event.record()
    event.wait()
    x + 1


@racy("wait_stream")
def view_and_base() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[100:200].zero_()  # first
    x.sum()  # second


@silent
def view_and_other_view() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[100:200].zero_()
    x[200:].sum()


@racy("wait_stream")
def overlapping_columns() -> None:
    x, side = _tensor(N, 1000), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:, :10].zero_()  # first
    x[:, 9:].add_(1)  # second


@racy("wait_stream")
def rows_of_a_column() -> None:
    x, side = _tensor(N, 10), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:, :5].zero_()  # first
    x[:2].add_(1)  # second


@racy("wait_stream")
def more_dims_than_a_record_keeps() -> None:
    x, side = _tensor(1024), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.view((2,) * 10).sum()  # first
    x[-1:].zero_()  # second


@silent
def beside_more_dims_than_a_record_keeps() -> None:
    x, side = _tensor(1025), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:1024].view((2,) * 10).sum()
    x[-1:].zero_()


@silent
def disjoint_columns() -> None:
    x, side = _tensor(N, 1000), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:, :10].zero_()
    x[:, 10:].add_(1)


@racy("wait_stream")
def permuted_parts() -> None:
    x, side = _tensor(4, 5, 6), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.permute(2, 0, 1)[1:3].zero_()  # first
    x[:, 1:, 2:4].add_(1)  # second


@silent
def permuted_parts_beside_each_other() -> None:
    x, side = _tensor(4, 5, 6), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.permute(2, 0, 1)[:2].zero_()
    x[..., 2:].add_(1)


@racy("wait_stream")
def windows() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[2:4].zero_()  # first
    x[:10].unfold(0, 4, 1).sum()  # second


@racy("wait_stream")
def bytes_of_a_number() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.view(torch.uint8)[6:8].zero_()  # first
    x[1:3].add_(1)  # second


@silent
def bytes_beside_a_number() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.view(torch.uint8)[4:8].zero_()
    x[2:].add_(1)
    x[:1].add_(1)


@racy("wait_stream")
def gap_between_two_writes() -> None:
    x, side = torch.empty(6 << 20, device="cuda"), torch.cuda.Stream()  # so large that nothing has used the memory
    x[:100].zero_()
    x[200:300].zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()  # first
    x[150:151].zero_()  # second


@racy("wait_stream")
def two_writers() -> None:
    x, one, other = _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        x.fill_(1)  # first
    with torch.cuda.stream(other):
        x.fill_(2)  # second


@silent
def two_readers() -> None:
    x, one, other = _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (one, other):
        with torch.cuda.stream(stream):
            x.sum()


@racy("wait_stream")
def out_argument() -> None:
    x, out, side = _tensor(), _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.add(x, 1, out=out)  # first
    out.sum()  # second


@racy("wait_stream")
def second_result() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        _, places = x.max(0)  # first
    places.sum()  # second


@racy("wait_stream")
def second_of_a_list_of_results() -> None:
    xs, side = [_tensor() for _ in range(2)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        ys = torch._foreach_add(xs, 1)  # first
    ys[1].sum()  # second


@racy("wait_stream")
def optional_argument() -> None:
    x, most, side = _tensor(), _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.clamp(None, most)  # first
    most.add_(1)  # second


@racy("wait_stream")
def foreach_lists() -> None:
    xs, side = [_tensor() for _ in range(3)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch._foreach_add_(xs, 1)  # first
    xs[2].sum()  # second


@racy("wait_stream")
def fork_and_join_with_gap() -> None:
    x, y, one, other = _tensor(), _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        x.add_(1)
    other.wait_stream(one)
    with torch.cuda.stream(one):
        y.add_(1)  # first
    with torch.cuda.stream(other):
        x + y  # second


@silent
def transitive_waits() -> None:
    x, one, other = _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        x.add_(1)
    other.wait_stream(one)
    torch.cuda.current_stream().wait_stream(other)
    x.add_(1)


@silent
def host_waits_between() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()
    x.add_(1)


@silent
def factories_read_nothing() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    for like in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
        like(x)
    torch.full_like(x, 2)
    torch.randint_like(x, 2)
    torch.cuda.current_stream().wait_stream(side)


@silent
def backward_of_side_stream() -> None:
    x, side = _tensor().requires_grad_(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 2).sum()
    torch.cuda.current_stream().wait_stream(side)
    y.backward()
    assert x.grad is not None
    x.grad.sum()


# ---- Two of what is usually one. ----


@racy("wait_stream")
def event_recorded_again() -> None:
    x, one, other, event = _tensor(), torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(one):
        x.add_(1)  # first
        event.record()
    event.record(other)
    event.wait()
    x.sum()  # second


@racy("wait_stream")
def read_after_a_write_of_the_same_stream() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)  # first
        x.sum()
    x.sum()  # second


@racy("wait_stream")
def write_after_a_read_of_the_same_stream() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.sum()
        x.add_(1)  # first
    x.sum()  # second


@racy("wait_stream")
def two_parts_with_other_strides() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.as_strided((2, 2), (1, 4)).sum()  # first
        x.as_strided((2, 2), (2, 3)).sum()
    x[1:2].add_(1)  # second


@racy("wait_stream")
def two_parts_with_other_sizes() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[::2][:3].sum()  # first
        x[::2][:2].sum()
    x[4:5].add_(1)  # second


@racy("wait_stream")
def second_of_two_readers() -> None:
    x, one, other = _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (one, other):
        with torch.cuda.stream(stream):
            x.sum()  # first
    torch.cuda.current_stream().wait_stream(one)
    x.add_(1)  # second


@racy("wait_stream")
def fused_step_of_several_parameters() -> None:
    xs, grads, side = [_tensor() for _ in range(2)], [_tensor() for _ in range(2)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch._fused_sgd_(  # first
            xs, grads, [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False, is_first_step=True
        )
    xs[1].sum()  # second


@racy("wait_stream")
def lists_of_a_copy() -> None:
    xs, ys, side = [_tensor() for _ in range(2)], [_tensor() for _ in range(2)], torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch._foreach_copy_(xs, ys)  # first
    ys[1].zero_()  # second


@silent
def two_blocking_streams() -> None:
    """The default stream waits for blocking streams, and they wait for it; torch's own streams do not block."""
    x, runtime, handles = _tensor(), loaded_runtime(), [ctypes.c_void_p(), ctypes.c_void_p()]
    for handle in handles:
        assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    one, other = (torch.cuda.ExternalStream(handle.value) for handle in handles)
    x.add_(1)
    with torch.cuda.stream(one):
        x.add_(1)
    x.add_(1)
    with torch.cuda.stream(other):
        x.add_(1)
    torch.cuda.synchronize()


@racy("wait_stream")
def two_blocking_streams_beside_each_other() -> None:
    x, runtime, handles = _tensor(), loaded_runtime(), [ctypes.c_void_p(), ctypes.c_void_p()]
    for handle in handles:
        assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    one, other = (torch.cuda.ExternalStream(handle.value) for handle in handles)
    with torch.cuda.stream(one):
        x.add_(1)  # first
    with torch.cuda.stream(other):
        x.add_(1)  # second


@racy("wait_stream", gpus=2)
def blocking_stream_of_the_other_gpu() -> None:
    """The default streams of a GPU wait for its own blocking streams only."""
    x, y, runtime, handle = _tensor(), _tensor(device="cuda:1"), loaded_runtime(), ctypes.c_void_p()
    with torch.cuda.device(1):
        assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
        runtime.cudaMemcpyPeerAsync(*_words(y.data_ptr(), 1, x.data_ptr(), 0, 400, handle.value or 0))  # first
    x.add_(1)  # second


# ---- Copies and fills of extensions. ----


@racy("wait_stream")
def fill_of_a_part() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    loaded_runtime().cudaMemsetAsync(*_words(x.data_ptr() + 400, 0, 400, side.cuda_stream))  # first
    x[:101].sum()  # second


@racy("wait_stream")
def fill_after_an_op() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.sum()  # first
    loaded_runtime().cudaMemsetAsync(*_words(x.data_ptr() + 3600, 0, 400, 0))  # second


@silent
def fill_of_another_part() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    loaded_runtime().cudaMemsetAsync(*_words(x.data_ptr() + 400, 0, 400, side.cuda_stream))
    x[:100].sum()
    x[200:].sum()


def _tables() -> tuple[torch.Tensor, torch.Tensor, list[ctypes.c_size_t], torch.cuda.Stream]:
    """Return two matrices and the arguments of cudaMemcpy2DAsync that copies y[:, 7:10] = x[:, 2:5] on a stream."""
    x, y, side = _tensor(10, 10), _tensor(10, 20), torch.cuda.Stream()
    return x, y, _words(y.data_ptr() + 28, 80, x.data_ptr() + 8, 40, 12, 10, 3, side.cuda_stream), side


@racy("wait_stream")
def columns_that_a_copy_reads() -> None:
    x, _, arguments, _ = _tables()
    loaded_runtime().cudaMemcpy2DAsync(*arguments)  # first
    x[9, 4:].zero_()  # second


@racy("wait_stream")
def columns_that_a_copy_writes() -> None:
    _, y, arguments, _ = _tables()
    loaded_runtime().cudaMemcpy2DAsync(*arguments)  # first
    y[9, 9:].sum()  # second


@racy("wait_stream")
def columns_that_a_fill_writes() -> None:
    x, side = _tensor(10, 10), torch.cuda.Stream()
    loaded_runtime().cudaMemset2DAsync(*_words(x.data_ptr() + 8, 40, 0, 12, 10, side.cuda_stream))  # first
    x[9, 4:].sum()  # second


@racy("wait_stream")
def a_plane_that_a_copy_writes() -> None:
    x, y, side = _tensor(3, 4, 10), _tensor(3, 4, 10), torch.cuda.Stream()
    position, extent = (0, 0, 0), (8, 2, 3)  # two columns of two rows of each plane
    target, source = (address.data_ptr() for address in (y, x))
    sides = [word for start in (source, target) for word in (0, *position, start, 40, 40, 4)]
    loaded_runtime().cudaMemcpy3DAsync((ctypes.c_size_t * 20)(*sides, *extent, 3), *_words(side.cuda_stream))  # first
    y[2, 1, :2].sum()  # second


@silent
def parts_beside_those_of_a_fill_and_a_copy() -> None:
    x, y, z, side = _tensor(10, 10), _tensor(3, 4, 10), _tensor(3, 4, 10), torch.cuda.Stream()
    loaded_runtime().cudaMemset2DAsync(*_words(x.data_ptr() + 8, 40, 0, 12, 10, side.cuda_stream))
    sides = [word for start in (z.data_ptr(), y.data_ptr()) for word in (0, 0, 0, 0, start, 40, 40, 4)]
    loaded_runtime().cudaMemcpy3DAsync((ctypes.c_size_t * 20)(*sides, 8, 2, 3, 3), *_words(side.cuda_stream))
    for rest in (x[:, :2], x[:, 5:], y[:, 2:], y[:, :, 2:]):
        rest.sum()


@silent
def columns_beside_those_of_a_copy() -> None:
    x, y, arguments, _ = _tables()
    loaded_runtime().cudaMemcpy2DAsync(*arguments)
    for rest in (x[:, :2], x[:, 5:], y[:, :7], y[:, 10:]):
        rest.zero_()


def _columns_on_the_host() -> tuple[torch.Tensor, list[ctypes.c_size_t]]:
    """Return a pinned matrix, and the arguments of cudaMemcpy2DAsync that copies host[:, :2] = x[:, :2] on a stream."""
    x, host, side = _tensor(4, 6), _pinned(24).view(4, 6), torch.cuda.Stream()
    return host, _words(host.data_ptr(), 24, x.data_ptr(), 24, 8, 4, 2, side.cuda_stream)


@racy("synchronize")
def columns_on_the_host_that_a_copy_writes() -> None:
    host, arguments = _columns_on_the_host()
    loaded_runtime().cudaMemcpy2DAsync(*arguments)  # first
    host[3, 1].item()  # second


@silent
def columns_on_the_host_beside_those_of_a_copy() -> None:
    host, arguments = _columns_on_the_host()
    loaded_runtime().cudaMemcpy2DAsync(*arguments)
    host[:, 2:] = 5
    host[2, 3].item()


@silent
def copy_that_waits() -> None:
    x, host = _tensor(), _pinned()
    x.add_(1)
    loaded_runtime().cudaMemcpy(*_words(host.data_ptr(), x.data_ptr(), 4000, 2))
    host.sum()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


@silent
def memory_is_freed() -> None:
    """cudaFree waits for all work of the device."""
    x, side, address = _tensor(), torch.cuda.Stream(), ctypes.c_void_p()
    assert loaded_runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(100)) == 0
    with torch.cuda.stream(side):
        x.add_(1)
    assert loaded_runtime().cudaFree(address) == 0
    x.add_(1)


@racy("wait_stream", gpus=2)
def memory_of_the_other_gpu_is_freed() -> None:
    x, side, address = _tensor(), torch.cuda.Stream(), ctypes.c_void_p()
    with torch.cuda.device(1):
        assert loaded_runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(100)) == 0
    with torch.cuda.stream(side):
        x.add_(1)  # first
    with torch.cuda.device(1):
        assert loaded_runtime().cudaFree(address) == 0
    x.add_(1)  # second


@racy("wait_stream", is_possible=True)
def latest_of_very_many_reads() -> None:
    """Race detection drops the oldest reads of the same memory: those for which the last stream has waited."""
    x, rows, current = _tensor(5040), torch.zeros(1, dtype=torch.int64, device="cuda"), torch.cuda.current_stream()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for rows_of_view in (each for each in range(1, 5041) if 5040 % each == 0):
            x.view(rows_of_view, -1).index_select(0, rows)
            x.view(rows_of_view, -1).t().index_select(0, rows)
        current.wait_stream(side)
        x.index_select(0, rows)  # first
    with torch.cuda.stream(other):
        x.index_select(0, rows)
    current.wait_stream(other)
    x.zero_()  # second


# ---- Memory that is freed. ----


@racy("record_stream")
def missing_record_stream() -> None:
    side = torch.cuda.Stream()
    x = _tensor(12345)
    with torch.cuda.stream(side):
        x.sum()  # first
    del x
    torch.ones(12345, device="cuda")  # second


@racy("record_stream")
def missing_record_stream_of_a_resized_storage() -> None:
    side = torch.cuda.Stream()
    x = _tensor(23456)
    with torch.cuda.stream(side):
        x.sum()  # first
    x.untyped_storage().resize_(0)
    torch.ones(23456, device="cuda")  # second


@racy("record_stream")
def missing_record_stream_of_a_storage_that_shrinks_and_grows() -> None:
    side = torch.cuda.Stream()
    x = _tensor(34567)
    with torch.cuda.stream(side):
        x.sum()  # first
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(size)
    x.zero_()  # second


@silent
def with_record_stream() -> None:
    side = torch.cuda.Stream()
    x = _tensor(12345)
    with torch.cuda.stream(side):
        x.sum()
        x.record_stream(side)
    del x
    for _ in range(5):
        torch.ones(12345, device="cuda")


@racy("record_stream")
def record_stream_of_one_of_two_streams() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = _tensor(45678)
    for stream in (one, other):
        with torch.cuda.stream(stream):
            x.sum()  # first
    x.record_stream(one)
    del x
    one.synchronize()
    for _ in range(3):  # the allocator asks until the recorded stream is ready
        torch.zeros(45678, device="cuda")  # second


@racy("record_stream")
def prefetched_without_record_stream() -> None:
    side, batch = torch.cuda.Stream(), _pinned(23456)
    with torch.cuda.stream(side):
        x = batch.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    x.sum()  # first
    del x
    with torch.cuda.stream(side):
        batch.to("cuda", non_blocking=True)  # second
    torch.cuda.synchronize()


# The memory goes back to the stream that takes it again, so that record_stream() with it changes nothing. Another stream uses
# the new tensor first. This is the order of https://github.com/ROCm/ATOM/issues/1956


@racy("or allocate that tensor on stream")
def allocated_on_one_stream_and_written_on_another() -> None:
    side, x = torch.cuda.Stream(), _tensor(56789)
    x.sum()  # first
    del x
    x = torch.empty(56789, device="cuda")
    with torch.cuda.stream(side):
        x.zero_()  # second


@racy("call wait_stream() or wait_event() on the default stream of cuda:0, for stream")
def allocated_on_a_stream_and_written_on_the_default_one() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = _tensor(67890)
        x.sum()  # first
        del x
        x = torch.empty(67890, device="cuda")
    x.zero_()  # second


@racy("record_stream")
def read_on_another_stream_only() -> None:
    side, x = torch.cuda.Stream(), torch.empty(78901, device="cuda")
    with torch.cuda.stream(side):
        x.zero_()  # first
    del x
    torch.ones(78901, device="cuda")  # second


@silent
def allocated_on_the_stream_that_writes_it() -> None:
    side, x = torch.cuda.Stream(), _tensor(56789)
    x.sum()
    del x
    with torch.cuda.stream(side):
        x = torch.empty(56789, device="cuda")
        x.zero_()


# A loader that reuses a batch's memory on its own stream while the consumer may still read it. This is the order of timm's
# PrefetchLoader before and after https://github.com/huggingface/pytorch-image-models/pull/2784


@racy("record_stream")
def loader_that_does_not_wait_for_its_consumer() -> None:
    consumer, side, weight, batch = torch.cuda.current_stream(), torch.cuda.Stream(), _tensor(34567), None
    for images in [_pinned(34567) for _ in range(5)]:
        with torch.cuda.stream(side):
            following = images.to("cuda", non_blocking=True)  # second
        if batch is not None:
            batch @ weight  # first
        consumer.wait_stream(side)
        batch = following
    torch.cuda.synchronize()


@silent
def loader_that_waits_for_its_consumer() -> None:
    consumer, side, weight, batch = torch.cuda.current_stream(), torch.cuda.Stream(), _tensor(34567), None
    for images in [_pinned(34567) for _ in range(5)]:
        side.wait_stream(consumer)
        with torch.cuda.stream(side):
            following = images.to("cuda", non_blocking=True)
        if batch is not None:
            batch @ weight
        consumer.wait_stream(side)
        batch = following
    torch.cuda.synchronize()


# ---- The host. ----


@racy("synchronize")
def host_reads_too_early() -> None:
    x, host = _tensor(), _pinned()
    host.copy_(x, non_blocking=True)  # first
    host.sum()  # second


@racy("synchronize")
def host_reads_the_end_too_early() -> None:
    x, host = _tensor(100_000), _pinned(100_000)
    host.copy_(x, non_blocking=True)  # first
    host[70_001].item()  # second


@silent
def host_reads_after_wait() -> None:
    x, host = _tensor(), _pinned()
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    host.sum()


@racy("synchronize")
def host_reads_result_of_to() -> None:
    x = _tensor()
    host = x.to("cpu", non_blocking=True)  # first
    float(host[3])  # second


@racy("synchronize")
def host_writes_source() -> None:
    x, host = _tensor(), _pinned()
    x.copy_(host, non_blocking=True)  # first
    host.fill_(3)  # second


@racy("synchronize")
def host_writes_target() -> None:
    x, host = _tensor(), _pinned()
    host.copy_(x, non_blocking=True)  # first
    host.fill_(3)  # second


@racy("synchronize")
def host_reads_a_number() -> None:
    total = _tensor().sum()
    host = total.to("cpu", non_blocking=True)  # first
    host.item()  # second


@racy("synchronize")
def host_reads_the_last_number() -> None:
    x, host = _tensor(500), _pinned()
    host[:500].copy_(x, non_blocking=True)  # first
    host[499:].sum()  # second


@racy("synchronize")
def host_reads_beside_a_target_and_then_the_target() -> None:
    x, host = _tensor(500), _pinned()
    host[500:].copy_(x, non_blocking=True)  # first
    host[:500].fill_(2)
    host[:500].sum()
    host[500].item()  # second


@racy("synchronize")
def host_waits_for_one_of_two_copies() -> None:
    x, host, one, other = _tensor(500), _pinned(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        host[:500].copy_(x, non_blocking=True)
    with torch.cuda.stream(other):
        host[500:].copy_(x, non_blocking=True)  # first
    one.synchronize()
    host[:500].sum()
    host[500:].sum()  # second


@racy("synchronize")
def host_writes_a_source_beside_a_target() -> None:
    x, y, host = _tensor(500), _tensor(500), _pinned()
    host[:500].copy_(x, non_blocking=True)
    y.copy_(host[500:], non_blocking=True)  # first
    host[500:].sum()
    host[500:].fill_(3)  # second


@racy("synchronize")
def host_reads_a_target_beside_a_source() -> None:
    x, y, host = _tensor(500), _tensor(500), _pinned()
    host[:500].copy_(x, non_blocking=True)  # first
    y.copy_(host[500:], non_blocking=True)
    host[:500].sum()  # second


@racy("synchronize")
def host_waits_for_another_stream() -> None:
    x, host, side = _tensor(), _pinned(), torch.cuda.Stream()
    host.copy_(x, non_blocking=True)  # first
    side.synchronize()
    host.sum()  # second


@silent
def host_waits_for_an_event() -> None:
    x, host, side = _tensor(), _pinned(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
        event = side.record_event()
    event.synchronize()
    host.sum()
    x.add_(1)


@silent
def host_waits_through_another_stream() -> None:
    x, host, side = _tensor(), _pinned(), torch.cuda.Stream()
    host.copy_(x, non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    side.synchronize()
    host.sum()


@silent
def copy_without_non_blocking() -> None:
    x, host, side = _tensor(), _pinned(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        host.copy_(x)
        host.add_(1)
        x.copy_(host)
        host.add_(1)
    x.add_(1)


@racy("synchronize")
def two_copies_to_one_target() -> None:
    x, y, host = _tensor(), _tensor(500), _pinned()
    host.copy_(x, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    host[:500].copy_(y, non_blocking=True)  # first
    event.synchronize()
    host[500:].sum()
    host[:500].sum()  # second


@racy("wait_stream")
def upload_of_pageable_memory() -> None:
    x, side, host = _tensor(), torch.cuda.Stream(), torch.ones(N)
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)  # first
    host.fill_(2)
    x.sum()  # second


@silent
def host_reads_source() -> None:
    x, host = _tensor(), _pinned()
    x.copy_(host, non_blocking=True)
    host.sum()
    torch.cuda.synchronize()
    host.fill_(3)


@racy("synchronize")
def numpy_view() -> None:
    x, host = _tensor(), _pinned()
    view = host.numpy()
    host.copy_(x, non_blocking=True)  # first
    view[5] + 1  # second


@silent
def other_half_of_page() -> None:
    x, host = _tensor(500), _pinned()
    host[:500].copy_(x, non_blocking=True)
    host[500:].fill_(2)
    assert host[500:].sum() == 1000
    torch.cuda.synchronize()


@racy("synchronize")
def thread_without_wait() -> None:
    x, host = _tensor(), _pinned()
    host.copy_(x, non_blocking=True)  # first

    def read() -> None:
        host.sum()  # second

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


@silent
def polled_event() -> None:
    x, host, event = _tensor(), _pinned(), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    event.record()
    while not event.query():
        pass
    host.sum()


@silent
def first_answers() -> None:
    """A program that asks once gets the answer of the simulation, whose work ends with the call."""
    side = torch.cuda.Stream()
    generic = torch.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
    event, generic_event, x = torch.cuda.Event(), torch.Event("cuda"), _tensor()
    for question in (event, generic_event, side, generic):
        with torch.cuda.stream(side):
            x.add_(1)
            event.record()
            generic_event.record()
        assert question.query()
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())


@silent
def polled_stream() -> None:
    x, host = _tensor(), _pinned()
    host.copy_(x, non_blocking=True)
    while not torch.cuda.current_stream().query():
        pass
    host.sum()


@silent
def polled_generic_event_and_stream() -> None:
    x, side, event = _tensor(), torch.cuda.Stream(), torch.Event("cuda")
    generic = torch.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
    with torch.cuda.stream(side):
        x.add_(1)
        event.record()
    while not event.query():
        pass
    x.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    while not generic.query():
        pass
    x.sum()


@racy("synchronize")
def wrong_event() -> None:
    x, host, event = _tensor(), _pinned(), torch.cuda.Event()
    event.record()
    host.copy_(x, non_blocking=True)  # first
    event.synchronize()
    host.sum()  # second


@silent
def pageable_copies() -> None:
    x = _tensor()
    host = x.cpu()
    host.add_(1)
    x.copy_(host, non_blocking=True)
    host.add_(1)


@silent
def values_for_host() -> None:
    x = _tensor()
    x.sum().item()
    x.nonzero()
    x.tolist()


# ---- Graphs. ----


def _captured(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    torch.cuda.synchronize()
    return graph


def captured_line() -> int:
    """Return the number of the line that graphs of `_captured` replay."""
    source, start = inspect.getsourcelines(_captured)
    return start + next(i for i, line in enumerate(source) if "x.add_(1)" in line)


@racy("wait_stream")
def replay_on_side_stream() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    graph = _captured(x)
    with torch.cuda.stream(side):
        x.mul_(2)  # first
    graph.replay()  # second
    torch.cuda.synchronize()


@silent
def replay_ordered() -> None:
    x, side = _tensor(), torch.cuda.Stream()
    graph = _captured(x)
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    graph.replay()
    x.sum()


@racy("wait_stream")
def two_replays() -> None:
    x, one, other = _tensor(), torch.cuda.Stream(), torch.cuda.Stream()
    graph = _captured(x)
    with torch.cuda.stream(one):
        graph.replay()  # first
    with torch.cuda.stream(other):
        graph.replay()  # second
    torch.cuda.synchronize()


@racy("wait_stream")
def second_op_of_a_graph() -> None:
    x, y, side, graph = _tensor(), _tensor(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y.mul_(2)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()  # first
    y.sum()  # second
    torch.cuda.synchronize()


@silent
def captured_ops_do_not_run() -> None:
    x, host, side, graph = _tensor(), _pinned(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    one = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    with torch.cuda.stream(one):
        graph.capture_begin(capture_error_mode="relaxed")
        x.add_(1)
        host.copy_(x, non_blocking=True)
        graph.capture_end()
    host.sum()
    side.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    host.sum()


@racy("wait_stream")
def missing_join_in_capture() -> None:
    x, y, side = _tensor(), _tensor(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)  # first
        y.copy_(x)  # second
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


@silent
def joined_in_capture() -> None:
    x, y, side = _tensor(), _tensor(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        y.copy_(x)
    torch.cuda.synchronize()
    graph.replay()


# ---- Values decide. ----


@racy("wait_stream", is_possible=True)
def rows_of_table() -> None:
    table, side, rows = _tensor(100, 10), torch.cuda.Stream(), torch.arange(5, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table.index_select(0, rows)  # first
    table[50:].zero_()  # second


@racy("wait_stream")
def index_of_rows() -> None:
    table, rows, side = _tensor(100, 10), torch.arange(5, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        rows.fill_(1)  # first
    table[rows]  # second


@racy("wait_stream", is_possible=True)
def rows_added_to_a_table() -> None:
    table, side, rows = _tensor(100, 10), torch.cuda.Stream(), torch.arange(5, device="cuda")
    added = _tensor(5, 10)
    with torch.cuda.stream(side):
        table.index_add_(0, rows, added)  # first
    table[50:].zero_()  # second


# ---- Two GPUs. ----


@racy("wait_stream", gpus=2)
def copy_between_gpus() -> None:
    x, third = _tensor(), torch.cuda.Stream("cuda:1")
    y = _tensor(device="cuda:1")
    y.copy_(x)  # first
    with torch.cuda.stream(third):
        y.sum()  # second


@silent
def copy_between_gpus_waits_for_both_and_both_for_it() -> None:
    x, y = _tensor(), _tensor(device="cuda:1")
    x.add_(1)
    y.add_(1)
    y.copy_(x)
    x.add_(1)
    y.add_(1)


@silent
def event_of_either_gpu_covers_a_copy_that_converts_between_gpus() -> None:
    x, y = _tensor(), _tensor(device="cuda:1").double()
    torch.cuda.synchronize(1)
    of_source, of_target = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    y.copy_(x)
    of_target.wait_event(torch.cuda.current_stream(0).record_event())
    of_source.wait_event(torch.cuda.current_stream(1).record_event())
    with torch.cuda.stream(of_target):
        y.sum()
    with torch.cuda.stream(of_source):
        x.zero_()


@racy("wait_stream", gpus=2)
def other_gpu_is_synchronized() -> None:
    x, side = _tensor(device="cuda:1"), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(side):
        x.add_(1)  # first
    torch.cuda.synchronize(0)
    x.add_(1)  # second


@silent
def second_of_two_gpus_is_synchronized() -> None:
    x, side = _tensor(device="cuda:1"), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize(1)
    x.add_(1)


@racy("synchronize", gpus=2)
def host_waits_for_the_other_gpu() -> None:
    x, host = _tensor(device="cuda:1"), _pinned()
    host.copy_(x, non_blocking=True)  # first
    torch.cuda.synchronize(0)
    host.sum()  # second


@silent
def host_waits_for_the_second_of_two_gpus() -> None:
    x, host = _tensor(device="cuda:1"), _pinned()
    host.copy_(x, non_blocking=True)
    torch.cuda.synchronize(1)
    host.sum()


@silent
def two_gpus() -> None:
    x = _tensor()
    y = x.to("cuda:1") + 1
    z = y.to("cuda:0") + x
    (z.t() if z.dim() > 1 else z).sum()
    w = torch.ones(30, 20, device="cuda:0").t().to("cuda:1")
    w.add_(1)


def run_all(names: list[str]) -> dict[str, Any]:
    """Run programs one after the other, and return what was found in each."""
    from accelerator import simulation

    found: dict[str, Any] = {}
    for name in names:
        before = len(simulation.races())
        CASES[name].run()
        torch.cuda.synchronize()
        if torch.cuda.device_count() > 1:
            torch.cuda.synchronize(1)
        found[name] = [race._asdict() for race in simulation.races()[before:]]
    return found
