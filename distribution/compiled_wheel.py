"""The wheel for Linux on x86-64, which contains the simulated libraries, so that they need no C compiler where it is installed.

hatchling calls this hook, which ``pyproject.toml`` names. With the variable ``ACCELERATOR_COMPILED_WHEEL`` it compiles the
libraries into the wheel; without it, the wheel is a pure one. The tag of the wheel is then to be set by auditwheel, which knows
the oldest glibc that the libraries run with.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledWheel(BuildHookInterface[Any]):
    """The hook that adds the libraries to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, before hatchling collects the files."""
        if not os.environ.get("ACCELERATOR_COMPILED_WHEEL"):
            return
        sys.path.insert(0, self.root)
        build: Any = importlib.import_module("accelerator.simulation._build.libraries")
        self._folder = tempfile.TemporaryDirectory()
        directory = build.build(Path(self._folder.name))
        target = f"accelerator/simulation/{build.PREBUILT_FOLDER}/{directory.name}"
        build_data["force_include"].update({str(directory / path): f"{target}/{path}" for path in build.COMPILED})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files, which the wheel contains now."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
