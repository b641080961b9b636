"""The server of a simulated machine: a pytest that collects once, then forks a process for each requested test."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
from _pytest.terminal import TerminalReporter

from ... import discovery
from .. import _settings
from .._outside import machine_faults
from .channel import Channel, Order, Outcome
from .keys import SERVER_NAME

# Options that concern the session and are off in a server.
_SESSION_OPTIONS: dict[str, Any] = {
    "usepdb": False,
    "trace": False,
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "tx": [],
    "looponfail": False,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "maxfail": 0,
}

_STATE = _settings.variable("state")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_DRIVER_INITIALIZED = (
    "Collecting the tests initialized the CUDA driver, so that a process forked for a test could not use the simulated GPUs. "
    "Use devices in tests and fixtures, not at import time; torch.cuda.is_available() and accelerator's queries are allowed "
    "anywhere."
)


def main() -> int:
    """Run the server."""
    # The session handles an interrupt at the terminal; when it ends, so does this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive()
    if order is None:
        return 0
    sys.argv[1:] = order.arguments
    # While tests are collected, torch.cuda.is_available() must ask NVML: CUDA would initialize the driver.
    checks_nvml = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    return pytest.main(["--on-simulated-gpus", *order.arguments], plugins=[_Server(channel, order, checks_nvml)])


class _Terminal:
    """A terminal reporter whose hooks pytest does not call: the session reports."""

    def __init__(self, reporter: object) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


class _NotPrepared(KeyError):
    """A plug-in asked for an entry of a worker that the session has not prepared."""


class _WorkerInput(dict[str, Any]):
    """What the session has prepared for a worker."""

    def __missing__(self, key: str) -> NoReturn:
        raise _NotPrepared(key)


class _Server:
    """The plug-in that turns a pytest into a server."""

    def __init__(self, channel: Channel, order: Order, checks_nvml: str | None) -> None:
        self.__name__ = SERVER_NAME  # pytest registers the plug-in under this name
        self._channel = channel
        self._order = order
        self._checks_nvml = checks_nvml  # the variable's value, which the tests have
        self._items: dict[str, pytest.Item] = {}
        self._failed: list[str] = []
        self._config: Any = None
        self._terminal: Any = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # open as long as the server
        self._records: IO[bytes] | None = None  # set in the process of a test

    @pytest.hookimpl(hookwrapper=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, None, None]:
        """Let pytest-cov, which starts now, keep the data that the session and its other machines have written."""
        options = early_config.known_args_namespace
        if hasattr(options, "cov_append"):
            options.cov_append = True
        yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: Any) -> None:
        """Collect only the files of this machine's tests, without the session's options."""
        # Plug-ins recognize a worker by these.
        config.workerinput, config.workeroutput = _WorkerInput(self._order.workerinput), {}
        for implementation in config.hook.pytest_configure.get_hookimpls():
            implementation.function = self._also_unprepared(config, implementation.function)
        register = config.pluginmanager.register

        def register_silently(plugin: object, name: str | None = None) -> Any:
            return register(_Terminal(plugin) if name == "terminalreporter" else plugin, name)

        # The session reports. Plug-ins such as pytest-sugar replace the terminal reporter by their own.
        config.pluginmanager.register = register_silently
        for name, value in _SESSION_OPTIONS.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = self._order.basetemp
        config.args[:] = self._order.paths
        self._config = config

    def _also_unprepared(self, config: Any, configure: Callable[..., Any]) -> Callable[..., Any]:
        """Let a plug-in do without what only a session with workers prepares: it has the options that the session has drawn."""

        def attempt(*arguments: Any) -> Any:
            try:
                return configure(*arguments)
            except _NotPrepared:
                for name in self._order.options.keys() - _SESSION_OPTIONS.keys() - {"basetemp", "on_simulated_gpus"}:
                    setattr(config.option, name, self._order.options[name])

        return attempt

    def pytest_sessionstart(self) -> None:
        """Give plug-ins a terminal to write to: pytest-timeout shows there what a test was doing."""
        plugins = self._config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(TerminalReporter(self._config, self._terminal), "terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record collection errors, to report them for the tests that could not be collected."""
        if report.failed:
            self._failed.append(f"{report.nodeid}:\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run requested tests until the session ends."""
        self._items = {item.nodeid: item for item in session.items}
        factory = getattr(self._config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()  # before the first fork: the first use empties it
        if importlib.util.find_spec("torch") is not None:
            import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # once for all tests
        refusal = None if discovery.is_fork_safe() else _DRIVER_INITIALIZED
        if self._checks_nvml is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = self._checks_nvml
        while (nodeid := self._channel.receive()) is not None:
            item = self._items.get(nodeid)
            problem = refusal or (self._missing() if item is None else None)
            self._channel.send(self._run(item) if item is not None and problem is None else Outcome(problem))
        return True

    def _missing(self) -> str:
        if self._failed:
            return "The test could not be collected on its simulated machine:\n" + "\n".join(self._failed)
        return "The session collected this test, but its simulated machine did not: collection depends on the machine."

    def _run(self, item: pytest.Item) -> Outcome:
        with tempfile.TemporaryFile() as records:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about threads that collection started
                server, pid = os.getpid(), os.fork()
            if pid == 0:
                self._become_test(item, records, server)
            status = self._wait(pid)
            records.seek(0)
            return Outcome(None, status, records.read(), self._unreported())

    def _wait(self, pid: int) -> int:
        ended = os.pidfd_open(pid)
        try:
            ready, _, _ = select.select([ended, self._channel.fileno()], [], [])
            if ended not in ready:  # readable during a test only if the session has ended
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _unreported(self) -> tuple[str, str]:
        """Return the output of a process that ended early; it shares this process's files."""
        self._terminal.seek(0)
        terminal = self._terminal.read()
        self._terminal.seek(0)
        self._terminal.truncate()
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None or not capture.is_globally_capturing():
            return terminal, ""
        out, err = capture.read_global_capture()
        return out + terminal, err

    def _become_test(self, item: pytest.Item, records: IO[bytes], server: int) -> NoReturn:
        """Run a test in the forked process, then exit."""
        status = 1
        try:
            self._records = records
            self._channel.close()
            _end_with(server)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._order.has_faults:
                os.environ[_STATE] += f"-{os.getpid()}"
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                status = 0
            except pytest.exit.Exception as leaving:
                self._record("exit", (leaving.msg, leaving.returncode))
            _save_coverage()
        except BaseException:  # raised by pytest or a plug-in, not by the test
            traceback.print_exc()
        finally:
            for child in multiprocessing.active_children():
                if child.daemon:  # os._exit skips Python's own termination of daemons
                    child.terminate()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Warn of faults that a test's machine has and that never fired."""
        if self._order.has_faults:
            for line in machine_faults.unfired(Path(os.environ[_STATE])):
                item.warn(pytest.PytestWarning(f"the fault {line}"))

    def _record(self, record_type: str, value: object) -> None:
        if self._records is not None:
            self._records.write(pickle.dumps((record_type, value)))
            self._records.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a report of a test."""
        # As a terminal reporter asks: pytest counts failed subtests in this process, and fails the report of their test here.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        self._record("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Record a warning of a test."""
        try:
            pickled = pickle.dumps((warning_message.message, warning_message.category))
        except Exception:  # not picklable, such as a class local to the test
            pickled = b""
        location_in_file = warning_message.filename, warning_message.lineno
        rest = {"when": when, "nodeid": nodeid, "location": location}
        self._record("warning", (pickled, str(warning_message.message), location_in_file, rest))


def _end_with(server: int) -> None:
    """Let the kernel kill this process if its parent, the server, is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)


def _save_coverage() -> None:
    """Save the lines that a test ran, if they are measured: os._exit skips coverage's own function for the exit."""
    coverage = sys.modules.get("coverage")
    measurement = coverage and coverage.Coverage.current()
    if measurement is not None:
        measurement.save()
