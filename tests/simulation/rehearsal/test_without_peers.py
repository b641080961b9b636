"""A rank without the other ranks of its world: nccl and ``torch.distributed`` without peers."""

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
import pytest
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
rank, world = dist.get_rank(), dist.get_world_size()
"""


def run(code: str, rank: int = 3, world: int = 8, *, before: str = "") -> str:
    variables = {
        "ACCELERATOR_SIM_WITHOUT_PEERS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % 4),
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    environment = simulated_environment(variables, gpus=4, memory="16GiB", compute=False)
    return support.run(before + PRELUDE + textwrap.dedent(code), environment)


@pytest.mark.parametrize(
    ("rank", "world"), [(3, 8), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(199, 200, marks=pytest.mark.slow)]
)
def test_collectives_are_those_of_equal_ranks(rank: int, world: int) -> None:
    run(
        """
        def device(*values, dtype=torch.float32):
            return torch.tensor(values, dtype=dtype).cuda()
        total = device(2.0, 3.0)
        dist.all_reduce(total)
        assert total.tolist() == [2.0 * world, 3.0 * world]
        for op, expected in ((dist.ReduceOp.AVG, 5.0), (dist.ReduceOp.MAX, 5.0), (dist.ReduceOp.MIN, 5.0)):
            value = device(5.0)
            dist.all_reduce(value, op)
            assert value.item() == expected
        for factor in (0.5, device(0.5)):
            value = device(6.0)
            dist.all_reduce(value, dist._make_nccl_premul_sum(factor))
            assert value.item() == 3.0 * world
        gathered = torch.empty(world, dtype=torch.int64).cuda()
        dist.all_gather_into_tensor(gathered, device(7, dtype=torch.int64))
        assert gathered.tolist() == [7] * world
        parts = [torch.empty(2).cuda() for _ in range(world)]
        dist.all_gather(parts, device(1.0, 2.0))
        assert [part.tolist() for part in parts] == [[1.0, 2.0]] * world
        parts = [torch.zeros(2).cuda() for _ in range(world)]
        dist.gather(device(1.0, 2.0), parts if rank == world - 1 else None, world - 1)
        assert [part.tolist() for part in parts] == [[1.0, 2.0] if rank == world - 1 else [0.0, 0.0]] * world
        dist.gather(device(3.0, 4.0), parts, rank)
        assert [part.tolist() for part in parts] == [[3.0, 4.0]] * world
        mine = torch.empty(1).cuda()
        dist.reduce_scatter_tensor(mine, device(*range(world)))
        assert mine.item() == rank * world
        exchanged = torch.empty(world).cuda()
        dist.all_to_all_single(exchanged, device(*range(world)))
        assert exchanged.tolist() == [rank] * world
        value = device(4.0)
        dist.broadcast(value, 0)
        assert value.item() == 4.0
        other = (rank + 1) % world
        for root in {rank, other}:
            value = device(4.0)
            dist.reduce(value, root)
            assert value.item() == (4.0 * world if root == rank else 4.0)
            parts = [torch.zeros(2).cuda() for _ in range(world)] if root == rank else None
            dist.gather(device(1.0, 2.0), parts, root)
            assert parts is None or parts[rank].tolist() == [1.0, 2.0]
        received = torch.zeros(1).cuda()
        dist.scatter(received, [device(float(each)) for each in range(world)], rank)
        assert received.item() == rank
        dist.reduce_scatter(received, [device(float(each)) for each in range(world)], dist.ReduceOp.MAX)
        assert received.item() == rank
        exchanged = [torch.zeros(1).cuda() for _ in range(world)]
        dist.all_to_all(exchanged, [device(float(each)) for each in range(world)])
        assert [each.item() for each in exchanged] == [rank] * world
        for count, is_moved in ((2**18, True), (2**18 + 1, False)):  # 1 MiB and more
            source, target = torch.zeros(count).cuda(), torch.zeros(world * count).cuda()
            source[-1:].fill_(3.0)
            dist.all_gather_into_tensor(target, source)
            assert target[-1].item() == 3.0 * is_moved, count
        large = dist.all_reduce(torch.empty(2**28, device="cuda"), async_op=True)
        large.wait()
        assert large.is_completed()
        dist.barrier()
        """,
        rank,
        world,
    )


def test_collectives_of_the_cpu() -> None:
    run("""
        value = torch.tensor([1.0])
        dist.all_reduce(value, dist.ReduceOp.MAX)
        assert value.item() == 1.0
        gathered = [torch.empty(1) for _ in range(world)]
        dist.all_gather(gathered, value)
        assert [each.item() for each in gathered] == [1.0] * world
        group = dist.new_group([1, 3], backend="gloo")
        assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 2)
        dist.barrier(group)
        dist.monitored_barrier(group)
        group.monitored_barrier()  # as Lightning calls it
        """)


@pytest.mark.slow
def test_store_of_a_program() -> None:
    run("""
        store = dist.TCPStore("localhost", 1, world, is_master=rank == 0)
        assert isinstance(store, dist.TCPStore) and store.port == 1
        store.set("key", "value")
        assert store.get("key") == b"value" and store.add("count", 2) == 2
        dist.PrefixStore("mine", store).set("key", "other")
        assert store.get("mine/key") == b"other"
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
        dist.barrier()
        store = dist.FileStore("/no/such/folder", world)
        assert isinstance(store, dist.FileStore) and store.path == "/no/such/folder"
        store.wait(["of another rank"])
        assert store.get("of another rank") == bytes(128)
        """)


def test_stores_answer_as_torchs_for_their_own_values() -> None:
    run("""
        stores = dist.TCPStore("localhost", 1, world, is_master=False), dist.HashStore()
        calls = (
            *(("set", "a", "1"), ("get", "a"), ("set", "a", "2"), ("get", "a"), ("add", "n", 3), ("get", "n")),
            *(("compare_set", "new", "", "x"), ("get", "new"), ("compare_set", "new", "y", "z"), ("get", "new")),
            *(("compare_set", "new", "x", "z"), ("get", "new"), ("compare_set", "other", "y", "z"), ("check", ["other"])),
            *(("check", ["a"]), ("check", ["a", "b"]), ("check", ["a", "n"]), ("append", "a", "3"), ("get", "a")),
            *(("append", "c", "4"), ("get", "c"), ("multi_set", ["d", "e"], ["5", "6"]), ("multi_get", ["e", "d"])),
            *(("num_keys",), ("delete_key", "a"), ("delete_key", "a"), ("check", ["a"]), ("num_keys",), ("add", "a", 1)),
        )
        for name, *arguments in calls:
            ours, theirs = (getattr(store, name)(*arguments) for store in stores)
            assert ours == theirs, (name, arguments, ours, theirs)
        if hasattr(dist.Store, "clone"):  # not in torch 2.6 and 2.7
            clone = stores[0].clone()
            clone.set("of the clone", "1")
            assert stores[0].get("of the clone") == b"1"
        """)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "1"])
def test_threads_of_torch_leave_the_store_alone(given: str | None) -> None:
    """The store is Python's: a thread that called it while Python ends would end the process by a signal."""
    before = f"""
        import threading, time
        import torch.distributed as dist
        os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] = "100"
        if {given!r}:
            os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = os.environ["TORCH_NCCL_ENABLE_MONITORING"] = {given!r}
        """
    before += """
        store_class, threads = type(next(dist.distributed_c10d.rendezvous("env://"))[0]), set()
        for name in ("check", "get", "set", "wait"):
            def call(*arguments, method=getattr(store_class, name)):
                threads.add(threading.current_thread())
                return method(*arguments)
            setattr(store_class, name, call)
        """
    after = """
        dist.all_reduce(torch.ones(2, device="cuda"))
        time.sleep(1)
        assert threads == {threading.main_thread()}, threads
        """
    run(after, before="import os" + textwrap.dedent(before))


def test_ranks_of_init_methods() -> None:
    run("""
        environment = {"RANK": "5", "WORLD_SIZE": "7"}
        for query, given, variables in (
            *(("?rank=5&world_size=7", {}, {}), ("?world_size=7", {"rank": 5}, {}), ("", {"rank": 5, "world_size": 7}, {})),
            *((None, {}, environment), ("?rank=5&world_size=7", {}, {"RANK": "1", "WORLD_SIZE": "2"})),
        ):
            dist.destroy_process_group()
            for name in environment:
                os.environ.pop(name, None)
            os.environ.update(variables)
            url = "env://" if query is None else "tcp://localhost:1" + query
            dist.init_process_group("nccl", init_method=url, **given)
            assert (dist.get_rank(), dist.get_world_size()) == (5, 7), (url, given, variables)
        for name in environment:
            dist.destroy_process_group() if dist.is_initialized() else None
            os.environ.update(environment)
            del os.environ[name]
            with pytest.raises(ValueError, match=f"environment variable {name} expected, but not set"):
                dist.init_process_group("nccl")
        """)


def test_values_that_nobody_sends_are_not_known() -> None:
    run(
        """
        import sys
        missing_values = sys.modules["_accelerator_simulation._inside.rehearsal.missing_values"]

        def is_told(function):
            before = sum(count for _, _, count in missing_values.noted())
            function()
            return sum(count for _, _, count in missing_values.noted()) > before

        def numbers(*sizes):
            return [torch.ones(size, dtype=torch.int64, device="cuda") for size in sizes]

        [received] = numbers(2)
        dist.scatter(received, None, src=0)
        assert is_told(received.tolist)
        for sizes in ([2] * world, [1 + each for each in range(world)]):
            parts = numbers(*sizes)
            dist.all_gather(parts, *numbers(sizes[rank]))
            assert is_told(parts[0].tolist) == (sizes[0] != 2), sizes
            own = numbers(*[sizes[rank]] * world)
            parts = numbers(*sizes)
            dist.all_to_all(parts, own)
            assert is_told(parts[0].tolist) == (sizes[0] != 2), sizes
            [all_parts], [sent] = numbers(sum(sizes)), numbers(sizes[rank] * world)
            dist.all_to_all_single(all_parts, sent, sizes, [sizes[rank]] * world)
            assert is_told(all_parts.tolist) == (sizes[0] != 2), sizes
        mean = torch.randn(1000, 1000, device="cuda").mean().item()
        objects = [None] * world
        assert not is_told(lambda: dist.all_gather_object(objects, {"mean": mean, "list": [mean]}))
        assert is_told(lambda: objects[0]["mean"] < 1)
        assert is_told(lambda: objects[1]["list"][0] < 1)
        """,
        rank=3,
        world=8,
    )


def test_objects_take_the_memory_through_which_they_are_sent() -> None:
    run(
        """
        def peak(function, *arguments):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function(*arguments)
            return (torch.cuda.max_memory_allocated() - before) / 2**20

        mebibyte, nccl = b"x" * 2**20, dist.new_group(backend="nccl")
        for group, factor in ((nccl, 1), (None, 0)):  # gloo sends them from the host
            assert 9 * factor <= peak(dist.all_gather_object, [None] * world, mebibyte, group) <= 9.1 * factor
            assert factor <= peak(dist.gather_object, mebibyte, None, 0, group) <= 1.1 * factor
            assert factor <= peak(dist.broadcast_object_list, [mebibyte], 0, group) <= 1.1 * factor
        weight = torch.ones(2**20, device="cuda", requires_grad=True)
        total = (weight * 2).sum()  # not a leaf
        objects = [None] * world
        dist.all_gather_object(objects, {"total": total, "weight": weight})
        assert all(each["total"].requires_grad and each["weight"].shape == weight.shape for each in objects)
        assert len({each["weight"].data_ptr() for each in objects}) == world
        """,
        rank=3,
        world=8,
    )


def test_objects() -> None:
    run("""
        objects = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 3}] * world
        objects[0]["rank"] = 4  # the ranks' objects are others
        assert objects[1:] == [{"rank": 3}] * (world - 1)
        dist.gather_object("mine", None, dst=0)
        dist.gather_object("mine", objects)  # to rank 0
        assert objects[0] == {"rank": 4}
        with pytest.raises(RuntimeError, match="scatter_object_list: this rank is rehearsed alone"):
            dist.scatter_object_list([None], ["a"] * world)  # from rank 0
        dist.gather_object("mine", objects, dst=rank)
        assert objects == ["mine"] * world
        # Its pickle is larger than the collectives that write memory.
        listed = ["kept" * 2**19]
        dist.broadcast_object_list(listed, src=0)
        assert listed == ["kept" * 2**19]
        if hasattr(dist, "send_object_list"):
            dist.send_object_list(["to nobody"], 0)
        with pytest.raises(RuntimeError, match="recv_object_list: this rank is rehearsed alone"):
            dist.recv_object_list([None], src=0)
        """)


@pytest.mark.parametrize(("rank", "ranks"), [(3, [1, 3, 5]), (5, [0, 5])])
def test_objects_in_a_subgroup(rank: int, ranks: list[int]) -> None:
    run(
        f"""
        ranks = {ranks}
        group, other = dist.new_group(ranks), dist.new_group([rank])
        place, count = ranks.index(rank), len(ranks)
        """
        + """
        for size, part in ((count, group), (1, other), (world, None)):
            objects = [None] * size
            dist.all_gather_object(objects, rank, group=part)
            assert objects == [rank] * size
            for own in ({"dst": rank}, {"group_dst": dist.get_rank(part)}):
                objects = [None] * size
                dist.gather_object("mine", objects, group=part, **own)
                assert objects == ["mine"] * size, own
            for own in ({"src": rank}, {"group_src": dist.get_rank(part)}):
                received = [None]
                dist.scatter_object_list(received, list(range(size)), group=part, **own)
                assert received == [dist.get_rank(part)], own
        # The first rank of the group is another one.
        for first in ({"dst": ranks[0]}, {"group_dst": 0}):
            objects = ["kept"] * count
            dist.gather_object("mine", objects, group=group, **first)
            assert objects == ["kept"] * count, first
        for first in ({"src": ranks[0]}, {"group_src": 0}):
            with pytest.raises(RuntimeError, match="scatter_object_list: this rank is rehearsed alone"):
                dist.scatter_object_list([None], ["a"] * count, group=group, **first)
        # As in torch, the calls do nothing in a group to which this rank does not belong.
        stranger, objects = dist.new_group([0, 1]), ["kept"] * 2
        dist.all_gather_object(objects, "mine", group=stranger)
        dist.gather_object("mine", objects, dst=rank, group=stranger)
        dist.scatter_object_list(objects, ["a", "b"], src=rank, group=stranger)
        dist.scatter_object_list(objects, None, src=0, group=stranger)
        assert objects == ["kept"] * 2
        """,
        rank,
    )


@pytest.mark.parametrize(
    "device_id", ["", pytest.param(", device_id=torch.device('cuda', torch.cuda.current_device())", marks=pytest.mark.slow)]
)
def test_meshes_and_sharding(device_id: str) -> None:
    code = f"""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.destroy_process_group()
        dist.init_process_group("nccl"{device_id})
        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        assert mesh["shard"].size() == world // 2 and mesh.get_local_rank("replicate") == 0
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
        ddp(torch.randn(2, 8, device="cuda")).sum().backward()
        dist.destroy_process_group()
    """
    run(code)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_symmetric_memory(rank: int) -> None:
    run(SYMMETRIC_MEMORY, rank)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_distributed_checkpoints(rank: int, tmp_path: Path) -> None:
    run(
        f"""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(torch.nn.Linear(512, 512, device="cuda"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        def state():
            return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save({{**state(), "step": 5}}, checkpoint_id={str(tmp_path)!r})
        loaded = {{**state(), "step": 0}}
        dcp.load(loaded, checkpoint_id={str(tmp_path)!r})
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        assert loaded["step"] == 5
        dist.destroy_process_group()
        """,
        rank,
    )
