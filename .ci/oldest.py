"""Print the lower bounds of what ``pyproject.toml`` requires, as constraints of pip.

Of the tools only those that run the tests count.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
runners = re.compile("pytest|hypothesis|hmmlearn")
needed = [
    *project["dependencies"],
    *extras["compiled"],
    *extras["data"],
    *(line for line in extras["test"] if runners.match(line)),
]
print("\n".join(line.replace(">=", "==") for line in needed))
