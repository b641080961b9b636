"""NVML: a call returns a value, or raises NotSupported or Failed with NVML's reason in words.

NVML is initialized once per process. It is initialized again in a forked child, after other code shut it down, and after
``clear``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from . import imports, limits, process
from .discovery_result import Failed, NotSupported, PhysicalGpu
from .visibility import Instance

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
    999: "the driver gave no reason; in a container, its device files may be gone; restart the container",
}

T = TypeVar("T")


class _Session:
    """One initialization of NVML, with the GPUs that it listed."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        # The time of expiry, and the list: a GPU that fails may work again.
        self.gpus: tuple[float, tuple[PhysicalGpu, ...]] = 0.0, ()
        self.cuda_version: tuple[int, int] | None = None


class Handle:
    """A GPU or a MIG instance. NVML's own handle is fetched once per session, by UUID, because indices may change."""

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
    """A failed initialization: the time of the next attempt, and the error."""

    expires: float
    message: str
    code: int


_lock = threading.RLock()
_session: _Session | _Failure | None = None


def call(function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the binding; a ``Handle`` argument is replaced by NVML's own.

    Raises:
        NotSupported: if the device or the driver does not support the function.
        Failed: if the function fails in any other way, or NVML does not start; with NVML's name of the error.
    """
    was_dropped = False
    while True:
        session = _session
        if type(session) is not _Session:
            session = _get_session()
        try:
            values: list[Any] = []
            for argument in arguments:
                # Before Python 3.12 a comprehension takes twice as long.
                values.append(argument.resolve(session) if type(argument) is Handle else argument)  # noqa: PERF401
            return getattr(session.binding, function)(*values, **options)
        except Exception as raised:
            error = _translated(session.binding, function, raised)
        if isinstance(error, NotSupported):
            raise error
        # Another thread may have ended the session meanwhile, with ``clear``, and then the error has no meaning.
        if _session is session:
            if error.code != _UNINITIALIZED or was_dropped:
                raise error
            # Other code in this process shut NVML down more often than it initialized it.
            _drop(session)
            was_dropped = True


def _translated(binding: Any, function: str, error: Exception) -> NotSupported | Failed:
    code = getattr(error, "value", None)
    if not isinstance(code, int):
        # The binding is too old for the function or a parameter of it, broken, or another module of that name.
        code = _MISSING[0] if isinstance(error, (AttributeError, TypeError)) else 0
        return Failed(f"the binding's {function} failed ({type(error).__name__}: {error})", code)
    names = (name for name, value in vars(binding).items() if name.startswith("NVML_ERROR_") and value == code)
    message = f"NVML's {function} returned {next(names, 'an unknown error')}, {code}"
    if code == _NOT_SUPPORTED:
        return NotSupported(message)
    return Failed(f"{_HINTS[code]} ({message})" if code in _HINTS else message, code)


def newest(first: Callable[[Any], T], *older: Callable[[Any], T]) -> Callable[[Any], T]:
    """A reader that calls the newest of several functions that both the driver and the binding have."""

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
        if _session is None or (isinstance(_session, _Failure) and time.monotonic() > _session.expires):
            try:
                _session = _Session(_initialize())
            except Failed as error:
                _session = _Failure(time.monotonic() + limits.RETRY_AFTER_S, str(error), error.code)
        session = _session
    if isinstance(session, _Failure):
        raise Failed(session.message, session.code)
    return session


def _drop(session: _Session) -> None:
    global _session
    with _lock:
        if _session is session:
            _session = None


def _initialize() -> Any:
    try:
        imports.import_modules("shutil", "subprocess", "ctypes.util", "string", "pynvml")
        import pynvml as binding
    except ImportError as error:
        raise Failed(f"the package nvidia-ml-py is missing ({error})") from None
    except imports.InterruptedImportError:  # a failure would be kept, and answer that there are no devices
        raise
    except Exception as error:
        raise Failed(f"the package nvidia-ml-py does not work ({type(error).__name__}: {error})") from None
    _replace_lock(binding)
    try:
        binding.nvmlInit()
    except Exception as error:
        failure = _translated(binding, "nvmlInit", error)
        # Without a session nothing can be read, so "not supported" is a failure too.
        raise failure if isinstance(failure, Failed) else Failed(str(failure), _NOT_SUPPORTED) from None
    return binding


def _replace_lock(binding: Any) -> None:
    # The binding's own lock is not re-entrant: a query in a signal handler would wait for the query that it interrupts.
    binding.libLoadLock = threading.RLock()


def clear() -> None:
    """End the session, so that the next call initializes NVML again and lists the GPUs of that time."""
    global _session
    with _lock:
        session, _session = _session, None
        if isinstance(session, _Session):
            try:
                # NVML counts initializations, so others in this process keep theirs.
                session.binding.nvmlShutdown()
            except Exception:  # others shut it down, or the driver is gone: the next call reports it
                return


def gpus() -> tuple[PhysicalGpu, ...]:
    """All physical GPUs with their MIG instances, in PCI bus order; a GPU that fails is listed with its problem.

    Raises:
        Failed: if NVML is missing, does not start, or cannot count them.
    """
    expires, listed = _get_session().gpus
    if time.monotonic() > expires:
        with _lock:
            count: int = _required(lambda: call("nvmlDeviceGetCount"))
            listed = tuple(_gpu(index) for index in range(count))
            has_problem = any(gpu.problem for gpu in listed)
            _get_session().gpus = time.monotonic() + limits.RETRY_AFTER_S if has_problem else float("inf"), listed
    return listed


def _required(function: Callable[[], T]) -> T:
    """Call a function that discovery cannot do without: "not supported" is a failure too."""
    try:
        return function()
    except NotSupported as error:
        raise Failed(str(error), _NOT_SUPPORTED) from None


def _gpu(index: int) -> PhysicalGpu:
    handle, instances, problem = Handle(index), None, None
    try:
        instances = _instances(handle, index)
    except (NotSupported, Failed) as error:
        problem = str(error)
    uuid = read_or_none("nvmlDeviceGetUUID", handle)
    if uuid:
        handle.bind_uuid(uuid)
    return PhysicalGpu(index, handle, uuid, read_or_none("nvmlDeviceGetName", handle), instances, problem)


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
        handle = Handle(index, slot)
        try:
            uuid = text(call("nvmlDeviceGetUUID", handle))
        except Failed as error:
            if error.code != _NOT_FOUND:  # slots between used ones may be empty
                raise
            continue
        handle.bind_uuid(uuid)
        gi, ci = call("nvmlDeviceGetGpuInstanceId", handle), call("nvmlDeviceGetComputeInstanceId", handle)
        instances.append(Instance(uuid, gi, ci, handle))
    return tuple(instances)


def read_or_none(function: str, handle: Handle) -> Any:
    """The value of a function for a device, bytes as str; None if it fails."""
    try:
        return text(call(function, handle))
    except (NotSupported, Failed):
        return None


def pci_bus_id(handle: Handle) -> str | None:
    """A GPU's PCI bus id, such as "00000000:3B:00.0"; None if NVML does not report it."""
    try:
        return text(call("nvmlDeviceGetPciInfo", handle).busId)
    except (NotSupported, Failed):
        return None


def plain_bus(bus: str) -> str:
    """A PCI bus id from any library as NVML spells it: eight digits of domain, upper case."""
    return bus.rjust(len("00000000:00:00.0"), "0").upper()


def text(value: Any) -> Any:
    """The value, decoded if it is bytes, which older bindings return."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def cuda_version() -> tuple[int, int]:
    """The newest CUDA version that the installed driver supports; leaves the driver neither loaded nor initialized.

    Raises:
        Failed: if NVML does not report it; with the code of a missing library if the driver library is missing.
    """
    version = _get_session().cuda_version
    if version is None:
        read = newest(lambda _: call("nvmlSystemGetCudaDriverVersion_v2"), lambda _: call("nvmlSystemGetCudaDriverVersion"))
        encoded: int = _required(lambda: read(None))
        version = _get_session().cuda_version = encoded // 1000, encoded % 1000 // 10
    return version


def driver_version() -> str:
    """The driver's version.

    Raises:
        Failed: if NVML does not report it.
    """
    return text(_required(lambda: call("nvmlSystemGetDriverVersion")))


@process.reset_after_fork
def _reset_after_fork() -> None:
    # NVML's state does not survive a fork. A thread that is gone may have held either lock.
    global _lock, _session
    binding = sys.modules.get("pynvml")
    if binding is not None:
        _replace_lock(binding)
    _lock, _session = threading.RLock(), None
