"""Each function of cuda_fp16.h, cuda_bf16.h and cuda_fp8.h computes on simulated GPUs what it computes on the host.

Functions that only a GPU has are compared with double precision.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.runtime.test_nvcc import compile_cuda
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

NVCC = shutil.which("nvcc")
pytestmark = [
    linux_only,
    needs_cuda_torch,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]

GROUP = 16
"""Functions of one kernel."""

_DECLARATION = re.compile(
    r"^__CUDA_(HOSTDEVICE_)?(?:FP16|BF16|FP8)_DECL__\s+([\w\s]+?)\s+(\w+)\s*\(([^()]*)\)\s*;", re.MULTILINE
)
# Of functions that the host lacks: the result as an expression of doubles a, b and c, and the units in the last place by which
# it may differ. Those of pairs are computed element by element.
_ROUNDED = {"rn": "nearbyint(a)", "rd": "floor(a)", "ru": "ceil(a)"}
_REFERENCES = {
    **{f"h{name}": (expression, 2) for name, expression in {
        "ceil": "ceil(a)", "floor": "floor(a)", "trunc": "trunc(a)", "rint": "rint(a)", "cos": "cos(a)", "sin": "sin(a)",
        "exp": "exp(a)", "exp2": "exp2(a)", "exp10": "pow(10, a)", "log": "log(a)", "log2": "log2(a)", "log10": "log10(a)",
        "rcp": "1 / a", "sqrt": "sqrt(a)", "rsqrt": "1 / sqrt(a)", "tanh": "tanh(a)", "tanh_approx": "tanh(a)",
    }.items()},
    "__hfma": ("fma(a, b, c)", 1), "__hfma_relu": ("relu(fma(a, b, c))", 1), "__hfma_sat": ("sat(fma(a, b, c))", 1),
}  # fmt: skip


class Function(NamedTuple):
    name: str
    result: str
    arguments: tuple[str, ...]
    reference: str
    tolerance: int


def _type(text: str) -> str:
    words = [word for word in text.replace("const ", " ").replace("enum ", " ").split() if word]
    return " ".join(words)


def functions(folder: Path) -> tuple[list[Function], list[str]]:
    """Return the functions of the headers that are compared, and the names of the others."""
    found: list[Function] = []
    others: list[str] = []
    for header in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        for is_host, result, name, listed in _DECLARATION.findall((folder / header).read_text()):
            arguments = tuple(
                _type(re.sub(r"\s*=.*", "", each).rpartition(" ")[0])
                for each in listed.split(",")
                if each.strip() not in ("", "void")
            )
            pair = name.replace("h2", "h", 1) if name.startswith("h2") else re.sub(r"(hfma)2", r"\1", name)
            reference, tolerance = ("", 0) if is_host else _REFERENCES.get(pair, ("", 0))
            if name.startswith("__ld") and "*" in listed:  # of the first argument's bytes
                arguments, reference = (_type(result),), "a"
            elif rounded := re.match(r"__(?:half|bfloat16)2\w+_(rn|rd|ru)$", name):
                reference = _ROUNDED[rounded[1]]
            elif name.startswith("__shfl"):
                arguments, reference = (arguments[1],), "a"
            if not (is_host or reference) or ("*" in listed and reference != "a"):
                others.append(name)
            else:
                found.append(Function(name, _type(result), arguments, reference, tolerance))
    return found, others


PROLOGUE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

enum { ROWS = 256, SLOT = 16 };
typedef unsigned char byte;
template <class T> __host__ __device__ T get(const byte *p) { T value; memcpy(&value, p, sizeof value); return value; }
template <> __host__ __device__ __nv_saturation_t get(const byte *p) { return *p & 1 ? __NV_SATFINITE : __NV_NOSAT; }
template <> __host__ __device__ __nv_fp8_interpretation_t get(const byte *p) { return *p & 1 ? __NV_E4M3 : __NV_E5M2; }
template <> __host__ __device__ cudaRoundMode get(const byte *p) { return *p & 1 ? cudaRoundZero : cudaRoundPosInf; }

static double relu(double x) { return x > 0 || x != x ? x : 0; }
static double sat(double x) { return x > 1 ? 1 : x > 0 ? x : 0; }

/* The elements of a value as doubles, and how far apart neighbors are. */
static double number(__half x) { return __half2float(x); }
static double number(__nv_bfloat16 x) { return __bfloat162float(x); }
static __half narrow(double x, __half) { return __double2half(x); }
static __nv_bfloat16 narrow(double x, __nv_bfloat16) { return __double2bfloat16(x); }
/* An integer clamps, and NaN gives 0, or the highest bit of 64. */
template <class T> T narrow(double x, T)
{
    const T low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    if (x != x)
        return sizeof(T) < 8 ? 0 : (T)(1ull << 63);
    return x <= low ? low : x >= (double)high ? high : (T)x;
}
static int order(unsigned short bits) { return bits & 0x8000 ? -(bits & 0x7fff) : bits; }

template <class T> bool same(T a, T b, int) { return !memcmp(&a, &b, sizeof a); }
template <class T> bool near(T a, T b, int tolerance)
{
    if (number(a) != number(a) || number(b) != number(b))
        return number(a) != number(a) && number(b) != number(b);
    unsigned short x, y;
    memcpy(&x, &a, 2), memcpy(&y, &b, 2);
    return tolerance ? abs(order(x) - order(y)) <= tolerance : x == y;
}
bool same(__half a, __half b, int t) { return near(a, b, t); }
bool same(__nv_bfloat16 a, __nv_bfloat16 b, int t) { return near(a, b, t); }
bool same(__half2 a, __half2 b, int t) { return near(a.x, b.x, t) && near(a.y, b.y, t); }
bool same(__nv_bfloat162 a, __nv_bfloat162 b, int t) { return near(a.x, b.x, t) && near(a.y, b.y, t); }
bool same(__half_raw a, __half_raw b, int t) { return near(__half(a), __half(b), t); }
bool same(__half2_raw a, __half2_raw b, int t) { return same(__half2(a), __half2(b), t); }
bool same(float a, float b, int) { return a != a ? b != b : !memcmp(&a, &b, 4); }
bool same(double a, double b, int) { return a != a ? b != b : !memcmp(&a, &b, 8); }
bool same(float2 a, float2 b, int t) { return same(a.x, b.x, t) && same(a.y, b.y, t); }
static unsigned state = 1;
static unsigned draw() { state = state * 1664525u + 1013904223u; return state >> 8; }
static int compared, wrong;
"""
MAIN = """
int main()
{
    std::vector<byte> in(ROWS * 4 * SLOT);
    for (auto &each : in)
        each = draw();
    /* Half of the halves are of moderate size, so that sums and roots are numbers. */
    for (int row = 0; row < ROWS; row += 2)
        for (int slot = 0; slot < 4; slot++) {
            __half values[2] = {__float2half(draw() % 4096 / 512.f), __float2half(draw() % 4096 / -512.f + 4)};
            memcpy(&in[(row * 4 + slot) * SLOT], values, 4);
        }
    byte *input, *output;
    cudaMalloc(&input, in.size()), cudaMalloc(&output, ROWS * GROUP * SLOT);
    cudaMemcpy(input, in.data(), in.size(), cudaMemcpyHostToDevice);
    std::vector<byte> out(ROWS * GROUP * SLOT);
    @CALLS@
    printf("%d compared, %d wrong\\n", compared, wrong);
}
"""


def _expressions(function: Function) -> tuple[str, str]:
    """Return the call, and the reference: the same call, or what double precision computes."""
    reads = [f"get<{kind}>(p + {index} * SLOT)" for index, kind in enumerate(function.arguments)]
    call = f"{function.name}({', '.join(reads)})"
    if function.name.startswith("__ld"):
        return f"{function.name}((const {function.result} *)p)", reads[0]
    if function.name.startswith("__shfl"):
        mode = function.name.removeprefix("__shfl_").removesuffix("_sync")
        lane = {"down": "row + (row % 32 < 31)", "up": "row - (row % 32 > 0)", "xor": "row ^ 1"}.get(mode, "row / 32 * 32 + 1")
        return f"{function.name}(~0u, {reads[0]}, 1)", f"get<{function.result}>(&in[({lane}) * 4 * SLOT])"
    if not function.reference:
        return call, call
    scalar = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}.get(function.result)
    elements: list[str] = []
    for suffix in (".x", ".y") if scalar else ("",):
        names = ", ".join(f"{name} = number({read}{suffix})" for name, read in zip("abc", reads, strict=False))
        kind = scalar or function.result
        elements.append(f"[&] {{ double {names}; return narrow({function.reference}, decltype(get<{kind}>(p)){{}}); }}()")
    made = f"{function.result}({', '.join(elements)})" if scalar else elements[0]
    return call, made


def program(listed: list[Function]) -> str:
    parts, calls = [PROLOGUE, f"enum {{ GROUP = {GROUP} }};"], list[str]()
    for start in range(0, len(listed), GROUP):
        cases: list[str] = []
        checks: list[str] = []
        for place, function in enumerate(listed[start : start + GROUP]):
            call, reference = _expressions(function)
            target = f"(row * GROUP + {place}) * SLOT"
            kind, shown = function.result, f"{function.name}({', '.join(function.arguments)})"
            cases.append(f"case {place}: {{ {kind} r = {call}; memcpy(out + {target}, &r, sizeof r); break; }}")
            checks.append(f"""for (int row = 0; row < ROWS; row++, compared++) {{
        const byte *p = &in[row * 4 * SLOT];
        {kind} right = {reference}, found = get<{kind}>(&out[{target}]);
        if (!same(found, right, {function.tolerance}) && wrong++ < 40)
            printf("{shown} of %x %x %x is %llx, not %llx\\n", get<unsigned>(p), get<unsigned>(p + SLOT),
                   get<unsigned>(p + 2 * SLOT), bits(found), bits(right));
    }}""")
        parts.append(f"""__global__ void group_{start}(const byte *in, byte *out)
{{
    int row = threadIdx.x; const byte *p = in + row * 4 * SLOT;
    switch (blockIdx.x) {{ {" ".join(cases)} }}
}}""")
        names = " ".join(function.name for function in listed[start : start + GROUP])
        calls.append(f"group_{start}<<<{len(cases)}, ROWS>>>(input, output);")
        calls.append(f'if (cudaGetLastError() || cudaDeviceSynchronize()) printf("refused: one of {names}\\n"); else {{')
        calls.append("cudaMemcpy(out.data(), output, out.size(), cudaMemcpyDeviceToHost);")
        calls += [*checks, "}"]
    bits = "template <class T> unsigned long long bits(T v) { unsigned long long w = 0; memcpy(&w, &v, sizeof v); return w; }"
    return "\n".join([parts[0], bits, *parts[1:], MAIN.replace("@CALLS@", "\n".join(calls))])


def test_functions_of_the_headers(tmp_path: Path) -> None:
    folder = Path(str(NVCC)).resolve().parents[1] / "include"
    listed, others = functions(folder)
    print(f"{len(listed)} functions, {len(others)} others")
    assert len(listed) > 300
    output = tmp_path / "program"
    compile_cuda(program(listed), output, "-cudart", "shared", "-w", "-O1", "-gencode", "arch=compute_90,code=compute_90")
    done = subprocess.run([output], env=simulated_environment(gpus=1), capture_output=True, text=True)
    print(done.stdout)
    assert "wrong" in done.stdout
    assert [line for line in done.stdout.splitlines() if " is " in line or "refused" in line] == [], done.stderr
