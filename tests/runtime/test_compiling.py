"""The backend for torch.compile that a program can set and read. No test needs an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import accelerator as acc
from tests.support import plain_environment, run


@pytest.fixture(autouse=True)
def _restore_backend() -> Iterator[None]:
    before = acc.get_compile_backend()
    yield
    acc.set_compile_backend(before)


def test_inductor_is_the_default() -> None:
    assert acc.get_compile_backend() == "inductor"


@pytest.mark.parametrize("name", ["eager", "aot_eager", "inductor", "eager_debug"])
def test_known_backend_names_are_accepted(name: str) -> None:
    acc.set_compile_backend(name)
    assert acc.get_compile_backend() == name


def test_callable_backend_compiles() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(module)
        return module.forward

    acc.set_compile_backend(backend)
    assert acc.get_compile_backend() is backend
    assert torch.compile(lambda x: x + 1, backend=acc.get_compile_backend())(torch.ones(1)).item() == 2
    assert len(graphs) == 1


def test_unknown_backend_raises_and_lists_known_backends() -> None:
    with pytest.raises(ValueError, match=r"'no_such_backend'.*inductor"):
        acc.set_compile_backend("no_such_backend")
    assert acc.get_compile_backend() == "inductor"


@pytest.mark.parametrize("wrong", [None, 3, ["inductor"]])
def test_backend_of_wrong_type_raises(wrong: object) -> None:
    with pytest.raises(TypeError, match="must be a str or a callable"):
        acc.set_compile_backend(wrong)  # type: ignore[arg-type]


def test_setting_common_backends_does_not_import_dynamo() -> None:
    run(
        """
        import torch
        import sys
        import accelerator as acc
        for name in ("eager", "aot_eager", "inductor", print):
            acc.set_compile_backend(name)
        assert "torch._dynamo" not in sys.modules
        """,
        plain_environment(),
    )
