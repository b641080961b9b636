"""The report and the check on another accelerator: they name the features that it lacks, and do not fail because of them."""

from __future__ import annotations

import json

import pytest

from tests.backend.server import Server

pytestmark = pytest.mark.xdist_group("hostacc")

PROGRAM = """
import sys
from accelerator.__main__ import main
print("status", main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "switches",
    [
        pytest.param((), marks=pytest.mark.slow, id="all"),
        pytest.param(("no-generators", "no-memory", "no-streams"), id="little"),
    ],
)
def test_check(hostacc: Server, switches: tuple[str, ...]) -> None:
    output = hostacc.run("import sys\nsys.argv[1:] = ['check']\n" + PROGRAM, *switches)
    assert output.endswith("all areas passed\nstatus 0\n"), output
    lines = {line[2:].partition(":")[0]: line.partition(":")[2] for line in output.splitlines() if line.startswith("✓")}
    missing = {name for name, text in lines.items() if "not offered by this accelerator" in text}
    expected = {"all-reduce", "graphs", "dtypes"}  # "dtypes" needs the compute capability, which the backend does not report
    if switches:
        expected |= {"streams", "memory", "random", "checkpointing"}
    assert missing == expected, output
    assert {"discovery", "launching", "fork", "devices", "arithmetic", "tensors"} <= set(lines) - missing


@pytest.mark.slow
def test_a_wrong_result_still_fails(hostacc: Server) -> None:
    """The check does not mistake wrong results and other errors for features that the accelerator lacks."""
    output = hostacc.run(
        """
import sys
import accelerator as acc
acc.initial_seed = lambda: 8
def fail(*arguments):
    raise RuntimeError("the device is lost")
acc.range_push = fail
sys.argv[1:] = ["check"]
"""
        + PROGRAM
    )
    assert output.endswith("status 1\n"), output
    assert "random: after manual_seed_all(7) initial_seed() is 8" in output
    assert "profiling: RuntimeError: the device is lost" in output


def test_report(hostacc: Server) -> None:
    output = hostacc.run("import sys\nsys.argv[1:] = []\n" + PROGRAM)
    assert "available: 2 hostacc devices" in output
    assert output.endswith("status 0\n")
    # The report has no table without figures, and no line about NVIDIA's library.
    output = hostacc.run("import sys\nsys.argv[1:] = []\n" + PROGRAM, "no-memory")
    assert "\nGPU\n" not in output
    assert "\nGPU  name\n  0  " in output
    assert "NVML" not in output
    output = hostacc.run("import sys\nsys.argv[1:] = ['--json']\n" + PROGRAM, "no-memory")
    facts = json.loads(output.removesuffix("status 0\n"))
    assert (facts["accelerator"], facts["available"], facts["unavailable_reason"]) == ("hostacc", True, None)
    assert [(each["index"], each["total_memory"], each["utilization"]) for each in facts["devices"]] == [
        (0, None, None),
        (1, None, None),
    ]
    assert facts["hidden"] == []
