"""What single ranks do in the tests of the simulated NCCL. Every function is one rank's part of a case."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nccl_ranks import (
    Comm,
    Error,
    Place,
    UniqueId,
    check,
    check_cuda,
    group,
    nccl,
    pointer,
    refused,
    unique_id,
)
from tests.support.simulation_driver import loaded_runtime

TYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)
INT64, FLOAT32 = 4, 7
SUM, PROD, MAX, MIN, AVG = range(5)
BROAD = 270_003  # bytes: more than one step of any collective takes


# ---- Data, and what is to come out. ----


def values(rank: int, size: int, type_code: int) -> torch.Tensor:
    """The input of a rank, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * rank + type_code)
    small = torch.randint(1 if type_code in (1, 3, 5) else -3, 5, (size,), generator=generator)
    dtype = TYPES[type_code]
    if dtype.is_floating_point:
        return (small.double() + torch.rand(size, generator=generator, dtype=torch.float64)).to(torch.float32).to(dtype)
    if dtype.itemsize == 1:
        small = small * 37  # so that sums wrap around
    return small.to(dtype)


def combined(parts: list[torch.Tensor], type_code: int, op: int) -> torch.Tensor:
    """The reduction in the order of the ranks, rounded once at the end."""
    dtype = TYPES[type_code]
    exact = dtype if dtype in (torch.float32, torch.float64) else torch.float32 if dtype.is_floating_point else torch.int64
    total = parts[0].to(exact)
    for part in parts[1:]:
        other = part.to(exact)
        if op in (SUM, AVG):
            total = total + other
        else:
            total = total * other if op == PROD else torch.maximum(total, other) if op == MAX else torch.minimum(total, other)
    if op == AVG:
        if exact == torch.int64:
            wrapped = total.to(dtype).to(exact)  # the sum is of the type before it is divided
            return torch.div(wrapped, len(parts), rounding_mode="trunc").to(dtype)
        total = total / len(parts)
    return total.to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def blank(size: int, type_code: int) -> torch.Tensor:
    """Memory that holds none of the expected results."""
    return torch.full((size * TYPES[type_code].itemsize,), 0x5A, dtype=torch.uint8).view(TYPES[type_code])


def sizes(place: Place, type_code: int) -> tuple[int, ...]:
    # Steps are shorter with many ranks, and there is more to compare with.
    return 0, 1, 7, 1001, (BROAD if place.ranks < 8 else BROAD // 13) // TYPES[type_code].itemsize + 1


def reductions(place: Place, type_code: int) -> int:
    """Every reduction of one type in every collective that reduces; gives the count of comparisons."""
    comm, n, rank, count = place.comm(), place.ranks, place.rank, 0
    for op in range(5):
        for size in sizes(place, type_code) if op in (SUM, MAX) else (7,):
            parts = [values(r, size, type_code) for r in range(n)]
            length = ctypes.c_size_t(size)
            expected = combined(parts, type_code, op)
            got = blank(size, type_code)
            comm.all_reduce(parts[rank], got, type_code, op)
            assert same(got, expected if size else got), ("all_reduce", op, size)
            inside = parts[rank].clone()
            comm.all_reduce(inside, inside, type_code, op)
            assert same(inside, expected), ("in place", op, size)
            root, got, before = n - 1, blank(size, type_code), blank(size, type_code)
            target = pointer(got) if rank == root else None
            check(nccl.ncclReduce(pointer(parts[rank]), target, length, type_code, op, root, comm.handle, None))
            assert same(got, expected if rank == root else before), ("reduce", op, size)
            parts = [values(r, size * n, type_code) for r in range(n)]
            got = blank(size, type_code)
            check(nccl.ncclReduceScatter(pointer(parts[rank]), pointer(got), length, type_code, op, comm.handle, None))
            expected = combined(parts, type_code, op)[rank * size : (rank + 1) * size]
            assert same(got, expected), ("reduce_scatter", op, size)
            mine = parts[rank].clone()
            target = pointer(mine, rank * size)
            check(nccl.ncclReduceScatter(pointer(mine), target, length, type_code, op, comm.handle, None))
            assert same(mine[rank * size : (rank + 1) * size], expected), ("reduce_scatter in place", op, size)
            count += 5
    comm.destroy()
    return count


def movements(place: Place, type_code: int) -> int:
    """Every collective that only moves values."""
    comm, n, rank, count = place.comm(), place.ranks, place.rank, 0
    for size in sizes(place, type_code):
        length = ctypes.c_size_t(size)
        parts = [values(r, size, type_code) for r in range(n)]
        everything = torch.cat([part.view(torch.uint8) for part in parts]).view(TYPES[type_code])
        for root in range(n):
            got = blank(size, type_code)
            source = pointer(parts[rank]) if rank == root else None
            check(nccl.ncclBroadcast(source, pointer(got), length, type_code, root, comm.handle, None))
            assert same(got, parts[root]), ("broadcast", size, root)
            got = parts[rank].clone()
            check(nccl.ncclBcast(pointer(got), length, type_code, root, comm.handle, None))
            assert same(got, parts[root]), ("bcast", size, root)
            got = blank(size * n, type_code)
            check(nccl.ncclGather(pointer(parts[rank]), pointer(got), length, type_code, root, comm.handle, None))
            assert same(got, everything if rank == root else blank(size * n, type_code)), ("gather", size, root)
            got = blank(size, type_code)
            check(nccl.ncclScatter(pointer(everything), pointer(got), length, type_code, root, comm.handle, None))
            assert same(got, parts[rank]), ("scatter", size, root)
        got = blank(size * n, type_code)
        check(nccl.ncclAllGather(pointer(parts[rank]), pointer(got), length, type_code, comm.handle, None))
        assert same(got, everything), ("all_gather", size)
        got = blank(size * n, type_code)
        got.view(torch.uint8)[:] = 0
        inside = pointer(got, rank * size)
        got[rank * size : (rank + 1) * size] = parts[rank]
        check(nccl.ncclAllGather(inside, pointer(got), length, type_code, comm.handle, None))
        assert same(got, everything), ("all_gather in place", size)
        blocks = [values(r, size * n, type_code) for r in range(n)]
        got = blank(size * n, type_code)
        check(nccl.ncclAlltoAll(pointer(blocks[rank]), pointer(got), length, type_code, comm.handle, None))
        wanted = [block[rank * size : (rank + 1) * size].view(torch.uint8) for block in blocks]
        assert same(got, torch.cat(wanted).view(TYPES[type_code])), ("all_to_all", size)
        count += 4 * n + 3
    comm.destroy()
    return count


def edge_values(place: Place) -> dict[str, list[float]]:
    """NaN, infinities, subnormal values and what is too large for a type."""
    comm = place.comm()
    reports = {}
    edges = [float("nan"), float("inf"), -float("inf"), 6e-8, -0.0, 440.0, 60000.0, 1e38]
    for type_code in (6, 7, 9, 10, 11):
        for op, twos in ((SUM, None), (MAX, 1), (MIN, 0)):
            brought = torch.tensor([2.0] * 8 if place.rank == twos else edges).to(TYPES[type_code])
            got = blank(8, type_code)
            comm.all_reduce(brought, got, type_code, op)
            reports[f"{type_code} {op}"] = [str(value) for value in got.float().tolist()]
    comm.destroy()
    return reports


def halves(place: Place) -> bool:
    """Every half and every small float there is comes through the conversion unharmed."""
    comm = place.comm()
    for type_code, width in ((6, 16), (9, 16), (10, 8), (11, 8)):
        codes = torch.arange(2**width).to(torch.int32).to(torch.uint8 if width == 8 else torch.int16)
        values = codes.view(TYPES[type_code])
        got = blank(len(values), type_code)
        comm.all_reduce(values, got, type_code, MAX)
        wide, back = values.float(), got.view(codes.dtype)
        is_not_nan = ~wide.isnan()
        if type_code == 11:
            is_not_nan &= ~wide.isinf()  # a GPU converts them to the largest finite value
        assert torch.equal(back[is_not_nan], codes[is_not_nan]), type_code
        assert got.float()[wide.isnan()].isnan().all()
    comm.destroy()
    return True


def factors(place: Place) -> int:
    """Sums of values that were multiplied before, each rank with its own factor."""
    comm, n, rank, count = place.comm(), place.ranks, place.rank, 0
    for type_code in (0, 2, 4, 6, 7, 8, 9):
        for residence in (0, 1):
            scales = [torch.tensor([r + 2]).to(TYPES[type_code]) for r in range(n)]
            op = ctypes.c_int()
            check(nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer(scales[rank]), type_code, residence, comm.handle))
            assert op.value >= 5
            if residence == 1:
                scales[rank] = scales[rank].clone()
            parts = [values(r, 1001, type_code) for r in range(n)]
            got = blank(1001, type_code)
            comm.all_reduce(parts[rank], got, type_code, op.value)
            wide = torch.int64 if not TYPES[type_code].is_floating_point else torch.float64 if type_code == 8 else torch.float32
            multiplied = [
                (part.to(wide) * scale.to(wide)).to(TYPES[type_code]) for part, scale in zip(parts, scales, strict=True)
            ]
            assert same(got, combined(multiplied, type_code, SUM)), (type_code, residence)
            wrong = refused(comm.all_reduce, parts[rank], got, 1, op.value)
            assert wrong[0] == 4, wrong
            check(nccl.ncclRedOpDestroy(op, comm.handle))
            assert refused(comm.all_reduce, parts[rank], got, type_code, op.value)[0] == 4
            assert nccl.ncclRedOpDestroy(op, comm.handle) == 4
            count += 1
    comm.destroy()
    return count


# ---- Messages and groups. ----


def ring(place: Place, size: int, rounds: int) -> bool:
    """Everybody sends to the next and receives from the previous at once, more than any mailbox holds."""
    comm, n, rank = place.comm(), place.ranks, place.rank
    for turn in range(rounds):
        sent = values((rank + turn) % n, size, FLOAT32)
        got = blank(size, FLOAT32)
        with group():
            comm.send(sent, (rank + 1) % n)
            comm.receive(got, (rank - 1) % n)
        assert same(got, values((rank - 1 + turn) % n, size, FLOAT32)), turn
    comm.destroy()
    return True


def cross(place: Place, size: int) -> bool:
    """All pairs at once, each with two messages of different sizes, oneself included; receives are posted in disorder."""
    comm, n, rank = place.comm(), place.ranks, place.rank
    sent = {(peer, i): values(100 * rank + 10 * peer + i, size + i * 13 + peer, FLOAT32) for peer in range(n) for i in (0, 1)}
    got = {(peer, i): blank(size + i * 13 + rank, FLOAT32) for peer in range(n) for i in (0, 1)}
    with group():
        for peer in reversed(range(n)):
            for i in (0, 1):
                comm.receive(got[peer, i], peer)
        with group():  # an inner group does not start anything
            for key, tensor in sent.items():
                comm.send(tensor, key[0])
    for (peer, i), tensor in got.items():
        assert same(tensor, values(100 * peer + 10 * rank + i, size + i * 13 + rank, FLOAT32)), (peer, i)
    comm.destroy()
    return True


def mixed_group(place: Place) -> bool:
    """Collectives and messages of two communicators in one group."""
    first, second = place.comm(), None
    second = first.split(0, -place.rank)
    assert second
    assert second.rank == place.ranks - 1 - place.rank
    n, rank = place.ranks, place.rank
    a, b = torch.full((100_001,), float(rank + 1)), torch.full((70_001,), float(rank + 10))
    sent, got = torch.full((90_001,), float(rank)), torch.zeros(90_001)
    with group():
        first.receive(got, (rank - 1) % n)
        first.all_reduce(a, a, FLOAT32)
        second.all_reduce(b, b, FLOAT32, MAX)
        first.all_reduce(a, a, FLOAT32)
        first.send(sent, (rank + 1) % n)
    assert (a == n * (n * (n + 1) / 2)).all()
    assert (b == n + 9).all()
    assert (got == (rank - 1) % n).all()
    return True


def eager(place: Place) -> int:
    """A small message may be sent before anybody receives it, and its sender may be gone by then."""
    comm = place.comm()
    if place.rank == 0:
        comm.send(torch.arange(100), 1)
        comm.destroy()
        return 0
    time.sleep(0.3)
    got = torch.zeros(100, dtype=torch.int64)
    comm.receive(got, 0)
    return int(got.sum())


def one_process(place: Place, threads: bool) -> bool:
    """Several devices of one process: as threads, or by groups alone."""
    n, type_code, size = 4, FLOAT32, 150_001
    device = ctypes.c_int()
    handles = (ctypes.c_void_p * n)()
    check_cuda(loaded_runtime().cudaSetDevice(1))
    check(nccl.ncclCommInitAll(handles, n, None))
    check_cuda(loaded_runtime().cudaGetDevice(ctypes.byref(device)))
    assert device.value == 1
    comms = [Comm.adopt(ctypes.c_void_p(handle)) for handle in handles]
    assert [comm.rank for comm in comms] == list(range(n))
    for comm in comms:
        check(nccl.ncclCommCuDevice(comm.handle, ctypes.byref(device)))
        assert device.value == comm.rank
    parts = [values(r, size, type_code) for r in range(n)]
    got = [blank(size, type_code) for _ in range(n)]
    expected = combined(parts, type_code, SUM)

    def rank(comm: Comm) -> None:
        for _ in range(20):
            comm.all_reduce(parts[comm.rank], got[comm.rank], type_code)

    if threads:
        running = [threading.Thread(target=rank, args=(comm,)) for comm in comms]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    else:
        for _ in range(20):
            with group():
                for comm in comms:
                    comm.all_reduce(parts[comm.rank], got[comm.rank], type_code)
    assert all(same(result, expected) for result in got)
    new = [ctypes.c_void_p() for _ in range(n)]
    with group():
        for comm, handle in zip(comms, new, strict=True):
            check(nccl.ncclCommSplit(comm.handle, comm.rank % 2, 0, ctypes.byref(handle), None))
    halved = [Comm.adopt(handle) for handle in new]
    assert [(comm.rank, comm.ranks) for comm in halved] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for comm in halved + comms:
        comm.destroy()
    return True


def graph(place: Place) -> list[float]:
    """What is captured runs at each launch, and not while it is captured."""
    torch.cuda.set_device(place.rank)
    store = dist.FileStore(place.store, place.ranks)
    dist.init_process_group("nccl", rank=place.rank, world_size=place.ranks, store=store)
    tensor, ready = torch.full((5,), 1.0).cuda(), torch.full((5,), 0.0).cuda()
    dist.all_reduce(tensor)
    reports = tensor.cpu().tolist()[:1]
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
        ready.copy_(tensor)
    reports += ready.cpu().tolist()[:1]
    for value in (3.0, 5.0):
        tensor.copy_(torch.full((5,), value))
        captured.replay()
        reports += ready.cpu().tolist()[:1]
    captured.reset()
    dist.destroy_process_group()
    return reports


# ---- Communicators. ----


def families(place: Place) -> list[Any]:
    """Splits of splits; who has no color gets none."""
    comm, rank = place.comm(), place.rank
    half = comm.split(rank % 2, -rank)
    assert half
    pair = half.split(-1 if half.rank == 0 else 0, 0)
    reports = [half.rank, half.ranks, half.total(rank), pair and pair.total(rank), comm.total(rank)]
    assert refused(comm.split, -2, 0)[0] == 4
    for one in filter(None, (comm, half, pair)):
        one.destroy()
    return reports


def scalable(place: Place) -> int:
    ids = (UniqueId * 2)(place.id, place.id)
    handle = ctypes.c_void_p()
    check_cuda(loaded_runtime().cudaSetDevice(place.rank))
    check(nccl.ncclCommInitRankScalable(ctypes.byref(handle), place.ranks, place.rank, 2, ids, None))
    return Comm.adopt(handle).total()


def many(place: Place, count: int) -> int:
    """Communicators that come and go, and some that stay."""
    comm, kept, total = place.comm(), [], 0
    for i in range(count):
        new = comm.split(0, 0)
        assert new
        total += new.total(i)
        if i % 4:
            new.destroy()
        else:
            kept.append(new)
    descriptors = len(os.listdir("/proc/self/fd"))
    for one in kept:
        total += one.total(1)
        one.destroy()
    assert descriptors - len(os.listdir("/proc/self/fd")) == len(kept)
    comm.destroy()
    maps = Path("/proc/self/maps").read_text()
    assert "accelerator-nccl" not in maps
    return total


def iterate(place: Place, count: int) -> bool:
    """Many collectives of changing sizes: a race would show in a wrong sum."""
    comm = place.comm()
    for i in range(count):
        tensor = torch.full((1 + (i * 7919) % 5000,), float(place.rank + i))
        comm.all_reduce(tensor, tensor, FLOAT32)
        expected = sum(range(place.ranks)) + i * place.ranks
        assert (tensor == expected).all(), (i, tensor, expected)
    comm.destroy()
    return True


def shrink(place: Place, flags: int) -> list[Any]:
    """The last rank dies; the others go on without it."""
    comm = place.comm()
    comm.total()
    if place.rank == place.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    code = refused(comm.total)[0]
    gone, handle = (ctypes.c_int * 1)(place.ranks - 1), ctypes.c_void_p()
    check(nccl.ncclCommShrink(comm.handle, gone, 1, ctypes.byref(handle), None, flags))
    smaller = Comm.adopt(handle)
    reports = [code, smaller.rank, smaller.ranks, smaller.total()]
    comm.abort()
    smaller.destroy()
    return reports


def grow(place: Place) -> list[int]:
    """Ranks 0 and 1 are joined by rank 2."""
    check_cuda(loaded_runtime().cudaSetDevice(place.rank))
    shared, handle = Path(place.store), ctypes.c_void_p()
    if place.rank < 2:
        comm = Comm.of(place.id, place.rank, 2)
        identifier = UniqueId()
        if place.rank == 0:
            check(nccl.ncclCommGetUniqueId(comm.handle, ctypes.byref(identifier)))
            assert nccl.ncclCommGetUniqueId(comm.handle, ctypes.byref(identifier)) == 5
            part = shared.with_suffix(".part")
            part.write_bytes(bytes(identifier))
            part.rename(shared)
        argument = ctypes.byref(identifier) if place.rank == 0 else None
        check(nccl.ncclCommGrow(comm.handle, 3, argument, -1, ctypes.byref(handle), None))
    else:
        while not shared.exists():
            time.sleep(0.01)
        identifier = UniqueId.from_buffer_copy(shared.read_bytes())
        check(nccl.ncclCommGrow(None, 3, ctypes.byref(identifier), 2, ctypes.byref(handle), None))
    larger = Comm.adopt(handle)
    return [larger.rank, larger.ranks, larger.total()]


def life(place: Place) -> list[Any]:
    """Revoking, suspending, finalizing, destroying: what may follow, and what not."""
    comm, reports = place.comm(), []
    check(nccl.ncclCommSuspend(comm.handle, 1))
    reports.append(refused(comm.total)[0])
    value = ctypes.c_uint64()
    check(nccl.ncclCommMemStats(comm.handle, 1, ctypes.byref(value)))
    reports.append(value.value)
    check(nccl.ncclCommResume(comm.handle))
    reports.append(comm.total())
    new = comm.split(0, 0)
    assert new
    check(nccl.ncclCommRevoke(new.handle, 0))
    reports.append(refused(new.total)[0])
    child = new.split(0, 0)
    assert child
    reports.append(child.total())
    check(nccl.ncclCommFinalize(child.handle))
    reports.append(refused(child.total)[0])
    child.destroy()
    reports += [refused(child.total)[0], nccl.ncclCommDestroy(child.handle), nccl.ncclCommDestroy(None)]
    new.abort()
    reports += [comm.asynchronous_error(), comm.total()]
    comm.destroy()
    return reports


def revoke_ends_waits(place: Place) -> list[Any]:
    comm = place.comm()
    if place.rank == 0:
        time.sleep(0.3)
        check(nccl.ncclCommRevoke(comm.handle, 0))
        return [0, ""]
    return refused(comm.total)


def memory(place: Place) -> bool:
    comm, address, handle = place.comm(), ctypes.c_void_p(), ctypes.c_void_p()
    check(nccl.ncclMemAlloc(ctypes.byref(address), ctypes.c_size_t(4096)))
    check(nccl.ncclCommRegister(comm.handle, address, ctypes.c_size_t(4096), ctypes.byref(handle)))
    check(nccl.ncclCommDeregister(comm.handle, handle))
    check(nccl.ncclCommWindowRegister(comm.handle, address, ctypes.c_size_t(4096), ctypes.byref(handle), 1))
    back = ctypes.c_void_p()
    check(nccl.ncclWinGetUserPtr(comm.handle, handle, ctypes.byref(back)))
    assert back.value == address.value
    check(nccl.ncclCommWindowDeregister(comm.handle, handle))
    size = ctypes.c_size_t(512)
    check(nccl.ncclAllReduce(address, address, size, INT64, 0, comm.handle, None))
    check(nccl.ncclMemFree(address))
    for name in ("ncclPutSignal", "ncclSignal", "ncclWaitSignal", "ncclDevCommCreate", "ncclGetPeerDevicePointer"):
        assert getattr(nccl, name)() == 5, name
    return True


# ---- Misuse. ----


def mismatch(place: Place) -> list[list[Any]]:
    """Ranks that do not call the same are told so, and can go on."""
    comm, rank = place.comm(), place.rank
    tensor, size = torch.zeros(200_000), ctypes.c_size_t
    reports = [refused(comm.all_reduce, tensor, tensor, FLOAT32, 0, 100_000 + rank)]
    reports.append(refused(comm.all_reduce, tensor, tensor, FLOAT32, rank, 10))
    reports.append(refused(comm.all_reduce, tensor, tensor, 2 if rank else FLOAT32, 0, 10))

    def roots() -> None:
        check(nccl.ncclBroadcast(pointer(tensor), pointer(tensor), size(3), FLOAT32, rank, comm.handle, None))

    def operations() -> None:
        if rank:
            comm.all_reduce(tensor, tensor, FLOAT32, 0, 3)
        else:
            check(nccl.ncclAllGather(pointer(tensor), pointer(torch.zeros(99)), size(3), FLOAT32, comm.handle, None))

    reports += [refused(roots), refused(operations)]
    reports.append([comm.total(), ""])
    if rank == 0:
        reports.append(refused(comm.send, tensor, 1))
    else:
        reports.append(refused(comm.receive, tensor[:10], 0))
    return reports


def misuse(place: Place) -> list[Any]:
    comm, x = place.comm(), torch.zeros(4)
    size = ctypes.c_size_t(4)
    one = pointer(x)
    return [
        nccl.ncclAllReduce(one, one, size, 99, 0, comm.handle, None),
        nccl.ncclAllReduce(one, one, size, 7, 77, comm.handle, None),
        nccl.ncclAllReduce(one, one, size, 7, 0, None, None),
        nccl.ncclAllReduce(None, one, size, 7, 0, comm.handle, None),
        nccl.ncclBroadcast(one, one, size, 7, 1, comm.handle, None),
        nccl.ncclSend(one, size, 7, -1, comm.handle, None),
        nccl.ncclGroupEnd(),
        nccl.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 1, UniqueId(), 0),
        nccl.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 2, unique_id(), 2),
        nccl.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 129, unique_id(), 2),
        nccl.ncclCommInitRankConfig(ctypes.byref(ctypes.c_void_p()), 1, unique_id(), 0, (ctypes.c_char * 64)()),
        nccl.ncclGroupStart() or (nccl.ncclAllReduce(one, one, size, 99, 0, comm.handle, None) and nccl.ncclGroupEnd()),
        comm.total(),
    ]


def same_gpu(place: Place) -> None:
    Comm.of(place.id, place.rank, place.ranks, device=0)


def different_counts(place: Place) -> None:
    Comm.of(place.id, place.rank, place.ranks + place.rank)


def forked_child(place: Place) -> list[Any]:
    """A child forked after the start cannot use the communicator, and does it no harm when it ends."""
    comm, reports = place.comm(), []
    reading, writing = os.pipe()
    if os.fork() == 0:
        code = refused(comm.total)[0]
        os.write(writing, bytes([code, nccl.ncclCommAbort(comm.handle), nccl.ncclCommDestroy(comm.handle)]))
        os._exit(0)
    os.wait()
    reports = list(os.read(reading, 10))
    return [*reports, comm.total()]


# ---- Ranks that die, or never come. ----


def killed(place: Place, during: str) -> list[Any]:
    """The last rank is killed while the others wait for it."""
    comm, last = place.comm(), place.ranks - 1
    tensor = torch.ones(30_000_000)
    comm.total()
    if place.rank == last:
        if during == "collective":  # in the middle of the data
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                comm.all_reduce(tensor, tensor, FLOAT32)
        # The child that it leaves behind has all of its descriptors.
        if during == "idle" and os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if during == "collective":
        try:
            while True:
                begin = time.monotonic()
                comm.all_reduce(tensor, tensor, FLOAT32)
        except Error as error:
            report = [error.code, error.text]
    else:
        moves = {"idle": comm.total, "send": lambda: comm.send(tensor, last), "receive": lambda: comm.receive(tensor, last)}
        report = refused(moves[during])
    waited = time.monotonic() - begin
    reports = [*report, waited, comm.asynchronous_error(), refused(comm.total)[0]]
    comm.abort()
    return reports


def killed_at_the_start(place: Place) -> None:
    if place.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if place.rank == 2:
        time.sleep(2)
    place.comm()


def never_comes(place: Place, late: str) -> list[Any]:
    """The last rank lives, but does not come."""
    last = place.rank == place.ranks - 1
    if late == "start":
        if last:
            return [0, ""]
        os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "0.5"
        return refused(place.comm)
    comm = place.comm()
    comm.total()
    os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "0.5"
    if last:
        time.sleep(1.5)
    return refused(comm.total)


def abort(place: Place) -> list[Any]:
    """Another thread aborts while this one waits."""
    comm = place.comm()
    if place.rank == 0:
        seconds = []

        def end() -> None:
            begin = time.monotonic()
            comm.abort()
            seconds.append(time.monotonic() - begin)

        timer = threading.Timer(0.3, end)
        timer.start()
        code, text = refused(comm.receive, torch.zeros(1_000_000), 1)
        timer.join()
        return [code, text, seconds[0], refused(comm.total)[0]]
    if place.rank == 1:
        time.sleep(0.6)
        return [*refused(comm.total), 0, 0]
    return [*refused(comm.total), 0, 0]


def abandon(place: Place) -> None:
    """Starts a communicator that nobody else comes to, and is killed."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    Comm.of(place.id, 0, 2)


def short_of_memory(place: Place, limit: int) -> list[Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return refused(place.comm)


def where(place: Place) -> str:
    """In which directory the ranks meet."""
    comm = place.comm()
    comm.total()
    maps = Path("/proc/self/maps").read_text()
    return next(line.split()[-2] for line in maps.splitlines() if "accelerator-nccl" in line)


# ---- torch.distributed. ----


def _start(place: Place, **options: Any) -> None:
    torch.cuda.set_device(place.rank)
    store = dist.FileStore(place.store, place.ranks)
    dist.init_process_group("nccl", rank=place.rank, world_size=place.ranks, store=store, **options)


def _cuda(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).cuda()


def torch_collectives(place: Place) -> bool:
    _start(place)
    rank, n = place.rank, place.ranks
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        x = torch.ones(1001).to(dtype).cuda()
        dist.all_reduce(x)
        expected = torch.ones(1001).to(dtype) if dtype == torch.bool else torch.full((1001,), n).to(dtype)
        assert torch.equal(x.cpu(), expected), dtype
    x = _cuda(rank, 5)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.cpu().tolist() == [(n - 1) / 2, 5]
    x = _cuda(rank + 1)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert x.cpu().item() == n * (n + 1) / 4
    x = _cuda(rank)
    dist.broadcast(x, src=n - 1)
    assert x.cpu().item() == n - 1
    x = _cuda(rank)
    dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
    assert x.cpu().item() == (n - 1 if rank == 1 else rank)
    gathered = [torch.empty(2, device="cuda") for _ in range(n)]
    dist.all_gather(gathered, _cuda(rank, -rank))
    assert [t.cpu().tolist() for t in gathered] == [[r, -r] for r in range(n)]
    uneven = [torch.empty(r + 1, device="cuda") for r in range(n)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)).cuda())
    assert [t.cpu().tolist() for t in uneven] == [[r] * (r + 1) for r in range(n)]
    flat = torch.empty(n, device="cuda")
    dist.all_gather_into_tensor(flat, _cuda(rank))
    assert flat.cpu().tolist() == list(range(n))
    out = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(out, torch.arange(float(n)).cuda())
    assert out.cpu().item() == rank * n
    dist.reduce_scatter(out, [_cuda(r + 1) for r in range(n)], op=dist.ReduceOp.PRODUCT)
    assert out.cpu().item() == (rank + 1) ** n
    boxes = [torch.empty(1, device="cuda") for _ in range(n)] if rank == 0 else None
    dist.gather(_cuda(rank * 3), boxes, dst=0)
    assert rank or [t.cpu().item() for t in boxes or ()] == [3 * r for r in range(n)]
    dist.scatter(out, [_cuda(r * 7) for r in range(n)] if rank == 1 else None, src=1)
    assert out.cpu().item() == rank * 7
    received = [torch.empty(1, device="cuda") for _ in range(n)]
    dist.all_to_all(received, [_cuda(10 * rank + r) for r in range(n)])
    assert [t.cpu().item() for t in received] == [10 * r + rank for r in range(n)]
    give, take = [r + rank for r in range(n)], [r + rank for r in range(n)]
    single = torch.empty(sum(take), device="cuda")
    dist.all_to_all_single(single, torch.full((sum(give),), float(rank)).cuda(), take, give)
    assert single.cpu().tolist() == [float(r) for r in range(n) for _ in range(r + rank)]
    dist.barrier()
    dist.destroy_process_group()
    return True


def torch_objects(place: Place) -> bool | None:
    """Objects, whose sizes torch compares on the device; None where simulated kernels compute nothing."""
    _start(place)
    rank, n = place.rank, place.ranks
    computes = torch.full((2,), 3.0, device="cuda").sum().item() == 6
    if computes:
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": r, "text": "x" * r} for r in range(n)]
        names = [f"from {rank}"]
        dist.broadcast_object_list(names, src=1)
        assert names == ["from 1"]
    dist.destroy_process_group()
    return computes or None


def torch_one_process(place: Place) -> bool:
    """What DataParallel stands on: one thread with tensors on several devices."""
    xs = [torch.full((3,), float(i)).to(f"cuda:{i}") for i in range(3)]
    torch.cuda.nccl.all_reduce(xs)
    assert [x.cpu().tolist() for x in xs] == [[3.0] * 3] * 3
    torch.cuda.nccl.reduce(xs, root=1)
    assert xs[1].cpu().tolist() == [9.0] * 3
    copies = torch.nn.parallel.comm.broadcast(xs[1], devices=[1, 0, 2])
    assert [(x.device.index, x.cpu().tolist()) for x in copies] == [(i, [9.0] * 3) for i in (1, 0, 2)]
    outs = [torch.empty(9, device=f"cuda:{i}") for i in range(3)]
    torch.cuda.nccl.all_gather([x.clone().copy_(torch.full((3,), float(i))) for i, x in enumerate(xs)], outs)
    assert all(out.cpu().tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 for out in outs)
    return True


def torch_messages(place: Place) -> bool:
    _start(place)
    rank, n, size = place.rank, place.ranks, 3_000_001
    previous, following = (rank - 1) % n, (rank + 1) % n
    x, y = torch.full((size,), float(rank)).cuda(), torch.empty(size, device="cuda")
    requests = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, previous)]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    assert (y.cpu() == previous).all()
    for sender in range(n):  # one after the other, as a pipeline does
        if rank == sender:
            dist.send(x, following)
        elif rank == (sender + 1) % n:
            dist.recv(y, previous)
    assert (y.cpu() == previous).all()
    dist.destroy_process_group()
    return True


def torch_groups(place: Place) -> bool:
    _start(place, device_id=torch.device("cuda", place.rank))  # groups are made by ncclCommSplit then
    rank, n = place.rank, place.ranks
    groups = [dist.new_group([r for r in range(n) if r % 2 == parity]) for parity in (0, 1)]
    x = _cuda(rank)
    dist.all_reduce(x, group=groups[rank % 2])
    assert x.cpu().item() == sum(r for r in range(n) if r % 2 == rank % 2)
    mesh = dist.device_mesh.init_device_mesh("cuda", (n // 2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        x = _cuda(rank)
        dist.all_reduce(x, group=mesh.get_group(name))
    assert x.cpu().item() == rank // 2 * 4 + 1
    dist.destroy_process_group()
    return True


def torch_buckets(place: Place) -> bool:
    """Gradients in buckets, reduced on the way, on side streams, as DDP does; and coalesced calls."""
    _start(place)
    rank, n = place.rank, place.ranks
    for step in range(30):
        buckets = [torch.full((50_000 + 1000 * i,), float(rank * i + step)).cuda() for i in range(8)]
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in reversed(works):
            work.wait()
        total = n * (n - 1) / 2
        for i, bucket in enumerate(buckets):
            assert (bucket.cpu() == total * i + n * step).all(), (step, i)
    parts = [_cuda(rank + i) for i in range(5)]
    with dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as manager:
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    assert [part.cpu().item() for part in parts] == [total + n * i for i in range(5)]
    dist.destroy_process_group()
    return True


def torch_killed(place: Place) -> list[Any]:
    """A rank is killed in the middle of training."""
    _start(place, timeout=timedelta(seconds=60))
    x = torch.ones(1000).cuda()
    dist.all_reduce(x)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        dist.all_reduce(x)
        torch.cuda.synchronize()
    except RuntimeError as error:  # DistBackendError, where torch does not raise it plainly
        text = str(error)
    return [text, time.monotonic() - begin]


def torch_version(place: Place) -> list[Any]:
    import accelerator as acc

    version = ctypes.c_int()
    check(nccl.ncclGetVersion(ctypes.byref(version)))
    return [list(torch.cuda.nccl.version()), list(acc.communication_backend_version()), version.value]


def speed(place: Place, sizes: list[int]) -> dict[str, float]:
    """Microseconds of an all-reduce, the best of several."""
    _start(place)
    reports = {}
    for size in sizes:
        x = torch.zeros(size // 4).cuda()
        best = float("inf")
        for _ in range(200 if size < 2**20 else 30 if size < 2**24 else 5):
            begin = time.perf_counter()
            dist.all_reduce(x)
            best = min(best, time.perf_counter() - begin)
        reports[str(size)] = round(best * 1e6, 1)
    dist.destroy_process_group()
    return reports
