"""The distribution's long description: README without pictures and relative links, which a package index cannot show.

hatchling calls it, as ``pyproject.toml`` says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[.*\]\(.*\)\n\n", re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\[([^]\n]+)\]\((?!https://)([^)\n]+)\)")


class LongDescription(MetadataHookInterface):
    """Sets the field "readme"."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field, before the distribution's metadata is written."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_targets(text)}


def without_relative_targets(text: str) -> str:
    """Remove pictures, and replace each relative link by its text and its target."""
    return _RELATIVE_LINK.sub(_name, _PICTURE.sub("", text))


def _name(link: re.Match[str]) -> str:
    text, target = link.groups()
    return target if text == target else f"{text} ({target})"
