"""The program of a child process that imports torch and reports its accelerator, or why torch cannot be imported.

It imports nothing of this package. The parent's torch stays unimported, and its accelerator uninitialized.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main(paths: str, package: str, mark: str) -> None:
    """Print, between two marks, the error, the device type, and each device's name, free and total memory.

    Args:
        paths: the parent's ``sys.path``, as JSON.
        package: a package to import after torch because it registers the accelerator; "" for none.
        mark: a line that nothing else prints.
    """
    sys.path[:] = json.loads(paths)
    error: str | None = None
    device_type: str | None = None
    devices: list[tuple[str | None, int | None, int | None]] = []
    try:
        import torch
        import torch.accelerator

        if package:
            __import__(package)
        device = torch.accelerator.current_accelerator()
        if device is not None:
            device_type = device.type
            module = getattr(torch, device_type)
            count = module.device_count() if hasattr(module, "device_count") else int(module.is_available())
            devices = [_describe(torch, module, index) for index in range(count)] if device_type != "cuda" else []
    except BaseException as failure:  # a plug-in may raise anything
        error = _describe_error(failure)
    message = f"\n{mark}\n{json.dumps([error, device_type, devices])}\n{mark}\n".encode("ascii")
    sys.stdout.flush()
    while message:
        message = message[os.write(1, message) :]
    os._exit(0)  # the plug-in's exit handlers may hang


def _describe(torch: Any, module: Any, index: int) -> tuple[str | None, int | None, int | None]:
    name: str | None = _or_none(lambda: str(module.get_device_name(index)))
    figures = (
        _or_none(lambda: torch.accelerator.get_memory_info(index))
        or _or_none(lambda: module.mem_get_info(index))
        or _or_none(lambda: (None, int(module.get_device_properties(index).total_memory)))
    )
    free, total = figures or (None, None)
    return name, free, total


def _or_none(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # this torch or this accelerator does not report it
        return None


def _describe_error(error: BaseException) -> str:
    """The error and its causes in one line."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 5:
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        if text not in texts:  # an error that was caught and raised again
            texts.append(text)
        cause = cause.__cause__ or cause.__context__
    return "; caused by ".join(texts)


if __name__ == "__main__":
    main(*sys.argv[1:])
