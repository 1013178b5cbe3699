"""The package as a whole: who may import whom, what an import does, what is documented."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pyrohmm

PACKAGE = Path(pyrohmm.__file__).parent

# First to last: each imports only from those before it.
ORDER = [
    "_checks", "_precision", "_lazy", "_lookup", "sequences", "processes", "batches",
    "_compiled", "_compiled_blocks", "_compiled_clusters",
    "_chain", "_steps", "_messages", "_plan", "_blockwise", "recursions",
    "distributions", "cooccurrence", "dpp", "msteps",
    "hmm", "modules", "_brown", "clusters", "blocks", "block_hmm",
    "_emission", "normals", "emissions", "tabular", "dense",
    "neural", "tagging", "guides", "models", "validation", "results", "starts",
    "persistence", "checkpoints", "_training", "fit", "em",
    "metrics", "queries", "streaming", "conversion",
    "readers", "datasets", "language", "draws", "inference_data", "plots",
    "train_lm",
]  # fmt: skip

# Imports inside functions: (module, what it imports). What is optional, and what is built upwards.
WITHIN = {("hmm", "tabular")}

# What is run by `python -m`, and speaks to whoever has called it.
COMMANDS = {"train_lm"}

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def tree_of(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text())


def targets(node):
    """Modules of this package that an import names."""
    if isinstance(node, ast.ImportFrom) and node.level == 1:
        return {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyrohmm"):
        return (
            {a.name for a in node.names} if "." not in node.module else {node.module.split(".")[1]}
        )
    if isinstance(node, ast.Import):
        return {a.name.split(".")[1] for a in node.names if a.name.startswith("pyrohmm.")}
    return set()


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(tree, inside_functions):
    """What a module imports from this package when it is imported, or later."""
    found = set()
    stack = [(node, False) for node in tree.body]
    while stack:
        node, inside = stack.pop()
        if is_for_types(node):
            continue
        if inside == inside_functions:
            found |= targets(node)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_upwards(name):
    assert name in ORDER, f"{name} has no place in the order of modules yet"
    assert imported(tree_of(name), inside_functions=False) <= set(ORDER[: ORDER.index(name)])


def test_imports_inside_functions_are_those_that_have_to_be():
    found = {(name, target) for name in MODULES for target in imported(tree_of(name), True)}
    assert found <= WITHIN


@pytest.mark.parametrize("name", sorted({*MODULES} - COMMANDS))
def test_nothing_prints(name):
    """Nor writes to a stream, nor configures the logs of others."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {
                "print", "sys.stdout.write", "sys.stderr.write", "pprint", "logging.basicConfig",
                "warnings.filterwarnings", "warnings.simplefilter",
            }, f"line {node.lineno}"  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_errors_of_users_are_not_assertions(name):
    """``assert`` disappears under ``python -O``; it may only state what narrows a type."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Assert):
            assert ast.unparse(node.test).endswith(("is not None", "is None"))


@pytest.mark.parametrize("name", ["__init__", *MODULES])
def test_nothing_is_imported_by_a_star(name):
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names)


def test_the_package_itself_only_names_things():
    """Each ``X as X``, sorted in ``__all__``; no logic."""
    tree = tree_of("__init__")
    named = set()
    for node in tree.body[1:-1]:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name
            named.add(alias.name)
    assert isinstance(tree.body[-1], ast.Assign)
    assert set(pyrohmm.__all__) == named
    assert len(pyrohmm.__all__) == len(named)


@pytest.mark.parametrize("name", pyrohmm.__all__)
def test_every_public_name_exists_and_says_what_it_is(name):
    thing = getattr(pyrohmm, name)
    assert inspect.getdoc(thing)
    assert (thing.__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("_")])
def test_everything_public_is_documented(name):
    tree = tree_of(name)
    assert ast.get_docstring(tree)
    missing = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            members = [node, *(node.body if isinstance(node, ast.ClassDef) else [])]
            missing += [
                member.name
                for member in members
                if isinstance(member, ast.FunctionDef | ast.ClassDef)
                and not member.name.startswith("_")
                and not ast.get_docstring(member)
            ]
    assert not missing


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
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "the import printed something"
    return json.loads(lines[0])


def test_importing_changes_no_setting(effect):
    assert effect["changed"] == []


@pytest.mark.parametrize("library", ["matplotlib", "arviz", "numba", "pandas", "xarray", "pooch"])
def test_importing_loads_nothing_heavy(effect, library):
    assert library not in {name.split(".")[0] for name in effect["loaded"]}
