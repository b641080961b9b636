"""README's table of what projects write today says what their code, and the one line beside it, answer."""

from __future__ import annotations

import pytest

from tests.support import ROOT
from tests.support.discovery import on_simulated_gpus
from tests.support.downstream_code import SITES, Site, row


@on_simulated_gpus
@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.project}: {site.purpose}")
def test_answers(site: Site) -> None:
    assert row(site) in (ROOT / "docs" / "porting.md").read_text(encoding="utf-8").splitlines()
