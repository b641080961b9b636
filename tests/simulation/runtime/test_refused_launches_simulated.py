"""A program that does not check a refused launch gets the error at its next copy, wait, query or op."""

from __future__ import annotations

import ctypes
import itertools
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch

from tests.simulation.runtime.test_launches_simulated import Dim3
from tests.simulation.runtime.test_launches_simulated import register as register_kernel
from tests.support import python, simulated_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_SUPPORTED = 801
_numbers = itertools.count()


@pytest.fixture
def x(runtime: ctypes.CDLL) -> Iterator[torch.Tensor]:
    yield torch.zeros(4, device="cuda")
    assert runtime.accelerator_simulation_refusal(None, 0) == 0, "the error was not read"
    runtime.cudaGetLastError()  # in another thread of the test
    assert torch.ones(2, device="cuda").tolist() == [1, 1]


def refuse(runtime: ctypes.CDLL, stream: torch.cuda.Stream | None = None) -> int:
    """Launch a kernel of an extension, and check nothing."""
    name = b"vadd%d" % next(_numbers)
    kernel = register_kernel(runtime, b"_Z%d%sPfS_i" % (len(name), name))
    handle = ctypes.c_void_p(stream.cuda_stream if stream else None)
    return int(runtime.cudaLaunchKernel(kernel, Dim3(1, 1, 1), Dim3(1, 1, 1), None, ctypes.c_size_t(0), handle))


def record_and_wait(x: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def record_and_query(x: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.query()


def copy_between_devices(x: torch.Tensor) -> torch.Tensor:
    return x.to("cuda:1")


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": torch.Tensor.tolist,
    "cpu": torch.Tensor.cpu,
    "item": lambda x: x[0].item(),
    "non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "columns": lambda x: torch.empty(2, pin_memory=True).copy_(x[::2]),
    "to_device": lambda x: x.copy_(torch.ones(4)),
    "between_devices": copy_between_devices,
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "stream_query": lambda x: torch.cuda.current_stream().query(),
    "other_stream": lambda x: torch.cuda.Stream().synchronize(),
    "event": record_and_wait,
    "event_query": record_and_query,
    "add": lambda x: x + 1,
    "add_in_place": lambda x: x.add_(1),
    "copy": lambda x: torch.empty(4, device="cuda").copy_(x),
    "clone": torch.Tensor.clone,
    "nonzero": torch.nonzero,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3),
    "sparse": lambda x: x.view(2, 2).to_sparse() @ x.view(2, 2),
}


@pytest.mark.parametrize("name", READS)
def test_the_next_read_fails(runtime: ctypes.CDLL, x: torch.Tensor, name: str) -> None:
    READS[name](x.clone())  # the engine handles calls from the second on
    assert refuse(runtime) == NOT_SUPPORTED
    with pytest.raises(RuntimeError, match="operation not supported"):
        READS[name](x)


def test_an_op_names_the_kernel_and_a_remedy(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    refuse(runtime)
    with pytest.raises(RuntimeError, match=r"kernel vadd\d+\(float\*, .* is not simulated: .*--no-compute"):
        x + 1


def test_the_error_waits_for_its_reader(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    """Neither work on streams nor queries of earlier events read it."""
    event = torch.cuda.Event()
    event.record()
    refuse(runtime)
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().record_event()
    assert event.query()  # as torch's watchdog queries events of collectives
    event.synchronize()
    refuse(runtime)
    with pytest.raises(RuntimeError, match="operation not supported"):
        x.cpu()


def test_a_checked_launch_leaves_no_error(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    """As with torch's C10_CUDA_KERNEL_LAUNCH_CHECK."""
    refuse(runtime)
    assert runtime.cudaPeekAtLastError() == NOT_SUPPORTED
    assert runtime.cudaGetLastError() == NOT_SUPPORTED
    assert (x + 1).tolist() == [1, 1, 1, 1]
    torch.cuda.synchronize()


def test_the_error_reaches_other_threads(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        assert other.submit(refuse, runtime).result() == NOT_SUPPORTED
        with pytest.raises(RuntimeError, match="operation not supported"):
            x.cpu()
        other.submit(runtime.cudaGetLastError).result()


def test_another_error_does_not_hide_it(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    invalid_device = 101
    refuse(runtime)
    assert runtime.cudaSetDevice(99) == runtime.cudaGetLastError() == invalid_device
    with pytest.raises(RuntimeError, match="operation not supported"):
        x.cpu()


def test_the_engine_computes_again_afterwards(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    needs_checks = ctypes.c_int.in_dll(runtime, "accelerator_simulation_needs_checks")
    before = needs_checks.value
    for _ in range(3):
        refuse(runtime)
    assert needs_checks.value == before + 1
    with pytest.raises(RuntimeError, match="operation not supported"):
        x + 1
    assert needs_checks.value == before


@pytest.mark.parametrize("call", ["copy", "synchronize_context", "synchronize_stream"])
@pytest.mark.parametrize("launch", ["runtime", "driver"])
def test_calls_of_the_driver_api_return_it(runtime: ctypes.CDLL, x: torch.Tensor, launch: str, call: str) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    host, address = (ctypes.c_float * 4)(), ctypes.c_size_t(x.data_ptr())
    calls: dict[str, Callable[[], int]] = {
        "copy": lambda: int(cuda.cuMemcpyDtoH_v2(host, address, ctypes.c_size_t(16))),
        "synchronize_context": lambda: int(cuda.cuCtxSynchronize()),
        "synchronize_stream": lambda: int(cuda.cuStreamSynchronize(None)),
    }
    assert calls[call]() == 0
    if launch == "runtime":
        refuse(runtime)
    else:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuModuleLoadData(ctypes.byref(module), b"\177ELF" + bytes(60)) == 0
        assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"vadd_%d" % next(_numbers)) == 0
        assert cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == NOT_SUPPORTED
    assert calls[call]() == NOT_SUPPORTED
    with pytest.raises(RuntimeError, match="operation not supported"):
        x + 1
    assert calls[call]() == 0


def test_a_program_of_the_driver_api_reads_it_with_its_text(runtime: ctypes.CDLL, x: torch.Tensor) -> None:
    cuda, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
    refuse(runtime)
    runtime.cudaGetLastError()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), b"\177ELF" + bytes(60)) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"checked_%d" % next(_numbers)) == 0
    error = cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
    assert cuda.cuGetErrorString(error, ctypes.byref(text)) == 0
    assert text.value == b"operation not supported"
    assert (x + 1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("launches", ["own", "other"])
def test_an_op_raises_it_beside_a_library_with_another_runtime(launches: str) -> None:
    """As an extension that nvcc 13 compiled, on a build of torch for CUDA 12."""
    program = f"""
        import ctypes, torch
        from tests.simulation.runtime.test_refused_launches_simulated import refuse
        from tests.support.simulation_driver import loaded_runtime

        x = torch.zeros(4, device="cuda")
        own = loaded_runtime()
        other = ctypes.CDLL("libcudart.so." + ("12" if torch.version.cuda.startswith("13") else "13"))
        assert other.cudaFree(None) == 0
        for _ in range(2):
            x + 1
            refuse({launches})
            try:
                x + 1
            except RuntimeError as error:
                print("operation not supported" in str(error))
        print((x + 1).tolist())
    """
    done = python(textwrap.dedent(program), simulated_environment(gpus=1))
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n[1.0, 1.0, 1.0, 1.0]\n"), done.stderr


@pytest.mark.slow
def test_without_computation_launches_succeed_and_do_nothing() -> None:
    program = """
        import ctypes, torch
        from tests.simulation.runtime.test_refused_launches_simulated import refuse
        from tests.support.simulation_driver import loaded_runtime

        x = torch.zeros(4, device="cuda")
        assert refuse(loaded_runtime()) == 0
        x + 1
        torch.cuda.synchronize()
        print(x.tolist())
    """
    done = python(textwrap.dedent(program), simulated_environment(gpus=1, compute=False))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0, 0.0, 0.0, 0.0]\n", "")


@pytest.mark.slow
def test_a_collective_does_not_send_what_nobody_computed() -> None:
    program = """
        import torch, tempfile, torch.distributed as dist
        from tests.simulation.runtime.test_refused_launches_simulated import refuse
        from tests.support.simulation_driver import loaded_runtime

        folder = tempfile.mkdtemp()
        dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{folder}/store")
        x = torch.zeros(4, device="cuda")
        dist.all_reduce(x)
        refuse(loaded_runtime())
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            print("a kernel was refused" in str(error) or "operation not supported" in str(error))
        try:  # reads the error, unless torch has read it: a query that is not ready replaces the thread's last error
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        dist.all_reduce(x)
        print(x.tolist())
        dist.destroy_process_group()
    """
    done = python(textwrap.dedent(program), simulated_environment(gpus=1))
    assert (done.returncode, done.stdout) == (0, "True\n[0.0, 0.0, 0.0, 0.0]\n"), done.stderr
