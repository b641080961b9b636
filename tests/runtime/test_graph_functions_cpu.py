"""Graphs under the CPU fallback: their functions raise an error that names the reason."""

from __future__ import annotations

import pytest

import accelerator as acc


@pytest.mark.parametrize(
    "call",
    [
        acc.create_graph,
        acc.Graph,
        acc.graph_pool_handle,
        lambda: acc.capture_to_graph(None),
        lambda: acc.replay_graph(None),
        lambda: acc.make_graphed_callables(lambda x: x, ()),
    ],
)
def test_graph_functions_raise(call: object) -> None:
    with pytest.raises(RuntimeError, match="need an accelerator"):
        call()  # type: ignore[operator]


def test_no_stream_is_capturing() -> None:
    assert acc.is_current_stream_capturing() is False
