"""Test cases of torch.distributed over the simulated NCCL. Each rank runs the function of a case."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from tests.simulation.nccl.ranks import (
    Place,
    check,
    nccl,
)


def _start(place: Place, **options: Any) -> None:
    torch.cuda.set_device(place.rank)
    store = dist.FileStore(place.store, place.ranks)
    dist.init_process_group("nccl", rank=place.rank, world_size=place.ranks, store=store, **options)


def _cuda(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).cuda()


def collectives(place: Place) -> bool:
    _start(place)
    check_collectives(place.rank, place.ranks)
    dist.destroy_process_group()
    return True


def check_collectives(rank: int, n: int) -> None:
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


def objects(place: Place) -> bool | None:
    """Send objects, whose sizes torch compares on the device. Return None if simulated kernels compute nothing."""
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


def one_process(place: Place) -> bool:
    """Run the calls of DataParallel, with tensors on several devices in one thread."""
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


def messages(place: Place) -> bool:
    _start(place)
    check_messages(place.rank, place.ranks)
    dist.destroy_process_group()
    return True


def check_messages(rank: int, n: int) -> None:
    size = 3_000_001
    previous, following = (rank - 1) % n, (rank + 1) % n
    x, y = torch.full((size,), float(rank)).cuda(), torch.empty(size, device="cuda")
    requests = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, previous)]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    assert (y.cpu() == previous).all()
    for sender in range(n):  # one sender at a time, as in a pipeline
        if rank == sender:
            dist.send(x, following)
        elif rank == (sender + 1) % n:
            dist.recv(y, previous)
    assert (y.cpu() == previous).all()


def groups(place: Place) -> bool:
    _start(place, device_id=torch.device("cuda", place.rank))  # new_group then calls ncclCommSplit
    check_groups(place.rank, place.ranks)
    dist.destroy_process_group()
    return True


def check_groups(rank: int, n: int) -> None:
    groups = [dist.new_group([r for r in range(n) if r % 2 == parity]) for parity in (0, 1)]
    x = _cuda(rank)
    dist.all_reduce(x, group=groups[rank % 2])
    assert x.cpu().item() == sum(r for r in range(n) if r % 2 == rank % 2)
    mesh = dist.device_mesh.init_device_mesh("cuda", (n // 2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        x = _cuda(rank)
        dist.all_reduce(x, group=mesh.get_group(name))
    assert x.cpu().item() == rank // 2 * 4 + 1


def buckets(place: Place) -> bool:
    """Reduce several buckets asynchronously, as DDP does with gradients. Then coalesce several calls."""
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


def nan_check(place: Place, dtype: str) -> list[str]:
    """With TORCH_NCCL_NAN_CHECK=1, a kernel compiled into torch examines what a rank sends."""
    _start(place)
    reports = []
    for value in (1.0, float("inf"), -float("inf"), float("nan")):
        tensor = torch.ones(1001)
        tensor[1000] = value
        sent = tensor.to(getattr(torch, dtype)).cuda()
        try:
            dist.all_gather_into_tensor(torch.empty_like(sent), sent)
            reports.append("sent")
        except RuntimeError as error:
            reports.append(str(error).splitlines()[0])
    return reports


def version(place: Place) -> list[Any]:
    import accelerator as acc

    version = ctypes.c_int()
    check(nccl.ncclGetVersion(ctypes.byref(version)))
    return [list(torch.cuda.nccl.version()), list(acc.communication_backend_version()), version.value]


def graph(place: Place) -> list[float]:
    """Return the results of a collective: of an eager call, during its capture, and after each replay of the graph."""
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
