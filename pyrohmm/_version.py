"""The version, which ``pyproject.toml`` alone states."""

from importlib.metadata import version

__version__ = version("pyrohmm")
