"""Named ranges in the timelines that NVIDIA's profilers draw (NVTX)."""

from __future__ import annotations

import functools
from contextlib import ContextDecorator
from typing import Any

from ._torch import bindings, tracing
from ._torch.tracing import traced_as

__all__ = ["annotate", "range_pop", "range_push", "supports_nvtx_domain"]

supports_nvtx_domain = True
"""That ``range_push`` and ``range_pop`` take a domain, which DeepSpeed asks before it names its own."""


@traced_as(tracing.nothing)
def range_push(msg: str, domain: str | None = None, category: str | None = None) -> None:
    """Begin a range; ``range_pop`` with the same domain ends it. ``annotate`` cannot forget to.

    Args:
        msg: the range's name.
        domain: a group of ranges that the profiler shows apart, with a stack of its own. Needs the package ``nvtx``; without
            it, the range goes to the default domain.
        category: a label inside a domain; of no effect without one.

    Does nothing where torch was built without NVTX, and in code that ``torch.compile`` compiles.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.range_push("forward")
        >>> acc.range_pop()
    """
    if not isinstance(msg, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"A range's name is a string, not {type(msg).__name__}")
    group = None if domain is None else _domain(domain)
    if group is not None:
        group.push_range(message=msg, category=category)
    elif bindings.nvtx is not None:
        bindings.nvtx.rangePushA(msg)


@traced_as(tracing.nothing)
def range_pop(domain: str | None = None) -> None:
    """End the range that was begun last.

    Args:
        domain: the domain of the range, as it was given to ``range_push``.

    Does nothing where torch was built without NVTX, and in code that ``torch.compile`` compiles.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.range_push("forward")
        >>> acc.range_pop()
    """
    group = None if domain is None else _domain(domain)
    if group is not None:
        group.pop_range()
    elif bindings.nvtx is not None:
        bindings.nvtx.rangePop()


class _Annotation(ContextDecorator):
    """Begins a range and ends the same one, whatever happens in it; may be entered while it is entered."""

    def __init__(self, msg: str, domain: str | None, category: str | None) -> None:
        self._range = (msg, domain, category)

    def __enter__(self) -> None:
        range_push(*self._range)

    def __exit__(self, *exc_info: object) -> None:
        range_pop(self._range[1])


def annotate(msg: str, domain: str | None = None, category: str | None = None) -> _Annotation:
    """Return a context manager, which also decorates functions, that makes a range of what is done in it.

    Args:
        msg: the range's name.
        domain: as for ``range_push``.
        category: as for ``range_push``.

    Returns:
        The context manager. The range ends on exceptions too; it can be entered again while it is entered.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> @acc.annotate("double")
        ... def double(x):
        ...     return 2 * x
        >>> with acc.annotate("step"):
        ...     double(4)
        8
    """
    return _Annotation(msg, domain, category)


@functools.cache
def _domain(name: str) -> Any:
    """The package nvtx's object for a domain, or None without the package."""
    try:
        import nvtx  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return nvtx.get_domain(name)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
