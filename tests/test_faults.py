"""Each fault of ``faults.json`` fits the code: its text occurs once in its function, and its tests exist."""

from __future__ import annotations

from typing import Any

import pytest

from tests import faults
from tests.support import ROOT

pytestmark = pytest.mark.torch_free

FAULTS = faults.read()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_fault_fits_the_code(fault: dict[str, Any]) -> None:
    text = faults.find_file(fault["file"]).read_text(encoding="utf-8")
    assert faults.apply(fault, text) != text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_tests_of_a_fault_exist(fault: dict[str, Any]) -> None:
    for test in (each for each in fault["tests"] if each.startswith("tests/")):  # the others are options of pytest
        path, *names = test.split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert all(f" {name.partition('[')[0]}(" in text or f"class {name}" in text for name in names), test


def test_names_are_unique() -> None:
    names = [fault["name"] for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_text_that_occurs_twice_is_stale() -> None:
    text = "int f(void)\n{\n    g();\n    g();\n}\nint h(void)\n{\n    g();\n}\n"
    fault = {"file": "x.c", "function": "f", "find": "g()", "replace": "1"}
    with pytest.raises(faults.Stale, match="occurs 2 times in f"):
        faults.apply(fault, text)
    with pytest.raises(faults.Stale, match="there is no k"):
        faults.apply({**fault, "function": "k"}, text)
    assert faults.apply({**fault, "function": "h"}, text).endswith("int h(void)\n{\n    1;\n}\n")


def test_statement_is_removed() -> None:
    text = 'static int f(void)\n{\n    const char *a = "}";\n    if (a)\n        g(a,\n          1);\n}\nint g(int a);\n'
    assert faults.c_function(text, "f") == (0, text.index("\nint g("))
    assert "    if (a)\n        ;\n}" in faults.apply({"file": "x.c", "function": "f", "remove": "g(a"}, text)
