"""Which tensors of a rehearsal have values, what the host gets of the others, and where that mattered.

Ops compute only if that is cheap, so most device memory holds no values. This module keeps the state of each storage by its
address. A value that is not known matters where it decides a shape, or where the host reads it: `note` keeps the line of the
program. Whether a read steers the program cannot be seen in general. These reads are not noted:

- Questions whether numbers are finite (`isfinite`, comparisons with infinity or of a tensor with itself, those of GradScaler).
  The rehearsal assumes that all numbers are, so the answers count as known.
- ``item()`` and ``tolist()`` of floats, and ``item()`` of the number of true elements of a mask. They return a subclass of
  float or int, which is noted once it is compared, rounded to an integer or used as a condition, but not if it is printed or
  added up.
- Comparisons with zero or less of floats that cannot be negative, such as a norm: every value gives one answer.
- Copies to the host. They are noted once a number of the copy is read, as above, or NumPy gets more than one number of it.
- What prints a tensor, and what ``torch.distributions`` validates: all is valid that is not known.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Any

import torch

from ..._settings import LIMITS
from ..ops import bindings

UNKNOWN, NOT_NEGATIVE, COUNT, KNOWN = 0, 1, 2, 3
"""The states of memory, the worse the lower. COUNT is an unknown number of true elements of a mask.

NOT_NEGATIVE are other unknown numbers that every program would find to be zero or more, such as a norm.
"""
EMPTY = -1
"""The state of memory that no op has written. A kernel that is not torch's may have. It is read as UNKNOWN."""

_Tensor = torch.Tensor
_MOST_BYTES = LIMITS["COPY"]  # of memory that has values, but for masks of any size
_ABSENT = UNKNOWN, 0
_memory: dict[int, tuple[int, int]] = {}  # the state and the size of device memory, by the address of its storage
_host_copies: dict[int, tuple[int, int]] = {}  # storages on the host by address: a weak reference, and the state
_MOST_HOST_COPIES = 4096
_at_first_copy: list[Callable[[], None]] = []
_places: dict[tuple[str, str | None], int] = {}
_thread = threading.local()
_libraries: list[Any] = []  # the overrides end with their library

_LIBRARIES = tuple(
    os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)
_INSTALLED = os.sep + "lib" + os.sep + "python"


# ---- States. ----


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage. If the storage had a Python object, autograd would add gradients elsewhere."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize


def allocated(tensor: torch.Tensor, state: int) -> None:
    """Set the state of the memory of a new tensor."""
    nbytes = tensor.nbytes
    if state or nbytes <= _MOST_BYTES:
        _memory[tensor.data_ptr()] = state, nbytes
    else:
        _memory.pop(tensor.data_ptr(), None)


def written(tensor: torch.Tensor, state: int) -> None:
    """Note that an op wrote values of a state into a tensor, which may be a part of its storage."""
    if not tensor.is_cuda or not tensor.numel():
        return
    address = _address(tensor)
    before, nbytes = _memory.get(address, (UNKNOWN, None))
    if nbytes is None:
        return
    if (state == NOT_NEGATIVE) is not (before == NOT_NEGATIVE) and before != EMPTY and tensor.nbytes < nbytes:
        state = UNKNOWN  # of values that are known, some may be negative
    if state == UNKNOWN or before == EMPTY or before > state or tensor.nbytes >= nbytes:
        _memory[address] = state, nbytes


def state_of(values: Iterable[Any]) -> int:
    """Return the state of the tensors among the arguments of an op: that of the worst."""
    state = KNOWN
    for value in values:
        if isinstance(value, _Tensor):
            if value.is_cuda:
                if value.layout is not torch.strided:
                    return UNKNOWN
                if value.numel():
                    state = min(state, max(_memory.get(_address(value), _ABSENT)[0], UNKNOWN))
            elif _host_copies:
                state = min(state, _state_on_host(value))
        elif type(value) is list or type(value) is tuple:
            state = min(state, state_of(value))
        if state == UNKNOWN:
            return UNKNOWN
    return state


def _state_on_host(tensor: torch.Tensor) -> int:
    if not _host_copies or tensor.layout is not torch.strided or not tensor.is_cpu:
        return KNOWN
    copy = _host_copies.get(tensor.untyped_storage().data_ptr())
    return KNOWN if copy is None or bindings.is_expired(copy[0]) else copy[1]


def call_at_first_copy(function: Callable[[], None]) -> None:
    """Call a function when values that are not known are first copied to the host."""
    _at_first_copy.append(function)


def copied_to_host(tensor: torch.Tensor, state: int) -> None:
    """Note the state of values that were copied into a tensor on the host."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    earlier = _host_copies.pop(address, None)
    if earlier is not None:
        bindings.free_weak_reference(earlier[0])
    if state == KNOWN:
        return
    op: str | None = getattr(_thread, "library_op", None)
    if op is not None:
        note(op)
    while _at_first_copy:
        _at_first_copy.pop()()
    if len(_host_copies) >= _MOST_HOST_COPIES:
        for each, (reference, _) in [*_host_copies.items()]:
            if bindings.is_expired(reference):
                bindings.free_weak_reference(reference)
                del _host_copies[each]
    _host_copies[address] = bindings.weak_reference(storage), state


# ---- Places. ----


def note(op: str) -> None:
    """Note that a value that is not known decides a shape, or is read by the host."""
    if getattr(_thread, "is_quiet", False):
        return
    place = op, program_line(frames_from(sys._getframe(1)))
    _places[place] = _places.get(place, 0) + 1


def noted() -> Iterable[tuple[str, str | None, int]]:
    """Return for each place the op, the line of the program, and how often it was reached."""
    return [(op, line, count) for (op, line), count in [*_places.items()]]


def forget_noted() -> None:
    """Forget the places, in a forked child."""
    _places.clear()


def frames_from(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those that called it."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def program_line(frames: list[FrameType]) -> str | None:
    """Return the innermost line outside of installed packages; if there is none, outside of torch and the simulation.

    If the frames are those of a backward, in a thread of torch, the program waits in its own.
    """
    stacks = [frames]
    main = threading.main_thread().ident
    if main is not None and main != threading.get_ident():  # a frame that refers to itself would keep its tensors alive
        stacks.append(frames_from(sys._current_frames().get(main)))
    for stack in stacks:
        for is_program in (_is_program, is_outside_of_torch):
            for frame in stack:
                if is_program(frame.f_code.co_filename):
                    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return None


def _is_program(name: str) -> bool:
    return not name.startswith((*_LIBRARIES, "<")) and _INSTALLED not in name


def is_outside_of_torch(name: str) -> bool:
    """Return whether a file is neither torch's nor the simulation's nor Python's machinery."""
    return not name.startswith((*_LIBRARIES, "<frozen")) and not name.endswith("threading.py")


# ---- Reads by the host. ----


class _UnknownNumber:
    """What the subclasses of float and int have in common: they remember that their value is not known."""

    is_not_negative = False

    def __reduce__(self) -> Any:
        plain: Any = type(self).__mro__[2]
        return plain, (plain(self),)


def _is_finite_check(first: Any, second: Any) -> bool:
    return first is second or (isinstance(second, float) and math.isinf(second))


_KEEP_SIGN = ("add", "radd", "mul", "rmul", "truediv", "rtruediv", "pos")
_DECIDED_BY_SIGN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("lt", "ge"), lambda other: other <= 0),
    **dict.fromkeys(("le", "gt", "eq", "ne"), lambda other: other < 0),
}


def is_decided_by_sign(comparison: str, other: Any) -> bool:
    """Return whether all numbers that are not negative give one answer in a comparison, such as ``lt``, with a number."""
    decides = _DECIDED_BY_SIGN.get(comparison)
    return decides is not None and type(other) in (int, float) and decides(other)


def _is_result_not_negative(operator: str, self: Any, others: tuple[Any, ...]) -> bool:
    if operator == "abs":
        return True
    if operator == "pow":
        numbers: tuple[Any, ...] = (self,)
    elif operator == "rpow":
        numbers = others[:1]
    else:
        numbers = (self, *others) if operator in _KEEP_SIGN else ()
    return bool(numbers) and all(n.is_not_negative if isinstance(n, _UnknownNumber) else n >= 0 for n in numbers)


def _unknown_number(plain: type) -> type:
    """Return a subclass of float or int whose arithmetic gives such numbers, and whose comparisons are noted."""

    def arithmetic(name: str) -> Callable[..., Any]:
        compute = getattr(plain, name)

        def run(self: Any, *others: Any) -> Any:
            result = compute(self, *others)
            if result is NotImplemented:
                return result
            return _unknown(result, _is_result_not_negative(name.strip("_"), self, others))

        return run

    def comparison(name: str) -> Callable[..., Any]:
        compare = getattr(plain, name)

        def run(self: Any, other: Any) -> Any:
            result = compare(self, other)
            has_one_answer = _is_finite_check(self, other) or (
                self.is_not_negative and is_decided_by_sign(name.strip("_"), other)
            )
            if result is not NotImplemented and not has_one_answer:
                note("aten::item")
            return result

        return run

    def conversion(name: str) -> Callable[..., Any]:
        convert = getattr(plain, name)

        def run(self: Any, *digits: Any) -> Any:
            if digits and digits[0] is not None:
                return _unknown(convert(self, *digits))  # round(x, 2) is a float
            note("aten::item")
            return convert(self)

        return run

    operators = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
    names = [f"__{prefix}{operator}__" for operator in operators for prefix in ("", "r")]
    methods: dict[str, Any] = {name: arithmetic(name) for name in (*names, "__neg__", "__pos__", "__abs__")}
    methods |= {f"__{name}__": comparison(f"__{name}__") for name in ("lt", "le", "gt", "ge", "eq", "ne")}
    methods |= {f"__{name}__": conversion(f"__{name}__") for name in ("bool", "int", "trunc", "round", "floor", "ceil", "index")
                if hasattr(plain, f"__{name}__")}  # fmt: skip
    methods["__hash__"] = plain.__hash__
    return type(f"Unknown{plain.__name__.title()}", (_UnknownNumber, plain), methods)


_UnknownFloat, _UnknownInt = _unknown_number(float), _unknown_number(int)


def _unknown(value: Any, is_not_negative: bool = False) -> Any:
    """Return a number, or a list of them, that remembers that its value is not known."""
    kind = type(value)
    if kind is float or kind is int:
        number: Any = (_UnknownFloat if kind is float else _UnknownInt)(value)
        if is_not_negative:
            number.is_not_negative = True
        return number
    return kind(_unknown(item, is_not_negative) for item in value) if kind in (list, tuple) else value


class ObjectPickler(pickle.Pickler):
    """Pickles what ranks of a rehearsal send each other: numbers that are not known stay so. Other pickles make plain ones."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _UnknownNumber):
            return NotImplemented
        plain: Any = type(obj).__mro__[2]
        return _unknown, (plain.__add__(obj, 0),)


@contextlib.contextmanager
def _set(name: str, value: Any) -> Generator[None]:
    """Set an attribute of this thread."""
    before = getattr(_thread, name, None)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, before)


def noting_copies(op: str) -> contextlib.AbstractContextManager[None]:
    """Note copies to the host in this thread: an op of another library makes them, and reads them without calling torch."""
    return _set("library_op", op)


def validating() -> contextlib.AbstractContextManager[None]:
    """Let all conditions of this thread be true that are not known."""
    return _set("is_validating", True)


def _reads_scalar(tensor: torch.Tensor) -> bool:
    """Note the read of a number, unless its reader remembers that it is not known. Return whether it is taken to be true."""
    state = state_of((tensor,))
    if state == KNOWN:
        return False
    if getattr(_thread, "is_validating", False) and tensor.dtype is torch.bool:
        return True
    reader = getattr(_thread, "reader", None)
    if reader is not None and (tensor.is_floating_point() or state == COUNT):
        reader.append(state)
    else:
        note("aten::item")
    return False


def install() -> None:
    """Replace the functions by which the host reads numbers, and follow memory that torch allocates when it resizes."""
    texts: Any = sys.modules["torch._tensor_str"]
    texts._str = without_notes(texts._str)
    tensor: Any = _Tensor
    tensor.item = _remembering(tensor.item)
    tensor.tolist = _noting_list(tensor.tolist)
    tensor.numpy = _noting_array(tensor.numpy)
    library = bindings.make_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    below = bindings.keys_after(bindings.DispatchKey.BackendSelect)
    operator: Any = torch.ops.aten._local_scalar_dense.default

    def read_and_note(keyset: Any, tensor: torch.Tensor) -> Any:
        return _reads_scalar(tensor) or operator.redispatch(keyset & below, tensor)

    # The dispatcher visits this key for tensors of every device, before the key of the device.
    library.impl("aten::_local_scalar_dense", bindings.DispatchKey.BackendSelect, read_and_note, True)
    resize: Any = torch.ops.aten.resize_.default

    def resize_and_follow(keyset: Any, self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        before = self.data_ptr() if self.is_cuda else 0
        resize.redispatch(keyset & below, self, *arguments, **options)
        if self.is_cuda and self.data_ptr() != before:
            allocated(self, EMPTY if self.nbytes <= _MOST_BYTES else UNKNOWN)
        return self

    storage: Any = torch.UntypedStorage
    resize_storage = storage.resize_

    @functools.wraps(resize_storage)
    def resize_storage_and_forget(self: torch.UntypedStorage, size: int) -> Any:
        result = resize_storage(self, size)
        if self.device.type == "cuda":
            _memory.pop(self.data_ptr(), None)
        return result

    storage.resize_ = resize_storage_and_forget
    library.impl("aten::resize_", bindings.DispatchKey.BackendSelect, resize_and_follow, True)


def without_notes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose reads by the host are not noted."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with _set("is_quiet", True):
            return function(*arguments, **options)

    return run


def _remembering(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def item(self: torch.Tensor) -> Any:
        reader: list[int] = []
        with _set("reader", reader):
            if self.dtype is torch.uint64 and type(self) is torch.Tensor:
                # torch 2.6 and 2.7 pass no number from 2^63 on to a function of Python, such as the one that notes the read.
                value = read(self.view(torch.int64)) % 2**64
            else:
                value = read(self)
        return _unknown(value, reader[0] != UNKNOWN) if reader else value

    return item


def _noting_list(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def tolist(self: torch.Tensor) -> Any:
        state = KNOWN if self.layout is not torch.strided else state_of((self,))
        values = read(self)
        if state == KNOWN:
            return values
        if self.is_floating_point():
            return _unknown(values, state != UNKNOWN)
        note("aten::tolist")
        return values

    return tolist


def _noting_array(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def numpy(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        array = read(self, *arguments, **options)
        if state_of((self,)) != KNOWN and (self.numel() > 1 or not self.is_floating_point()):
            note("numpy")
        return array

    return numpy
