"""The grammar of CUDA_VISIBLE_DEVICES: a table, and generated values compared with the driver and with torch's parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accelerator._machine import visibility
from accelerator._machine.visibility import Gpu, Instance
from tests.support import sample, simulated_environment
from tests.support.discovery import DRIVER, on_simulated_gpus, simulated_driver

pytestmark = pytest.mark.torch_free

A, B, C, D = (f"GPU-{letter * 8}-0000-4000-8000-{'0' * 12}" for letter in "abcd")
FOUR = [Gpu(uuid) for uuid in (A, B, C, D)]


def chosen(text: str | None, gpus: list[Gpu] | None = None) -> list[Any]:
    """Return what the variable selects: indices of GPUs, or pairs of an index and a MIG instance."""
    selection = visibility.select(text, FOUR if gpus is None else gpus)
    return [(target.gpu, target.instance.gi) if target.instance else target.gpu for target in selection.targets]


# NVIDIA does not document the rows marked "open" and "measured". A GPU with a driver of CUDA 13.0 has decided the latter. The
# others follow torch's parser until a test on hardware decides them.
TABLE: list[tuple[str | None, list[int]]] = [
    (None, [0, 1, 2, 3]),
    ("", []),
    ("0", [0]),
    ("1,3", [1, 3]),
    ("2, 0", [2, 0]),  # open
    ("0,9,1", [0]),
    ("0,2,-1,1", [0, 2]),
    ("-1", []),
    ("+0", [0]),  # measured
    ("x", []),
    ("all", []),
    ("none", []),
    ("void", []),
    ("NoDevFiles", []),
    ("-", []),  # torch raises
    ("+", []),  # torch raises
    ("1gpu,2", [1, 2]),
    ("1gpu2,2ampere", [1, 2]),
    ("0,1,0", []),  # measured
    ("0,0", []),  # measured
    ("0,x,0", [0]),
    ("0,9,9", [0]),  # measured
    ("-0", [0]),  # measured
    ("0,-0", []),  # measured
    (" 1\t, 0 ", [1, 0]),  # open
    (" ", []),
    (",", []),
    (",0", []),
    ("0,", [0]),
    ("0,,1", [0]),
    ("00,01", [0, 1]),
    ("0x1", [0]),
    ("1.5", [1]),
    ("1 2", [1]),
    ("3" * 50, []),
    ("0" * 25 + "1", [1]),
    ("0," + "9" * 30, [0]),
    ("\N{ARABIC-INDIC DIGIT ONE}", []),  # torch says 1
    ("\N{NO-BREAK SPACE}1", []),
    ("\udcff1", []),
    (A, [0]),
    (f"{D},{A}", [3, 0]),
    ("GPU-bb", [1]),
    ("GPU-cccccc", [2]),
    ("GPU-", []),  # measured
    ("MIG-", []),  # measured
    ("GPU--", []),  # several; measured on a machine of one
    ("GPU-ffff", []),
    ("GPU-a,GPU-ffff,GPU-b", [0]),
    ("GPU-a, GPU-b", [0]),  # measured
    ("GPU-a,1", [0]),  # measured
    ("1,GPU-a", [1]),  # measured
    ("GPU-a,GPU-a", []),
    ("GPU-a,GPU-aa", []),
    ("GPU-a,GPU-aa,1", []),
    ("GPU-ffff,GPU-ffff", []),
    # Measured: the case of digits, dashes, and what follows 32 digits do not matter, nor which prefix a UUID has.
    ("GPU-A", [0]),
    (D.upper(), [3]),
    (f"GPU-b,{B.upper()}", []),
    (" GPU-a", []),
    ("gpu-a", []),
    (A[4:], []),
    (A + "0", [0]),
    (A + "x", [0]),
    (A + " 1", [0]),
    (A + "/0/0", [0]),
    (A[:-1] + "1", []),
    (A[:-1] + "g", []),
    (A[:20] + "x", []),
    (A[:20] + " ", []),
    ("GPU-" + A[4:].replace("-", ""), [0]),
    ("GPU-a-a-a" + "-" * 50, [0]),
    ("GPU-0x" + A[4:], []),
    ("MIG-a", [0]),
    ("MIG-" + C[4:].upper(), [2]),
    ("GPU-a,MIG-b", [0, 1]),
    ("MIG-a,GPU-a", []),
    (f"MIG-{A}", []),
    (f"MIG-{A}/1/0", []),
]


@pytest.mark.parametrize(("text", "expected"), TABLE)
def test_selection_of_each_table_row(text: str | None, expected: list[int]) -> None:
    assert chosen(text) == expected


def test_two_digit_ordinals() -> None:
    assert chosen("10,0,19", FOUR * 5) == [10, 0, 19]


def test_single_gpu() -> None:
    assert chosen("GPU-", FOUR[:1]) == []
    assert chosen("GPU--", FOUR[:1]) == [0]  # measured
    assert chosen("0,1", FOUR[:1]) == [0]
    assert chosen("0,1,0", FOUR[:1]) == [0]  # the unknown device ends the list before the repeat
    assert chosen(None, []) == chosen("0", []) == chosen("GPU-", []) == []


# In DIVIDED, the second and the third GPU have MIG instances. In EMPTY, the second GPU has MIG on and no instance.
X, Y, Z = Instance("MIG-e1", 1, 0), Instance("MIG-e2", 2, 0), Instance("MIG-f1", 1, 0)
DIVIDED = [Gpu(A), Gpu(B, (X, Y)), Gpu(C, (Z,))]
EMPTY = [Gpu(A), Gpu(B, ())]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        (None, DIVIDED, [(1, 1)]),
        ("0", DIVIDED, [0]),
        ("0,1", DIVIDED, [(1, 1)]),
        ("2,1", DIVIDED, [(2, 1)]),
        ("GPU-b", DIVIDED, [(1, 1)]),
        ("MIG-e2", DIVIDED, [(1, 2)]),
        ("MIG-e2,MIG-f1", DIVIDED, [(1, 2)]),
        ("MIG-f,MIG-e2", DIVIDED, [(2, 1)]),
        ("MIG-e", DIVIDED, []),
        ("MIG-", DIVIDED, []),
        ("MIG-e2,MIG-e2", DIVIDED, []),
        (f"MIG-{B}/2/0", DIVIDED, [(1, 2)]),
        (f"MIG-{B}/2/0,MIG-f1", DIVIDED, [(1, 2)]),
        (f"MIG-{B}/2/1", DIVIDED, []),
        (f"MIG-{B}/2", DIVIDED, []),
        (f"MIG-e2,MIG-{B}/2/0", DIVIDED, []),
        (None, EMPTY, [0]),
        ("0,1", EMPTY, [0]),
        ("1,0", EMPTY, []),
        ("GPU-b,GPU-a", EMPTY, []),
        ("GPU-a,GPU-b", EMPTY, [0]),
        (None, EMPTY[1:], []),
    ],
)
def test_mig(text: str | None, gpus: list[Gpu], expected: list[Any]) -> None:
    assert chosen(text, gpus) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,2,-1,1", "'-1' is negative, which ends the list"),
        ("x", "'x' is not a number, which ends the list"),
        ("0,9", "'9' is beyond the 4 GPUs of this machine, which ends the list"),
        ("1,0,1", "'1' repeats an earlier entry, which empties the whole list"),
        ("GPU-a,2", "'2' is not a UUID, as the first entry is, which ends the list"),
        ("GPU-", "'GPU-' matches no GPU, which ends the list"),
        ("GPU-9", "'GPU-9' matches no GPU, which ends the list"),
        ("MIG-9", "'MIG-9' matches no MIG instance, which ends the list"),
        ("MIG-9,0", "'MIG-9' matches no MIG instance, which ends the list"),
    ],
)
def test_problem_names_the_invalid_entry(text: str, problem: str) -> None:
    assert_problem(text, FOUR, problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("MIG-e", "'MIG-e' matches several MIG instances, which ends the list"),
        ("MIG-f,0", "'0' is not a UUID, as the first entry is, which ends the list"),
        (f"MIG-{B}/2/1", f"'MIG-{B}/2/1' matches no MIG instance, which ends the list"),
        (f"MIG-{A}/2/0", f"'MIG-{A}/2/0' matches no MIG instance, which ends the list"),
    ],
)
def test_problem_names_the_invalid_mig_entry(text: str, problem: str) -> None:
    assert_problem(text, DIVIDED, problem)


def test_problem_of_a_prefix_of_several_gpus() -> None:
    assert_problem("GPU-a", [FOUR[0], Gpu("GPU-ab")], "'GPU-a' matches several GPUs, which ends the list")


def test_problem_of_an_ordinal_beyond_the_gpus() -> None:
    assert_problem("1", FOUR[:1], "'1' is beyond the only GPU of this machine, which ends the list")
    assert_problem("2", FOUR[:2], "'2' is beyond the 2 GPUs of this machine, which ends the list")


@pytest.mark.parametrize("text", ["1", "GPU-b"])
def test_problem_of_a_mig_gpu_without_instances(text: str) -> None:
    assert_problem(text, EMPTY, f"{text!r} is a GPU with MIG on and no instance, which ends the list")


@pytest.mark.parametrize(
    ("length", "expected"),
    [(200, repr("x" * 200)), (201, repr("x" * 100) + "... (201 characters)")],
)
def test_problem_shortens_long_entries(length: int, expected: str) -> None:
    assert visibility.quoted("x" * length) == expected


@pytest.mark.parametrize(
    ("text", "needs_uuids", "hides_all"),
    [(None, False, False), ("", False, True), ("0", False, False), ("x", False, True), ("0,0", False, True),
     ("0,1,1", False, False), (A, True, False), ("MIG-a", True, False), ("xGPU-a", False, True), ("GPU-a,GPU-a", True, True),
     ("GPU-a,GPU-A", True, True),
     ("MIG-e1,MIG-E-1", True, True), ("MIG-e1,GPU-e1", True, False), ("GPU-a,MIG-a", True, False),
     ("GPU-", True, True), ("GPU-x", True, True), (f"MIG-{A}/1/0", True, False)],
)  # fmt: skip
def test_needs_uuids_and_hides_all(text: str | None, needs_uuids: bool, hides_all: bool) -> None:
    assert (visibility.needs_uuids(text), visibility.hides_all(text)) == (needs_uuids, hides_all)


def assert_problem(text: str, gpus: list[Gpu], problem: str) -> None:
    entry = visibility.select(text, gpus).problem
    assert entry is not None
    assert f"{entry.text!r} {entry.problem}" == problem


def test_each_entry_has_a_target_or_a_problem() -> None:
    def read(text: str) -> list[Any]:
        return [
            (entry.text, entry.target and entry.target.gpu, entry.problem) for entry in visibility.select(text, FOUR).entries
        ]

    ends, empties = "is negative, which ends the list", "repeats an earlier entry, which empties the whole list"
    assert read("0,2,-1,1") == [("0", 0, None), ("2", 2, None), ("-1", None, ends), ("1", None, None)]
    assert read("0,1,0,2") == [("0", None, None), ("1", None, None), ("0", None, empties), ("2", None, None)]
    assert read("2,0") == [("2", 2, None), ("0", 0, None)]
    assert visibility.select("2,0", FOUR).problem is None
    assert read("") == []


# Arguments of simulation.environment. The machine's driver supplies the expected results.
MACHINES: dict[str, dict[str, Any]] = {
    "plain": {"gpus": 4},
    "many": {"gpus": 20},
    "one": {"gpus": 1},
    "mig": {"gpus": 3, "mig": [None, 2, 3]},
    "empty": {"gpus": 3, "mig": [None, 0, 1]},
    "mixed": {"gpus": 3, "name": ["Slow", "Middle", "Fast"], "speed": [1, 2, 3]},
    "mixed mig": {"gpus": 4, "name": ["Slow", "Fast"], "speed": [1, 3], "mig": [2, None, 0, 1]},
}

SERVER = DRIVER + textwrap.dedent("""
    import accelerator as acc
    from accelerator._machine import nvml

    # The first line describes the machine: UUIDs of GPUs and instances, in NVML's order.
    print(json.dumps([(g.uuid, g.instances and [i[:3] for i in g.instances] or g.instances) for g in nvml.gpus()]), flush=True)
    for line in sys.stdin:
        results = []
        whole, settings = json.loads(line)
        for value, order in settings:
            put({"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order})
            ours = [plain(device.uuid) for device in acc.visible_devices()] if whole else None
            count = acc.device_count() if whole else None
            results.append((in_child(lambda: uuids(*started())), ours, count))
        print(json.dumps(results), flush=True)
    """)


class Machine:
    """A process on a simulated machine that queries the driver in a new child for each setting."""

    def __init__(self, name: str) -> None:
        options = MACHINES[name]
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=simulated_environment(**options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        speeds = options.get("speed", [0])
        self.uuids: list[str] = []
        self.gpus: list[Gpu] = []
        self.speeds: list[int] = []
        for i, (uuid, instances) in enumerate(self._read()):
            self.gpus.append(Gpu(uuid, None if instances is None else tuple(Instance(*instance) for instance in instances)))
            self.uuids += [uuid, *(instance[0] for instance in instances or ())]
            self.uuids += [f"MIG-{uuid}/{gi}/{ci}" for _, gi, ci in instances or ()]
            self.speeds.append(speeds[min(i, len(speeds) - 1)])

    def _read(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def evaluate(self, settings: list[tuple[str | None, str | None]], *, whole: bool = False) -> Any:
        """Return the devices of the driver for each setting, and with ``whole`` the results of the two queries."""
        assert self._process.stdin
        print(json.dumps((whole, settings)), file=self._process.stdin, flush=True)
        return self._read()

    def select(self, value: str | None, order: str | None) -> list[str]:
        """Return the UUIDs that the grammar selects among the GPUs in the driver's order."""
        gpus = self.gpus
        if order != "PCI_BUS_ID":
            gpus = [gpus[i] for i in sorted(range(len(gpus)), key=lambda i: -self.speeds[i])]
        targets = visibility.select(value, gpus).targets
        uuids = [target.instance.uuid if target.instance else gpus[target.gpu].uuid for target in targets]
        return [uuid.partition("-")[2].replace("-", "") for uuid in uuids]

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, Machine]]:
    started = {name: Machine(name) for name in MACHINES}
    yield started
    for machine in started.values():
        machine.close()


# hypothesis joins these pieces, which often form valid entries. That is much faster than drawing arbitrary text.
ORDINALS = ["0", "1", "2", "3", "5", "19", "-1", "-0", "+1", "00", "1x", "x", "-", "+", "0x1", "1.5", "2147483648", "9" * 18]
HUGE = ["9223372036854775807", "9223372036854775808", "1" * 40]
BLANKS = [" ", "\t", "\n", "\v\f", "\r "]
TYPES = ["GPU-", "MIG-", "GPU-zz", "gpu-", "all", "é", "\x1f", "/", "\x7f"]


def values(uuids: list[str]) -> st.SearchStrategy[str | None]:
    prefixes = [uuid[:end] for uuid in uuids for end in (5, 6, 12, 99)]
    prefixes += [text for uuid in uuids for text in (uuid.upper()[:14], "GPU-" + uuid[4:].replace("-", ""), uuid + "x")]
    lists = [
        st.lists(st.sampled_from(entry_type), max_size=6).map(",".join)
        for entry_type in (ORDINALS, ORDINALS[:6], [p for p in prefixes if p[0] == "G"], [p for p in prefixes if p[0] == "M"])
        if entry_type
    ]
    pieces = [*[","] * 20, *ORDINALS, *HUGE, *BLANKS, *TYPES, *prefixes]
    return st.one_of(st.none(), *lists, st.lists(st.sampled_from(pieces), max_size=9).map("".join))


ORDERS = st.sampled_from([None, None, "PCI_BUS_ID", "FASTEST_FIRST", "pci_bus_id", ""])
EXAMPLES = 8
BATCH = 10
# An example starts processes, so that shrinking a failing one would take minutes.
ECONOMICAL = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=set(Phase) - {Phase.shrink, Phase.explain},
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def check_generated_values(machine: Machine, data: st.DataObject) -> None:
    batch = data.draw(st.lists(st.tuples(values(machine.uuids), ORDERS), min_size=BATCH, max_size=BATCH))
    for setting, (driver, _, _) in zip(batch, machine.evaluate(batch), strict=True):
        assert machine.select(*setting) == driver, setting


@simulated_driver
@pytest.mark.parametrize("name", sample(MACHINES, "plain", "empty", "mixed mig"))
@settings(ECONOMICAL)
@given(data=st.data())
def test_generated_values_select_the_drivers_devices(name: str, machines: dict[str, Machine], data: st.DataObject) -> None:
    check_generated_values(machines[name], data)


@pytest.mark.slow
@simulated_driver
@pytest.mark.parametrize("name", MACHINES)
@settings(ECONOMICAL, max_examples=60)
@given(data=st.data())
def test_many_values_select_the_drivers_devices(name: str, machines: dict[str, Machine], data: st.DataObject) -> None:
    check_generated_values(machines[name], data)


@simulated_driver
@pytest.mark.parametrize("name", sample(MACHINES, "mig", "mixed"))
def test_table_rows_select_the_drivers_devices(name: str, machines: dict[str, Machine]) -> None:
    """Every row agrees with the driver, after its UUIDs are replaced by those of the machine."""
    machine = machines[name]
    firsts = [gpu.uuid[4:6] for gpu in machine.gpus]
    rows: list[tuple[str | None, str | None]] = []
    for text, _ in TABLE:
        for letter, first in zip("abcd", firsts, strict=False):
            text = text and text.replace(f"GPU-{letter * 8}", f"GPU-{first}").replace(f"GPU-{letter}", f"GPU-{first}")
        # In some locales the other process cannot put a lone surrogate into its environment.
        if text is None or "\udcff" not in text:
            rows += [(text, None), (text, "PCI_BUS_ID")]
    for setting, (driver, _, _) in zip(rows, machine.evaluate(rows), strict=True):
        assert machine.select(*setting) == driver, setting


@contextmanager
def visible(value: str | None) -> Iterator[None]:
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if value is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
        yield


def torch_selection(value: str | None, gpus: list[Gpu]) -> list[int] | None:
    """Return what torch's own parser selects, or None if it raises or finds MIG instances."""
    module = pytest.importorskip("torch.cuda")
    with visible(value):
        try:
            listed: Any = module._parse_visible_devices()
        except ValueError:  # torch raises for a sign without digits
            return None
    if listed and isinstance(listed[0], str):
        if listed[0].startswith("MIG-"):
            return None
        listed = module._transform_uuid_to_ordinals(listed, [gpu.uuid for gpu in gpus])
    beyond = next((i for i, index in enumerate(listed) if index >= len(gpus)), len(listed))
    return listed[:beyond]


def check_torchs_devices(value: str | None) -> None:
    # torch's parser differs here: Python's str.strip removes more control characters, and its integers are unbounded.
    if value is not None and re.search(r"[\x1c-\x1f]|[0-9]{19}", value):
        return
    # It also empties a list for a repeat after an entry that has ended the list, and for a repeat of an unknown device.
    entries = visibility.entries(value or "")
    texts = (value or "").split(",") if visibility.needs_uuids(value) else entries
    if len(set(texts)) < len(texts):
        return
    # And it compares UUIDs as texts.
    if any(chosen(entry) and not any(gpu.uuid.startswith(entry) for gpu in FOUR) for entry in entries if "-" in entry):
        return
    theirs = torch_selection(value, FOUR)
    if theirs is not None:
        assert chosen(value) == theirs


@settings(max_examples=250, deadline=None)
@given(values([A, B, C, D]))
def test_generated_values_select_torchs_devices(value: str | None) -> None:
    check_torchs_devices(value)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(values([A, B, C, D]))
def test_many_values_select_torchs_devices(value: str | None) -> None:
    check_torchs_devices(value)


@settings(max_examples=250, deadline=None)
@given(
    st.lists(st.sampled_from([kind + uuid[4:] for uuid in (A, X.uuid) for kind in ("GPU-", "MIG-")]), max_size=3).map(",".join),
    st.sampled_from([FOUR, DIVIDED, EMPTY, [Gpu(A, (Instance("MIG-" + A[4:], 1, 0),))]]),
)
def test_what_hides_all_devices_selects_none(value: str, gpus: list[Gpu]) -> None:
    assert chosen(value, gpus) == [] or not visibility.hides_all(value)


@settings(max_examples=200, deadline=None)
@given(st.text(), st.lists(st.sampled_from([Gpu(""), Gpu("GPU-"), *FOUR, *DIVIDED, *EMPTY]), max_size=4))
def test_generated_values_raise_nothing(text: str, gpus: list[Gpu]) -> None:
    selection = visibility.select(text, gpus)
    assert len(selection.targets) <= max(len(gpus), 1)
    listed = visibility.listed(text)
    assert all("," not in entry for entry in listed)
    # listed() does not know the machine, so it returns at least as many entries as the machine has targets.
    assert len(listed) >= len(selection.targets) or not listed or selection.targets == ()


def check_changing_environment(machine: Machine, data: st.DataObject) -> None:
    # The GPUs of these machines are identical, so the order does not change the source of the count.
    batch = data.draw(st.lists(st.tuples(values(machine.uuids), ORDERS), min_size=BATCH, max_size=BATCH))
    for setting, (driver, ours, count) in zip(batch, machine.evaluate(batch, whole=True), strict=True):
        assert (ours, count) == (driver, len(driver)), setting


@on_simulated_gpus
@pytest.mark.parametrize("name", sample(["plain", "many", "mig", "empty"], "plain", "mig"))
@settings(ECONOMICAL)
@given(data=st.data())
def test_visible_devices_follow_the_environment(name: str, machines: dict[str, Machine], data: st.DataObject) -> None:
    """A process whose environment changes agrees with a new process after each change."""
    check_changing_environment(machines[name], data)


@pytest.mark.slow
@on_simulated_gpus
@pytest.mark.parametrize("name", ["plain", "many", "mig", "empty"])
@settings(ECONOMICAL, max_examples=40)
@given(data=st.data())
def test_visible_devices_follow_many_environments(name: str, machines: dict[str, Machine], data: st.DataObject) -> None:
    check_changing_environment(machines[name], data)


@on_simulated_gpus
@pytest.mark.parametrize("name", ["mixed", "mixed mig"])
def test_mixed_gpus_follow_the_environment(name: str, machines: dict[str, Machine]) -> None:
    """If only the driver knows the order, a child process discovers it for each new setting."""
    settings = [
        (value, order) for value in (None, "1,0", "0", "x", machines[name].uuids[0][:6]) for order in (None, "PCI_BUS_ID")
    ]
    for setting, (driver, ours, count) in zip(settings, machines[name].evaluate(settings, whole=True), strict=True):
        assert (ours, count) == (driver, len(driver)), setting
