"""The rooms of the package: pages of the API and the picture of its imports.

Everything is read from the sources, so that it cannot fall behind them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path
from typing import Any

from gallery import keep
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import pyrohmm

PACKAGE = Path(__file__).resolve().parent.parent / "pyrohmm"
ROOMS = [
    "ops", "chains", "data", "distributions", "nn", "io", "infer", "analysis", "language",
    "sklearn",
]  # fmt: skip
TASKS = {  # what a user needs first: a sentence, and names of ``pyrohmm`` in the order of use
    "Data": (
        "Every fit and every query takes `Sequences`.",
        "Sequences Sequences.from_list Sequences.from_dataframe datasets readers",
    ),
    "Models": (
        "`HMM` is a distribution with given parameters; the others are modules with parameters to "
        "fit.",
        "HMM TabularHMM TabularHSMM TabularContinuousTimeHMM TabularFactorialHMM RegressionHMM "
        "DenseHMM NeuralHMM sticky left_to_right",
    ),
    "Emission families": (
        "A family is the second argument of a module: `TabularHMM(3, normal(2))`.",
        "categorical poisson bernoulli normal normal_full normal_mixture von_mises "
        "gamma student_t negative_binomial zero_inflated censored truncated "
        "autoregressive_normal regression streams parametric",
    ),
    "Fitting": (
        "`fit_em` and `fit_gibbs` take a module; `fit_map`, `fit_svi` and `fit_mcmc` take a Pyro "
        "model, such as `MarginalModel(module)`.",
        "fit_em fit_gibbs fit_map fit_svi fit_mcmc fit_laplace MarginalModel Fit starts save",
    ),
    "Queries": (
        "Asked of `hmm = fit.hmm(data)`.",
        "HMM.posterior HMM.viterbi HMM.forecast HMM.sample Filter queries",
    ),
    "Checking and plots": (
        "How well a fit describes its data, and how sure it is of its parameters.",
        "Fit.summary Fit.intervals metrics.bic metrics.cross_validate "
        "metrics.likelihood_ratio_test check_model report plots to_arviz",
    ),
    "Language models": (
        "Neural HMMs of thousands of states over words; also `python -m pyrohmm.language`.",
        "LanguageModel language.Steering language.ConstraintProcessor language.distil clusters",
    ),
    "Chains of your own": (
        "A chain is p(z); an `HMM` joins it with an emission and data. "
        "[Extending](../../extending.md) shows one.",
        "HMM.of HMMModule GradientStep recursions",
    ),
}


def text_of(room: str) -> str:
    """The docstring of a room."""
    return ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""


def modules_of(room: str) -> dict[str, str]:
    """The modules that the docstring of a room lists, with what it says of each."""
    lines = [line for line in text_of(room).splitlines() if line.startswith("``")]
    pairs = (line.split("``", 2)[1:] for line in lines)
    return {name: rest.strip() for name, rest in pairs if rest.startswith("  ")}


def folders_of(room: str) -> dict[str, str]:
    """The folders within a room, with the first lines of their docstrings."""
    inner = sorted((PACKAGE / room).glob("*/__init__.py"))
    return {path.parent.name: text_of(f"{room}/{path.parent.name}").splitlines()[0]
            for path in inner}  # fmt: skip


def imports_of(room: str) -> set[str]:
    """The other rooms that the modules of a room import."""
    found = set()
    for path in (PACKAGE / room).rglob("*.py"):
        depth = len(path.relative_to(PACKAGE).parts)  # so many dots are the package
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level != depth:
                continue
            if node.module:
                found.add(node.module.split(".")[0])
            else:
                found.update(alias.name for alias in node.names)
    return (found & set(ROOMS)) - {room}


def public_names() -> dict[str, str]:
    """Where each public name of ``pyrohmm`` is defined: the module, with its dots."""
    found = {}
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("_"):
            found.update({alias.name: node.module or alias.name for alias in node.names})
    return found


def thing_of(name: str) -> Any:
    """What ``pyrohmm`` has by a name such as ``fit_em``, ``HMM.posterior`` or ``metrics``."""
    return attrgetter(name)(pyrohmm)


def sentence_of(thing: Any) -> str:
    """The first sentence of a docstring, as Markdown."""
    first = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    first = re.sub(r":math:`([^`]+)`", r"$\1$", first)
    first = re.sub(r":\w+:`~?(?:pyrohmm\.)?([^`]+)`", r"`\1`", first).replace("``", "`")
    first = first.replace("|", r"\|")
    return re.split(r"(?<=[\w)`$\"])[.:](?: (?=[A-Z`])|$)", first)[0]


def link_of(thing: Any) -> str:
    """Where the pages of the API describe a function, a class, a method or a module."""
    if not inspect.ismodule(thing):
        return f"#{thing.__module__}.{thing.__qualname__}"
    room = thing.__name__.removeprefix("pyrohmm.")
    return f"{room}.md" if room in ROOMS else f"{thing.__name__}.rst"


def row(name: str) -> str:
    """A line of a table: the name, and what it is."""
    thing = thing_of(name)
    kind = "modules: " if hasattr(thing, "__path__") else "a module: "
    before = kind if inspect.ismodule(thing) else ""
    return f"| [`{name}`]({link_of(thing)}) | {before}{sentence_of(thing)} |"


def titles(longest: int = 3) -> dict[str, str]:
    """Titles of the pages of modules: the public names that they define, the first three of them.

    Modules of ``ops`` keep their own names: these are what is imported.
    """
    found: dict[str, list[str]] = {}
    for room in ROOMS[1:]:
        for node in ast.parse((PACKAGE / room / "__init__.py").read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 1:
                names = [alias.name for alias in node.names]
                found.setdefault(f"{room}.{node.module}", []).extend(names)
    public: dict[str, list[str]] = {}
    for name, module in public_names().items():
        if "." in module and not module.startswith("ops."):
            public.setdefault(module, []).append(name)
    found.update(public)  # what ``pyrohmm`` exports goes before what the room does
    needed = [name for _, names in TASKS.values() for name in names.split()]

    def rank(name: str) -> tuple[int, bool]:
        return needed.index(name) if name in needed else len(needed), name.islower()

    return {
        f"pyrohmm.{module}": ", ".join(
            sorted(names, key=rank)[:longest] + ["..."] * (len(names) > longest)
        )
        for module, names in found.items()
    }


def page(room: str) -> str:
    """The page of a room."""
    paragraphs = text_of(room).split("\n\n")
    names = [*folders_of(room), *modules_of(room)]
    shown = [name for name in names if not name.split(".")[-1].startswith("_")]
    names = "\n".join(f"   pyrohmm.{room}.{name}" for name in shown)
    return f"""# {room}

{paragraphs[0]}

{" ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""}

```{{eval-rst}}
.. autosummary::
   :toctree: .
   :template: module.rst

{names}

.. py:module:: pyrohmm.{room}
```
"""


def index() -> str:
    """The page of the public names: those that are needed first by task, then all of them."""
    lines = [
        "# API",
        "",
        "What `from pyrohmm import ...` gives. The names that most programs need come first, by",
        "task; [all public names](#all-public-names) follow by subpackage.",
        "",
    ]
    for task, (text, names) in TASKS.items():
        lines += [f"## {task}", "", text, "", "| name | |", "| :-- | :-- |"]
        lines += [row(name) for name in names.split()]
        lines.append("")
    lines += ["## All public names", ""]
    names = public_names()
    for room in ROOMS:
        inside = [name for name, module in names.items() if module.split(".")[0] == room]
        owns = text_of(room).splitlines()[0]
        lines += [f"### {room}", "", f"{owns} [All its modules]({room}.md).", ""]
        lines += ["| name | |", "| :-- | :-- |"]
        lines += [row(name) for name in sorted(inside, key=lambda name: (name.islower(), name))]
        lines.append("")
    toctree = "\n".join(ROOMS)
    return "\n".join(lines) + f"\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"


def write(folder: Path) -> None:
    """Write the pages of the API into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("pyrohmm.*.rst"):  # of modules that are gone
        source = PACKAGE.parent.joinpath(*old.stem.split("."))
        if not source.is_dir() and not source.with_suffix(".py").exists():
            old.unlink()
    keep(folder / "index.md", index().encode())
    for room in ROOMS:
        keep(folder / f"{room}.md", page(room).encode())


# Pictures ---------------------------------------------------------------------------------------


def draw_imports(path: Path) -> None:
    """Draw the rooms, one above the other, and which of them each imports."""
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.add_subplot()
    for row, room in enumerate(ROOMS):
        axes.text(-0.4, row, room, ha="right", va="center", weight="bold", fontsize=12)
        text = textwrap.fill(text_of(room).splitlines()[0].replace("``", "").rstrip("."), 46)
        axes.text(len(ROOMS) - 0.3, row, text, ha="left", va="center", fontsize=10.5)
        imported = imports_of(room)
        for column, other in enumerate(ROOMS[: row + 1]):
            colour = "0.3" if other == room else "C0" if other in imported else "0.85"
            axes.scatter(column, row, s=90 if other in imported else 20, color=colour)
    for column, room in enumerate(ROOMS):
        axes.text(column, -0.7, room, rotation=40, ha="left", va="bottom", fontsize=11)
    axes.set_xlim(-3.4, len(ROOMS) + 9.5)
    axes.set_ylim(len(ROOMS) - 0.4, -2.9)
    axes.axis("off")
    figure.savefig(path, dpi=150)


def draw_fit(path: Path) -> None:
    """Draw the way of data through a fit."""
    figure = Figure(figsize=(9.4, 3.1), layout="constrained")
    FigureCanvasAgg(figure)  # to know how large texts are
    axes = figure.add_subplot()
    boxes = {
        "data": (0, 0, "lists, text,\nfiles, tables"),
        "sequences": (1, 0, "Sequences\nvalues, lengths,\nmasks"),
        "module": (1, 1, "HMM module\nparameters,\npriors"),
        "hmm": (2, 1, "HMM\na distribution over\nsequences"),
        "model": (2, 0, "Pyro model\nMarginalModel,\nor your function"),
        "fit": (3, 0, "fit_em, fit_map,\nfit_svi, NUTS"),
        "result": (4, 0, "Fit\nlosses, reason,\nnotes"),
        "fitted": (4, 1, "Fit.hmm(data)\na fitted HMM"),
        "use": (5, 1, "posterior, viterbi,\nforecast, metrics"),
        "file": (5, 0, "save, to_arviz"),
    }
    frame = {"boxstyle": "round,pad=0.5", "facecolor": "0.95", "edgecolor": "C0"}
    axes.set_xlim(-0.5, 5.5)
    axes.set_ylim(-0.5, 1.5)
    axes.axis("off")
    texts = {
        name: axes.text(x, y, text, ha="center", va="center", fontsize=10.5, bbox=frame)
        for name, (x, y, text) in boxes.items()
    }
    figure.canvas.draw()
    arrows = [("data", "sequences"), ("sequences", "module"), ("sequences", "model"),
              ("module", "hmm"), ("hmm", "model"), ("model", "fit"), ("fit", "result"),
              ("result", "fitted"), ("fitted", "use"), ("fitted", "file")]  # fmt: skip
    for start, end in arrows:
        patches = {"patchA": texts[start].get_bbox_patch(), "patchB": texts[end].get_bbox_patch()}
        arrow = {"arrowstyle": "->", "color": "0.4", "shrinkA": 2, "shrinkB": 2, **patches}
        axes.annotate("", boxes[end][:2], boxes[start][:2], arrowprops=arrow)
    figure.savefig(path, dpi=150)
