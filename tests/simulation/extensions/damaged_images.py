"""Loads damaged images by every function that takes one. A process for itself: damage may end it, or let it wait for ever.

    python -m tests.simulation.extensions.damaged_images FIRST END

on simulated GPUs. It prints the number of each image before it loads it. An image lies at the end of its memory: what is read
behind it is a SIGSEGV.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import resource
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.simulation.extensions.fat_binaries import CODE, LZ4, WRAPPER_MAGIC, ZSTD, Entry, Wrapper, fat_binary

KERNEL = """.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 counter = 41;
.visible .entry count(.param .u64 out) {
    .reg .b32 %v; .reg .b64 %a;
    ld.param.u64 %a, [out]; ld.global.u32 %v, [counter]; add.u32 %v, %v, 1; st.global.u32 [%a], %v; ret;
}
"""
SUCCESS, INVALID_IMAGE, INVALID_PTX = 0, 200, 218
PAGE = mmap.PAGESIZE
WORDS = (0, 1, 15, 63, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFC0, 0xFFFFFFFF)
ALLOWED_GROWTH = 24 << 10  # KiB


def sources() -> list[bytes]:
    elf = Entry(90, "machine code" * 20, kind=CODE)
    entries = [(Entry(80, KERNEL),), (elf, Entry(80, KERNEL, LZ4)), (Entry(70, KERNEL), Entry(80, KERNEL, ZSTD), elf), (elf,)]
    header = b"\177ELF\2\1\1" + bytes(9) + struct.pack("<HHI", 2, 190, 1) + bytes(40)
    return [*(bytes(fat_binary(*each))[:-1] for each in entries), KERNEL.encode() + b"\0", header + bytes(200)]


def positions(data: bytes) -> list[int]:
    """Return where the headers of a fat binary begin."""
    found, at = [0], 16
    while len(data) - at >= 64:
        found.append(at)
        at += max(64, sum(struct.unpack_from("<IQ", data, at + 4)))
    return found


def damage(data: bytes, choose: random.Random) -> bytes:
    """Change bits, bytes and sizes of headers, take bytes away, add some, or cut the end off."""
    changed, headers = bytearray(data), positions(data)
    for _ in range(choose.randint(1, 3)):
        kind, at = choose.randrange(8), choose.randrange(len(changed))
        if kind < 4:
            at = choose.choice(headers) + choose.choice((0, 4, 6, 8, 12, 16, 20, 28, 36, 40, 44, 56, 60))
            if at + 4 <= len(changed):
                struct.pack_into("<I", changed, at, choose.choice(WORDS))
        elif kind == 4:
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 5:
            changed[at] = choose.randrange(256)
        elif kind == 6 and len(changed) > 40:
            del changed[at : at + choose.randrange(1, 40)]
        else:
            changed[at:at] = changed[at : at + choose.randrange(1, 40)]
        changed = changed or bytearray(1)
    return bytes(changed[: choose.randrange(1, len(changed) + 1)] if choose.random() < 0.2 else changed)


class Memory:
    """Memory whose end nothing may read beyond."""

    def __init__(self, size: int = 1 << 20) -> None:
        library = ctypes.CDLL(None)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        base = library.mmap(None, size + PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert library.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(PAGE), 0) == 0
        self.end: int = base + size

    def place(self, data: bytes) -> int:
        ctypes.memmove(self.end - len(data), data, len(data))
        return self.end - len(data)


class Loader:
    def __init__(self) -> None:
        self.driver, self.runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcudart.so.13")
        context = ctypes.c_void_p()
        assert self.driver.cuInit(0) == 0
        assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.driver.cuCtxSetCurrent(context) == 0
        self.register = self.runtime["__cudaRegisterFatBinary"]
        self.register.restype = ctypes.c_void_p
        self.memory, self.list, self.wrapper = Memory(), Memory(PAGE), Memory(PAGE)
        self.file = Path(tempfile.mkdtemp(), "image")

    def use(self, module: Any, unload: str) -> None:
        function, address, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        for name in (b"count", b"missing"):
            self.driver.cuModuleGetFunction(ctypes.byref(function), module, name)
        value = ctypes.c_int()
        self.driver.cuFuncGetAttribute(ctypes.byref(value), -1, function)
        assert self.driver[unload](module) == SUCCESS
        assert self.driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"counter") == 400

    def load(self, data: bytes, way: int, choose: random.Random) -> int:
        module = ctypes.c_void_p()
        target, image = ctypes.byref(module), ctypes.c_void_p(self.memory.place(data))
        wrapper = Wrapper(WRAPPER_MAGIC, 1, image.value, None)
        if way == 4:  # linked of fat binaries, of which the last may be missing
            listed = [image.value, image.value, None, choose.choice(WORDS)][: choose.randint(1, 4)]
            wrapper.version, wrapper.prelinked = 2, self.list.place(struct.pack(f"<{len(listed)}Q", *(x or 0 for x in listed)))
        if way >= 3:
            image = ctypes.c_void_p(self.wrapper.place(bytes(wrapper)))
        error: int
        if way == 5:
            handle = ctypes.c_void_p(self.register(image))
            function, name = ctypes.c_void_p(self.memory.end), ctypes.c_char_p(b"count")
            self.runtime["__cudaRegisterFunction"](handle, function, name, name, -1, None, None, None, None, None)
            self.runtime.cudaFuncSetAttribute(function, 99, 0)
            self.runtime["__cudaUnregisterFatBinary"](handle)
            return SUCCESS
        if way == 2:
            self.file.write_bytes(data)
            error = self.driver.cuModuleLoad(target, bytes(self.file))
        elif way == 1:
            error = self.driver.cuLibraryLoadData(target, image, None, None, 0, None, None, 0)
        elif way == 3:
            error = self.driver.cuModuleLoadFatBinary(target, image)
        else:
            error = self.driver.cuModuleLoadDataEx(target, image, 0, None, None)
        if error == SUCCESS:
            self.use(module, "cuLibraryUnload" if way == 1 else "cuModuleUnload")
        return error


WAYS = 6


def main() -> None:
    first, end = map(int, sys.argv[1:])
    loader, whole = Loader(), sources()
    for data in whole:
        for way in range(WAYS):
            assert loader.load(data, way, random.Random(3)) == SUCCESS, (way, data[:20])
    errors: dict[int, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, end):
        print("image", number, flush=True)
        choose = random.Random(number)
        error = loader.load(damage(choose.choice(whole), choose), number % WAYS, choose)
        errors[error] = errors.get(error, 0) + 1
    for data in whole:  # no lock is held
        assert loader.load(data, 0, random.Random(3)) == SUCCESS
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < ALLOWED_GROWTH, f"{growth} KiB"
    print("errors", sorted(errors))


if __name__ == "__main__":
    main()
