"""PTX's types, the C types that hold them, and their alignment."""

from __future__ import annotations

from typing import NamedTuple


class PtxType(NamedTuple):
    """A type: its size, its C type, and how its bits are read."""

    name: str
    bits: int
    c: str
    kind: str
    """``unsigned``, ``signed``, ``bits``, ``float`` or ``predicate``: formats that C lacks are bits."""

    @property
    def bytes(self) -> int:
        return (self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        """Whether C computes with the type: halves are bits."""
        return self.kind == "float"

    @property
    def word(self) -> str:
        """The unsigned C type of the same size."""
        return f"u{self.bits}"


def _integers() -> list[PtxType]:
    sizes = (8, 16, 32, 64)
    kinds = (("u", "u", "unsigned"), ("s", "s", "signed"), ("b", "u", "bits"))
    return [PtxType(f"{ptx}{bits}", bits, f"{c}{bits}", kind) for ptx, c, kind in kinds for bits in sizes]


PREDICATE = PtxType("pred", 8, "u8", "predicate")
TYPES = {
    type.name: type
    for type in (
        *_integers(),
        PtxType("b128", 128, "u128", "bits"),
        PtxType("f16", 16, "u16", "bits"),
        PtxType("bf16", 16, "u16", "bits"),
        PtxType("f16x2", 32, "u32", "bits"),
        PtxType("bf16x2", 32, "u32", "bits"),
        PtxType("u16x2", 32, "u32", "bits"),
        PtxType("s16x2", 32, "u32", "bits"),
        PtxType("tf32", 32, "u32", "bits"),
        PtxType("e4m3x2", 16, "u16", "bits"),
        PtxType("e5m2x2", 16, "u16", "bits"),
        PtxType("f32", 32, "float", "float"),
        PtxType("f64", 64, "double", "float"),
        PREDICATE,
    )
}


def align(offset: int, alignment: int) -> int:
    """Return the first multiple of an alignment from an offset on."""
    return -(-offset // alignment) * alignment


def is_type(name: str) -> bool:
    return name in TYPES


def bits_type(bits: int) -> PtxType:
    """Return the untyped type of a size."""
    return TYPES[f"b{bits}"]


def unsigned(type: PtxType) -> PtxType:
    return TYPES[f"u{type.bits}"]
