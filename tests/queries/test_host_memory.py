"""The host's memory in control groups of version 1 and 2, read from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerator._machine import host_memory

GIB = 2**30
AVAILABLE, TOTAL = 48 * GIB, 64 * GIB


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "_machine", lambda: (AVAILABLE, TOTAL))
    monkeypatch.setattr(host_memory, "_PROCESS_GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(host_memory, "_GROUPS", str(tmp_path / "fs"))
    return tmp_path


def write_v2(groups: Path, path: str, limit: int | str, used: int, cached: int) -> None:
    folder = groups / "fs" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {5 * GIB}\ninactive_anon {3 * GIB}\ninactive_file {cached}\nactive_file {GIB}\n")


def write_v1(groups: Path, path: str, limit: int, used: int, cached: int) -> None:
    folder = groups / "fs/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    # Figures without "total_" exclude the groups below.
    statistics = f"inactive_file 7\ntotal_inactive_anon {3 * GIB}\ntotal_inactive_file {cached}\n"
    (folder / "memory.stat").write_text(statistics)


def figures() -> tuple[float, float]:
    return host_memory.available() / GIB, host_memory.total() / GIB


def test_without_control_groups(groups: Path) -> None:
    assert figures() == (48, 64)


def test_version_2_subtracts_cached_files(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job\n")
    write_v2(groups, "job", 16 * GIB, 10 * GIB, 4 * GIB)
    assert figures() == (16 - (10 - 4), 16)


def test_version_2_without_a_limit(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job\n")
    write_v2(groups, "job", "max", 10 * GIB, 4 * GIB)
    assert figures() == (48, 64)


@pytest.mark.parametrize(("parent", "child", "expected"), [(8, 32, (8 - 6, 8)), (32, 8, (8 - 3, 8)), ("max", 8, (8 - 3, 8))])
def test_limits_of_ancestors_apply(groups: Path, parent: int | str, child: int, expected: tuple[int, int]) -> None:
    (groups / "cgroup").write_text("0::/slice/job\n")
    write_v2(groups, "slice", parent if parent == "max" else int(parent) * GIB, 6 * GIB, 0)
    write_v2(groups, "slice/job", child * GIB, 3 * GIB, 0)
    assert figures() == expected


def test_group_path_outside_the_container_uses_the_root_group(groups: Path) -> None:
    """In a container, the root of the mounted file system is the container's own group."""
    (groups / "cgroup").write_text("0::/docker/0123\n")
    write_v2(groups, "", 4 * GIB, GIB, 0)
    assert figures() == (3, 4)


def test_version_1_subtracts_cached_files_of_subgroups(groups: Path) -> None:
    (groups / "cgroup").write_text("12:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    write_v1(groups, "job", 16 * GIB, 10 * GIB, 4 * GIB)
    assert figures() == (16 - (10 - 4), 16)


def test_version_1_without_a_limit(groups: Path) -> None:
    (groups / "cgroup").write_text("4:hugetlb,memory:/job\n")
    write_v1(groups, "job", 0x7FFFFFFFFFFFF000, 10 * GIB, 4 * GIB)
    assert figures() == (48, 64)


def test_a_group_over_its_limit_has_nothing_available(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job\n")
    write_v2(groups, "job", 2 * GIB, 3 * GIB, 0)
    assert figures() == (0, 2)
