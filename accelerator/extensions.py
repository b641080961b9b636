"""Builders of compiled operators, by name: those registered here, and DeepSpeed's where it is installed."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ._torch import state

__all__ = [
    "build_extension",
    "create_op_builder",
    "get_op_builder",
    "op_builder_dir",
    "register_op_builder",
]

_registered: dict[str, Callable[[], Any]] = {}

# Modules of the package that hold base classes and tables, and no builders.
_NO_BUILDERS = ("all_ops", "builder", "no_impl")
# A module has the builders that it defines, and those of others that it hands on by name.
_BUILDER_CLASS = re.compile(r"^class\s+(\w+Builder)\b", re.MULTILINE)
_PUBLIC = re.compile(r"^__all__\s*=\s*[\[(]([^\])]*)", re.MULTILINE)
_BUILDER_NAME = re.compile(r"\b\w+Builder\b")


def op_builder_dir() -> str:
    """Return the name of the package in which builders that nobody registered are looked for.

    Returns:
        "op_builder" while DeepSpeed itself is being installed, else "deepspeed.ops.op_builder"; for devices other than CUDA's
        the sub-package of that name, such as "deepspeed.ops.op_builder.cpu". It need not exist.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.op_builder_dir().startswith("deepspeed.ops.op_builder")
        True
    """
    kind = state.current(allow_bad_fork=True).device_type
    return _base() if kind == "cuda" else f"{_base()}.{kind}"


def register_op_builder(name: str, builder: Callable[[], Any]) -> None:
    """Register a builder, in place of whatever had its name.

    Args:
        name: the name by which ``get_op_builder`` finds it.
        builder: the builder's class, or another callable that makes one.

    Raises:
        TypeError: if the name is no string or the builder cannot be called.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> class MyOpBuilder: pass
        >>> acc.register_op_builder("MyOpBuilder", MyOpBuilder)
        >>> acc.get_op_builder("MyOpBuilder") is MyOpBuilder
        True
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"A builder's name is a string, not {type(name).__name__}")
    if not callable(builder):
        raise TypeError(f"A builder is a class or another callable, not {type(builder).__name__}")
    _registered[name] = builder


def get_op_builder(class_name: str) -> Any:
    """Return a builder's class.

    Args:
        class_name: the name under which it was registered, or the name of a class in the package that ``op_builder_dir``
            names, of which only the module with this class is imported.

    Returns:
        The class, or None if there is none of that name.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator, for a class that is not registered.

    Fork: safe, initializes nothing; importing a module of builders does what that module does.

    Example:
        >>> import accelerator as acc
        >>> acc.get_op_builder("NoSuchBuilder") is None
        True
    """
    if class_name in _registered:
        return _registered[class_name]
    own, host = op_builder_dir(), f"{_base()}.cpu"
    module = _modules_of(own).get(class_name)
    if module is None:
        # DeepSpeed's builders for CUDA include some for its host, which lie with the CPU's; beside them lie those by which
        # ranks on the CPU communicate.
        module = _modules_of(host).get(class_name)
        if module == f"{host}.comm" and own != host:
            return None
    return None if module is None else getattr(importlib.import_module(module), class_name)


def create_op_builder(class_name: str) -> Any:
    """Return a new builder.

    Args:
        class_name: as for ``get_op_builder``.

    Returns:
        What calling the builder's class gives, or None if there is none of that name.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator, for a class that is not registered.

    Fork: safe, initializes nothing; importing a module of builders does what that module does.

    Example:
        >>> import accelerator as acc
        >>> acc.create_op_builder("NoSuchBuilder") is None
        True
    """
    builder = get_op_builder(class_name)
    return None if builder is None else builder()


def build_extension() -> type:
    """Return the setuptools command that compiles operators.

    Returns:
        ``torch.utils.cpp_extension.BuildExtension``, a class; it needs setuptools.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.build_extension().__name__
        'BuildExtension'
    """
    found: type = _cpp_extension().BuildExtension
    return found


_importing = threading.Lock()


def _cpp_extension() -> ModuleType:
    """The module ``torch.utils.cpp_extension``, imported only now, for it takes long and needs setuptools."""
    # While it is imported it asks whether CUDA is available, only to print a line if not, and the question would poison forks.
    # So it is answered for this thread, by one thread at a time; others get the true answer.
    with _importing:
        ask, thread = torch.cuda.is_available, threading.get_ident()
        if "torch.utils.cpp_extension" not in sys.modules:
            torch.cuda.is_available = lambda: threading.get_ident() == thread or ask()
        try:
            return importlib.import_module("torch.utils.cpp_extension")
        finally:
            torch.cuda.is_available = ask


def _base() -> str:
    # Only DeepSpeed's installer has its package under that name, and has imported it by then; what else has that name, in the
    # working directory or anywhere on the path, is another's.
    package = sys.modules.get("op_builder")
    return "op_builder" if hasattr(package, "__deepspeed__") else "deepspeed.ops.op_builder"


@functools.cache
def _modules_of(package: str) -> dict[str, str]:
    """The modules of a package by the builder classes that they have, as their source says: none of them is imported."""
    try:
        path = importlib.import_module(package).__path__
    except ImportError:
        return {}
    return {
        name: f"{package}.{module.name}"
        for module in pkgutil.iter_modules(path)
        if not module.ispkg and module.name not in _NO_BUILDERS
        for name in _builders_in(_source(module, package))
    }


def _builders_in(source: str) -> list[str]:
    return [*_BUILDER_CLASS.findall(source), *_BUILDER_NAME.findall(" ".join(_PUBLIC.findall(source)))]


def _source(module: pkgutil.ModuleInfo, package: str) -> str:
    name = f"{package}.{module.name}"
    spec = module.module_finder.find_spec(name, None)
    loader: Any = spec and spec.loader
    return (hasattr(loader, "get_source") and loader.get_source(name)) or ""
