"""How faults are written, on command lines, in files and in Python."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelerator.simulation._settings import fault_words
from accelerator.simulation._settings.fault_words import XIDS, Xid, encode, parse
from tests.command.test_simulate import simulate, takes_cuda_build
from tests.support import environment
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free]

NATIVE = Path(fault_words.__file__).parents[1] / "native"


@pytest.mark.parametrize("xid", XIDS)
def test_each_xid_can_be_written(xid: int) -> None:
    assert parse(f"xid={xid},gpu=1").words == f"xid={xid},gpu=1"


def test_the_xids_are_those_of_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/faults.md").read_text()
    rows = re.findall(r"^\| ([0-9, ]+) \|", guide, re.MULTILINE)
    assert sorted(int(number) for row in rows for number in row.split(",")) == sorted(XIDS)


# What the table of the guide calls the errors of CUDA, and the columns of NVML's.
ERRORS = {
    "nothing": 0,
    "unspecified launch failure": 719,
    "an illegal memory access": 700,
    "uncorrectable ECC error": 214,
    "uncorrectable NVLink error": 220,
    "unknown error": 999,
}
SCOPES = {
    "nobody": "process",
    "all users": "users",
    "all users; new processes do not find the GPU": "users",
    "all users, new processes": "reset",
}
MARKS = {
    "ECC error": 1,
    "remapped row": 2,
    "a remapped row that waits for a reset": 2,
    "failed remapping": 4,
    "corrected error": 8,
}
ACTIONS = {"reset": 1, "reboot": 2, "drain and reset": 4}


def test_the_table_of_xids_is_that_of_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/faults.md").read_text().replace("*", "")
    documented = {}
    for numbers, process, others, nvml in re.findall(r"^\| ([0-9, ]+) " + r"\| ([^|]*) " * 3, guide, re.MULTILINE):
        hang = re.match(r"hangs for (\d+) s, then ", process)
        words = nvml.split(", ")
        actions = [ACTIONS[word.removeprefix("action: ")] for word in words if word.startswith("action: ")]
        kind = "lost" if "GPU is lost" in words else "hang" if hang else "note" if process == "nothing" else "error"
        for number in numbers.split(", "):
            documented[int(number)] = Xid(
                text=XIDS[int(number)].text,
                kind=kind,
                scope=SCOPES[others],
                error=ERRORS[process[hang.end() :] if hang else process],
                marks=sum(MARKS.get(word, 0) for word in words),
                recovery=sum(actions),
                duration=int(hang[1]) if hang else 0,
            )
    assert documented == XIDS


# The names of the numbers of a row, in their order, and what they are if a fault does not say otherwise.
ROW = dict(kind="", scope="users", clock="none", marks="0", xid="0", error="0", recovery="0", gpu="0", node="-1", rank="-1")
ROW |= dict.fromkeys(("at", "chance", "seed", "amount", "duration"), "0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hang", {}),
        ("hang,gpu=3,for=2.5", {"gpu": "3", "duration": "2500000000"}),
        ("hang,rank=2", {"gpu": "-1", "rank": "2"}),
        ("hang,node=1", {"node": "1"}),
        ("hang,gpu=1,rank=2", {"gpu": "1", "rank": "2"}),
        ("slow=20ms,after_ops=7", {"amount": "20000000", "clock": "ops", "at": "7"}),
        ("slow=500us,after_launches=8", {"amount": "500000", "clock": "launches", "at": "8"}),
        ("slow=1.5s,after_collectives=9", {"amount": "1500000000", "clock": "collectives", "at": "9"}),
        ("link,after_seconds=1.5", {"clock": "seconds", "at": "1500000000"}),
        ("link,node=1", {"gpu": "-1", "node": "1"}),  # no collective of the node goes on
        ("link,node=1,gpu=2", {"gpu": "2", "node": "1"}),
        ("flip=3", {"amount": "3", "clock": "ops"}),
        ("flip=63,after_collectives=2", {"amount": "63", "clock": "collectives", "at": "2"}),
        ("kill,after_ops=4", {"scope": "process", "clock": "ops", "at": "4", "gpu": "-1"}),
        ("kill,node=1", {"clock": "ops", "gpu": "-1", "node": "1"}),
        ("kill,rank=0", {"scope": "process", "clock": "ops", "gpu": "-1", "rank": "0"}),
        ("hang,probability=.5,seed=9", {"clock": "ops", "chance": str(2**31), "seed": "9"}),
        ("hang,probability=1,after_seconds=2", {"clock": "seconds", "at": "2000000000", "chance": str(2**32)}),
        ("hang,probability=.000000001", {"clock": "ops", "chance": "4"}),
        (
            "xid=109",
            {"kind": "hang", "scope": "process", "xid": "109", "error": "719", "recovery": "1", "duration": "2000000000"},
        ),
        (
            "xid=119,for=.5",
            {"kind": "hang", "scope": "reset", "xid": "119", "error": "999", "recovery": "1", "duration": "500000000"},
        ),
        (
            "xid=94,gpu=1",
            {"kind": "error", "scope": "process", "xid": "94", "gpu": "1", "marks": "3", "error": "214", "recovery": "4"},
        ),
    ],
)
def test_the_numbers_of_a_row(words: str, expected: dict[str, str]) -> None:
    numbers, printed, text = encode([parse(words)]).split("|")
    kind = re.split("[,=]", words)[0]
    assert dict(zip(ROW, numbers.split(" "), strict=True)) == {**ROW, "kind": kind, **expected}
    assert printed == words
    assert bool(text) == words.startswith("xid")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"xid": 94, "gpu": 1, "after_ops": 400}, "xid=94,gpu=1,after_ops=400"),
        ({"hang": True, "for": 2.5}, "hang,for=2.5"),
        ({"hang": True, "probability": 1e-05, "for": 3.0}, "hang,probability=0.00001,for=3"),
        ({"slow": "20ms", "rank": 1}, "slow=20ms,rank=1"),
        ({"flip": 0, "link": False}, "flip=0"),
    ],
)
def test_a_mapping_is_its_words(mapping: Mapping[str, Any], words: str) -> None:
    assert parse(mapping).words == words
    assert parse(words) == parse(mapping)
    assert parse(words.replace(",", " , ")) == parse(mapping)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "it is empty; a fault has one of xid=N, hang, slow=TIME such as 20ms, link, flip=BIT, kill"),
        ("hnag,gpu=1", "'hnag' is no fault; a fault has one of xid=N, hang"),
        ("gpu=1", "'gpu' is no fault; a fault has one of"),
        ("hang,link", "2 faults in one; a fault has one of"),
        ("xid=7", "Xid 7 is not simulated; these are: 13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120"),
        ("xid", "Xid without a number is not simulated"),
        ("hang=3", "hang takes no value"),
        ("slow=20", "slow='20' is not a time such as 20ms, 500us or 1.5s"),
        ("slow", "slow='' is not a time"),
        ("flip=64", "flip='64' is not the number of a bit from 0 to 63"),
        ("hang,gpus=1", "there is no key 'gpus'; the keys are gpu, node, rank, after_ops, after_collectives, after_seconds"),
        ("hang,gpu=1,gpu=1", "a key is given twice"),
        ("hang,gpu=-1", "gpu='-1' is not a whole number from 0"),
        ("hang,after_ops=1.5", "after_ops='1.5' is not a whole number"),
        ("hang,after_seconds=soon", "after_seconds='soon' is not a number such as 0.5"),
        ("hang,after_ops=1,after_seconds=1", "it begins at one of after_ops, after_collectives, after_launches, after_seconds"),
        ("hang,probability=0", "probability='0' is not more than 0 and at most 1"),
        ("hang,probability=2", "probability='2' is not more than 0 and at most 1"),
        ("hang,seed=1", "seed belongs to probability"),
        ("xid=94,for=2", "it does not last; for= is for hang, slow, link and Xids 109, 119 and 120"),
        ("hang,for=0", "for= is more than 0 seconds"),
        ("kill,gpu=1", "kill ends a process, and takes rank or node, not gpu"),
    ],
)
def test_wrong_words_are_named_with_those_that_there_are(words: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        parse(words)
    assert str(caught.value).startswith(f"fault {words!r}: ")


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match='a fault must be a str such as "xid=94,gpu=1", or a mapping, not int'):
        parse(94)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="faults must be a sequence of faults, not str"):
        environment(faults="hang")


def test_the_gpu_must_exist() -> None:
    with pytest.raises(ValueError, match=r"fault 'hang,gpu=2': there are 2 GPUs, numbered from 0"):
        environment(2, faults=["hang,gpu=2"])


def test_faults_are_limited() -> None:
    assert environment(faults=["hang"] * 64)["ACCELERATOR_SIM_FAULTS"].count(";") == 63
    with pytest.raises(ValueError, match="faults has 65 faults; at most 64 are possible"):
        environment(faults=["hang"] * 65)
    assert "ACCELERATOR_SIM_FAULTS" not in environment(faults=[])


def names_of(enum: str) -> list[str]:
    """Return the names of a C enumeration, which begin with a word of its own."""
    texts = "".join((NATIVE / path).read_text() for path in ("common/faults.h", "interface/fault_effects.h"))
    match = re.search(rf"enum {enum} {{(.*?)}}", texts)
    assert match
    return [name.strip().partition(" ")[0].partition("_")[2].lower() for name in match[1].split(",")]


def words_of(array: str) -> list[str]:
    match = re.search(rf"{array}\[\] = {{(.*?), NULL}}", (NATIVE / "faults/parse.c").read_text())
    assert match
    return re.findall('"(.*?)"', match[1])


def test_the_words_of_rows_are_in_the_order_of_the_enumerations() -> None:
    assert words_of("kinds") == names_of("fault_kind")
    assert words_of("clocks") == names_of("fault_clock")
    assert [word in name for word, name in zip(words_of("scopes"), names_of("fault_scope"), strict=True)] == [True] * 3
    assert {xid.kind for xid in XIDS.values()} <= {*words_of("kinds")}
    assert {xid.scope for xid in XIDS.values()} <= {*words_of("scopes")}


def test_a_row_has_room_for_its_texts() -> None:
    longest = "xid=119,gpu=127,node=127,rank=2147483647,after_collectives=2147483647,for=12345678.123456789,"
    longest += "probability=.123456789,seed=2147483647"
    _, words, _ = encode([parse(longest)]).split("|")
    assert len(words) < 160
    assert all(len(xid.text) < 120 and not set(xid.text) & set("|;") and xid.text for xid in XIDS.values())
    assert Xid("").duration == 0


# ---- The command line. ----


@takes_cuda_build
def test_options_and_files_give_the_faults_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps([{"xid": 79, "gpu": 1}, "hang"]))
    done = simulate("--gpus", "2", "--faults", str(file), "--fault", "flip=3", "--", "printenv", "ACCELERATOR_SIM_FAULTS")
    words = [row.split("|")[1] for row in done.stdout.split(";")]
    assert words == ["xid=79,gpu=1", "hang", "flip=3"], done.stderr
    assert done.stderr.splitlines() == [
        f"python -m accelerator simulate: the fault {word} never fired: no process used a GPU" for word in words
    ]


@takes_cuda_build
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("{}", "holds no list of faults"),
        ("[3]", "a fault must be a str"),
        ('["bang"]', "'bang' is no fault"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "faults.json"
    if content is not None:
        file.write_text(content)
    done = simulate("--faults", str(file), "--", "true")
    assert (done.returncode, problem in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


@takes_cuda_build
def test_wrong_words_of_an_option_are_refused() -> None:
    done = simulate("--fault", "xid=7", "--", sys.executable, "-c", "print()")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "argument --fault: fault 'xid=7': Xid 7 is not simulated; these are: 13" in done.stderr
