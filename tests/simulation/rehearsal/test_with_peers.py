"""Ranks that a program starts itself are together: values of objects and of small tensors arrive, large ones cost nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

from .symmetric_memory import SYMMETRIC_MEMORY

pytestmark = needs_cuda_torch

PRELUDE = """
import torch._dynamo
import torch
import os
import sys
import torch.distributed as dist
world = 2
rank = int(os.fork() == 0)  # before CUDA is used
torch.cuda.set_device(rank)
dist.init_process_group({backend!r}, init_method="file://" + sys.argv[1], rank=rank, world_size=world)
def device(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).cuda()
"""
END = """
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    assert os.wait()[1] == 0
"""


def run(code: str, folder: Path, backend: str = "nccl") -> None:
    environment = simulated_environment(gpus=2, memory="16GiB", compute=False, state=str(folder / "state"))
    support.run(PRELUDE.format(backend=backend) + textwrap.dedent(code) + END, environment, str(folder / "store"))


def test_small_tensors_have_their_values(tmp_path: Path) -> None:
    run(
        """
        total = device(2.0 + rank)
        dist.all_reduce(total)
        assert total.tolist() == [5.0]
        gathered = torch.empty(world, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(gathered, device(7 + rank, dtype=torch.int64))
        assert gathered.tolist() == [7, 8]
        exchanged = torch.empty(world, device="cuda")
        dist.all_to_all_single(exchanged, device(rank, rank + 10))
        assert exchanged.tolist() == [10.0 * rank, 10.0 * rank + 1]
        value = torch.full((2**17,), 1 + rank, device="cuda")  # of 1 MiB, the largest that is moved
        if rank == 0:
            dist.send(value, 1)
        else:
            dist.recv(value, 0)
        assert value[-1].item() == 1
        """,
        tmp_path,
    )


def test_large_tensors_are_not_moved(tmp_path: Path) -> None:
    run(
        """
        import resource
        large = torch.empty(2**33, dtype=torch.uint8, device="cuda")
        works = [dist.all_reduce(large, async_op=True), dist.reduce_scatter_tensor(large[: 2**32], large, async_op=True)]
        works.append(dist.isend(large, 1) if rank == 0 else dist.irecv(large, 0))
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        assert all(work.is_completed() for work in works)
        for count, dtype in ((2**20 + 1, torch.bool), (2**18 + 1, torch.float32)):  # of 1 MiB and an element
            values = torch.empty(count, dtype=dtype, device="cuda")
            values[:1].fill_(rank == 0)
            dist.broadcast(values, 0)
            assert values[:1].item() == (rank == 0), dtype
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20
        """,
        tmp_path,
    )


@pytest.mark.parametrize("backend", ["nccl", pytest.param("cpu:gloo,cuda:nccl", marks=pytest.mark.slow)])
def test_objects_of_any_size(backend: str, tmp_path: Path) -> None:
    run(
        """
        objects = [None] * world
        large = "word" * 2**19
        dist.all_gather_object(objects, {"rank": rank, "large": large})
        assert objects == [{"rank": 0, "large": large}, {"rank": 1, "large": large}]
        listed = [large, large.upper()] if rank == 0 else [None, None]
        dist.broadcast_object_list(listed, src=0)
        assert listed == [large, large.upper()]
        received = [None]
        dist.scatter_object_list(received, [[1], [large]] if rank == 1 else None, src=1)
        assert received == [[[1], [large]][rank]]
        dist.gather_object(large, objects if rank == 1 else None, dst=1)
        assert rank == 0 or objects == [large, large]
        if hasattr(dist, "send_object_list"):
            if rank == 0:
                dist.send_object_list([large], 1)
            else:
                dist.recv_object_list(received, 0)
                assert received == [large]
        assert not sys.modules["_accelerator_simulation._inside.rehearsal.missing_values"].noted()  # torch reads sizes
        assert torch.ones(2**20, device="cuda").sum().item() == 0, "other ops do not compute"
        mask = torch.zeros(2**20 + 1, dtype=torch.bool, device="cuda")
        mask[:1].fill_(rank == 0)
        dist.broadcast(mask, 0)
        assert mask[:1].item() == (rank == 0), "other collectives do not move large tensors"
        """,
        tmp_path,
        backend,
    )


def test_memory_that_is_being_sent_is_not_overwritten(tmp_path: Path) -> None:
    """A new tensor gets the memory of one that this rank has sent, before the other rank receives it."""
    run(
        """
        import time
        flag, numbers = torch.zeros(1, device="cuda"), torch.empty(21, 1000, device="cuda")
        news = (
            lambda: torch.empty(21, dtype=torch.uint8, device="cuda"),
            lambda: numbers[0, :21] > 0,
            lambda: numbers.argmax(-1),
        )
        for new in news:
            if rank == 1:
                time.sleep(0.3)
            dist.all_reduce(flag)  # what follows waits for rank 1
            sent = device(*range(1, 22), dtype=torch.uint8) if rank == 0 else torch.empty(21, dtype=torch.uint8, device="cuda")
            dist.broadcast(sent, 0)
            if rank == 0:
                address = sent.data_ptr()
                del sent
                assert new().data_ptr() == address
            else:
                assert sent.tolist() == [*range(1, 22)]
        """,
        tmp_path,
    )


def test_collectives_of_the_cpu(tmp_path: Path) -> None:
    run(
        """
        value = torch.tensor([1.0 + rank])
        dist.all_reduce(value)
        assert value.item() == 3.0
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key{rank}", str(rank))
        assert store.get(f"key{1 - rank}") == str(1 - rank).encode()
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        """,
        tmp_path,
        "cpu:gloo,cuda:nccl",
    )


@pytest.mark.slow
def test_symmetric_memory(tmp_path: Path) -> None:
    run(SYMMETRIC_MEMORY, tmp_path)
