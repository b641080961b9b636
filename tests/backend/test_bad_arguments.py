"""Wrong device arguments cause an error on every accelerator, before and after initialization: no crash, no hang, no value."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator

import pytest

import accelerator as acc
from tests.backend import SWITCHES, bad_arguments
from tests.backend.server import Server
from tests.support import plain_environment, simulated_environment
from tests.support.discovery import on_simulated_gpus

pytestmark = pytest.mark.xdist_group("hostacc")

SAMPLE = ("memory_allocated", "set_device_index", "get_device_name")


def _check(results: Iterator[bad_arguments.Outcome], device_type: str) -> None:
    done = list(results)
    assert not bad_arguments.wrong(done, device_type)
    # Each function was called with all arguments in both states.
    functions = {each.function for each in done}
    assert len(done) == len(functions) * len(bad_arguments.STATES) * len(bad_arguments.ARGUMENTS)


def test_every_function_with_a_device_argument_is_listed() -> None:
    tested = {name.partition(",")[0] for name in bad_arguments.ALL_FUNCTIONS}
    for name in acc.__all__:
        function = getattr(acc, name)
        if inspect.isfunction(function):
            annotations = [str(each.annotation) for each in inspect.signature(function).parameters.values()]
            assert name in tested or not {"Device", "AnyDevice"} & set(annotations), name


@pytest.mark.slow
@pytest.mark.parametrize("call", ["torch.hostacc.memory_allocated(57)", "torch.hostacc.memory_allocated(-1)"])
def test_the_backend_crashes_if_an_index_reaches_it(hostacc: Server, call: str) -> None:
    """The tests below rely on this crash to notice an index that was not checked."""
    status, output = hostacc.outcome(f"import torch\ntorch.hostacc.init()\n{call}")
    assert status == -signal.SIGABRT, (status, output)
    assert "was called with the index" in output


def test_sample_of_functions_on_the_backend(hostacc: Server) -> None:
    _check(bad_arguments.outcomes(hostacc, functions=SAMPLE), "hostacc")


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["", *(pytest.param(switch, marks=pytest.mark.exhaustive) for switch in SWITCHES)])
def test_all_functions_on_the_backend(hostacc: Server, switch: str) -> None:
    _check(bad_arguments.outcomes(hostacc, switch), "hostacc")


@pytest.mark.slow
@on_simulated_gpus
def test_all_functions_on_simulated_gpus() -> None:
    _check(bad_arguments.outcomes(Server(simulated_environment(gpus=2)), plugin=False), "cuda")


@pytest.mark.slow
def test_all_functions_under_the_cpu_fallback() -> None:
    _check(bad_arguments.outcomes(Server(plain_environment()), plugin=False), "cpu")
