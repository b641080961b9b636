"""The server of a simulated machine: a pytest that collects once, then forks a process for each test it is told to run."""

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
from typing import IO, Any

import pytest

from ... import discovery
from ..pytest_plugin import SERVER_NAME
from .channel import Channel, Order, Outcome

# What the session does and a server does not.
_ALONE: dict[str, Any] = {
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

_DRIVER_INITIALIZED = (
    "Collecting the tests initialized the CUDA driver, so that a process forked for a test could not use the simulated GPUs. "
    "Ask for devices in tests and fixtures, not while a module is imported; torch.cuda.is_available() and everything in "
    "accelerator's discovery may be asked anywhere."
)


def main() -> int:
    """Be the server."""
    # An interrupt at the terminal is the session's affair; it leaves, and so does this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive()
    if order is None:
        return 0
    sys.argv[1:] = order.arguments
    return pytest.main(["--on-simulated-gpus", *order.arguments], plugins=[_Server(channel, order)])


class _Server:
    """The plug-in that makes a pytest a server."""

    def __init__(self, channel: Channel, order: Order) -> None:
        self.__name__ = SERVER_NAME  # under which pytest registers it
        self._channel = channel
        self._order = order
        self._items: dict[str, pytest.Item] = {}
        self._failed: list[str] = []
        self._config: Any = None
        self._records: IO[bytes] | None = None  # of this process's test, if it is one

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: Any) -> None:
        """Be alone, and collect nothing but the files of this machine's tests."""
        config.workerinput, config.workeroutput = self._order.workerinput, {}  # as others tell a part of a session
        for name, value in _ALONE.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = self._order.basetemp
        config.args[:] = self._order.paths
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Leave the terminal to the session."""
        config.pluginmanager.set_blocked("terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be collected, for the tests that were to be there."""
        if report.failed:
            self._failed.append(f"{report.nodeid}:\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve until the session leaves."""
        self._items = {item.nodeid: item for item in session.items}
        factory = getattr(self._config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()  # here, for the first use empties it
        if importlib.util.find_spec("torch") is not None:
            import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # once, for all tests
        refusal = None if discovery.is_fork_safe() else _DRIVER_INITIALIZED
        while (nodeid := self._channel.receive()) is not None:
            item = self._items.get(nodeid)
            problem = refusal or (self._missing() if item is None else None)
            self._channel.send(self._run(item) if item is not None and problem is None else Outcome(problem))
        return True

    def _missing(self) -> str:
        if self._failed:
            return "The test could not be collected on its simulated machine:\n" + "\n".join(self._failed)
        return "The test was collected by the session, and on its simulated machine it was not."

    def _run(self, item: pytest.Item) -> Outcome:
        with tempfile.TemporaryFile() as records:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads that were started while collecting
                pid = os.fork()
            if pid == 0:
                self._become_test(item, records)
            status = self._wait(pid)
            records.seek(0)
            return Outcome(None, status, records.read(), self._unreported())

    def _wait(self, pid: int) -> int:
        ended = os.pidfd_open(pid)
        try:
            ready, _, _ = select.select([ended, self._channel.fileno()], [], [])
            if ended not in ready:  # the session says nothing during a test, unless it is gone
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _unreported(self) -> tuple[str, str]:
        """What a process that ended early had printed: it shares the files that capture goes to."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None or not capture.is_globally_capturing():
            return "", ""
        out, err = capture.read_global_capture()
        return out, err

    def _become_test(self, item: pytest.Item, records: IO[bytes]) -> None:
        """Be the process of a test."""
        status = 1
        try:
            self._records = records
            self._channel.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            status = 0
        except pytest.exit.Exception as leaving:
            self._record("exit", (leaving.msg, leaving.returncode))
        except BaseException:  # of pytest or a plug-in, not of the test
            traceback.print_exc()
        finally:
            for child in multiprocessing.active_children():
                if child.daemon:  # Python's own end would not leave them behind either
                    child.terminate()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _record(self, record_type: str, value: object) -> None:
        if self._records is not None:
            self._records.write(pickle.dumps((record_type, value)))
            self._records.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down what a test reports."""
        self._record("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Take down what a test warns of."""
        try:
            pickled = pickle.dumps((warning_message.message, warning_message.category))
        except Exception:  # a class of the test's own, or one that holds what cannot travel
            pickled = b""
        where = warning_message.filename, warning_message.lineno
        rest = {"when": when, "nodeid": nodeid, "location": location}
        self._record("warning", (pickled, str(warning_message.message), where, rest))
