"""``python -m tests.simulation.make_dtype_tables``: write the installed torch's table of ``_kernels/dtypes.json``.

Run it on a simulated machine: ``python -m accelerator simulate --gpus 1 -- python -m tests.simulation.make_dtype_tables``,
until it prints that nothing changed. PyTorch's operator database (OpInfo) states for each entry which types CUDA supports.

An op refuses a type if an entry runs it on a type that the CPU supports and CUDA does not, unless the op's own entry says that
CUDA supports it. An op is computed in a wider type if an entry with CUDA's support fails because the CPU's kernel does not
implement the type.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulation import operators
from tests.support import ROOT

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

FILE = ROOT / "accelerator/simulation/_kernels/dtypes.json"
# The types of which the database states for every op whether CUDA supports them (torch's test_dtypes holds it to that).
STATED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
SAMPLES, RUNS = 40, 8  # the database has up to thousands of samples of an entry
# The CPU's kernels refuse these types of its own samples, or the database does not name them. From torch's sources.
ALSO_REFUSED = {
    "convolution": "uint8 int8 int16 int32 int64",
    "native_dropout": "bool uint8 int8 int16 int32 int64",
    "max_pool2d_with_indices": "uint8 int8 int16 int32 int64",
}
# These support every type, and the database has no entries of them.
COPIES = {"copy", "_to_copy", "fill", "zero", "empty", "empty_strided", "index_put", "_index_put_impl"}
# Decompositions and torch's own kernels handle these.
NOT_WIDENED = re.compile(r"_fft_|_local_scalar_dense")


class Ran(NamedTuple):
    """The ops that a call of an entry ran, and the op that failed."""

    ops: set[tuple[str, torch.dtype]]
    failed: tuple[str, torch.dtype] | None


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: set[tuple[str, torch.dtype]] = set()
        self.failed: tuple[str, torch.dtype] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda), None)
        name = function._schema.name.removeprefix("aten::")
        op = (name.removesuffix("_"), first.dtype) if first is not None else None
        try:
            result = function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if op and self.failed is None and re.search("not implemented for|Expected self to be a floating", str(error)):
                self.failed = op
            raise
        if op:
            self.ops.add(op)
        return result


def run(op: OpInfo, sample: Any, backward: bool) -> Ran:
    recorder = Recorder()
    try:
        with recorder:
            operators._call(op, sample, backward)
    except Exception:
        return Ran(recorder.ops, recorder.failed or ("", torch.float32))
    return Ran(recorder.ops, None)


def samples(op: OpInfo, dtype: torch.dtype, backward: bool) -> list[Any]:
    torch.manual_seed(1)
    try:
        drawn = list(itertools.islice(op.sample_inputs("cuda", dtype, requires_grad=backward), SAMPLES))
    except Exception:  # the entry has no samples of this type
        return []
    return drawn[:: max(1, len(drawn) // RUNS)]


def make_table() -> dict[str, dict[str, set[torch.dtype]]]:
    """Return the types that each op refuses and those that are computed in a wider type."""
    refused: dict[str, set[torch.dtype]] = defaultdict(set)
    widened: dict[str, set[torch.dtype]] = defaultdict(set)
    entries = {name: op for name, op in operators.entries().items() if not name.startswith("jiterator")}
    for name, op in entries.items():
        cpu, cuda = op.supported_dtypes("cpu"), op.supported_dtypes("cuda")
        for dtype in (cpu - cuda) & STATED:
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
                failed = run(op, sample, backward).failed
                if failed is not None and failed[0]:
                    widened[failed[0]].add(failed[1])
        print(name, file=sys.stderr)
    for op in entries.values():
        if op.aten_name in refused:
            refused[op.aten_name] -= op.supported_dtypes("cuda")
    registered = {
        op.removeprefix("aten::").partition(".")[0].removesuffix("_")
        for op in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    }
    refused = {name: dtypes for name, dtypes in refused.items() if name in registered - COPIES}
    for name, text in ALSO_REFUSED.items():
        refused.setdefault(name, set()).update(getattr(torch, dtype) for dtype in text.split())
    return {"refused": refused, "widened": {n: d for n, d in widened.items() if not NOT_WIDENED.search(n)}}


def grouped(by_op: dict[str, set[torch.dtype]]) -> dict[str, str]:
    """Group ops by their types."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, dtypes in by_op.items():
        if dtypes:
            groups[" ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))].append(name)
    return {dtypes: " ".join(sorted(names)) for dtypes, names in sorted(groups.items())}


def main() -> int:
    warnings.simplefilter("ignore")
    dtypes = sys.modules["_accelerator_simulation._kernels.dtypes"]
    rules = dtypes._table()
    known = {name: set(rule.widened) for name, rule in rules.items()}
    for name, rule in list(rules.items()):  # nothing is refused meanwhile, so that every entry runs
        rules[name] = rule._replace(refused=frozenset())
    table = make_table()
    for name, already in known.items():
        table["widened"].setdefault(name, set()).update(already)
    version = ".".join(torch.__version__.split(".")[:2])
    tables = json.loads(FILE.read_text(encoding="utf-8"))
    before = tables.get(version)
    tables[version] = {part: grouped(by_op) for part, by_op in table.items()}
    FILE.write_text(json.dumps(dict(sorted(tables.items(), key=lambda item: dtypes._version(item[0]))), indent=1) + "\n")
    print("nothing changed" if tables[version] == before else f"wrote the table of {version}; run it again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
