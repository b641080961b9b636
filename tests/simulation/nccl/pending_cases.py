"""Test cases of work that is pending or never ends. Each rank runs the function of a case."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerator.simulation import inject_fault
from tests.simulation.nccl.ranks import MOST_SECONDS, Place, check_cuda
from tests.support.simulation_driver import loaded_runtime

PAUSE = 0.15
"""Seconds by which the last rank is late, or after which a wait is aborted: nothing shows that another rank waits.

The tests check only lower bounds with it.
"""


def start(place: Place, **options: Any) -> dist.FileStore:
    """Initialize the process group and its communicator. The latter blocks the host, on real GPUs too."""
    torch.cuda.set_device(place.rank)
    store = dist.FileStore(place.store, place.ranks)
    dist.init_process_group("nccl", rank=place.rank, world_size=place.ranks, store=store, **options)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    return store


def is_last(place: Place) -> bool:
    return place.rank == place.ranks - 1


def late(place: Place) -> None:
    if is_last(place):
        time.sleep(PAUSE)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended or is a zombie. The rank's alarm limits the time."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)


def total(place: Place, summand: float = 1) -> float:
    return place.ranks * (place.ranks + 1) / 2 * summand


def ranks_tensor(place: Place, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), float(place.rank + 1), device="cuda")


def message_beside_work(place: Place) -> bool:
    """The last rank calls the collective after the others have. This ends only if their calls do not block the host."""
    store = start(place)
    tensor = ranks_tensor(place)
    if is_last(place):
        store.wait([f"called {rank}" for rank in range(place.ranks - 1)])
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        work.wait()  # blocks the stream and not the host
        assert not torch.cuda.current_stream().query()
        store.set(f"called {place.rank}", "")
    assert (tensor.cpu() == total(place)).all()
    return True


def pending(place: Place) -> bool:
    """Streams and events that wait for a late rank are not ready. Other streams work on."""
    store = start(place)
    tensor, started, ended = ranks_tensor(place), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if is_last(place):
        store.wait([f"checked {rank}" for rank in range(place.ranks - 1)])
        time.sleep(PAUSE)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        return True
    current, waiting, idle = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    current.record_event(started)
    work = dist.all_reduce(tensor, async_op=True)
    assert current.query(), "the work is on a stream of its own"
    work.wait()
    current.record_event(ended)
    assert started.query()
    assert not ended.query()
    assert not current.query()
    assert waiting.query()
    waiting.wait_event(ended)
    assert not waiting.query()
    waiting.record_event()  # must not block: the last rank waits for this rank
    with torch.cuda.stream(idle):
        other = torch.ones(5, device="cuda") + 1
    idle.synchronize()
    assert idle.query()
    with torch.cuda.stream(idle):
        assert other.sum().item() == 10
    assert not ended.query()
    assert not work.is_completed()
    store.set(f"checked {place.rank}", "")
    ended.synchronize()
    assert ended.query()
    assert current.query()
    assert waiting.query()
    assert started.elapsed_time(ended) >= PAUSE * 1000
    assert (tensor.cpu() == total(place)).all()
    return True


def flipped_copy(place: Place) -> bool:
    """A fault flips a bit of a copy that waits for a late rank, as it does of one that waits for nothing."""
    store = start(place)
    copy = torch.zeros(1000, device="cuda")
    copy.copy_(copy.clone())  # the engine handles later calls, unless they wait
    tensor = ranks_tensor(place)
    if is_last(place):
        store.wait([f"called {rank}" for rank in range(place.ranks - 1)])
        time.sleep(PAUSE)
    dist.all_reduce(tensor, async_op=True).wait()
    inject_fault(f"flip=22,gpu={place.rank}")
    store.set(f"called {place.rank}", "")
    copy.copy_(tensor)
    assert (tensor.cpu() == total(place)).all()
    assert (copy[1:].cpu() == total(place)).all()
    assert copy[0].item() != total(place)
    return True


def block_current_stream(place: Place) -> bool | None:
    """Block a stream, and not the host, until works over gloo and nccl end. Return None before torch 2.9."""
    if not hasattr(dist.Work, "block_current_stream"):
        return None  # before the ranks connect: one that ended early would break the others' connections
    store = start(place)
    group = dist.new_group(backend="gloo")
    on_host, on_device = torch.full((1000,), float(place.rank + 1)), ranks_tensor(place)
    if is_last(place):
        store.wait([f"blocked {rank}" for rank in range(place.ranks - 1)])
    work = dist.all_reduce(on_host, group=group, async_op=True)
    work.block_current_stream()
    if not is_last(place):
        assert not torch.cuda.current_stream().query()
        store.set(f"blocked {place.rank}", "")
    reduction = dist.all_reduce(on_device, async_op=True)
    reduction.block_current_stream()
    torch.cuda.synchronize()
    assert (on_host == total(place)).all()
    work.wait()  # gloo's work counts as completed a little after it has unblocked the stream
    assert work.is_completed()
    assert (on_device.cpu() == total(place)).all()
    return True


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "kernel": lambda tensor: tensor + 1,
    "in_place": lambda tensor: tensor.zero_(),
    "to_host": lambda tensor: tensor.cpu(),
    "from_host": lambda tensor: tensor.copy_(torch.zeros(tensor.shape)),
    "item": lambda tensor: tensor[0].item(),
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "stream": lambda tensor: torch.cuda.current_stream().synchronize(),
    "event": lambda tensor: torch.cuda.current_stream().record_event().synchronize(),
    "free": lambda tensor: loaded_runtime().cudaFree(_allocated.pop()),
    "free_host": lambda tensor: loaded_runtime().cudaFreeHost(_allocated_on_host.pop()),
    "host_function": lambda tensor: _call_back("cudaLaunchHostFunc"),
    "stream_callback": lambda tensor: _call_back("cudaStreamAddCallback", ctypes.c_uint(0)),
    "context": lambda tensor: _call_driver("cuCtxSynchronize"),
    "driver_copy": lambda tensor: _call_driver("cuMemcpyDtoH_v2", ctypes.create_string_buffer(4), _address(tensor), _FOUR),
    "driver_fill": lambda tensor: _call_driver("cuMemsetD32Async", _address(tensor), 0, ctypes.c_size_t(1), None),
    "driver_value": lambda tensor: _call_driver("cuStreamWriteValue32_v2", None, _address(tensor), 0, 0),
}
_FOUR = ctypes.c_size_t(4)
_allocated: list[ctypes.c_void_p] = []
_allocated_on_host: list[ctypes.c_void_p] = []


def _address(tensor: torch.Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.data_ptr())


def _call_driver(name: str, *arguments: Any) -> None:
    assert getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments) == 0, name


def _call_back(name: str, *more: Any) -> None:
    """Let the runtime call a function when the work of the current stream has ended."""
    called: list[bool] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: called.append(True))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert getattr(loaded_runtime(), name)(stream, function, None, *more) == 0
    assert called


def waits(place: Place) -> list[str]:
    """Use pending memory and a pending stream in all ways at once, and return those that have ended while a rank is late."""
    store = start(place)
    tensor, ended, begun = ranks_tensor(place), list[str](), threading.Barrier(len(WAITS) + 1)
    for allocate, allocated in (("cudaMalloc", _allocated), ("cudaMallocHost", _allocated_on_host)):
        address = ctypes.c_void_p()
        assert getattr(loaded_runtime(), allocate)(ctypes.byref(address), ctypes.c_size_t(4096)) == 0
        allocated.append(address)
    torch.cuda.synchronize()
    if is_last(place):
        store.wait([f"waiting {rank}" for rank in range(place.ranks - 1)])
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        return []
    dist.all_reduce(tensor)  # must not block: the last rank waits for this rank

    def use(name: str) -> None:
        check_cuda(loaded_runtime().cudaSetDevice(place.rank))  # torch 2.6 does not set the device that is current already
        begun.wait()
        WAITS[name](tensor)
        ended.append(name)

    threads = [threading.Thread(target=use, args=(name,)) for name in WAITS]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(PAUSE)
    too_early = [*ended]
    store.set(f"waiting {place.rank}", "")
    for thread in threads:
        thread.join()
    assert sorted(ended) == sorted(WAITS)
    return too_early


def compiled(place: Place) -> bool:
    """Check that compiled code waits for a pending collective of its stream."""
    start(place)
    double = torch.compile(lambda tensor: tensor * 2)
    double(ranks_tensor(place))
    tensor = ranks_tensor(place)
    dist.barrier()
    late(place)
    dist.all_reduce(tensor)
    assert (double(tensor).cpu() == 2 * total(place)).all()
    return True


def busy_stream(place: Place) -> float:
    """Return the seconds that a collective takes, including earlier work of the last rank's stream."""
    store = start(place)
    tensor = ranks_tensor(place)
    begin = time.monotonic()
    if is_last(place):
        store.wait([f"measuring {rank}" for rank in range(place.ranks - 1)])
        torch.cuda._sleep(int(PAUSE * 1e9))
    else:
        store.set(f"measuring {place.rank}", "")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert (tensor.cpu() == total(place)).all()
    return time.monotonic() - begin


def overlap(place: Place) -> bool:
    """Call collectives of two communicators, in different orders on different ranks."""
    start(place)
    groups = [dist.new_group(), dist.new_group()]
    tensors = [ranks_tensor(place), ranks_tensor(place) * 10]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    for _ in range(10):
        works = {}
        for i in (0, 1) if place.rank % 2 else (1, 0):
            works[i] = dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        for i in (0, 1):
            works[i].wait()
        torch.cuda.synchronize()
        for i in (0, 1):
            tensors[i] /= place.ranks
    expected = total(place) / place.ranks
    assert torch.allclose(tensors[0].cpu(), torch.tensor(expected))
    assert torch.allclose(tensors[1].cpu(), torch.tensor(10 * expected))
    return True


def chain(place: Place) -> bool:
    """Run a collective on the result of another communicator's collective, which waits for a late rank."""
    start(place)
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    tensor = ranks_tensor(place)
    torch.cuda.synchronize()
    late(place)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    assert (tensor.cpu() == total(place) * place.ranks).all()
    return True


def destroyed_stream(place: Place) -> bool:
    """Destroy a stream with pending work. The work completes, and a new stream does not wait for it."""
    start(place)
    runtime, stream = loaded_runtime(), ctypes.c_void_p()
    tensor = ranks_tensor(place)
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    torch.cuda.synchronize()
    late(place)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    assert runtime.cudaStreamDestroy(stream) == 0
    again = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(again), 1) == 0
    assert again.value == stream.value, "streams are reused"
    assert runtime.cudaStreamQuery(again) == 0
    torch.cuda.synchronize()
    torch.cuda.synchronize()  # a second time, so that all waiting threads have noticed the end of the work
    assert work.is_completed()
    assert (tensor.cpu() == total(place)).all()
    return True


def messages_beside_collectives(place: Place) -> bool:
    """Send and receive while a collective waits for a late rank."""
    start(place)
    following, previous = (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks
    sent, received, reduced = ranks_tensor(place, 300_000), torch.zeros(300_000, device="cuda"), ranks_tensor(place)
    requests = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
    late(place)
    reduction = dist.all_reduce(reduced, async_op=True)
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    assert (received.cpu() == previous + 1).all()
    reduction.wait()
    assert (reduced.cpu() == total(place)).all()
    return True


def graphs(place: Place) -> bool:
    """Replay a graph of kernels and collectives while a rank is late."""
    store = start(place)
    tensor, result = ranks_tensor(place), torch.zeros(1000, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        doubled = tensor * 2
        dist.all_reduce(doubled)
        result.copy_(doubled + 1)
        dist.all_reduce(result)
    late(place)
    for step in range(3):
        tensor.fill_(float(place.rank + 1 + step))
        captured.replay()
        expected = ((total(place) + place.ranks * step) * 2 + 1) * place.ranks
        assert (result.cpu() == expected).all(), step
    only_reduction = torch.cuda.CUDAGraph()
    with torch.cuda.graph(only_reduction, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
    tensor.copy_(ranks_tensor(place))
    torch.cuda.synchronize()
    if is_last(place):
        store.wait([f"replayed {rank}" for rank in range(place.ranks - 1)])
    only_reduction.replay()
    store.set(f"replayed {place.rank}", "")
    assert (tensor.cpu() == total(place)).all()
    captured.reset()
    only_reduction.reset()
    return True


def abort(place: Place, wait: str) -> list[str]:
    """Abort the process group from a thread while rank 0 waits for a collective that no other rank calls.

    Return the order of events.
    """
    store = start(place)
    if place.rank:
        store.wait(["aborted"])
        return []
    tensor, events = ranks_tensor(place), []

    def abort_later() -> None:
        time.sleep(PAUSE)
        events.append("abort")
        dist.distributed_c10d._abort_process_group()

    dist.all_reduce(tensor)
    aborting = threading.Thread(target=abort_later)
    aborting.start()
    WAITS[wait](tensor)
    events.append("end of the wait")
    aborting.join()
    store.set("aborted", "")
    return events


def copies(place: Place) -> bool:
    """Copies on the device wait for a collective, and the host does not wait for them."""
    store = start(place)
    tensor = ranks_tensor(place)
    copied, again = torch.zeros_like(tensor), torch.zeros(2, 500, device="cuda")
    event = torch.cuda.Event()
    if is_last(place):
        store.wait([f"called {rank}" for rank in range(place.ranks - 1)])
    dist.all_reduce(tensor)
    copied.copy_(tensor)
    again[1].copy_(copied[500:])
    event.record()
    if not is_last(place):
        assert not event.query()
        store.set(f"called {place.rank}", "")
    tensor.zero_()
    assert (copied.cpu() == total(place)).all()
    assert (again.cpu() == torch.tensor([[0.0], [total(place)]])).all()
    assert event.query()
    return True


def timeout(place: Place, collective: str) -> None:
    """The last rank never calls the collective. The watchdogs of the others end their processes."""
    store = start(place, timeout=timedelta(seconds=1))
    if is_last(place):
        for rank in range(place.ranks - 1):
            wait_for_end(int(store.get(f"process {rank}")))
        return
    store.set(f"process {place.rank}", str(os.getpid()))
    tensor = ranks_tensor(place)
    if collective == "all_gather":
        dist.all_gather([torch.empty_like(tensor) for _ in range(place.ranks)], tensor)
    else:
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    signal.pause()


def no_handling(place: Place) -> bool:
    """The last rank calls the collective after the timeout, which has no effect without error handling."""
    start(place, timeout=timedelta(seconds=1))
    tensor = ranks_tensor(place)
    if is_last(place):
        time.sleep(2.5)  # longer than the timeout
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert (tensor.cpu() == total(place)).all()
    return True


def blocking_wait(place: Place) -> tuple[str, float]:
    """Return the error that a wait raises at the timeout with TORCH_NCCL_BLOCKING_WAIT, and the seconds."""
    store = start(place, timeout=timedelta(seconds=1))
    if is_last(place):
        store.wait([f"raised {rank}" for rank in range(place.ranks - 1)], timedelta(seconds=MOST_SECONDS))
        return "", 0
    begin = time.monotonic()
    text = "no error"
    try:
        dist.all_reduce(ranks_tensor(place), async_op=True).wait()
    except RuntimeError as error:
        text = str(error)
    seconds = time.monotonic() - begin
    store.set(f"raised {place.rank}", "")
    return text, seconds


def interrupted(place: Place, wait: str) -> bool:
    """Send SIGINT while a kernel or a copy waits for a rank that never calls the collective."""
    store = start(place)
    if is_last(place):
        store.wait(["interrupted"])
        return True
    tensor = ranks_tensor(place)
    dist.all_reduce(tensor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(PAUSE, os.kill, (os.getpid(), signal.SIGINT)).start()
        WAITS[wait](tensor)
    except KeyboardInterrupt:
        store.set("interrupted", "")
        return True
    raise AssertionError("not interrupted")


def fork_beside_work(place: Place) -> bool:
    """Fork a child while work is pending. The child does not wait for the work, and the work completes."""
    start(place)
    tensor = ranks_tensor(place)
    if is_last(place):
        time.sleep(PAUSE)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        needs_checks = ctypes.c_int.in_dll(loaded_runtime(), "accelerator_simulation_needs_checks").value
        os._exit(needs_checks)
    only_the_fork = 1  # ops look at the fork before each call; the parent's work is not counted
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == only_the_fork
    assert (tensor.cpu() == total(place)).all()
    return True


def killed(place: Place) -> None:
    """Kill the last rank while the others wait for their streams. Their watchdogs end their processes."""
    start(place, timeout=timedelta(seconds=60))
    if is_last(place):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ranks_tensor(place))
    torch.cuda.synchronize()
    signal.pause()


def killed_blocking(place: Place) -> str:
    """Kill the last rank and return the error that the others' waits raise with TORCH_NCCL_BLOCKING_WAIT."""
    start(place, timeout=timedelta(seconds=2))
    if is_last(place):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(ranks_tensor(place), async_op=True).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"
