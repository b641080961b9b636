"""The host's memory in control groups of version 1 and 2, read from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("lines", "write", "path", "limit", "used", "cached", "expected"),
    [
        ("", write_v2, "job", GIB, 0, 0, (48, 64)),
        ("0::/job\n", write_v2, "job", 16 * GIB, 10, 4, (16 - (10 - 4), 16)),
        ("0::/job\n", write_v2, "job", "max", 10, 4, (48, 64)),
        ("0::/job\n", write_v2, "job", 2 * GIB, 3, 0, (0, 2)),
        # In a container, the root of the mounted file system is the container's own group.
        ("0::/docker/0123\n", write_v2, "", 4 * GIB, 1, 0, (3, 4)),
        ("12:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", write_v1, "job", 16 * GIB, 10, 4, (16 - (10 - 4), 16)),
        ("4:hugetlb,memory:/job\n", write_v1, "job", 0x7FFFFFFFFFFFF000, 10, 4, (48, 64)),
    ],
    ids=["no groups", "cached files", "no limit", "over its limit", "path of the host", "version 1", "version 1, no limit"],
)
def test_a_group(
    groups: Path, lines: str, write: Any, path: str, limit: int | str, used: int, cached: int, expected: tuple[int, int]
) -> None:
    """Limits are in bytes, uses in GiB."""
    if lines:
        (groups / "cgroup").write_text(lines)
    write(groups, path, limit, used * GIB, cached * GIB)
    assert figures() == expected


@pytest.mark.parametrize(("parent", "child", "expected"), [(8, 32, (8 - 6, 8)), (32, 8, (8 - 3, 8)), ("max", 8, (8 - 3, 8))])
def test_limits_of_ancestors_apply(groups: Path, parent: int | str, child: int, expected: tuple[int, int]) -> None:
    (groups / "cgroup").write_text("0::/slice/job\n")
    write_v2(groups, "slice", parent if parent == "max" else int(parent) * GIB, 6 * GIB, 0)
    write_v2(groups, "slice/job", child * GIB, 3 * GIB, 0)
    assert figures() == expected
