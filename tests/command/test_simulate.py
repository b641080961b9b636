"""Tests ``python -m accelerator simulate``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accelerator._command.simulate import main
from accelerator._machine import torch_build
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only, make_compiler, python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [linux_only, pytest.mark.torch_free]

torch_build = torch_build.read()
takes_cuda_build = pytest.mark.skipif(
    torch_build is not None and not torch_build.cuda, reason="simulate refuses a torch that is not built for CUDA"
)

SIMULATE = "import sys; from accelerator._command.simulate import main; sys.exit(main(sys.argv[1:]))"


def simulate(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m accelerator simulate``, with some environment variables set."""
    return python(SIMULATE, *arguments, env={**os.environ, **variables})


@takes_cuda_build
def test_options_reach_the_command() -> None:
    program = """if True:
        import pynvml as n
        n.nvmlInit()
        for handle in map(n.nvmlDeviceGetHandleByIndex, range(n.nvmlDeviceGetCount())):
            print(n.nvmlDeviceGetName(handle), n.nvmlDeviceGetMemoryInfo(handle).total // 2**30, sep="/", end="/")
            print(n.nvmlDeviceGetCudaComputeCapability(handle), n.nvmlDeviceGetMaxMigDeviceCount(handle), sep="/")
    """
    options = (
        "--gpus 3 --nvlink all --numa 0,1 --memory 1GiB,2GiB --memory 3GiB --name A --name B --capability 8.6,9.0 --mig off,2"
    )
    done = simulate(*options.split(), "--", sys.executable, "-c", program)
    assert done.stdout.splitlines() == ["A/1/(8, 6)/0", "B/2/(9, 0)/7", "B/3/(9, 0)/7"], done.stderr


@takes_cuda_build
def test_options_may_be_repeated() -> None:
    options = "--gpus 3 --nvlink 0 --nvlink off --numa 0 --numa 1,2 --mig 2 --mig off --capability 9.0 --capability 8.6"
    names = ("NVLINK", "NUMA", "MIG", "CAPABILITIES")
    done = simulate(*options.split(), "--", "printenv", *(f"ACCELERATOR_SIM_{name}" for name in names))
    assert done.stdout.splitlines() == ["0,off", "1,2,4", "2,off", "9.0,8.6"], done.stderr
    assert simulate("--nvlink", "all", "--", "printenv", "ACCELERATOR_SIM_NVLINK").stdout == "0\n"


@takes_cuda_build
@pytest.mark.parametrize("comma", [",", ", ", " ,", " , "])
def test_blanks_at_commas_change_nothing(comma: str) -> None:
    values = {"memory": "1GiB 2GiB", "capability": "9.0 8.0", "mig": "2 off", "nvlink": "0 off", "numa": "0 1"}
    options = [f"--{name}={value.replace(' ', comma)}" for name, value in values.items()]
    names = (f"ACCELERATOR_SIM_{name}" for name in ("MEMORY", "CAPABILITIES", "MIG", "NVLINK", "NUMA"))
    done = simulate("--gpus", "2", *options, "--", "printenv", *names)
    assert done.stdout.split() == [f"{2**30},{2**31}", "9.0,8.0", "2,off", "0,off", "1,2"], done.stderr


@takes_cuda_build
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["1", "zero", "1"]),
        ("--no-compute --fill nan --no-triton", ["0", "nan", "0"]),
    ],
)
def test_options_set_variables(options: str, expected: list[str]) -> None:
    names = (f"ACCELERATOR_SIM_{name}" for name in ("COMPUTE", "FILL", "TRITON"))
    values = simulate(*options.split(), "--", "printenv", *names).stdout.split()
    assert values == expected


@takes_cuda_build
def test_gpu_name_may_contain_commas() -> None:
    program = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(1)))"
    assert simulate("--gpus", "2", "--name", "Foo, Bar", "--", sys.executable, "-c", program).stdout == "Foo, Bar\n"


@takes_cuda_build
def test_exit_status_if_the_caller_ignores_sigchld() -> None:
    # If SIGCHLD is ignored, the kernel discards the exit status of children. Child processes inherit this setting.
    program = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    done = python(program, sys.executable, "-c", SIMULATE, "--", "/bin/sh", "-c", "exit 7", env=dict(os.environ))
    assert done.returncode == 7, done.stderr


@takes_cuda_build
def test_the_command_is_searched_on_the_machines_path() -> None:
    done = simulate("nvidia-smi", "-L", PATH=os.defpath)  # without that of the machine of the tests
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("GPU 0: Simulated GPU (UUID: ")


@takes_cuda_build
def test_output_and_later_arguments_are_the_commands() -> None:
    done = simulate("sh", "-c", 'echo "$@" >&2; echo out', "sh", "--", "--gpus", "-h")
    assert (done.stdout, done.stderr) == ("out\n", "-- --gpus -h\n")


@takes_cuda_build
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command: give one after --"),
        (["--gpus", "2", "--"], "no command: give one after --"),
        (["--", ""], "no command: give one after --"),
        (["--build", "/proc/no", "--", "true"], "--build takes no command"),
        (["--build", "/proc/no"], "cannot build into /proc/no: "),
        (["--build", ""], "--build needs a folder"),
        (["--nvlink", "yes", "--", "true"], "'yes' is not all, off, or a group for each GPU"),
        (["--nvlink", "all", "--nvlink", "0", "--", "true"], "nvlink must be all, or off or a group for each GPU, not both"),
        (["--numa", "all", "--", "true"], "'all' is not a node for each GPU"),
        (["--gpus", "many", "--", "true"], "'many' is not a number of GPUs"),
        (["--gpus", "\uff12", "--", "true"], "'\uff12' is not a number of GPUs"),
        (["--gpus", "1_0", "--", "true"], "'1_0' is not a number of GPUs"),
        (["--mig", "\uff12", "--", "true"], "'\uff12' is not a number of instances or off"),
        (["--numa", "\uff12", "--", "true"], "'\uff12' is not a node for each GPU"),
        (["--memory", "8", "--", "true"], 'not 8 bytes; did you mean "8GiB"?'),
        (["--gpus", "500", "--", "true"], "gpus must be between 0 and 120, not 500"),
        (["--memory", "much", "--", "true"], "memory must be bytes or a size"),
        (["--mig", "yes", "--", "true"], "'yes' is not a number of instances or off"),
        (["--fill", "ones", "--", "true"], "invalid choice: 'ones' (choose from"),
        (["--kernels", "ptx", "--", "true"], "invalid choice: 'ptx'"),
        (["--driver", "new", "--", "true"], "invalid choice: 'new'"),
        (["--gpu", "2", "--", "true"], "--gpu"),
        (["--on-node-failure", "continue", "--", "true"], "--on-node-failure needs --nodes"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.count("\n") == 1


@takes_cuda_build
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--", "no-such-command"], 127, "python -m accelerator simulate: no-such-command: command not found"),
        (["--", "/etc/passwd"], 126, "/etc/passwd: Permission denied"),
    ],
)
def test_exit_status_if_there_is_nothing_to_run(arguments: list[str], status: int, message: str) -> None:
    done = simulate(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("folder", ["here", "{}/there"])
def test_build_prints_an_absolute_path(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerator._command import simulate as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.libraries, "platform_problem", lambda: None)
    monkeypatch.setattr(command.libraries, "build", lambda root: root / "libraries")
    monkeypatch.setattr(command, "_build_engine_into", lambda root: print(root))
    assert command.main(["--build", folder.format(tmp_path)]) == 0
    root = tmp_path / folder.rpartition("/")[2]
    assert capsys.readouterr().out.splitlines() == [str(root / "libraries"), str(root)]


@pytest.mark.parametrize(
    ("cuda", "problem", "printed", "error"),
    [
        ("13.0", None, "libraries\nengine\n", ""),
        (None, None, "libraries\n", ""),
        (
            "13.0",
            RuntimeError("no C++ compiler"),
            "libraries\n",
            "python -m accelerator simulate: built without the engine: no C++ compiler\n",
        ),
    ],
)
def test_build_has_the_engine_if_it_can(
    cuda: str | None,
    problem: Exception | None,
    printed: str,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from accelerator._command import simulate as command

    def build_engine(torch: Any, root: Path) -> None:
        assert (torch.version.cuda, root) == (cuda, Path("/there"))
        if problem:
            raise problem
        print("engine")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))  # type: ignore[arg-type]
    monkeypatch.setattr(command.libraries, "platform_problem", lambda: None)
    monkeypatch.setattr(command.libraries, "build", lambda root: "libraries")
    monkeypatch.setattr(command.engine, "describe", lambda torch: torch)
    monkeypatch.setattr(command.engine, "build", build_engine)
    assert command.main(["--build", "/there"]) == 0
    assert capsys.readouterr() == (printed, error)


def test_help_lists_every_option() -> None:
    done = simulate("--help")
    assert done.returncode == 0
    assert "torch's ops compute" in done.stdout
    options = (
        "gpus nodes memory name capability mig nvlink numa driver nvml no-compute fill kernels no-triton tune races"
        " speed build fault faults on-node-failure"
    )
    assert set(re.findall(r"(?<=  --)[a-z-]+", done.stdout)) == {*options.split(), "late-copies"}


def test_help_fits_80_columns() -> None:
    lines = simulate("--help", COLUMNS="80").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$", line)], "no word is broken"


@pytest.mark.parametrize(
    ("version", "built_for"),
    [
        ("cuda = None", "the CPU alone"),
        ("cuda = None; hip = '6.4'", "ROCm"),
        ("cuda: str | None = None; xpu = '2025'", "XPU"),
    ],
)
def test_torch_without_cuda_is_an_error(version: str, built_for: str, tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (torch / "version.py").write_text(f"from __future__ import annotations\n__version__ = '2.9.1'\n{version}\n")
    done = simulate("--", "true", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.returncode == 2
    assert f"torch 2.9.1 of {sys.executable} is built for {built_for}; install a CUDA build\n" in done.stderr
    assert done.stderr.count("\n") == 1


@takes_cuda_build
def test_state_is_shared_and_removed() -> None:
    program = 'printf "%s " "$ACCELERATOR_SIM_STATE"; test -d "$(dirname "$ACCELERATOR_SIM_STATE")"; echo $?'
    path, status = simulate("--", "sh", "-c", program).stdout.split()
    assert status == "0"
    assert not Path(path).parent.exists()


@takes_cuda_build
@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, pytest.param(signal.SIGQUIT, marks=pytest.mark.slow)],
)
def test_signals_are_forwarded_to_the_command(signal_number: signal.Signals) -> None:
    # A signal that arrives just before signal.pause() would not end the pause.
    program = f"""
import signal, sys, time
signal.signal({int(signal_number)}, lambda *_: (print("tidied up"), sys.exit(5)))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
    command = [sys.executable, "-c", SIMULATE, "--", sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal_number)
        assert process.stdout.read() == "tidied up\n"
        assert process.wait(DEADLINE) == 5


@takes_cuda_build
def test_terminal_interrupt_reaches_the_command_once() -> None:
    import pty

    # A handler may run only once for two signals. sigtimedwait returns each signal with its sender.
    program = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("ready", flush=True)
for _ in range(2):
    codes = []
    while (received := signal.sigtimedwait({signal.SIGINT}, 0.3 if codes else 60)) is not None:
        codes.append(received.si_code)
    print("from the kernel" if codes == [128] else f"sent by {codes}", flush=True)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execv(sys.executable, [sys.executable, "-c", SIMULATE, "--", sys.executable, "-c", program])
    output = b""
    for signal_number in range(3):
        deadline = time.monotonic() + DEADLINE
        while output.count(b"\n") <= signal_number and time.monotonic() < deadline:
            output += os.read(terminal, 1000)
        if signal_number < 2:
            os.write(terminal, b"\x03")
    lines = output.replace(b"^C", b"").split(b"\r\n")
    assert lines == [b"ready", *[b"from the kernel"] * 2, b""]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


# Machines that cannot simulate GPUs


def no_compiler(directory: Path) -> dict[str, str]:
    """Return variables with which no compiler is found."""
    return {"PATH": str(directory), "CC": "", "TMPDIR": str(directory)}


def unknown_compiler(directory: Path) -> dict[str, str]:
    """Return variables that name a compiler that does not exist."""
    return {"CC": f"{directory}/icc -O3", "TMPDIR": str(directory)}


def failing_compiler(directory: Path) -> dict[str, str]:
    """Return variables that name a compiler that fails."""
    body = 'test "$1" = --version || { echo "internal error 7" >&2; exit 3; }'
    return {"CC": str(make_compiler(directory, body)), "TMPDIR": str(directory)}


def unwritable_cache(directory: Path) -> dict[str, str]:
    """Create files in place of the cache directories, and return the variables with which they are used."""
    (directory / "accelerator").touch()
    (directory / f"accelerator-{os.geteuid()}").touch()
    return {"TMPDIR": str(directory)}


def cache_with_a_blank(directory: Path) -> dict[str, str]:
    """Return a cache directory whose path LD_PRELOAD cannot contain."""
    return {"XDG_CACHE_HOME": str(directory / "my cache")}


@takes_cuda_build
@pytest.mark.parametrize(
    ("obstacle", "message", "lines"),
    [
        (no_compiler, "none of cc, gcc and clang was found", 1),
        (unknown_compiler, "icc', which was not found", 1),
        (failing_compiler, "failed (status 3):\ninternal error 7", 3),
        (unwritable_cache, "set XDG_CACHE_HOME", 1),
        (cache_with_a_blank, "without blanks", 1),
    ],
)
def test_error_names_the_obstacle(obstacle: Callable[[Path], dict[str, str]], message: str, lines: int, tmp_path: Path) -> None:
    done = simulate("--", "/bin/true", **{"XDG_CACHE_HOME": str(tmp_path), **obstacle(tmp_path)})
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    lines_of_error = [line for line in done.stderr.splitlines() if not line.startswith("accelerator: compiling")]
    assert lines_of_error[0].startswith("python -m accelerator simulate: cannot simulate GPUs: ")
    assert done.stderr.count("\n") == lines


@takes_cuda_build
def test_next_simulation_removes_folder_of_a_killed_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIMULATE, "--", sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdin is not None
    assert killed.stdout is not None
    killed.stdout.readline()
    # The command needs the folder while it runs.
    assert simulate("--", "true", TMPDIR=str(tmp_path)).returncode == 0
    (folder,) = tmp_path.iterdir()
    assert (folder / "lock").exists()
    killed.kill()
    killed.wait()
    assert killed.stdout.read() == ""  # the command has ended
    deadline = time.monotonic() + DEADLINE
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        assert simulate("--", "true", TMPDIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []
