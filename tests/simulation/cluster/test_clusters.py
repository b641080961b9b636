"""Tests ``python -m accelerator simulate --nodes``: the nodes' environments, output, signals and ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from accelerator._machine import torch_build
from accelerator.simulation._outside import cluster
from accelerator.simulation._outside.node_output import NodeOutput
from tests import support
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only, python
from tests.support.simulation_driver import needs_cuda_torch

_build = torch_build.read()
pytestmark = [
    linux_only,
    pytest.mark.torch_free,
    pytest.mark.skipif(_build is not None and not _build.cuda, reason="simulate refuses a torch that is not built for CUDA"),
]

SIMULATE = "import sys; from accelerator._command.simulate import main; sys.exit(main(sys.argv[1:]))"


def simulate(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(SIMULATE, *arguments, env={**os.environ, **variables})


def on_nodes(script: str, nodes: int = 2, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script on each node."""
    return simulate("--nodes", str(nodes), "--gpus", "1", "--", "sh", "-c", script, "sh", *arguments)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SIMULATE, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def read_until(file: IO[str] | None, lines: set[str]) -> None:
    """Read until each of these lines has come."""
    assert file
    missing = set(lines)
    while missing:
        line = file.readline()
        assert line, f"the output has ended without {missing}"
        missing.discard(line.rstrip("\n"))


def test_a_child_may_have_any_name() -> None:
    # The kernel cuts names after 15 bytes, inside a character, too.
    program = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xc3) ('); print('named', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        read_until(child.stdout, {"named"})
        assert child.pid in cluster._children()


def without_compilation(errors: str) -> str:
    """Return error output without the line of a first run, which compiles the simulated libraries."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("accelerator: compiling"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_variables_of_the_nodes() -> None:
    names = {
        "PET_NNODES": "3",
        "PET_MASTER_ADDR": "127.0.0.1",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    own = {"PET_NODE_RANK": "", "SLURM_NODEID": "", "SLURMD_NODENAME": "node"}
    echoes = "; ".join(f"echo {name}=${name}" for name in (*names, *own, "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"))
    lines = on_nodes(echoes, 3).stdout.splitlines()
    ports = {line.partition("=")[2] for line in lines if "PET_MASTER_PORT" in line}
    for node in range(3):
        expected = {f"[node {node}] {name}={value}" for name, value in names.items()}
        expected |= {f"[node {node}] {name}={value}{node}" for name, value in own.items()}
        assert expected <= set(lines), lines
    (port,) = ports
    # No outgoing connection of another process takes it before the command listens on it.
    first_of_connections = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    assert 1024 < int(port) < int(first_of_connections)
    assert sum(line.endswith(f"PET_RDZV_ENDPOINT=127.0.0.1:{port}") for line in lines) == 3


def test_nodes_are_machines_of_their_own() -> None:
    program = """if True:
        import os, sys, pynvml as n
        n.nvmlInit()
        handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
        print(*map(n.nvmlDeviceGetUUID, handles), os.environ["ACCELERATOR_SIM_STATE"])
    """
    done = simulate("--nodes", "2", "--gpus", "2", "--", sys.executable, "-c", program)
    nodes = dict(line.split("] ") for line in done.stdout.splitlines())
    assert sorted(nodes) == ["[node 0", "[node 1"], done.stderr
    (first, second, state), (third, fourth, other_state) = (nodes[node].split() for node in sorted(nodes))
    assert len({first, second, third, fourth}) == 4
    assert first == python(program_for_uuid(), env=machine()).stdout.strip(), "node 0 has the UUIDs of a machine alone"
    assert state != other_state
    assert not Path(state).parent.exists()


def test_names_of_the_nodes() -> None:
    """Each node has a name, which resolves on all of them to an address of its own."""
    program = """if True:
        import socket
        addresses = [socket.gethostbyname(f"node{node}") for node in range(2)]
        with socket.create_server((addresses[1], 0)) as server:
            socket.create_connection(("node1", server.getsockname()[1])).close()
        try:
            socket.getaddrinfo("node0", None, flags=socket.AI_NUMERICHOST)
        except socket.gaierror as error:
            numeric = error.errno == socket.EAI_NONAME
        print(socket.gethostname(), *addresses, socket.gethostbyname("localhost"), numeric)
    """
    done = simulate("--nodes", "2", "--gpus", "1", "--", sys.executable, "-c", program)
    expected = [f"[node {node}] node{node} 127.0.0.1 127.0.0.2 127.0.0.1 True" for node in range(2)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def test_machine_alone_has_the_name_of_the_host() -> None:
    done = simulate("--", sys.executable, "-c", "import socket; print(socket.gethostname())")
    assert done.stdout == f"{socket.gethostname()}\n", done.stderr


def program_for_uuid() -> str:
    return "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)))"


def machine() -> dict[str, str]:
    from tests.support import simulated_environment

    return simulated_environment(gpus=2)


# The start of the programs that call the libraries. Node 0 writes bytes to a file, and node 1 waits for them.
PRELUDE = """
import ctypes, os, sys, time
from pathlib import Path

runtime, shared = ctypes.CDLL("libcudart.so.13"), Path(sys.argv[1])
node = int(os.environ["SLURM_NODEID"])

def check(code):
    assert code == 0, code

def write(name, bytes):
    (shared / f"{name}.part").write_bytes(bytes)
    (shared / f"{name}.part").rename(shared / name)

def read(name):
    while not (shared / name).exists():
        time.sleep(0.01)
    return (shared / name).read_bytes()
"""


def call_libraries(program: str, shared: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that begins with the prelude on two nodes of one GPU."""
    return simulate("--nodes", "2", "--gpus", "1", "--", sys.executable, "-c", PRELUDE + program, str(shared))


def test_nccl_connects_the_nodes(tmp_path: Path) -> None:
    program = """
nccl = ctypes.CDLL("libnccl.so.2")

class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

identifier, comm = Id(), ctypes.c_void_p()
if node == 0:
    check(nccl.ncclGetUniqueId(ctypes.byref(identifier)))
    write("id", bytes(identifier))
else:
    identifier = Id.from_buffer_copy(read("id"))
check(runtime.cudaSetDevice(0))
check(nccl.ncclCommInitRank(ctypes.byref(comm), 2, identifier, node))
value = ctypes.c_int64(node + 1)
int64, add = 4, 0
pointer = ctypes.byref(value)
check(nccl.ncclAllReduce(pointer, pointer, ctypes.c_size_t(1), int64, add, comm, None))
check(runtime.cudaDeviceSynchronize())
check(nccl.ncclCommDestroy(comm))
print(value.value)
"""
    done = call_libraries(program, tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[node 0] 3", "[node 1] 3"], done.stderr


def test_memory_and_events_are_not_shared_between_nodes(tmp_path: Path) -> None:
    program = """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]

def open_handles():
    memory, event = Handle.from_buffer_copy(read("memory")), Handle.from_buffer_copy(read("event"))
    pointer, opened = ctypes.c_void_p(), ctypes.c_void_p()
    codes = [runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), memory, 1)]
    codes += [runtime.cudaIpcOpenEventHandle(ctypes.byref(opened), event)]
    print(*codes, flush=True)

if node == 0 and os.fork():  # the child is another process of the same node
    pointer, event, handle = ctypes.c_void_p(), ctypes.c_void_p(), Handle()
    check(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1024)))
    check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer))
    write("memory", bytes(handle))
    check(runtime.cudaEventCreateWithFlags(ctypes.byref(event), 2 | 4))
    check(runtime.cudaIpcGetEventHandle(ctypes.byref(handle), event))
    write("event", bytes(handle))
    read("done")
    os.wait()
else:
    open_handles()
    if node == 1:
        write("done", b"")
"""
    done = call_libraries(program, tmp_path)
    invalid_handle = 400
    assert sorted(done.stdout.splitlines()) == ["[node 0] 0 0", f"[node 1] {invalid_handle} {invalid_handle}"], done.stderr


class TestOutput:
    def test_every_line_begins_with_its_node(self) -> None:
        done = on_nodes("printf 'a\\n\\nb'; echo error >&2; exit 0")
        lines = [f"[node {node}] {text}" for node in (0, 1) for text in ("", "a", "b")]
        assert sorted(done.stdout.splitlines()) == lines
        assert sorted(without_compilation(done.stderr).splitlines()) == ["[node 0] error", "[node 1] error"]
        assert done.stdout.endswith("\n"), "an unfinished last line is finished"

    def test_one_node(self) -> None:
        assert on_nodes("echo out", 1).stdout == "[node 0] out\n"

    def test_lines_are_not_mixed(self) -> None:
        done = on_nodes(f"{sys.executable} -c 'for i in range(3000): print(str(i) * 20)'", 3)
        lines = done.stdout.splitlines()
        for node in range(3):
            own = [line for line in lines if line.startswith(f"[node {node}] ")]
            assert own == [f"[node {node}] {str(i) * 20}" for i in range(3000)]
        assert len(lines) == 9000

    def test_a_line_of_a_mebibyte(self) -> None:
        done = on_nodes("head -c 1048576 /dev/zero | tr '\\0' x; echo", 1)
        assert re.sub(r"\n?\[node 0\] |\n", "", done.stdout) == "x" * 1048576

    def test_an_unfinished_line_is_shown(self) -> None:
        with start(
            "--nodes", "2", "--", "sh", "-c", "test $SLURM_NODEID = 1 || { printf 'continue? '; read x; }", stdin=-1
        ) as run:
            assert run.stdout
            assert run.stdin
            assert run.stdout.read(len("[node 0] continue? ")) == "[node 0] continue? "
            assert run.communicate("yes\n", DEADLINE)[0] == "\n"

    @pytest.mark.parametrize(
        ("writes", "expected"),
        [
            ([(0, "a", 1), (0, "b\n", 1)], ["[node 0] ab\n", ""]),
            ([(0, "a", 1), (1, "b\n", 1), (0, "c\n", 1)], ["[node 0] a\n[node 1] b\n[node 0] c\n", ""]),
            ([(0, "a", 1), (0, "b", 2), (0, "c\n", 2)], ["[node 0] a\n", "[node 0] bc\n"]),
            (
                [(1, "a\n\nb", 1), (0, "c", 1), (1, "d\n", 1)],
                ["[node 1] a\n[node 1] \n[node 1] b\n[node 0] c\n[node 1] d\n", ""],
            ),
            ([(0, "1%\r2%", 1), (0, "\r3%\n", 1)], ["[node 0] 1%\r[node 0] 2%\r[node 0] 3%\n", ""]),
        ],
    )
    def test_another_line_ends_an_unfinished_one(self, writes: list[tuple[int, str, int]], expected: list[str]) -> None:
        output, pipes = NodeOutput(), {target: os.pipe() for target in (1, 2)}
        for node, text, target in writes:
            assert output._write(node, text.encode(), pipes[target][1])
        found = []
        for reading, writing in pipes.values():
            os.close(writing)
            with open(reading, newline="") as file:
                found.append(file.read())
        assert found == expected

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("\\377\\n", b"[node 0] \xff\n"),
            ("1%%\\r2%%\\r\\n", b"[node 0] 1%\r[node 0] 2%\r\n"),
        ],
        ids=["no text", "progress bar"],
    )
    def test_bytes(self, written: str, expected: bytes) -> None:
        command = [sys.executable, "-c", SIMULATE, "--nodes", "1", "--", "printf", written]
        assert subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout == expected

    def test_a_reader_that_leaves(self) -> None:
        with start("--nodes", "2", "--", "sh", "-c", "while echo y; do :; done", stdin=subprocess.DEVNULL) as run:
            assert run.stdout
            run.stdout.readline()
            run.stdout.close()
            assert run.wait(DEADLINE) == 128 + signal.SIGPIPE


class TestStdin:
    def test_input_goes_to_node_0(self) -> None:
        with start("--nodes", "3", "--", "cat", stdin=-1) as run:
            assert run.communicate("text\n", DEADLINE)[0] == "[node 0] text\n"


UNTIL_NODE_0_HAS_ENDED = "until test -s $1 && ! kill -0 $(cat $1) 2> /dev/null; do sleep 0.01; done; "


class TestEnds:
    @pytest.mark.parametrize(
        ("script", "status"),
        [
            ("exit 0", 0),
            ("exit $((3 * SLURM_NODEID))", 3),
            ("test $SLURM_NODEID = 0 || kill -KILL $$; exec sleep 300", 137),
            ("test $SLURM_NODEID = 0 && { echo $$ > $1; exit 0; }; " + UNTIL_NODE_0_HAS_ENDED + "exit 4", 4),
        ],
    )
    def test_status_is_that_of_the_first_failure(self, script: str, status: int, tmp_path: Path) -> None:
        done = on_nodes(script, 2, str(tmp_path / "pid"))
        assert done.returncode == status, done.stderr

    def test_failure_ends_the_others(self, tmp_path: Path) -> None:
        script = """
            trap 'echo ending; exit 9' TERM
            if [ $SLURM_NODEID = 1 ]; then
                until [ -e $1/0 ] && [ -e $1/2 ]; do sleep 0.01; done
                exit 5
            fi
            touch $1/$SLURM_NODEID
            while :; do sleep 0.1; done
        """
        done = on_nodes(script, 3, str(tmp_path))
        assert done.returncode == 5
        assert sorted(done.stdout.splitlines()) == ["[node 0] ending", "[node 2] ending"]
        messages = ["node 1 failed with status 5; ending the others", "node 1 failed first, with status 5"]
        lines = [f"python -m accelerator simulate: {message}\n" for message in messages]
        assert without_compilation(done.stderr) == "".join(lines)

    @pytest.mark.slow  # 10 s
    def test_node_that_ignores_sigterm_is_killed(self, tmp_path: Path) -> None:
        begin = time.monotonic()
        script = """
            trap '' TERM
            if [ $SLURM_NODEID = 1 ]; then
                until [ -e $1 ]; do sleep 0.01; done
                exit 6
            fi
            touch $1
            while :; do sleep 0.1; done
        """
        done = on_nodes(script, 2, str(tmp_path / "ignores"))
        assert done.returncode == 6
        assert time.monotonic() - begin >= 10

    @pytest.mark.parametrize(("command", "status"), [("no-such-command", 127), ("/etc/passwd", 126)])
    def test_wrong_command_is_named_once(self, command: str, status: int) -> None:
        done = simulate("--nodes", "3", "--", command)
        assert (done.returncode, done.stdout) == (status, "")
        assert without_compilation(done.stderr).count("\n") == 1
        assert command in done.stderr

    @pytest.mark.parametrize("value", ["0", "-1", "129", "two", "\uff12", ""])
    def test_wrong_number_of_nodes(self, value: str) -> None:
        done = simulate(f"--nodes={value}", "--", "true")
        assert (done.returncode, done.stdout) == (2, "")
        is_number = value.strip("-").isascii() and value.strip("-").isdigit()
        expected = f"nodes must be between 1 and 128, not {value}" if is_number else f"{value!r} is not a number of nodes"
        assert expected in done.stderr

    def test_processes_left_behind_are_ended(self) -> None:
        script = """
            test $SLURM_NODEID = 0 || exit 0
            sleep 300 & echo $!
            setsid sleep 300 & echo $!
        """
        done = on_nodes(script)
        assert done.returncode == 0
        pids = [int(line.partition("] ")[2]) for line in done.stdout.splitlines()]
        assert len(pids) == 2
        assert not any(map(is_alive, pids))


class TestSignals:
    @pytest.mark.parametrize("number", support.sample([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM))
    def test_signals_go_to_all_nodes(self, number: signal.Signals) -> None:
        # Node 0 has ended while node 1 still tidies up. A signal just before signal.pause() would not end the pause.
        program = f"""
import os, signal, sys, time
signal.signal({int(number)}, lambda *_: (time.sleep(0.3 * int(os.environ["SLURM_NODEID"])), print("tidied up"), sys.exit(5)))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
        with start("--nodes", "2", "--", sys.executable, "-c", program) as run:
            read_until(run.stdout, {"[node 0] ready", "[node 1] ready"})
            run.send_signal(number)
            output, errors = run.communicate(timeout=DEADLINE)
            assert sorted(output.splitlines()) == ["[node 0] tidied up", "[node 1] tidied up"]
            assert without_compilation(errors) == ""
            assert run.returncode == 5

    def test_a_node_that_goes_on_after_a_signal_gets_stronger_ones(self) -> None:
        program = """
import signal
from accelerator.simulation._outside import cluster
cluster._GRACE_S, send = 0.1, cluster._send
def tell(number, pids):
    if isinstance(pids, dict):  # the nodes, not what they leave behind
        print(signal.Signals(number).name, flush=True)
    send(number, pids)
cluster._send = tell
"""
        script = """
            trap '' TERM
            trap 'test $SLURM_NODEID = 1 || exit 5' INT
            echo ready
            while :; do sleep 0.05; done
        """
        command = [sys.executable, "-c", program + SIMULATE, "--nodes", "2", "--", "sh", "-c", script]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            read_until(run.stdout, {"[node 0] ready", "[node 1] ready"})
            run.send_signal(signal.SIGINT)
            try:
                output, errors = run.communicate(timeout=DEADLINE)
            finally:
                run.kill()  # the nodes end with it
            assert (run.returncode, output.split(), without_compilation(errors)) == (5, ["SIGINT", "SIGTERM", "SIGKILL"], "")

    def test_interrupt_of_a_terminal_reaches_each_node_once(self) -> None:
        import pty

        program = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("ready\\n", end="", flush=True)  # at once: PYTHONUNBUFFERED would write the end separately
codes = []
while (received := signal.sigtimedwait({signal.SIGINT}, 0.5 if codes else 60)) is not None:
    codes.append(received.si_code)
print("from the kernel" if codes == [128] else f"sent by {codes}", flush=True)
"""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(REPOSITORY)
            os.execv(sys.executable, [sys.executable, "-c", SIMULATE, "--nodes", "2", "--", sys.executable, "-c", program])
        output = b""
        deadline = time.monotonic() + DEADLINE
        while output.count(b"ready") < 2 and time.monotonic() < deadline:
            output += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while output.count(b"from the kernel") < 2 and time.monotonic() < deadline:
            output += os.read(terminal, 1000)
        lines = output.replace(b"^C", b"").split(b"\r\n")
        expected = [b"[node %d] %s" % (node, text) for node in (0, 1) for text in (b"from the kernel", b"ready")]
        assert sorted(filter(None, lines)) == expected
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(terminal)


def test_faults_of_nodes_that_never_fired_are_named_in_their_order() -> None:
    faults = ("hang,node=1,after_ops=5", "slow=1ms,after_collectives=3", "flip=1,node=0")
    options = (word for fault in faults for word in ("--fault", fault))
    done = simulate("--nodes", "2", *options, "--", "nvidia-smi", "-L")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    of_both = "slow=1ms,after_collectives=3 never fired, after 0 collectives"
    lines = [of_both, "flip=1,node=0 never fired, after 0 ops", "hang,node=1,after_ops=5 never fired, after 0 ops", of_both]
    expected = [f"python -m accelerator simulate: the fault {line}" for line in lines]
    assert without_compilation(done.stderr).splitlines() == expected


@pytest.mark.slow
@needs_cuda_torch
def test_a_fault_of_a_rank_that_fired_on_one_node_is_named_by_none() -> None:
    faults = ("xid=63,rank=1", "hang,rank=7,after_ops=3", "hang,node=2")
    options = (word for fault in faults for word in ("--fault", fault))
    program = "import os, torch; os.environ['RANK'] = os.environ['ACCELERATOR_SIM_NODE']; torch.ones(1, device='cuda').add_(1)"
    done = simulate("--nodes", "2", *options, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "never fired" in line]
    of_rank = "hang,rank=7,after_ops=3 never fired, after 0 ops"
    of_node = "hang,node=2 never fired: no process used a GPU"
    assert lines == [f"python -m accelerator simulate: the fault {line}" for line in (of_rank, of_node)]


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    for script in ("exit 0", "kill -KILL $$", "exit 1"):
        simulate("--nodes", "2", "--", "sh", "-c", script, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_first_node_alone_has_the_input() -> None:
    command = [sys.executable, "-c", SIMULATE, "--nodes", "3", "--gpus", "1", "--", "readlink", "/proc/self/fd/0"]
    done = subprocess.run(command, cwd=REPOSITORY, input="", capture_output=True, text=True, timeout=60, check=True)
    first, *others = sorted(done.stdout.splitlines())
    assert first.startswith("[node 0] pipe:")
    assert others == ["[node 1] /dev/null", "[node 2] /dev/null"]
