"""Writes ``interface/settings.h``, which the native sources include: the variables, defaults, limits and
known GPUs of `_settings`."""

from __future__ import annotations

from .._settings import LIBRARIES_FOLDER, LIMITS, PREFIX, SETTINGS, known_gpus

HEADER_NAME = "interface/settings.h"
"""The path of the file below the folder into which a build copies the sources."""

_PYTHON = frozenset(("inside", "outside"))


def header() -> bytes:
    """Return the text of the file."""
    lines = [
        "/* Written at build time from _settings/options.py: the variables that the libraries read, what they assume if one is",
        " * unset, limits, and the known GPUs. */",
        f"#ifndef {PREFIX}SETTINGS_H",
        f"#define {PREFIX}SETTINGS_H",
        "",
    ]
    for setting in SETTINGS:
        if not _PYTHON.issuperset(setting.readers):
            lines.append(f'#define SETTING_{setting.variable} "{PREFIX}{setting.variable}"')
            lines.append(f'#define SETTING_{setting.variable}_DEFAULT "{setting.native_default}"')
    lines += ["", f'#define SIM_LIBRARIES_FOLDER "{LIBRARIES_FOLDER}"']
    lines += ["", "enum {", *(f"    SIM_MAX_{name} = {value}," for name, value in LIMITS.items()), "};", ""]
    lines.append("#define SIM_KNOWN_GPUS(MODEL) \\")
    for gpu in known_gpus.models():
        lines.append(f'    MODEL("{gpu.name}", {int(gpu.has_fan)}, {gpu.pcie_generation}, {gpu.power_limit}) \\')
    lines += ["", "#endif", ""]
    return "\n".join(lines).encode()
