"""The gallery of tutorials, from the notebooks in ``tutorials/``.

Notebooks are copied as they are, with the outputs they carry; nothing is run.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
Notebook = dict[str, Any]


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def title_of(notebook: Notebook) -> str:
    """The first heading, without its number."""
    return re.sub(r"^#\s*(\d+\.)?\s*", "", source(notebook["cells"][0]).splitlines()[0])


def promise_of(notebook: Notebook, longest: int = 150) -> str:
    """The first sentences below the heading, of at most so many characters (one at least)."""
    paragraph = source(notebook["cells"][0]).split("\n\n")[1].replace("\n", " ").rstrip(":")
    sentences = re.split(r"(?<=\.) (?=[A-Z])", paragraph)
    kept = sentences[0]
    for sentence in sentences[1:]:
        if len(kept) + len(sentence) > longest:
            break
        kept = f"{kept} {sentence}"
    return kept


def first_picture(notebook: Notebook) -> bytes | None:
    """The first picture among the outputs, as a PNG file."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode("".join(output["data"]["image/png"]))
    return None


def card(name: str, notebook: Notebook) -> str:
    """One card of the gallery, in the words of sphinx-design."""
    return "\n".join(
        [
            f":::{{grid-item-card}} {title_of(notebook)}",
            f":link: {name}",
            ":link-type: doc",
            f":img-top: {name}.png",
            "",
            promise_of(notebook),
            ":::",
        ]
    )


def keep(path: Path, content: bytes) -> None:
    """Write a file that is new or has changed; Sphinx reads again what was written."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def write(folder: Path) -> None:
    """Copy the notebooks and their first pictures into ``folder``, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    cards, names = [], []
    for path in [*sorted(TUTORIALS.glob("[0-9]*.ipynb")), TUTORIALS / "coming_from.ipynb"]:
        notebook = json.loads(path.read_text())
        keep(folder / path.name, path.read_bytes())
        picture = first_picture(notebook)
        if picture is None:
            raise ValueError(f"{path.name} has no picture among its outputs; render it anew.")
        keep(folder / f"{path.stem}.png", picture)
        cards.append(card(path.stem, notebook))
        names.append(path.stem)
    lines = [
        "# Tutorials",
        "",
        "Each is a notebook that runs in under two minutes on a laptop and needs no download. The",
        "sources are the scripts of the same names in `tutorials/`.",
        "",
        "::::{grid} 1 2 2 3",
        ":gutter: 3",
        "",
        "\n\n".join(cards),
        "",
        "::::",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *names,
        "```",
    ]
    keep(folder / "index.md", ("\n".join(lines) + "\n").encode())
