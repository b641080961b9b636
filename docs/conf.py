"""Settings of Sphinx, for the guide in this folder and the reference, which is generated from docstrings.

``python -m sphinx -W --keep-going -n docs docs/_build`` builds both and fails on any warning.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import accelerator  # noqa: E402

project = "accelerator"
author = copyright = "accelerator developers"
version = release = accelerator.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
]
html_theme = "furo"
html_title = f"accelerator {release}"
exclude_patterns = ["_build"]
nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
# "Raises: Nothing." names no exception.
nitpick_ignore = [("py:exc", "Nothing.")]
# Type variables and the private classes behind context managers have no entries in the reference.
nitpick_ignore_regex = [("py:class", r"accelerator\.(.*\._?[A-Z]\w*|_\w+\..*)")]
python_use_unqualified_type_names = True
myst_heading_anchors = 3

# The pages of the reference: for each one the modules whose public names it lists, and its title.
PAGES = {
    "discovery": (("discovery", "identity"), "Discovery"),
    "monitoring": (("monitoring",), "Monitoring"),
    "launching": (("launching",), "Launching processes"),
    "devices": (("devices", "properties"), "Devices"),
    "streams": (("streams",), "Streams and events"),
    "memory": (("memory_info", "memory", "out_of_memory", "snapshots"), "Memory"),
    "random": (("random",), "Random numbers"),
    "dtypes": (("dtypes",), "Dtypes"),
    "graphs": (("graphs",), "Graphs"),
    "tensors": (("tensors", "pinning"), "Tensors and pinned memory"),
    "profiling": (("profiling",), "Profiling"),
    "compiling": (("compiling",), "Compiling"),
    "extensions": (("extensions",), "Op builders"),
    "low_level": (("low_level",), "Low-level functions"),
    "deepspeed": (("deepspeed_bridge",), "DeepSpeed"),
    "deprecated": (("deprecated",), "Deprecated names"),
}
SUBMODULES = {"checkpointing": "Checkpointing", "simulation": "Simulation"}


def _write_reference(app: Any) -> None:
    """Write the pages of the reference. Raise an error if a public name is on no page."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    listed: set[str] = set()
    for page, (modules, title) in PAGES.items():
        public = set(accelerator.__all__)
        names = [
            name for module in modules for name in importlib.import_module(f"accelerator.{module}").__all__ if name in public
        ]
        listed.update(names)
        _write(folder / f"{page}.rst", title, "accelerator", names)
    missing = set(accelerator.__all__) - listed - {*SUBMODULES, "random", "__version__"}
    if missing:
        raise RuntimeError(f"no page of the reference lists {sorted(missing)}: add their modules to PAGES")
    for submodule, title in SUBMODULES.items():
        _write(folder / f"{submodule}.rst", title, f"accelerator.{submodule}", getattr(accelerator, submodule).__all__)
    pages = "\n".join(f"   {page}" for page in (*PAGES, *SUBMODULES))
    assumed = "Examples assume ``import torch``, ``import accelerator as acc`` and ``from accelerator import checkpointing``."
    _write_if_changed(folder / "index.rst", f"Reference\n=========\n\n{assumed}\n\n.. toctree::\n   :maxdepth: 1\n\n{pages}\n")


def _write(path: Path, title: str, module: str, names: list[str]) -> None:
    summary = "\n".join(["", ".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names), ""])
    entries = [_entry(module, name) for name in names]
    head = f"{title}\n{'=' * len(title)}\n\n.. currentmodule:: {module}\n"
    _write_if_changed(path, "\n".join([head, summary, *entries]))


def _entry(module: str, name: str) -> str:
    value = getattr(sys.modules[module], name)
    directive = "class" if isinstance(value, type) else "function" if callable(value) and name != "Device" else "data"
    # The docstring of a NamedTuple describes its fields.
    has_members = directive == "class" and not hasattr(value, "_fields")
    members = "\n   :members:\n   :no-inherited-members:" if has_members else ""
    return f".. auto{directive}:: {name}{members}\n"


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


_PUBLIC_CALL = re.compile(r"(?:acc\.)?(\w+)(?:\([^()]*\))?")


def _link_functions(app: Any, doctree: Any) -> None:
    """Link the public names that a page mentions in code to their entries in the reference."""
    for literal in list(doctree.findall(nodes.literal)):
        match = _PUBLIC_CALL.fullmatch(literal.astext())
        is_linked = isinstance(literal.parent, (nodes.reference, addnodes.pending_xref, nodes.title))
        if match and match[1] in accelerator.__all__ and match[1] not in SUBMODULES and not is_linked:
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=f"accelerator.{match[1]}", refdoc=app.env.docname, refwarn=False
            )
            literal.replace_self(link)
            link += literal


def _resolve_foreign(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link the package's types to their entries, and the types of torch and of Python to their documentation."""
    target: str = node.get("reftarget", "")
    name = _ALIASES.get(target, target.rpartition(".")[2])
    if name in accelerator.__all__ and (target in (name, *_ALIASES) or target.startswith("accelerator.")):
        page = node.get("refdoc", "index")
        return env.domains["py"].resolve_xref(env, page, app.builder, "obj", f"accelerator.{name}", node, contnode)
    head = target.partition(".")[0]
    if head == "torch":
        uri = f"https://docs.pytorch.org/docs/stable/search.html?q={target}"
    elif head in sys.stdlib_module_names or hasattr(builtins, target) or target in _TYPING:
        uri = f"https://docs.python.org/3/search.html?q={target}"
    else:
        return None
    return nodes.reference("", "", contnode, internal=False, refuri=uri)


# AnyDevice also allows entries of visible_devices() and physical_devices(). It has no entry in the reference.
_ALIASES = {"AnyDevice": "Device"}
_TYPING = frozenset(
    ("Any", "Callable", "Iterable", "Iterator", "Literal", "Mapping", "MutableMapping", "Sequence", "SupportsIndex")
)


def setup(app: Any) -> None:
    app.connect("builder-inited", _write_reference)
    app.connect("doctree-read", _link_functions)
    app.connect("missing-reference", _resolve_foreign)
