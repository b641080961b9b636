"""The distribution's long description: README without pictures and relative links, which a package index cannot show.

hatchling calls this hook, which ``pyproject.toml`` names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[.*\]\(.*\)\n\n", re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\[([^]\n]+)\]\((?!https://)([^)\n]+)\)")


class LongDescription(MetadataHookInterface):
    """The hook that sets the field "readme"."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field before hatchling writes the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_targets(text)}


def without_relative_targets(text: str) -> str:
    """Return the text without pictures, and with each relative link replaced by its text and, if it is a file, its name."""
    return _RELATIVE_LINK.sub(_name, _PICTURE.sub("", text))


def _name(link: re.Match[str]) -> str:
    text, target = link.groups()
    return text if target.startswith("#") or text == target else f"{text} ({target})"
