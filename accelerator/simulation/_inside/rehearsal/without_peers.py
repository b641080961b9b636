"""A rank without the other ranks of its world: process groups come up and collectives complete without peers.

torch's ProcessGroupNCCL is unchanged, and native/nccl/rehearsal.c completes its collectives. Two other things wait for peers.
The store is replaced by one that answers for all ranks. Process groups of gloo are replaced by torch's FakeProcessGroup.
Collectives of objects are replaced too, because they would send pickles through device memory that nobody writes.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import re
import socket
import struct
import sys
import uuid
from collections.abc import Generator
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from ..._settings import LIMITS
from ..import_hook import after_import
from ..ops import bindings
from .distributed import replace
from .known_values import ObjectPickler

_NCCL_ID_SIZE = 128
# Ranks exchange descriptions of their symmetric memory under keys that contain this and end with the rank. A description begins
# with the index of the device, which torch wants to differ between ranks.
_SYMMETRIC_MEMORY = "CUDASymmetricMemory"
_INT = struct.Struct("=i")
# Until torch 2.8, rank 0 tells its host and the name of a file here.
_OLD_SYMMETRIC_MEMORY = re.compile(r"symmetric_memory-[\d_]+/init$")
# torch's C++ objects do not keep the Python half of a store alive, which has its methods.
_stores: list[Any] = []


def install() -> None:
    """Prepare ``torch.distributed`` before a program uses it."""
    after_import("torch.distributed.distributed_c10d", _replace)
    after_import("torch.distributed.checkpoint.utils", _save_alone)
    after_import("torch.distributed.checkpoint.default_planner", _accept_a_part)
    after_import("deepspeed.runtime.zero.utils", _skip_comparison)


def _do_nothing(*arguments: Any, **options: Any) -> None:
    """Replaces functions that would wait for the other ranks."""


def _save_alone(utils: ModuleType) -> None:
    """Let each rank coordinate its own distributed checkpoint, of which it saves and loads its part."""
    wrapper: Any = utils._DistWrapper
    init = wrapper.__init__

    def init_without_peers(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.use_dist, self.is_coordinator = False, True

    wrapper.__init__ = init_without_peers


def _accept_a_part(planner: ModuleType) -> None:
    """Accept the plan of a checkpoint that has the parts of this rank alone."""
    module: Any = planner
    validate = module._validate_global_plan

    def validate_part(*arguments: Any) -> Any:
        return [] if isinstance(validate(*arguments), list) else True  # in older torch, whether the plan is valid

    module._validate_global_plan = validate_part


def _skip_comparison(utils: ModuleType) -> None:
    """Skip ZeRO 3's comparison with rank 0, of which the other ranks send nothing that could be compared."""
    module: Any = utils
    module.assert_ints_same_as_other_ranks = _do_nothing


def _replace(c10d: ModuleType) -> None:
    module: Any = c10d
    store_class = _make_store_class(module)
    _replace_rendezvous(module, store_class)
    if "RANK" in os.environ:  # torchrun itself needs a store that its ranks do not share
        _replace_stores(module, store_class)
    _replace_gloo(module)
    _count_ranks_of_splits(module)
    _replace_collectives(module)


def _make_store_class(c10d: Any) -> Any:
    class StoreWithoutPeers(c10d.Store):  # type: ignore[misc]
        """A store that never waits. A missing value of another rank is a unique id of nccl, which is zero here."""

        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            _stores.append(self)

        def set(self, key: str, value: Any) -> None:
            self._values[key] = _to_bytes(value)

        def get(self, key: str) -> bytes:
            if key not in self._values:
                if _SYMMETRIC_MEMORY in key:
                    return self._of_other_rank(key)
                if _OLD_SYMMETRIC_MEMORY.search(key):
                    return f"{socket.gethostname()}/{uuid.uuid4()}".encode()
            return self._values.get(key, bytes(_NCCL_ID_SIZE))

        def _of_other_rank(self, key: str) -> bytes:
            """Return what another rank would tell of its symmetric memory: the same as this rank, but of another device."""
            exchange, _, rank = key.rpartition("/")
            [(own, told)] = [each for each in self._values.items() if each[0].rpartition("/")[0] == exchange]
            if len(told) <= _INT.size:
                return told
            device = _INT.unpack_from(told)[0] + int(rank) - int(own.rpartition("/")[2])
            return _INT.pack(device) + told[_INT.size :]

        def add(self, key: str, value: int) -> int:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

        def append(self, key: str, value: Any) -> None:
            self._values[key] = self._values.get(key, b"") + _to_bytes(value)

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            if self._values.get(key, b"") == _to_bytes(expected):
                self._values[key] = _to_bytes(desired)
            return self._values.get(key, _to_bytes(expected))

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            pass

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[Any]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def has_extended_api(self) -> bool:
            return True

        def set_timeout(self, timeout: Any) -> None:
            pass

        def clone(self) -> StoreWithoutPeers:
            return self

    return StoreWithoutPeers


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _replace_rendezvous(c10d: Any, store_class: Any) -> None:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Generator[tuple[Any, int, int]]:
        query = parse_qs(urlsplit(url).query)
        given = {"rank": rank, "world_size": world_size}
        for name, value in given.items():
            if value < 0:
                text = query[name][0] if name in query else os.environ.get(name.upper())
                if text is None:
                    raise ValueError(f"environment variable {name.upper()} expected, but not set")
                given[name] = int(text)
        yield store_class(), given["rank"], given["world_size"]

    init_process_group = c10d.init_process_group

    def init_without_peers(*arguments: Any, **options: Any) -> Any:
        if options.get("store") is not None:
            options["store"] = store_class()
        # The thread that watches over torch's watchdog reads the store each second, also while Python ends, which would end the
        # process by a signal. Nobody else writes this store, so it has nothing to find.
        os.environ.update(TORCH_NCCL_ENABLE_MONITORING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0")
        return init_process_group(*arguments, **options)

    c10d.rendezvous = rendezvous
    replace(c10d, "init_process_group", init_without_peers)


def _replace_stores(c10d: Any, store_class: Any) -> None:
    """Replace the classes of the stores that programs make, which wait for all ranks."""

    class TCPStore(store_class):  # type: ignore[misc]
        def __init__(self, host_name: str, port: int, *arguments: Any, **options: Any) -> None:
            super().__init__()
            self.host, self.port = host_name, port

    class FileStore(store_class):  # type: ignore[misc]
        def __init__(self, file_name: str, *arguments: Any, **options: Any) -> None:
            super().__init__()
            self.path = file_name

    for module in (bindings.distributed(), c10d, sys.modules["torch.distributed"]):
        for store in (TCPStore, FileStore):
            if hasattr(module, store.__name__):
                setattr(module, store.__name__, store)


def _replace_gloo(c10d: Any) -> None:
    gloo: Any = getattr(c10d, "ProcessGroupGloo", None)
    if gloo is None:
        return
    fake: Any = bindings.distributed().FakeProcessGroup

    # torch 2.6 numbers the collectives of gloo, and its FakeProcessGroup cannot.
    fake._set_sequence_number_for_group = _do_nothing
    # torch 2.8 writes attributes of gloo's options, and its FakeProcessGroup has none.
    if not hasattr(fake, "options"):
        fake.options = SimpleNamespace()

    class Gloo(type):
        """Makes a FakeProcessGroup where torch makes a ProcessGroupGloo."""

        def __call__(cls, store: Any, rank: int, size: int, *arguments: Any, **options: Any) -> Any:
            if not hasattr(fake, "_create_internal"):
                return fake(rank, size)
            if not hasattr(getattr(fake, "Options", None), "simulate_uniform_ranks"):
                return fake._create_internal(rank, size)
            settings = fake.Options()
            settings.simulate_uniform_ranks = True
            return fake._create_internal(rank, size, settings)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (gloo, fake))

        def __getattr__(cls, name: str) -> Any:
            return getattr(gloo, name)

    replace(c10d, "ProcessGroupGloo", Gloo("ProcessGroupGloo", (), {}))
    replace(c10d, "monitored_barrier", _do_nothing)


def _count_ranks_of_splits(c10d: Any) -> None:
    """Tell nccl how many ranks a part of a split communicator has, which it cannot know without the other ranks' colors."""
    # New groups are made of new communicators.
    if hasattr(c10d, "_get_split_source"):
        c10d._get_split_source = _do_nothing
    nccl = ctypes.CDLL("libnccl.so.2")
    split_group = getattr(c10d.ProcessGroup, "split_group", None)
    if split_group is None:
        return

    def split_group_of_known_size(self: Any, new_ranks: list[int], *arguments: Any, **options: Any) -> Any:
        nccl.accelerator_simulation_next_split(len(new_ranks))
        try:
            return split_group(self, new_ranks, *arguments, **options)
        finally:
            nccl.accelerator_simulation_next_split(0)

    c10d.ProcessGroup.split_group = split_group_of_known_size


def _replace_collectives(c10d: Any) -> None:
    """Replace those of objects, and let the root of `gather` get what it sends from every rank."""

    def size_of(group: Any) -> int:
        return c10d.get_world_size(group)

    def is_rank(group: Any, rank: int | None, group_rank: int | None) -> bool:
        """Return whether this rank is the one that a call names by its global rank or by its rank in the group."""
        if group_rank is not None:
            return c10d.get_rank(group) == group_rank
        return c10d.get_rank() == (rank or 0)

    def is_stranger(group: Any) -> bool:
        """Return whether this rank does not belong to a group. torch's collectives do nothing then."""
        return c10d.get_rank(group) < 0

    gather = c10d.gather

    @functools.wraps(gather)
    def gather_from_equal_ranks(
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        **options: Any,
    ) -> Any:
        result = gather(tensor, gather_list, dst, group, async_op, **options)
        if gather_list and not is_stranger(group) and is_rank(group, dst, options.get("group_dst")):
            # nccl's root receives and copies its own part itself, so nccl does not know what this rank would send.
            for part in gather_list:
                if part.is_cuda and part.nbytes <= LIMITS["COPY"]:
                    part.copy_(tensor)
        return result

    replace(c10d, "gather", gather_from_equal_ranks)

    def send(value: Any, group: Any, copies: int) -> _Pickle:
        """Pickle an object, and take the memory through which torch sends it and receives copies of it."""
        pickled = _Pickle(value)
        find = getattr(c10d, "_get_object_coll_device", None) or c10d._get_pg_default_device
        device = torch.device(find(group))
        if device.type == "cuda":
            buffers = [torch.empty(count * pickled.size, dtype=torch.uint8, device=device) for count in (1, copies)]
            del buffers
        return pickled

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, *arguments: Any, **options: Any) -> None:
        if not is_stranger(group):
            sent = send(obj, group, size_of(group))
            object_list[:] = [sent.load() for _ in range(size_of(group))]

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        **options: Any,
    ) -> None:
        if is_stranger(group):
            return
        is_root = object_gather_list is not None and is_rank(group, dst, group_dst)
        sent = send(obj, group, size_of(group) if is_root else 0)
        if object_gather_list is not None and is_root:
            object_gather_list[:] = [sent.load() for _ in range(size_of(group))]

    def broadcast_object_list(object_list: list[Any], src: int | None = None, group: Any = None, **options: Any) -> None:
        if not is_stranger(group):
            send(object_list, group, 0)  # as if the sender had passed what this rank passes

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        **options: Any,
    ) -> None:
        if is_stranger(group):
            return
        if not scatter_object_input_list or not is_rank(group, src, group_src):
            raise _nobody_sends("scatter_object_list")
        scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]

    def send_object_list(*arguments: Any, **options: Any) -> None:
        pass

    def recv_object_list(*arguments: Any, **options: Any) -> int:
        raise _nobody_sends("recv_object_list")

    for function in (
        *(all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list),
        recv_object_list,
    ):
        replace(c10d, function.__name__, function)


class _Pickle:
    """A pickled object, with its tensors beside it: their memory may be larger than the host's.

    Attributes:
        size: Bytes that torch would send.
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        buffer = io.BytesIO()
        pickler = ObjectPickler(buffer)
        pickler.persistent_id = self._keep  # type: ignore[method-assign]
        pickler.dump(value)
        self._data = buffer.getvalue()
        self.size = len(self._data) + sum(tensor.nbytes for tensor in self._tensors)

    def _keep(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def load(self) -> Any:
        """Return a copy of the object."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(self._data))
        unpickler.persistent_load = self._copy
        return unpickler.load()

    def _copy(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nobody_sends(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: this rank is rehearsed alone, so no other rank sends it an object; pass the object where it is needed, such"
        " as a pipeline stage's input and output shapes"
    )
