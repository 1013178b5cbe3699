"""Notebooks hold the cells of the tutorials, with outputs; ``make smoke`` runs them."""

import json
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "tutorials").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_the_script_rendered(script):
    cells = jupytext.read(script).cells
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    rendered = [(c["cell_type"], "".join(c["source"])) for c in notebook["cells"]]
    assert rendered == [(cell.cell_type, cell.source) for cell in cells]
    ran = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in ran)
    outputs = [output for cell in ran for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "site-packages" not in json.dumps(outputs), "a warning names files of one machine"


def test_there_are_tutorials():
    assert len(SCRIPTS) >= 2
