"""The anonymous files behind shared memory and events: programs may close, replace and reuse their descriptors.

The programs call the driver and the runtime through ctypes, each in its own process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.driver.test_device_memory import export_and_import
from tests.simulation.driver.test_memory_misuse import evaluate
from tests.support.simulation import MIB, linux_only

pytestmark = linux_only

INVALID_VALUE, INVALID_HANDLE, OPERATING_SYSTEM = 1, 400, 304
CONTENT = b"kept" * 1024

EVENTS = """
class EventHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]

def make_event():
    return made(cuda, "cudaEventCreateWithFlags", c_uint(6))  # between processes, without timing

def export_event(event):
    handle = EventHandle()
    return cuda("cudaIpcGetEventHandle", byref(handle), event), bytes(handle.bytes).hex()

def open_event(text):
    event = c_void_p()
    handle = EventHandle((ctypes.c_ubyte * 64)(*bytes.fromhex(text)))
    code = cuda("cudaIpcOpenEventHandle", byref(event), handle)
    if code == 0:
        assert cuda("cudaEventRecord", event, None) == 0
    return code
"""
FILES = """
def descriptors():
    return {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}

def name_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # listed itself
        return ""

def close_all_and_open(path):
    os.closerange(3, 256)
    return [os.open(path, os.O_RDWR) for _ in range(40)]

def are_open(files):
    for file in files:
        os.fstat(file)  # raises if the descriptor was closed
    return True
"""
# What has the descriptor of an event that was destroyed. Each statement makes `others`.
REPLACEMENTS = {
    "data file": "others = [os.open(path, os.O_RDWR) for _ in range(40)]",
    "other event": "others = [make_event() for _ in range(40)]; assert not any(export_event(event)[0] for event in others)",
    "anonymous file": "others = [os.memfd_create('other') for _ in range(40)]; [os.truncate(file, 4096) for file in others]",
    "memory": "others = made(cuda, 'cudaMalloc', MIB), made(cuda, 'cudaMalloc', MIB)",
    "nothing": "others = []",
    "pipe": "others = [os.pipe() for _ in range(20)]",
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_handle_of_a_destroyed_event_opens_nothing_else(tmp_path: Path, replacement: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    exporter = f"""
        path = {str(path)!r}
        event = make_event()
        code, handle = export_event(event)
        assert code == 0
        assert cuda("cudaEventDestroy", event) == 0
        {REPLACEMENTS[replacement]}
        report(handle)
        sys.stdin.readline()
        report(True)
    """
    _, (code,), _ = export_and_import(EVENTS + exporter.replace("\n        ", "\n"), EVENTS + "report(open_event(handles[0]))")
    assert code == INVALID_HANDLE
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("kept", ["file", "anonymous file with its content", "data file with its content"])
def test_handle_of_a_destroyed_event_does_not_open_a_copy(tmp_path: Path, kept: str) -> None:
    """The id in the event's own file is cleared. Another file with the id has another inode."""
    statements = {
        "file": "copy = os.dup(descriptor)",
        "anonymous file with its content": "copy = os.memfd_create('copy'); os.write(copy, os.pread(descriptor, 4096, 0))",
        "data file with its content": f"""copy = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT)
os.write(copy, os.pread(descriptor, 4096, 0))""",
    }
    exporter = f"""
event = make_event()
code, handle = export_event(event)
(descriptor,) = (number for number in descriptors() if "cuda-event" in name_of(number))
{statements[kept]}
assert (code, cuda("cudaEventDestroy", event)) == (0, 0)
os.dup2(copy, descriptor)
report(handle)
sys.stdin.readline()
report(os.pread(descriptor, 8, 0) == bytes(8))
"""
    _, (code,), (is_unchanged,) = export_and_import(EVENTS + FILES + exporter, EVENTS + "report(open_event(handles[0]))")
    assert code == INVALID_HANDLE
    assert is_unchanged


def test_event_handles_name_one_event() -> None:
    exporter = """
events = [make_event() for _ in range(3)]
handles = [export_event(event)[1] for event in events]
again = export_event(events[2])[1]
assert again == handles[2]
report(*handles, again)
sys.stdin.readline()
report([cuda("cudaEventQuery", event) for event in events])
"""
    importer = """
crossed = [handles[0][:at] + handles[1][at:] for at in range(0, 128, 8)]
report([open_event(handle) for handle in handles], {open_event(handle) for handle in crossed[2:]}, open_event("00" * 64))
""".replace("{open_event(handle) for handle in crossed[2:]}", "sorted({open_event(handle) for handle in crossed[2:]})")
    _, (codes, crossed, empty), (queries,) = export_and_import(EVENTS + exporter, EVENTS + importer)
    assert codes == [0] * 4
    assert set(crossed) <= {0, INVALID_HANDLE}
    assert INVALID_HANDLE in crossed
    assert empty == INVALID_VALUE
    assert queries == [0] * 3


def test_destroying_an_event_after_all_descriptors_were_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    program = f"""
events = [make_event() for _ in range(3)]
assert not any(export_event(event)[0] for event in events)
files = close_all_and_open({str(tmp_path / "file")!r})
codes = [export_event(events[0])[0], cuda("cudaEventRecord", events[1], None), cuda("cudaEventQuery", events[1])]
codes += [cuda("cudaEventDestroy", event) for event in events]
report(codes, are_open(files))
"""
    assert evaluate(EVENTS + FILES + program) == [[OPERATING_SYSTEM, 0, 0, 0, 0, 0], True]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_physical_memory_after_all_descriptors_were_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    program = f"""
SIZE = 2 * MIB
reserved = made(cu, "cuMemAddressReserve", 8 * SIZE, 0, 0, c_uint64(0))
access = Access(1, 0, 3)
handles = [made(cu, "cuMemCreate", SIZE, byref(properties()), c_uint64(0)) for _ in range(3)]
descriptor = c_int()
assert cu("cuMemExportToShareableHandle", byref(descriptor), c_void_p(handles[2]), c_int(1), c_uint64(0)) == 0
imported = made(cu, "cuMemImportFromShareableHandle", c_void_p(descriptor.value), c_int(1))
def map_at(index, handle):
    return cu("cuMemMap", reserved + index * SIZE, SIZE, 0, c_void_p(handle), c_uint64(0))
assert map_at(0, handles[0]) == 0
assert cu("cuMemSetAccess", reserved, SIZE, byref(access), 1) == 0
files = close_all_and_open({str(path)!r})
codes = [cuda("cudaMemset", reserved, 7, SIZE), map_at(1, handles[1]), map_at(2, imported)]
codes += [cu("cuMemExportToShareableHandle", byref(descriptor), c_void_p(handles[1]), c_int(1), c_uint64(0))]
codes += [cu("cuMemUnmap", reserved, SIZE), *(cu("cuMemRelease", c_void_p(handle)) for handle in (*handles, imported))]
report(codes, are_open(files), free_bytes())
"""
    codes, are_open, free = evaluate(FILES + program, memory="1GiB")
    assert codes == [0, OPERATING_SYSTEM, OPERATING_SYSTEM, OPERATING_SYSTEM, 0, 0, 0, 0, 0]
    assert are_open
    assert free == 1024 * MIB
    assert path.read_bytes() == CONTENT


def test_descriptors_are_closed_with_their_last_user() -> None:
    program = """
before = descriptors()
events = [make_event() for _ in range(3)]
assert not any(export_event(event)[0] for event in events)
handles = [made(cu, "cuMemCreate", 2 * MIB, byref(properties()), c_uint64(0)) for _ in range(3)]
during = len(descriptors() - before)
codes = [cuda("cudaEventDestroy", event) for event in events] + [cu("cuMemRelease", c_void_p(handle)) for handle in handles]
report(during, codes, descriptors() == before)
"""
    assert evaluate(EVENTS + FILES + program) == [6, [0] * 6, True]
