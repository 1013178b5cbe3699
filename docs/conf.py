"""Configuration of Sphinx: ``make docs``. The code of pages is run once, and nothing is fetched."""

import inspect
import sys
from operator import attrgetter
from pathlib import Path
from pydoc import locate
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.nodes import make_refnode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gallery  # noqa: E402
import results  # noqa: E402
import rooms  # noqa: E402

from pyrohmm import __version__  # noqa: E402

project = "pyrohmm"
author = "The pyrohmm developers"
copyright = author
version = release = __version__

GENERATED = HERE / "generated"
gallery.write(GENERATED / "tutorials")
rooms.write(GENERATED / "api")
rooms.draw_imports(GENERATED / "rooms.png")
rooms.draw_fit(GENERATED / "fit.png")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
default_role = "literal"

myst_enable_extensions = ["colon_fence", "dollarmath", "substitution"]
myst_heading_anchors = 3
myst_substitutions = results.substitutions()
nb_execution_mode = "cache"  # a page is run again when its code has changed
nb_execution_excludepatterns = ["generated/tutorials/*"]  # notebooks carry their outputs
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "remove"
RUN = ("index", "quickstart", "coming_from", "extending", "guide/")  # pages whose code is run
CELLS = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say shapes and dtypes, which types do not
autosummary_generate = True
autosummary_context = {"titles": rooms.titles()}
autosummary_ignore_module_all = False
python_maximum_signature_line_length = 88

nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|pyro|numpy|scipy|arviz|matplotlib|xarray|hmmlearn|typing|collections|re)\b.*",
    ),
    ("py:data", r"[A-Z_]+"),
    ("py:obj", r"pyrohmm\..*\.Made"),  # a type variable
    ("py:class", r"pyrohmm\.(.*\.)?_\w+.*"),
    ("py:class", r"(?!pyrohmm\.).*"),  # words before the colon of a docstring's "Returns"
]

html_theme = "furo"
html_title = f"pyrohmm {version}"
html_static_path = ["_static"]
html_css_files = ["pyrohmm.css"]
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def to_cells(app: Sphinx, page: str, source: list[str]) -> None:
    """Make cells of the Python code of a page, so that the page shows what it prints and draws."""
    if page.startswith(RUN) and "```python\n" in source[0]:
        source[0] = CELLS + source[0].replace("```python\n", "```{code-cell}\n")


def defined_as(target: str, module: str, owner: str) -> str:
    """The full name of a thing, by the short one that a docstring uses: as Python finds it."""
    for place in (f"{module}.{owner}", module, "pyrohmm"):
        try:
            thing = attrgetter(target.removeprefix("pyrohmm."))(locate(place))
        except AttributeError:
            continue
        if inspect.ismodule(thing):
            return thing.__name__
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
    return target


def resolve(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Find what Sphinx does not: names as users import them, else by their last parts."""
    if node.get("refdomain") != "py":
        return None
    objects, target = env.get_domain("py").objects, node["reftarget"]
    found = [defined_as(target, node.get("py:module") or "", node.get("py:class") or "")]
    for tail in (target.removeprefix("pyrohmm."), target.split(".")[-1]):
        if len(found) != 1 or found[0] not in objects:
            found = [name for name in objects if name.endswith(f".{tail}")]
    if len(found) != 1:
        return None
    entry = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)


STYLE = Config(
    napoleon_use_ivar=True,  # attributes are described once, in the list of the class
    napoleon_custom_sections=[
        ("Other Arguments", "params_style"), ("Other Args", "params_style")
    ],
)  # fmt: skip


def to_rest(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Google style to reStructuredText; properties as methods, lest their colons begin types."""
    kind = "method" if what == "property" else what
    lines[:] = GoogleDocstring(lines, STYLE, app, kind, name, obj, options).lines()


def is_field(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which their docstrings list.

    And what scikit-learn adds to estimators, whose text refers to pages of its own.
    """
    added = name.startswith("set_") and name.endswith("_request")
    return True if added or type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", to_rest)
    app.connect("autodoc-skip-member", is_field)
    app.connect("missing-reference", resolve)
    app.connect("source-read", to_cells)
