"""Lets Triton's interpreter run kernels on the memory of simulated GPUs, on streams and under ``torch.compile``.

With TRITON_INTERPRET=1 ``triton.jit`` makes a function that Triton's interpreter runs. The interpreter copies all memory of a
kernel's tensors to the CPU and back; here it gets CPU aliases instead. Dynamo cannot trace the interpreter: a launch becomes a
node of the graph (`triton_graph`) or a graph break.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import torch

from .._kernels import capture
from .._kernels.aliases import cpu_alias
from .triton_accesses import hook_accesses
from .triton_bfloat16 import hook_bfloat16

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
        if capture.wait_unless_capturing(device):
            arguments_on_cpu(self, args, kwargs)  # raises now what the replay could only print
            capture.put_on_stream(device, lambda: launch_captured(self, *args, **kwargs))
            return
        launch(self, *args, **kwargs)

    executor._init_args_hst = arguments_on_cpu
    executor._restore_args_dev = leave_arguments
    executor.__call__ = launch_on_stream
    _read_written_annotations(executor)
    _exchange_floats(interpreter)
    hook_bfloat16(interpreter)
    _let_scalars_be_indices(interpreter)
    _keep_type_of_scalars(interpreter)
    _convert_floats(interpreter)
    kernel: Any = interpreter.InterpretedFunction
    if hasattr(kernel, "run"):
        _break_graphs(kernel, "run")
    else:  # Triton 3.4: each kernel has a function `run` of its own, and kernel[grid] returns the executor
        _break_graphs(kernel, "__getitem__")
        _break_graphs(executor, "__call__")


def _read_written_annotations(executor: Any) -> None:
    """Let a parameter annotated with the text "tl.constexpr" be constant, as in Triton's compiler."""
    original = executor.__init__

    def initialize(self: Any, fn: Any, arg_names: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, *args, **kwargs)
        annotations = inspect.get_annotations(fn)
        self.constexprs = [name for name in arg_names if name in self.constexprs or "constexpr" in str(annotations.get(name))]

    executor.__init__ = initialize


def _let_scalars_be_indices(interpreter: Any) -> None:
    """Let a scalar bound a loop: from NumPy 2.4 on, int() refuses the array of one element that Triton before 3.7 gives it.

    https://github.com/triton-lang/triton/issues/9171
    """
    patch_tensor = interpreter._patch_lang_tensor

    def index(self: Any) -> int:
        return int(self.handle.data.squeeze())

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)  # the scope of Triton 3.6 and later restores the attributes after the launch
        tensor.__index__ = index

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _keep_type_of_scalars(interpreter: Any) -> None:
    """Let a scalar that becomes a block keep its type: for the interpreter, a comparison has the type of what is compared."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    splat = builder.create_splat

    def create_splat(self: Any, *args: Any) -> Any:
        block = splat(self, *args)
        scalar = next(each for each in args if isinstance(each, handle))
        block.data = block.data.astype(scalar.data.dtype, copy=False)
        return block

    builder.create_splat = create_splat


def _exchange_floats(interpreter: Any) -> None:
    """Let a kernel exchange floats atomically: the interpreter exchanges integers only, so it gets the floats' bits."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, value: Any, *options: Any) -> Any:
        data = value.data
        if operation.name != "XCHG" or data.dtype.kind != "f":
            return original(self, operation, ptr, value, *options)
        integer = getattr(interpreter.tl, f"uint{8 * data.itemsize}")
        bits = original(self, operation, ptr, handle(data.view(f"u{data.itemsize}"), integer), *options)
        return handle(bits.data.view(data.dtype), value.dtype.scalar)

    builder.create_atomic_rmw = create_atomic_rmw


def _convert_floats(interpreter: Any) -> None:
    """Let a kernel get an argument of type float as a scalar of float32, as Triton's compiler does."""
    convert, np, tl = interpreter._implicit_cvt, interpreter.np, interpreter.tl

    def convert_float(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_float


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
