"""The pytest plug-in: a whole session, or single tests, on simulated GPUs.

``pytest --simulate-gpus 2`` runs a whole session on a machine with two simulated GPUs.
``@pytest.mark.simulated_machine(...)`` takes the parameters of `accelerator.simulation.environment` and runs one test on a
simulated machine of its own, in a forked process. That process sets up and tears down all fixtures of the test, including those
of session and module scope. With ``--pdb`` or ``--trace`` the test runs in place if pytest already runs on such a machine.
``--simulate-races``, and ``races=`` of such a machine, fail a test whose body, or a process that it starts, has a race.
A mark takes ``memory``, ``name`` and ``races`` from the session if it does not say them.
``@pytest.mark.min_gpus(2)`` skips a test if fewer GPUs are visible.
The options of a session may be in its configuration file too: ``simulate_gpus = 2``. The command line takes precedence.

Every pytest run loads this module if the package is installed. Until an option or mark uses it, it does nothing and imports
neither torch nor NVML's binding.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from . import _settings
from ._pytest.keys import IN_PLACE, SERVER_NAME, WRONG_MARK

if TYPE_CHECKING:
    from ._pytest import machines, session

_session: pytest.StashKey[session.SimulatedSession] = pytest.StashKey()
_machines: pytest.StashKey[machines.Machines] = pytest.StashKey()

_MARKS = (
    "min_gpus(n): skip the test if fewer than n GPUs are visible (accelerator)",
    "simulated_machine(...): run the test on a simulated machine of its own; takes the parameters of "
    "accelerator.simulation.environment (accelerator)",
    "allow_races(reason): let the test pass although its body has a race (accelerator)",
)


class _Option(NamedTuple):
    """An option of a session on simulated GPUs, on the command line and in the configuration file."""

    name: str
    help: str
    type: Literal["string", "bool"]
    arguments: dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a session on simulated GPUs."""
    group = parser.getgroup("accelerator", "simulated GPUs")
    for name, text, kind, arguments in _OPTIONS:
        group.addoption(f"--simulate-{name}", help=text, **arguments)
        parser.addini(f"simulate_{name}", text, type=kind, default=None)
    # Only the pytest on the simulated machine gets this option. Its arguments also contain the options above.
    group.addoption("--on-simulated-gpus", action="store_true", help=argparse.SUPPRESS)


def _parse_gpus(text: str) -> Any:
    try:
        return _settings.find("gpus").type.parse([text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_OPTIONS = (
    _Option("gpus", "run all tests on a machine with N simulated GPUs", "string", {"type": _parse_gpus, "metavar": "N"}),
    _Option("memory", "memory of each simulated GPU, such as 16GiB (8GiB)", "string", {"metavar": "SIZE"}),
    _Option("name", "name of each simulated GPU, such as H100, which sets its memory", "string", {"metavar": "NAME"}),
    _Option(
        "races",
        "fail tests whose bodies have a race between streams or the host",
        "bool",
        {"action": "store_true", "default": None},
    ),
)


def _read_options(config: pytest.Config, options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `environment` that the options of a session, or its configuration file, say."""
    values: dict[str, Any] = {}
    for option in _OPTIONS:
        value = getattr(options, f"simulate_{option.name}")
        if value is None:
            value = config.getini(f"simulate_{option.name}") or None
        if value is not None:
            values[option.name] = value
    if isinstance(values.get("gpus"), str):
        try:
            values["gpus"] = _parse_gpus(values["gpus"])
        except argparse.ArgumentTypeError as error:
            raise pytest.UsageError(f"simulate_gpus in {config.inipath}: {error}") from None
    if values.get("races"):
        values["races"] = "report"
    return values


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Prepare the pytest on simulated GPUs that replaces this one, before capture begins and test modules are imported."""
    options = early_config.known_args_namespace
    machine = _read_options(early_config, options)
    if "gpus" in machine and not options.on_simulated_gpus:
        from ._pytest.session import take_over

        early_config.stash[_session] = take_over(early_config, parser, args, machine)
    for option, reason in (("memory", "the number of GPUs with this memory"), ("name", "the number of GPUs with this name")):
        if "gpus" not in machine and getattr(options, f"simulate_{option}") is not None:
            raise pytest.UsageError(f"--simulate-{option} needs --simulate-gpus N, {reason}")
    if "gpus" not in machine and options.simulate_races:
        raise pytest.UsageError("--simulate-races needs --simulate-gpus N: races are found on simulated GPUs")
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the pytest that replaces this one."""
    simulated = config.stash.get(_session, None)
    if simulated is None and not config.option.on_simulated_gpus and "gpus" in _read_options(config, config.option):
        raise pytest.UsageError(f"a conftest loaded the plug-in, which is too late for --simulate-gpus: add '-p {__name__}'")
    return None if simulated is None else simulated.run()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report that the session runs on simulated GPUs."""
    machine = _read_options(config, config.option)
    if "gpus" not in machine:
        return None
    default = f"{int(_settings.find('memory').native_default) >> 30}GiB" if "name" not in machine else None
    of = ", ".join(filter(None, (machine.get("name"), machine.get("memory", default))))
    return f"simulated GPUs: {machine['gpus']} of {of}{', with race detection' * ('races' in machine)}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assign machines to the tests with a simulated machine. Skip tests that need more GPUs than are visible."""
    if config.option.collectonly:
        return
    is_server = config.pluginmanager.has_plugin(SERVER_NAME)
    on_machines = [] if is_server else [item for item in items if item.get_closest_marker("simulated_machine")]
    if on_machines:
        from ._pytest.machines import Machines

        config.stash[_machines] = Machines(session, on_machines, _read_options(config, config.option))
    for item in items:
        has_machine = not is_server and item.get_closest_marker("simulated_machine") and IN_PLACE not in item.stash
        if item.get_closest_marker("min_gpus") and not has_machine:
            _require_gpus(item)


def _require_gpus(item: pytest.Item) -> None:
    from .. import discovery

    for mark in item.iter_markers("min_gpus"):
        needed = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else mark.kwargs.get("n")
        if type(needed) is not int or len(mark.args) + len(mark.kwargs) != 1:
            item.stash[WRONG_MARK] = "min_gpus takes the number of GPUs, as in min_gpus(2)"
            return
        count = discovery.device_count()
        if count < needed:
            reason = "" if count else f": {discovery.unavailable_reason()}"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {count or 'none'} visible{reason}"))


@pytest.hookimpl(hookwrapper=True, trylast=True)  # the innermost wrapper: pytest-cov's combines the data after this one
def pytest_runtestloop(session: pytest.Session) -> Generator[None, None, None]:
    """End the simulated machines after the last test, so that plug-ins of this session can read what they wrote."""
    yield
    assigned = session.config.stash.get(_machines, None)
    if assigned is not None:
        assigned.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on its simulated machine, if it has one."""
    assigned = item.config.stash.get(_machines, None)
    return None if assigned is None else assigned.run(item, nextitem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with a wrong mark, before its fixtures are set up."""
    problem = item.stash.get(WRONG_MARK, None)
    if problem is not None:
        pytest.fail(problem, pytrace=False)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail a test whose body, or a process that it starts, has a race, if the machine finds races."""
    if _settings.read("races") is None:
        yield
        return
    from ._pytest import race_failures

    with race_failures.of_body(item) as problem_of_body:
        outcome = yield
        problem = problem_of_body()
    if problem is not None and outcome.excinfo is None:
        try:
            pytest.fail(problem, pytrace=False)
        except pytest.fail.Exception as failure:
            outcome.force_exception(failure) if hasattr(outcome, "force_exception") else _replace(outcome, failure)


def _replace(outcome: Any, failure: BaseException) -> None:
    """Let an outcome of pluggy before 1.1 be an error."""
    outcome._result, outcome._excinfo = None, (type(failure), failure, failure.__traceback__)
