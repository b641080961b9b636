"""Tests with the mark ``simulated_machine(faults=...)``: each has the faults from their beginning."""

from __future__ import annotations

import pytest

from tests.support.discovery import on_simulated_gpus
from tests.support.pytest_suite import Suite


@pytest.mark.slow
@on_simulated_gpus
def test_each_test_has_its_faults_and_unfired_ones_are_warnings(suite: Suite) -> None:
    suite.write("""
        import pytest
        import torch

        pytestmark = pytest.mark.simulated_machine(gpus=1, faults=["xid=94,after_ops=2", "hang,after_ops=5000"])

        @pytest.mark.parametrize("number", range(2))
        def test_fails_at_the_third_op(number):
            x = torch.ones(4, device="cuda")
            x.add_(1)
            x.add_(1)
            with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
                x.add_(1)

        def test_uses_no_gpu():
            pass

        @pytest.mark.simulated_machine(gpus=1, faults=["xid=7"])
        def test_wrong_words():
            pass
    """)
    done = suite.check({"passed": 3, "error": 1})
    assert "simulated_machine: fault 'xid=7': Xid 7 is not simulated" in done.stdout
    assert "the fault hang,after_ops=5000 never fired, after 3 ops" in done.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_a_test_sees_its_machine_after_its_module_has_asked_nvml(suite: Suite) -> None:
    suite.write("""
        import pynvml
        import pytest
        import torch
        from accelerator.simulation import is_simulated

        pytestmark = pytest.mark.simulated_machine(gpus=1, faults=["xid=48,after_ops=1"])

        def errors():
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            arguments = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            return pynvml.nvmlDeviceGetTotalEccErrors(handle, *arguments)

        if is_simulated():  # the session itself is not
            assert errors() == 0

        @pytest.mark.parametrize("number", range(2))
        def test_errors_are_counted(number):
            assert errors() == 0
            x = torch.ones(4, device="cuda")
            x.add_(1)
            with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
                x.add_(1)
            assert errors() == 1
    """)
    suite.check({"passed": 2})
