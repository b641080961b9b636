"""Ranks that a program starts itself are together: torch's own stores, process groups and collectives connect them.

Kernels compute nothing, so most device memory is never written, and nccl moves no data of over 1 MiB. Collectives of objects
are the exception: their pickles are moved whatever their size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

from ..import_hook import after_import
from .computing import all_computed
from .distributed import replace
from .missing_values import without_notes

_OF_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
    "recv_object_list",
)


def install() -> None:
    """Prepare ``torch.distributed`` when the program imports it."""
    after_import("torch.distributed.distributed_c10d", _prepare)


def _prepare(c10d: ModuleType) -> None:
    replace(c10d, "init_process_group", _with_advice(c10d.init_process_group))
    for name in _OF_OBJECTS:
        if hasattr(c10d, name):
            replace(c10d, name, _moving(without_notes(getattr(c10d, name))))


def _with_advice(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init_process_group)
    def init(*arguments: Any, **options: Any) -> Any:
        try:
            return init_process_group(*arguments, **options)
        except ValueError as error:
            if "environment variable" not in str(error):
                raise
            advice = "start the ranks with torchrun, or rehearse one with --world-size and --rank"
            raise ValueError(f"{error}; {advice}") from None

    return init


def _moving(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def move(*arguments: Any, **options: Any) -> Any:
        with _moved():
            return function(*arguments, **options)

    return move


@contextlib.contextmanager
def _moved() -> Generator[None]:
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.accelerator_simulation_move_objects(True)
    try:
        with all_computed():
            yield
    finally:
        nccl.accelerator_simulation_move_objects(False)
