"""Tests the pytest plug-in in separate runs of pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerator.simulation._pytest import session
from tests.support import ROOT, plain_environment
from tests.support.discovery import on_simulated_gpus
from tests.support.pytest_suite import PLUGIN, Suite, counts


def results(path: Path) -> list[tuple[str, list[tuple[str, str | None, str]]]]:
    """Return each test of a JUnit file and its outcome, without times, addresses and process ids."""
    return [
        (
            f"{case.get('classname')}.{case.get('name')}",
            [(part.tag, part.get("message"), clean(part.text or "")) for part in case],
        )
        for case in ET.parse(path).getroot().iter("testcase")
    ]


def clean(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|pid \d+", "...", text)


EVERY_OUTCOME = """
    import os, sys, unittest, warnings
    import pytest

    if "MARKED" in os.environ:
        pytestmark = pytest.mark.simulated_machine(gpus=2)

    @pytest.fixture(scope="session")
    def whole():
        print("session up, pid", os.getpid())
        yield "whole"
        print("session down")

    @pytest.fixture(params=["a", "b"])
    def each(request):
        yield request.param
        if request.param == "b":
            raise RuntimeError("teardown of b")

    @pytest.fixture
    def failing():
        print("about to fail")
        raise ValueError("set-up")

    def test_passes(whole):
        print("hello")

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_fails(number):
        sys.stderr.write("to stderr\\n")
        os.write(1, b"to the descriptor\\n")
        assert number == 2, "not two"

    def test_fixture(each):
        assert each

    def test_error(failing):
        pass

    def test_skipped():
        pytest.skip("no reason")

    @pytest.mark.skip(reason="marked")
    def test_marked():
        pass

    @pytest.mark.xfail(reason="known", strict=True)
    def test_expected():
        assert 0

    @pytest.mark.xfail(strict=True)
    def test_unexpected():
        pass

    def test_properties(record_property):
        record_property("figure", 7)

    def test_warns():
        warnings.warn("oh", RuntimeWarning)

    def test_captures(capfd):
        os.write(1, b"one\\n")
        assert capfd.readouterr().out == "one\\n"

    class TestOfClass(unittest.TestCase):
        def setUp(self):
            self.x = 1

        def test_method(self):
            self.assertEqual(self.x, 2)

        @unittest.skip("as unittest does")
        def test_other(self):
            pass
"""


@on_simulated_gpus
def test_reports_equal_those_of_a_normal_run(suite: Suite) -> None:
    suite.hide_torch()
    suite.write(EVERY_OUTCOME)
    normal = suite.run("--junitxml=normal.xml", "-rA")
    marked = suite.run("--junitxml=marked.xml", "-rA", MARKED="1")
    assert counts(marked) == counts(normal) == {"failed": 4, "passed": 7, "skipped": 3, "xfailed": 1, "error": 2}
    assert "session up, pid" in marked.stdout
    assert results(suite.path / "marked.xml") == results(suite.path / "normal.xml")
    assert marked.returncode == normal.returncode == 1
    # Compare the order of these lines alone. The marked run tears the session's fixture down with its test, the normal run at
    # the end, so their other output differs.
    summary = [
        line
        for line in normal.stdout.splitlines()
        if re.match(r"(FAILED|PASSED|ERROR|SKIPPED|XFAIL|test_it.py:\d+: RuntimeW)", line)
    ]
    assert len(summary) > 15
    assert [line for line in marked.stdout.splitlines() if line in summary] == summary
    assert "RuntimeWarning: oh" in marked.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_each_mark_runs_on_its_own_machine(suite: Suite) -> None:
    suite.write("""
        import os, sys
        import pytest
        import accelerator as acc

        FIVE = [pytest.param(n, marks=pytest.mark.simulated_machine(n, memory="1GiB")) for n in (1, 2, 3, 4, 5)]

        @pytest.fixture(scope="module")
        def used():
            import torch
            return torch.empty(1000, device="cuda")

        @pytest.mark.parametrize("n", [*FIVE, *FIVE])
        def test_count(n, used, tmp_path_factory):
            assert acc.device_count() == n == len(acc.visible_devices())
            assert acc.is_initialized()
            assert acc.get_memory_info()[1] == 2**30
            assert os.environ["ACCELERATOR_SIM_STATE"]
            (tmp_path_factory.getbasetemp() / f"kept{os.getpid()}").touch()
            assert len(list(tmp_path_factory.getbasetemp().glob("kept*"))) <= 2

        @pytest.mark.simulated_machine(gpus=1)
        @pytest.mark.min_gpus(2)
        def test_too_few():
            raise AssertionError

        @pytest.mark.simulated_machine(gpus=2)
        @pytest.mark.min_gpus(2)
        def test_enough():
            assert "torch" in sys.modules  # the server imported it before the fork

        @pytest.mark.min_gpus(1)
        def test_not_here():
            raise AssertionError

        def test_here():
            assert acc.device_count() == 0
    """)
    done = suite.check({"passed": 12, "skipped": 2}, "-rs", "-p", "no:randomly")
    assert "needs 2 GPUs, 1 visible" in done.stdout
    assert "needs 1 GPUs, none visible: " in done.stdout


@on_simulated_gpus
@pytest.mark.slow
def test_ends_of_test_processes(suite: Suite) -> None:
    """Each way in which the process can end, in and after each phase; and what becomes of the test's own processes."""
    suite.write("""
        import multiprocessing, os, signal, time
        import pytest

        pytestmark = pytest.mark.simulated_machine(gpus=1)
        ENDS = {"status0": lambda: os._exit(0), "status3": lambda: os._exit(3), "SIGSEGV": lambda: os.kill(os.getpid(), 11)}

        @pytest.fixture
        def phase(request):
            phase, end = request.param
            if phase == "setup":
                ENDS[end]()
            yield phase
            if phase == "teardown":
                ENDS[end]()

        PHASES = [(phase, end) for phase in ("setup", "call", "teardown", "after") for end in ENDS]

        @pytest.mark.parametrize("phase", PHASES, indirect=True, ids="-".join)
        def test_ends(phase, request):
            print("printed before the end of", request.node.name)
            if phase == "call":
                ENDS[request.node.callspec.params["phase"][1]]()

        def test_after_them():
            print("nothing of another test")
            assert 0

        def sleep():
            time.sleep(30)  # until the plug-in ends it

        @pytest.mark.parametrize("passes", [True, False])
        @pytest.mark.parametrize("method", ["fork", "spawn"])
        def test_daemons(method, passes):
            context = multiprocessing.get_context(method)
            children = [context.Process(target=sleep, daemon=True) for _ in range(3)]
            for child in children:
                child.start()
            with open("daemons", "a") as file:
                file.writelines(f"{child.pid}\\n" for child in children)
            assert passes
    """)
    suite.hide_torch()
    with (suite.path / "conftest.py").open("a") as conftest:
        conftest.write(
            "import os\ndef pytest_runtest_logfinish(nodeid):\n"
            "    if os.environ.get('ACCELERATOR_SIM_GPUS') and 'after-' in nodeid:\n"
            "        import test_it; test_it.ENDS[nodeid.rstrip(']').rpartition('-')[2]]()\n"
        )
    done = suite.run("--junitxml=result.xml", "-p", "no:randomly")
    reported = {name.rpartition(".")[2]: parts for name, parts in results(suite.path / "result.xml")}
    ends = {"status0": "with status 0", "status3": "with status 3", "SIGSEGV": "by SIGSEGV"}
    for end, text in ends.items():
        for phase, kind in (("setup", "error"), ("call", "failure"), ("teardown", "error")):
            problem = f"The test's process ended {text} in its {phase} and did not report more."
            assert [(part[0], part[2]) for part in reported[f"test_ends[{phase}-{end}]"]] == [(kind, problem)]
        problems = [(part[0], part[2]) for part in reported[f"test_ends[after-{end}]"]]
        after = f"The test's process ended {text} in its teardown and did not report more."
        assert problems == ([] if end == "status0" else [("error", after)])
    output = done.stdout
    before = [output.index(f"printed before the end of test_ends[call-{end}]") for end in ends]
    assert before == sorted(before)
    own = output[output.index("___ test_after_them ___") :]
    assert own.partition("test_daemons")[0].count("printed before") == 0
    assert counts(done) == {"failed": 6, "passed": 8, "error": 8}, done.stdout
    daemons = [Path("/proc", line, "stat") for line in (suite.path / "daemons").read_text().split()]
    assert len(daemons) == 12
    # A process that has ended stays in state Z as long as the system's first process does not wait for it.
    assert [path for path in daemons if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"] == []


@pytest.mark.slow
@on_simulated_gpus
def test_collection_that_initializes_the_driver_is_an_error(suite: Suite) -> None:
    suite.write("""
        import pytest, torch

        if torch.cuda.is_available():
            torch.empty(1, device="cuda")

        @pytest.mark.simulated_machine(gpus=1)
        def test_it():
            pass
    """)
    done = suite.check({"error": 1})
    assert "Collecting the tests initialized the CUDA driver" in done.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_collection_may_ask_whether_there_are_gpus(suite: Suite) -> None:
    """torch.utils.cpp_extension asks when it is imported. The variable that makes this safe is not that of the tests."""
    suite.write("""
        import os
        import pytest, torch

        has_gpu = torch.cuda.is_available()

        @pytest.mark.simulated_machine(gpus=1)
        def test_it():
            assert has_gpu
            assert torch.ones(2, device="cuda").sum().item() == 2
            assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
    """)
    suite.check({"passed": 1})


@pytest.mark.slow
@on_simulated_gpus
def test_collection_failure_on_the_simulated_machine(suite: Suite) -> None:
    suite.write("""
        import pytest
        import accelerator as acc

        if acc.device_count() == 1:
            raise RuntimeError("one is too few")

        @pytest.mark.simulated_machine(gpus=1)
        def test_one():
            pass

        if acc.device_count() == 0:
            @pytest.mark.simulated_machine(gpus=2)
            def test_two():
                pass

        @pytest.mark.simulated_machine(gpus=3)
        def test_three():
            pass
    """)
    suite.write("", "conftest.py").write_text(
        "import os\nif os.environ.get('ACCELERATOR_SIM_GPUS') == '3':\n    raise SystemExit('no three here')\n"
    )
    done = suite.check({"error": 3})
    assert "could not be collected on its simulated machine" in done.stdout
    assert "RuntimeError: one is too few" in done.stdout
    assert "its simulated machine did not: collection depends on the machine" in done.stdout
    assert "the server process of the test's simulated machine ended with status" in done.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_tests_after_the_end_of_their_server(suite: Suite) -> None:
    suite.write("""
        import os, signal, time
        import pytest

        @pytest.mark.simulated_machine(gpus=3)
        def test_never():
            pass

        @pytest.mark.simulated_machine(gpus=3)
        def test_never_either():
            pass

        @pytest.mark.simulated_machine(gpus=1)
        def test_before():
            pass

        @pytest.mark.simulated_machine(gpus=1)
        def test_that_ends_it():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(5)  # the session reports when the server ends, not when this process does

        @pytest.mark.simulated_machine(gpus=1)
        def test_after():
            pass
    """)
    suite.write("", "conftest.py").write_text(
        "import os\nif os.environ.get('ACCELERATOR_SIM_GPUS') == '3':\n"
        "    open('starts', 'a').write('.')\n    raise SystemExit('no three here')\n"
    )
    done = suite.check({"passed": 2, "error": 3})
    reports, _, _ = done.stdout.partition("short test summary")
    assert reports.count("the server process of the test's simulated machine ended by SIGKILL") == 1
    assert (suite.path / "starts").read_text() == "."  # a server that does not start is not started again for the next test


@pytest.mark.slow
@on_simulated_gpus
@pytest.mark.parametrize("method", ["signal", "thread"])
def test_pytest_timeout_on_a_simulated_machine(method: str, suite: Suite) -> None:
    pytest.importorskip("pytest_timeout")
    suite.write(f"""
        import time
        import pytest
        pytestmark = pytest.mark.simulated_machine(gpus=1)

        @pytest.mark.timeout(0.5, method="{method}", func_only=True)
        def test_slow():
            print("printed before")
            time.sleep(60)

        def test_next():
            pass
    """)
    done = suite.check({"failed": 1, "passed": 1})
    assert "AssertionError" not in done.stdout + done.stderr
    assert "printed before" in done.stdout
    if method == "signal":
        assert "Failed: Timeout (>0.5s) from pytest-timeout" in done.stdout
    else:  # pytest-timeout ends the process
        assert "process ended with status 1 in its call" in done.stdout
        assert "Timeout" in done.stdout + done.stderr


@pytest.mark.slow
@on_simulated_gpus
def test_maxfail_and_pytest_exit(suite: Suite) -> None:
    suite.write("""
        import pytest
        pytestmark = pytest.mark.simulated_machine(gpus=1)

        def test_first():
            assert 0

        def test_leave():
            pytest.exit("that is enough", returncode=7)

        def test_last():
            pass
    """)
    done = suite.check({"failed": 1}, "-x", "--pdb")
    assert done.returncode == 1
    assert IN_A_PROCESS_OF_ITS_OWN in done.stdout
    assert "python -m accelerator simulate --gpus 1 -- python -m pytest --pdb test_it.py::test_first" in done.stdout
    done = suite.run()
    assert done.returncode == 7
    assert "that is enough" in done.stdout + done.stderr
    assert counts(done) == {"failed": 1}


@pytest.mark.slow
@on_simulated_gpus
def test_pdb_opens_in_place_on_a_matching_machine(suite: Suite) -> None:
    suite.write("""
        import pytest
        import accelerator as acc

        @pytest.mark.min_gpus(2)
        @pytest.mark.simulated_machine(2, memory="1GiB")
        def test_fails():
            count = acc.device_count()
            assert count == 3

        @pytest.mark.simulated_machine(2, memory="2GiB")
        def test_of_another_machine():
            assert acc.device_count() == 2
    """)
    simulate = ["-m", "accelerator", "simulate", "--gpus", "2", "--memory", "1GiB", "--", sys.executable]
    pytest_command = ["-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--pdb", "--rootdir", str(suite.path)]
    done = subprocess.run(
        [sys.executable, *simulate, *pytest_command],
        cwd=suite.path,
        env=plain_environment(),
        input="p 'devices', count\ncontinue\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "('devices', 2)" in done.stdout, done.stdout
    assert "no terminal" not in done.stdout
    assert counts(done) == {"failed": 1, "passed": 1}


# For each parameter that simulate has an option for: a value that is not the default, and the option.
OPTIONS: dict[str, tuple[object, str]] = {
    "gpus": (2, "--gpus 2"),
    "memory": (["1GiB", 2**31], "--memory 1GiB --memory 2147483648"),
    "name": ("A B", "--name 'A B'"),
    "capability": ("8.6", "--capability 8.6"),
    "speed": ([3, 1], "--speed 3 --speed 1"),
    "mig": ([None, 2], "--mig off --mig 2"),
    "nvlink": (True, "--nvlink all"),
    "numa": ((0, 1), "--numa 0 --numa 1"),
    "driver": ("old", "--driver old"),
    "nvml": ("broken", "--nvml broken"),
    "compute": (False, "--no-compute"),
    "fill": ("nan", "--fill nan"),
    "kernels": ("refuse", "--kernels refuse"),
    "triton": (False, "--no-triton"),
    "tune": (True, "--tune"),
    "races": ("raise", "--races raise"),
    "late_copies": (True, "--late-copies"),
    "faults": (["xid=94,gpu=1", "slow=20ms"], "--fault xid=94,gpu=1 --fault slow=20ms"),
}
IN_A_PROCESS_OF_ITS_OWN = "The test ran in a process of its own, which has no terminal for a debugger. "


def test_pdb_note_knows_every_option() -> None:
    from accelerator.simulation import _settings

    assert [each.name for each in _settings.PARAMETERS if each.simulate is not None] == [*OPTIONS]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(({name: value}, f"{option} ") for name, (value, option) in OPTIONS.items()),
        ({name: value for name, (value, _) in OPTIONS.items()}, "".join(f"{option} " for _, option in OPTIONS.values())),
        ({}, ""),
        ({"gpus": 1, "state": "file", "base": {}}, "--gpus 1 "),
        ({"nvlink": [0, None]}, "--nvlink 0 --nvlink off "),
        ({"nvlink": False}, "--nvlink off "),
        ({"nvlink": None}, "--nvlink off "),
        ({"nvlink": 0}, "--nvlink 0 "),
        ({"compute": True, "triton": True, "late_copies": False, "races": None}, ""),
    ],
)
def test_pdb_note_names_the_machine(arguments: dict[str, object], expected: str) -> None:
    from accelerator.simulation._pytest import debugging

    assert debugging.note(arguments, "t.py::test[a b]") == (
        f"{IN_A_PROCESS_OF_ITS_OWN}To debug it, start pytest on its machine:\n"
        f"python -m accelerator simulate {expected}-- python -m pytest --pdb 't.py::test[a b]'"
    )


def test_pdb_note_of_a_machine_without_options() -> None:
    from accelerator.simulation._pytest import debugging

    assert debugging.note({"gpus": 2, "errors": {"cuInit": 3}, "clock_reasons": 4, "numa": None}, "t.py::test") == (
        f"{IN_A_PROCESS_OF_ITS_OWN}"
        "simulate has no option for this mark's errors, clock_reasons, numa: start pytest with the environment\n"
        "that accelerator.simulation.environment(...) returns for the mark's arguments; --pdb t.py::test then works in place"
    )


@pytest.mark.parametrize(
    ("own", "has_own_state", "expected"),
    [
        ({"GPUS": "2", "STATE": "a", "RUN": "1"}, True, True),
        ({"GPUS": "2", "STATE": "b", "RUN": "2"}, False, True),
        ({"GPUS": "2"}, False, True),
        ({"GPUS": "2", "STATE": "b", "RUN": "1"}, True, False),
        ({"GPUS": "3", "STATE": "a", "RUN": "1"}, False, False),
        ({"GPUS": "2", "STATE": "a", "FILL": "nan"}, False, False),
    ],
)
def test_a_debugger_opens_on_the_machine_of_the_mark(
    own: dict[str, str], has_own_state: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerator.simulation._pytest import debugging

    def named(variables: dict[str, str]) -> dict[str, str]:
        return {f"ACCELERATOR_SIM_{name}": value for name, value in variables.items()}

    machine = named({"GPUS": "2", "STATE": "a"})
    for is_simulated in (True, False):
        monkeypatch.setattr(debugging, "is_simulated", lambda is_simulated=is_simulated: is_simulated)
        found = debugging.is_this_machine(machine, named(own), has_own_state=has_own_state)
        assert found == (expected and is_simulated)


@pytest.mark.slow
@on_simulated_gpus
def test_two_machines_keep_their_temporary_folders(suite: Suite) -> None:
    suite.hide_torch()
    suite.write("""
        from pathlib import Path
        import pytest

        @pytest.mark.parametrize(
            "gpus", [pytest.param(gpus, marks=pytest.mark.simulated_machine(gpus)) for gpus in (1, 2, 1, 2)]
        )
        def test_folders(gpus, tmp_path):
            (tmp_path / "kept").write_text(str(gpus))
            with open("folders", "a+") as file:
                file.write(f"{tmp_path}\\n")
                file.seek(0)
                folders = [Path(line) for line in file.read().splitlines()]
            assert [(folder / "kept").read_text() for folder in folders] == ["1", "2", "1", "2"][: len(folders)]
            assert len({folder.parent for folder in folders}) == min(len(folders), 2)
    """)
    suite.check({"passed": 4}, "-p", "no:randomly")


@pytest.mark.slow
@on_simulated_gpus
def test_fixtures_end_before_the_next_module_and_tests_can_be_interrupted(suite: Suite) -> None:
    suite.hide_torch()
    suite.write(
        """
        import os, signal, time
        import pytest

        @pytest.fixture(scope="module")
        def folder():
            os.environ["FIXTURE"] = "up"
            yield
            del os.environ["FIXTURE"]

        def test_here(folder):
            pass

        @pytest.mark.simulated_machine(gpus=1, state="own")
        def test_there():
            assert os.environ["ACCELERATOR_SIM_STATE"] == os.path.abspath("own")
            assert "FIXTURE" not in os.environ  # which the session has set since it began
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
        """,
        "test_first.py",
    )
    suite.write("import os\ndef test_it():\n    assert 'FIXTURE' not in os.environ\n", "test_second.py")
    suite.check({"passed": 3})


def test_flags_and_path_of_the_interpreter_are_kept(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import json, sys\n"
        "def show():\n"
        "    flags = [sys.flags.optimize, sys.flags.dont_write_bytecode, sys.warnoptions, sys._xoptions]\n"
        "    print(json.dumps([*flags, sys.argv, sys.path[0]]))\n"
    )
    program = (
        "import subprocess, sys; from accelerator.simulation._pytest import python; sys.argv = ['name', 'x']; "
        f"sys.path.insert(0, {str(tmp_path)!r}); subprocess.run(python.command('shown', 'show', '--option', 'a b'), check=True)"
    )
    flags = ["-OO", "-B", "-W", "error::ImportWarning", "-X", "utf8"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=True
    )
    expected = [2, 1, ["error::ImportWarning"], {"utf8": True}, ["name", "--option", "a b"], str(tmp_path)]
    assert json.loads(done.stdout) == expected


class FakeServer:
    """Counts as a server that runs."""

    is_spent = False

    def __init__(self, machine: int) -> None:
        self.machine = machine


def test_at_most_four_servers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a fifth starts, the one ends that was used least recently."""
    from accelerator.simulation._pytest.machines import Machines

    machines: Any = object.__new__(Machines)
    machines._servers, alive, most = {}, [], []

    def begin(self: object, machine: int) -> FakeServer:
        alive.append(machine)
        most.append(len(alive))
        return FakeServer(machine)

    monkeypatch.setattr(Machines, "_start", begin)
    monkeypatch.setattr(Machines, "_end", lambda self, servers: [alive.remove(server.machine) for server in servers])
    for machine in (1, 2, 3, 4, 1, 5, 3, 6, 7):
        assert machines._server(machine).machine == machine
    assert max(most) == 4
    assert sorted(alive) == [3, 5, 6, 7]
    machines._servers[5].is_spent = True
    assert machines._server(5).machine == 5
    assert alive.count(5) == 2, "one that has ended is started again"


@on_simulated_gpus
def test_options_in_pdb_note_equal_the_marks_machine() -> None:
    import json
    import shlex

    from accelerator.simulation import environment
    from accelerator.simulation._pytest import debugging

    arguments = {name: value for name, (value, _) in OPTIONS.items()}
    command = debugging.note(arguments, "x").partition("accelerator ")[2].partition(" -- ")[0]
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    run = [sys.executable, "-m", "accelerator", *shlex.split(command), "--", sys.executable, "-c", program]
    base = plain_environment()
    printed = json.loads(subprocess.run(run, env=base, capture_output=True, text=True, check=True).stdout)
    options = {name: value for name, value in printed.items() if name.startswith("ACCELERATOR_SIM_")}
    of_mark = environment(**arguments, base=base)  # type: ignore[arg-type]
    for name in ("STATE", "RACE_FILE", "RUN"):  # of the run
        del options[f"ACCELERATOR_SIM_{name}"]
    assert options == {name: value for name, value in of_mark.items() if name.startswith("ACCELERATOR_SIM_")}


@pytest.mark.slow
@on_simulated_gpus
def test_durations_include_the_start_of_the_machine(suite: Suite) -> None:
    suite.write("""
        import time
        import pytest
        pytestmark = pytest.mark.simulated_machine(gpus=1)

        def test_first():
            pass

        def test_second():
            pass
    """)
    (suite.path / "conftest.py").write_text(
        "import os, time\nif os.environ.get('ACCELERATOR_SIM_GPUS'):\n    time.sleep(2)\n"  # makes the start slow
    )
    done = suite.run("--durations=0", "--durations-min=0.0005", "-vv")
    seconds = {
        (phase, test): float(duration)
        for duration, phase, test in re.findall(r"^([0-9.]+)s (setup|call) +test_it.py::(\w+)", done.stdout, re.MULTILINE)
    }
    assert seconds["setup", "test_first"] >= 2, done.stdout
    assert seconds.get(("setup", "test_second"), 0.0) < seconds["setup", "test_first"] - 1.5


SESSION = """
    import os
    import pytest
    import accelerator as acc

    def test_machine(pytestconfig):
        assert acc.simulation.is_simulated()
        assert acc.device_count() == 2
        assert acc.visible_devices()[0].total_memory == 3 * 2**30
        assert pytestconfig.option.simulate_gpus == 2
        print("on", os.environ["ACCELERATOR_SIM_STATE"], "in", os.environ.get("PYTEST_XDIST_WORKER"))

    @pytest.mark.min_gpus(2)
    def test_enough():
        pass

    @pytest.mark.min_gpus(n=3)
    def test_too_few():
        pass

    @pytest.mark.min_gpus(4)
    class TestOfFour:
        @pytest.mark.min_gpus(1)
        def test_too_few_of_the_class(self):
            pass

    @pytest.mark.min_gpus(1)
    class TestOfOne:
        @pytest.mark.min_gpus(5)
        def test_too_few_of_its_own(self):
            pass
"""


@on_simulated_gpus
@pytest.mark.parametrize("workers", [[], pytest.param(["-n2"], marks=pytest.mark.slow)])
def test_session_on_simulated_gpus(workers: list[str], suite: Suite) -> None:
    suite.write(SESSION)
    (suite.path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--ours')\n")
    done = suite.run("--simulate-gpus=2", "--ours", "x", *workers, "-rPs", PYTEST_ADDOPTS="--simulate-memory 3GiB")
    assert done.returncode == 0, done.stdout
    assert counts(done) == {"passed": 2, "skipped": 3}
    assert [f"needs {needed} GPUs, 2 visible" in done.stdout for needed in (1, 3, 4, 5)] == [False, True, True, True]
    assert ("in gw" if workers else "in None") in done.stdout
    assert workers or "simulated GPUs: 2 of 3GiB" in done.stdout
    assert done.stdout.count("test session starts") == 1


MARKS_OF_A_SESSION = """
    import os
    import pytest

    def machine():
        name, memory, races = (os.environ.get(f"ACCELERATOR_SIM_{word}") for word in ("NAMES", "MEMORY", "RACES"))
        return name, int(memory) >> 20, races

    NAME = "NVIDIA A100-SXM4-40GB"

    @pytest.mark.simulated_machine(1)
    def test_says_nothing():
        assert machine() == (NAME, 3072, "report")

    @pytest.mark.simulated_machine(1, memory="1GiB")
    def test_says_memory():
        assert machine() == (NAME, 1024, "report")

    @pytest.mark.simulated_machine(1, name="H100", races=None)
    def test_says_name():
        name, memory, races = machine()
        assert "H100" in name and memory > 80000 and races is None
"""


@on_simulated_gpus
def test_marks_take_what_they_do_not_say_from_the_session(suite: Suite) -> None:
    suite.hide_torch()
    suite.write(MARKS_OF_A_SESSION)
    (suite.path / "pytest.ini").write_text(
        "[pytest]\nsimulate_memory = 3GiB\nsimulate_name = A100-40GB\nsimulate_races = true\n"
    )
    suite.check({"passed": 3}, "-c", str(suite.path / "pytest.ini"))


@pytest.mark.slow
@on_simulated_gpus
def test_session_on_gpus_with_a_name(suite: Suite) -> None:
    suite.write("import accelerator as acc\ndef test_it():\n    assert 'H100' in acc.visible_devices()[0].name\n")
    done = suite.check({"passed": 1}, "--simulate-gpus=1", "--simulate-name=H100")
    assert "simulated GPUs: 1 of H100\n" in done.stdout


def test_session_gets_every_plugin_given_to_pytest_main() -> None:
    invocation = SimpleNamespace(plugins=["first", textwrap], args=["-q", Path("tests")])
    config: Any = SimpleNamespace(invocation_params=invocation)
    assert session._arguments(config) == ["-p", "first", "-p", "textwrap", "-q", "tests"]


CONFIGURED = """
    import os, accelerator as acc

    def test_machine():
        count, memory = os.environ["EXPECTED"].split()
        assert acc.device_count() == int(count)
        assert (acc.total_memory(0) >> 30) == int(memory) if int(count) else True
        assert ("ACCELERATOR_SIM_RACES" in os.environ) == ("RACES" in os.environ)
"""


@on_simulated_gpus
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "2 3"),
        pytest.param(["-n2"], "2 3", marks=pytest.mark.slow),
        pytest.param(["--simulate-gpus", "1", "--simulate-memory", "1GiB"], "1 1", marks=pytest.mark.slow),
        pytest.param(["-o", "simulate_gpus="], "0 0", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("table", ["tool.pytest.ini_options", pytest.param("tool.pytest", marks=pytest.mark.slow)])
def test_session_of_a_configuration_file(table: str, arguments: list[str], expected: str, suite: Suite) -> None:
    if table == "tool.pytest" and pytest.version_tuple < (9,):
        pytest.skip("pytest reads this table from version 9 on")
    suite.write(CONFIGURED)
    quote = '"' if table == "tool.pytest" else ""  # options of pytest's own table have types
    options = f'[{table}]\nsimulate_gpus = {quote}2{quote}\nsimulate_memory = "3GiB"\nsimulate_races = true\n'
    (suite.path / "pyproject.toml").write_text(options)
    races = {} if expected == "0 0" else {"RACES": "1"}
    done = suite.check({"passed": 1}, "-c", str(suite.path / "pyproject.toml"), *arguments, EXPECTED=expected, **races)
    if expected != "0 0":
        count, memory = expected.split()
        assert f"simulated GPUs: {count} of {memory}GiB, with race detection" in done.stdout


def test_wrong_configuration_file(suite: Suite) -> None:
    suite.write(CONFIGURED)
    (suite.path / "pytest.ini").write_text("[pytest]\nsimulate_gpus = two\n")
    done = suite.run("-c", str(suite.path / "pytest.ini"))
    assert done.returncode == 4
    assert "simulate_gpus in " in done.stderr
    assert "'two' is not a number of GPUs" in done.stderr


@pytest.mark.slow
@on_simulated_gpus
def test_session_started_by_pytest_main(suite: Suite) -> None:
    suite.write(
        "import accelerator as acc\ndef test_it():\n    assert acc.device_count() == 2\ndef test_not():\n    assert 0\n",
    )
    (suite.path / "given.py").write_text("import os\ndef pytest_configure(config):\n    print('given', os.getpid())\n")
    program = f"""
import os, sys, pytest
sys.path.insert(0, {str(suite.path)!r})
import given
from {PLUGIN.rpartition(".")[0]} import pytest_plugin
print(int(pytest.main(["--simulate-gpus", "2", "-q"], plugins=[pytest_plugin, given])), os.getpid(), flush=True)
print(int(pytest.main(["--simulate-gpus", "2", "-q", "-k", "nothing"], plugins=[pytest_plugin])))
print(int(pytest.main(["--simulate-gpus", "2", "-q"], plugins=[pytest_plugin, object()])))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=suite.path, env=plain_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "1 failed, 1 passed" in done.stdout
    first = next(line.split() for line in lines if re.fullmatch(r"\d+ \d+", line))
    assert first[0] == "1"
    assert lines[-1] == "4"
    assert lines[-2] == "5"
    printed = next(line.split()[1] for line in lines if line.startswith("given"))
    assert printed != first[1]
    assert "cannot get the plug-in" in done.stderr


@on_simulated_gpus
def test_crash_of_the_session(suite: Suite) -> None:
    suite.write("import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n")
    done = suite.run("--simulate-gpus", "1")
    assert done.returncode == 128 + 9
    assert "simulated GPUs: 1 of 8GiB\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate-memory", "1GiB"], "--simulate-memory needs --simulate-gpus"),
        pytest.param(["--simulate-name", "H100"], "--simulate-name needs --simulate-gpus", marks=pytest.mark.slow),
        pytest.param(["--simulate-races"], "--simulate-races needs --simulate-gpus", marks=pytest.mark.slow),
        (["--simulate-gpus", "x"], "'x' is not a number of GPUs"),
        pytest.param(["--simulate-gpus", "\uff12"], "'\uff12' is not a number of GPUs", marks=pytest.mark.slow),
    ],
)
def test_wrong_options(arguments: list[str], message: str, suite: Suite) -> None:
    done = suite.run(*arguments)
    assert done.returncode == 4
    assert message in done.stderr


@on_simulated_gpus
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate-gpus", "200"], "ERROR: gpus must be between 0 and 120, not 200\n"),
        (["--simulate-gpus", "1", "--simulate-memory", "much"], "ERROR: memory must be bytes or a size"),
    ],
)
def test_wrong_machines(arguments: list[str], message: str, suite: Suite) -> None:
    done = suite.run(*arguments)
    assert done.returncode == 4
    assert message in done.stderr


@pytest.mark.slow
@on_simulated_gpus
def test_wrong_mark_fails_only_its_test(suite: Suite) -> None:
    suite.hide_torch()
    messages = {
        "simulated_machine(gpus=200)": "simulated_machine: gpus must be between 0 and 120, not 200",
        "simulated_machine(compute='no')": "simulated_machine: compute must be True or False, not 'no'",
        "simulated_machine(gpu=2)": "simulated_machine: got an unexpected keyword argument 'gpu'; the arguments are gpus, ",
        "simulated_machine(1, 2)": "simulated_machine: too many positional arguments; the arguments are gpus, memory,",
        "min_gpus('2')": "min_gpus takes the number of GPUs, as in min_gpus(2)",
        "min_gpus": "min_gpus takes the number of GPUs, as in min_gpus(2)",
        "min_gpus(1, n=2)": "min_gpus takes the number of GPUs, as in min_gpus(2)",
    }
    tests = [f"@pytest.mark.{mark}\ndef test_{n}(unused):\n    pass\n" for n, mark in enumerate(messages)]
    fixture = "import pytest\n@pytest.fixture(scope='session')\ndef unused():\n    raise AssertionError('was set up')\n"
    right = "@pytest.mark.simulated_machine(gpus=1)\ndef test_right():\n    pass\ndef test_plain():\n    pass\n"
    suite.write(fixture + "\n".join(tests) + right)
    done = suite.check({"passed": 2, "error": len(messages)})
    assert done.returncode == 1
    assert "was set up" not in done.stdout
    for message in messages.values():
        assert f"\n{message}" in done.stdout


@on_simulated_gpus
def test_plugin_loaded_by_conftest_is_an_error(suite: Suite) -> None:
    suite.write("def test_it():\n    pass\n")
    (suite.path / "conftest.py").write_text(f"pytest_plugins = ['{PLUGIN}']\n")
    command = [sys.executable, "-m", "pytest", "--simulate-gpus", "2", "--rootdir", str(suite.path)]
    environment = plain_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # an installed plug-in would load earlier
    done = subprocess.run(command, cwd=suite.path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert f"add '-p {PLUGIN}'" in done.stderr


@pytest.mark.slow
def test_tests_are_skipped_if_simulation_is_unavailable(suite: Suite) -> None:
    suite.write("import pytest\n@pytest.mark.simulated_machine(gpus=2)\ndef test_it():\n    raise AssertionError\n")
    torch = suite.path / "path" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (torch / "version.py").write_text("__version__ = '2.9.1'\ncuda = None\n")
    done = suite.check({"skipped": 1}, "-rs", PYTHONPATH=f"{torch.parent}{os.pathsep}{ROOT}")
    assert "torch 2.9.1" in done.stdout
    refused = suite.run("--simulate-gpus", "2", PYTHONPATH=f"{torch.parent}{os.pathsep}{ROOT}")
    assert refused.returncode == 4
    assert "cannot simulate GPUs: torch 2.9.1" in refused.stderr


def test_unused_plugin_imports_nothing_more(suite: Suite) -> None:
    suite.write("""
        import sys

        def test_it(request):
            assert "accelerator.simulation.pytest_plugin" in sys.modules
            assert not {"torch", "pynvml", "accelerator.discovery"} & set(sys.modules)
            used = [name for name in sys.modules if name.startswith("accelerator.simulation._pytest.")]
            assert used == ["accelerator.simulation._pytest.keys"]
    """)
    suite.check({"passed": 1})


def test_imports_of_the_unused_plugin() -> None:
    program = f"""
import sys
import pytest, _pytest.terminal, _pytest.python
before = set(sys.modules)
import {PLUGIN}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
print(len([name for name in sys.modules if name.startswith("accelerator")]))
"""
    command = [sys.executable, "-c", program]
    packages, count = subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(packages.split()) <= {"_ctypes", "accelerator", "ctypes"}
    assert int(count) <= 30  # each costs a tenth of a millisecond


@pytest.mark.slow
@on_simulated_gpus
@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_pytest_cov_counts_lines_that_run_on_machines(workers: list[str], suite: Suite) -> None:
    pytest.importorskip("pytest_cov")
    library = suite.write(
        """
        import os

        GPUS = os.environ.get("ACCELERATOR_SIM_GPUS")
        if GPUS == "1":
            ON_ONE = "at collection"
        if GPUS == "5":
            ON_FIVE = "no such machine"

        def one():
            return "one"

        def two():
            return "two"

        def here():
            return "here"

        def never():
            return "never"
        """,
        "library.py",
    )
    suite.write(
        """
        import pytest
        import library

        @pytest.mark.simulated_machine(1)
        def test_one():
            assert library.one()

        @pytest.mark.simulated_machine(2)
        def test_two():
            assert library.two()

        def test_here():
            assert library.here()
    """
    )
    # "parallel" makes coverage delete the data of other processes when it starts, unless it appends.
    (suite.path / ".coveragerc").write_text("[run]\nparallel = true\n[report]\nshow_missing = true\n")
    done = suite.check({"passed": 3}, *workers, "--cov=library", "--cov-report=json:lines.json", "-p", "no:randomly")
    measured = json.loads((suite.path / "lines.json").read_text())["files"]["library.py"]
    lines = library.read_text().splitlines()
    missing = [lines[number - 1].strip() for number in measured["missing_lines"]]
    assert missing == ['ON_FIVE = "no such machine"', 'return "never"'], done.stdout + done.stderr
    assert [path.name for path in suite.path.glob(".coverage.*")] == []
    assert "Warning" not in done.stdout + done.stderr


def test_help_hides_the_option_of_the_pytest_on_the_machine(suite: Suite) -> None:
    text = suite.run("--help").stdout
    assert "--simulate-gpus=N" in text
    assert "on-simulated-gpus" not in text
    assert "SUPPRESS" not in text


@pytest.mark.slow
@on_simulated_gpus
def test_a_plugin_with_a_reporter_of_its_own(suite: Suite) -> None:
    """pytest-pretty and, on a terminal, pytest-sugar replace the terminal reporter, if there is one."""
    suite.hide_torch()
    reporter = """
        import pytest
        from _pytest.terminal import TerminalReporter

        @pytest.hookimpl(trylast=True)
        def pytest_configure(config):
            standard = config.pluginmanager.getplugin("terminalreporter")
            config.pluginmanager.unregister(standard)
            config.pluginmanager.register(TerminalReporter(standard.config), "terminalreporter")
    """
    suite.write(reporter, "reporter.py")
    suite.write("import pytest\n@pytest.mark.simulated_machine(gpus=1)\ndef test_it():\n    assert 0\n")
    done = suite.check({"failed": 1}, "-p", "reporter", PYTHONPATH=f"{suite.path}{os.pathsep}{ROOT}")
    assert done.stdout.count("test session starts") == done.stdout.count("test_it.py F") == 1


@pytest.mark.slow
@on_simulated_gpus
@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has subtests from version 9 on")
def test_a_failed_subtest_fails_its_test(suite: Suite) -> None:
    suite.hide_torch()
    suite.write("""
        import pytest

        @pytest.mark.simulated_machine(gpus=1)
        def test_it(subtests):
            for number in range(3):
                with subtests.test(number=number):
                    assert number != 1
    """)
    done = suite.check({"failed": 2})
    assert "contains 1 failed subtest" in done.stdout


# Plug-ins as pytest-randomly, pytest-rerunfailures and pytest-retry are: workers need what the session drew or opened.
PLUGINS_OF_WORKERS = """
    import pytest

    PORT = pytest.StashKey()

    class Workers:
        def pytest_configure_node(self, node):
            node.workerinput["drawn"] = node.config.option.drawn
            node.workerinput["gateway"] = node.gateway.id

    class Port:
        @pytest.hookimpl(optionalhook=True)
        def pytest_configure_node(self, node):
            node.workerinput["port"] = node.config.stash[PORT]  # a session without workers has none

        def pytest_configure(self, config):
            config.reporter = "offline"
            if hasattr(config, "workerinput"):
                config.reporter = f"port {config.workerinput['port']}"

    def pytest_addoption(parser):
        parser.addoption("--drawn", default="default")

    def pytest_configure(config):
        config.pluginmanager.register(Port())
        if config.pluginmanager.hasplugin("xdist"):
            config.pluginmanager.register(Workers())
        if hasattr(config, "workerinput"):
            config.option.drawn = config.workerinput["drawn"]
        elif config.option.drawn == "default":
            import random
            config.option.drawn = random.getrandbits(32)
        if not hasattr(config, "workerinput"):
            (config.rootpath / "drawn").write_text(str(config.option.drawn))
"""


@on_simulated_gpus
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        pytest.param(["-p", "no:xdist"], marks=pytest.mark.slow),
        pytest.param(["-n1"], marks=pytest.mark.slow),
    ],
)
def test_plugins_that_prepare_workers(arguments: list[str], suite: Suite) -> None:
    pytest.importorskip("xdist")
    suite.hide_torch()
    suite.write(PLUGINS_OF_WORKERS, "plugins.py")
    if "-n1" in arguments:
        with (suite.path / "plugins.py").open("a") as plugins:
            plugins.write("    config.stash[PORT] = 7\n")
    suite.write("""
        import pytest

        @pytest.mark.simulated_machine(gpus=1)
        def test_it(pytestconfig):
            has = pytestconfig.option.drawn, pytestconfig.reporter, pytestconfig.workerinput["workerid"]
            (pytestconfig.rootpath / "has").write_text(repr(has))
    """)
    suite.check({"passed": 1}, "-p", "plugins", *arguments, PYTHONPATH=f"{suite.path}{os.pathsep}{ROOT}")
    of_worker = ("port 7", "gw0") if "-n1" in arguments else ("offline", "master")
    assert (suite.path / "has").read_text() == repr((int((suite.path / "drawn").read_text()), *of_worker))
