"""Launching: local ids, variables of visible devices, and communication backends. No test starts a process."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import accelerator as acc
from accelerator import launching
from accelerator._machine import discovery_cache, rocm, torch_build, vendors

pytestmark = pytest.mark.torch_free

U, V = "GPU-aaaa", "GPU-bbbb"
M, N = "MIG-aaaa", "MIG-bbbb"


@pytest.mark.parametrize(
    ("value", "ids", "expected"),
    [
        (None, [], ""),
        ("4,5", [1], "5"),
        ("4,5", [1, 0], "5,4"),
        ("4,5", ["0"], "4"),
        (" 4 ,5x,+6", [2, 1, 0], "6,5,4"),
        ("4,x,5", [0], "4"),
        (f"{U},{V}", [1], V),
        (f"{U},{V},0", [1, 0], f"{V},{U}"),
        (f"{M},{N}", [1], N),
        ("MIG-GPU-aaaa/1/0", [0], "MIG-GPU-aaaa/1/0"),
        (f"{M},{V}", [1, 0], f"{V},{M}"),
        (f"{M},GPU-AAAA", [0], M),  # a repeat only on a machine without MIG
        ("", [], ""),
    ],
)
def test_ids_index_the_entries_of_the_variable(value: str | None, ids: list[Any], expected: str) -> None:
    before = {"OTHER": "kept", **({} if value is None else {"CUDA_VISIBLE_DEVICES": value})}
    environment = dict(before)
    assert acc.set_visible_devices_envs(environment, ids) is environment
    assert environment == {"OTHER": "kept", "CUDA_VISIBLE_DEVICES": expected}
    # The ids of the new value start from 0 again.
    if ids:
        again = acc.set_visible_devices_envs(dict(environment), [0])
        assert again["CUDA_VISIBLE_DEVICES"] == expected.split(",")[0]


ODD_DIGITS = ("1_0", "+1", " 1 ", "01", "\u0661", "")


@pytest.mark.parametrize(
    ("value", "ids", "message"),
    [
        ("4,5", [2], "Device 2 is out of range: CUDA_VISIBLE_DEVICES='4,5' lists 2"),
        ("4,x,5", [1], "Device 1 is out of range: CUDA_VISIBLE_DEVICES='4,x,5' lists 1"),
        ("", [0], "Device 0 is out of range: CUDA_VISIBLE_DEVICES='' lists 0"),
        ("4,4", [0], "Device 0 is out of range: CUDA_VISIBLE_DEVICES='4,4' lists 0"),
        (f"{U},1", [1], "Device 1 is out of range: CUDA_VISIBLE_DEVICES='GPU-aaaa,1' lists 1"),
        (f"{U},GPU-AAAA", [0], "Device 0 is out of range: CUDA_VISIBLE_DEVICES='GPU-aaaa,GPU-AAAA' lists 0"),
        (None, [-1], "A local accelerator id must not be negative, but is -1"),
        (None, ["x"], "A local accelerator id must be the index of a device, not 'x'"),
        *((None, [digits], f"A local accelerator id must be the index of a device, not {digits!r}") for digits in ODD_DIGITS),
        (None, [1.5], "A local accelerator id must be the index of a device, not 1.5"),
        (None, [True], "A local accelerator id must be the index of a device, not True"),
        (None, [None], "A local accelerator id must be the index of a device, not None"),
        (None, [0, 0], "0,0 repeats a device, which would hide every device"),
        ("4,5", [0, 0], "4,4 repeats a device, which would hide every device"),
    ],
)
def test_wrong_ids_raise_and_change_nothing(value: str | None, ids: list[Any], message: str) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    before = dict(environment)
    with pytest.raises(ValueError) as error:
        acc.set_visible_devices_envs(environment, ids)
    assert str(error.value) == message
    assert environment == before


@pytest.mark.parametrize(
    ("environment", "ids", "message"),
    [
        (("CUDA_VISIBLE_DEVICES", "0"), [0], "An environment must be a mutable mapping, such as a dict, not tuple"),
        ({}, "01", "The ids must be a list of indices, not str"),
        ({}, b"01", "The ids must be a list of indices, not bytes"),
        ({}, 1, "The ids must be a list of indices, not int"),
    ],
)
def test_wrong_types_of_arguments(environment: Any, ids: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        acc.set_visible_devices_envs(environment, ids)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("", ()),
        ("0", ("0",)),
        ("10,2,0", ("0", "2", "10")),
        ("0,0", ("0",)),
        ("1.0,0,10.1", ("0", "1.0", "10.1")),
        ("1.10,1.9", ("1.9", "1.10")),
        *((wrong, None) for wrong in ("x", "0,", ",0", "0.", ".1", "-1", "0, 1", "0.1.2", "0.1x", "x0.1", "0,1\n")),
    ],
)
@pytest.mark.parametrize("whole_cards", [False, True])
def test_tiles_of_affinity_masks(mask: str, expected: tuple[str, ...] | None, whole_cards: bool) -> None:
    if whole_cards and mask == "1.10,1.9":
        expected = ("1.9,1.10",)
    assert launching._tiles(mask, whole_cards=whole_cards) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("0.0,0.1,1.1", ("0.0,0.1", "1.1")),
        ("10.1,2.1,10.0", ("2.1", "10.0,10.1")),
        ("1,0.1", ("0.1", "1")),
    ],
)
def test_whole_cards_group_the_tiles_of_a_card(mask: str, expected: tuple[str, ...]) -> None:
    assert launching._tiles(mask, whole_cards=True) == expected


def use_row(device_type: str, monkeypatch: pytest.MonkeyPatch, count: int = 0) -> str:
    """Pretend that torch is built for an accelerator with ``count`` devices; return the variable that hides them."""
    row = vendors.get_row(device_type)
    monkeypatch.setattr(launching, "_row", lambda: row)
    monkeypatch.setattr(discovery_cache, "current", lambda: SimpleNamespace(count=count))
    for name in row.visible_devices:
        monkeypatch.delenv(name, raising=False)
    return row.visible_devices[0]


@pytest.mark.parametrize(
    ("device_type", "variables", "ids", "expected"),
    [
        ("npu", {}, [2, 0], "2,0"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,12"}, [1], "12"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": ""}, [], ""),
        ("xpu", {"ZE_AFFINITY_MASK": "1.1,0"}, [0, 1], "0,1.1"),
        ("xpu", {"ZE_AFFINITY_MASK": "0.0,0.1,1.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [0], "0.0,0.1"),
        ("xpu", {"ZE_AFFINITY_MASK": "0.0,0.1,1.1", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, [0], "0.0"),
    ],
)
def test_ids_in_variables_of_other_vendors(
    device_type: str, variables: dict[str, str], ids: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = use_row(device_type, monkeypatch)
    assert acc.set_visible_devices_envs(dict(variables), ids)[variable] == expected


@pytest.mark.parametrize(
    ("device_type", "variables", "ids", "message"),
    [
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,"}, [0], "ASCEND_RT_VISIBLE_DEVICES='4,' is not a list of devices; unset it"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "x"}, [0], "ASCEND_RT_VISIBLE_DEVICES='x' is not a list of devices; unset it"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": ""}, [0], "Device 0 is out of range: ASCEND_RT_VISIBLE_DEVICES='' lists 0"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4"}, [1], "Device 1 is out of range: ASCEND_RT_VISIBLE_DEVICES='4' lists 1"),
        ("npu", {}, [3], "Device 3 is out of range: the number of visible devices is 3"),
        ("xpu", {"ZE_AFFINITY_MASK": "0.1.2"}, [0], "ZE_AFFINITY_MASK='0.1.2' is not a list of devices; unset it"),
    ],
)
def test_wrong_ids_in_variables_of_other_vendors(
    device_type: str, variables: dict[str, str], ids: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_row(device_type, monkeypatch, count=3)
    before = dict(variables)
    with pytest.raises(ValueError) as error:
        acc.set_visible_devices_envs(variables, ids)
    assert str(error.value) == message
    assert variables == before


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_rocm_ids_index_either_visible_devices_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = vendors.get_row("cuda", is_hip=True)
    monkeypatch.setattr(launching, "_row", lambda: row)
    monkeypatch.setattr(discovery_cache, "backend", lambda: rocm)
    assert acc.set_visible_devices_envs({variable: "4,5"}, [1])["HIP_VISIBLE_DEVICES"] == "5"
    with pytest.raises(ValueError) as error:
        acc.set_visible_devices_envs({variable: "4,5"}, [2])
    assert str(error.value) == f"Device 2 is out of range: {variable}='4,5' lists 2"


def test_ids_are_not_checked_against_a_limited_count(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = use_row("npu", monkeypatch, count=3)
    monkeypatch.setenv(variable, "0,1,2")
    assert acc.set_visible_devices_envs({}, [7])[variable] == "7"


def test_variable_that_is_no_str_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = {use_row("npu", monkeypatch): 1}
    with pytest.raises(TypeError, match="The variable ASCEND_RT_VISIBLE_DEVICES must be a str, not int"):
        acc.set_visible_devices_envs(wrong, [0])


def test_accelerator_without_visible_devices_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_row", lambda: vendors.get_row("mtia"))
    assert acc.visible_devices_envs() == ()
    with pytest.raises(RuntimeError) as error:
        acc.set_visible_devices_envs({}, [0])
    assert str(error.value) == "No variable is known that decides which mtia devices a process sees"


@pytest.mark.parametrize(("accelerator_type", "is_rocm"), [(None, False), ("cuda", False), ("cuda", True), ("xpu", False)])
def test_vendor_row_of_this_torch(accelerator_type: str | None, is_rocm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_cache, "current", lambda: SimpleNamespace(accelerator_type=accelerator_type))
    monkeypatch.setattr(torch_build, "is_rocm", lambda: is_rocm)
    assert launching._row() is vendors.get_row(accelerator_type or "cuda", is_hip=is_rocm)


@pytest.mark.parametrize(("count", "expected"), [(0, ()), (1, ("NCCL",))])
def test_no_variable_is_exported_without_devices(
    count: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_row("cuda", monkeypatch, count)
    assert acc.export_envs() == expected


def use_device_type(device_type: str, monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    monkeypatch.setattr(discovery_cache, "current", lambda: SimpleNamespace(device_type=device_type))
    distributed = SimpleNamespace(Backend=SimpleNamespace(default_device_backend_map=backends))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_type", "platform", "expected"),
    [
        ("cuda", "linux", "nccl"),
        ("cuda", "win32", "gloo"),
        ("cpu", "linux", "gloo"),
        ("xpu", "win32", "xccl"),
        ("unheard_of", "linux", "gloo"),
    ],
)
def test_backend_names(device_type: str, platform: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    use_device_type(device_type, monkeypatch)
    assert acc.communication_backend_name() == expected
    for module in (SimpleNamespace(), SimpleNamespace(Backend=SimpleNamespace())):
        # torch.distributed is incomplete while it is imported, and in a torch that is built without it.
        monkeypatch.setitem(sys.modules, "torch.distributed", module)  # type: ignore[arg-type]
        assert acc.communication_backend_name() == expected
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert acc.communication_backend_name() == expected


@pytest.mark.parametrize(("registered", "expected"), [("theirs", "theirs"), ("fake", "hccl")])
def test_backend_registered_by_a_plugin(registered: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_type("npu", monkeypatch, npu=registered, cuda="nccl")
    assert acc.communication_backend_name() == expected


@pytest.mark.parametrize("name", ["gloo", "xccl"])
def test_other_backends_have_no_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "communication_backend_name", lambda: name)
    nccl = SimpleNamespace(version=lambda: (2, 30, 1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(nccl=nccl)))  # type: ignore[arg-type]
    assert acc.communication_backend_version() is None


@pytest.mark.parametrize("expected", [(2, 30, 1), None])
def test_nccl_version_of_imported_torch(expected: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "communication_backend_name", lambda: "nccl")
    nccl = SimpleNamespace() if expected is None else SimpleNamespace(version=lambda: expected)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(nccl=nccl)))  # type: ignore[arg-type]
    assert acc.communication_backend_version() == expected


@pytest.mark.parametrize(
    ("cuda", "package", "installed", "expected"),
    [
        ("13.2", "nvidia-nccl-cu13", "2.30.4.1", (2, 30, 4)),
        ("12.4", "nvidia-nccl-cu12", "2.21.5", (2, 21, 5)),
        ("12.4.1", "nvidia-nccl-cu12", "2.21.5", (2, 21, 5)),
        ("12.4", "nvidia-nccl-cu12", "2.21.post1", None),
        ("12.4", "nvidia-nccl-cu12", None, None),
        (None, "", "2.30.4", None),
        ("no torch", "", "2.30.4", None),
    ],
)
def test_nccl_version_of_installed_package(
    cuda: str | None, package: str, installed: str | None, expected: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == package
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(launching, "communication_backend_name", lambda: "nccl")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_build, "read", lambda: None if cuda == "no torch" else SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert acc.communication_backend_version() == expected
