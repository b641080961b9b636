"""Compiled files in the user's cache directory: made once, by one process at a time, and used only if they are intact.

Programs load what is in a build's directory, so a build is used only if nobody except this user and root could have written it
and its files match the checksums, which are written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

_CHECKSUMS = "SHA256SUMS"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Build(NamedTuple):
    """A directory below the cache's, the files in it, and the function that makes them in a directory."""

    name: str
    files: tuple[str, ...]
    make: Callable[[Path], None]

    @property
    def directories(self) -> list[str]:
        return sorted({str(parent) for name in self.files for parent in Path(name).parents} - {"."} | {""})


class _UnusableDirectory(OSError):
    """A directory that cannot hold a build."""


def announce(message: str) -> None:
    """Print one line on stderr. A closed or full stderr must not prevent a build."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"accelerator: {message}", file=sys.stderr, flush=True)


def announce_once(file_name: str, message: str, *, within_s: float = math.inf) -> None:
    """Print one line on stderr, once for each cache directory: a file there, with the message, says that it was printed.

    Args:
        file_name: The file, below the cache directory.
        message: The line.
        within_s: After so many seconds the line is printed again.
    """
    for root in cache_roots():
        path = root / file_name
        try:
            with lock(root, path.parent):
                if _is_newer(path, within_s):
                    return
                try:
                    path.write_text(message, encoding="utf-8")
                except OSError:  # the disk is full, and the file empty
                    path.unlink(missing_ok=True)
                    raise
        except OSError:
            continue
        break
    announce(message)


def was_announced(file_name: str, *, within_s: float) -> bool:
    """Return whether `announce_once` has printed a line in the last seconds."""
    return any(_is_newer(root / file_name, within_s) for root in cache_roots())


def _is_newer(path: Path, seconds: float) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < seconds
    except OSError:
        return False


def cache_roots() -> list[Path]:
    """Return the possible cache directories: the user's, and one below the temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative XDG_CACHE_HOME.
    root = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    roots = [Path(root)] if os.path.isabs(root) else []
    with contextlib.suppress(FileNotFoundError):  # no temporary directory is usable
        roots.append(Path(tempfile.gettempdir(), f"accelerator-{os.geteuid()}"))
    return roots


def install_in_cache(build: Build) -> Path:
    """Return the directory of a build in the first cache directory that is usable, and make the build if there is none.

    Raises:
        RuntimeError: No cache directory is usable, or the build's function raised it.
    """
    set_directory = "set XDG_CACHE_HOME to a writable directory"
    if not (roots := cache_roots()):
        raise RuntimeError(f"cannot keep the simulated libraries: no temporary directory is usable; {set_directory}")
    *others, last = roots
    for root in others:
        with contextlib.suppress(OSError):  # the next one may work
            return install(build, root)
    try:
        return install(build, last)
    except OSError as error:
        where = " or ".join(map(str, roots))
        raise RuntimeError(f"cannot keep the simulated libraries in {where}: {error}; {set_directory}") from error


def install(build: Build, root: Path) -> Path:
    """Make a build below a directory if it is not there, and return the build's directory.

    Several processes may call this at once: one makes the build while the others wait.

    Raises:
        OSError: The directory is not usable.
    """
    directory = root / build.name
    if is_intact(build, directory):
        return directory
    parent = directory.parent
    with lock(root, parent):
        if not is_intact(build, directory):
            for left in parent.glob(".building-*"):  # of a killed process: a running one would hold the lock
                shutil.rmtree(left, ignore_errors=True)
            _make(build, directory)
    if not is_intact(build, directory):
        raise _UnusableDirectory(f"{directory} is writable by other users")
    return directory


@contextlib.contextmanager
def lock(root: Path, directory: Path) -> Generator[None, None, None]:
    """Let one process at a time write in a directory, which gets its permissions. The lock ends with its process."""
    import fcntl  # imported late: Windows has none, and this module must be importable there

    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for path in (root, directory) if _has_public_parent(root) else (directory,):
        if path.lstat().st_uid != os.geteuid():
            raise _UnusableDirectory(f"{path} belongs to another user")
        _forbid_others_to_write(path)
    with (directory / ".simulation.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_intact(build: Build, directory: Path) -> bool:
    """Return whether a build is complete and writable only by this user and root."""
    root, parent = directory.parents[1], directory.parent
    try:
        parts = [parent, *(directory / name for name in (*build.directories, *build.files, _CHECKSUMS))]
        if _has_public_parent(root):
            parts.append(root)
        if not all(_is_safe(part.lstat()) for part in parts):
            return False
        return (directory / _CHECKSUMS).read_text(encoding="ascii") == _checksums(build, directory)
    except (OSError, ValueError):
        return False


def _has_public_parent(root: Path) -> bool:
    """Return whether everybody may create files beside this directory: whoever creates it first owns its content."""
    return bool(root.parent.stat().st_mode & stat.S_IWOTH)


def _is_safe(status: os.stat_result) -> bool:
    """Return whether only this user and root may write there."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_MAY_WRITE and not stat.S_ISLNK(status.st_mode)


def _checksums(build: Build, directory: Path) -> str:
    """Return the checksum file of a build."""
    return "".join(f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in build.files)


def _forbid_others_to_write(path: Path) -> None:
    """Take write permission from other users, whatever the umask is."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_MAY_WRITE)


def _make(build: Build, directory: Path) -> None:
    """Make a build in a directory beside the final one, then rename it."""
    scratch_directory = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        for name in build.directories:
            (scratch_directory / name).mkdir(exist_ok=True)
        build.make(scratch_directory)
        (scratch_directory / _CHECKSUMS).write_text(_checksums(build, scratch_directory), encoding="ascii")
        for name in (*build.directories, *build.files, _CHECKSUMS):
            (scratch_directory / name).chmod(0o755 if name in build.directories or name.startswith("bin/") else 0o644)
        if directory.exists():
            # It is damaged or writable by others. Running programs keep the files they have loaded.
            directory.rename(scratch_directory / "replaced")
        scratch_directory.rename(directory)
        shutil.rmtree(directory / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(scratch_directory, ignore_errors=True)
