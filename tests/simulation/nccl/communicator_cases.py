"""Test cases of communicators: lifetime, misuse, ranks that die or never join. Each rank runs the function of a case."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from accelerator.simulation import inject_fault
from tests.simulation.nccl.ranks import (
    MOST_SECONDS,
    NOT_READY,
    SUCCESS,
    Comm,
    Error,
    Place,
    UniqueId,
    check,
    check_cuda,
    nccl,
    pointer,
    refused,
    unique_id,
    wait_for_file,
)
from tests.support.simulation_driver import loaded_runtime

INT64, FLOAT32 = 4, 7


# ---- Communicators. ----


def families(place: Place) -> list[Any]:
    """Split a communicator twice. A rank with color -1 gets no communicator."""
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
    """Create many communicators, keep every fourth until the end, and check that destroying them frees their resources."""
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


def shrink(place: Place, flags: int) -> list[Any]:
    """Kill the last rank and shrink the communicator to the others."""
    comm = place.comm()
    comm.total()
    if place.rank == place.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # Only if the flags abort the old communicator: hanging work blocks its stream until then, as with NCCL.
    code = refused(comm.total)[0] if flags else SUCCESS
    gone, handle = (ctypes.c_int * 1)(place.ranks - 1), ctypes.c_void_p()
    check(nccl.ncclCommShrink(comm.handle, gone, 1, ctypes.byref(handle), None, flags))
    smaller = Comm.adopt(handle)
    reports = [code, smaller.rank, smaller.ranks, smaller.total()]
    comm.abort()
    smaller.destroy()
    return reports


def siblings(place: Place, kinds: list[str]) -> list[Any]:
    """Make communicators of one parent, one after the other, and use all of them. Without the last rank of the parent."""
    comm = place.comm()
    if place.rank == place.ranks - 1:
        for kind in kinds:
            if kind == "split":
                comm.split(-1, 0)
        return []
    gone, made = (ctypes.c_int * 1)(place.ranks - 1), []
    for kind in kinds:
        handle = ctypes.c_void_p()
        if kind == "split":
            check(nccl.ncclCommSplit(comm.handle, 0, place.rank, ctypes.byref(handle), None))
        else:
            check(nccl.ncclCommShrink(comm.handle, gone, 1, ctypes.byref(handle), None, 0))
        made.append(Comm.adopt(handle))
    reports = [one.total(10**number) for number, one in enumerate(made)]
    made.pop(0).destroy()  # the others live on
    reports += [one.total(10**number) for number, one in enumerate(made)]
    for one in made:
        one.destroy()
    return reports


def grow(place: Place) -> list[int]:
    """Grow a communicator of ranks 0 and 1 by rank 2."""
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
        wait_for_file(shared)
        identifier = UniqueId.from_buffer_copy(shared.read_bytes())
        check(nccl.ncclCommGrow(None, 3, ctypes.byref(identifier), 2, ctypes.byref(handle), None))
    larger = Comm.adopt(handle)
    return [larger.rank, larger.ranks, larger.total()]


def life(place: Place) -> list[Any]:
    """Return the results of calls after a communicator is suspended, resumed, revoked, finalized and destroyed."""
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
        time.sleep(0.3)  # until the others wait, which nothing shows
        check(nccl.ncclCommRevoke(comm.handle, 0))
        return [0, ""]
    return refused(comm.total)


def abort_beside_revoke(place: Place) -> list[int]:
    """Abort a communicator while another thread revokes it. The preloaded library delays that thread."""
    comm, preloaded, codes = place.comm(), ctypes.CDLL(None), list[int]()
    comm.total()  # starts the communicator's thread
    revoke = ctypes.cast(nccl.ncclCommRevoke, ctypes.c_void_p)
    thread = threading.Thread(target=lambda: codes.append(preloaded.revoke_late(revoke, comm.handle)))
    thread.start()
    while not preloaded.has_slept():
        time.sleep(0.001)
    codes.append(nccl.ncclCommAbort(comm.handle))
    thread.join()
    return codes


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
    comm.call(nccl.ncclAllReduce, address, address, size, INT64, 0)
    check(nccl.ncclMemFree(address))
    for name in ("ncclPutSignal", "ncclSignal", "ncclWaitSignal", "ncclDevCommCreate", "ncclGetPeerDevicePointer"):
        assert getattr(nccl, name)() == 5, name
    return True


def broken_context(place: Place, xid: int) -> list[int] | None:
    """Return the errors of a stream and of the communicator once a fault has broken the context: the second one has none."""
    comm = place.comm()
    if place.rank == 0:
        wait_for_file(Path(place.store))
        comm.abort()
        return None
    tensor = torch.ones(8, device="cuda:1")
    comm.submit(nccl.ncclAllReduce, pointer(tensor), pointer(tensor), ctypes.c_size_t(8), FLOAT32, 0)
    inject_fault(f"xid={xid},gpu=1")
    while (code := loaded_runtime().cudaStreamQuery(None)) == NOT_READY:
        time.sleep(0.01)
    time.sleep(0.3)  # the worker looks every 100 ms
    result = [code, comm.asynchronous_error()]
    Path(place.store).touch()
    comm.abort()
    return result


# ---- Misuse. ----


def mismatch(place: Place) -> list[list[Any]]:
    """Return the errors of calls that do not match. They end their communicator, and its parent still works."""
    parent, rank = place.comm(), place.rank
    tensor, size = torch.zeros(200_000), ctypes.c_size_t

    def counts(comm: Comm) -> None:
        comm.all_reduce(tensor, tensor, FLOAT32, 0, 100_000 + rank)

    def reductions(comm: Comm) -> None:
        comm.all_reduce(tensor, tensor, FLOAT32, rank, 10)

    def types(comm: Comm) -> None:
        comm.all_reduce(tensor, tensor, 2 if rank else FLOAT32, 0, 10)

    def roots(comm: Comm) -> None:
        comm.call(nccl.ncclBroadcast, pointer(tensor), pointer(tensor), size(3), FLOAT32, rank)

    def operations(comm: Comm) -> None:
        if rank:
            comm.all_reduce(tensor, tensor, FLOAT32, 0, 3)
        else:
            comm.call(nccl.ncclAllGather, pointer(tensor), pointer(torch.zeros(99)), size(3), FLOAT32)

    def orders(comm: Comm) -> None:
        small, large = tensor[:10], tensor[:20]
        for part in (small, large) if rank else (large, small):
            comm.submit(nccl.ncclAllReduce, pointer(part), pointer(part), size(len(part)), FLOAT32, 0)
        comm.finish()

    def messages(comm: Comm) -> None:
        if rank == 0:
            comm.send(tensor, 1)
        else:
            comm.receive(tensor[:10], 0)

    reports = []
    for case in (counts, reductions, types, roots, operations, orders, messages):
        comm = parent.split(0, 0)
        assert comm
        reports.append([*refused(case, comm), comm.asynchronous_error(), refused(comm.total)[0]])
        comm.abort()
    return [*reports, parent.total()]


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


def same_gpu(place: Place, devices: list[int]) -> None:
    Comm.of(place.id, place.rank, place.ranks, device=devices[place.rank])


def two_machines(place: Place, devices: list[int]) -> int:
    """The first two ranks are on one machine, the others on another one with the same UUIDs."""
    os.environ["ACCELERATOR_SIM_STATE"] = f"{place.store}-{place.rank // 2}"
    comm = Comm.of(place.id, place.rank, place.ranks, device=devices[place.rank])
    total = comm.total()
    comm.destroy()
    return total


def different_counts(place: Place) -> None:
    Comm.of(place.id, place.rank, place.ranks + place.rank)


def forked_child(place: Place) -> list[Any]:
    """Fork a child, which cannot use the communicator. The parent can, after the child has ended."""
    comm, reports = place.comm(), []
    reading, writing = os.pipe()
    if os.fork() == 0:
        code = refused(comm.total)[0]
        os.write(writing, bytes([code, nccl.ncclCommAbort(comm.handle), nccl.ncclCommDestroy(comm.handle)]))
        os._exit(0)
    os.wait()
    reports = list(os.read(reading, 10))
    return [*reports, comm.total()]


# ---- Ranks that die or never join. ----


def killed(place: Place, during: str) -> list[Any]:
    """Kill the last rank while the others wait for it."""
    comm, last, reported = place.comm(), place.ranks - 1, Path(place.store)
    tensor = torch.ones(30_000_000)
    comm.total()
    if place.rank == last:
        if during == "collective":  # in the middle of the data
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                comm.all_reduce(tensor, tensor, FLOAT32)
        # A child with copies of all descriptors stays alive until the others have reported. It must not keep them waiting.
        if during == "idle" and os.fork() == 0:
            signal.alarm(MOST_SECONDS)
            wait_for_file(reported)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if during == "collective":
        try:
            while True:
                comm.all_reduce(tensor, tensor, FLOAT32)
        except Error as error:
            report = [error.code, error.text]
    else:
        moves = {"idle": comm.total, "send": lambda: comm.send(tensor, last), "receive": lambda: comm.receive(tensor, last)}
        report = refused(moves[during])
    reports = [*report, comm.asynchronous_error(), refused(comm.total)[0]]
    comm.abort()
    if place.rank == 0:
        reported.touch()
    return reports


def killed_at_the_start(place: Place) -> list[Any]:
    """Kill rank 1 while rank 0 waits for rank 2. Rank 2 joins only after rank 0 has failed."""
    failed = Path(place.store)
    if place.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if place.rank == 2:
        wait_for_file(failed)
        os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "0.5"
    report = refused(place.comm)
    failed.touch()
    return report


def dead_creator(place: Place, end: str, rank: int) -> list[Any]:
    """Join as the given rank of two with the unique id of a process that has ended. The other rank never joins."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        identifier = unique_id()
        os.write(writing, bytes(identifier))
        if end == "killed_rank":
            Comm.of(identifier, 1 - rank, 2)
        os._exit(0)
    identifier = UniqueId.from_buffer_copy(os.read(reading, ctypes.sizeof(UniqueId)))
    if end == "killed_rank":
        wait_for_file(Path(f"/dev/shm/accelerator-nccl-{bytes(identifier)[8:24].hex()}"))
        os.kill(child, signal.SIGKILL)
    if end == "zombie":
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    else:
        os.waitpid(child, 0)
    if end == "other_namespace":
        identifier = with_number_replaced(identifier, os.stat("/proc/self/ns/pid").st_ino)
    if end == "reused_pid":  # this process has the creator's pid, but started at another time
        start_time = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        identifier = with_number_replaced(unique_id(), start_time)
    report = refused(Comm.of, identifier, rank, 2)
    Comm.of(unique_id(), 0, 1).destroy()  # removes the file of a killed rank
    return report


def with_number_replaced(identifier: UniqueId, number: int) -> UniqueId:
    """Return a unique id in which another number stands for a number of 64 bits."""
    old, new = number.to_bytes(8, "little"), (number - 1).to_bytes(8, "little")
    assert bytes(identifier).count(old) == 1
    return UniqueId.from_buffer_copy(bytes(identifier).replace(old, new))


def leaves(place: Place) -> list[int]:
    """The last rank leaves after a collective. Rank 0 calls another collective and waits for it. The others call nothing."""
    comm, failed = place.comm(), Path(place.store)
    comm.total()
    if place.rank == 0:
        reports = [refused(comm.total)[0], comm.asynchronous_error()]
        failed.touch()
    elif place.rank == place.ranks - 1:
        comm.destroy()
        return []
    else:
        wait_for_file(failed)
        reports = [SUCCESS, comm.asynchronous_error()]
    comm.abort()
    return reports


def never_comes(place: Place, late: str) -> list[Any]:
    """The last rank lives, but does not join the start or the collective in time."""
    last, failed = place.rank == place.ranks - 1, Path(place.store)
    if late == "start":
        if last:
            return [0, ""]
        os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "0.5"
        return refused(place.comm)
    parent = place.comm()
    os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "2"  # a communicator reads it when it is created
    comm = parent.split(0, 0)
    assert comm
    comm.total()
    os.environ["ACCELERATOR_SIM_NCCL_TIMEOUT"] = "0.001"
    if last:
        wait_for_file(failed)
    report = refused(comm.total)
    failed.touch()
    return report


def abort(place: Place) -> list[Any]:
    """A second thread of rank 0 aborts the communicator while the first waits for the stream."""
    comm = place.comm()
    if place.rank == 0:
        timer = threading.Timer(0.3, comm.abort)
        timer.start()
        tensor = torch.zeros(1_000_000)
        comm.submit(nccl.ncclRecv, pointer(tensor), ctypes.c_size_t(4_000_000), 0, 1)
        code = loaded_runtime().cudaStreamSynchronize(None)
        timer.join()
        Path(place.store).touch()
        return [code, refused(comm.total)[0]]
    if place.rank == 1:
        wait_for_file(Path(place.store))
    return refused(comm.total)


def abort_after_death(place: Place) -> list[int]:
    """The last rank dies. A second thread of the others aborts while the first waits for the stream."""
    comm, tensor = place.comm(), torch.zeros(4)
    comm.total()
    if place.rank == place.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def abort() -> None:
        while not comm.asynchronous_error():
            time.sleep(0.01)
        comm.abort()

    aborting = threading.Thread(target=abort)
    comm.submit(nccl.ncclAllReduce, pointer(tensor), pointer(tensor), ctypes.c_size_t(4), FLOAT32, 0)
    aborting.start()
    codes = [loaded_runtime().cudaStreamSynchronize(None)]
    aborting.join()
    return [*codes, loaded_runtime().cudaStreamQuery(None)]


def abandon(place: Place) -> str | None:
    """Start a communicator that no other rank joins. A timer kills the process meanwhile. Rank 1 returns the file's name."""
    if place.rank:
        return bytes(place.id)[8:24].hex()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    Comm.of(place.id, 0, 2)
    return None


def short_of_memory(place: Place, limit: int) -> list[Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return refused(place.comm)


def where(place: Place) -> str:
    """Return the path of the file that the ranks share."""
    comm = place.comm()
    comm.total()
    maps = Path("/proc/self/maps").read_text()
    return next(line.split()[-2] for line in maps.splitlines() if "accelerator-nccl" in line)
