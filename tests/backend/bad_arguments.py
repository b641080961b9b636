"""Call every function that takes a device argument with wrong arguments, before and after initialization.

``outcomes`` starts one child for each function and state. The child calls the function with one argument after the other. If it
crashes or exceeds the deadline, another child continues with the next argument.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

import accelerator as acc
from tests.backend.server import Server
from tests.runtime.device_arguments import FUNCTIONS, MORE_FUNCTIONS, NEGATIVE_IS_FINE

ALL_FUNCTIONS = {**FUNCTIONS, **MORE_FUNCTIONS}
STATES = ("before", "after")
# A child's time for all arguments of one function. It needs milliseconds, but the machine may be busy.
DEADLINE_S = 300.0

# The arguments, grouped by the errors that they may raise. Negative indices are last, because some functions then initialize.
OUT_OF_RANGE = ("count", "57", "2**40")
WRONG_KIND = ("True", "1.0", "b'0'")
NO_DEVICE = ("''", "'1_0'", "'other:9'")
OTHER_TYPE = ("torch.device('xpu', 0)",)
NEGATIVE = ("-1", "-2")
ARGUMENTS = ("0", *WRONG_KIND, *NO_DEVICE, *OTHER_TYPE, "'cuda:57'", "'hostacc:57'", *OUT_OF_RANGE, *NEGATIVE)


class Outcome(NamedTuple):
    """The outcome of one call.

    Attributes:
        result: "value", the name of the error's type, "crash" or "hang".
        message: the error's message, or what the child printed.
        changed: whether the call raised and yet changed the current device or initialized the accelerator.
    """

    function: str
    state: str
    argument: str
    result: str
    message: str
    changed: bool = False


def child(function: str, state: str, start: int) -> None:
    """Call a function with each argument from index ``start`` on, and print a line before and after each call."""
    warnings.simplefilter("ignore")
    count = acc.device_count()
    if state == "after":
        acc.init()
    # Index 0 is valid and may initialize the accelerator, so another child calls the function with the other arguments.
    for argument in ARGUMENTS[start:] if start else ARGUMENTS[:1]:
        device = eval(argument, {"torch": torch, "count": count})
        before = _state()
        print(json.dumps(argument), flush=True)
        result, message = "value", ""
        try:
            ALL_FUNCTIONS[function](device)
        except Exception as error:
            result, message = type(error).__name__, str(error)
        changed = result != "value" and argument != "0" and _state() != before
        print(json.dumps([result, message, changed]), flush=True)


def _state() -> tuple[Any, ...]:
    return acc.is_initialized(), acc.current_device_index()


def outcomes(
    server: Server,
    *switches: str,
    functions: Iterable[str] = ALL_FUNCTIONS,
    states: Iterable[str] = STATES,
    plugin: bool = True,
) -> Iterator[Outcome]:
    """Yield the outcome of each function with each argument in each state."""
    for function in functions:
        for state in states:
            start = 0
            while start < len(ARGUMENTS):
                program = f"from tests.backend import bad_arguments\nbad_arguments.child({function!r}, {state!r}, {start})"
                status, output = server.outcome(program, *switches, deadline_s=DEADLINE_S, plugin=plugin)
                done = list(_parse(function, state, status, output))
                yield from done
                assert done, (function, state, status, output)
                start += len(done)


def _parse(function: str, state: str, status: int | None, output: str) -> Iterator[Outcome]:
    lines: list[Any] = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    for argument, result in zip(lines[::2], lines[1::2], strict=False):
        yield Outcome(function, state, argument, *result)
    if len(lines) % 2:
        yield Outcome(function, state, lines[-1], "hang" if status is None else "crash", f"{status}: {output[-500:]}")


def wrong(results: Iterable[Outcome], device_type: str) -> list[Outcome]:
    """Return the outcomes that are wrong: crashes, hangs, changes, values, and errors of an undocumented type."""
    results = list(results)
    # If a valid index raises, the accelerator does not support the function. This error may precede the check of the argument.
    valid = {(each.function, each.state): each for each in results if each.argument == "0"}
    return [each for each in results if each.changed or each.result not in _allowed(each, valid, device_type)]


def _allowed(outcome: Outcome, valid: dict[tuple[str, str], Outcome], device_type: str) -> set[str]:
    function, state, argument = outcome[:3]
    of_valid = valid[function, state].result
    unavailable = {of_valid} - {"value", "crash", "hang"}
    if argument == "0":
        # Raised if the accelerator does not support the function, or because the state for set_rng_state is wrong.
        return {"value", "RuntimeError", "NotSupported", "NotImplementedError"}
    if argument in WRONG_KIND:
        return {"TypeError"} | unavailable
    if argument in NO_DEVICE:
        return {"RuntimeError"} | unavailable
    if argument in OTHER_TYPE:
        return {"ValueError"} | unavailable
    if argument == "'hostacc:57'" and device_type != "hostacc":
        return {"RuntimeError"} | unavailable  # torch does not know this device type
    if argument == "'cuda:57'":
        return {"ValueError"} | unavailable
    if argument in NEGATIVE and function in NEGATIVE_IS_FINE:
        return {of_valid}
    if device_type == "cpu" and argument not in NEGATIVE:
        return {of_valid}  # under the CPU fallback every index that is not negative names the CPU
    return {"ValueError"} | unavailable
