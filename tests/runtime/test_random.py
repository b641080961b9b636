"""Random functions before initialization: which calls are deferred, in which order they take effect, and that none of them
initializes the accelerator. Each test starts a process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerator._machine import torch_build
from tests.support import plain_environment, run, simulated_environment

build = torch_build.read()
needs_cuda = pytest.mark.skipif(not (build and build.cuda), reason="needs a CUDA build of torch")

PRELUDE = """
import itertools, os, struct, sys, torch
import accelerator as acc

def state(seed):
    return torch.tensor(list(struct.pack("<qq", seed, 0)), dtype=torch.uint8)

def seeds():
    return [generator.initial_seed() for generator in torch.cuda.default_generators]

def is_uninitialized():
    log = open(os.environ["ACCELERATOR_SIM_LOG"]).read()
    return acc.is_fork_safe() and not torch.cuda.is_initialized() and "cuInit" not in log and "cudart" not in log
"""


def on_two_gpus(code: str, tmp_path: Path) -> str:
    log = tmp_path / "log"
    log.write_text("")
    return run(PRELUDE + code, simulated_environment(gpus=2, log=log))


ORDERS = [
    ("acc.manual_seed_all(1)", [1, 1]),
    ("acc.manual_seed_all(1); acc.manual_seed(2)", [2, 1]),
    ("acc.manual_seed(2); acc.manual_seed_all(1)", [1, 1]),
    ("acc.manual_seed_all(1); acc.set_rng_state(state(9), 1)", [1, 9]),
    ("acc.set_rng_state(state(9), 1); acc.manual_seed_all(1)", [1, 1]),
    ("acc.manual_seed_all(1); acc.set_rng_state(state(9)); acc.manual_seed(3)", [3, 1]),
    ("acc.manual_seed_all(1); acc.set_rng_state_all([state(8), state(9)]); torch.cuda.manual_seed(4)", [4, 9]),
    ("torch.manual_seed(5); acc.set_rng_state(state(9), 0)", [9, 5]),
    ("acc.set_rng_state(state(9), 0); torch.manual_seed(5)", [5, 5]),
    ("acc.manual_seed(6); torch.cuda.set_rng_state(state(9), 1); torch.manual_seed(5); acc.manual_seed(7)", [7, 5]),
    ("with acc.fork_rng(): acc.manual_seed_all(6)\nacc.set_rng_state(state(2), 0); acc.set_rng_state(state(3), 1)", [2, 3]),
    ("acc.manual_seed_all(1)\nwith acc.fork_rng(): acc.manual_seed_all(6); torch.cuda.manual_seed(4)", [1, 1]),
    ("acc.lazy_call(lambda: acc.manual_seed_all(1)); acc.manual_seed(2)", [2, 1]),
]


@needs_cuda
def test_queued_random_calls_take_effect_in_order(tmp_path: Path) -> None:
    # The parent initializes nothing, so it can fork a fresh child for each case.
    on_two_gpus(
        f"""
acc.device_count()
for calls, expected in {ORDERS!r}:
    child = os.fork()
    if child == 0:
        exec(calls)
        was_uninitialized = is_uninitialized()
        open(os.environ["ACCELERATOR_SIM_LOG"], "w").close()
        torch.cuda.init()
        found = seeds()
        open(os.environ["ACCELERATOR_SIM_LOG"], "w").close()
        print(calls, "gives", found, "" if was_uninitialized else "and initializes", file=sys.stderr, flush=True)
        os._exit(not (found == expected and was_uninitialized))
    assert os.waitpid(child, 0)[1] == 0, (calls, expected)
""",
        tmp_path,
    )


@needs_cuda
def test_nondeterministic_seeds_are_queued(tmp_path: Path) -> None:
    on_two_gpus(
        """
acc.manual_seed_all(1)
acc.seed()
assert is_uninitialized()
torch.cuda.init()
first, second = seeds()
assert first != 1 and second == 1, seeds()
""",
        tmp_path,
    )
    on_two_gpus(
        """
acc.manual_seed(1)
acc.seed_all()
assert is_uninitialized()
torch.cuda.init()
first, second = seeds()
assert first == second != 1, seeds()
""",
        tmp_path,
    )


@needs_cuda
def test_queued_rng_state_is_a_copy(tmp_path: Path) -> None:
    on_two_gpus(
        """
given = state(9)
acc.set_rng_state(given, 1)
given.zero_()
assert acc.initial_seed(1) == 9
""",
        tmp_path,
    )


@needs_cuda
def test_invalid_calls_raise_immediately_and_queue_nothing(tmp_path: Path) -> None:
    on_two_gpus(
        """
waiting = len(torch.cuda._queued_calls)
for call, error in (
    (lambda: acc.manual_seed(2**64), (RuntimeError, ValueError)),
    (lambda: acc.manual_seed_all("x"), ValueError),
    (lambda: acc.set_rng_state(state(1), 2), ValueError),
    (lambda: acc.set_rng_state(state(1), -1), ValueError),
    (lambda: acc.set_rng_state(torch.zeros(16)), TypeError),
    (lambda: acc.set_rng_state_all([state(1), None]), TypeError),
    (lambda: acc.set_rng_state_all([state(1)] * 3), ValueError),
    (lambda: acc.fork_rng([0, 2]), ValueError),
    (lambda: acc.default_generator(2), ValueError),
    (lambda: acc.get_rng_state("cuda:7"), ValueError),
    (lambda: acc.initial_seed(1.5), TypeError),
):
    try:
        call()
    except error:
        continue
    raise AssertionError(call)
assert is_uninitialized() and len(torch.cuda._queued_calls) == waiting
""",
        tmp_path,
    )


@needs_cuda
def test_queue_does_not_grow_with_the_number_of_calls(tmp_path: Path) -> None:
    on_two_gpus(
        """
def step(number):
    acc.manual_seed_all(number)
    torch.manual_seed(number)
    acc.seed()
    with acc.fork_rng():
        acc.seed_all()
        acc.set_rng_state(state(number))

step(0)
waiting = len(torch.cuda._queued_calls)
for number in range(50):
    step(number)
assert len(torch.cuda._queued_calls) <= waiting + 2, (waiting, len(torch.cuda._queued_calls))
assert is_uninitialized()
""",
        tmp_path,
    )


@needs_cuda
def test_fork_rng_keeps_other_queued_calls(tmp_path: Path) -> None:
    printed = on_two_gpus(
        """
with acc.fork_rng():
    torch.cuda._lazy_call(lambda: print("called"))
    acc.manual_seed_all(6)
assert is_uninitialized()
torch.cuda.init()
assert 6 not in seeds()
""",
        tmp_path,
    )
    assert printed.strip() == "called"


@needs_cuda
def test_fork_rng_restores_queued_seeds_if_initialized_inside(tmp_path: Path) -> None:
    on_two_gpus(
        """
acc.manual_seed_all(1)
acc.set_rng_state(state(9), 1)
with acc.fork_rng():
    acc.manual_seed_all(6)
    with acc.fork_rng([0]):
        acc.manual_seed(7)
        torch.cuda.init()
        assert seeds() == [7, 6]
    assert seeds() == [6, 6]
assert seeds() == [1, 9]
""",
        tmp_path,
    )


@needs_cuda
def test_fork_rng_in_a_queued_call_restores_the_states(tmp_path: Path) -> None:
    on_two_gpus(
        """
import signal

def call():
    inside.append(True)
    with acc.fork_rng():
        acc.manual_seed_all(6)
        inside.extend(seeds())

inside = []
acc.manual_seed_all(1)
acc.lazy_call(call)
signal.alarm(60)
acc.init()
assert inside == [True, 6, 6], inside
assert seeds() == [1, 1], seeds()
""",
        tmp_path,
    )


@needs_cuda
def test_queued_calls_in_nested_forks_act_as_after_initialization(tmp_path: Path) -> None:
    calls = ("acc.manual_seed_all({})", "acc.manual_seed({})", "acc.set_rng_state(state({}), 1)")
    on_two_gpus(
        f"""
def run(outer, first, second, *, initializes):
    acc.manual_seed_all(5)
    with acc.fork_rng():
        exec(outer)
        with acc.fork_rng():
            exec(first)
            exec(second)
        if initializes:
            torch.cuda.init()
        inside = seeds()
    return inside + seeds()

acc.device_count()
queued = {{}}
for program in itertools.product(*([call.format(seed) for call in {calls!r}] for seed in (6, 7, 8))):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(run(*program, initializes=True)).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
    queued[program] = os.read(read, 100).decode()
    os.close(read), os.close(write)
torch.cuda.init()
for program, found in queued.items():
    expected = repr(run(*program, initializes=False))
    assert found == expected, (program, found, expected)
""",
        tmp_path,
    )


@needs_cuda
def test_random_functions_do_not_break_fork(tmp_path: Path) -> None:
    on_two_gpus(
        """
acc.manual_seed_all(1); acc.manual_seed(2); acc.set_rng_state(state(9), 1)
with acc.fork_rng():
    child = os.fork()
    if child == 0:
        acc.manual_seed(3)
        torch.cuda.init()
        os._exit(0 if seeds() == [3, 9] else 1)
    assert os.waitpid(child, 0)[1] == 0
assert acc.is_fork_safe()
""",
        tmp_path,
    )


@needs_cuda
def test_random_functions_in_child_forked_after_initialization(tmp_path: Path) -> None:
    on_two_gpus(
        """
torch.cuda.init()
child = os.fork()
if child == 0:
    bad = 0
    for call in (lambda: acc.manual_seed(1), lambda: acc.manual_seed_all(1), acc.seed, acc.seed_all):
        call()  # deferred, as before initialization
    for call in (
        acc.initial_seed, acc.get_rng_state, acc.get_rng_state_all, lambda: acc.set_rng_state(state(1)),
        lambda: acc.set_rng_state_all([state(1)]), acc.fork_rng, acc.default_generator,
    ):
        try:
            call()
            bad += 1
        except RuntimeError as error:
            bad += "spawn" not in str(error)
    torch.manual_seed(4)
    with acc.fork_rng([]):
        torch.default_generator.manual_seed(5)
    os._exit(bad + (torch.initial_seed() != 4))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
        tmp_path,
    )


@needs_cuda
def test_default_generator_initializes(tmp_path: Path) -> None:
    on_two_gpus(
        "\nassert len(torch.cuda.default_generators) == 0\nassert acc.default_generator(1).device == torch.device('cuda:1')",
        tmp_path,
    )


def test_accelerator_backend_cpu_uses_the_cpu_generator() -> None:
    code = """
import torch
import accelerator as acc
acc.manual_seed_all(3)
assert torch.initial_seed() == 3 == acc.initial_seed()
assert len(acc.get_rng_state_all()) == 1
assert acc.default_generator() is torch.default_generator
"""
    run(code, plain_environment(ACCELERATOR_BACKEND="cpu"))
    if build and build.cuda:
        run(code, simulated_environment({"ACCELERATOR_BACKEND": "cpu"}, gpus=2))


@pytest.mark.slow
def test_imports_of_random_return_one_module() -> None:
    for first in ("acc.random", "acc.manual_seed", "importlib.import_module('accelerator.random')"):
        run(
            f"""
import importlib, sys
import accelerator as acc
assert "torch" not in sys.modules
{first}
import torch
from accelerator import random
assert random is acc.random is sys.modules["accelerator.random"]
assert random() is torch.random
""",
            plain_environment(),
        )
