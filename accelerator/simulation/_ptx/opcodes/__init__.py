"""The instructions that are translated, one module for each family, and why others are refused."""

from __future__ import annotations

import re

from ..errors import Refused
from ..operations import Operation
from . import (
    asynchronous,
    atomics,
    barriers,
    comparisons,
    control,
    conversions,
    floats,
    halves,
    integers,
    matrices,
    memory,
    warps,
)

__all__ = ["OPERATIONS", "canonical", "find", "ignores_nan"]

_MODULES = (
    *(integers, floats, halves, comparisons, conversions, memory, atomics),
    *(control, barriers, warps, matrices, asynchronous),
)
_CANONICAL = {
    **dict.fromkeys(("ld", "ldu", "st", "atom", "red"), memory.canonical),
    **dict.fromkeys(("bar", "barrier"), barriers.canonical),
    **dict.fromkeys(("cp", "mbarrier"), asynchronous.canonical),
    **dict.fromkeys(("cvta", "isspacep", "ldmatrix", "stmatrix", "wmma"), memory.without_subspace),
}
# Instructions of which no form is translated, with what they need.
_REFUSED = {
    "wgmma": "wgmma is for one architecture alone",
    "tcgen05": "tcgen05 is for one architecture alone",
    **dict.fromkeys(("tex", "tld4", "txq", "istypep"), "textures are not simulated"),
    **dict.fromkeys(("suld", "sust", "sured", "suq"), "surfaces are not simulated"),
    **dict.fromkeys(("mapa", "getctarank", "clusterlaunchcontrol"), "clusters of blocks are not simulated"),
    **dict.fromkeys(("tensormap",), "tensor maps are not simulated"),
    **dict.fromkeys(("multimem",), "multicast memory is not simulated"),
}


def _merge() -> dict[str, Operation]:
    merged: dict[str, Operation] = {}
    for module in _MODULES:
        for variant, operation in module.TABLE.items():
            if variant in merged:
                raise ValueError(f"{variant} is described twice")
            merged[variant] = operation
    return merged


OPERATIONS = _merge()
"""The accepted variants, by their canonical names."""


def canonical(opcode: str) -> str:
    """Return the name of the variant that does the same, without modifiers that change nothing here."""
    name = opcode.split(".", 1)[0]
    if name == "bar" and opcode.startswith("bar.warp"):
        return opcode
    return _CANONICAL[name](opcode) if name in _CANONICAL else opcode


_IGNORE_NAN = re.compile(
    r"(add|sub|mul|fma|mad|div|rcp|r?sqrt|sin|cos|lg2|ex2|tanh|setp?|testp|min(?!.*xorsign)|max(?!.*xorsign)|cvt(?!.*\.(f64|tf32)\.))"
    r"\..*f32"
)


def ignores_nan(opcode: str) -> bool:
    """Return whether an instruction does the same for every NaN of single precision that it reads."""
    return _IGNORE_NAN.fullmatch(opcode) is not None


_found: dict[str, Operation] = {}


def find(opcode: str) -> Operation:
    """Return the description of an opcode.

    Raises:
        Refused: It is not translated.
    """
    operation = _found.get(opcode)
    if operation is None:
        operation = OPERATIONS.get(canonical(opcode))
        if operation is None:
            reason = _REFUSED.get(opcode.split(".", 1)[0])
            raise Refused(f"the instruction {opcode}" + (f": {reason}" if reason else ""))
        _found[opcode] = operation
    return operation
