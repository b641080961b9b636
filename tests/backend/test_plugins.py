"""A plug-in that registers the accelerator by its entry point. Queries discover its devices without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backend import announce, environment
from tests.queries.test_plugins import QUERIES
from tests.support.discovery import evaluate

pytestmark = [pytest.mark.xdist_group("hostacc"), pytest.mark.slow]

PLUGINS = {
    "registers": "",
    "prints": "import os\nprint('[1, 2]')\nos.write(1, b'\\n\\xff\\xfe\\n')\n",
    "initializes": "import torch\ntorch.ones(1, device='hostacc:1')\nassert torch.hostacc.is_initialized()\n",
}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_devices_are_discovered(plugin: str, tmp_path: Path) -> None:
    # torch calls the entry point at the end of its own import.
    body = "\n".join(f"    {line}" for line in ["import hostacc", *PLUGINS[plugin].splitlines()])
    (tmp_path / "hostacc_plugin.py").write_text(f"def load():\n{body}\n")
    # If the plug-in prints, the process must not import torch: its output would mix with the results.
    mode = "without torch" if plugin == "prints" else ""
    (first, second), extra, torch_free, message, _ = evaluate(
        QUERIES, announce(tmp_path, environment("bad-fork"), "hostacc_plugin"), mode
    )
    assert first == second
    assert first[:3] == [True, 2, None]
    names_and_sizes: list[Any] = [[device[2], device[5]] for device in first[3]]
    assert names_and_sizes == [["Host accelerator 0", 2**30], ["Host accelerator 1", 2**31]]
    assert extra[0][1] == 2**31
    assert extra[1:] == [2**30, True]  # total_memory(0), is_fork_safe()
    assert torch_free
    assert message is None


def test_importing_torch_changes_no_result(tmp_path: Path) -> None:
    code = """
    import accelerator as acc

    def discovered():
        return [acc.device_count(), acc.is_available(), list(acc.visible_devices_envs())]

    def devices():
        return [list(device) for device in acc.visible_devices()]

    before = [*discovered(), devices()]
    import torch
    after = discovered()
    acc.init()
    initialized = [*discovered(), devices()]
    print(json.dumps([before, after, initialized, torch.hostacc.is_initialized()]))
    """
    before, after, initialized, is_initialized = evaluate(code, announce(tmp_path, environment()))
    assert before == initialized
    assert before[:3] == after
    assert is_initialized
