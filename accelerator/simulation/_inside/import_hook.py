"""Calls functions on a module as soon as a program has imported it, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds one module as Python does, and lets `_Loader` load it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: list[Callable[[ModuleType], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Loads a module with its own loader, then calls the functions."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # The loader is restored first, because modules use it to find their resources and source code.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Only now: a program may search for a module without importing it, or import it again after a failure.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for function in self._finder.functions:
            function(module)


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if the module has been imported, else when it is, after those registered before."""
    module = sys.modules.get(name)
    if module is not None:
        function(module)
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder) and each.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.functions.append(function)
