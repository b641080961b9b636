"""Fat binaries, as nvcc makes them, from PTX texts. This module needs no torch."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

PTX, CODE = 1, 2  # kinds of entries
LZ4, ZSTD = 0x2000, 0x8000  # flags
WRAPPER_MAGIC, BINARY_MAGIC = 0x466243B1, 0xBA55ED50


class Entry(NamedTuple):
    """A part of a fat binary: PTX, or machine code."""

    architecture: int
    text: str = ""
    flags: int = 0
    kind: int = PTX

    def encode(self) -> bytes:
        text = self.text.encode() + b"\0"
        data = compress_lz4(text) if self.flags & LZ4 else store_zstd(text) if self.flags & ZSTD else text
        padded = data + bytes(-len(data) % 8)
        compressed = len(data) if self.flags else 0
        flags = (self.kind, 0x101, 64, len(padded), compressed, 0, 8, 8, self.architecture, 0, 0, self.flags, 0, len(text))
        return struct.pack("<HHIQIIHHIIIQQQ", *flags) + padded


def compress_lz4(data: bytes) -> bytes:
    """Compress to a block of LZ4 that has matches, also overlapping ones."""
    out, literals, at = bytearray(), bytearray(), 0

    def length(value: int) -> bytes:
        return b"\xff" * ((value - 15) // 255) + bytes([(value - 15) % 255]) if value >= 15 else b""

    def sequence(match: tuple[int, int] | None) -> None:
        size = match[1] - 4 if match else 0
        out.append(min(len(literals), 15) << 4 | min(size, 15))
        out.extend(length(len(literals)) + literals)
        if match:
            out.extend(struct.pack("<H", match[0]) + length(size))
        literals.clear()

    while at < len(data):
        # The last bytes must be literals.
        start = data.rfind(data[at : at + 4], max(at - 65535, 0), at + 3) if at < len(data) - 12 else -1
        if start < 0:
            literals.append(data[at])
            at += 1
            continue
        size = 4
        while at + size < len(data) - 5 and data[start + size] == data[at + size]:
            size += 1
        sequence((at - start, size))
        at += size
    sequence(None)
    return bytes(out)


def store_zstd(data: bytes) -> bytes:
    """Return a frame of zstd with blocks that are not compressed."""
    frame = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(data))
    blocks = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
    for number, block in enumerate(blocks):
        frame += struct.pack("<I", len(block) << 3 | (number == len(blocks) - 1))[:3] + block
    return frame


def fat_binary(*entries: Entry) -> Any:
    body = b"".join(entry.encode() for entry in entries)
    return ctypes.create_string_buffer(struct.pack("<IHHQ", BINARY_MAGIC, 1, 16, len(body)) + body)


class Wrapper(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("data", ctypes.c_void_p), ("prelinked", ctypes.c_void_p)]
