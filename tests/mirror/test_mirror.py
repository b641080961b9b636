"""Differential: single calls to ``torch.accelerator`` and to this package while nothing is initialized, each in a child forked
for it, and what the call left behind.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import accelerator as acc
from tests.mirror.deviations import TAKES_DEVICE, ActsAs, Raises, Works, expected
from tests.mirror.mirroring import ARGUMENTS, known_to_torch, outcome
from tests.programs import in_child
from tests.support import run, simulated_environment

# Calls that take a stream, and calls that share all their code with one that is tested.
SAME_CODE = ("set_stream", "set_device_idx", "max_memory_allocated", "max_memory_reserved", "memory_reserved", "memory_stats")
# Results that each process draws at initialization. These initialize, in torch too.
DRAWN = ("random.initial_seed", "random.get_rng_state", "random.get_rng_state_all")
INITIALIZE = ("set_device_index", "set_device_idx", "device_index", "current_stream")


def observe(api: Any, call: str, argument: Any) -> tuple[str, Any, bool]:
    """Return how a call ended, with what in a form that can be pickled, and whether the driver is initialized then."""
    ending, value = outcome(api, call, argument)
    value = [error.__name__ for error in value.__mro__] if ending == "raises" else repr(value)
    return ending, value, not acc.is_fork_safe()


def differences() -> list[str]:
    """Everything that differs from torch and is not in the table, or initializes without leave."""
    differing: list[str] = []
    # Imports that each child would otherwise do for itself.
    acc.device_count()
    for name in known_to_torch():
        operator.attrgetter(name)(acc)
    for call in known_to_torch():
        if call in SAME_CODE + DRAWN:
            continue
        for argument in ARGUMENTS if call in TAKES_DEVICE else (None,):
            ending, value, is_initialized = in_child(lambda call=call, argument=argument: observe(acc, call, argument))
            deviation = expected(call, argument, initialized=False)
            where = f"{call}({argument!r}), {deviation}: {ending} {value}"
            if is_initialized and (call not in INITIALIZE or ending == "raises"):
                differing.append(f"{where}, and initialized the driver")
            if isinstance(deviation, Raises):
                if (ending, value[0]) != ("raises", deviation.error.__name__):
                    differing.append(where)
                continue
            if isinstance(deviation, Works):
                if ending != "gives":
                    differing.append(where)
                continue
            theirs = deviation.argument if isinstance(deviation, ActsAs) else argument
            their_ending, their_value, _ = in_child(lambda call=call, theirs=theirs: observe(torch.accelerator, call, theirs))
            agree = ending == their_ending and (value == their_value if ending == "gives" else value[0] in their_value)
            if not agree:
                differing.append(f"{where}, torch {their_ending} {their_value}")
    return differing


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch for simulated GPUs")
def test_every_call_while_nothing_is_initialized() -> None:
    code = "from tests.mirror.test_mirror import differences\nprint(*differences(), sep='\\n')"
    assert run(code, simulated_environment(gpus=2), timeout=400).strip() == ""
