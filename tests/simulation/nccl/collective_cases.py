"""Test cases of collectives, messages and groups. Each rank runs the function of a case."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import torch

from tests.simulation.nccl.ranks import (
    Comm,
    Place,
    check,
    check_cuda,
    group,
    nccl,
    pointer,
    refused,
    wait_for_file,
)
from tests.support.simulation_driver import loaded_runtime

TYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)
INT64, FLOAT32 = 4, 7
FLOATS = (6, 7, 8, 9, 10, 11)
SUM, PROD, MAX, MIN, AVG = range(5)
BROAD = 270_003  # bytes; every collective needs several steps to transfer them


# ---- Inputs and expected results. ----


def values(rank: int, size: int, type_code: int) -> torch.Tensor:
    """Return the input of a rank, which every process can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + type_code)
    small = torch.randint(1 if type_code in (1, 3, 5) else -3, 5, (size,), generator=generator)
    dtype = TYPES[type_code]
    if dtype.is_floating_point:
        return (small.double() + torch.rand(size, generator=generator, dtype=torch.float64)).to(torch.float32).to(dtype)
    if dtype.itemsize == 1:
        small = small * 37  # so that sums wrap around
    return small.to(dtype)


def combined(parts: list[torch.Tensor], type_code: int, op: int) -> torch.Tensor:
    """Return the expected reduction, computed in the order of the ranks and rounded once at the end."""
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
            wrapped = total.to(dtype).to(exact)  # the sum wraps around in its type before the division
            return torch.div(wrapped, len(parts), rounding_mode="trunc").to(dtype)
        total = total / len(parts)
    return total.to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def blank(size: int, type_code: int) -> torch.Tensor:
    """Return an output buffer with values that no test expects."""
    return torch.full((size * TYPES[type_code].itemsize,), 0x5A, dtype=torch.uint8).view(TYPES[type_code])


def sizes(place: Place, type_code: int) -> tuple[int, ...]:
    # With many ranks fewer bytes need several steps, and comparisons take longer.
    return 0, 1, 7, 1001, (BROAD if place.ranks < 8 else BROAD // 13) // TYPES[type_code].itemsize + 1


def reductions(place: Place, type_code: int) -> int:
    """Run every reduction of one type in every collective that reduces. Return the number of comparisons."""
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
            comm.call(nccl.ncclReduce, pointer(parts[rank]), target, length, type_code, op, root)
            assert same(got, expected if rank == root else before), ("reduce", op, size)
            parts = [values(r, size * n, type_code) for r in range(n)]
            got = blank(size, type_code)
            comm.call(nccl.ncclReduceScatter, pointer(parts[rank]), pointer(got), length, type_code, op)
            expected = combined(parts, type_code, op)[rank * size : (rank + 1) * size]
            assert same(got, expected), ("reduce_scatter", op, size)
            mine = parts[rank].clone()
            target = pointer(mine, rank * size)
            comm.call(nccl.ncclReduceScatter, pointer(mine), target, length, type_code, op)
            assert same(mine[rank * size : (rank + 1) * size], expected), ("reduce_scatter in place", op, size)
            count += 5
    comm.destroy()
    return count


def movements(place: Place, type_code: int) -> int:
    """Run every collective that moves values without reducing them. Return the number of comparisons."""
    comm, n, rank, count = place.comm(), place.ranks, place.rank, 0
    for size in sizes(place, type_code):
        length = ctypes.c_size_t(size)
        parts = [values(r, size, type_code) for r in range(n)]
        everything = torch.cat([part.view(torch.uint8) for part in parts]).view(TYPES[type_code])
        for root in range(n):
            got = blank(size, type_code)
            source = pointer(parts[rank]) if rank == root else None
            comm.call(nccl.ncclBroadcast, source, pointer(got), length, type_code, root)
            assert same(got, parts[root]), ("broadcast", size, root)
            got = parts[rank].clone()
            comm.call(nccl.ncclBcast, pointer(got), length, type_code, root)
            assert same(got, parts[root]), ("bcast", size, root)
            got = blank(size * n, type_code)
            comm.call(nccl.ncclGather, pointer(parts[rank]), pointer(got), length, type_code, root)
            assert same(got, everything if rank == root else blank(size * n, type_code)), ("gather", size, root)
            got = blank(size, type_code)
            comm.call(nccl.ncclScatter, pointer(everything), pointer(got), length, type_code, root)
            assert same(got, parts[rank]), ("scatter", size, root)
        got = blank(size * n, type_code)
        comm.call(nccl.ncclAllGather, pointer(parts[rank]), pointer(got), length, type_code)
        assert same(got, everything), ("all_gather", size)
        got = blank(size * n, type_code)
        got.view(torch.uint8)[:] = 0
        inside = pointer(got, rank * size)
        got[rank * size : (rank + 1) * size] = parts[rank]
        comm.call(nccl.ncclAllGather, inside, pointer(got), length, type_code)
        assert same(got, everything), ("all_gather in place", size)
        blocks = [values(r, size * n, type_code) for r in range(n)]
        got = blank(size * n, type_code)
        comm.call(nccl.ncclAlltoAll, pointer(blocks[rank]), pointer(got), length, type_code)
        wanted = [block[rank * size : (rank + 1) * size].view(torch.uint8) for block in blocks]
        assert same(got, torch.cat(wanted).view(TYPES[type_code])), ("all_to_all", size)
        count += 4 * n + 3
    comm.destroy()
    return count


def edge_values(place: Place) -> dict[str, list[float]]:
    """Return reductions of NaN, infinities, subnormal values and values that are too large for a type."""
    comm = place.comm()
    reports = {}
    edges = [float("nan"), float("inf"), -float("inf"), 6e-8, -0.0, 440.0, 60000.0, 1e38]
    for type_code in FLOATS:
        for op, twos in ((SUM, None), (MAX, 1), (MIN, 0)):
            brought = torch.tensor([2.0] * 8 if place.rank == twos else edges).to(TYPES[type_code])
            got = blank(8, type_code)
            comm.all_reduce(brought, got, type_code, op)
            reports[f"{type_code} {op}"] = [str(value) for value in got.float().tolist()]
    comm.destroy()
    return reports


def nan_elsewhere(place: Place) -> dict[str, list[str]]:
    """Return the maxima and minima of NaN on all ranks but one, for each rank, and of NaN on all ranks."""
    comm, reports = place.comm(), {}
    for type_code in FLOATS:
        brought = torch.full((place.ranks + 1,), float("nan"))
        brought[place.rank] = float(place.rank)
        values = brought.to(TYPES[type_code])
        for op in (MAX, MIN):
            got = blank(place.ranks + 1, type_code)
            comm.all_reduce(values, got, type_code, op)
            reports[f"{type_code} {op}"] = [str(value) for value in got.float().tolist()]
    comm.destroy()
    return reports


def halves(place: Place) -> bool:
    """Check that a maximum of equal inputs preserves every value of the 16-bit and 8-bit floating-point types."""
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
    """Run sums in which each rank multiplies its values by its own factor. Return the number of sums."""
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
    """Send to the next rank and receive from the previous rank in one group."""
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
    """Send two messages of different sizes to every rank, itself included, in one group. Receive in another order."""
    comm, n, rank = place.comm(), place.ranks, place.rank
    sent = {(peer, i): values(100 * rank + 10 * peer + i, size + i * 13 + peer, FLOAT32) for peer in range(n) for i in (0, 1)}
    got = {(peer, i): blank(size + i * 13 + rank, FLOAT32) for peer in range(n) for i in (0, 1)}
    with group():
        for peer in reversed(range(n)):
            for i in (0, 1):
                comm.receive(got[peer, i], peer)
        with group():  # the end of an inner group does not start its calls
            for key, tensor in sent.items():
                comm.send(tensor, key[0])
    for (peer, i), tensor in got.items():
        assert same(tensor, values(100 * peer + 10 * rank + i, size + i * 13 + rank, FLOAT32)), (peer, i)
    comm.destroy()
    return True


def mixed_group(place: Place) -> bool:
    """Call collectives and messages of two communicators in one group."""
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
    """Receive a small message after its sender has destroyed its communicator."""
    comm = place.comm()
    if place.rank == 0:
        comm.send(torch.arange(100), 1)
        comm.destroy()
        Path(place.store).touch()
        return 0
    wait_for_file(Path(place.store))
    got = torch.zeros(100, dtype=torch.int64)
    comm.receive(got, 0)
    return int(got.sum())


def one_process(place: Place, threads: bool) -> bool:
    """Use several devices in one process, with a thread for each or with groups."""
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


def iterate(place: Place, count: int) -> float:
    """Run many all-reduces of changing sizes, in which a race gives a wrong sum. Return the mean of the seconds."""
    comm, seconds = place.comm(), 0.0
    for i in range(count):
        tensor = torch.full((1 + (i * 7919) % 5000,), float(place.rank + i))
        begin = time.monotonic()
        comm.all_reduce(tensor, tensor, FLOAT32)
        seconds += time.monotonic() - begin
        expected = sum(range(place.ranks)) + i * place.ranks
        assert (tensor == expected).all(), (i, tensor, expected)
    comm.destroy()
    return seconds / count
