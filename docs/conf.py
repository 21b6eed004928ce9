"""The site: every page of the repository, and a page for each public name, written from its docstring.

``sphinx-build -W --keep-going -c docs . build/site`` builds it. The source folder is the top of the repository, so that links
between pages are the same here and on a forge.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from numpydoc.xref import DEFAULT_LINKS
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

_DOCS = Path(__file__).parent
sys.path.insert(0, str(_DOCS.parent))

import mpistrat  # noqa: E402 - of this tree, whatever is installed
from mpistrat import errors  # noqa: E402
from tests.docs.pages import links  # noqa: E402
from tests.docs.surface import api_names  # noqa: E402

_API = _DOCS / "reference" / "api"  # not committed
_NAMES = api_names() | {f"errors.{name}": getattr(errors, name) for name in errors.__all__}
_CLASSES = {thing: name for name, thing in reversed(_NAMES.items()) if inspect.isclass(thing)}

project = "mpistrat"
version = release = mpistrat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
root_doc = "README"
include_patterns = ["*.md", "slurm/*.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "mpistrat", "mpistrat-demo", "tests"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "py:obj"  # `name` in a docstring is a link where a public name is meant, and code elsewhere

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    # what a class has from a public or built-in one is described there
    "inherited-members": ",".join([*vars(builtins), "Enum", *(kind.__name__ for kind in _CLASSES)]),
}
autodoc_typehints = "none"  # they are in the docstrings
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = True  # types of parameters are links, but only those of ours: a build fetches nothing
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {word: word for word in DEFAULT_LINKS} | {
    kind.__name__: f"mpistrat.{name}" for kind, name in _CLASSES.items()
}

html_theme = "furo"
html_title = f"mpistrat {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "front.html"}
html_copy_source = html_show_copyright = False
templates_path = ["_templates"]


def write_api_pages(app: Sphinx) -> None:
    """Write the page of each public name, and one of all errors, from which Sphinx reads their docstrings."""
    directives = {name: _directive(name, thing) for name, thing in _NAMES.items()}
    pages = {name: directives[name] for name in api_names()}
    pages["errors"] = "\n".join(text for name, text in directives.items() if name not in pages)
    _API.mkdir(exist_ok=True)
    for path in _API.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        # orphans: a sidebar that lists them all would make the build take half as long again
        whole = f":orphan:\n\n{name}\n{'=' * len(name)}\n\n:doc:`/docs/reference/api` ›\n\n{text}"
        path = _API / f"{name}.rst"
        if not path.exists() or path.read_text() != whole:
            path.write_text(whole)


def _directive(name: str, thing: Any) -> str:
    kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"
    option = "   :show-inheritance:\n" if _bases(thing) else ""
    private = [
        base for base in getattr(thing, "__bases__", ()) if base.__module__.startswith("mpistrat.") and base not in _CLASSES
    ]
    if kind == "class" and not private:
        option += "   :no-inherited-members:\n"  # all bases have pages of their own
    return f".. auto{kind}:: mpistrat.{name}\n{option}"


def _bases(thing: Any) -> list[str]:
    """Return the nearest public base of a class, and the exceptions of Python that it is one of."""
    if not inspect.isclass(thing):
        return []
    public = [f"mpistrat.{_CLASSES[base]}" for base in thing.__mro__[1:] if base in _CLASSES][:1]
    return public + [base.__name__ for base in thing.__bases__ if issubclass(base, Exception) and base not in _CLASSES]


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add to the front page what the sidebar lists: the sections of docs/index.md."""
    if docname == root_doc:
        for section in (_DOCS / "index.md").read_text().split("\n## ")[1:]:
            title, _, text = section.partition("\n")
            source[0] += _toctree(title, [f"/docs/{target}" for target in links(text) if target.endswith(".md")])
        source[0] += _toctree("Project", ["/docs/index", "/CONTRIBUTING", "/CHANGELOG", "/slurm/README"])


def _toctree(caption: str, targets: list[str]) -> str:
    return "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", "", *targets, "```\n"])


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make a link of each public name that a written page shows as code."""
    objects = app.env.domains.python_domain.objects
    for literal in list(doctree.findall(nodes.literal)):
        words = literal.astext().partition("(")[0].removeprefix("mpistrat.")
        name = next((name for name in (f"mpistrat.{words}", f"mpistrat.errors.{words}") if name in objects), "")
        if name and not isinstance(literal.parent, nodes.reference | nodes.title):
            found = objects[name]
            code = literal.deepcopy()
            literal.replace_self(make_refnode(app.builder, docname, found.docname, found.node_id, code, name))


def name_bases(app: Sphinx, name: str, kind: type, options: dict[str, Any], bases: list[Any]) -> None:
    """Show the bases of a class that readers know, by their public names."""
    bases[:] = [f":py:obj:`{base}`" for base in _bases(kind)]


def setup(app: Sphinx) -> None:
    """Connect the four."""
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", add_contents)
    app.connect("doctree-resolved", link_names)
    app.connect("autodoc-process-bases", name_bases)
