"""The documentation: its numbers are those of the results, its links lead on, its code runs."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import gallery
import matplotlib.pyplot as plt
import pytest
import results
import rooms
import torch

import pyrohmm
from pyrohmm.analysis import plot_axes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if not {"generated", "_build"} & set(path.relative_to(DOCS).parts)
]
SUBSTITUTION = re.compile(r"\{\{ ([\w.]+) \}\}")


def name_of(path):
    return str(path.relative_to(DOCS))


@pytest.mark.parametrize("page", [
    "gallery.md", "installation.md", "reproductions/densehmm.md",  # not run when the site is built
    "coming_from.md", "guide/composition.md", "guide/distribution.md",
    "guide/hierarchical.md", "guide/my_table.md",
])  # fmt: skip
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """In single precision as a reader would."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    names = {"__name__": "page"}
    for code in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M):
        exec(compile(code, page, "exec"), names)
        plt.close("all")


@pytest.mark.slow
def test_the_script_for_several_processes_runs(tmp_path):
    page = (DOCS / "guide/devices.md").read_text()
    (script,) = re.findall(r"^```\{code-block\} python\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "train.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*run, "train.py"], cwd=tmp_path, env=environment, check=True, timeout=200)
    assert pyrohmm.load_hmm(tmp_path / "casino").num_states == 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_links_to_exists(page):
    """Pages that are made at build time are known by the folders they are made from."""
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    targets += re.findall(r"^```\{(?:image|figure|include)\} (\S+)", page.read_text(), re.M)
    for target in targets:
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve()
        if path.is_relative_to(DOCS / "generated" / "tutorials") and path.suffix == ".ipynb":
            path = ROOT / "tutorials" / path.name
        elif path.is_relative_to(DOCS / "generated"):
            continue
        assert path.exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_substitutes_exists_and_is_text(page):
    known = results.substitutions()
    for name in SUBSTITUTION.findall(page.read_text()):
        value = known
        for part in name.split("."):
            value = value[part]
        assert isinstance(value, str)
        assert value


def test_every_table_and_every_number_is_shown():
    shown = {name for page in PAGES for name in SUBSTITUTION.findall(page.read_text())}
    known = {f"{group}.{name}" for group, names in results.substitutions().items()
             for name in names}  # fmt: skip
    assert known - shown == set()


def cells(table):
    """The header and the lines of a Markdown table."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert {len(line) for line in lines} == {len(lines[0])}
    return lines[0], lines[2:]


@pytest.mark.parametrize("name", sorted(results.TABLES))
def test_tables_are_rectangular_and_not_empty(name):
    _, lines = cells(results.TABLES[name]())
    assert lines
    assert all(all(line) for line in lines)


# Gallery ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(gallery.TUTORIALS.glob("*.ipynb")), ids=lambda it: it.stem)
def test_every_notebook_has_a_card_with_a_picture(path):
    notebook = json.loads(path.read_text())
    assert gallery.first_picture(notebook).startswith(b"\x89PNG")
    assert not gallery.title_of(notebook).startswith(("#", "1", "2"))
    assert 20 < len(gallery.promise_of(notebook))
    assert gallery.card(path.stem, notebook).startswith(":::{grid-item-card}")


def test_the_gallery_has_every_notebook(tmp_path):
    gallery.write(tmp_path)
    index = (tmp_path / "index.md").read_text()
    for path in gallery.TUTORIALS.glob("*.ipynb"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / f"{path.stem}.png").exists()
        assert f":link: {path.stem}\n" in index


def test_every_plot_is_on_its_page_with_the_picture_of_the_script():
    page = (DOCS / "gallery.md").read_text()
    public = {name for name, thing in vars(pyrohmm.plots).items()
              if inspect.isfunction(thing) and thing.__module__.startswith("pyrohmm.analysis.plot")
              and name == thing.__name__ and name not in vars(plot_axes)}  # fmt: skip
    described = set(re.findall(r"^\{func\}`~pyrohmm.analysis.plots.(\w+)`", page, re.M))
    assert described == {name for name in public if not name.startswith("_")}
    parts = re.findall(
        r"^```python\n(.*?)^```\s+```\{image\} \S+gallery_\w+\.png$", page, re.S | re.M
    )
    assert len(parts) == page.count("```{image}")
    pictures = sorted((ROOT / "figures").glob("gallery_*.png"))
    assert len(pictures) == len(parts)
    assert sum(path.stat().st_size for path in pictures) < 1_000_000


# Rooms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", rooms.ROOMS)
def test_the_page_of_a_room_names_its_public_modules(room):
    named = set(re.findall(rf"pyrohmm\.{room}\.([\w.]+)", rooms.page(room)))
    folder = rooms.PACKAGE / room
    files = {".".join(path.relative_to(folder).with_suffix("").parts)
             for path in folder.rglob("*.py")}  # fmt: skip
    names = {name.removesuffix(".__init__") for name in files}
    assert named == {name for name in names if not name.split(".")[-1].startswith("_")}


def test_every_public_name_is_in_the_index():
    index = rooms.index()
    for name in rooms.public_names():
        assert f"[`{name}`](" in index


def test_the_names_that_are_needed_first_come_first():
    first, rest = rooms.index().split("## All public names")
    for task, (_, names) in rooms.TASKS.items():
        part = first.split(f"## {task}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| \[`([\w.]+)`\]", part, re.M) == names.split()
    assert "[`fit_em`](#pyrohmm.infer.em.fit_em)" in rest


def test_pages_of_modules_have_the_names_of_what_they_define():
    titles = rooms.titles()
    assert titles["pyrohmm.infer.em"] == "fit_em"
    assert titles["pyrohmm.distributions.hmm"] == "HMM"
    assert titles["pyrohmm.nn.tabular"].startswith("TabularHMM, ")
    assert "pyrohmm.ops.recursions" not in titles


def test_pictures_are_drawn(tmp_path):
    rooms.draw_imports(tmp_path / "rooms.png")
    rooms.draw_fit(tmp_path / "fit.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("rooms.png", "fit.png"))


# Papers of the project --------------------------------------------------------------------------


def test_the_versions_that_are_written_down_are_one():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_new_names_of_the_changelog_exist():
    """Those of the second column: arguments, or functions, classes and attributes."""
    text = (ROOT / "CHANGELOG.md").read_text().split("| before | now |")[1].split("\n\n")[0]
    new = {
        name.split("(")[0].split(".")[-1]
        for line in text.splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", line.split("|")[2])
        if not name.startswith("python")
    }
    arguments = {name.split("=")[0] for name in new if "=" in name}
    names = {name for name in new if "=" not in name}
    known, taken = set(), set()
    for path in (ROOT / "pyrohmm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
            elif isinstance(node, ast.arg):
                taken.add(node.arg)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                known.add(node.attr)
    assert names <= known
    assert arguments <= taken


def test_every_test_named_by_a_promise_exists():
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", (DOCS / "promises.md").read_text())
    assert len(named) > 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"


def test_every_promise_names_a_test():
    promised, _ = (DOCS / "promises.md").read_text().split("## What is not promised")
    paragraphs = [part for part in promised.split("\n\n") if part.startswith("**")]
    assert len(paragraphs) > 5
    for paragraph in paragraphs:
        following = promised[promised.index(paragraph) + len(paragraph) :].lstrip()
        assert following.startswith("- `tests/"), paragraph
