"""In every Python that starts with this folder on its path, DeepSpeed stands on this package from its import on.

``DEEPSPEED_STANDS_ON`` says what of it is replaced: "accelerator", or "accelerator checkpointing".
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


def _replace_accelerator() -> None:
    importlib.import_module("accelerator").use_in_deepspeed()


def _replace_checkpointing() -> None:
    module: Any = importlib.import_module("accelerator.checkpointing")
    module._cpu_offload_engine = _OffloadEngine()
    sys.modules[_CHECKPOINTING] = module


class _OffloadEngine:
    """What DeepSpeed's tests read of the engine of its own offload, said of the tensors that this package moves to the host."""

    def __init__(self) -> None:
        self.stats = self
        self.reset()
        transfers: Any = importlib.import_module("accelerator.checkpointing.transfers")
        engine = self

        class Offloaded(transfers.Offloaded):
            def __init__(self, source: Any, host: Any) -> None:
                super().__init__(source, host)
                engine._all.append(weakref.ref(self))

            def take(self) -> Any:
                engine.restored_tensors += self._here is None or self._arrival is not None
                return super().take()

        transfers.Offloaded = Offloaded

    def reset(self) -> None:
        self._all: list[weakref.ref[Any]] = []
        self.restored_tensors = 0

    @property
    def offloaded_tensors(self) -> int:
        return len(self._all)

    @property
    def _tracker(self) -> list[Any]:
        return [one for each in self._all if (one := each()) is not None]

    @property
    def _keep_last(self) -> list[Any]:
        return [one for one in self._tracker if one._here is not None]


_REPLACEMENTS: dict[str, tuple[str, Callable[[], None]]] = {
    "accelerator": ("deepspeed.accelerator", _replace_accelerator),
    "checkpointing": (_CHECKPOINTING, _replace_checkpointing),
}


class _Afterwards(MetaPathFinder):
    """Finds the modules that are replaced, or have something replaced in them, as soon as they have been executed."""

    def __init__(self, replacements: dict[str, Callable[[], None]]) -> None:
        self._replacements = replacements

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        replace = self._replacements.get(fullname)
        spec = None if replace is None else PathFinder.find_spec(fullname, path, target)
        if replace is not None and spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                replace()

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Afterwards(dict(_REPLACEMENTS[name] for name in os.environ.get("DEEPSPEED_STANDS_ON", "").split())))
