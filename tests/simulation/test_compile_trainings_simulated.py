"""Trainings of compiled models on a simulated GPU: their losses are those of eager execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulation import trainings

if torch.__version__ < (2, 8):
    pytest.skip("torch 2.8 is the oldest whose compiled code is simulated", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize(("autocast", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_a_language_model_with_reduced_overhead(autocast: torch.dtype | None, tolerance: float) -> None:
    def losses(**options: Any) -> list[float]:
        torch._dynamo.reset()
        return trainings.train(trainings.Language, trainings.tokens(), "cuda", autocast=autocast, **options)

    compiled = losses(wrap=lambda model: torch.compile(model, mode="reduce-overhead"))
    trainings.assert_same_losses(compiled, losses(), tolerance)
