"""The native code is in folders: what a folder includes, and that the symbols of a library's files make no cycle."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelerator.simulation._build import libraries
from accelerator.simulation._build.boundary import boundary_flag
from accelerator.simulation._build.settings_header import HEADER_NAME, header
from tests.simulation.exported_names import NATIVE
from tests.simulation.native.elf import ElfSymbols
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free]

SHARED = ("common", "interface", "exported")
FOLDERS = sorted({folder for library in libraries._LIBRARIES for folder in library.folders})
Graph = Mapping[str, Mapping[str, set[str]]]


def files(*suffixes: str) -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in suffixes)


def folder_of(path: Path) -> str:
    return path.parent.relative_to(NATIVE).as_posix()


def test_folders_include_only_shared_folders_and_themselves() -> None:
    sources = files(".c", ".h", ".cpp", ".hpp")
    assert len(sources) > 80
    wrong = []
    for path in sources:
        for included in re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE):
            target = path.parent / included if "/" not in included else NATIVE / included
            is_own = "/" not in included and target.parent == path.parent
            exists = target.is_file() or included == HEADER_NAME  # which is generated
            if not (exists and (is_own or folder_of(target) in SHARED)):
                wrong.append(f"{path.relative_to(NATIVE)}: {included}")
    assert wrong == []


def test_every_source_belongs_to_a_library() -> None:
    assert {folder_of(path) for path in files(".c")} == set(FOLDERS)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Compile each file, and return the object files of each folder."""
    scratch = tmp_path_factory.mktemp("objects")
    (scratch / HEADER_NAME).parent.mkdir()
    (scratch / HEADER_NAME).write_bytes(header())
    flags = [flag for flag in libraries._FLAGS if not flag.startswith("-Wl,") and flag not in ("-O2", "-shared")]

    def compile_folder(folder: str) -> list[Path]:
        directory = scratch / folder
        directory.mkdir(parents=True)
        sources = map(str, (NATIVE / folder).glob("*.c"))
        boundary = boundary_flag(libraries._sources().__getitem__)
        command = [*libraries._compiler(), *flags, boundary, "-c", f"-I{NATIVE}", f"-I{scratch}", "-DCUDART=13", *sources]
        subprocess.run(command, cwd=directory, check=True)
        return sorted(directory.glob("*.o"))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FOLDERS, pool.map(compile_folder, FOLDERS), strict=True))


def read_graph(paths: list[Path]) -> Graph:
    """Return which files use symbols that another file defines, and which symbols."""
    symbols = {f"{path.parent.name}/{path.stem}.c": ElfSymbols(path) for path in paths}
    owners: dict[str, str] = {}
    for is_weak in (True, False):  # a weak stub counts only if no other file defines its name
        owners.update({s.name: file for file, each in symbols.items() for s in each.defined if (s in each.weak) is is_weak})
    graph: dict[str, dict[str, set[str]]] = {file: {} for file in symbols}
    for file, each in symbols.items():
        for symbol in each.undefined:
            owner = owners.get(symbol.name, file)
            if owner != file:
                graph[file].setdefault(owner, set()).add(symbol.name)
    return graph


def find_cycles(graph: Graph) -> Iterator[list[str]]:
    """Yield the groups of files that reach each other."""
    reached: dict[str, set[str]] = {}
    for file in graph:
        reached[file], left = set(), [file]
        while left:
            new = graph[left.pop()].keys() - reached[file]
            reached[file] |= new
            left += new
    found: set[str] = set()
    for file in sorted(graph):
        if file in reached[file] and file not in found:
            group = [other for other in sorted(graph) if other in reached[file] and file in reached[other]]
            found.update(group)
            yield group


@pytest.mark.slow
@pytest.mark.parametrize("library", libraries._LIBRARIES, ids=lambda library: Path(library.path).name)
def test_symbols_make_no_cycle(library: libraries._Library, objects: dict[str, list[Path]]) -> None:
    paths = [path for folder in library.folders for path in objects[folder]]
    graph = read_graph(paths)
    assert len(graph) == len(paths) > 0
    uses = [
        f"{user} -> {owner}: {', '.join(sorted(names))}"
        for group in find_cycles(graph)
        for user in group
        for owner, names in graph[user].items()
        if owner in group
    ]
    assert uses == []


def test_cycles_are_found() -> None:
    graph = {"a": {"b": {"f"}}, "b": {"c": {"g"}, "d": {"h"}}, "c": {"a": {"i"}}, "d": {}}
    assert list(find_cycles(graph)) == [["a", "b", "c"]]
