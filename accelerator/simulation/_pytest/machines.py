"""The simulated machines of a session: one server process for each machine, which forks one process for each test.

Which machine a test has is read here, of the arguments of its mark ``simulated_machine``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .. import _settings
from .._outside.environment import environment, unavailable_reason
from .._outside.guard import guarded
from .._outside.state_folder import state_folder
from . import debugging, python
from .channel import Channel, Order, Outcome
from .keys import IN_PLACE, WRONG_MARK

# A server holds torch and the test modules in memory: the least recently used one ends before one more starts.
_MAXIMUM_SERVERS = 4

_GRACE_S = 30.0
_CONFIGURE_NODE = "pytest_configure_node"  # of pytest-xdist: a plug-in gives workers what it has drawn, or a port
_PLAIN = (bool, int, float, str, type(None))
_SIGNATURE = inspect.signature(environment)

# A machine is identified by the environment of its processes.
_Machine = frozenset[tuple[str, str]]
_machine = pytest.StashKey[_Machine]()
_arguments = pytest.StashKey[Mapping[str, Any]]()


class Machines:
    """The simulated machines of a session and their tests."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item], of_session: Mapping[str, Any]) -> None:
        self._config = session.config
        self._parameters: dict[_Machine, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._paths: dict[_Machine, dict[str, None]] = {}
        self._servers: dict[_Machine, _Server] = {}
        self._started = 0
        self._directory: Path | None = None
        self._guard = contextlib.ExitStack()
        self._guard_variables: dict[str, str] = {}
        session.config.add_cleanup(self.close)
        # A copy: a test that changes os.environ must not change later machines.
        self._base = dict(os.environ)
        races = _settings.read("races")  # if a command runs the session on simulated GPUs
        self._of_session = {**({"races": races} if races else {}), **of_session}
        reason = unavailable_reason()
        for item in items:
            problem = reason or self._find_machine(item)
            if problem is not None:
                item.add_marker(pytest.mark.skip(reason=f"cannot simulate GPUs: {problem}"))

    def _find_machine(self, item: pytest.Item) -> str | None:
        """Find the machine that a test's mark describes; return why it cannot be simulated, if so."""
        mark = item.get_closest_marker("simulated_machine")
        assert mark is not None
        # What the mark does not say is the session's; but a name has its own memory.
        excluded = {"gpus", *mark.kwargs, *(["memory"] if "name" in mark.kwargs else [])}
        inherited = {name: value for name, value in self._of_session.items() if name not in excluded}
        keywords = {"base": self._base, **inherited, **mark.kwargs}
        try:
            arguments = _SIGNATURE.bind(*mark.args, **mark.kwargs).arguments
        except TypeError as error:
            item.stash[WRONG_MARK] = f"simulated_machine: {error}; the arguments are {', '.join(_SIGNATURE.parameters)}"
            return None
        try:
            processes = environment(*mark.args, **keywords)
        except (TypeError, ValueError) as error:
            item.stash[WRONG_MARK] = f"simulated_machine: {error}"
            return None
        except RuntimeError as error:
            return str(error)
        if debugging.wants_debugger(self._config):
            has_own_state = arguments.get("state") is not None
            if debugging.is_this_machine(processes, self._base, has_own_state=has_own_state):
                item.stash[IN_PLACE] = True
                return None
        machine = frozenset(processes.items())
        races = {"races": keywords["races"]} if "races" in keywords else {}
        item.stash[_machine], item.stash[_arguments] = machine, {**arguments, **races}
        self._parameters[machine] = mark.args, keywords
        self._paths.setdefault(machine, {})[str(item.path)] = None
        return None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test on its machine, if it has one, and report its outcome. Implements ``pytest_runtest_protocol``."""
        machine = item.stash.get(_machine, None)
        if machine is None:
            return None
        hook = item.config.hook
        if hasattr(hook, "pytest_timeout_cancel_timer"):
            # pytest-timeout runs a timer in the test's own process; this one would include the start of the server.
            hook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        started = time.perf_counter()
        outcome = self._server(machine).run(item.nodeid)
        self._pass_on(item, outcome, time.perf_counter() - started)
        _tear_down(item, nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _server(self, machine: _Machine) -> _Server:
        server = self._servers.pop(machine, None)
        if server is None or server.is_spent:
            while len(self._servers) >= _MAXIMUM_SERVERS:
                self._end([self._servers.pop(next(iter(self._servers)))])
            server = self._start(machine)
        self._servers[machine] = server  # the last entry is the most recently used
        return server

    def _start(self, machine: _Machine) -> _Server:
        if self._directory is None:
            self._directory = self._guard.enter_context(state_folder())
            self._guard_variables = self._guard.enter_context(guarded())
        self._started += 1
        arguments, keywords = self._parameters[machine]
        is_own_state = keywords.get("state") is None
        if is_own_state:
            keywords = {**keywords, "state": self._directory / f"state{self._started}"}
        config = self._config
        factory: Any = getattr(config, "_tmp_path_factory", None)
        directory = config.invocation_params.dir
        order = Order(
            arguments=[os.fspath(argument) for argument in config.invocation_params.args],
            paths=list(self._paths[machine]),
            basetemp=factory and str(factory.getbasetemp() / f"simulated{self._started}"),
            workerinput=getattr(config, "workerinput", None) or _workerinput(config),
            options={name: value for name, value in vars(config.option).items() if isinstance(value, _PLAIN)},
            has_faults=is_own_state and bool(keywords.get("faults")),
        )
        return _Server(order, {**environment(*arguments, **keywords), **self._guard_variables}, directory)

    def _pass_on(self, item: pytest.Item, outcome: Outcome, duration: float) -> None:
        """Forward the reports of a test, and report how its process ended if they are incomplete.

        Args:
            item: the test.
            outcome: how its process ended.
            duration: seconds that the session waited for it. Time outside of the test's phases, such as the start
                of the server, counts as set-up.
        """
        config, missing = item.config, ["setup", "call", "teardown"]
        reports: list[pytest.TestReport] = []
        exit_request: tuple[str, int | None] | None = None
        for record_type, value in _records(outcome.records):
            if record_type == "warning":
                _pass_on_warning(config, *value)
            elif record_type == "exit":
                exit_request = value
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=value)
                if report.when in missing:
                    del missing[: missing.index(report.when) + 1]
                reports.append(report)
        if exit_request is None and (outcome.problem is not None or outcome.status or "teardown" in missing):
            reports += _failure(item, outcome, missing)
        if reports:
            reports[0].duration += max(0.0, duration - sum(report.duration for report in reports))
        for report in reports:
            if report.failed and debugging.wants_debugger(config):
                report.sections.append(("--pdb", debugging.note(item.stash[_arguments], item.nodeid)))
            item.ihook.pytest_runtest_logreport(report=report)
        if exit_request is not None:
            pytest.exit(*exit_request)

    def _end(self, servers: list[_Server]) -> None:
        for server in servers:
            server.disconnect()
        for server in servers:
            server.wait()

    def close(self) -> None:
        """End all servers."""
        self._end(list(self._servers.values()))
        self._servers.clear()
        self._directory = None
        self._guard.close()


def _workerinput(config: pytest.Config) -> dict[str, Any]:
    """Return what a worker of pytest-xdist gets from its session, for a server of a session without workers."""
    # pytest-cov adds its own entries: by these the worker knows that it writes its data where the session reads them.
    directory = str(config.invocation_params.dir)
    of_coverage = {"cov_master_host": socket.gethostname(), "cov_master_topdir": directory, "cov_master_rsync_roots": []}
    workerinput = {"workerid": "master", "workercount": 1, "testrunuid": "", "mainargv": sys.argv, **of_coverage}
    gateway = SimpleNamespace(id="master", spec=SimpleNamespace(popen=True, chdir=None))
    manager = SimpleNamespace(config=config, roots=[], specs=[gateway.spec], testrunuid="")
    node = SimpleNamespace(config=config, workerinput=workerinput, gateway=gateway, nodemanager=manager)
    hook: Any = getattr(config.hook, _CONFIGURE_NODE, None)
    plugins = [implementation.plugin for implementation in hook.get_hookimpls()] if hook else []
    for plugin in plugins:
        others = [other for other in plugins if other is not plugin]
        # A plug-in that prepares workers only if the session has some fails here. The server then does without its entries.
        with contextlib.suppress(Exception):
            config.pluginmanager.subset_hook_caller(_CONFIGURE_NODE, others)(node=node)
    return workerinput


class _Server:
    """A pytest on a simulated machine that has collected its tests and runs those requested by name."""

    def __init__(self, order: Order, machine: dict[str, str], directory: Path) -> None:
        self._has_served = False
        self._problem: str | None = None  # set once it has ended
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                python.command(f"{__package__}.server", "main", str(its.fileno())),
                env=machine,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        self._channel = Channel(ours)
        self._channel.send(order)

    @property
    def is_spent(self) -> bool:
        """Whether it ended after running tests, so that a new server may run the rest."""
        return self._problem is not None and self._has_served

    def run(self, nodeid: str) -> Outcome:
        """Run a test on it."""
        if self._problem is None:
            self._channel.send(nodeid)
            outcome = self._channel.receive()
            if outcome is not None:
                self._has_served = True
                return outcome
            self.disconnect()
            status = _status(self.wait())
            self._problem = f"the server process of the test's simulated machine ended {status}; the output above may say why"
        return Outcome(self._problem)

    def disconnect(self) -> None:
        """Close the connection, which ends the server."""
        self._channel.close()

    def wait(self) -> int:
        """Wait until it ends; kill it after a while."""
        try:
            return self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _records(pickled: bytes) -> Iterator[tuple[str, Any]]:
    file = io.BytesIO(pickled)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the end, or a record that the process did not finish
        while True:
            yield pickle.load(file)


def _failure(item: pytest.Item, outcome: Outcome, missing: list[str]) -> list[pytest.TestReport]:
    """Return the reports of a test whose process ended early: the phase that it was in has failed."""
    when = missing[0] if missing else "teardown"
    problem = outcome.problem or f"The test's process ended {_status(outcome.status)} in its {when} and did not report more."
    sections = [
        (f"Captured {stream} {when}", text) for stream, text in zip(("stdout", "stderr"), outcome.output, strict=True) if text
    ]
    keywords = dict.fromkeys(item.keywords, 1)
    whole: Any = pytest.TestReport
    reports = [whole(item.nodeid, item.location, keywords, "failed", problem, when, sections)]
    if when != "teardown":  # plug-ins count a test at its teardown
        reports.append(whole(item.nodeid, item.location, keywords, "passed", None, "teardown"))
    return reports


def _status(code: int) -> str:
    if code >= 0:
        return f"with status {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _tear_down(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tear down fixtures of earlier tests that the next test does not need."""
    state: Any = item.session._setupstate  # pyright: ignore[reportPrivateUsage]
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown", reraise=(pytest.exit.Exception,))
    if call.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=item.ihook.pytest_runtest_makereport(item=item, call=call))


def _pass_on_warning(config: pytest.Config, pickled: bytes, text: str, source: tuple[str, int], rest: dict[str, Any]) -> None:
    try:
        message, category = pickle.loads(pickled)
    except Exception:  # a class that only the test's process has: keep the text
        message, category = UserWarning(text), UserWarning
    warning = warnings.WarningMessage(message, category, *source)
    config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": warning, **rest})
