"""Lets Triton's interpreter run kernels on the memory of simulated GPUs, on streams and under ``torch.compile``.

With TRITON_INTERPRET=1 ``triton.jit`` makes a function that Triton's interpreter runs. The interpreter copies all memory of a
kernel's tensors to the CPU and back; here it gets CPU aliases instead. Dynamo cannot trace the interpreter: a launch becomes a
node of the graph (`triton_graph`) or a graph break.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import torch

from .._kernels import capture, runtime
from .._kernels.aliases import cpu_alias
from .triton_accesses import hook_accesses
from .triton_bfloat16 import hook_bfloat16
from .triton_repairs import repair_interpreter

__all__ = ["hook_autotuner", "hook_interpreter", "on_cpu_tensors"]

# Dynamo appends it to its error with fullgraph=True.
_BREAKS_GRAPH = (
    "Triton's interpreter, which runs the kernels of a simulated GPU, cannot be traced: compile without fullgraph=True, or put"
    " the launch into a torch.library.custom_op"
)

_launching = threading.local()


@contextlib.contextmanager
def on_cpu_tensors() -> Generator[None, None, None]:
    """Let kernels that this thread launches take CPU tensors, and run at once even if a stream captures."""
    before = getattr(_launching, "takes_cpu_tensors", False)
    _launching.takes_cpu_tensors = True
    try:
        yield
    finally:
        _launching.takes_cpu_tensors = before


def _takes_cpu_tensors() -> bool:
    return getattr(_launching, "takes_cpu_tensors", False)


def hook_interpreter(interpreter: ModuleType) -> None:
    """Replace the functions of ``triton.runtime.interpreter`` that copy arguments and launch a kernel."""
    executor: Any = interpreter.GridExecutor
    launch = hook_accesses(interpreter, executor.__call__)
    launch_captured = executor.__call__
    # Before Triton 3.3, the interpreter takes no wrapped tensors.
    unwrap: Any = getattr(interpreter, "_unwrap_tensor", _keep_tensor)
    rewrap: Any = getattr(interpreter, "_rewrap_tensor", _keep_tensor)

    def convert(argument: Any) -> Any:
        if isinstance(argument, tuple):
            values = map(convert, argument)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            return type(argument)(*values) if hasattr(argument, "_fields") else tuple(values)
        if dataclasses.is_dataclass(argument) and hasattr(argument, "base"):  # a tensor descriptor
            return dataclasses.replace(argument, base=convert(argument.base))  # type: ignore[type-var]
        if not hasattr(argument, "data_ptr"):
            return argument
        tensor = unwrap(argument)
        if tensor.device.type == "cuda":
            return rewrap(cpu_alias(tensor), original_tensor=argument)
        if tensor.device.type == "cpu" and not _takes_cpu_tensors() and not tensor.is_pinned():
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return argument

    def arguments_on_cpu(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [convert(each) for each in args], {name: convert(value) for name, value in kwargs.items()}

    def leave_arguments(*_: Any) -> None:
        """Copy nothing back: the kernel has written to the device's memory."""

    def launch_on_stream(self: Any, *args: Any, **kwargs: Any) -> None:
        if _takes_cpu_tensors():
            launch(self, *args, **kwargs)
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if runtime.wait_unless_capturing(device):
            arguments_on_cpu(self, args, kwargs)  # raises now what the replay could only print
            capture.put_on_stream(device, lambda: launch_captured(self, *args, **kwargs))
            return
        launch(self, *args, **kwargs)

    executor._init_args_hst = arguments_on_cpu
    executor._restore_args_dev = leave_arguments
    executor.__call__ = launch_on_stream
    # Both replace create_atomic_rmw, as `hook_accesses` above does, and call what they replace: bfloat16 is refused first, then
    # floats are exchanged as integers, then the access is recorded.
    repair_interpreter(interpreter)
    hook_bfloat16(interpreter)
    kernel: Any = interpreter.InterpretedFunction
    if hasattr(kernel, "run"):
        _break_graphs(kernel, "run")
    else:  # Triton 3.4: each kernel has a function `run` of its own, and kernel[grid] returns the executor
        _break_graphs(kernel, "__getitem__")
        _break_graphs(executor, "__call__")


def _keep_tensor(tensor: torch.Tensor, original_tensor: object = None) -> torch.Tensor:
    return tensor


def hook_autotuner(autotuner: ModuleType) -> None:
    """Let ``triton.autotune`` run each configuration once and take the first: the interpreter's times mean nothing."""

    def do_bench(kernel_call: Callable[[], object], quantiles: Any = None) -> list[float]:
        if not _takes_cpu_tensors():  # Inductor tunes on copies, so that tuning changes no argument
            torch.cuda.synchronize()  # as Triton's own function does; an error in a capture
            kernel_call()
        return [1.0] * len(quantiles or (1,))

    original: Any = autotuner.Autotuner.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("do_bench") is None:
            kwargs["do_bench"] = do_bench
        original(self, *args, **kwargs)

    autotuner.Autotuner.__init__ = initialize
    _break_graphs(autotuner.Autotuner, "run")


def _break_graphs(launcher: Any, method: str) -> None:
    """Let Dynamo call a launcher's method without tracing it."""
    original: Any = getattr(launcher, method)
    disable: Any = torch.compiler.disable
    disabled: list[Any] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # the decorator below would import it, which takes seconds
            return original(self, *args, **kwargs)
        if not disabled:
            disabled.append(disable(original))
        return disabled[0](self, *args, **kwargs)

    marked: Any = run
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _BREAKS_GRAPH
    setattr(launcher, method, run)
