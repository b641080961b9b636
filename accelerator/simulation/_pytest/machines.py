"""The simulated machines of a session: a server process for each, which forks a process for each test."""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from .._environment import environment, unavailable_reason
from . import python
from .channel import Channel, Order, Outcome

# A server holds a torch and the tests' modules in memory; the one not used for longest makes room for a fifth.
_ALIVE = 4

_GRACE_S = 30.0

_PDB_NOTE = (
    "The test ran in a process of its own, on its simulated machine, where --pdb cannot follow. For a debugger run it with\n"
    "the mark taken off, on such a machine: python -m accelerator simulate ... -- python -m pytest --pdb "
)

# A machine as its processes see it, and what `environment` is to be called with for it.
_Machine = frozenset[tuple[str, str]]
_machine = pytest.StashKey[_Machine]()


class Machines:
    """The machines of a session, and which tests run on which."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self._config = session.config
        self._parameters: dict[_Machine, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._paths: dict[_Machine, dict[str, None]] = {}
        self._servers: dict[_Machine, _Server] = {}
        self._started = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        session.config.add_cleanup(self.close)
        # Built on what there is now, so that what a test changes for itself makes no machine another one.
        self._base = dict(os.environ)
        reason = unavailable_reason()
        for item in items:
            problem = reason or self._find_machine(item)
            if problem is not None:
                item.add_marker(pytest.mark.skip(reason=f"cannot simulate GPUs: {problem}"))

    def _find_machine(self, item: pytest.Item) -> str | None:
        """Find the machine that a test asks for; gives the reason where there cannot be one."""
        mark = item.get_closest_marker("simulated_machine")
        assert mark is not None
        try:
            machine = frozenset(environment(*mark.args, **{"base": self._base, **mark.kwargs}).items())
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: simulated_machine: {error}") from None
        except RuntimeError as error:
            return str(error)
        item.stash[_machine] = machine
        self._parameters[machine] = mark.args, {"base": self._base, **mark.kwargs}
        self._paths.setdefault(machine, {})[str(item.path)] = None
        return None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test that has a machine and pass on what was reported of it, as ``pytest_runtest_protocol``."""
        machine = item.stash.get(_machine, None)
        if machine is None:
            return None
        hook = item.config.hook
        if hasattr(hook, "pytest_timeout_cancel_timer"):
            # pytest-timeout has a timer in the test's own process, which needs no second one round the start of a server.
            hook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._pass_on(item, self._server(machine).run(item.nodeid))
        _tear_down(item, nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _server(self, machine: _Machine) -> _Server:
        server = self._servers.pop(machine, None)
        if server is None or server.is_spent:
            while len(self._servers) >= _ALIVE:
                self._end([self._servers.pop(next(iter(self._servers)))])
            server = self._start(machine)
        self._servers[machine] = server  # the last of them is the one used last
        return server

    def _start(self, machine: _Machine) -> _Server:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="accelerator-simulation-")
        self._started += 1
        arguments, keywords = self._parameters[machine]
        if keywords.get("state") is None:
            keywords = {**keywords, "state": Path(self._directory.name, f"state{self._started}")}
        config = self._config
        factory: Any = getattr(config, "_tmp_path_factory", None)
        order = Order(
            arguments=[os.fspath(argument) for argument in config.invocation_params.args],
            paths=list(self._paths[machine]),
            basetemp=factory and str(factory.getbasetemp() / f"simulated{self._started}"),
            workerinput=getattr(config, "workerinput", {"workerid": "master", "workercount": 1, "testrunuid": ""}),
        )
        return _Server(order, environment(*arguments, **keywords), config.invocation_params.dir)

    def _pass_on(self, item: pytest.Item, outcome: Outcome) -> None:
        """Pass on what a test reported, and what became of its process if it did not report its end."""
        config, reported = item.config, ["setup", "call", "teardown"]
        records = io.BytesIO(outcome.records)
        exit_request: tuple[str, int | None] | None = None
        while True:
            try:
                record_type, value = pickle.load(records)
            except (EOFError, pickle.UnpicklingError):  # the end, or what the process was about to say when it ended
                break
            if record_type == "warning":
                _pass_on_warning(config, *value)
            elif record_type == "exit":
                exit_request = value
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=value)
                if report.when in reported:
                    del reported[: reported.index(report.when) + 1]
                if report.failed and (config.option.usepdb or config.option.trace):
                    report.sections.append(("--pdb", _PDB_NOTE + item.nodeid))
                item.ihook.pytest_runtest_logreport(report=report)
        if exit_request is not None:
            pytest.exit(*exit_request)
        if outcome.problem is not None or outcome.status or "teardown" in reported:
            for report in _failure(item, outcome, reported):
                item.ihook.pytest_runtest_logreport(report=report)

    def _end(self, servers: list[_Server]) -> None:
        for server in servers:
            server.leave()
        for server in servers:
            server.wait()

    def close(self) -> None:
        """End all servers."""
        self._end(list(self._servers.values()))
        self._servers.clear()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


class _Server:
    """A pytest on a simulated machine that has collected the tests of it and waits for their names."""

    def __init__(self, order: Order, machine: dict[str, str], directory: Path) -> None:
        self._has_served = False
        self._problem: str | None = None  # once it has ended
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
        """Whether it ended after it had run tests, so that another one may run the rest."""
        return self._problem is not None and self._has_served

    def run(self, nodeid: str) -> Outcome:
        """Have it run a test."""
        if self._problem is None:
            self._channel.send(nodeid)
            outcome = self._channel.receive()
            if outcome is not None:
                self._has_served = True
                return outcome
            self.leave()
            status = _status(self.wait())
            self._problem = f"the server process of the test's simulated machine ended {status}; it may have said why above"
        return Outcome(self._problem)

    def leave(self) -> None:
        """Tell it that there is nothing left to do."""
        self._channel.close()

    def wait(self) -> int:
        """Wait for its end."""
        try:
            return self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _failure(item: pytest.Item, outcome: Outcome, missing: list[str]) -> list[pytest.TestReport]:
    """What is reported of a test whose process did not come to its end: the phase that it was in has failed."""
    when = missing[0] if missing else "teardown"
    problem = outcome.problem or f"The test's process ended {_status(outcome.status)} in its {when} and reported no more of it."
    sections = [
        (f"Captured {stream} {when}", text) for stream, text in zip(("stdout", "stderr"), outcome.output, strict=True) if text
    ]
    keywords = dict.fromkeys(item.keywords, 1)
    whole: Any = pytest.TestReport
    reports = [whole(item.nodeid, item.location, keywords, "failed", problem, when, sections)]
    if when != "teardown":  # the end of a test, for those who count them
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
    """Tear down what earlier tests left for this one, which it had no use for, and the next one has neither."""
    state: Any = item.session._setupstate  # pyright: ignore[reportPrivateUsage]
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown", reraise=(pytest.exit.Exception,))
    if call.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=item.ihook.pytest_runtest_makereport(item=item, call=call))


def _pass_on_warning(config: pytest.Config, pickled: bytes, text: str, where: tuple[str, int], rest: dict[str, Any]) -> None:
    try:
        message, category = pickle.loads(pickled)
    except Exception:  # of a class that only the test's process knows: its text remains
        message, category = UserWarning(text), UserWarning
    warning = warnings.WarningMessage(message, category, *where)
    config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": warning, **rest})
