"""The program of a child process that imports torch and reports its accelerator or the result of a function of torch.

It imports nothing of this package. The parent's torch stays unimported, and its accelerator uninitialized.
"""

from __future__ import annotations

import json
import operator
import os
import site
import sys
from collections.abc import Callable
from typing import Any


def main(paths: str, site_folders: str, package: str, function: str, mark: str) -> None:
    """Print two results between two marks: why torch cannot be imported, or None, and what torch reports.

    Args:
        paths: the parent's ``sys.path``, as JSON.
        site_folders: the folders whose ``.pth`` files the parent ran, as JSON.
        package: a package to import after torch because it registers the accelerator; "" for none.
        function: the name of a function in torch whose result is printed; "" for the device type and the devices.
        mark: a line that nothing else prints.
    """
    error: str | None = None
    report: Any = None
    try:
        _run_pth_files(json.loads(site_folders))
        sys.path[:] = json.loads(paths)
        import torch
        import torch.accelerator  # pyright: ignore[reportUnusedImport]

        if package:
            __import__(package)
        report = operator.attrgetter(function)(torch)() if function else _describe_accelerator(torch)
    except BaseException as failure:  # a plug-in may raise anything
        error = _describe_error(failure)
    message = f"\n{mark}\n{json.dumps([error, report])}\n{mark}\n".encode("ascii")
    sys.stdout.flush()
    while message:
        message = message[os.write(1, message) :]
    os._exit(0)  # the plug-in's exit handlers may hang


def _run_pth_files(folders: list[str]) -> None:
    """Run the ``.pth`` files of some folders, which install the finders of editable packages."""
    # A query in one of these files must not start a child process, which would run the file too, and so on without end.
    executable, sys.executable = sys.executable, ""
    for folder in folders:
        site.addsitedir(folder)
    sys.executable = executable


def _describe_accelerator(torch: Any) -> tuple[str | None, list[tuple[str | None, int | None, int | None]]]:
    """The device type, and each device's name, free and total memory; no devices for CUDA and ROCm."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None, []
    module = getattr(torch, device.type)
    count = module.device_count() if hasattr(module, "device_count") else int(module.is_available())
    return device.type, [_describe(torch, module, index) for index in range(count)] if device.type != "cuda" else []


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
