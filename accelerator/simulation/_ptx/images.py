"""Decompresses the PTX that the simulated runtime has found in fat binaries."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from typing import BinaryIO

from .errors import Refused

_HEADER = struct.Struct("<QQII")  # size, size of the text, how it is compressed, 0
PLAIN, LZ4, ZSTD = range(3)  # as in native/runtime/images.h
_LARGEST_RATIOS = {LZ4: 255, ZSTD: 1 << 15}
"""How many bytes of text one byte can be. A part that says it has more is damaged."""


def read_texts(file: BinaryIO) -> list[str]:
    """Read the PTX of each part."""
    texts: list[str] = []
    while header := file.read(_HEADER.size):
        size, text_size, compression, _ = _HEADER.unpack(header)
        text = decompress(file.read(size), text_size, compression).rstrip(b"\0")
        texts.append(text.decode(errors="replace"))  # in comments, ptxas takes any bytes
    return texts


def decompress(data: bytes, size: int, compression: int) -> bytes:
    """Return a part's text.

    Args:
        data: The part.
        size: The size of the text.
        compression: How it is compressed: PLAIN, LZ4 or ZSTD.

    Raises:
        Refused: It is damaged, or nothing here reads zstd.
    """
    if compression == PLAIN:
        return data
    text = b""
    if size <= _LARGEST_RATIOS[compression] * len(data):
        with contextlib.suppress(IndexError):
            text = _decompress_lz4(data, size) if compression == LZ4 else _decompress_zstd(data, size)
    if len(text) != size or size == 0:
        raise Refused("the compressed PTX in the program is damaged")
    return text


def _decompress_lz4(data: bytes, size: int) -> bytes:
    out = bytearray()
    at = 0

    def read_length(at: int, length: int) -> tuple[int, int]:
        while length >= 15:
            length += data[at]
            at += 1
            if data[at - 1] != 255:
                break
        return at, length

    while at < len(data) and len(out) < size:
        token = data[at]
        at, length = read_length(at + 1, token >> 4)
        out += data[at : at + length]
        at += length
        if at >= len(data) or len(out) >= size:
            break
        distance = data[at] | data[at + 1] << 8
        at, length = read_length(at + 2, token & 15)
        length += 4
        start = len(out) - distance
        if distance == 0 or start < 0:
            raise IndexError
        if distance >= length:
            out += out[start : start + length]
        else:
            length = min(length, size - len(out))
            repeated = out[start:] * (length // distance + 1)
            out += repeated[:length]
    return bytes(out[:size])


def _decompress_zstd(data: bytes, size: int) -> bytes:
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # of Python 3.14
    except ImportError:
        return _decompress_zstd_natively(data, size)
    try:
        # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return bytes(zstd.ZstdDecompressor().decompress(data, size))
    except zstd.ZstdError:
        return b""


def _decompress_zstd_natively(data: bytes, size: int) -> bytes:
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError as error:
        raise Refused(
            "its PTX is compressed with zstd, and there is no libzstd.so.1: install it, or compile with nvcc"
            " --compress-mode=none"
        ) from error
    decompress = library.ZSTD_decompress
    decompress.restype = ctypes.c_size_t
    decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    text = ctypes.create_string_buffer(size)
    return text.raw if decompress(text, size, data, len(data)) == size else b""
