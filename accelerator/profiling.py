"""Named ranges in the timelines of profilers: NVIDIA's (NVTX), and those of vendors with their own ranges."""

from __future__ import annotations

import functools
from contextlib import ContextDecorator
from typing import Any

from ._torch import bindings, state, tracing
from ._torch.tracing import traced_as

__all__ = ["annotate", "range_pop", "range_push"]


@traced_as(tracing.nothing)
def range_push(msg: str, domain: str | None = None, category: str | None = None) -> None:
    """Begin a range, which ``range_pop`` with the same domain ends. ``annotate`` does both.

    Args:
        msg: the range's name.
        domain: a group of ranges with its own stack. Without the package ``nvtx`` the range is in the default domain.
        category: a label inside a domain, ignored without a domain.

    Does nothing if neither torch nor the accelerator's module has ranges, and in code that ``torch.compile`` compiles.

    Example:
        >>> acc.range_push("forward")
        >>> acc.range_pop()
    """
    if not isinstance(msg, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"The name of a range must be a str, not {type(msg).__name__}")
    nvtx = None if domain is None else _nvtx()
    if nvtx is not None:
        nvtx.push_range(message=msg, domain=domain, category=category)
    elif bindings.nvtx is not None:
        bindings.nvtx.rangePushA(msg)
    elif (ranges := _ranges_of_vendor()) is not None:
        ranges.range_push(msg)


@traced_as(tracing.nothing)
def range_pop(domain: str | None = None) -> None:
    """End the innermost range.

    Args:
        domain: the domain that was passed to ``range_push``.

    Does nothing if neither torch nor the accelerator's module has ranges, and in code that ``torch.compile`` compiles.

    Example:
        >>> acc.range_push("forward")
        >>> acc.range_pop()
    """
    if domain is not None and not isinstance(domain, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"The domain of a range must be a str, not {type(domain).__name__}")
    nvtx = None if domain is None else _nvtx()
    if nvtx is not None:
        nvtx.pop_range(domain=domain)
    elif bindings.nvtx is not None:
        bindings.nvtx.rangePop()
    elif (ranges := _ranges_of_vendor()) is not None:
        ranges.range_pop()


def _ranges_of_vendor() -> Any:
    """Return the module for ranges of an accelerator that has its own, or None."""
    runtime = state.current(allow_bad_fork=True)
    name = runtime.vendor.range_module
    return getattr(runtime.device_module, name, None) if name else None


class _Annotation(ContextDecorator):
    """A range as a re-entrant context manager and decorator."""

    def __init__(self, msg: str, domain: str | None, category: str | None) -> None:
        self._range = (msg, domain, category)

    def __enter__(self) -> None:
        range_push(*self._range)

    def __exit__(self, *exc_info: object) -> None:
        range_pop(self._range[1])


def annotate(msg: str, domain: str | None = None, category: str | None = None) -> _Annotation:
    """Return a context manager and decorator that puts a range around its work.

    Args:
        msg: the range's name.
        domain: as for ``range_push``.
        category: as for ``range_push``.

    Returns:
        The context manager, which is re-entrant. The range ends on exceptions too.

    Example:
        >>> @acc.annotate("double")
        ... def double(x):
        ...     return 2 * x
        >>> with acc.annotate("step"):
        ...     double(4)
        8
    """
    return _Annotation(msg, domain, category)


@functools.cache
def _nvtx() -> Any:
    """Return the package nvtx, or None without it. All its versions have functions for ranges; its domains' methods differ."""
    try:
        import nvtx  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return nvtx  # pyright: ignore[reportUnknownVariableType]
