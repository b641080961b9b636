"""``python -m tests.simulation.native.thread_sanitizer``: run two communicators in threads under ThreadSanitizer.

Needs gcc or clang with libtsan. Builds the simulated libraries with the sanitizer in a temporary directory. The exit status
is nonzero after a wrong result or a data race.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SANITIZER = "-fsanitize=thread -g -O1"
PROGRAM = Path(__file__).with_name("two_communicators.c")


def main() -> int:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        print("there is no C compiler; install gcc or set CC", file=sys.stderr)
        return 2
    # The build takes its compiler and flags from CC.
    os.environ["CC"] = f"{compiler} {SANITIZER}"
    from accelerator.simulation import _settings, environment
    from accelerator.simulation._build import libraries

    with tempfile.TemporaryDirectory(prefix="thread-sanitizer-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.environ.pop(_settings.variable("libraries"), None)
        machine = environment(3, memory="1GiB")
        built = libraries.ensure_built()
        program = Path(folder, "two_communicators")
        preloaded = [str(built / f"preload/{name}") for name in ("libnccl.so.2", "libcudart.so.13")]
        command = [*os.environ["CC"].split(), "-std=gnu11", "-Wall", "-Wextra", "-pthread", "-o", str(program), str(PROGRAM)]
        subprocess.run([*command, *preloaded, "-Wl,--allow-shlib-undefined"], check=True)
        # The program links the libraries. They cannot be preloaded, because the sanitizer's library must load first.
        machine.pop("LD_PRELOAD")
        machine["LD_LIBRARY_PATH"] = f"{built / 'preload'}:{machine['LD_LIBRARY_PATH']}"
        machine["TSAN_OPTIONS"] = f"halt_on_error=0:{os.environ.get('TSAN_OPTIONS', '')}"
        return subprocess.run([str(program)], env=machine, check=False, timeout=600).returncode


if __name__ == "__main__":
    sys.exit(main())
