"""The pytest plug-in: a whole session, or single tests, on simulated GPUs.

``pytest --simulate-gpus 2`` runs everything on a machine with two simulated GPUs. ``@pytest.mark.simulated_machine(...)``,
with the parameters of `accelerator.simulation.environment`, runs one test on a machine of its own, in a process forked for
it; its fixtures, those of the session and of the module too, are set up and torn down there. ``@pytest.mark.min_gpus(2)``
skips a test where there are fewer.

Every pytest run of an environment with this package loads this module, so until it is asked for something it does nothing
and imports neither torch nor NVML's binding.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ._pytest import machines, session

_session: pytest.StashKey[session.SimulatedSession] = pytest.StashKey()
_machines: pytest.StashKey[machines.Machines] = pytest.StashKey()

SERVER_NAME = "accelerator-simulated-machine"

_MARKS = (
    "min_gpus(n): skip the test where fewer than n GPUs are visible (accelerator)",
    "simulated_machine(...): run the test on a simulated machine of its own, described by the parameters of "
    "accelerator.simulation.environment (accelerator)",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a session on simulated GPUs."""
    group = parser.getgroup("accelerator", "simulated GPUs")
    group.addoption("--simulate-gpus", type=int, metavar="N", help="run all tests on a machine with N simulated GPUs")
    group.addoption("--simulate-memory", metavar="SIZE", help="memory of each, such as 16GiB (8GiB)")
    # Given to the pytest that runs on the simulated machine, which has the options above among its arguments as well.
    group.addoption("--on-simulated-gpus", action="store_true", help="==SUPPRESS==")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Put a pytest on simulated GPUs in this one's place, before capture begins and anything of the tests is imported."""
    options = early_config.known_args_namespace
    if options.simulate_gpus is None and options.simulate_memory is not None:
        raise pytest.UsageError("--simulate-memory says how large the GPUs of --simulate-gpus are, which is missing")
    if options.simulate_gpus is not None and not options.on_simulated_gpus:
        from ._pytest.session import take_over

        early_config.stash[_session] = take_over(early_config, parser, args)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the pytest that took this one's place."""
    simulated = config.stash.get(_session, None)
    if simulated is None and config.option.simulate_gpus is not None and not config.option.on_simulated_gpus:
        raise pytest.UsageError(f"--simulate-gpus comes too late for a plug-in that a conftest loads: add '-p {__name__}'")
    return None if simulated is None else simulated.run()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that the session runs on simulated GPUs."""
    option = config.option
    if option.simulate_gpus is None:
        return None
    return f"simulated GPUs: {option.simulate_gpus} of {option.simulate_memory or '8GiB'}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the tests that want a machine, and mark those that cannot run as skipped."""
    if config.option.collectonly:
        return
    is_server = config.pluginmanager.has_plugin(SERVER_NAME)
    elsewhere = [] if is_server else [item for item in items if item.get_closest_marker("simulated_machine")]
    if elsewhere:
        from ._pytest.machines import Machines

        config.stash[_machines] = Machines(session, elsewhere)
    for item in items:
        if item.get_closest_marker("min_gpus") and (is_server or not item.get_closest_marker("simulated_machine")):
            _require_gpus(item)


def _require_gpus(item: pytest.Item) -> None:
    from .. import discovery

    for mark in item.iter_markers("min_gpus"):
        needed = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else mark.kwargs.get("n")
        if type(needed) is not int or len(mark.args) + len(mark.kwargs) != 1:
            raise pytest.UsageError(f"{item.nodeid}: min_gpus takes the number of GPUs, as in min_gpus(2)")
        count = discovery.device_count()
        if count < needed:
            reason = "" if count else f": {discovery.unavailable_reason()}"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {count or 'none'} visible{reason}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on its machine, if it wants one."""
    assigned = item.config.stash.get(_machines, None)
    return None if assigned is None else assigned.run(item, nextitem)
