"""The slow checks of ``determinism_check="debug"``: values, and whether arguments are equal on every rank."""

from __future__ import annotations

import weakref
import zlib

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .configuration import Settings, partition_group
from .containers import shape_of
from .groups import Group

_LARGEST_INT64 = 2**63 - 1


def digest(tensor: torch.Tensor) -> int | None:
    """Return an integer that differs, in all likelihood, if the bytes of two tensors differ. None if it has no values."""
    tensor = tensor.detach()
    parts = _parts(tensor)
    if parts is not None:
        digests = [digest(part) for part in parts]
        return None if None in digests else sum(each * (i + 1) for i, each in enumerate(digests) if each is not None)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    # The weights repeat after a prime number of bytes, so that swapped elements change the result.
    weights = torch.arange(data.numel(), device=data.device) % 8191 + 1
    return int((data * weights).sum()) * 1_000_003 + int(data.sum())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the dense tensors of which a tensor consists, None if it is one."""
    if is_traceable_wrapper_subclass(tensor):
        values = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [value for value in values if isinstance(value, torch.Tensor)]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.strided:
        return None
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
    return [*indices, tensor.values()]


class Digests:
    """The digests of the tensors that a forward saved."""

    __slots__ = ("_digests", "_tensors")

    def __init__(self) -> None:
        # None for a tensor that is not compared.
        self._digests: list[int | None] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def record(self, tensor: torch.Tensor) -> None:
        """Record the next saved tensor of the forward."""
        self._digests.append(digest(tensor))
        self._tensors.append(weakref.ref(tensor))

    def exclude_edited(self) -> None:
        """Exclude state that the function itself edits, such as running statistics: it differs in each run.

        Call it when the forward has ended, and before a recomputation that starts earlier.
        """
        tensors = [reference() for reference in self._tensors]
        pairs = zip(tensors, self._digests, strict=True)
        edited = {id(tensor) for tensor, saved in pairs if tensor is not None and (saved is None or saved != digest(tensor))}
        # An edited tensor may have been saved again after its last edit.
        for index, tensor in enumerate(tensors):
            if id(tensor) in edited:
                self._digests[index] = None

    def forward_ended(self) -> None:
        """Exclude what the function edited. Later edits are not its own."""
        self.exclude_edited()
        self._tensors.clear()

    def difference(self, index: int, tensor: torch.Tensor) -> str | None:
        """Return how a recomputed tensor differs from the saved one, None if it does not."""
        before = self._digests[index]
        if before is None or before == (now := digest(tensor)):
            return None
        return f"digest {before} in forward, {now} now"


def check_same_on_all_ranks(arguments: list[tuple[torch.Tensor, str]], settings: Settings) -> None:
    """Compare the arguments of a partitioned checkpoint across ranks. Every rank gets the same result.

    Raises:
        RuntimeError: naming the arguments that differ.
    """
    group = partition_group(settings)
    if group.size == 1:
        return
    counts = _gather([len(arguments)], group)
    if len(set(map(tuple, counts))) > 1:
        raise RuntimeError("partitioned checkpointing needs the same arguments on every rank, but their counts differ")
    own = [
        value
        for tensor, name in arguments
        for value in (_metadata_checksum(tensor, name), (digest(tensor) or 0) & _LARGEST_INT64)
    ]
    rows = _gather(own, group)
    differing = {i // 2 for row in rows for i, value in enumerate(row) if value != rows[0][i]}
    if differing:
        raise RuntimeError(
            "partitioned checkpointing needs the same arguments on every rank of the group, but these differ: "
            f"{', '.join(arguments[i][1] for i in sorted(differing))}"
        )


def _metadata_checksum(tensor: torch.Tensor, name: str) -> int:
    return zlib.crc32(f"{name} {tuple(shape_of(tensor))} {tensor.dtype}".encode())


def _gather(values: list[int], group: Group) -> list[list[int]]:
    """Return the values of each rank. torch's own gathering of objects would need NumPy."""
    from torch import distributed

    on_host = distributed.get_backend(group.handle) in ("gloo", "mpi")
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    own = torch.tensor(values, dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(group.size)]
    distributed.all_gather(rows, own, group=group.handle)
    return [row.tolist() for row in rows]
