"""Entry point of the group ``torch.backends``: loads the simulated GPUs' kernels into a process on a simulated machine.

torch imports every entry point of that group, and ``import torch`` fails if one of them fails. Only simulated machines have
this file's folder on their path. Their Python may lack the package or have it under another name, so the kernels are loaded
by file name, and a failure is stored for the error message of the first kernel launch.
"""

from __future__ import annotations


def load() -> None:
    """Replace torch's CUDA kernels in this process by kernels that compute."""
    try:
        _load()
    except BaseException as error:  # raising would make `import torch` fail
        _store_problem(f"{type(error).__name__}: {error}")


def _load() -> None:
    import importlib.util
    import os
    import sys

    import torch

    if os.environ.get("ACCELERATOR_SIM_COMPUTE") != "1" or torch.version.cuda is None:
        return
    root = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_kernels")
    name = "_accelerator_simulation_kernels"
    spec = importlib.util.spec_from_file_location(name, os.path.join(root, "__init__.py"), submodule_search_locations=[root])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


def _store_problem(problem: str) -> None:
    """Store why the kernels are missing; the simulated runtime prints it at the first launch that it refuses."""
    try:
        import ctypes

        for major in (12, 13):
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
            runtime.accelerator_simulation_cannot_compute(problem.encode())
    except BaseException:  # the simulated runtime is not loaded either, so no kernel will be launched
        return
