"""The package as a whole: who may import whom, what an import does, what is documented."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pyrohmm

PACKAGE = Path(pyrohmm.__file__).parent

# The rooms, first to last: each imports only from those before it. The modules of a room are listed
# in its docstring, in the same sense.
ROOMS = [
    "ops",
    "chains",
    "data",
    "distributions",
    "nn",
    "io",
    "infer",
    "analysis",
    "language",
    "sklearn",
]

# What needs an extra, and is imported by those who want it.
EXTRA_ROOMS = {"sklearn"}

# What everything may use, and what lies above all rooms.
PRIVATE = ["_imports", "_arrays", "_choices", "_transforms", "_checks", "_precision", "_sync"]
ENTRIES = {"testing", "language.__main__"}

# What is run by ``python -m``, and speaks to whoever has called it.
COMMANDS = {"language.command"}

# Larger than is comfortable, each with the reason.
LONG_MODULES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {
    "distributions.hmm.HMM": "all questions to a distribution, each a method of few lines",
    "data.sequences.Sequences": "four ways to make sequences, whose arguments take half of it",
    "infer.results.Fit": "all that is asked of a fit, each a method of few lines",
}
LONG_FUNCTIONS: dict[str, str] = {
    "infer.em.fit_em": "explains fifteen arguments; its body makes the parts of the loop",
}
# Of modules lines of code count, so that none is split for the sake of its docstrings. Of the whole
# package half is code, a quarter docstrings and the rest imports, decorators and space.
MOST_LINES = {"module": 350, "class": 350, "function": 80, "package": 47_260}


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = sorted(
    name_of(path) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__init__")
)


def path_of(name):
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def tree_of(name):
    return ast.parse(path_of(name).read_text())


def listed(room):
    """The modules of a room, in the order in which its docstring lists them."""
    text = ast.get_docstring(tree_of(room))
    return [
        line.split("``")[1] for line in text.splitlines() if line.startswith("``") and "  " in line
    ]


ORDER = [*PRIVATE, *(f"{room}.{module}" for room in ROOMS for module in listed(room))]


def targets(name, node):
    """Modules of this package that an import of module ``name`` reads."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.split(".")[0] == "pyrohmm"}
    if not isinstance(node, ast.ImportFrom):
        return set()
    if node.level == 0:
        return {node.module} if node.module.split(".")[0] == "pyrohmm" else set()
    base = name.split(".")[: -node.level]
    base += node.module.split(".") if node.module else []
    if base and path_of(".".join(base)).name != "__init__.py":
        return {".".join(base)}
    return {".".join([*base, alias.name]) for alias in node.names}


def imported(name):
    """What a module imports from this package, wherever it does so."""
    return set().union(*(targets(name, node) for node in ast.walk(tree_of(name))), set())


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ENTRIES])
def test_imports_point_one_way(name):
    """From the rooms before its own, and from the modules before it in its own room."""
    assert name in ORDER, f"{name} is not listed in the docstring of its room"
    assert imported(name) <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_its_modules_and_no_others(room):
    own = {name.split(".", 1)[1] for name in MODULES if name.startswith(f"{room}.")} - {"__main__"}
    assert len(listed(room)) == len(set(listed(room)))
    assert set(listed(room)) == own


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_itself_only_names_things(room):
    """Each ``X as X``, all from its own modules."""
    for node in tree_of(room).body[1:]:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        assert all(alias.asname == alias.name for alias in node.names)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ENTRIES])
def test_nothing_is_imported_inside_a_function(name):
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            assert not any(targets(name, inner) for inner in ast.walk(node)), f"line {node.lineno}"


def sizes(kind, nodes):
    """Lines of what is longer than the limit, by name."""
    return {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, nodes) and node.end_lineno - node.lineno + 1 > MOST_LINES[kind]
    }


def code_lines(name):
    """Lines of a module that are neither docstrings, imports, comments nor blank."""
    tree, other = tree_of(name), set()
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        first = node.body[0] if docstring and ast.get_docstring(node) is not None else node
        if first is not node or isinstance(node, ast.Import | ast.ImportFrom):
            other |= set(range(first.lineno, first.end_lineno + 1))
    lines = enumerate(path_of(name).read_text().splitlines(), 1)
    return sum(n not in other and line.strip()[:1] not in {"", "#"} for n, line in lines)


def test_nothing_is_longer_than_it_should_be():
    """But what is listed above; and what is listed is still that long."""
    lines = {name: len(path_of(name).read_text().splitlines()) for name in MODULES}
    long = {name for name in MODULES if code_lines(name) > MOST_LINES["module"]}
    assert long == set(LONG_MODULES)
    assert set(sizes("class", ast.ClassDef)) == set(LONG_CLASSES)
    assert set(sizes("function", ast.FunctionDef)) == set(LONG_FUNCTIONS)
    assert sum(lines.values()) < MOST_LINES["package"]


@pytest.mark.parametrize("name", MODULES)
def test_shapes_are_broadcast_in_one_place(name):
    """The first call of torch's own imports a compiler, whose half Ctrl-C would leave behind."""
    wanted = name == "_checks"
    assert ("torch.broadcast_shapes(" in path_of(name).read_text()) == wanted


@pytest.mark.parametrize("name", sorted({*MODULES} - COMMANDS))
def test_nothing_prints(name):
    """Nor writes to a stream, nor configures the logs of others."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {
                "print", "sys.stdout.write", "sys.stderr.write", "pprint", "logging.basicConfig",
                "warnings.filterwarnings", "warnings.simplefilter",
            }, f"line {node.lineno}"  # fmt: skip


# ``testing`` is for the tests of others, and compares as tests do.
@pytest.mark.parametrize("name", sorted({*MODULES} - {"testing"}))
def test_errors_of_users_are_not_assertions(name):
    """``assert`` disappears under ``python -O``; it may only state what narrows a type."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Assert):
            assert ast.unparse(node.test).endswith(("is not None", "is None"))


def public_names():
    """The names that the package itself re-exports, each as ``X as X``; it holds nothing else."""
    nodes = ast.parse((PACKAGE / "__init__.py").read_text()).body[1:-2]  # without ``__all__``
    assert all(isinstance(node, ast.ImportFrom) for node in nodes)
    aliases = [alias for node in nodes for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases)
    return [alias.name for alias in aliases]


def test_help_lists_what_a_star_brings_and_that_is_hardly_a_module():
    """By task, a line each: ``from pyrohmm import *`` must not hide a name such as ``data``."""
    modules = {"metrics", "plots", "queries", "starts"}
    assert modules < {*pyrohmm.__all__}
    assert {"bands", "emission", "losses", "transition"} < {*dir(pyrohmm.plots)}
    assert {*dir(pyrohmm.plots)}.isdisjoint({"Tensor", "check_fit", "imported", "torch", "_arrow"})
    names = {*pyrohmm.__all__} - modules
    assert all(inspect.isclass(x) or inspect.isroutine(x) for x in map(pyrohmm.__dict__.get, names))
    assert names == {n for n in public_names() if callable(getattr(pyrohmm, n))}
    told = {*re.findall(r"``(\w+)``", pyrohmm.__doc__)}
    assert names <= told
    assert all(hasattr(pyrohmm, name) or hasattr(pyrohmm.Fit, name) for name in told)
    assert len(pyrohmm.__doc__.splitlines()) < 80


def test_the_version_is_that_of_the_project():
    """``pyproject.toml`` alone states it."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert pyrohmm.__version__ == project["version"]


@pytest.mark.parametrize("name", [name for name in public_names() if name != "__version__"])
def test_every_public_name_exists_and_says_what_it_is(name):
    thing = getattr(pyrohmm, name)
    assert inspect.getdoc(thing)
    assert (thing.__doc__ or "").strip()


SNAPSHOT = """
import json, logging, os, random, signal, sys, warnings
import numpy, scipy.optimize, torch, tqdm, pyro, pyro.infer, pyro.distributions

def state():
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "validate": torch.distributions.Distribution._validate_args,
        "pyro": {name: str(value) for name, value in pyro.settings.get().items()},
        "parameters": sorted(pyro.get_param_store().keys()),
        "random": [torch.get_rng_state().tolist(), str(random.getstate()),
                   str(numpy.random.get_state())],
        "warnings": [str(entry) for entry in warnings.filters],
        "numpy": numpy.geterr(),
        "logs": [logging.root.level, len(logging.root.handlers)],
        "environment": dict(os.environ),
        "recursion": sys.getrecursionlimit(),
        "interrupt": str(signal.getsignal(signal.SIGINT)),
    }

before, loaded = state(), set(sys.modules)
import pyrohmm
after = state()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "loaded": sorted(set(sys.modules) - loaded),
}))
"""


@pytest.fixture(scope="module")
def effect():
    """What ``import pyrohmm`` does to a process that has imported what it requires."""
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "the import printed something"
    return json.loads(lines[0])


def test_importing_changes_no_setting(effect):
    assert effect["changed"] == []


@pytest.mark.parametrize(
    "library", ["matplotlib", "arviz", "numba", "pandas", "xarray", "pooch", "sklearn"]
)
def test_importing_loads_nothing_heavy(effect, library):
    assert library not in {name.split(".")[0] for name in effect["loaded"]}


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_also_that_of_its_room(name):
    """``pyrohmm.nn.TabularHMM`` is ``pyrohmm.TabularHMM``, as Pyro's users expect."""
    thing = getattr(pyrohmm, name)
    rooms = [getattr(pyrohmm, room) for room in ROOMS if room not in EXTRA_ROOMS]
    owners = [room for room in rooms if getattr(room, name, None) is thing]
    assert owners or name in {*ROOMS, "__version__"}
