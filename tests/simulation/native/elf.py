"""Reads the symbols of ELF files: of libraries the dynamic ones, of object files all that other files see."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_LOCAL, _WEAK = 0, 2  # bindings


class Symbol(NamedTuple):
    name: str
    version: str  # "" if it has none


class ElfSymbols:
    """The defined and the undefined symbols of a 64-bit little-endian ELF file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
            self._data = data
            self._sections = self._read_sections()
            versions = self._read_versions()
            self.undefined: set[Symbol] = set()
            self.defined: set[Symbol] = set()
            self.weak: set[Symbol] = set()  # those of the defined that a definition in another file replaces
            for name, binding, is_defined, index in self._read_symbols():
                symbol = Symbol(name, versions.get(index, ""))
                (self.defined if is_defined else self.undefined).add(symbol)
                if is_defined and binding == _WEAK:
                    self.weak.add(symbol)
            del self._data

    def _read_sections(self) -> dict[int, tuple[int, int, int]]:
        """Return offset, size and the linked section's offset by section type. Each type that is read occurs once."""
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count = struct.unpack_from("<HH", self._data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQII", self._data, table + i * size) for i in range(count)]
        return {h[1]: (h[4], h[5], headers[h[6]][4]) for h in headers}

    def _text(self, offset: int) -> str:
        return self._data[offset : self._data.find(b"\0", offset)].decode()

    def _read_symbols(self) -> list[tuple[str, int, bool, int]]:
        symtab, dynsym, versym = 2, 11, 0x6FFFFFFF
        offset, size, strings = self._sections[dynsym if dynsym in self._sections else symtab]
        versions = self._sections.get(versym)
        symbols = []
        for i in range(1, size // 24):
            name, info, _, section = struct.unpack_from("<IBBH", self._data, offset + 24 * i)
            index = struct.unpack_from("<H", self._data, versions[0] + 2 * i)[0] & 0x7FFF if versions else 0
            if info >> 4 != _LOCAL:
                symbols.append((self._text(strings + name), info >> 4, section != 0, index))
        return symbols

    def _read_versions(self) -> dict[int, str]:
        """Return version names by index: those that the library needs and those that it defines."""
        verneed, verdef = 0x6FFFFFFE, 0x6FFFFFFD
        names: dict[int, str] = {}
        if verneed in self._sections:
            entry, _, strings = self._sections[verneed]
            while True:
                _, count, _, first, following = struct.unpack_from("<HHIII", self._data, entry)
                part = entry + first
                for _ in range(count):
                    _, _, index, name, step = struct.unpack_from("<IHHII", self._data, part)
                    names[index] = self._text(strings + name)
                    part += step
                if not following:
                    break
                entry += following
        if verdef in self._sections:
            entry, _, strings = self._sections[verdef]
            while True:
                _, flags, index, _, _, first, following = struct.unpack_from("<HHHHIII", self._data, entry)
                if not flags & 1:  # the entry with this flag names the library itself
                    names[index] = self._text(strings + struct.unpack_from("<I", self._data, entry + first)[0])
                if not following:
                    break
                entry += following
        return names
