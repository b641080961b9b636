"""What torch imports in a process on a simulated machine: loads the kernels that compute there.

torch imports every entry point of the group ``torch.backends``, and fails if one cannot be imported. The directory of this
file, which has such an entry, is on the path of simulated machines alone. Their Python may be another than the one that has
the package, or have it under another name: so the kernels are loaded by file name, and whatever goes wrong is kept for
the message about the first kernel that cannot run.
"""

from __future__ import annotations


def load() -> None:
    """Give torch's CUDA ops in this process kernels that compute."""
    try:
        _load()
    except BaseException as error:  # torch could not be imported otherwise
        _keep(f"{type(error).__name__}: {error}")


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


def _keep(problem: str) -> None:
    """Tell the simulated runtime why there are no kernels; it prints that at the first launch that it has to refuse."""
    try:
        import ctypes

        for major in (12, 13):
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
            runtime.accelerator_simulation_cannot_compute(problem.encode())
    except BaseException:  # not even the libraries are there: no kernel will be launched
        return
