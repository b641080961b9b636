"""What every process of the simulation reads: the table of settings, known GPUs, the words of faults, records of rehearsals.

Processes on a simulated machine load these modules by file name, so they import only each other.
"""

from __future__ import annotations

from .options import (
    LIBRARIES_FOLDER,
    LIMITS,
    PARAMETERS,
    PREFIX,
    PROBLEM_SUFFIX,
    SETTINGS,
    Option,
    Setting,
    encode,
    find,
    read,
    variable,
)

__all__ = [
    "LIBRARIES_FOLDER",
    "LIMITS",
    "PARAMETERS",
    "PREFIX",
    "PROBLEM_SUFFIX",
    "SETTINGS",
    "Option",
    "Setting",
    "encode",
    "find",
    "read",
    "variable",
]
