"""Configuration of Sphinx: ``make docs``. Nothing is run and nothing is fetched."""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

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
    "sphinx.ext.napoleon",
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
nb_execution_mode = "off"  # notebooks carry their outputs

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say shapes and dtypes, which types do not
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once, in the list of the class
python_maximum_signature_line_length = 88

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|pyro|numpy|scipy|arviz|matplotlib|xarray|hmmlearn|typing|collections)\b.*"),
    ("py:class", r"(Tensor|Module|PyroModule|TorchDistribution|NamedTuple|Protocol|Any|optional)"),
]

html_theme = "furo"
html_title = f"pyrohmm {version}"
html_static_path = ["_static"]
html_css_files = ["pyrohmm.css"]
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def resolve(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Find a name by its end: docstrings use the short names under which users import things."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    tail = node["reftarget"].removeprefix("pyrohmm.")
    found = [name for name in domain.objects if name.endswith(f".{tail}")]
    module = node.get("py:module") or ""
    found = [name for name in found if name.startswith(f"{module}.")] or found
    if len(found) != 1:
        return None
    entry = domain.objects[found[0]]
    from sphinx.util.nodes import make_refnode

    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)


def is_field(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which their docstrings list."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-skip-member", is_field)
    app.connect("missing-reference", resolve)
