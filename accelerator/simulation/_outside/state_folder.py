"""The temporary folder that holds a simulated machine's state while a command runs on the machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

_PREFIX = "accelerator-simulation-"
_LOCK = "lock"


@contextlib.contextmanager
def state_folder() -> Generator[Path, None, None]:
    """Yield a new folder and remove it at the end; also remove those whose process was killed before it could.

    Raises:
        RuntimeError: No folder can be made.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix=_PREFIX)
    except OSError as error:
        raise RuntimeError(f"no folder for the state of the machine can be made: {error.strerror or error}") from error
    with temporary as directory:
        folder = Path(directory)
        lock = _lock(folder)
        try:
            _remove_abandoned(folder.parent)
            yield folder
        finally:
            if lock is not None:
                os.close(lock)


def running_states(parent: Path) -> list[Path]:
    """Return the files of the states of all machines whose commands run, those of the nodes of a cluster in their order."""
    found: list[Path] = []
    for folder in _running_folders(parent):
        states = [path for path in folder.glob("state*") if re.fullmatch("state(-[0-9]+)?", path.name)]
        found += sorted(states, key=lambda path: int(path.name.partition("-")[2] or 0))
    return found


def ended_mark(state: Path) -> Path:
    """Return the file that exists while a node has failed and the others go on. Its removal starts the node again."""
    return state.with_name(state.name.replace("state", "ended"))


def ended_marks(parent: Path, node: int) -> list[Path]:
    """Return the marks of the nodes with a number that have failed, of all clusters whose commands run."""
    return [mark for folder in _running_folders(parent) for mark in folder.glob(f"ended-{node}")]


def _running_folders(parent: Path) -> list[Path]:
    found: list[Path] = []
    for lock in sorted(parent.glob(f"{_PREFIX}*/{_LOCK}")):
        with contextlib.suppress(OSError):  # it is another user's, or was removed just now
            if _is_locked(lock):
                found.append(lock.parent)
    return found


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process and the command, which inherits the descriptor, have ended."""
    if sys.platform != "linux":  # nothing is simulated there
        return None
    import fcntl

    # The file has its name only once it is locked, so that nobody takes the folder for an abandoned one.
    unlocked = folder / f"{_LOCK}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.set_inheritable(descriptor, True)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # it is another user's, or another process removes it now
            if not _is_locked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _is_locked(lock: Path) -> bool:
    if sys.platform != "linux":
        return True
    import fcntl

    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
