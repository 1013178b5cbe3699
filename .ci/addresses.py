"""Give the page of a release the addresses of its repository: ``addresses.py URL TAG``.

Links of README.md to files become absolute, as a wheel has none of them, and pyproject.toml says
where the project is. Only the build of a release runs it, which knows where that is.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")
URLS = """[project.urls]
Repository = "{url}"
Documentation = "{url}/blob/{tag}/docs/index.md"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"

"""


def main(url: str, tag: str) -> None:
    """Rewrite both files in the current directory."""

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        return f"{image}{text}({url}/{'raw' if image else 'blob'}/{tag}/{path})"

    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(LINK.sub(absolute, readme.read_text()))
    before, name, after = project.read_text().partition("[project.optional-dependencies]")
    project.write_text(before + URLS.format(url=url, tag=tag) + name + after)


main(*sys.argv[1:])
