"""torch's private bindings, each with what it is for. The other modules that torch loads on simulated GPUs use no ``torch._C``;
where they ``replace`` one of its functions, they name it.

If the installed torch lacks one, importing this module raises one error that names all that are missing, so the kernels are not
installed. ``.ci/run new-torch`` reports them. What only some releases of torch have is at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

_missing: list[str] = []


def _find(path: str) -> Any:
    """Return an object of torch, or note that this torch lacks it."""
    value: Any = torch
    for name in path.split("."):
        if not hasattr(value, name):
            _missing.append(f"torch.{path}")
            return None
        value = getattr(value, name)
    return value


# ---- The dispatcher: which ops there are, how their kernels are found and replaced. ----

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
else:
    DispatchKey = _find("_C.DispatchKey")

# A key by its name. The engine looks for overrides in Python under a key that no device has, and that has no attribute.
parse_key: Callable[[str], DispatchKey] = _find("_C._dispatch_key_parse")
# The names of all ops, and of those with a kernel for a key.
all_op_names: Callable[[], list[str]] = _find("_C._dispatch_get_all_op_names")
op_names_of_key: Callable[[str], list[str]] = _find("_C._dispatch_get_registrations_for_dispatch_key")
# Whether an op has a kernel that was registered for a key, or also one that the dispatcher derives for it.
has_kernel: Callable[[str, str], bool] = _find("_C._dispatch_has_kernel_for_dispatch_key")
has_computed_kernel: Callable[[str, str], bool] = _find("_C._dispatch_has_computed_kernel_for_dispatch_key")
# The schema of an overload of an op: its arguments and results.
get_schema: Callable[[str, str], Any] = _find("_C._get_schema")
# A function that calls an overload, one that calls its kernel for a key, and its tags.
get_overload: Callable[[str, str], tuple[Callable[..., Any], Callable[..., Any], list[Any]]] = _find(
    "_C._get_operation_overload"
)
# The overloads of an op: those that take numbers compute what Python passes as numbers.
get_overloads: Callable[[str], tuple[Any, list[str]]] = _find("_C._jit_get_operation")
# Registers kernels. torch.library.Library refuses to replace kernels of torch.
make_library: Callable[..., Any] = _find("_C._dispatch_library")
# All kernels of an op as text, with the source files that registered them: kernels from Python are left alone.
describe_kernels: Callable[[str], str] = _find("_C._dispatch_dump")
# The keys after a key in the dispatcher's order, for an override that calls the kernel below.
keys_after: Callable[[DispatchKey], Any] = _find("_C._dispatch_keyset_full_after")
keys_of: Callable[[DispatchKey], Any] = _find("_C.DispatchKeySet")
# Contexts in which a kernel calls ops: autograd has recorded the call already, and subclasses of tensors are the caller's.
below_autograd: Callable[[], Any] = _find("_C._AutoDispatchBelowAutograd")
without_torch_function: Callable[[], Any] = _find("_C.DisableTorchFunction")
with_torch_function: Callable[[], Any] = _find("_C._EnableTorchFunction")
# The classes whose lookup of an op loads the library that defines it: kernels of libraries are overridden after it.
OpNamespace: Any = _find("_ops._OpNamespace")
Ops: Any = _find("_ops._Ops")

# ---- Tensors over given memory. ----

# A storage over an address, which it does not own.
storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] = _find("_C._construct_storage_from_data_pointer")
# Functions of the code that torch.compile generates, which do not go through the dispatcher: `as_strided`, which takes a tuple
# but not a torch.Size, and `empty_strided` on the current device.
view: Callable[..., torch.Tensor] = _find("_C._dynamo.guards._reinterpret_tensor")
_guards: Any = _find("_C._dynamo.guards")
empty_on_current_device: Callable[..., torch.Tensor] = _find("_C._dynamo.guards._empty_strided_cuda")
# Whether the storage of a weak reference was freed.
is_expired: Callable[[int], bool] = _find("UntypedStorage._expired")
# Marks a tensor as lazily conjugated, or not.
set_conj: Callable[[torch.Tensor, bool], None] = _find("_C._set_conj")
# A weak reference to a storage, by which race detection and rehearsals know that its memory was freed; it must be freed too.
weak_reference: Callable[[torch.UntypedStorage], int] = _find("UntypedStorage._weak_ref")
free_weak_reference: Callable[[int | None], None] = _find("UntypedStorage._free_weak_ref")

# ---- CUDA. ----

current_device: Callable[[], int] = _find("_C._cuda_getDevice")
current_stream: Callable[[int], int] = _find("_C._cuda_getCurrentRawStream")
# Memory of torch's allocator that no tensor owns, for the workspaces of cuBLAS.
allocate: Callable[[int, int], int] = _find("_C._cuda_cudaCachingAllocator_raw_alloc")
free: Callable[[int], None] = _find("_C._cuda_cudaCachingAllocator_raw_delete")
# The allocator's figures, and a function that it calls when memory is exhausted: what a rehearsal records.
memory_statistics: Callable[[int], dict[str, Any]] = _find("_C._cuda_memoryStats")
observe_out_of_memory: Callable[[Callable[[int, int, int, int], None]], None] = _find("_C._cuda_attach_out_of_memory_observer")
# The class of graphs, which registers the generators that a capture draws from.
CudaGraph: Any = _find("_C._CUDAGraph")
# Calls a function once CUDA is initialized.
call_once_initialized: Callable[[Callable[[], object]], None] = _find("cuda._lazy_call")
# The fuser of TorchScript, which compiles CUDA kernels at run time.
allow_fuser: Callable[[bool], None] = _find("_C._jit_override_can_fuse_on_gpu")

# ---- The state of the thread or process. ----

is_deterministic: Callable[[], bool] = _find("_C._get_deterministic_algorithms")
is_deterministic_warn_only: Callable[[], bool] = _find("_C._get_deterministic_algorithms_warn_only")
# The node of autograd that runs in this thread: for reports of races in a backward.
current_node: Callable[[], Any] = _find("_C._current_autograd_node")

# Whether torch uses cuDNN.
get_cudnn_enabled: Callable[[], bool] = _find("_C._get_cudnn_enabled")
set_cudnn_enabled: Callable[[bool], None] = _find("_C._set_cudnn_enabled")
CUDNN_BACKEND: Any = _find("_C._ConvBackend.Cudnn")  # of convolutions

# ---- Bindings that the simulation replaces. ----

# Initialize CUDA, which starts the record of a rehearsal; and free the workspaces of cuBLAS, as ours.
_find("_C._cuda_init")
_find("_C._cuda_clearCublasWorkspaces")


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of ``torch._C`` by what ``make`` returns for it. Do nothing if this torch has no such function."""
    original = getattr(torch._C, name, None)
    if original is not None:
        setattr(torch._C, name, make(original))


def replace_empty_of_compiled_code(function: Callable[..., torch.Tensor]) -> None:
    """Replace ``empty_strided`` of the code that torch.compile generates, which finds it when that is imported."""
    _guards._empty_strided_cuda = function


# Reset the peaks of the allocator, or its counts. The second ones are called by torch.accelerator.
RESET_PEAKS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
RESET_COUNTS = ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")

# ---- What only some releases or builds have. ----


def cublas_workspace_size() -> int | None:
    """Return the size of cuBLAS's workspace that programs can set from torch 2.14 on; None before."""
    size: Callable[[], int] | None = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    return None if size is None else int(size())


def distributed() -> Any:
    """Return the bindings of ``torch.distributed``, None if this torch is built without it or has not imported it."""
    return getattr(torch._C, "_distributed_c10d", None)


def python_kernels() -> Any:
    """Return the registry of CUDA kernels that torch 2.11 and later compile from Python at the first call; None before."""
    if importlib.util.find_spec("torch._native") is None:
        return None
    importlib.import_module("torch._native")
    return importlib.import_module("torch._native.registry")


if _missing:
    raise RuntimeError(
        f"torch {torch.__version__} has no {', '.join(_missing)}, which simulated GPUs need: use a release of torch that this"
        " version of accelerator supports"
    )
