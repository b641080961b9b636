"""An optimizer's step between two backward passes of one graph raises as on the CPU, with every optimizer of torch.

GANs and PPO have this order of steps if they are written wrongly. Without the error, the second gradients are silently wrong.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from accelerator.simulation._settings.torch_versions import release
from tests.support import run, simulated_environment

OPTIMIZERS: dict[str, Any] = {
    name: value
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}
FOREACH, SINGLE, FUSED = {"foreach": True}, {"foreach": False}, {"fused": True}


def is_supported(optimizer: Any, options: dict[str, bool]) -> bool:
    """Return whether an optimizer has the options, and has them for CUDA: Adagrad is fused there from torch 2.12 on."""
    if not options.keys() <= inspect.signature(optimizer).parameters.keys():
        return False
    return not (options == FUSED and "cuda_unsupported=True" in inspect.getsource(optimizer))


CASES = [
    (name, options)
    for name, optimizer in OPTIMIZERS.items()
    for options in ({}, FOREACH, SINGLE, FUSED)
    if is_supported(optimizer, options)
]
COMPILED = [(name, options) for name, options in CASES if options == FOREACH]
MODIFIED = "modified by an inplace operation"


def train(name: str, options: dict[str, bool], device: str, compiles: bool = False) -> str:
    """Return the error of the second backward pass, or the gradient."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = OPTIMIZERS[name]([weight], lr=0.1, **momentum, **options)
    step: Any = torch.compile(optimizer.step) if compiles else optimizer.step
    outcome = ""
    for _ in range(3):  # the engine handles later calls
        generated = torch.ones(1, 2, device=device) @ weight @ weight
        losses = [generated.square().sum(), generated.sin().sum()]
        optimizer.zero_grad()
        losses[0].backward(retain_graph=True)
        if name == "SparseAdam":
            weight.grad = weight.grad.to_sparse()  # type: ignore[union-attr]
        step(lambda losses=losses: losses[0].detach()) if name == "LBFGS" else step()
        optimizer.zero_grad()
        try:
            losses[1].backward()
            outcome = json.dumps(weight.grad.flatten().tolist())  # type: ignore[union-attr]
        except RuntimeError as error:
            outcome = str(error).replace("torch.cuda.", "torch.")
    return outcome


def assert_equal_outcomes(name: str, options: dict[str, bool], compiles: bool = False) -> None:
    # By default the step on CUDA is the one over lists.
    is_list = not options and (name, FOREACH) in CASES
    expected, actual = train(name, FOREACH if is_list else options, "cpu", compiles), train(name, options, "cuda", compiles)
    # The kernels of fused optimizers count no changes, on CUDA as on the CPU.
    assert (MODIFIED in expected, MODIFIED in actual) == (options != FUSED,) * 2, (expected, actual)
    if compiles:  # the graphs of the two devices change parameters in other places
        return
    if MODIFIED in expected:
        assert actual == expected
    else:
        assert json.loads(actual) == pytest.approx(json.loads(expected), rel=1e-5)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_second_backward_raises_as_on_the_cpu(name: str, options: dict[str, bool]) -> None:
    assert_equal_outcomes(name, options)


@pytest.mark.slow
@pytest.mark.skipif(release(torch.__version__) < (2, 8), reason="torch 2.8 is the oldest whose compiled code is simulated")
@pytest.mark.parametrize(("name", "options"), COMPILED)
def test_compiled_step(name: str, options: dict[str, bool]) -> None:
    try:
        train(name, options, "cpu", compiles=True)
    except AssertionError as error:
        pytest.skip(f"torch does not compile this step, on the CPU either: {error}")
    assert_equal_outcomes(name, options, compiles=True)


@pytest.mark.slow
def test_under_race_detection() -> None:
    program = f"""
        import torch
        from {__name__} import CASES, assert_equal_outcomes
        for case in CASES:
            assert_equal_outcomes(*case)
        print(len(CASES))
    """
    assert run(program, simulated_environment(gpus=1, races="raise")) == f"{len(CASES)}\n"
