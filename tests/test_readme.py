"""What the README shows runs, and its numbers are those of the result files."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import results
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    torch.set_default_dtype(torch.float32)
    names = {}
    exec(code, names)
    hmm = names["hmm"]
    loaded = hmm.emission.probs[:, 5].max().item()
    assert loaded == pytest.approx(0.5, abs=0.1)  # the truth is one half


def test_every_file_it_names_exists():
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert name.startswith("http") or (ROOT / name).exists(), name


def test_a_release_has_the_addresses_of_its_files(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    command = [sys.executable, ROOT / ".ci" / "addresses.py", "https://code.example/a/b", "v1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    before = re.findall(r"\]\(([^)]+)\)", README)
    own = [name for name in before if not name.startswith("http")]
    assert own
    for link, name in zip(links, before, strict=True):
        page, raw = (f"https://code.example/a/b/{kind}/v1/{name}" for kind in ("blob", "raw"))
        assert link == (name if name not in own else raw if name.endswith("png") else page)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://code.example/a/b"
    assert project | {"urls": 0} == tomllib.loads((ROOT / "pyproject.toml").read_text())[
        "project"
    ] | {"urls": 0}


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_the_table_of_speed_is_that_of_the_result_file():
    rows = json.loads((ROOT / "figures" / "throughput.json").read_text())["rows"]
    table = re.search(r"(\| N, T, K, V \|.*?)\n\n", README, re.S).group(1).splitlines()
    methods = [cell.strip() for cell in table[0].split("|")[2:-1]]
    for line in table[2:]:
        shape, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for method, cell in zip(methods, cells):
            method = method.split(",")[0] if method == "pyrohmm, ms" else method
            found = [
                row
                for row in rows
                if row["quantity"] == "evidence and gradient"
                and row["method"] == method
                and ", ".join(map(str, row["shape N, T, K, V"])) == shape
            ]
            if not found:
                assert cell == "—"
            elif method == "pyrohmm":
                assert cell == f"{found[0]['milliseconds']:.1f}"
            else:
                assert cell == f"{found[0]['times_slower_than_pyrohmm'][0]:.1f}×"


def test_what_it_says_of_varying_ratios_was_measured():
    of = {"quantity": "evidence and gradient", "shape N, T, K, V": [64, 200, 128, 1000]}
    dynamax, pyro = (results.one("throughput", method=m, **of) for m in ("dynamax", "DiscreteHMM"))
    middle, low, high = dynamax["times_slower_than_pyrohmm"]
    assert f"the {middle:.1f}× was {low:.1f} to {high:.1f}, and" in README
    assert f"{pyro['times_slower_than_pyrohmm'][0]:.1f}× is of one run." in README
    assert pyro["runs"] == 1


def test_what_it_says_of_numba_was_measured():
    (faster,) = re.findall(r"up to 128 states (\S+ to \S+) times faster", " ".join(README.split()))
    assert faster == results.speed_numbers()["numba"]


def test_what_it_says_of_large_models_was_measured():
    def found(figure, **wanted):
        rows = json.loads((ROOT / "figures" / f"{figure}.json").read_text())["rows"]
        (row,) = [row for row in rows if wanted.items() <= row.items()]
        return row

    three = found("language_models", name="three chains side by side")
    cached = found("ngram_emission", name="three chains and a cache")
    count = found("language_model_baselines", part="kneser-ney-ptb")
    lstm = found("language_model_baselines", part="lstm-ptb")
    runs = [row for row in results.rows("language_models", panel="best", data="ptb", states=32768)
            if "parts" not in row]  # fmt: skip
    runs.sort(key=lambda row: row["valid_perplexity"])  # not by the test text
    single = runs[0]
    published = results.result("language_model_baselines")["published"]
    assert published["Kneser-Ney 5-gram and cache"] < count["paper_test"]
    part = README.split("## Language models")[1].split("## Documentation")[0]
    numbers = re.findall(r"\d[\d,.]*\d", part.replace("(2020)", "").replace("5-gram", ""))
    assert numbers == [
        f"{single['states']:,}", *(f"{row['test_perplexity']:.1f}" for row in runs),
        f"{single['paper_states']:,}", f"{single['paper_test']:.1f}",
        f"{three['states']:,}", f"{three['test_perplexity']:.1f}",
        f"{cached['test_perplexity']:.1f}",
        f"{count['test_perplexity']:.1f}", f"{published['Kneser-Ney 5-gram and cache']:.1f}",
        f"{lstm['minutes']:.0f}", f"{lstm['test_perplexity']:.1f}", f"{lstm['paper_test']:.1f}",
        f"{published['AWD-LSTM']:.1f}", f"{published['AWD-LSTM and cache']:.1f}",
        f"{single['parameters'] / 7.7e6:.1f}",
        f"{three['minutes'] / 60:.1f}",
    ]  # fmt: skip


def test_what_it_says_of_small_em_was_measured():
    said = " ".join(README.split())
    (hmmlearn, dynamax) = re.search(
        r"of 50 steps, 2 states, hmmlearn takes (\S+) times as long, dynamax (\S+)\. ",
        said,
    ).groups()
    shape = {"quantity": "EM iteration", "shape N, T, K, V": [20, 50, 2, 6]}
    for method, number in (("hmmlearn", hmmlearn), ("dynamax", dynamax)):
        row = results.one("throughput", method=method, **shape)
        assert number == f"{row['times_slower_than_pyrohmm'][0]:.1f}"
