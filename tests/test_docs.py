"""The documentation: its code runs, its numbers are those of the results, its links lead on."""

import ast
import inspect
import json
import re
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
CODE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
SUBSTITUTION = re.compile(r"\{\{ ([\w.]+) \}\}")


def name_of(path):
    return str(path.relative_to(DOCS))


@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search(page.read_text())],
                         ids=name_of)  # fmt: skip
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Its blocks one after the other, as a reader would, in single precision."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    names = {"__name__": "page"}
    for code in CODE.findall(page.read_text()):
        exec(compile(code, name_of(page), "exec"), names)
        plt.close("all")  # as the end of a notebook's cell


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


def rows_of(name):
    return json.loads((ROOT / "figures" / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize("name", sorted(results.TABLES))
def test_tables_are_rectangular_and_not_empty(name):
    _, lines = cells(results.TABLES[name]())
    assert lines
    assert all(all(line) for line in lines)


def test_the_table_of_gradients_is_that_of_the_result_file():
    header, lines = cells(results.gradient_table())
    rows = [row for row in rows_of("throughput") if row["quantity"] == "evidence and gradient"]
    assert len(lines) == len({tuple(row["shape N, T, K, V"]) for row in rows})
    for shape, *values in lines:
        for method, cell in zip(header[1:], values):
            ours = method.endswith(", ms")
            found = [
                row
                for row in rows
                if row["method"] == method.removesuffix(", ms")
                and ", ".join(map(str, row["shape N, T, K, V"])) == shape
            ]
            if not found:
                assert cell == "—"
            elif ours:
                assert cell == f"{found[0]['milliseconds']:.1f}"
            else:
                assert cell == f"{found[0]['times_slower_than_pyrohmm'][0]:.1f}×"


def test_the_table_of_em_is_that_of_the_result_file():
    rows = rows_of("throughput")
    _, lines = cells(results.em_table())
    assert len(lines) == 4
    for shape, ours, *others in lines:
        found = {
            row["method"]: row
            for row in rows
            if row["quantity"] == "EM iteration"
            and ", ".join(map(str, row["shape N, T, K, V"])) == shape
        }
        assert ours == f"{found['pyrohmm']['milliseconds']:.1f}"
        for method, cell in zip(("hmmlearn", "dynamax"), others):
            assert cell == f"{found[method]['times_slower_than_pyrohmm'][0]:.1f}×"
    ends = [row["ours"][0] for row in rows if row["quantity"] == "sixteen restarts over one"]
    assert results.restart_bounds() == f"{min(ends):.1f} to {max(ends):.1f}"


def test_the_table_of_numbers_of_states_is_that_of_the_result_file():
    rows = rows_of("num_states")
    header, lines = cells(results.num_states_table())
    true = sorted({row["true"] for row in rows})
    assert header[2 : 2 + len(true)] == [f"of {number}" for number in true]
    for method, right, *chosen, lost, _ in lines:
        own = [row for row in rows if row["method"] == method]
        hits = 0
        for number, cell in zip(true, chosen):
            found = [row["chosen"] for row in own if row["true"] == number]
            assert cell == ", ".join(map(str, found))
            hits += found.count(number)
        assert right == f"{hits} of {len(own)}"
        assert float(lost) == pytest.approx(sum(r["lost"] for r in own) / len(own), abs=6e-4)


def test_the_table_of_the_example_is_that_of_the_result_file():
    rows = [row for row in rows_of("music") if row["model"].startswith("example")]
    _, lines = cells(results.music_example_table())
    assert len(lines) == len(rows) == 3
    for (form, steps, seconds, seen, whole), row in zip(lines, rows_in_order(rows)):
        assert f"example, {form}" == row["model"]
        assert int(steps) == row["steps"]
        assert float(seconds) == pytest.approx(row["processor_seconds_a_step"], abs=1e-4)
        assert (seen, whole) == (f"{row['test_seen_keys']:.2f}", f"{row['test']:.2f}")


def rows_in_order(rows):
    return sorted(rows, key=lambda row: -row["processor_seconds_a_step"])


def test_the_table_of_matrix_fits_has_the_paper_beside_ours():
    _, lines = cells(results.matrix_table())
    assert len(lines) == 12
    for size, paper, code, decaying, _ in lines:
        n, l = map(int, size.split(", "))  # noqa: E741  # the letters of the paper
        found = {
            row["schedule"]: row
            for row in rows_of("densehmm_matrix_fit")
            if (row["n"], row["l"], row["factorisation"]) == (n, l, "softmax")
            and row["quantity"] == "relative error"
        }
        assert float(paper) == found["decaying"]["paper"]
        assert code == f"{found['as in the code']['ours']:.4f}"
        assert decaying == f"{found['decaying']['ours']:.4f}"


def test_what_is_said_of_the_figures_is_counted_from_their_rows():
    """In how many cells a model has the largest or the least deviation, as it is plotted."""

    def extreme(name, data, protocol, model, pick, truth=False):
        found = 0
        chosen = [
            row for row in rows_of(name) if (row["data"], row["protocol"]) == (data, protocol)
        ]
        for cell in {(row["n"], row["l"]) for row in chosen}:
            deviations = {}
            for row in chosen:
                if (row["n"], row["l"]) == cell:
                    sampled = protocol == "as in the code" and row["model"] != "dense, direct"
                    measure = ("mad_sampled" if sampled else "mad") + "_to_truth" * truth
                    deviations[row["model"]] = row[measure]["ours"]
            found += pick(deviations, key=deviations.get) == model
        return found

    numbers = results.figure_numbers()
    code, right = "as in the code", "done right"
    best = [
        extreme("densehmm_synthetic", "synthetic", protocol, "dense, direct", min, truth)
        for protocol, truth in ((code, True), (code, False), (right, True))
    ]
    assert best == [int(numbers[name]) for name in ("truth", "counts", "truth_right")]
    for protocol, name in ((code, "worst"), (right, "worst_right")):
        worst = [
            extreme(f"densehmm_{figure}", data, protocol, "dense, EM", max,
                    (data, protocol) == ("synthetic", right))
            for figure, data in (("synthetic", "synthetic"), ("proteins", "proteins"),
                                 ("tags", "penn"), ("tags", "web"))
        ]  # fmt: skip
        assert numbers[name] == f"{min(worst)} to {max(worst)}"


def test_the_best_fit_to_words_stands_first():
    """And its line is the last step of that fit."""
    _, lines = cells(results.fits_table())
    numbers = [float(line[1]) for line in lines]
    assert numbers == sorted(numbers)
    rows = [row for row in rows_of("cooccurrence_scaling") if row["part"] == "quality"]
    module, method = lines[0][0].split(", ", 1)
    longest = max((row for row in rows if (row["module"], row["method"]) == (module, method)),
                  key=lambda row: row["steps"])  # fmt: skip
    assert lines[0][1] == f"{longest['nats_per_word']:.2f}"
    assert (module, method) == ("TabularHMM", "EM")  # as the page says


def test_the_squared_distance_stays_at_uniform_words_and_the_relative_one_trains():
    """As the page says of a DenseHMM and ten thousand words: within 0.2 nats of cross-entropy."""
    found = results.pairs_numbers()
    numbers = {name: float(found[name]) for name in ("uniform", "squared", "relative", "entropy")}
    assert numbers["squared"] == pytest.approx(numbers["uniform"], abs=0.02)
    assert numbers["relative"] < numbers["entropy"] + 0.2
    fits = [row for row in rows_of("cooccurrence_scaling") if row.get("module") == "DenseHMM"]
    last = {row["method"]: row for row in fits if row["quantity"] == "nats per held-out word"}
    row = last["co-occurrence, relative distance"]
    assert (row["V"], row["steps"]) == (10_000, 400)
    assert numbers["relative"] == round(row["nats_per_word"], 2)


def test_the_table_of_perplexities_is_that_of_the_result_files():
    _, lines = cells(results.perplexity_table())
    found = {line[0]: line[1:] for line in lines}
    for row in rows_of("language_models"):
        if row["panel"] != "best":
            continue
        label = {"ptb": "", "wikitext2": "WikiText-2: "}[row["data"]]
        label += f"{row['states']:,} states, two levels, {row['parameters'] / 1e6:.1f} M"
        if row.get("factored"):
            label = label.replace("two levels", "one level, factored")
        if row.get("last_dropout") is not None:
            label += f", dropout falls from {row['dropout']} to {row['last_dropout']}"
        if row.get("average") is not None:
            label += ", parameters averaged"
        if "parts" in row:
            label += f", {row['name']}"
        if row.get("first") is not None:
            label += ", 5 epochs and 5 more"
        assert found[label][0] == f"{row['valid_perplexity']:.1f}"
        assert found[label][1] == f"{row['test_perplexity']:.1f}"
    for row in rows_of("language_model_baselines"):
        (line,) = (line for line in lines if f"{row['test_perplexity']:.1f}" == line[2])
        assert row["model"] in line[0]
        assert line[1] == f"{row['valid_perplexity']:.1f}"


def test_hours_of_the_penn_treebank_are_not_those_of_wikitext():
    numbers, hours = results.language_numbers(), {"ptb": [], "wikitext2": []}
    for row in rows_of("language_models"):
        if (row["panel"], row["states"], row["two_level"]) == ("best", 32768, True):
            hours[row["data"]].append(row["minutes"] / 60)
    penn = hours["ptb"]
    assert numbers["hours_32768"] == f"{min(penn):.1f} to {max(penn):.1f}"
    assert numbers["hours_wiki"] == f"{max(hours['wikitext2']):.1f}"
    assert max(penn) < max(hours["wikitext2"])


def test_clusters_alone_are_beside_what_em_makes_of_them():
    _, lines = cells(results.unsupervised_table())
    ours = {line[0]: float(line[1]) for line in lines}
    alone = ours["Penn, Brown clusters alone"]
    assert results.diversity_numbers()["alone"] == f"{alone:.3f}"
    fitted = [accuracy for name, accuracy in ours.items() if "from clusters" in name]
    assert len(fitted) == 3
    assert max(fitted) < alone < ours["Penn, Brown clusters alone, with exchanges"]


def test_a_row_that_is_not_the_only_one_is_refused():
    with pytest.raises(LookupError, match="one is needed"):
        results.one("throughput", quantity="EM iteration")


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
              and name not in vars(plot_axes)}  # fmt: skip
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


def test_rooms_import_only_those_above_them():
    for index, room in enumerate(rooms.ROOMS):
        assert rooms.imports_of(room) <= set(rooms.ROOMS[:index])
    assert "ops" in rooms.imports_of("distributions")


def test_every_public_name_is_in_the_index():
    index = rooms.index()
    for name in rooms.public_names():
        assert f"[`{name}`](" in index


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
