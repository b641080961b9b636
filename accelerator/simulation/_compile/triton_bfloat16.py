"""Lets Triton's interpreter compute with bfloat16, which NumPy lacks.

The interpreter stores such a value as the integer of its bits and computes with that integer. The results are wrong, without an
error. These replacements store float32 values, and convert them when a kernel loads, stores, casts or reinterprets them.
In between, results keep the precision of float32, those of ``dot`` too.
Atomic operations are refused.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["hook_bfloat16"]


def hook_bfloat16(interpreter: ModuleType) -> None:
    """Replace the functions of ``triton.runtime.interpreter`` that depend on the stored form of bfloat16."""
    np, tl, handle, builder = interpreter.np, interpreter.tl, interpreter.TensorHandle, interpreter.InterpreterBuilder
    numpy_type = interpreter._get_np_dtype
    is_size_valid = getattr(interpreter, "_validate_np_data_size", None)

    def is_bfloat16(dtype: Any) -> bool:
        return not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.bfloat16

    def round_to_bits(data: Any) -> Any:
        """Round float32 values to bfloat16, ties to even, and return the bits."""
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32).reshape(np.shape(data))
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)

    def from_bits(bits: Any) -> Any:
        return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    def numpy_type_with_float32(dtype: Any) -> Any:
        return np.dtype(np.float32) if is_bfloat16(dtype) else numpy_type(dtype)

    def is_size_valid_with_float32(data: Any, dtype: Any) -> bool:
        assert is_size_valid is not None
        return data.itemsize <= 4 if is_bfloat16(dtype) else is_size_valid(data, dtype)

    load, store, bitcast = builder.create_masked_load, builder.create_masked_store, builder.create_bitcast
    cast, cast_float = builder.cast_impl, builder.create_fp_to_fp
    atomic, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        if ptrs.get_element_ty() != tl.bfloat16:
            return load(self, ptrs, mask, other, *options, **named)
        bits = round_to_bits(other.data) if other is not None else np.zeros_like(ptrs.data, dtype=np.uint16)
        return handle(from_bits(interpreter._interpreter.load(ptrs.data, mask.data, bits, np.dtype(np.uint16))), tl.bfloat16)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        if ptrs.get_element_ty() == tl.bfloat16 and value.data.dtype == np.float32:
            return interpreter._interpreter.store(ptrs.data, round_to_bits(value.data), mask.data)
        return store(self, ptrs, value, mask, *options, **named)

    def cast_impl(self: Any, value: Any, dtype: Any) -> Any:
        if is_bfloat16(value.dtype):
            value = handle(value.data, tl.float32)
            return value if dtype.scalar == tl.float32 else cast_impl(self, value, dtype)
        if is_bfloat16(dtype):
            if value.dtype.scalar.is_fp8():
                value = cast_float(self, value, tl.float32, None)
            return handle(from_bits(round_to_bits(value.data.astype(np.float32))), tl.bfloat16)
        return cast(self, value, dtype)

    def create_fp_to_fp(self: Any, value: Any, dtype: Any, rounding_mode: Any) -> Any:
        if is_bfloat16(dtype):
            return cast_impl(self, value, dtype)
        if is_bfloat16(value.dtype):
            value = handle(value.data, tl.float32)
            return value if dtype.scalar == tl.float32 else cast_float(self, value, dtype, rounding_mode)
        return cast_float(self, value, dtype, rounding_mode)

    def create_bitcast(self: Any, value: Any, dtype: Any) -> Any:
        if is_bfloat16(value.dtype) and not is_bfloat16(dtype):
            value = handle(round_to_bits(value.data), tl.uint16)
        elif is_bfloat16(dtype) and not is_bfloat16(value.dtype):
            return handle(from_bits(value.data.view(np.uint16)), tl.bfloat16)
        return bitcast(self, value, dtype)

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, value: Any, *options: Any) -> Any:
        if is_bfloat16(value.dtype):
            raise NotImplementedError("atomic operations on bfloat16 are not simulated")
        return atomic(self, operation, ptr, value, *options)

    def create_atomic_cas(self: Any, ptr: Any, expected: Any, value: Any, *options: Any) -> Any:
        if is_bfloat16(value.dtype):
            raise NotImplementedError("atomic operations on bfloat16 are not simulated")
        return exchange(self, ptr, expected, value, *options)

    absolute = builder.create_fabs

    def create_fabs(self: Any, value: Any) -> Any:
        return handle(np.abs(value.data), tl.bfloat16) if is_bfloat16(value.dtype) else absolute(self, value)

    def get_bf16(_: Any, value: float) -> Any:
        return handle(from_bits(round_to_bits(np.array([value], dtype=np.float32))), tl.bfloat16)

    interpreter_module: Any = interpreter
    interpreter_module._get_np_dtype = numpy_type_with_float32
    if is_size_valid is not None:  # not in Triton 3.2
        interpreter_module._validate_np_data_size = is_size_valid_with_float32
    functions = (
        create_masked_load,
        create_masked_store,
        cast_impl,
        create_fp_to_fp,
        create_bitcast,
        create_atomic_rmw,
        create_atomic_cas,
        create_fabs,
    )
    for function in functions:
        setattr(builder, function.__name__, function)
    if not hasattr(builder, "get_bf16"):  # Triton 3.4
        builder.get_bf16 = get_bf16
    builder.create_int_to_ptr = builder.create_ptr_to_int = create_bitcast
