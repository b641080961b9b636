"""The one door to NVML: a call gives a value, or raises NotSupported or Failed, whatever state NVML or its binding is in.

NVML is initialized once per process, never shut down, begun anew after a fork, and after others shut it down too often.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from . import process
from .discovery_result import RETRY_AFTER_S, Failed, Gpu, NotSupported
from .grammar import Instance

LIBRARY_NOT_FOUND = 12

_UNINITIALIZED = 1
_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_MISSING = (13, 25)  # the driver has no such function, or not in this version

_HINTS = {
    4: "this user may not use the NVIDIA driver",
    9: "the kernel's NVIDIA driver is not loaded",
    LIBRARY_NOT_FOUND: "no NVIDIA driver is installed, or the container was started without it",
    18: "the kernel's NVIDIA driver and its libraries differ, as after an upgrade; reboot or reload the driver",
    999: "the driver gave no reason; in a container its device files may be gone, and a restart of it helps",
}

T = TypeVar("T")


class _Session:
    """NVML from one initialization to the next, with what it listed."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        # And until when: a GPU that fails may come back.
        self.gpus: tuple[float, tuple[Gpu, ...]] = 0.0, ()
        self.cuda_version: tuple[int, int] | None = None


class Handle:
    """A GPU or a MIG instance; NVML's own handle of it is fetched for each session, by UUID, as indices may move in between."""

    __slots__ = ("_bound", "_index", "_slot", "_uuid")

    def __init__(self, index: int, slot: int | None = None) -> None:
        self._index, self._slot = index, slot
        self._uuid: str | None = None
        self._bound: tuple[_Session | None, Any] = None, None

    def resolve(self, session: _Session) -> Any:
        """NVML's own handle in a session."""
        owner, value = self._bound
        if owner is not session:
            value = self._fetch(session.binding)
            self._bound = session, value
        return value

    def _fetch(self, binding: Any) -> Any:
        if self._uuid is not None:
            return binding.nvmlDeviceGetHandleByUUID(self._uuid)
        gpu = binding.nvmlDeviceGetHandleByIndex(self._index)
        return gpu if self._slot is None else binding.nvmlDeviceGetMigDeviceHandleByIndex(gpu, self._slot)

    def bind_uuid(self, uuid: str) -> None:
        """Fetch it by this UUID from now on."""
        self._uuid = uuid


class _Failure(NamedTuple):
    """A start that failed: until when not to try again, and what it was."""

    until: float
    message: str
    code: int


_lock = threading.RLock()
_session: _Session | _Failure | None = None


def call(function: str, *arguments: Any, **options: Any) -> Any:
    """What a function of the binding returns; a ``Handle`` among the arguments stands for NVML's own.

    Raises:
        NotSupported: if NVML says so.
        Failed: if it fails in any other way, with NVML's name of it, also where it does not start at all.
    """
    session = _session
    if type(session) is not _Session:
        session = _get_session()
    try:
        return _call(session, function, arguments, options)
    except Failed as error:
        if error.code != _UNINITIALIZED:
            raise
    # Somebody in this process shut it down more often than started it.
    _drop(session)
    return _call(_get_session(), function, arguments, options)


def _call(session: _Session, function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        values: list[Any] = []
        for argument in arguments:
            # Not a comprehension, which costs as much again before Python 3.12.
            values.append(argument.resolve(session) if type(argument) is Handle else argument)  # noqa: PERF401
        return getattr(session.binding, function)(*values, **options)
    except Exception as error:
        raise _translated(session.binding, function, error) from None


def _translated(binding: Any, function: str, error: Exception) -> NotSupported | Failed:
    code = getattr(error, "value", None)
    if not isinstance(code, int):
        # A binding that is too old for the function or a parameter of it, broken, or not NVML's at all.
        code = _MISSING[0] if isinstance(error, (AttributeError, TypeError)) else 0
        return Failed(f"the binding's {function} failed ({type(error).__name__}: {error})", code)
    names = (name for name, value in vars(binding).items() if name.startswith("NVML_ERROR_") and value == code)
    answer = f"NVML's {function} answered {next(names, 'an unknown error')}, {code}"
    if code == _NOT_SUPPORTED:
        return NotSupported(answer)
    return Failed(f"{_HINTS[code]} ({answer})" if code in _HINTS else answer, code)


def newest(first: Callable[[Any], T], *older: Callable[[Any], T]) -> Callable[[Any], T]:
    """What asks of a device the first of several functions, the newest first, that driver and binding are not too old for."""

    def read(handle: Any) -> T:
        try:
            return first(handle)
        except Failed as error:
            if error.code not in _MISSING or not older:
                raise
        return newest(*older)(handle)

    return read


def _get_session() -> _Session:
    global _session
    session = _session
    if type(session) is _Session:
        return session
    with _lock:
        if _session is None or (isinstance(_session, _Failure) and time.monotonic() > _session.until):
            try:
                _session = _Session(_start())
            except Failed as error:
                _session = _Failure(time.monotonic() + RETRY_AFTER_S, str(error), error.code)
        session = _session
    if isinstance(session, _Failure):
        raise Failed(session.message, session.code)
    return session


def _drop(session: _Session) -> None:
    global _session
    with _lock:
        if _session is session:
            _session = None


def _start() -> Any:
    try:
        process.import_modules("shutil", "subprocess", "ctypes.util", "string", "pynvml")
        import pynvml as binding
    except ImportError as error:
        raise Failed(f"the package nvidia-ml-py is missing ({error})") from None
    except Exception as error:
        raise Failed(f"the package nvidia-ml-py does not work ({type(error).__name__}: {error})") from None
    try:
        binding.nvmlInit()
    except Exception as error:
        raise _translated(binding, "nvmlInit", error) from None
    return binding


def clear() -> None:
    """Drop what was listed, and that a start failed, so that the next question looks anew."""
    global _session
    with _lock:
        _session = _Session(_session.binding) if isinstance(_session, _Session) else None


def gpus() -> tuple[Gpu, ...]:
    """All physical GPUs, with their MIG instances, in PCI bus order; one that fails is listed with its problem.

    Raises:
        Failed: if NVML is missing, does not start, or cannot count them.
    """
    until, known = _get_session().gpus
    if time.monotonic() > until:
        with _lock:
            count: int = _required(lambda: call("nvmlDeviceGetCount"))
            known = tuple(_gpu(index) for index in range(count))
            failing = any(gpu.problem for gpu in known)
            _get_session().gpus = time.monotonic() + RETRY_AFTER_S if failing else float("inf"), known
    return known


def _required(function: Callable[[], T]) -> T:
    """An answer without which nothing goes on: that it is not supported is a failure too."""
    try:
        return function()
    except NotSupported as error:
        raise Failed(str(error), _NOT_SUPPORTED) from None


def _gpu(index: int) -> Gpu:
    handle, instances, problem = Handle(index), None, None
    try:
        instances = _instances(handle, index)
    except (NotSupported, Failed) as error:
        problem = str(error)
    uuid = read_or_none("nvmlDeviceGetUUID", handle)
    if uuid:
        handle.bind_uuid(uuid)
    return Gpu(index, handle, uuid, read_or_none("nvmlDeviceGetName", handle), instances, problem)


def _instances(gpu: Handle, index: int) -> tuple[Instance, ...] | None:
    try:
        current, _pending = call("nvmlDeviceGetMigMode", gpu)
    except NotSupported:
        return None
    except Failed as error:
        if error.code in _MISSING:
            return None
        raise
    if current != 1:
        return None
    instances: list[Instance] = []
    for slot in range(call("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        instance = Handle(index, slot)
        try:
            uuid = text(call("nvmlDeviceGetUUID", instance))
        except Failed as error:
            if error.code != _NOT_FOUND:  # slots may be empty between full ones
                raise
            continue
        instance.bind_uuid(uuid)
        gi, ci = call("nvmlDeviceGetGpuInstanceId", instance), call("nvmlDeviceGetComputeInstanceId", instance)
        instances.append(Instance(uuid, gi, ci, instance))
    return tuple(instances)


def read_or_none(function: str, handle: Handle) -> Any:
    """What NVML answers about a device, texts as str, or None where it does not answer."""
    try:
        return text(call(function, handle))
    except (NotSupported, Failed):
        return None


def pci_bus_id(handle: Handle) -> str | None:
    """A GPU's place on the PCI bus, such as "00000000:3B:00.0", or None where NVML does not answer."""
    try:
        return text(call("nvmlDeviceGetPciInfo", handle).busId)
    except (NotSupported, Failed):
        return None


def plain_bus(bus: str) -> str:
    """A PCI bus id as NVML spells it, with eight digits of domain, from whoever it is."""
    return bus.rjust(len("00000000:00:00.0"), "0").upper()


def text(value: Any) -> Any:
    """Text from NVML as str: older bindings give bytes. Any other value as it is."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def cuda_version() -> tuple[int, int]:
    """The newest CUDA version that the installed driver supports, without loading or starting it for good.

    Raises:
        Failed: if NVML cannot tell; with the code of a missing library where NVML is there but the driver library is not.
    """
    known = _get_session().cuda_version
    if known is None:
        of_system = newest(
            lambda _: call("nvmlSystemGetCudaDriverVersion_v2"),
            lambda _: call("nvmlSystemGetCudaDriverVersion"),
        )
        number: int = _required(lambda: of_system(None))
        known = _get_session().cuda_version = number // 1000, number % 1000 // 10
    return known


def driver_version() -> str:
    """The driver's version text.

    Raises:
        Failed: if NVML cannot tell.
    """
    return text(_required(lambda: call("nvmlSystemGetDriverVersion")))


@process.reset_after_fork
def _reset_after_fork() -> None:
    """In a forked child: NVML's own state does not survive a fork, and neither lock may stay held by a thread that is gone."""
    global _lock, _session
    binding = sys.modules.get("pynvml")
    if binding is not None:
        binding.libLoadLock = threading.Lock()  # type: ignore[attr-defined]
    _lock, _session = threading.RLock(), None
