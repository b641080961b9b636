"""Device arguments: the index of each valid one, and the exact error of each invalid one. No test starts a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerator._machine import device_argument

pytestmark = pytest.mark.torch_free


class Index:
    def __index__(self) -> int:
        return 5


def device(device_type: Any, index: Any) -> Any:
    return SimpleNamespace(type=device_type, index=index)


# torch.device's types, and one that a plug-in could register.
KNOWN = "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia privateuseone"
TYPES = [*KNOWN.split(), "a_plugin"]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (None, None),
        (0, 0),
        (-1, -1),
        (2**70, 2**70),
        (Index(), 5),
        ("cuda", None),
        ("cuda:0", 0),
        ("cuda:10", 10),
        (device("cuda", None), None),
        (device("cuda", 3), 3),
        (device("cuda", -1), -1),
    ],
)
def test_index_of_valid_device_argument(argument: Any, expected: int | None) -> None:
    assert device_argument.index(argument, "cuda") == expected


NO_DEVICE = "{!r} is no device: expected a device type with or without an index, such as 'cuda:0'"
NO_TYPE = "Expected a device as None, an int, a str or a torch.device, but got {} ({})"


NO_DEVICES = ["", "0", "bogus", "cuda:", "cuda:01", "cuda:-1", "cuda:1.5", "CUDA", " cuda", "cuda:0\n", "cuda:\u0661"]


@pytest.mark.parametrize("text", NO_DEVICES)
def test_invalid_device_string_raises(text: str) -> None:
    with pytest.raises(RuntimeError) as error:
        device_argument.index(text, "cuda")
    assert str(error.value) == NO_DEVICE.format(text)


@pytest.mark.parametrize("device_type", TYPES)
def test_other_device_type_raises(device_type: str) -> None:
    text, other = f"{device_type}:1", "xpu" if device_type == "cuda" else "cuda"
    assert device_argument.index(text, device_type) == 1
    mismatch = f"{device_type} doesn't match the current accelerator {other}."
    with pytest.raises(ValueError) as error:
        device_argument.index(device(device_type, 1), other)
    assert str(error.value) == mismatch
    with pytest.raises(RuntimeError if device_type == "a_plugin" else ValueError) as error:
        device_argument.index(text, other)
    assert str(error.value) == (
        NO_DEVICE.replace("cuda:0", f"{other}:0").format(text) if device_type == "a_plugin" else mismatch
    )


@pytest.mark.parametrize(
    "argument",
    [
        True,
        1.5,
        b"cuda",
        [0],
        SimpleNamespace(index=1),
        device("cuda", "1"),
        device(3, 1),
        device(None, None),
    ],
)
def test_argument_of_wrong_type_raises(argument: Any) -> None:
    with pytest.raises(TypeError) as error:
        device_argument.index(argument, "cuda")
    assert str(error.value) == NO_TYPE.format(type(argument).__name__, repr(argument))


def test_device_object_without_index_has_index_minus_1() -> None:
    assert device_argument.index(SimpleNamespace(type="cuda"), "cuda") == -1


@pytest.mark.parametrize("argument", [None, "cuda", device("cuda", None)])
def test_missing_index_raises_if_required(argument: Any) -> None:
    assert device_argument.index(argument, "cuda") is None
    with pytest.raises(ValueError) as error:
        device_argument.index(argument, "cuda", optional=False)
    assert str(error.value) == f"Expected a device with an index, such as 'cuda:0', or an integer, but got {argument!r}"
    assert device_argument.index("cuda:0", "cuda", optional=False) == 0


@pytest.mark.parametrize(
    ("index", "count", "accelerator", "expected"),
    [(0, 1, "cuda", 0), (1, 2, "cuda", 1), (0, 0, "cpu", 0), (0, 1, "cpu", 0), (7, 1, "cpu", 0), (7, 0, "cpu", 0)],
)
def test_index_in_range_is_returned(index: int, count: int, accelerator: str, expected: int) -> None:
    assert device_argument.check(index, count, accelerator) == expected


@pytest.mark.parametrize(
    ("index", "count", "accelerator", "visible"),
    [
        (2, 2, "cuda", "2 cuda devices are visible"),
        (-1, 2, "cuda", "2 cuda devices are visible"),
        (1, 1, "cuda", "1 cuda device is visible"),
        (0, 0, "cuda", "0 cuda devices are visible"),
        (-1, 1, "cpu", "1 cpu device is visible"),
    ],
)
def test_index_out_of_range_raises(index: int, count: int, accelerator: str, visible: str) -> None:
    with pytest.raises(ValueError) as error:
        device_argument.check(index, count, accelerator)
    assert str(error.value) == f"Device index {index} is out of range: {visible}"
