"""Names that the plug-in shares with the machines of a session and their servers."""

from __future__ import annotations

import pytest

WRONG_MARK: pytest.StashKey[str] = pytest.StashKey()
"""The error in a test's mark. The set-up of the test raises it."""

IN_PLACE: pytest.StashKey[bool] = pytest.StashKey()
"""Set if a test with a simulated machine runs in this process, for a debugger."""

SERVER_NAME = "accelerator-simulated-machine"
"""The name under which pytest registers the plug-in that turns it into a server."""
