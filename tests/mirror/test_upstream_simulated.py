"""What PyTorch's own tests of ``torch.accelerator`` assert, asserted of this package."""

from __future__ import annotations

import gc

import pytest
import torch

import accelerator as acc

# What torch's own streams and events do before that is torch's affair.
AT_LEAST_2_8 = hasattr(torch.accelerator, "device_index")
# Before, Python compares streams by their ids.
AT_LEAST_2_13 = torch.__version__ >= (2, 13)
UNFIT = ValueError if AT_LEAST_2_8 else RuntimeError


@pytest.fixture(autouse=True)
def first_device() -> None:
    acc.set_device_index(0)


def test_current_accelerator() -> None:
    assert acc.is_available()
    device = acc.current_accelerator()
    assert device is not None
    assert device.type == "cuda"
    assert device.index is None
    with pytest.raises(ValueError, match="doesn't match the current accelerator"):
        acc.set_device_index("cpu")


def test_generic_multi_device_behavior() -> None:
    first, second = 0, 1
    acc.set_device_index(second)
    assert acc.current_device_index() == second
    acc.set_device_index(first)
    assert acc.current_device_index() == first
    stream = torch.Stream(second)
    acc.set_stream(stream)
    assert acc.current_device_index() == second
    assert acc.current_stream() == stream
    acc.synchronize(first)
    assert acc.current_device_index() == second
    acc.set_device_index(first)
    assert acc.current_device_index() == first


def test_generic_stream_behavior() -> None:
    first, second = acc.Stream(), acc.Stream()
    assert first != second
    acc.set_stream(first)
    assert acc.current_stream() == first
    host = torch.arange(100.0)
    on_first = host.to("cuda", non_blocking=True)
    acc.set_stream(second)
    assert acc.current_stream() == second
    event = acc.Event()
    event.record(first)
    second.wait_event(event)
    back = on_first.to("cpu", non_blocking=True)
    done = second.record_event()
    done.synchronize()
    assert done.query()
    assert first.query()
    acc.synchronize()
    assert torch.equal(back, host)
    acc.set_stream(torch.Stream.__new__(torch.Stream, stream_id=0, device_index=0, device_type=1))


def test_current_stream_query() -> None:
    stream = acc.current_stream()
    assert acc.current_stream(stream.device) == stream
    assert acc.current_stream(stream.device.index) == stream
    assert acc.current_stream(str(stream.device)) == stream
    with pytest.raises(ValueError, match="doesn't match the current accelerator"):
        acc.current_stream(torch.device("cpu"))


def test_stream_compare_with_non_stream() -> None:
    stream = acc.current_stream()
    assert stream != 0
    assert stream != "stream"
    assert stream is not None
    assert stream != object()
    if AT_LEAST_2_13:
        with pytest.raises(TypeError):
            stream < stream  # type: ignore[operator]  # noqa: B015
    again = torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    assert again == stream
    assert hash(again) == hash(stream)


def test_device_context_manager() -> None:
    before = acc.current_device_index()
    with acc.device_index(None):
        assert acc.current_device_index() == before
    assert acc.current_device_index() == before
    with acc.device_index(0):
        assert acc.current_device_index() == 0
    assert acc.current_device_index() == before


def test_device_index_fullgraph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with acc.device_index(x.device.index):
            return x + x

    x = torch.zeros(4, device="cuda:1")
    assert doubled(x).device == x.device
    assert acc.current_device_index() == 0


def test_multi_device_context_manager() -> None:
    with acc.device_index(1):
        assert acc.current_device_index() == 1
    assert acc.current_device_index() == 0


def test_stream_context_manager() -> None:
    before = acc.current_stream()
    stream = acc.Stream()
    with stream if AT_LEAST_2_8 else acc.stream(stream):
        assert acc.current_stream() == stream
    assert acc.current_stream() == before


def test_stream_context_manager_reentrance() -> None:
    before = acc.current_stream()
    first, second = acc.Stream(), acc.Stream()
    with acc.stream(first), acc.stream(first):
        assert acc.current_stream() == first
    assert acc.current_stream() == before
    with acc.stream(first):
        with acc.stream(second):
            with acc.stream(first):
                assert acc.current_stream() == first
            assert acc.current_stream() == second
        assert acc.current_stream() == first
    assert acc.current_stream() == before


def test_multi_device_stream_context_manager() -> None:
    before = [acc.current_stream(device) for device in range(2)]
    stream = torch.Stream(device="cuda:1")
    with acc.stream(stream):
        assert acc.current_device_index() == 1
        assert acc.current_stream() == stream
        assert acc.current_stream(0) == before[0]
    assert acc.current_device_index() == 0
    assert [acc.current_stream(device) for device in range(2)] == before


def test_pin_memory_on_non_blocking_copy() -> None:
    on_device = torch.randn(100).to("cuda")
    on_host = on_device.to("cpu", non_blocking=True)
    acc.synchronize()
    assert on_host.is_pinned()


def test_generic_event_behavior() -> None:
    untimed, timed = acc.Event(enable_timing=False), acc.Event(enable_timing=True)
    with pytest.raises(UNFIT):
        untimed.elapsed_time(timed)
    other = acc.Event(enable_timing=True)
    with pytest.raises(UNFIT):
        timed.elapsed_time(other)
    timed.record()
    with pytest.raises(UNFIT):
        timed.elapsed_time(other)
    torch.cuda._sleep(1000)
    other.record()
    other.synchronize()
    assert timed.elapsed_time(other) >= 0
    with pytest.raises(UNFIT):
        acc.Event().elapsed_time(other)


def test_empty_host_cache() -> None:
    acc.empty_host_cache()
    assert torch.zeros(1000).pin_memory().is_pinned()
    acc.empty_host_cache()


def test_memory_stats() -> None:
    gc.collect()
    acc.empty_cache()
    acc.reset_accumulated_memory_stats()
    acc.reset_peak_memory_stats()
    held = torch.empty(4096, dtype=torch.uint8, device="cuda")
    stats = acc.memory_stats()
    assert len(stats) >= 48
    assert stats["allocated_bytes.all.current"] == acc.memory_allocated()
    assert stats["allocated_bytes.all.peak"] == acc.max_memory_allocated()
    assert stats["reserved_bytes.all.current"] == acc.memory_reserved()
    assert stats["reserved_bytes.all.peak"] == acc.max_memory_reserved()
    assert acc.max_memory_allocated() >= acc.memory_allocated() > 0
    assert acc.max_memory_reserved() >= acc.memory_reserved() >= acc.memory_allocated()

    before = acc.memory_stats()
    more = torch.empty(1024, dtype=torch.uint8, device="cuda")
    grown = acc.memory_stats()
    assert grown["active_bytes.all.current"] == before["active_bytes.all.current"] + 1024
    freed = grown["active_bytes.all.freed"]
    del more
    assert acc.memory_stats()["active_bytes.all.freed"] == freed + 1024

    acc.reset_peak_memory_stats()
    assert acc.max_memory_allocated() == acc.memory_allocated()
    acc.reset_accumulated_memory_stats()
    assert acc.memory_stats()["allocated_bytes.all.freed"] == 0
    del held


def test_get_memory_info() -> None:
    free, total = acc.get_memory_info()
    assert isinstance(free, int)
    assert isinstance(total, int)
    assert 0 <= free <= total


def test_device_capability_supported_dtypes() -> None:
    dtypes = acc.get_device_capability()["supported_dtypes"]
    assert isinstance(dtypes, set)
    every = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    assert dtypes <= every
    for dtype in every:
        try:
            tensor = torch.empty(4, dtype=dtype, device="cuda").to(torch.float32).to(dtype)
            works = tensor.dtype == dtype
        except (RuntimeError, TypeError, NotImplementedError):
            works = False
        assert works == (dtype in dtypes), dtype
