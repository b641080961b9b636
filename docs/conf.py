"""Sphinx's settings: the reference is written from the docstrings, a page an area of the public API.

``python -m sphinx -W --keep-going -n docs docs/_build`` builds it, and fails on any warning.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import accelerator  # noqa: E402
from accelerator import _EXPORTS  # noqa: E402

project = "accelerator"
author = copyright = "accelerator developers"
version = release = accelerator.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
html_theme = "furo"
html_title = f"accelerator {release}"
exclude_patterns = ["_build"]
nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
# "Raises: Nothing." names no exception.
nitpick_ignore = [("py:exc", "Nothing.")]
# Type variables and the classes behind functions that act as context managers have no entry of their own.
nitpick_ignore_regex = [("py:class", r"accelerator\.(.*\._?[A-Z]\w*|_\w+\..*)")]
python_use_unqualified_type_names = True
myst_heading_anchors = 3

_PAGES = {room: tuple(names) for room, names in _EXPORTS.items()}
_SUBMODULES = ("checkpointing", "simulation")


def _write_reference(app: Any) -> None:
    """A page a room, from the front door's own table, so that no name can be forgotten."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    for room, names in _PAGES.items():
        _write(folder / f"{room}.rst", room, "accelerator", names)
    for submodule in _SUBMODULES:
        _write(folder / f"{submodule}.rst", submodule, f"accelerator.{submodule}", getattr(accelerator, submodule).__all__)
    pages = "\n".join(f"   {page}" for page in (*_PAGES, *_SUBMODULES))
    _write_if_new(folder / "index.rst", f"Reference\n=========\n\n.. toctree::\n   :maxdepth: 1\n\n{pages}\n")


def _write(path: Path, title: str, module: str, names: tuple[str, ...]) -> None:
    entries = [_entry(module, name) for name in names]
    head = f"{title}\n{'=' * len(title)}\n\n.. currentmodule:: {module}\n"
    _write_if_new(path, "\n".join([head, *entries]))


def _entry(module: str, name: str) -> str:
    value = getattr(sys.modules[module], name)
    kind = "class" if isinstance(value, type) else "function" if callable(value) and name != "Device" else "data"
    members = "\n   :members:\n   :no-inherited-members:" if kind == "class" else ""
    return f".. auto{kind}:: {name}{members}\n"


def _write_if_new(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _elsewhere(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Public types stand on the pages of their areas, whatever room a signature names; those of torch and Python elsewhere."""
    from docutils.nodes import reference

    target: str = node.get("reftarget", "")
    name = _ALIASES.get(target, target.rpartition(".")[2])
    if name in accelerator.__all__ and (target in (name, *_ALIASES) or target.startswith("accelerator.")):
        place = node.get("refdoc", "index")
        return env.domains["py"].resolve_xref(env, place, app.builder, "obj", f"accelerator.{name}", node, contnode)
    head = target.partition(".")[0]
    if head == "torch":
        uri = f"https://docs.pytorch.org/docs/stable/search.html?q={target}"
    elif head in sys.stdlib_module_names or hasattr(builtins, target) or target in _TYPING:
        uri = f"https://docs.python.org/3/search.html?q={target}"
    else:
        return None
    return reference("", "", contnode, internal=False, refuri=uri)


# What monitoring takes beyond a Device: entries of visible_devices() and physical_devices(), as its docstrings say.
_ALIASES = {"AnyDevice": "Device"}
_TYPING = frozenset(
    ("Any", "Callable", "Iterable", "Iterator", "Literal", "Mapping", "MutableMapping", "Sequence", "SupportsIndex")
)


def setup(app: Any) -> None:
    app.connect("builder-inited", _write_reference)
    app.connect("missing-reference", _elsewhere)
