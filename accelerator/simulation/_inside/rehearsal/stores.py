"""Stores of a rank without the other ranks: they answer for all ranks.

Imported once a program has imported ``torch.distributed``, from whose class they derive.
"""

from __future__ import annotations

import re
import socket
import struct
import uuid
from typing import Any

from ..ops import bindings

_NCCL_ID_SIZE = 128
# Ranks exchange descriptions of their symmetric memory under keys that contain this and end with the rank. A description begins
# with the index of the device, which torch wants to differ between ranks.
_SYMMETRIC_MEMORY = "CUDASymmetricMemory"
_INT = struct.Struct("=i")
# Until torch 2.8, rank 0 tells its host and the name of a file here.
_OLD_SYMMETRIC_MEMORY = re.compile(r"symmetric_memory-[\d_]+/init$")
# torch's C++ objects do not keep the Python half of a store alive, which has its methods.
_stores: list[Any] = []
_c10d: Any = bindings.distributed()


class StoreWithoutPeers(_c10d.Store):  # type: ignore[misc]
    """A store that never waits. A missing value of another rank is a unique id of nccl, which is zero here."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        _stores.append(self)

    def set(self, key: str, value: Any) -> None:
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            if _SYMMETRIC_MEMORY in key:
                return self._of_other_rank(key)
            if _OLD_SYMMETRIC_MEMORY.search(key):
                return f"{socket.gethostname()}/{uuid.uuid4()}".encode()
        return self._values.get(key, bytes(_NCCL_ID_SIZE))

    def _of_other_rank(self, key: str) -> bytes:
        """Return what another rank would tell of its symmetric memory: the same as this rank, but of another device."""
        exchange, _, rank = key.rpartition("/")
        [(own, told)] = [each for each in self._values.items() if each[0].rpartition("/")[0] == exchange]
        if len(told) <= _INT.size:
            return told
        device = _INT.unpack_from(told)[0] + int(rank) - int(own.rpartition("/")[2])
        return _INT.pack(device) + told[_INT.size :]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: Any) -> None:
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if self._values.get(key, b"") == _to_bytes(expected):
            self._values[key] = _to_bytes(desired)
        return self._values.get(key, _to_bytes(expected))

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        pass

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        pass

    def clone(self) -> StoreWithoutPeers:
        return self


class TCPStore(StoreWithoutPeers):
    def __init__(self, host_name: str, port: int, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.host, self.port = host_name, port


class FileStore(StoreWithoutPeers):
    def __init__(self, file_name: str, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.path = file_name


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
