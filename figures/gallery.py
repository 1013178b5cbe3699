"""The pictures of ``docs/gallery.md``, drawn by the code of that page: one after each block.

    python figures/gallery.py

A block of code that is followed by an image leaves what it draws in ``axes``.
"""

import re
from pathlib import Path

from common import arguments
from matplotlib import pyplot

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gallery.md"
PART = re.compile(r"^```python\n(?P<code>.*?)^```|^```\{image\} (?P<image>\S+)", re.S | re.M)


def draw(keep: bool) -> list[Path]:
    """Run the page, and write its pictures if they are to be kept; their paths."""
    names: dict = {"__name__": "gallery"}
    paths = []
    for part in PART.finditer(PAGE.read_text()):
        if part["code"]:
            exec(compile(part["code"], PAGE.name, "exec"), names)
            continue
        paths.append((PAGE.parent / part["image"]).resolve())
        figure = names["axes"].figure
        figure.canvas.draw()
        if keep:
            figure.savefig(paths[-1], dpi=100)
        pyplot.close(figure)
    return paths


def main() -> None:
    options = arguments(__doc__, picture=False)
    pyplot.rcParams.update({"figure.figsize": (5.6, 3.4), "font.size": 9})
    for path in draw(keep=not options.quick):
        print(path.name)


if __name__ == "__main__":
    main()
