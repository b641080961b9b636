"""Tests which devices the simulated CUDA driver enumerates: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and MIG."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import run, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import evaluate, needs_cuda_torch, uuid_of

pytestmark = [linux_only, pytest.mark.torch_free]

GIB = 2**30


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    """Return the UUIDs of four GPUs."""
    return [uuid_of(gpu, gpus=4) for gpu in range(4)]


class TestVisibleDevices:
    """The grammar of CUDA_VISIBLE_DEVICES on four GPUs. In the values, {n} is the UUID of GPU n."""

    # Without devices cuInit finds none (100). None stands for its error if a device is repeated (101, as measured).
    CASES: tuple[tuple[str | None, list[int] | None], ...] = (
        (None, [0, 1, 2, 3]),
        ("", []),
        (" ", []),
        ("0", [0]),
        ("1,3", [1, 3]),
        ("3,0,2,1", [3, 0, 2, 1]),
        ("2, 0", [2, 0]),
        ("\t2\n,\v0\f", [2, 0]),
        ("0,9,1", [0]),
        ("0,2,-1,1", [0, 2]),
        ("-1", []),
        ("-0", [0]),
        ("+0", [0]),
        ("+ 0", []),
        ("x", []),
        ("all", []),
        ("NoDevFiles", []),
        ("-", []),
        ("0,,1", [0]),
        ("1gpu,2", [1, 2]),
        ("1gpu2,2ampere", [1, 2]),
        ("01,1", None),
        ("0,0", None),
        ("0,1,0", None),
        ("0,9,9", [0]),
        ("0,-1,0", [0]),
        ("0,99999999999999999999,1", [0]),
        ("{0}", [0]),
        ("{3},{0}", [3, 0]),
        ("{2:.10}", [2]),
        ("GPU-", []),
        ("GPU-ffffffff", []),
        ("gpu-", []),
        (" {0}", []),
        ("{0}, {1}", [0]),
        ("{0},1", [0]),
        ("1,{0}", [1]),
        ("{0},{0}", None),
        ("{0},{0:.12}", None),
        ("{0},1,{0}", [0]),
        ("{1},GPU-ffffffff,{0}", [1]),
        ("{1},GPU-ffffffff,GPU-ffffffff", [1]),
    )

    @pytest.mark.parametrize(("value", "expected"), CASES)
    def test_grammar(self, uuids: list[str], value: str | None, expected: list[int] | None) -> None:
        variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value.format(*uuids)}
        program = "report(cuda.cuInit(0), [uuid(i) for i in range(max(count()[1], 0))])"
        wanted = [uuids[gpu].removeprefix("GPU-").replace("-", "") for gpu in expected or ()]
        assert evaluate(program, variables, gpus=4) == [101 if expected is None else 0 if wanted else 100, wanted]

    @pytest.mark.parametrize(("value", "error"), [("GPU-", 100), ("0,1,0", 0), ("0,0", 101)])
    def test_one_gpu(self, value: str, error: int) -> None:
        assert evaluate("report(cuda.cuInit(0))", {"CUDA_VISIBLE_DEVICES": value}, gpus=1) == [error]

    def test_prefix_shared_by_two_gpus_is_ambiguous(self) -> None:
        uuids = [uuid_of(gpu, gpus=17) for gpu in (0, 16)]
        shared = os.path.commonprefix(uuids)  # noqa: RUF071 - the common characters are wanted
        assert len(shared) == len("GPU-") + 1
        for value, error in ((shared, 100), (uuids[0][: len(shared) + 1], 0)):
            assert evaluate("report(cuda.cuInit(0))", {"CUDA_VISIBLE_DEVICES": value}, gpus=17) == [error]

    @pytest.mark.parametrize(
        ("order", "expected"),
        [(None, [2, 0, 3, 1]), ("FASTEST_FIRST", [2, 0, 3, 1]), ("PCI_BUS_ID", [0, 1, 2, 3]), ("pci_bus_id", [2, 0, 3, 1])],
    )
    def test_cuda_device_order(self, uuids: list[str], order: str | None, expected: list[int]) -> None:
        program = "cuda.cuInit(0); report(*[uuid(i) for i in range(4)])"
        variables = {"CUDA_DEVICE_ORDER": order} if order else {}
        listed = evaluate(program, variables, gpus=4, speed=[5, 1, 9, 5])
        assert listed == [uuids[gpu].removeprefix("GPU-").replace("-", "") for gpu in expected]

    def test_ordinals_follow_cudas_device_order(self, uuids: list[str]) -> None:
        listed = evaluate("cuda.cuInit(0); report(uuid(0))", {"CUDA_VISIBLE_DEVICES": "0"}, gpus=4, speed=[0, 0, 0, 1])
        assert listed == [uuids[3].removeprefix("GPU-").replace("-", "")]

    @needs_cuda_torch
    def test_torch_numbers_the_visible_devices(self) -> None:
        program = "import torch; print(torch.cuda.device_count(), *map(torch.cuda.get_device_name, range(2)))"
        environment = simulated_environment({"CUDA_VISIBLE_DEVICES": "2,0"}, gpus=3, name=["A", "B", "C"])
        assert run(program, environment).split() == ["2", "C", "A"]


class TestMig:
    PROGRAM = "report(cuda.cuInit(0), [uuid(i) for i in range(max(count()[1], 0))])"

    def hex_of(self, text: str) -> str:
        assert text.startswith(("MIG-", "GPU-"))
        return text[4:].replace("-", "")

    @pytest.mark.parametrize(
        ("mig", "visible", "expected"),
        [
            ([2, None], None, (0, 0)),
            ([None, 2], None, (1, 0)),
            ([None, 2], "0", (0, None)),
            ([None, 2], "1", (1, 0)),
            ([None, 2], "0,1", (1, 0)),
            ([0, None], None, (1, None)),
            ([0, None], "0,1", None),
            ([0, 0], None, None),
        ],
    )
    def test_at_most_one_mig_instance_is_visible(
        self, mig: list[int | None], visible: str | None, expected: tuple[int, int | None] | None
    ) -> None:
        variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        error, listed = evaluate(self.PROGRAM, variables, gpus=2, mig=mig)
        assert error == (0 if expected else 100)
        assert listed == ([self.hex_of(uuid_of(*expected, gpus=2, mig=mig))] if expected else [])

    def test_mig_instances_by_uuid(self) -> None:
        machine: dict[str, Any] = {"gpus": 2, "mig": 3}
        # NVML's index of the third instance of a GPU is 4.
        third = uuid_of(1, 4, **machine)
        for value in (third, third[:16], f"{third},{uuid_of(0, 0, **machine)}"):
            assert evaluate(self.PROGRAM, {"CUDA_VISIBLE_DEVICES": value}, **machine) == [0, [self.hex_of(third)]]

    def test_a_gpu_with_mig_is_its_first_instance(self) -> None:
        machine: dict[str, Any] = {"gpus": 2, "mig": 2}
        gpu, first, second = uuid_of(1, **machine), uuid_of(1, 0, **machine), uuid_of(1, 2, **machine)
        for text, expected in ((f"{gpu},{first}", [101, []]), (f"{gpu},{second}", [0, [self.hex_of(first)]])):
            assert evaluate(self.PROGRAM, {"CUDA_VISIBLE_DEVICES": text}, **machine) == expected

    def test_mig_instances_by_legacy_name(self) -> None:
        machine: dict[str, Any] = {"gpus": 2, "mig": 2}
        name = f"MIG-{uuid_of(1, **machine)}/2/0"
        second = self.hex_of(uuid_of(1, 2, **machine))
        assert evaluate(self.PROGRAM, {"CUDA_VISIBLE_DEVICES": name}, **machine) == [0, [second]]
        assert evaluate(self.PROGRAM, {"CUDA_VISIBLE_DEVICES": name[:-1]}, **machine) == [100, []]
        assert evaluate(self.PROGRAM, {"CUDA_VISIBLE_DEVICES": name.replace("/2/", "/3/")}, **machine) == [100, []]

    def test_mig_instance_has_an_eighth_of_the_memory(self) -> None:
        program = "cuda.cuInit(0); report(use(0), allocate(GIB), free(), allocate(1))".replace("GIB", str(GIB))
        assert evaluate(program, mig=2, memory="8GiB") == [0, 0, 0, 2]

    @needs_cuda_torch
    def test_torch_sees_one_instance(self) -> None:
        # Only one GPU, because torch 2.6 fails if NVML's number of GPUs differs from the number of devices.
        program = """
            import torch
            torch.cuda.init()
            properties = torch.cuda.get_device_properties(0)
            print(torch._C._cuda_getDeviceCount(), properties.total_memory, properties.name, properties.uuid, sep=";")
        """
        count, memory, name, uuid = run(program, simulated_environment(mig=2)).strip().split(";")
        assert (count, int(memory), name) == ("1", GIB, "Simulated GPU MIG 1g")
        assert f"MIG-{uuid}" == uuid_of(0, 0, mig=2)
