"""Writes the installed torch's table of ``_inside/ops/dtypes.json``.

Run it on a simulated machine, repeatedly until it prints that nothing changed::

    python -m accelerator simulate --gpus 1 -- python -m tests.simulation.kernels.make_dtype_tables

PyTorch's operator database (OpInfo) lists the types that CUDA supports for each entry. An op refuses a type if an entry runs
it on a type that the CPU supports and CUDA does not, unless the op's own entry says that CUDA supports it. An op is computed
in a wider type if CUDA supports an entry that fails because the CPU's kernel does not implement the type.

A CPU build of torch makes its table without a simulated machine: its database lists CUDA's types too, and its kernels show
which types they lack. While entries run, the next newer version's table says which ops are computed in a wider type.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import sys
import warnings
from collections import defaultdict
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerator.simulation._settings.torch_versions import release
from tests.simulation.ops import cuda_statements, operators
from tests.support import ROOT

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

DEVICE = cuda_statements.DEVICE
FILE = ROOT / "accelerator/simulation/_inside/ops/dtypes.json"
# For these types the database says of every op whether CUDA supports them (torch's test_dtypes checks that).
STATED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
# Error messages of CPU kernels that do not support a type.
UNSUPPORTED = "not implemented for|Expected self to be a floating|nansum does not support complex"
SAMPLES, RUNS = 40, 8  # an entry has up to thousands of samples
# Refused types, from torch's sources, that the database does not show: the CPU's kernels refuse its samples of these types,
# or it does not list the types.
ALSO_REFUSED = {
    "convolution": "uint8 int8 int16 int32 int64",
    "native_dropout": "bool uint8 int8 int16 int32 int64",
    "_upsample_bicubic2d_aa": "uint8",
    "max_pool2d_with_indices": "uint8 int8 int16 int32 int64",
}
# These ops support every type. The database has no entries for them.
COPIES = {"copy", "_to_copy", "fill", "zero", "empty", "empty_strided", "index_put", "_index_put_impl"}
# Decompositions and torch's own kernels handle these.
NOT_WIDENED = re.compile(r"_fft_|_local_scalar_dense")


class Ran(NamedTuple):
    """The ops, with their types, that a call of an entry ran, and the first that failed."""

    ops: set[tuple[str, torch.dtype]]
    failed: tuple[str, torch.dtype] | None


class Recorder(TorchDispatchMode):
    def __init__(self, widened: dict[str, set[torch.dtype]]) -> None:
        super().__init__()
        self.widened = widened  # by op: types that this mode computes in wider ones, in place of a simulated GPU
        self.ops: set[tuple[str, torch.dtype]] = set()
        self.failed: tuple[str, torch.dtype] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE), None)
        name = function._schema.name.removeprefix("aten::")
        op = (name.removesuffix("_"), first.dtype) if first is not None else None
        try:
            result = function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not op or not re.search(UNSUPPORTED, str(error)):
                raise
            if op[1] not in self.widened.get(op[0], ()):
                self.failed = self.failed or op
                raise
            self.ops.add(op)  # even if the next line fails: a decomposition replaces a kernel that supports no wider type
            result = compute_widened(function, args, kwargs, op[1])
        if op:
            self.ops.add(op)
        return result


def compute_widened(function: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    wide = rules().widen(dtype, dtype, function._schema.name.removeprefix("aten::"))

    def convert(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.dtype == source else value

    args, kwargs = pytree.tree_map(lambda value: convert(value, dtype, wide), (args, kwargs))
    return pytree.tree_map(lambda value: convert(value, wide, dtype), function(*args, **kwargs))


def run(op: OpInfo, sample: Any, backward: bool, widened: dict[str, set[torch.dtype]] | None = None) -> Ran:
    recorder = Recorder(widened or {})
    try:
        with recorder:
            operators._call(op, sample, backward)
    except Exception:
        return Ran(recorder.ops, recorder.failed or ("", torch.float32))
    return Ran(recorder.ops, None)


def samples(op: OpInfo, dtype: torch.dtype, backward: bool) -> list[Any]:
    torch.manual_seed(1)
    try:
        drawn = list(itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=backward), SAMPLES))
    except Exception:  # the entry has no samples of this type
        return []
    return drawn[:: max(1, len(drawn) // RUNS)]


def make_table(known: dict[str, set[torch.dtype]]) -> dict[str, dict[str, set[torch.dtype]]]:
    """Return the types that each op refuses and those that are computed in a wider type.

    Args:
        known: By op, the types that are already computed in a wider type, so that they do not fail.
    """
    refused: dict[str, set[torch.dtype]] = defaultdict(set)
    widened: dict[str, set[torch.dtype]] = defaultdict(set)
    entries = {name: op for name, op in operators.entries().items() if not name.startswith("jiterator")}
    for name, op in entries.items():
        cpu, cuda = op.supported_dtypes("cpu"), op.supported_dtypes("cuda")
        for dtype in (cpu - cuda) & STATED if cuda else ():  # an entry without CUDA types has no CUDA kernel
            for sample in samples(op, dtype, False):
                ran = run(op, sample, False)
                for short_name, first in ran.ops if ran.failed is None else ():
                    refused[short_name].add(first)
        cpu_backward, cuda_backward = op.supported_backward_dtypes("cpu"), op.supported_backward_dtypes("cuda")
        cuda_only = [(dtype, False) for dtype in cuda - cpu]
        if op.supports_autograd:
            cuda_only += [(dtype, True) for dtype in cuda_backward - (cpu_backward & cpu)]
        for dtype, backward in cuda_only:
            for sample in samples(op, dtype, backward):
                ran = run(op, sample, backward, known if DEVICE == "cpu" else None)
                for short_name, first in {*ran.ops, ran.failed or ("", dtype)}:
                    if short_name and ((short_name, first) == ran.failed or first in known.get(short_name, ())):
                        widened[short_name].add(first)
        print(name, file=sys.stderr)
    for op in entries.values():
        if op.aten_name in refused:
            refused[op.aten_name] -= op.supported_dtypes("cuda")
    registered = {
        op.removeprefix("aten::").partition(".")[0].removesuffix("_")
        for op in torch._C._dispatch_get_registrations_for_dispatch_key(DEVICE.upper())
    }
    refused = {name: dtypes for name, dtypes in refused.items() if name in registered - COPIES}
    for name, text in ALSO_REFUSED.items():
        refused.setdefault(name, set()).update(getattr(torch, dtype) for dtype in text.split())
    return {"refused": refused, "widened": {n: d for n, d in widened.items() if not NOT_WIDENED.search(n)}}


def grouped(by_op: dict[str, set[torch.dtype]]) -> dict[str, str]:
    """Return the names of ops by their types."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, dtypes in by_op.items():
        if dtypes:
            groups[" ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))].append(name)
    return {dtypes: " ".join(sorted(names)) for dtypes, names in sorted(groups.items())}


@functools.cache
def rules() -> ModuleType:
    """Return the module that reads the tables. Without simulated GPUs, load it without what its packages register."""
    package = "_accelerator_simulation"
    if DEVICE != "cuda":
        for parents, name in enumerate((f"{package}._inside.ops", f"{package}._inside", package)):
            empty = ModuleType(name)
            empty.__path__ = [str(FILE.parents[parents])]
            sys.modules[name] = empty
        bindings = ModuleType(f"{package}._inside.ops.bindings")  # the real one needs a CUDA build
        bindings.DispatchKey = torch._C.DispatchKey
        sys.modules[bindings.__name__] = bindings
    return importlib.import_module(f"{package}._inside.ops.dtypes")


def main() -> int:
    warnings.simplefilter("ignore")
    dtypes = rules()
    version = ".".join(torch.__version__.split(".")[:2])
    tables = json.loads(FILE.read_text(encoding="utf-8"))
    if DEVICE == "cuda":
        table_in_use = dtypes._table()
        known = {name: set(rule.widened) for name, rule in table_in_use.items()}
        for name, rule in list(table_in_use.items()):  # refuse nothing, so that every entry runs
            table_in_use[name] = rule._replace(refused=frozenset())
    else:
        newer = min((v for v in tables if release(v) > release(version)), key=release)
        known = {name: set(types) for name, types in dtypes._by_op(tables[newer]["widened"]).items()}
    table = make_table(known)
    before = tables.get(version)
    tables[version] = {part: grouped(by_op) for part, by_op in table.items()}
    FILE.write_text(json.dumps(dict(sorted(tables.items(), key=lambda item: release(item[0]))), indent=1) + "\n")
    print("nothing changed" if tables[version] == before else f"wrote the table of {version}; run it again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
