"""Triton kernels on simulated GPUs: Triton itself compiles them and launches them, from PTX in place of machine code.

The last stage of Triton's compiler for NVIDIA makes machine code with ptxas, which says what does not fit on a GPU and counts
registers. Here it returns a fat binary of that code and the PTX, which the simulated driver runs as it runs kernels of others.
Kernels for a GPU that is newer than what the driver translates are compiled for `_NEWEST`. Programs still see the GPU's own
capability; the code of a kernel, which Triton runs while it compiles, sees the one that it is compiled for.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import struct
import sysconfig
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ... import _settings
from ..import_hook import after_import
from ..ops import accesses
from .refusal import guarded, refuse_calls

_NEWEST = 89
"""The newest architecture whose instructions the driver translates: 9.0 has ``wgmma``."""
_TAG = "simulated-gpu"  # in the keys of Triton's cache: a real GPU must not load what was compiled for a simulated one
_FAT_BINARY = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")  # as struct entry in native/runtime/images.c
_PTX, _MACHINE_CODE = 1, 2


class _Thread(threading.local):
    is_compiling = False


_thread = _Thread()


def install() -> None:
    """Hook Triton when the program imports it. Imports nothing."""
    after_import("triton.runtime.build", _say_what_is_missing)
    launches = refuse_calls("compile")
    after_import("triton.compiler.compiler", guarded(_hook_compiler, launches))
    if _settings.read("tune") != "1":
        after_import("triton.runtime.autotuner", guarded(_hook_autotuner, refuse_calls("Autotuner.run")))


def _hook_compiler(compiler: ModuleType) -> None:
    from triton import backends

    nvidia = backends.backends["nvidia"]  # older versions of Triton load this module twice: its classes are used from here
    _hook_backend(nvidia.compiler)
    _hook_target(nvidia.driver)
    if accesses.FINDS_RACES:
        _raise_races(nvidia.driver.__init__.__globals__["CudaLauncher"])
    for source in (compiler.ASTSource, compiler.IRSource):
        source.make_ir = _with_target_of_compilation(source.make_ir)


def _hook_backend(backend: Any) -> None:
    """Replace methods of Triton's class ``CUDABackend``."""
    initialize, add_stages, compute_hash = backend.__init__, backend.add_stages, backend.hash

    @functools.wraps(initialize)
    def initialize_for_known_target(self: Any, target: Any) -> None:
        initialize(self, _limited(target))

    @functools.wraps(add_stages)
    def add_stages_with_ptx(self: Any, stages: dict[str, Callable[..., Any]], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        make_code = stages["cubin"]

        def make_fat_binary(ptx: str, metadata: Any) -> bytes:
            return _fat_binary(ptx, make_code(ptx, metadata), self.target.arch)

        stages["cubin"] = make_fat_binary

    @functools.wraps(compute_hash)
    def hash_with_tag(self: Any) -> str:
        return f"{compute_hash(self)}-{_TAG}"

    backend.__init__, backend.add_stages, backend.hash = initialize_for_known_target, add_stages_with_ptx, hash_with_tag


def _limited(target: Any) -> Any:
    """Return the target of a compilation for a GPU of this machine. A program may compile for others, and read the code."""
    own = {text.replace(".", "") for text in (_settings.read("capability") or "").split(",")}
    if str(target.arch) not in own or int(target.arch) <= _NEWEST:
        return target
    return type(target)(target.backend, _NEWEST, target.warp_size)


def _hook_target(driver: Any) -> None:
    get_current_target = driver.get_current_target

    @functools.wraps(get_current_target)
    def current_target(self: Any) -> Any:
        target = get_current_target(self)
        return _limited(target) if _thread.is_compiling else target

    driver.get_current_target = current_target


def _raise_races(launcher: Any) -> None:
    """Let a launch raise the race that it is the second access of. The driver has found it."""
    launch = launcher.__call__

    @functools.wraps(launch)
    def launch_and_raise(self: Any, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        accesses.raise_race()

    launcher.__call__ = launch_and_raise


def _with_target_of_compilation(make_ir: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_ir)
    def make(*arguments: Any, **options: Any) -> Any:
        before, _thread.is_compiling = _thread.is_compiling, True
        try:
            return make_ir(*arguments, **options)
        finally:
            _thread.is_compiling = before

    return make


def _fat_binary(ptx: str, code: bytes, architecture: int) -> bytes:
    entries = b""
    for kind, data in ((_PTX, ptx.encode() + b"\0"), (_MACHINE_CODE, code)):
        data += bytes(-len(data) % 8)
        options = bytes(8)  # none: cuobjdump, which prints machine code, reads them
        header = kind, 0x101, _ENTRY.size + len(options), len(data), 0, _ENTRY.size, 0, 0, architecture, 0, 0, 0x11, 0, 0
        entries += _ENTRY.pack(*header) + options + data
    return _FAT_BINARY.pack(0xBA55ED50, 1, _FAT_BINARY.size, len(entries)) + entries


def _hook_autotuner(autotuner: ModuleType) -> None:
    """Let ``triton.autotune`` take the first configuration that compiles: the times of a simulated GPU mean nothing."""
    tuner: Any = autotuner.Autotuner
    prune, bench = tuner.prune_configs, tuner._bench

    def run_once(kernel_call: Callable[[], object], quantiles: Any = None) -> list[float]:
        torch.cuda.synchronize()  # as Triton's own function does; an error in a capture
        kernel_call()
        return [1.0] * len(quantiles or (1,))

    @functools.wraps(prune)
    def prune_configs(self: Any, *arguments: Any, **options: Any) -> Any:
        self._accelerator_has_one = False
        return prune(self, *arguments, **options)

    @functools.wraps(bench)
    def bench_first(self: Any, *arguments: Any, **options: Any) -> Any:
        if self._accelerator_measures:
            return bench(self, *arguments, **options)
        if self._accelerator_has_one:
            return [float("inf")] * 3
        times = bench(self, *arguments, **options)
        self._accelerator_has_one = times != [float("inf")] * 3
        return times

    initialize = tuner.__init__
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_without_timing(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        self._accelerator_measures = given.get("do_bench") is not None  # the program's own measurement
        initialize(self, *arguments, **options)
        if not self._accelerator_measures:
            self.do_bench = run_once

    tuner.__init__, tuner.prune_configs, tuner._bench = initialize_without_timing, prune_configs, bench_first


def _say_what_is_missing(build: ModuleType) -> None:
    """Name in one line what the launcher of Triton's kernels needs, on a GPU too."""
    module: Any = build
    original = module._build

    @functools.wraps(original)
    def compile_launcher(*arguments: Any, **options: Any) -> Any:
        header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
        compilers = [os.environ.get("CC", ""), "gcc", "clang"]
        if not os.path.exists(header):
            raise RuntimeError(
                f"Triton's launcher needs Python's headers, on a GPU too: {header} is missing; install python3-dev"
            )
        if not any(name and shutil.which(name.split()[0]) for name in compilers):
            raise RuntimeError("Triton's launcher needs a C compiler, on a GPU too: none was found; install gcc, or set CC")
        return original(*arguments, **options)

    module._build = compile_launcher
