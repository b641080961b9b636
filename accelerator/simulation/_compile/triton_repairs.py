"""Repairs of Triton's interpreter, which computes in these cases otherwise than Triton's compiler, or raises an error."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["repair_interpreter"]


def repair_interpreter(interpreter: Any) -> None:
    """Replace functions of ``triton.runtime.interpreter`` that differ from Triton's compiler."""
    _read_written_annotations(interpreter.GridExecutor)
    _exchange_floats(interpreter)
    _let_scalars_be_indices(interpreter)
    _keep_type_of_scalars(interpreter)
    _convert_floats(interpreter)


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
