"""Tests the table of settings against what is made of it or must agree with it: signature, options, C header, readers."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import accelerator.simulation
from accelerator._command.run_parser import RunParser
from accelerator.simulation import _settings
from accelerator.simulation._build import libraries, settings_header
from accelerator.simulation._build.boundary import read_with_included
from accelerator.simulation._settings import PARAMETERS, SETTINGS, Setting
from accelerator.simulation._settings.values import Choice, Flag
from tests.support import environment
from tests.support.simulation import evaluate, linux_only, run

pytestmark = [linux_only, pytest.mark.torch_free]

PACKAGE = Path(accelerator.__file__).parent
NATIVE = PACKAGE / "simulation/native"


def test_signature_of_environment_is_the_tables() -> None:
    signature = inspect.signature(accelerator.simulation.environment)
    hints = get_type_hints(accelerator.simulation.environment)
    assert {name: parameter.default for name, parameter in signature.parameters.items()} == {
        setting.name: setting.default for setting in PARAMETERS
    }
    for setting in PARAMETERS:
        hint = hints[setting.name]
        literals = [hint, *get_args(hint)] if get_origin(hint) is not Literal else [hint]
        choices = [choice for each in literals if get_origin(each) is Literal for choice in get_args(each)]
        assert choices == list(getattr(setting.type, "choices", ())), setting.name


def test_names_and_variables_are_unique() -> None:
    variables = [setting.variable for setting in SETTINGS if setting.variable]
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert len(set(variables)) == len(variables)
    assert all(bool(setting.variable) == bool(setting.readers) for setting in SETTINGS)


# ---- The command line. ----


# Of choices and flags the values follow from the type.
VALUES: dict[str, list[Any]] = {
    "gpus": [0, 3],
    "memory": [["1GiB"], ["1GiB", "5MiB"]],
    "name": [["A, B"], ["A", "B"]],
    "capability": [["8.6", "9.0"]],
    "speed": [[3, -1]],
    "mig": [[None, 2], [0]],
    "nvlink": [True, [0, None, 1]],
    "numa": [[0, 63]],
    "faults": [["xid=94,gpu=1,after_ops=400"], ["slow=20ms,gpu=0", "hang,rank=1,for=2"]],
}


def values(setting: Setting) -> list[Any]:
    if isinstance(setting.type, Choice):
        return list(setting.type.choices)
    return [setting.type.option_gives] if isinstance(setting.type, Flag) else VALUES[setting.name]


@pytest.mark.parametrize("setting", [setting for setting in PARAMETERS if setting.simulate], ids=lambda setting: setting.name)
def test_options_give_the_value_that_they_are_formatted_from(setting: Setting) -> None:
    for value in values(setting):
        words = setting.type.format_option(setting.flag, value)
        assert words
        parser = RunParser("simulate", "", "")
        options, command = parser.parse([*words, "--", "true"])
        assert parser.parameters(options) == {setting.name: value}, shlex.join(words)
        assert command == ["true"]


def test_default_of_a_flag_needs_no_option() -> None:
    for setting in PARAMETERS:
        if isinstance(setting.default, bool) and setting.name != "nvlink":
            assert setting.type.format_option(setting.flag, setting.default) == []


def test_options_that_are_not_given_are_no_parameters() -> None:
    for name in ("simulate", "rehearse"):
        parser = RunParser(name, "", "")  # type: ignore[arg-type]
        assert parser.parameters(parser.parse(["--", "true"])[0]) == {}


def test_help_names_the_default() -> None:
    for setting in PARAMETERS:
        if setting.simulate and not isinstance(setting.default, bool) and setting.default is not None:
            assert str(setting.default) in setting.simulate.help, setting.name


# ---- The C libraries. ----


def test_header_has_each_variable_that_a_library_reads() -> None:
    text = settings_header.header().decode()
    assert f'#define SETTING_NAMES "{_settings.PREFIX}NAMES"\n#define SETTING_NAMES_DEFAULT "Simulated GPU"\n' in text
    assert '#define SETTING_MEMORY_DEFAULT "8589934592"\n' in text
    assert f"    SIM_MAX_GPUS = {_settings.LIMITS['GPUS']},\n" in text
    assert "OWN_KERNELS" not in text


def test_libraries_assume_the_defaults_of_environment() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        report([n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(gpu), n.nvmlDeviceGetMemoryInfo(gpu).total,
                n.nvmlDeviceGetCudaComputeCapability(gpu), n.nvmlDeviceGetMaxMigDeviceCount(gpu),
                list(n.nvmlDeviceGetMemoryAffinity(gpu, 1, 0)), n.nvmlDeviceGetCurrentClocksEventReasons(gpu),
                n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion()])
    """
    machine = environment()
    unset = {name: value for name, value in machine.items() if not name.startswith(_settings.PREFIX)}
    assert run("import textwrap\nn.nvmlInit()\n" + inspect.cleandoc(program), unset) == evaluate(program)


def native_sources(library: libraries._Library) -> Iterable[bytes]:
    """Return the sources of a library and what they include."""
    files = (file for folder in library.folders for file in (NATIVE / folder).glob("*.c"))
    names = [file.relative_to(NATIVE).as_posix() for file in files]
    return read_with_included(libraries._sources().__getitem__, *names).values()


def read_by_libraries() -> dict[str, set[str]]:
    """Return the libraries that read each variable."""
    readers: dict[str, set[str]] = {}
    for library in libraries._LIBRARIES:
        for source in native_sources(library):
            text = re.sub(r"/\*.*?\*/", "", source.decode(), flags=re.DOTALL)
            for name in re.findall(r"(?:getenv\(SETTING_|\bREAD\()([A-Z_]+)\)", text):
                readers.setdefault(name, set()).add(Path(library.path).name.partition(".")[0])
    return readers


def test_readers_among_the_libraries_are_named() -> None:
    found = read_by_libraries()
    assert found["NCCL_TIMEOUT"] == {"libnccl"}
    in_table = {setting.variable: {*setting.readers} - {"inside", "outside"} for setting in SETTINGS if setting.variable}
    assert {name: found.get(name, set()) for name in in_table} == in_table


# ---- Python. ----


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE), ast.parse(file.read_text(encoding="utf-8"))


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Return the constants that are statements: docstrings of modules, functions, classes and variables."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_variables_are_named_in_the_table_alone() -> None:
    names = [
        f"{path}:{node.lineno}"
        for path, tree in modules()
        if path.name != "options.py"
        for node in set(ast.walk(tree)) - docstrings(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _settings.PREFIX in node.value
    ]
    for file in NATIVE.rglob("*.[chp]*"):
        text = re.sub(r"/\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        names += [f"{file.name}: {text}" for text in re.findall(rf'"[^"\n]*{_settings.PREFIX}[^"\n]*"', text)]
    assert names == []


def test_readers_in_python_are_named() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in modules():
        reader = "inside" if path.parts[1:2] == ("_inside",) else "outside"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in ("read", "_read") and isinstance(node.args[0].value, str):
                    found.setdefault(_settings.find(node.args[0].value).name, set()).add(reader)
    in_table = {setting.name: {*setting.readers} & {"inside", "outside"} for setting in SETTINGS}
    assert {name: readers for name, readers in in_table.items() if readers} == found


def test_wrong_word_of_an_option_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RunParser("simulate", "", "").parse(["--mig", "1,x", "--", "true"])
    assert "argument --mig: 'x' is not a number of instances or off" in capsys.readouterr().err
