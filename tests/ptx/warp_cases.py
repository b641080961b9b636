"""Cases of what the lanes of a warp do together. The rows of a case are the 32 lanes of one warp.

Each instruction runs twice: with all lanes together, and with the even and the odd lanes on different ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from .cases import Case
from .reference import signed

LANES = 32
ALL = 0xFFFFFFFF
EVEN, ODD = 0x55555555, 0xAAAAAAAA

# Computes the results of a group of lanes: from the operands of each lane, the results by lane.
Operation = Callable[[dict[int, list[int]]], dict[int, int]]


def _random(count: int, seed: str, bits: int = 32) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.getrandbits(bits) for _ in range(count)] for _ in range(LANES)]


def _members(mask: int) -> list[int]:
    return [lane for lane in range(LANES) if mask >> lane & 1]


def _expected(rows: Sequence[list[int]], operation: Operation, masks: Sequence[int]) -> list[int]:
    results: dict[int, int] = {}
    for mask in masks:
        results |= operation({lane: rows[lane] for lane in _members(mask)})
    return [results[lane] for lane in range(LANES)]


def both(
    variant: str,
    text: str,
    sizes: tuple[int, ...],
    rows: list[list[int]],
    operation: Operation,
    declare: str = "",
    diverged_rows: list[list[int]] | None = None,
) -> Iterator[Case]:
    """Yield a case with all lanes, and one in which lanes have diverged.

    Args:
        variant: The variant.
        text: The PTX, with <mask> for the lanes that take part.
        sizes: Bits of the result and the operands.
        rows: The operands of each lane.
        operation: The reference.
        declare: Declarations of registers.
        diverged_rows: The operands of each lane if lanes have diverged; None: the same.
    """
    together = text.replace("<mask>", f"{ALL:#x}")
    is_old = ".sync" not in variant and variant.startswith(("shfl", "vote"))
    target = "sm_60" if is_old else "sm_90"
    expected = _expected(rows, operation, [ALL])
    yield Case(variant, f"{{ {declare} {together} }}", sizes, rows, expected, target=target, group="together")
    diverged = (
        f"{{ {declare} .reg .pred %is_odd; .reg .b32 %parity; and.b32 %parity, %thread, 1; setp.ne.u32 %is_odd, %parity, 0;"
        f" @%is_odd bra odd; {text.replace('<mask>', f'{EVEN:#x}')} bra.uni end;"
        f" odd: {text.replace('<mask>', f'{ODD:#x}')} end: }}"
    )
    rows = diverged_rows or rows
    yield Case(variant, diverged, sizes, rows, _expected(rows, operation, [EVEN, ODD]), target=target, group="diverged")


def _source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that a shuffle reads, as PTX's documentation computes it."""
    offset, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = (lane & segment) | (clamp & ~segment & 31)
    first = lane & segment
    if mode == "up":
        source = lane - offset
        valid = source >= last
    elif mode == "down":
        source = lane + offset
        valid = source <= last
    elif mode == "bfly":
        source = lane ^ offset
        valid = source <= last
    else:
        source = first | (offset & ~segment & 31)
        valid = source <= last
    return (source if valid else lane), valid


def shuffles() -> Iterator[Case]:
    for mode in ("up", "down", "bfly", "idx"):
        generator = random.Random(mode)
        rows = _random(3, f"shuffle {mode}")
        for lane, row in enumerate(rows):
            segment = (lane // 8) % 4
            # Segments of 32, 16, 8 and 4 lanes.
            mask = (0, 16, 24, 28)[segment]
            row[1] = generator.randrange(5)
            row[2] = mask << 8 | (0 if mode == "up" else 31)
        # The value of a lane that does not take part is undefined, so even lanes read even ones, and odd lanes odd ones.
        diverged_rows = [[a, b & ~1 | (lane & 1 if mode == "idx" else 0), c] for lane, (a, b, c) in enumerate(rows)]

        def shuffle(group: dict[int, list[int]], mode: str = mode) -> dict[int, int]:
            results: dict[int, int] = {}
            for lane, (_, b, c) in group.items():
                source, valid = _source(mode, lane, b, c)
                results[lane] = group[source][0] | int(valid) << 32
            return results

        show = "selp.b32 %valid, 1, 0, %p; mov.b64 <d>, {%value, %valid};"
        declare = ".reg .pred %p; .reg .b32 %value, %valid;"
        text = f"shfl.sync.{mode}.b32 %value|%p, <a>, <b>, <c>, <mask>; {show}"
        yield from both(f"shfl.sync.{mode}.b32", text, (64, 32, 32, 32), rows, shuffle, declare, diverged_rows)
        text = f"shfl.{mode}.b32 %value|%p, <a>, <b>, <c>; {show}"
        yield from both(f"shfl.{mode}.b32", text, (64, 32, 32, 32), rows, shuffle, declare, diverged_rows)


def votes() -> Iterator[Case]:
    inputs = {
        "mixed": [[lane % 3 == 0] for lane in range(LANES)],
        "all": [[True]] * LANES,
        "none": [[False]] * LANES,
        "parity": [[lane % 2] for lane in range(LANES)],
    }
    for mode in ("all", "any", "uni", "ballot"):
        for name, values in inputs.items():
            rows = [[int(value[0])] for value in values]

            def vote(group: dict[int, list[int]], mode: str = mode) -> dict[int, int]:
                truths = [row[0] for row in group.values()]
                ballot = sum(row[0] << lane for lane, row in group.items())
                result = {"all": all(truths), "any": any(truths), "uni": len(set(truths)) == 1, "ballot": ballot}[mode]
                return dict.fromkeys(group, int(result))

            type, size = ("b32", 32) if mode == "ballot" else ("pred", 1)
            yield from both(f"vote.sync.{mode}.{type}", f"vote.sync.{mode}.{type} <d>, <a>, <mask>;", (size, 1), rows, vote)
            if name == "mixed":
                yield from both(f"vote.{mode}.{type}", f"vote.{mode}.{type} <d>, <a>;", (size, 1), rows, vote)


def matches() -> Iterator[Case]:
    for n in (32, 64):
        for same in (False, True):
            generator = random.Random(f"match {n}")
            rows = [[7 if same else generator.choice((3, 1 << (n - 1), 5))] for _ in range(LANES)]

            def any_(group: dict[int, list[int]]) -> dict[int, int]:
                return {
                    lane: sum(1 << other for other, values in group.items() if values == row) for lane, row in group.items()
                }

            def all_(group: dict[int, list[int]]) -> dict[int, int]:
                mask = sum(1 << lane for lane in group)
                equal = len({row[0] for row in group.values()}) == 1
                return dict.fromkeys(group, (mask | 1 << 32) if equal else 0)

            yield from both(f"match.any.sync.b{n}", f"match.any.sync.b{n} <d>, <a>, <mask>;", (32, n), rows, any_)
            text = f"match.all.sync.b{n} %value|%p, <a>, <mask>; selp.b32 %valid, 1, 0, %p; mov.b64 <d>, {{%value, %valid}};"
            declare = ".reg .pred %p; .reg .b32 %value, %valid;"
            yield from both(f"match.all.sync.b{n}", text, (64, n), rows, all_, declare)


def reductions() -> Iterator[Case]:
    functions: dict[str, Callable[[list[int]], int]] = {
        "add.u32": sum,
        "add.s32": sum,
        "min.u32": min,
        "max.u32": max,
        "min.s32": lambda values: min(signed(value, 32) for value in values),
        "max.s32": lambda values: max(signed(value, 32) for value in values),
        "and.b32": lambda values: _fold(values, lambda a, b: a & b),
        "or.b32": lambda values: _fold(values, lambda a, b: a | b),
        "xor.b32": lambda values: _fold(values, lambda a, b: a ^ b),
    }
    for name, function in functions.items():
        rows = _random(1, f"reduce {name}")
        if name in ("and.b32", "or.b32"):
            rows = [[row[0] | 0xF0F00000 if name == "and.b32" else row[0] & 0x0000F0F0] for row in rows]

        def reduce(group: dict[int, list[int]], function: Callable[[list[int]], int] = function) -> dict[int, int]:
            return dict.fromkeys(group, function([row[0] for row in group.values()]) & ALL)

        yield from both(f"redux.sync.{name}", f"redux.sync.{name} <d>, <a>, <mask>;", (32, 32), rows, reduce)


def _fold(values: list[int], function: Callable[[int, int], int]) -> int:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result


def others() -> Iterator[Case]:
    rows: list[list[int]] = [[0]] * LANES

    def active(group: dict[int, list[int]]) -> dict[int, int]:
        return dict.fromkeys(group, sum(1 << lane for lane in group))

    def elected(group: dict[int, list[int]]) -> dict[int, int]:
        return {lane: min(group) | int(lane == min(group)) << 32 for lane in group}

    yield from both("activemask.b32", "activemask.b32 <d>;", (32, 32), rows, active)
    text = "elect.sync %value|%p, <mask>; selp.b32 %valid, 1, 0, %p; mov.b64 <d>, {%value, %valid};"
    yield from both("elect.sync", text, (64, 32), rows, elected, ".reg .pred %p; .reg .b32 %value, %valid;")
    # Each lane reads what its neighbor has written before the synchronization.
    values = _random(1, "bar.warp")

    def exchanged(group: dict[int, list[int]]) -> dict[int, int]:
        lanes = sorted(group)
        return {lane: group[lanes[(lanes.index(lane) + 1) % len(lanes)]][0] for lane in lanes}

    for step, mask in ((1, ALL), (2, None)):
        text = (
            "st.shared.b32 [%shared], <a>; bar.warp.sync <mask>;"
            f" add.u32 %next, %thread, {step}; and.b32 %next, %next, 31; mov.u32 %base, shared_bytes;"
            " mad.lo.u32 %next, %next, 32, %base; ld.shared.b32 <d>, [%next]; bar.warp.sync <mask>;"
        )
        together, diverged = both("bar.warp.sync", text, (32, 32), values, exchanged, ".reg .b32 %next, %base;")
        yield together if mask else diverged


def all_cases() -> Iterator[Case]:
    for source in (shuffles, votes, matches, reductions, others):
        yield from source()
