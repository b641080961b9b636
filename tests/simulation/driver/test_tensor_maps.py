"""Tensor maps (``cuTensorMapEncode*``): arguments that CUDA's documentation allows and excludes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.simulation import linux_only
from tests.support.simulation_driver import evaluate

pytestmark = linux_only

SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 801
INT32, FLOAT16, U4_ALIGN8B, U4_ALIGN16B, U6_ALIGN16B = 3, 6, 13, 14, 15
INTERLEAVE_16B, INTERLEAVE_32B = 1, 2
SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_FLIP, SWIZZLE_ATOM_64B = 1, 2, 3, 5, 6

PROGRAM = """
assert cuda.cuInit(0) == 0
assert use(0) == 0

def array(type, values):
    return None if values is None else (type * len(values))(*values)

space = ctypes.create_string_buffer(256)
target = (ctypes.addressof(space) + 127) // 128 * 128

def encode(kind, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill, offset=0):
    sizes, strides = array(ctypes.c_uint64, sizes), array(ctypes.c_uint64, strides)
    steps = array(ctypes.c_uint32, steps)
    begin = ctypes.c_void_p(target + offset), type, rank, ctypes.c_void_p(address), sizes, strides
    if kind == "tiled":
        return cuda.cuTensorMapEncodeTiled(*begin, array(ctypes.c_uint32, box), steps, interleave, swizzle, promotion, fill)
    if kind == "im2col":
        lower, upper, channels, pixels = box
        corners = array(ctypes.c_int, lower), array(ctypes.c_int, upper)
        return cuda.cuTensorMapEncodeIm2col(*begin, *corners, channels, pixels, steps, interleave, swizzle, promotion, fill)
    lower, upper, channels, pixels, mode = box
    return cuda.cuTensorMapEncodeIm2colWide(
        *begin, lower, upper, channels, pixels, steps, interleave, mode, swizzle, promotion, fill)

results = []
for each in CALLS:
    before = ctypes.string_at(target, 128)
    error = encode(*each)
    assert error == 0 or ctypes.string_at(target, 128) == before, "a refused call writes nothing"
    results.append(error)
report(*results)
"""


def encode(calls: list[list[Any]], capability: str = "9.0") -> list[int]:
    return evaluate(PROGRAM.replace("CALLS", repr(calls)), capability=capability)


# As FlashAttention 3 describes the keys of a batch: half precision, (head size, sequence, heads, batch).
TILED: dict[str, Any] = {
    "kind": "tiled",
    "type": FLOAT16,
    "rank": 4,
    "address": 0x7F0000000000,
    "sizes": [64, 1000, 8, 2],
    "strides": [1024, 128, 1024000],
    "box": [64, 128, 1, 1],
    "steps": [1, 1, 1, 1],
    "interleave": 0,
    "swizzle": SWIZZLE_128B,
    "promotion": 3,
    "fill": 0,
}
IM2COL = {**TILED, "kind": "im2col", "box": [[-1, -1], [-1, -1], 64, 128]}
WIDE = {**TILED, "kind": "wide", "box": [-1, -1, 64, 128, 0]}
PADDED = {**TILED, "type": U6_ALIGN16B, "sizes": [128, 10, 8, 2], "box": [128, 8, 1, 1]}

VALID: dict[str, dict[str, Any]] = {
    "tiled": TILED,
    "one_dimension": {**TILED, "rank": 1, "strides": None},
    "five_dimensions": {**TILED, "rank": 5, "sizes": [64] * 5, "strides": [128] * 4, "box": [64, 1, 1, 1, 1], "steps": [1] * 5},
    "a_broadcast_dimension": {**TILED, "strides": [0, 128, 1024000]},
    "the_first_step_is_ignored": {**TILED, "steps": [0, 8, 1, 1]},
    "the_largest_size": {**TILED, "sizes": [64, 2**32, 8, 2]},
    "interleaved": {**TILED, "interleave": INTERLEAVE_32B, "swizzle": SWIZZLE_32B, "box": [8, 1, 1, 1]},
    "nan_fill": {**TILED, "fill": 1},
    "packed_in_8_bytes": {**TILED, "type": U4_ALIGN8B, "sizes": [62, 10, 8, 2], "box": [32, 1, 1, 1]},
    "packed_in_16_bytes": PADDED,
    "im2col": IM2COL,
    "im2col_of_a_line": {**IM2COL, "rank": 3, "box": [[-32768], [32767], 64, 1024]},
}
INVALID: dict[str, dict[str, Any]] = {
    "unaligned_map": {**TILED, "offset": 32},
    "type": {**TILED, "type": 16},
    "rank_0": {**TILED, "rank": 0},
    "rank_6": {**TILED, "rank": 6},
    "rank_2_interleaved": {**TILED, "rank": 2, "interleave": INTERLEAVE_16B},
    "address": {**TILED, "address": 0x7F0000000008},
    "address_interleaved": {**VALID["interleaved"], "address": 0x7F0000000010},
    "size_0": {**TILED, "sizes": [64, 0, 8, 2]},
    "size_too_large": {**TILED, "sizes": [64, 2**32 + 1, 8, 2]},
    "stride_not_of_16": {**TILED, "strides": [1000, 128, 1024000]},
    "stride_not_of_32": {**VALID["interleaved"], "strides": [1008, 128, 1024000]},
    "stride_too_large": {**TILED, "strides": [1024, 128, 2**40]},
    "no_strides": {**TILED, "strides": None},
    "box_0": {**TILED, "box": [64, 0, 1, 1]},
    "box_too_large": {**TILED, "box": [64, 257, 1, 1]},
    "box_not_of_16_bytes": {**TILED, "box": [4, 1, 1, 1]},
    "box_beyond_swizzle": {**TILED, "swizzle": SWIZZLE_64B},
    "no_box": {**TILED, "box": None},
    "step_0": {**TILED, "steps": [1, 0, 1, 1]},
    "step_9": {**TILED, "steps": [1, 9, 1, 1]},
    "interleave": {**TILED, "interleave": 3},
    "swizzle": {**TILED, "swizzle": 7},
    "swizzle_of_interleaved": {**VALID["interleaved"], "swizzle": SWIZZLE_64B},
    "promotion": {**TILED, "promotion": 4},
    "fill": {**TILED, "fill": 2},
    "nan_fill_of_integers": {**TILED, "type": INT32, "box": [32, 1, 1, 1], "fill": 1},
    "odd_size_of_packed": {**VALID["packed_in_8_bytes"], "sizes": [63, 10, 8, 2]},
    "size_of_packed": {**PADDED, "sizes": [64, 10, 8, 2]},
    "box_of_packed": {**PADDED, "box": [64, 8, 1, 1]},
    "interleaved_packed": {**PADDED, "interleave": INTERLEAVE_16B},
    "swizzle_of_packed": {**PADDED, "swizzle": SWIZZLE_FLIP},
    "swizzle_of_packed_u4": {**PADDED, "type": U4_ALIGN16B, "swizzle": SWIZZLE_ATOM_64B},
    "im2col_of_two_dimensions": {**IM2COL, "rank": 2},
    "im2col_corner": {**IM2COL, "box": [[-1, -129], [-1, -1], 64, 128]},
    "im2col_upper_corner": {**IM2COL, "box": [[-1, -1], [128, -1], 64, 128]},
    "im2col_without_corners": {**IM2COL, "box": [None, [-1, -1], 64, 128]},
    "im2col_channels": {**IM2COL, "swizzle": 0, "box": [[-1, -1], [-1, -1], 257, 128]},
    "im2col_pixels": {**IM2COL, "box": [[-1, -1], [-1, -1], 64, 1025]},
}


def test_valid_arguments() -> None:
    assert dict(zip(VALID, encode([list(call.values()) for call in VALID.values()]), strict=True)) == dict.fromkeys(
        VALID, SUCCESS
    )


def test_invalid_arguments() -> None:
    results = encode([list(call.values()) for call in INVALID.values()])
    assert dict(zip(INVALID, results, strict=True)) == dict.fromkeys(INVALID, INVALID_VALUE)


def test_wide_maps_need_a_newer_gpu() -> None:
    calls = [
        WIDE,
        {**WIDE, "box": [-1, -1, 64, 0, 1]},  # mode W128 ignores the number of pixels
        {**WIDE, "swizzle": 0},
        {**WIDE, "box": [-32769, -1, 64, 128, 0]},
        {**WIDE, "box": [-1, -1, 64, 128, 2]},
    ]
    arguments = [list(call.values()) for call in calls]
    assert encode(arguments, "10.0") == [SUCCESS, SUCCESS, INVALID_VALUE, INVALID_VALUE, INVALID_VALUE]
    assert encode(arguments[:1], "9.0") == [NOT_SUPPORTED]


@pytest.mark.parametrize(("capability", "expected"), [("8.9", [0, NOT_SUPPORTED]), ("9.0", [1, SUCCESS])])
def test_a_gpu_says_whether_it_has_tensor_maps(capability: str, expected: list[int]) -> None:
    program = PROGRAM.replace("CALLS", repr([list(TILED.values())])).replace("report(*results)", "")
    attribute = "value = ctypes.c_int()\ncuda.cuDeviceGetAttribute(ctypes.byref(value), 127, 0)\nreport(value.value, *results)"
    assert evaluate(program + attribute, capability=capability) == expected


def test_the_address_can_be_replaced() -> None:
    program = """
other = ctypes.create_string_buffer(256)
blank = (ctypes.addressof(other) + 127) // 128 * 128
maps, errors = [ctypes.string_at(target, 128)], []
for map, address in ((target, 64), (target, 72), (target, FIRST), (blank, 64)):
    errors.append(cuda.cuTensorMapReplaceAddress(ctypes.c_void_p(map), ctypes.c_void_p(address)))
    maps.append(ctypes.string_at(target, 128))
report(errors, [maps.index(each) for each in maps])
"""
    begin = PROGRAM.replace("CALLS", repr([list(TILED.values())])).replace("report(*results)", "")
    errors, maps = evaluate(begin + program.replace("FIRST", str(TILED["address"])))
    assert errors == [SUCCESS, INVALID_VALUE, SUCCESS, INVALID_VALUE]
    assert maps == [0, 1, 1, 0, 0]
