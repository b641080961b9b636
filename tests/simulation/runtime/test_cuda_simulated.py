"""The simulated CUDA runtime and driver, tested through torch in this process.

``test_processes.py`` has the tests that need separate processes (initialization, forks, other machines).
"""

from __future__ import annotations

import ctypes
import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

GIB = 2**30
MIB = 2**20


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    torch.cuda.init()
    return ctypes.CDLL("libcuda.so.1")


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


class TestDevices:
    def test_properties_equal_the_machine_description(self) -> None:
        assert torch.cuda.device_count() == 2
        for device in range(2):
            properties = torch.cuda.get_device_properties(device)
            assert properties.name == "Simulated GPU"
            assert properties.total_memory == 8 * GIB
            assert (properties.major, properties.minor) == torch.cuda.get_device_capability(device) == (9, 0)
            assert properties.multi_processor_count == 132

    def test_uuids_differ(self) -> None:
        first, second = (str(torch.cuda.get_device_properties(device).uuid) for device in range(2))
        assert first[0] != second[0]

    def test_each_thread_has_a_current_device(self) -> None:
        torch.cuda.set_device(1)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.cuda.current_device).result() == 0
        assert torch.cuda.current_device() == 1

    def test_device_guard_restores_the_device(self) -> None:
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0

    def test_unknown_device_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)
        assert torch.cuda.current_device() == 0

    def test_peer_access(self, runtime: ctypes.CDLL) -> None:
        can_access = ctypes.c_int(-1)
        assert torch.cuda.can_device_access_peer(0, 1)
        assert runtime.cudaDeviceCanAccessPeer(ctypes.byref(can_access), 1, 1) == 0
        assert can_access.value == 0

    def test_get_last_error_clears_the_error(self, runtime: ctypes.CDLL) -> None:
        assert runtime.cudaSetDevice(7) == 101
        assert runtime.cudaPeekAtLastError() == 101
        assert runtime.cudaGetLastError() == 101
        assert runtime.cudaGetLastError() == 0

    def test_last_error_is_thread_local(self, runtime: ctypes.CDLL) -> None:
        assert runtime.cudaSetDevice(7) == 101
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(runtime.cudaPeekAtLastError).result() == 0
        assert runtime.cudaGetLastError() == 101

    def test_error_names_and_texts(self, runtime: ctypes.CDLL) -> None:
        runtime.cudaGetErrorName.restype = runtime.cudaGetErrorString.restype = ctypes.c_char_p
        assert runtime.cudaGetErrorName(2) == b"cudaErrorMemoryAllocation"
        assert runtime.cudaGetErrorString(900) == b"operation not permitted when stream is capturing"
        assert runtime.cudaGetErrorString(12345) == b"unrecognized error code"

    def test_context_stack(self, driver: ctypes.CDLL) -> None:
        context, popped, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
        assert driver.cuCtxPushCurrent_v2(context) == 0
        assert driver.cuCtxGetDevice(ctypes.byref(device)) == 0
        assert (device.value, torch.cuda.current_device()) == (1, 1)
        assert driver.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
        assert popped.value == context.value
        assert torch.cuda.current_device() == 0
        assert driver.cuDevicePrimaryCtxRelease_v2(1) == 0

    def test_get_proc_address_returns_second_versions(self, driver: ctypes.CDLL) -> None:
        function, status = ctypes.c_void_p(), ctypes.c_int(-1)
        assert driver.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(function), 12000, 0, ctypes.byref(status)) == 0
        assert function.value == ctypes.cast(driver.cuMemAlloc_v2, ctypes.c_void_p).value
        assert status.value == 0
        assert driver.cuGetProcAddress_v2(b"cuNothing", ctypes.byref(function), 12000, 0, ctypes.byref(status)) == 500
        assert (function.value, status.value) == (None, 1)


class TestMemory:
    @pytest.fixture(autouse=True)
    def free_unused_memory(self) -> None:
        # Tensors that other tests left in reference cycles must not be freed while a test measures memory.
        gc.collect()
        torch.cuda.empty_cache()

    def test_counters_follow_allocations(self) -> None:
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        assert total == 8 * GIB
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - allocated == 64 * MIB
        assert torch.cuda.memory_reserved() - reserved == 64 * MIB
        assert free - torch.cuda.mem_get_info()[0] == 64 * MIB
        del tensor
        assert torch.cuda.memory_allocated() == allocated
        assert free - torch.cuda.mem_get_info()[0] == 64 * MIB, "the allocator keeps what was freed"
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == free

    def test_each_device_has_its_own_memory(self) -> None:
        free = torch.cuda.mem_get_info(0)[0]
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
        assert torch.cuda.mem_get_info(0)[0] == free
        assert torch.cuda.mem_get_info(1)[0] <= 8 * GIB - tensor.numel()

    def test_out_of_memory_error(self) -> None:
        ooms = torch.cuda.memory_stats()["num_ooms"]
        tensor = torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError) as error:
            torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
        message, free = str(error.value), torch.cuda.mem_get_info()[0] / GIB
        assert f"Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which {free:.2f} GiB is free" in message
        assert re.search(r"this process has 6\.[01]", message), "torch reads from NVML what this process holds"
        assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
        del tensor
        # The allocator frees the cached 6 GiB to make this allocation possible.
        assert torch.empty(7 * GIB, dtype=torch.uint8, device="cuda").numel() == 7 * GIB

    def test_allocation_uses_no_host_memory_until_written(self) -> None:
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1])
        tensor = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        with open("/proc/self/statm") as file:
            assert (int(file.read().split()[1]) - before) * 4096 < 64 * MIB
        assert tensor.numel() == 4 * GIB

    def test_managed_memory_is_charged(self, runtime: ctypes.CDLL) -> None:
        free, address = torch.cuda.mem_get_info()[0], ctypes.c_void_p()
        assert runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(64 * MIB), 1) == 0
        assert free - torch.cuda.mem_get_info()[0] == 64 * MIB
        assert runtime.cudaFree(address) == 0
        assert torch.cuda.mem_get_info()[0] == free

    def test_hints_for_managed_memory_are_accepted(self, runtime: ctypes.CDLL) -> None:
        class Location(ctypes.Structure):
            _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))

        has_locations = int((torch.version.cuda or "0").split(".")[0]) >= 13
        on_device, on_host, cpu = 1, 2, -1

        def place(device: int) -> Any:
            return Location(on_host if device == cpu else on_device, device) if has_locations else device

        def prefetch(address: int | None, size: int, device: int) -> int:
            more = (0, None) if has_locations else (None,)
            result: int = runtime.cudaMemPrefetchAsync(ctypes.c_void_p(address), ctypes.c_size_t(size), place(device), *more)
            return result

        def advise(size: int, advice: int, device: int) -> int:
            result: int = runtime.cudaMemAdvise(address, ctypes.c_size_t(size), advice, place(device))
            return result

        address = ctypes.c_void_p()
        assert runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(MIB), 1) == 0
        assert address.value is not None
        ctypes.memset(address, 7, MIB)
        assert [prefetch(address.value, MIB, device) for device in (0, 1, cpu)] == [0, 0, 0]
        assert [advise(MIB, advice, device) for advice in range(1, 7) for device in (0, cpu)] == [0] * 12
        assert ctypes.string_at(address, MIB) == bytes([7]) * MIB
        device_memory = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        invalid_value, invalid_device = 1, 101
        assert prefetch(address.value + 4096, MIB, 0) == prefetch(address.value, 0, 0) == invalid_value
        assert prefetch(device_memory.data_ptr(), MIB, 0) == invalid_value
        assert prefetch(None, MIB, 0) == advise(MIB, 0, 0) == advise(MIB, 7, 0) == invalid_value
        assert prefetch(address.value, MIB, 2) == advise(MIB, 1, 2) == invalid_device
        assert runtime.cudaGetLastError() == invalid_device  # torch's next call would raise it
        assert runtime.cudaFree(address) == 0

    @pytest.mark.parametrize("threshold", [0, 2 * MIB, 2**64 - 1])
    def test_pool_release_threshold(self, runtime: ctypes.CDLL, threshold: int) -> None:
        release_threshold, reserved, reserved_high, used, used_high = 4, 5, 6, 7, 8
        pool = ctypes.c_void_p()
        assert runtime.cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0

        def read(attribute: int) -> int:
            value = ctypes.c_uint64()
            assert runtime.cudaMemPoolGetAttribute(pool, attribute, ctypes.byref(value)) == 0
            return value.value

        def write(attribute: int, value: int) -> None:
            assert runtime.cudaMemPoolSetAttribute(pool, attribute, ctypes.byref(ctypes.c_uint64(value))) == 0

        assert (read(reserved), read(used)) == (0, 0)
        write(release_threshold, threshold)
        blocks = [ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()]
        for block in blocks:
            assert runtime.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(MIB), None) == 0
        assert (read(reserved), read(used)) == (3 * MIB, 3 * MIB)
        # A peak is reset to the present figure.
        write(used_high, 0)
        write(reserved_high, 0)
        assert (read(reserved_high), read(used_high)) == (3 * MIB, 3 * MIB)
        for block in blocks:
            assert runtime.cudaFreeAsync(block, None) == 0
        assert (read(reserved), read(used)) == (min(threshold, 3 * MIB), 0)
        assert (read(reserved_high), read(used_high)) == (3 * MIB, 3 * MIB)
        write(used_high, 0)
        write(reserved_high, 0)
        assert (read(reserved_high), read(used_high)) == (min(threshold, 3 * MIB), 0)
        write(release_threshold, 0)
        assert runtime.cudaMemPoolTrimTo(pool, ctypes.c_size_t(0)) == 0
        assert read(reserved) == 0
        write(reserved_high, 0)

    def test_freeing_what_was_not_allocated_is_an_error(self, runtime: ctypes.CDLL) -> None:
        tensor = torch.empty(2 * MIB, device="cuda")
        assert runtime.cudaFree(ctypes.c_void_p(tensor.data_ptr() + 512)) == 1
        assert runtime.cudaFree(ctypes.c_void_p(4096)) == 1
        assert runtime.cudaFree(None) == 0
        assert runtime.cudaGetLastError() == 1

    def test_allocations_by_several_threads(self) -> None:
        free = torch.cuda.mem_get_info()[0]

        def work(seed: int) -> bool:
            data = torch.full((seed + 1, 300_000), seed, dtype=torch.uint8)
            return all(torch.equal(data.cuda().cpu(), data) for _ in range(20))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == free


class TestCopies:
    def test_copy_through_both_devices(self) -> None:
        data = random_bytes(5 * MIB + 3)
        there = data.to("cuda:0").to("cuda:1")
        assert there.device == torch.device("cuda:1")
        assert torch.equal(there.to("cuda:0").cpu(), data)

    def test_non_blocking_copies_of_pinned_memory(self) -> None:
        data = random_bytes(MIB).pin_memory()
        result = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        result.copy_(data.to("cuda", non_blocking=True), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(result, data)

    def test_two_dimensional_copy(self, runtime: ctypes.CDLL) -> None:
        data, result = random_bytes(40).view(4, 10), torch.zeros(4, 3, dtype=torch.uint8)
        stored = data.cuda()
        arguments = (result.data_ptr(), 3, stored.data_ptr() + 2, 10, 3, 4, 2, 0)
        assert runtime.cudaMemcpy2DAsync(*map(ctypes.c_size_t, arguments)) == 0
        assert torch.equal(result, data[:, 2:5])

    def test_copy_beyond_the_end_is_an_error(self, runtime: ctypes.CDLL) -> None:
        # Allocate several blocks, so that the memory behind the tested one may be another block.
        tensor, data = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)][-1], random_bytes(16)
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_void_p(tensor.data_ptr())
        assert driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address) == 0
        assert base.value
        end = base.value + size.value
        source = ctypes.c_void_p(data.data_ptr())
        assert runtime.cudaMemcpy(ctypes.c_void_p(end - 8), source, ctypes.c_size_t(16), 1) == 1
        assert runtime.cudaMemcpy(ctypes.c_void_p(end - 16), source, ctypes.c_size_t(16), 1) == 0
        assert runtime.cudaGetLastError() == 1

    def test_memset(self, runtime: ctypes.CDLL) -> None:
        tensor = torch.zeros(1000, dtype=torch.uint8, device="cuda")
        assert runtime.cudaMemset(ctypes.c_void_p(tensor.data_ptr()), 7, ctypes.c_size_t(999)) == 0
        assert tensor.tolist() == [7] * 999 + [0]


class Pointer(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_address", ctypes.c_void_p),
        ("host_address", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


class TestHostMemory:
    def attributes(self, runtime: ctypes.CDLL, address: int) -> Pointer:
        pointer = Pointer()
        assert runtime.cudaPointerGetAttributes(ctypes.byref(pointer), ctypes.c_void_p(address)) == 0
        return pointer

    def test_pinned_tensors_report_it(self) -> None:
        tensor = torch.empty(10)
        assert not tensor.is_pinned()
        assert tensor.pin_memory().is_pinned()
        assert torch.empty(10, pin_memory=True).is_pinned()

    def test_pointer_attributes(self, runtime: ctypes.CDLL) -> None:
        plain, pinned, there = torch.empty(10), torch.empty(10, pin_memory=True), torch.empty(10, device="cuda:1")
        unknown = self.attributes(runtime, plain.data_ptr())
        assert (unknown.type, unknown.device_address) == (0, None)
        host = self.attributes(runtime, pinned.data_ptr())
        assert (host.type, host.host_address, host.device_address) == (1, pinned.data_ptr(), pinned.data_ptr())
        device = self.attributes(runtime, there.data_ptr())
        assert (device.type, device.device, device.host_address) == (2, 1, None)

    def test_host_register(self) -> None:
        tensor = torch.empty(10_000)
        cudart = torch.cuda.cudart()
        assert int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0
        assert tensor.is_pinned()
        assert int(cudart.cudaHostRegister(tensor.data_ptr() + 8, 8, 0)) == 712
        assert int(cudart.cudaHostUnregister(tensor.data_ptr())) == 0
        assert not tensor.is_pinned()
        assert int(cudart.cudaHostUnregister(tensor.data_ptr())) == 713
        torch._C._cuda_init()
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()


class TestKernels:
    def test_kernels_complete_immediately(self) -> None:
        tensor = torch.ones(10, device="cuda", requires_grad=True)
        (tensor * 2).sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [2.0] * 10
        assert torch.cuda.current_stream().query()
