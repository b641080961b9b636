"""Cases of fences, hints, addresses, the stack and differences of packed integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from .cases import Case
from .integer_cases import case, value


def _unchanged(variant: str, text: str, *, target: str = "sm_90", group: str = "") -> Case:
    """An instruction that changes no value: the operand is the result."""
    made = case(variant, lambda a: a, ("b32", "b32"), target=target)
    made.statement = f"{{ {text} mov.b32 <d>, <a>; }}"
    made.group = group
    return made


def fences() -> Iterator[Case]:
    for level in ("cta", "gl", "sys"):
        yield _unchanged(f"membar.{level}", f"membar.{level};")
    for order, scope in itertools.product(("", ".sc", ".acq_rel", ".acquire", ".release"), ("cta", "cluster", "gpu", "sys")):
        yield _unchanged(f"fence{order}.{scope}", f"fence{order}.{scope};")
    for kind in ("alias", "async", "async.global", "async.shared::cta"):
        yield _unchanged(f"fence.proxy.{kind}", f"fence.proxy.{kind};")
    yield _unchanged("membar.proxy.alias", "membar.proxy.alias;")
    yield _unchanged("fence.mbarrier_init.release.cluster", "fence.mbarrier_init.release.cluster;")


def hints() -> Iterator[Case]:
    for space, address in (("", "<from>"), (".global", "<from>"), (".local", "%local")):
        for level in ("L1", "L2"):
            variant = f"prefetch{space}.{level}"
            yield _unchanged(variant, f"{variant} [{address}];")
    yield _unchanged("prefetchu.L1", "prefetchu.L1 [<from>];")
    for space in ("", ".global"):
        yield _unchanged(f"discard{space}.L2", f"{{ .reg .b64 %x; and.b64 %x, %at, -128; discard{space}.L2 [%x], 128; }}")
        variant = f"applypriority{space}.L2::evict_normal"
        yield _unchanged(variant, f"{{ .reg .b64 %x; and.b64 %x, %at, -128; {variant} [%x], 128; }}")
    policy = "{{ .reg .b64 %policy; .reg .b32 %x; {policy} ld.global.L2::cache_hint.b32 %x, [<from>], %policy; }}"
    firsts = ("evict_last", "evict_normal", "evict_first", "evict_unchanged")
    for first, second in itertools.product(firsts, ("", "evict_first", "evict_unchanged")):
        variant = f"createpolicy.fractional.L2::{first}{f'.L2::{second}' if second else ''}.b64"
        yield _unchanged(variant, policy.format(policy=f"{variant} %policy, 1.0;"))
    variant = "createpolicy.cvt.L2.b64"
    yield _unchanged(variant, policy.format(policy=f"{variant} %policy, 0x10000000;"))
    yield _unchanged("pmevent", "pmevent 1;")
    yield _unchanged("pmevent.mask", "pmevent.mask 1;")
    for action in ("launch_dependents", "wait"):
        yield _unchanged(f"griddepcontrol.{action}", f"griddepcontrol.{action};")
    for action in ("inc", "dec"):
        variant = f"setmaxnreg.{action}.sync.aligned.u32"
        yield _unchanged(variant, f"{variant} 96;", target="sm_90a")
    yield _unchanged("nanosleep.u32", "nanosleep.u32 100;", group="sleeps")


def addresses() -> Iterator[Case]:
    """A value is stored through an address of one kind and loaded through another."""
    for space, address in (("global", "%at"), ("local", "%local"), ("shared", "%wide")):
        widen = "cvt.u64.u32 %wide, %shared;" if space == "shared" else ""
        store = "st.b32 [%generic], <a>;" if space != "global" else ""
        load = "ld.b32 <d>, [%generic];" if space != "global" else "ld.global.b32 <d>, [<from>];"
        text = f".reg .b64 %wide, %generic; {widen} cvta.{space}.u64 %generic, {address}; {store} {load}"
        yield _unchanged_by(f"cvta.{space}.u64", text)
        if space == "global":
            text = ".reg .b64 %back; cvta.to.global.u64 %back, %at; ld.global.b32 <d>, [<from>];"
            yield _unchanged_by("cvta.to.global.u64", text)
            continue
        narrow = (
            ".reg .b32 %narrow; cvt.u32.u64 %narrow, %back;"
            if space == "shared"
            else ".reg .b64 %narrow; mov.b64 %narrow, %back;"
        )
        text = (
            f".reg .b64 %back; cvta.to.{space}.u64 %back, %generic_{space}; {narrow}"
            f" st.{space}.b32 [%narrow], <a>; ld.{space}.b32 <d>, [%{space}];"
        )
        yield _unchanged_by(f"cvta.to.{space}.u64", text)
    yield from _spaces()


def _unchanged_by(variant: str, text: str) -> Case:
    made = case(variant, lambda a: a, ("b32", "b32"))
    made.statement = f"{{ {text} }}"
    return made


def _spaces() -> Iterator[Case]:
    addresses = {"global": "%at", "shared": "%generic_shared", "local": "%generic_local"}
    for space, (name, address) in itertools.product(addresses, addresses.items()):
        made = case(f"isspacep.{space}", lambda a, same=space == name: int(same), ("pred", "b32"))
        made.statement = f"isspacep.{space} <d>, {address};"
        yield made


def stacks() -> Iterator[Case]:
    """Memory of alloca keeps what is stored until the stack is restored, and then is used again.

    The two sizes differ, because ptxas 13.0 takes two alloca of the same size for one.
    """
    text = (
        ".reg .b64 %saved, %first, %second, %again, %same; .reg .b32 %value; .reg .pred %is_same;"
        " stacksave.u64 %saved; alloca.u64 %first, 16, 8; alloca.u64 %second, 32, 8;"
        " st.local.b32 [%first], <a>; st.local.b32 [%second], 77; ld.local.b32 %value, [%first];"
        " stackrestore.u64 %saved; alloca.u64 %again, 16, 8; stackrestore.u64 %saved;"
        " setp.eq.u64 %is_same, %first, %again; selp.b32 <d>, %value, 0, %is_same;"
    )
    for variant in ("stacksave.u64", "alloca.u64", "stackrestore.u64"):
        yield _unchanged_by(variant, text)


def differences() -> Iterator[Case]:
    """vabsdiff2 and vabsdiff4: absolute differences of halves or bytes, or c plus their sum."""
    for width, (d, a, b), suffix in itertools.product(
        (16, 8), itertools.product(("u32", "s32"), repeat=3), ("", ".sat", ".add")
    ):
        variant = f"vabsdiff{32 // width}.{d}.{a}.{b}{suffix}"

        def function(
            x: int, y: int, c: int, width: int = width, d: str = d, a: str = a, b: str = b, suffix: str = suffix
        ) -> int:
            parts = [
                abs(value(x >> shift, f"{a[0]}{width}") - value(y >> shift, f"{b[0]}{width}")) for shift in range(0, 32, width)
            ]
            if suffix == ".add":
                return c + sum(parts)
            if suffix == ".sat":
                parts = [min(part, (1 << (width - (d == "s32"))) - 1) for part in parts]
            return sum((part & ((1 << width) - 1)) << width * index for index, part in enumerate(parts))

        yield case(variant, function, ("b32",) * 4)


_VIDEO: dict[str, Callable[[int, int], int]] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": min,
    "vmax": max,
    "vshl.clamp": lambda a, b: a << b if b < 32 else 0,
    "vshl.wrap": lambda a, b: a << b % 32,
    "vshr.clamp": lambda a, b: a >> min(b, 32),
    "vshr.wrap": lambda a, b: a >> b % 32,
    "vset.eq": lambda a, b: int(a == b),
    "vset.ne": lambda a, b: int(a != b),
    "vset.lt": lambda a, b: int(a < b),
    "vset.le": lambda a, b: int(a <= b),
    "vset.gt": lambda a, b: int(a > b),
    "vset.ge": lambda a, b: int(a >= b),
}
_SECOND: dict[str, Callable[[int, int], int]] = {"add": lambda x, c: x + c, "min": min, "max": max}


def video() -> Iterator[Case]:
    """d = second(saturated(operation(a, b)), c), each with the type of d."""
    types = ("u32", "s32")
    for key, d, a, b, sat, second in itertools.product(_VIDEO, types, types, types, ("", ".sat"), ("", *_SECOND)):
        name, _, mode = key.partition(".")
        if (mode and sat) or (name in ("vshl", "vshr") and b == "s32") or (name == "vset" and d == "s32"):
            continue
        kinds = f"{a}.{b}" if name == "vset" else f"{d}.{a}.{b}"
        variant = f"{name}.{kinds}{f'.{mode}' if mode else ''}{sat}{f'.{second}' if second else ''}"

        def function(
            x: int,
            y: int,
            c: int = 0,
            key: str = key,
            d: str = d,
            kinds: str = f"{a}.{b}",
            sat: str = sat,
            second: str = second,
        ) -> int:
            number = _VIDEO[key](value(x, kinds[:3]), value(y, kinds[4:]))
            if sat:
                low = 0 if d == "u32" else -(1 << 31)
                number = min(max(number, low), low + (1 << 32) - 1)
            number = value(number & 0xFFFFFFFF, d)
            return _SECOND[second](number, value(c, d)) if second else number

        yield case(variant, function, ("b32",) * (4 if second else 3))


def vectors() -> Iterator[Case]:
    """mov of vectors of up to 128 bits: the elements are read before they are written."""
    for (count, bits), kind in itertools.product(((2, 16), (2, 32), (2, 64), (4, 16), (4, 32)), "busf"):
        if kind != "f" or bits > 16:
            yield _moved(count, bits, f"{kind}{bits}")


def _moved(count: int, bits: int, type: str) -> Case:
    """Move a vector to itself in the reverse order, and take the first element."""
    variant = f"mov.v{count}.{type}"
    names = "xyzw"[:count]
    reversed_ = ", ".join(f"%v.{name}" for name in names[::-1])
    made = case(variant, lambda *parts: parts[-1], (f"b{bits}",) * (count + 1))
    values = "".join(f"mov.b{bits} %v.{name}, <{letter}>;" for name, letter in zip(names, "abce", strict=False))
    made.statement = f"{{ .reg .v{count} .b{bits} %v; {values} {variant} {{{reversed_}}}, %v; mov.b{bits} <d>, %v.x; }}"
    return made


def all_cases() -> Iterator[Case]:
    for source in (fences, hints, addresses, stacks, differences, video, vectors):
        yield from source()
