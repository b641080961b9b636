"""Whether Triton's kernels can run on this machine's devices."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_checks: list[Callable[[], bool]] = []


def register_check(check: Callable[[], bool]) -> Callable[[], bool]:
    """Register a function that returns False if Triton's kernels cannot run here."""
    _checks.append(check)
    return check


def is_usable() -> bool:
    """Whether Triton is installed and no registered check fails."""
    import importlib.util  # here, because `import accelerator` imports this module

    return importlib.util.find_spec("triton") is not None and all(check() for check in _checks)
