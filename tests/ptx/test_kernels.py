"""What kernels do beside the results of single instructions: they print, wait for each other, call functions, copy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.harness import Kernel, captured
from tests.ptx.programs import HEAD, entry
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]


def stored(values: list[tuple[str, str]]) -> str:
    """Return PTX that stores arguments of printf, each aligned to its size."""
    lines: list[str] = []
    offset = 0
    for type, value in values:
        size = int(type[1:]) // 8
        offset = -(-offset // size) * size
        lines.append(f"st.local.{type} [values+{offset}], {value};")
        offset += size
    return " ".join(lines)


@pytest.mark.parametrize(
    ("format", "arguments", "printed", "count"),
    [
        ("%zu %d|", [("b64", "5000000000"), ("b32", "7")], "5000000000 7|", 2),
        ("%jd %td %ld %lld|", [("b64", f"-{number}000000000") for number in (5, 6, 7, 8)], None, 4),
        ("%d %*d %s|", [("b32", "1"), ("b32", "4"), ("b32", "2"), ("b64", "0")], "1    2 (null)|", 4),
        ("%hhx %c 100%%|", [("b32", "255"), ("b32", "120")], "ff x 100%|", 2),
        ("nothing|", [], "nothing|", 0),
        (None, [], "", -1),
    ],
)
def test_printf_returns_the_number_of_its_arguments(
    format: str | None, arguments: list[tuple[str, str]], printed: str | None, count: int
) -> None:
    body = f"""
        .local .align 8 .b8 values[64]; .reg .b64 %format, %values; .param .b64 a; .param .b64 b; .param .b32 r;
        {stored(arguments)}
        mov.u64 %values, values; cvta.local.u64 %values, %values; mov.u64 %format, {"text" if format else "0"};
        st.param.b64 [a], %format; st.param.b64 [b], %values; call (r), vprintf, (a, b); ld.param.b32 %x, [r];
        st.global.u32 [%out], %x;
    """
    head = f"{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n.global .b8 text[64];\n"
    kernel, result = Kernel([head + entry(body)], "main"), np.zeros(1, np.int32)
    text = np.frombuffer((format or "").encode().ljust(64, b"\0"), np.uint8)
    with captured(1) as texts:
        kernel.run(1, 1, np.zeros(1, np.uint32), result, variables=[text] if format else [])
    assert texts == ["-5000000000 -6000000000 -7000000000 -8000000000|" if printed is None else printed]
    assert result[0] == count
