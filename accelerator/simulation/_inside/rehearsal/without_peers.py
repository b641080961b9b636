"""A rank without the other ranks of its world: process groups come up and collectives complete without peers.

torch's ProcessGroupNCCL is unchanged, and native/nccl/rehearsal.c completes its collectives. Two other things wait for peers.
The store is replaced by one that answers for all ranks (`stores`). Process groups of gloo are replaced by torch's
FakeProcessGroup. Collectives of objects are replaced too (`object_collectives`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..import_hook import after_import
from ..ops import bindings
from . import object_collectives
from .distributed import replace


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
    from . import stores  # imported late: its classes derive from one of torch.distributed

    module: Any = c10d
    _replace_rendezvous(module, stores.StoreWithoutPeers)
    if "RANK" in os.environ:  # torchrun itself needs a store that its ranks do not share
        # Programs make stores of these classes, which would wait for all ranks.
        for owner in (bindings.distributed(), module, sys.modules["torch.distributed"]):
            for store in (stores.TCPStore, stores.FileStore):
                if hasattr(owner, store.__name__):
                    setattr(owner, store.__name__, store)
    _replace_gloo(module)
    _count_ranks_of_splits(module)
    object_collectives.install(module)


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
