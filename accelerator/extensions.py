"""Builders of compiled operators: registered ones, and DeepSpeed's if it is installed."""

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

__all__ = ["build_extension", "create_op_builder", "get_op_builder", "op_builder_dir", "register_op_builder"]

_registered: dict[str, Callable[[], Any]] = {}

# Modules of DeepSpeed's package with base classes and tables but no builders.
_NO_BUILDERS = ("all_ops", "builder", "no_impl")
# A module's builders are those that it defines and those in its __all__.
_BUILDER_CLASS = re.compile(r"^class\s+(\w+Builder)\b", re.MULTILINE)
_PUBLIC = re.compile(r"^__all__\s*=\s*[\[(]([^\])]*)", re.MULTILINE)
_BUILDER_NAME = re.compile(r"\b\w+Builder\b")


def op_builder_dir() -> str:
    """Return the name of the package that is searched for builders that are not registered.

    Returns:
        "deepspeed.ops.op_builder", or "op_builder" while DeepSpeed is being installed. For other devices than CUDA the
        sub-package named after the device type, such as "deepspeed.ops.op_builder.cpu". It may not exist.

    Example:
        >>> acc.op_builder_dir().startswith("deepspeed.ops.op_builder")
        True
    """
    subpackage = state.current(allow_bad_fork=True).vendor.op_builders
    return f"{_base()}.{subpackage}" if subpackage else _base()


def register_op_builder(name: str, builder: Callable[[], Any]) -> None:
    """Register a builder, replacing a builder of the same name.

    Args:
        name: the name for ``get_op_builder``.
        builder: the builder's class, or another callable that creates one.

    Raises:
        TypeError: if the name is not a str or the builder is not callable.

    Example:
        >>> class MyOpBuilder: pass
        >>> acc.register_op_builder("MyOpBuilder", MyOpBuilder)
        >>> acc.get_op_builder("MyOpBuilder") is MyOpBuilder
        True
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"The name of a builder must be a str, not {type(name).__name__}")
    if not callable(builder):
        raise TypeError(f"A builder must be callable, not {type(builder).__name__}")
    _registered[name] = builder


def get_op_builder(class_name: str) -> Any:
    """Return the class of a builder.

    Args:
        class_name: the name of a registered builder, or of a class in the package that ``op_builder_dir`` names. Only the
            module with that class is imported.

    Returns:
        The class, or None if there is none of that name.

    Example:
        >>> acc.get_op_builder("NoSuchBuilder") is None
        True
    """
    if not isinstance(class_name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"The name of a builder must be a str, not {type(class_name).__name__}")
    if class_name in _registered:
        return _registered[class_name]
    package, host = op_builder_dir(), f"{_base()}.cpu"
    module = _modules_of(package).get(class_name)
    if module is None:
        # CUDA also uses the CPU's builders, except those of the communication between ranks on the CPU.
        module = _modules_of(host).get(class_name)
        if module == f"{host}.comm" and package != host:
            return None
    return None if module is None else getattr(importlib.import_module(module), class_name)


def create_op_builder(class_name: str) -> Any:
    """Return a new builder.

    Args:
        class_name: as for ``get_op_builder``.

    Returns:
        An instance of the builder's class, or None if there is none of that name.

    Example:
        >>> acc.create_op_builder("NoSuchBuilder") is None
        True
    """
    builder = get_op_builder(class_name)
    return None if builder is None else builder()


def build_extension() -> type:
    """Return the setuptools command that compiles operators.

    Returns:
        The class ``torch.utils.cpp_extension.BuildExtension``, which needs setuptools.

    Example:
        >>> acc.build_extension().__name__
        'BuildExtension'
    """
    command: type = _cpp_extension().BuildExtension
    return command


_importing = threading.Lock()


def _cpp_extension() -> ModuleType:
    """Import ``torch.utils.cpp_extension``, which takes long and needs setuptools."""
    # The import calls torch.cuda.is_available() only to print a line, and that call breaks fork. So the function is replaced
    # during the import, for this thread only.
    with _importing:
        is_available, thread = torch.cuda.is_available, threading.get_ident()
        if "torch.utils.cpp_extension" not in sys.modules:
            torch.cuda.is_available = lambda: threading.get_ident() == thread or is_available()
        try:
            return importlib.import_module("torch.utils.cpp_extension")
        finally:
            torch.cuda.is_available = is_available


def _base() -> str:
    # DeepSpeed's installer has imported its own package of this name. Any other package of this name is unrelated.
    package = sys.modules.get("op_builder")
    return "op_builder" if hasattr(package, "__deepspeed__") else "deepspeed.ops.op_builder"


@functools.cache
def _modules_of(package: str) -> dict[str, str]:
    """Map the builder classes of a package to their modules by reading the source; no module is imported."""
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
