"""Tests of partitioned activations: layouts, padding, gathering. All ranks are in one process, with a replaced all-gather."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from accelerator.checkpointing import partition, transfers
from accelerator.checkpointing.buffers import Buffers
from accelerator.checkpointing.configuration import Settings
from accelerator.checkpointing.groups import SINGLE_RANK, Group
from accelerator.checkpointing.partition import Layout, StoredActivation

PARTITIONED = Settings(partition_activations=True)
GATHER = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"


def matrix(rows: int = 3, columns: int = 5) -> torch.Tensor:
    return torch.arange(1.0, rows * columns + 1).view(rows, columns)


# A tensor, the shape of its stored elements, and whether their memory has no gaps.
LAYOUTS: dict[str, tuple[torch.Tensor, tuple[int, ...], bool]] = {
    "contiguous": (matrix(), (3, 5), True),
    "transposed": (matrix().t(), (5, 3), True),
    "permuted": (torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), (4, 2, 3), True),
    "columns": (matrix()[:, 1:4], (3, 3), False),
    "every second": (torch.arange(9.0)[::2], (5,), False),
    "every second row": (matrix(6)[::2], (3, 5), False),
    "expanded": (torch.arange(3.0).view(3, 1).expand(3, 4), (3, 1), True),
    "expanded columns": (matrix()[:, 1:2].expand(3, 4), (3, 1), False),
    "scalar": (torch.tensor(7.0), (), True),
    "one": (torch.ones(1, 1), (1, 1), True),
    "empty": (torch.ones(0, 3), (0, 3), True),
    "odd stride of length 1": (torch.arange(9.0).as_strided((1, 3), (100, 1)), (1, 3), True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    tensor, distinct, dense = LAYOUTS[name]
    layout = partition.layout_of(tensor)
    assert layout == Layout(tensor.shape, tensor.stride(), distinct, dense)
    elements = partition.flatten(tensor, layout)
    assert elements.shape == (torch.Size(distinct).numel(),)
    assert not dense or elements.data_ptr() == tensor.data_ptr()
    whole = partition.unflatten(elements.clone(), layout)
    assert torch.equal(whole, tensor)
    assert (whole.shape, whole.stride()) == (tensor.shape, tensor.stride())
    assert whole.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(("shape", "stride"), [((2, 2), (1, 1)), ((3, 4), (3, 1)), ((2, 3), (2, 1))])
def test_overlapping_elements_have_no_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert partition.layout_of(torch.arange(99.0).as_strided(shape, stride)) is None


def test_unflatten_with_gaps_keeps_the_device() -> None:
    tensor = torch.empty(3, 5, device="meta")[:, 1:4]
    layout = partition.layout_of(tensor)
    assert layout is not None
    whole = partition.unflatten(partition.flatten(tensor, layout), layout)
    assert (whole.stride(), whole.device.type) == (tensor.stride(), "meta")


def test_the_flattened_tensor_is_detached() -> None:
    tensor = matrix().requires_grad_()
    layout = partition.layout_of(tensor)
    assert layout is not None
    assert not partition.flatten(tensor, layout).requires_grad


def test_unflatten_with_gaps_allocates_only_the_span() -> None:
    tensor = matrix()[:, 1:4].to(torch.float64)
    strided = torch.zeros(3, 5, dtype=torch.float64)[:, :3].copy_(tensor)
    layout = partition.layout_of(strided)
    assert layout is not None
    whole = partition.unflatten(partition.flatten(strided, layout), layout)
    assert whole.dtype == torch.float64
    assert whole.untyped_storage().nbytes() == 8 * 13  # from the first element to the last


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (torch.ones(3), True),
        (torch.ones(2), False),
        (torch.ones(3, dtype=torch.bfloat16), True),
        (torch.ones(3, dtype=torch.int64), False),
        (torch.ones(3, dtype=torch.complex64), False),
        (torch.nn.Parameter(torch.ones(3)), False),
        ([1.0, 2.0, 3.0], False),
        (None, False),
    ],
    ids=repr,
)
def test_is_activation(item: Any, expected: bool) -> None:
    assert partition.is_activation(item, 3) is expected


def test_no_checkpointing_attribute_excludes_a_tensor() -> None:
    tensor: Any = torch.ones(3)
    tensor.no_checkpointing = True
    assert not partition.is_activation(tensor, 3)
    tensor.no_checkpointing = False
    assert partition.is_activation(tensor, 3)


@pytest.mark.parametrize(
    ("numel", "size", "lengths"),
    [(6, 3, [2, 2, 2]), (7, 3, [3, 3, 1]), (4, 3, [2, 2, 0]), (1, 3, [1, 0, 0]), (5, 1, [5]), (0, 2, [0, 0])],
)
def test_parts_cover_all_elements(numel: int, size: int, lengths: list[int]) -> None:
    elements = torch.arange(float(numel))
    parts = [partition.own_part(elements, Group(None, rank, size)) for rank in range(size)]
    assert [part.numel() for part in parts] == lengths
    assert torch.equal(torch.cat(parts), elements)
    assert partition.part_size(numel, size) == max(lengths)


class Ranks:
    """The activation that each rank stores of a tensor, and a replacement of the all-gather between the ranks."""

    def __init__(self, tensor: torch.Tensor, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gathered = self.waited = 0
        monkeypatch.setattr(partition, "is_alive", lambda group: group.handle == "the group")
        monkeypatch.setattr(distributed, GATHER, self.gather)
        self.activations: list[StoredActivation] = []
        for rank in range(size):
            monkeypatch.setattr(partition, "partition_group", lambda settings, rank=rank: Group("the group", rank, size))
            activation = partition.store_activation(tensor, PARTITIONED, 0, None)
            assert activation is not None
            self.activations.append(activation)

    def gather(self, whole: torch.Tensor, part: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        assert (group, async_op) == ("the group", True)
        assert whole.dtype == part.dtype == torch.uint8
        self.gathered += 1
        whole.copy_(torch.cat([activation._part().view(torch.uint8) for activation in self.activations]))
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["contiguous", "transposed", "columns", "expanded"])
def test_every_rank_restores_the_tensor(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = LAYOUTS[name][0]
    ranks = Ranks(tensor, size, monkeypatch)
    stored = torch.cat([activation._elements for activation in ranks.activations])
    assert stored[tensor.unique().numel() :].eq(0).all()
    for activation in ranks.activations:
        restored = activation.restore("argument 0")
        assert torch.equal(restored, tensor)
        assert restored.stride() == tensor.stride()
        assert not restored.requires_grad
    assert ranks.gathered == ranks.waited == size


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gather_keeps_the_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = matrix().to(dtype)
    restored = Ranks(tensor, 2, monkeypatch).activations[1].restore("argument 0")
    assert restored.dtype == dtype
    assert torch.equal(restored, tensor)


@pytest.mark.parametrize("name", ["all_gather_single", "all_gather_into_tensor"])
def test_gathered_tensor_is_on_the_device_of_the_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
        assert (whole.shape, part.shape) == ((32,), (16,))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.delattr(distributed, "all_gather_single", raising=False)
    monkeypatch.setattr(distributed, name, gather, raising=False)
    monkeypatch.setattr(partition, "is_alive", lambda group: True)
    whole = partition.Gathering(torch.empty(4, device="meta"), Group("the group", 0, 2)).wait()
    assert (whole.shape, whole.dtype, whole.device.type) == ((8,), torch.float32, "meta")


def test_prefetched_gather_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(matrix().requires_grad_(), 2, monkeypatch)
    activation = ranks.activations[0]
    activation.prefetch()
    activation.start_gathering()
    assert (ranks.gathered, ranks.waited) == (1, 0)
    first = activation.restore("argument 0")
    assert (ranks.gathered, ranks.waited) == (1, 1)
    assert first.requires_grad
    assert first.is_leaf
    second = activation.restore("argument 0")
    assert (ranks.gathered, ranks.waited) == (2, 2)
    assert second.data_ptr() != first.data_ptr()


def test_destroyed_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    activation = Ranks(matrix(), 2, monkeypatch).activations[0]
    monkeypatch.setattr(partition, "is_alive", lambda group: False)
    with pytest.raises(RuntimeError) as error:
        activation.prefetch()
    assert str(error.value) == (
        "the process group over which a checkpoint's arguments were partitioned was destroyed between forward and backward; "
        "keep it until backward has ended"
    )


class TensorSubclass(torch.Tensor):
    pass


KEPT = {
    "integers": torch.arange(4),
    "fewer elements than ranks": torch.ones(3),
    "sparse": torch.ones(4, 4).to_sparse(),
    "tensor subclass": TensorSubclass(torch.ones(4)),
    "overlapping": torch.arange(9.0).as_strided((2, 2), (1, 1)),
}


@pytest.mark.parametrize("tensor", KEPT.values(), ids=KEPT)
def test_unsuitable_tensors_are_not_partitioned(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: Group("the group", 0, 4))
    assert partition.store_activation(tensor, PARTITIONED, 0, None) is None
    assert partition.store_activation(torch.ones(4), PARTITIONED, 0, None) is not None


def test_single_rank_stores_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: SINGLE_RANK)
    for settings in (PARTITIONED, Settings(), Settings(checkpoint_in_cpu=True)):
        assert partition.store_activation(torch.ones(4), settings, 0, None) is None


def test_activation_is_stored_in_a_buffer_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: SINGLE_RANK)
    buffers = Buffers(2)
    settings = Settings(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2, buffers=buffers)
    tensor = matrix().to(torch.float64)
    activation = partition.store_activation(tensor, settings, 7, None)
    assert activation is not None
    assert list(buffers._buffers) == [(7, torch.device("cpu"))]
    assert activation._elements.untyped_storage().nbytes() == 2 * 15 * 8
    restored = activation.restore("argument 0")
    assert torch.equal(restored, tensor)
    # Another checkpoint may use the slot while the restored tensor is alive.
    activation._elements.zero_()
    assert torch.equal(restored, tensor)


def test_hooks_pack_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: Group("the group", 1, 2))
    hooks: Any = (lambda tensor: ("packed", tensor), lambda packed: packed[1] * 2)
    activation = partition.store_activation(torch.arange(3.0), PARTITIONED, 0, hooks)
    assert activation is not None
    assert activation._elements[0] == "packed"
    assert activation._part().tolist() == [4.0, 0.0]


def test_an_unpacked_part_returns_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: Group("the group", 0, 2))
    hooks: Any = (lambda tensor: "packed", lambda packed: torch.ones(2))
    activation = partition.store_activation(torch.empty(4, device="meta"), PARTITIONED, 0, hooks)
    assert activation is not None
    assert activation._part().device.type == "meta"


class Offloaded:
    """Replaces ``transfers.Offloaded`` and records the calls of its methods."""

    def __init__(self, source: torch.Tensor, host: torch.Tensor) -> None:
        self.source, self.host = source, host
        self.events: list[str] = []
        self.was_edited = False

    def forward_ended(self) -> None:
        self.events.append("forward_ended")

    def prefetch(self) -> None:
        self.events.append("prefetch")

    def fetch(self) -> torch.Tensor:
        return self.source


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record and return the arguments of each allocation. The tests use tensors on the meta device as tensors of a GPU."""
    made: list[tuple[Any, ...]] = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> torch.Tensor:
        made.append((numel, dtype, device.type, on_host))
        return torch.empty(numel, dtype=dtype)

    monkeypatch.setattr(transfers, "allocate", allocate)
    monkeypatch.setattr(transfers, "Offloaded", Offloaded)
    return made


@pytest.mark.parametrize(("rank", "numel"), [(0, 2), (1, 2)])
def test_rank_offloads_its_part(rank: int, numel: int, allocations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: Group("the group", rank, 2))
    settings = Settings(partition_activations=True, checkpoint_in_cpu=True)
    tensor = torch.empty(3, dtype=torch.float16, device="meta")
    padded, pad = [], partition._pad
    monkeypatch.setattr(partition, "_pad", lambda part, size: padded.append(part.numel()) or pad(part, size))
    activation = partition.store_activation(tensor, settings, 0, None)
    assert activation is not None
    assert padded == [1] * rank  # only a short part is padded
    assert allocations == [(2, torch.float16, "meta", True)]
    offloaded: Any = activation._offloaded
    assert offloaded.source.shape == (numel,)
    assert offloaded.source.device.type == "meta"
    assert offloaded.host is activation._elements
    activation.forward_ended()
    activation.prefetch()
    assert offloaded.events == ["forward_ended", "prefetch"]
    assert activation._gathering is None


def test_offloaded_tensor_keeps_layout_and_detects_edit(allocations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(partition, "partition_group")  # must not be called
    tensor = torch.empty(3, 2, device="meta").t()
    activation = partition.store_activation(tensor, Settings(checkpoint_in_cpu=True), 0, None)
    assert activation is not None
    assert allocations == [(6, torch.float32, "meta", True)]
    restored = activation.restore("argument 3")
    assert (restored.shape, restored.stride(), restored.device.type) == ((2, 3), (1, 2), "meta")
    offloaded: Any = activation._offloaded
    offloaded.was_edited = True
    with pytest.raises(RuntimeError) as error:
        activation.restore("argument 3")
    assert str(error.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "argument 3 of a checkpointed function"
    )


@pytest.mark.parametrize("on_host", [False, True])
def test_offload_allocates_buffers_on_the_host(on_host: bool, allocations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: SINGLE_RANK)
    settings = Settings(partition_activations=True, checkpoint_in_cpu=on_host, buffers=Buffers(3))
    assert partition.store_activation(torch.ones(4), settings, 0, None) is not None
    assert allocations == [(12, torch.float32, "cpu", on_host)]


def test_parts_for_hooks_are_not_allocated_on_the_host(allocations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "partition_group", lambda settings: Group("the group", 0, 2))
    on_host = Settings(partition_activations=True, checkpoint_in_cpu=True)
    identity: Any = (lambda tensor: tensor, lambda tensor: tensor)
    for settings, hooks in ((on_host, None), (on_host, identity), (PARTITIONED, None)):
        assert partition.store_activation(torch.ones(4), settings, 0, hooks) is not None
    assert allocations == [(2, torch.float32, "cpu", on_host) for on_host in (True, False, False)]
