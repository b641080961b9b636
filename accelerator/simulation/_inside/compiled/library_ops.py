"""Ops of other libraries whose CUDA kernels cannot run on simulated GPUs compute with their CPU kernels.

A library such as torchvision registers its kernels while its shared library is loaded, without calling Python. So the kernels
of a namespace are overridden at its first use in ``torch.ops``, and after ``torch.ops.load_library``. Kernels written in Python
call torch's ops and stay. The environment variable ACCELERATOR_SIM_OWN_KERNELS lists namespaces, separated by commas, whose
kernels stay too. In a rehearsal calls with small arguments compute with the CPU kernels, and others reach the CUDA kernels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ... import _settings
from ..ops import bindings
from ..ops.dispatch import override_library_op

_torch_namespaces: set[str] = set()
_overridden: set[str] = set()
_libraries: list[Any] = []  # the overrides end with their library


def install(override: Callable[[Any, str], None] = override_library_op) -> None:
    """Override the kernels of other libraries from now on, as soon as they are used.

    Args:
        override: Overrides the kernel of an op, given a library of torch and the op's name.
    """
    _torch_namespaces.update(_namespace(name) for name in bindings.all_op_names())
    namespaces, ops = bindings.OpNamespace, bindings.Ops
    find_op, load_library = namespaces.__getattr__, ops.load_library

    def find_op_and_override(self: Any, name: str) -> Any:
        if self.name not in _torch_namespaces:
            _override({self.name}, override)
        return find_op(self, name)

    def load_library_and_override(self: Any, path: Any) -> None:
        load_library(self, path)
        _override({_namespace(name) for name in bindings.all_op_names()} - _torch_namespaces, override)

    namespaces.__getattr__ = find_op_and_override
    ops.load_library = load_library_and_override


def _namespace(name: str) -> str:
    return name.partition("::")[0]


def _override(namespaces: set[str], override: Callable[[Any, str], None]) -> None:
    """Override the CUDA kernels of namespaces that were registered from C++, if the ops have CPU kernels."""
    own = {name.strip() for name in (_settings.read("own_kernels") or "").split(",")}
    names = set(bindings.op_names_of_key("CUDA")) - _overridden
    for name in names:
        namespace = _namespace(name)
        if namespace in namespaces - own and _is_from_cpp(name) and bindings.has_kernel(name, "CPU"):
            library = bindings.make_library("IMPL", namespace, "", __file__, 0)
            override(library, name)
            _libraries.append(library)
            _overridden.add(name)


def _is_from_cpp(name: str) -> bool:
    """Return whether an op's CUDA kernel was registered from C++ and not from Python, by the name of the source file."""
    match = re.search(r"^CUDA: registered at (.*):\d+ ::", bindings.describe_kernels(name), re.MULTILINE)
    return match is not None and not match[1].endswith((".py", ">")) and match[1] != os.devnull
