"""``torch.distributions`` validates nothing that a rehearsal cannot know: values that are not computed count as valid."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..import_hook import after_import
from .missing_values import validating


def install() -> None:
    """Prepare the module when the program imports it."""
    after_import("torch.distributions.distribution", _hook)


def _hook(module: ModuleType) -> None:
    distribution: Any = module.Distribution
    for name in ("__init__", "_validate_sample"):
        setattr(distribution, name, _validating(getattr(distribution, name)))


def _validating(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def run(*arguments: Any, **options: Any) -> Any:
        with validating():
            return validate(*arguments, **options)

    return run
