"""Differential: single calls to ``torch.accelerator`` and to this package while nothing is initialized, each in a child forked
for it, and what the call left behind.
"""

from __future__ import annotations

import operator
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc
from tests.mirror.deviations import TAKES_DEVICE, ActsAs, Raises, Works, expected
from tests.mirror.mirroring import ARGUMENTS, known_to_torch, outcome
from tests.support import run, simulated_environment

# What takes a stream, and what shares all its code with a call that is looked at.
SAME_CODE = ("set_stream", "set_device_idx", "max_memory_allocated", "max_memory_reserved", "memory_reserved", "memory_stats")
# What each process draws anew when it initializes, which these do, in torch too.
DRAWN = ("random.initial_seed", "random.get_rng_state", "random.get_rng_state_all")
INITIALIZE = ("set_device_index", "set_device_idx", "device_index", "current_stream")


def in_child(function: Callable[[], Any]) -> Any:
    """What a function gives in a forked child."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writable, "wb") as file:
                pickle.dump(function(), file)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        answer = pickle.loads(file.read())
    os.waitpid(child, 0)
    return answer


def observe(api: Any, call: str, argument: Any) -> tuple[str, Any, bool]:
    """A call's outcome, in a form that travels, and whether the driver is up after it."""
    kind, value = outcome(api, call, argument)
    seen = [error.__name__ for error in value.__mro__] if kind == "raises" else repr(value)
    return kind, seen, not acc.is_fork_safe()


def differences() -> list[str]:
    """Everything that differs from torch and is not in the table, or initializes without leave."""
    found: list[str] = []
    # Imports that each child would otherwise do for itself.
    acc.device_count()
    for name in known_to_torch():
        operator.attrgetter(name)(acc)
    for call in known_to_torch():
        if call in SAME_CODE + DRAWN:
            continue
        for argument in ARGUMENTS if call in TAKES_DEVICE else (None,):
            kind, seen, is_up = in_child(lambda call=call, argument=argument: observe(acc, call, argument))
            deviation = expected(call, argument, initialized=False)
            where = f"{call}({argument!r}), {deviation}: {kind} {seen}"
            if is_up and (call not in INITIALIZE or kind == "raises"):
                found.append(f"{where}, and initialized the driver")
            if isinstance(deviation, Raises):
                if (kind, seen[0]) != ("raises", deviation.error.__name__):
                    found.append(where)
                continue
            if isinstance(deviation, Works):
                if kind != "gives":
                    found.append(where)
                continue
            theirs = deviation.argument if isinstance(deviation, ActsAs) else argument
            their_kind, their_seen, _ = in_child(lambda call=call, theirs=theirs: observe(torch.accelerator, call, theirs))
            agree = kind == their_kind and (seen == their_seen if kind == "gives" else seen[0] in their_seen)
            if not agree:
                found.append(f"{where}, torch {their_kind} {their_seen}")
    return found


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch for simulated GPUs")
def test_every_call_while_nothing_is_initialized() -> None:
    code = "from tests.mirror.test_mirror import differences\nprint(*differences(), sep='\\n')"
    assert run(code, simulated_environment(gpus=2), timeout=400).strip() == ""
