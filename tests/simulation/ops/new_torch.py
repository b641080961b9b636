"""Reports what changed for simulated GPUs in the installed torch. ``.ci/run new-torch [VERSION]`` installs one and runs this.

    python -m accelerator simulate --gpus 2 -- python -m tests.simulation.kernels.new_torch

Each part prints "ok", or what differs: the private bindings of torch that the kernels use, the modules that hook into torch and
Triton, the parameters of the decompositions, the symbols that torch's libraries import, the table of types, the ops that
deterministic mode refuses, and a sample of PyTorch's operator database. The exit status is 1 if a part fails.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tests.support import ROOT

# Modules that the simulation changes when a program imports them.
HOOKED = (
    *("torch._dynamo.trace_rules", "torch._inductor.compile_fx", "torch._inductor.runtime.triton_heuristics"),
    *("torch.export._trace", "triton.compiler.compiler", "triton.runtime.autotuner", "triton.runtime.build"),
)


def simulation_module(name: str) -> Any:
    """Import a module of the simulation as a simulated process has it."""
    return importlib.import_module(f"_accelerator_simulation.{name}")


def bindings() -> Iterator[str]:
    """Import the module of torch's private bindings, which names those that are missing."""
    try:
        simulation_module("_inside.ops.bindings")
    except (ImportError, RuntimeError) as error:
        yield str(error)


def hooks() -> Iterator[str]:
    """Import the package's modules, then what they hook into."""
    package = ROOT / "accelerator"
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sorted(package.rglob("*.py"))]
    # The simulated process has loaded these by file name. A second copy would replace torch's kernels again.
    loaded_already = re.compile(r"accelerator\.simulation\._inside\b")
    ours = [name.removesuffix(".__init__") for name in names if not loaded_already.match(name) and "__main__" not in name]
    yield from filter(None, map(import_problem, (*ours, *HOOKED)))


def import_problem(name: str) -> str | None:
    """Import a module and return why it failed, or None. A missing optional dependency is no problem."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        return f"{name}: {error}" if missing.startswith(("torch", "triton", "accelerator")) else None
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


def compare_parameters(function: Callable[..., Any], positional: list[str], keywords: list[str]) -> str | None:
    """Return how a function's parameters differ from those of a schema, or None if the function takes the schema's arguments.

    Names count for keyword arguments only. A decomposition may have optional ones that this torch lacks, and random ones take a
    generator even if the op does not.
    """
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    keyword_only = {parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}
    required = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty}
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_keyword = keyword_only | set(by_position)
    by_position = [name for name in by_position if name not in {"generator", *keywords} - {*positional}]
    takes_positional = inspect.Parameter.VAR_POSITIONAL in kinds or len(by_position) == len(positional)
    takes_keywords = inspect.Parameter.VAR_KEYWORD in kinds or set(keywords) <= by_keyword
    if takes_positional and takes_keywords and required - {"generator"} <= {*keywords}:
        return None
    return f"{inspect.signature(function)}, torch has ({', '.join((*positional, *keywords))})"


def decompositions() -> Iterator[str]:
    """Compare the parameters of each decomposition with the schema of its op."""
    import torch

    known = set(torch._C._dispatch_get_all_op_names())
    for name, function in simulation_module("_inside.ops.decompositions").DECOMPOSITIONS.items():
        base, _, overload = name.partition(".")
        if name not in known:
            print(f"   {name}: this torch has no such op")
            continue
        arguments = torch._C._get_schema(base, overload).arguments
        keywords = [argument.name for argument in arguments if argument.kwarg_only]
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        difference = compare_parameters(function, positional, keywords)
        if difference is not None:
            yield f"{name}: {difference}"


def symbols() -> Iterator[str]:
    """Run the tests that compare the exported names with the symbols that torch's libraries import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/simulation/native/test_symbols.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield done.stdout[-3000:]


def dtype_tables() -> Iterator[str]:
    """Compare the table of types that this torch uses with what its operator database says of CUDA."""
    import torch

    rules = simulation_module("_inside.ops.dtypes")
    values = simulation_module("_settings.torch_versions")
    tables = json.loads((ROOT / "accelerator/simulation/_inside/ops/dtypes.json").read_text(encoding="utf-8"))
    if values.release(torch.__version__) > max(map(values.release, tables)):
        yield "the newest table is older: run tests.simulation.kernels.make_dtype_tables"
    from tests.simulation.ops import operators

    registered = {
        name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    }
    for op in operators.entries().values():
        if op.aten_name in registered and not op.variant_test_name:
            refused = rules.dtype_rules(op.aten_name).refused & op.supported_dtypes("cuda")
            if refused:
                yield f"{op.aten_name}: the table refuses {', '.join(sorted(map(str, refused)))}, which CUDA supports"


def determinism() -> Iterator[str]:
    """Name the ops that the table lists and that this torch no longer refuses in deterministic mode."""
    table = simulation_module("_inside.ops.determinism")
    gone = sorted(kernel for kernel in table._ALERTS.values() if not table._has_error(kernel))
    print(f"   deterministic by now: {', '.join(gone) or 'none'}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/simulation/ops/test_refusals_simulated.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield done.stdout[-3000:]


def operator_sample() -> Iterator[str]:
    """Compare a sample of the operator database with the CPU, forward and backward."""
    from tests.simulation.ops import operators, test_op_db_simulated

    entries = operators.entries()
    for name in test_op_db_simulated.sample():
        outcome = operators.run(entries[name])
        if outcome.status != ("unsupported" if name in test_op_db_simulated.UNSUPPORTED else "right"):
            yield f"{name}: {outcome}"


def main() -> int:
    import torch

    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}", flush=True)
    failed = False
    for part in (bindings, hooks, decompositions, symbols, dtype_tables, determinism, operator_sample):
        print(f"\n{part.__name__}: {(part.__doc__ or '').strip()}", flush=True)
        try:
            differences = list(part())
        except Exception:
            differences = [traceback.format_exc()]
        for difference in differences:
            print(f"   {difference}", flush=True)
        print("   ok" if not differences else f"   {len(differences)} differ", flush=True)
        failed |= bool(differences)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
