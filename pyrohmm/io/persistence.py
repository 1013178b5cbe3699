"""Saving and loading HMMs and modules: tensors and descriptions in files that can run nothing."""

from __future__ import annotations

import inspect
from functools import singledispatch
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution, TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions.utils import logits_to_probs

from .._checks import check_kind
from ..chains.base import Chain
from ..chains.compound import ProductChain, SecondOrderChain
from ..chains.markov import MarkovChain
from ..chains.rates import RateChain
from ..chains.semi_markov import SemiMarkovChain
from ..data.formulas import Design
from ..distributions.block_hmm import BlockHMM
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hard_zeros import (
    ATTRIBUTES,
    argument_names,
    arguments_of,
    built_from,
    holder_of,
)
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM, FactorialHMM, SecondOrderHMM
from ..nn.family import FAMILIES
from ..nn.normals import CentredEmission
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.states import Blocks
from .files import (
    TENSORS,
    FilePath,
    difference,
    grouped,
    kinds,
    made_with,
    pack,
    read_directory,
    unpack,
    write_directory,
)

# Every class that is ever built from a file, besides what emission families emit: by calling it
# with tensors, integers, booleans, and distributions. Programs may add their own.
BUILT_FROM: set[type] = {
    getattr(dist, name)
    for name in (
        "AsymmetricLaplace Bernoulli Beta BetaBinomial Binomial Categorical Cauchy Delta Dirichlet "
        "DirichletMultinomial Exponential Gamma GammaPoisson Geometric Gumbel HalfCauchy "
        "HalfNormal Independent InverseGamma Laplace LogNormal Logistic LowRankMultivariateNormal "
        "MixtureSameFamily Multinomial MultivariateNormal MultivariateStudentT "
        "NanMaskedMultivariateNormal NanMaskedNormal NegativeBinomial Normal OneHotCategorical "
        "Pareto Poisson ProjectedNormal SoftLaplace StudentT Uniform VonMises Weibull"
    ).split()
}


def save(thing: Any, directory: FilePath) -> None:
    """Save an HMM, a fit, a module or a design to a directory, in place of what was there before.

    Of a module its ``state_dict()`` is saved, not its code: :func:`load_into` puts it into a module
    that was built in the same way. Variables that have a prior are no part of it: save the fit.
    A fit is saved with its guide or its chains: see :func:`load_fit`. Of a fit whose HMM does not
    depend on data, and of an estimator, the HMM is saved too, for other data
    ``load_hmm(directory).with_lengths``. ``PosteriorDraws.of(fit)`` are samples of the posterior:
    see :func:`load_draws`. An HMM is saved whole: see :func:`load_hmm`. A design of
    :func:`formulas` is saved with its centres, knots and levels: see :func:`load_formulas`. No
    gradient information is saved.

    At any moment there is the old content or the new one, whole. Links to files in the directory
    are replaced, not followed. Two files are written:
    ``tensors.safetensors``, and ``pyrohmm.json``, a copy of its description to be read by people.

    Args:
        thing: An :class:`HMM`, :class:`HSMM`, :class:`FactorialHMM`, :class:`SecondOrderHMM`,
            :class:`ContinuousTimeHMM` or
            :class:`BlockHMM`; a :class:`Fit` or an estimator; :class:`PosteriorDraws`; a design of
            :func:`formulas`; or a ``torch.nn.Module`` such as an :class:`HMMModule`.
        directory: A directory that does not exist, is empty, or holds what was saved before. The
            one above it must exist.

    Raises:
        TypeError: If it is none of these, or the emission of the HMM is of a class that is not in
            ``BUILT_FROM``; nothing is written then.
        ValueError: If the directory holds something else.
        OSError: If the files cannot be written.

    Example:
        >>> hmm = HMM(torch.zeros(1), torch.zeros(1, 1), Poisson(torch.ones(1)), torch.tensor([2]))
        >>> directory = getfixture("tmp_path") / "counts"
        >>> save(hmm, directory)
        >>> load_hmm(directory).emission.rate
        tensor([1.])
    """
    write_directory(directory, *describe(thing))


def load_hmm(directory: FilePath) -> HMM:
    """Load the HMM that was saved to ``directory``, on the CPU, bit for bit.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    tensors, meta = read_directory(directory, "hmm", "fit")
    path = Path(directory) / TENSORS
    if meta["kind"] == "fit":
        tensors, meta = grouped(tensors).get("hmm", {}), meta["hmm"]
        if isinstance(meta, str):
            text = f"{path} holds a fit without one HMM for all data: {meta}"
            raise ValueError(f"{text} Call load_fit(directory, model, data).hmm(data).")
    try:
        return restored(tensors, meta)
    except Exception as error:
        raise ValueError(f"{path} does not describe an HMM: {error}") from error


def load_into(module: nn.Module, directory: FilePath) -> None:
    """Load saved parameters into ``module``; if they do not fit, it is unchanged.

    Parameters stay the objects they are, on their devices, so that optimisers keep them.

    Args:
        module: Of the class that was saved, with parameters and buffers of the same names, shapes
            and dtypes, and the same designs of :func:`formulas`.
        directory: Where a module was saved.

    Raises:
        TypeError: If ``module`` is not a module, or has state that is not tensors.
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, or differ from ``module``, which is then unchanged.

    Example:
        >>> first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> directory = getfixture("tmp_path") / "linear"
        >>> save(first, directory)
        >>> load_into(second, directory)
        >>> bool((first.weight == second.weight).all())
        True
    """
    check_kind("module", module, nn.Module, "a torch.nn.Module", "Build it as it was.")
    tensors, meta = read_directory(directory, "module")
    for path, part in module.named_modules():
        if isinstance(part, CentredEmission):
            part.complete(tensors, path and f"{path}.")
    here, there = kinds(module.state_dict()), kinds(tensors)
    here["its class"], there["its class"] = type(module).__qualname__, str(meta.get("class"))
    check_same(directory, there, here, "module")
    check_made(directory, meta.get("made", {}), module, "module")
    module.load_state_dict(tensors)


def check_same(directory: FilePath, there: dict[str, str], here: dict[str, str], what: str) -> None:
    """Raise unless names and kinds in a file are those here, of ``what`` was given."""
    found = {name: (there.get(name, "not"), here.get(name, "not")) for name in sorted(here | there)}
    wrong = [f"{n} is {a} in the file, {b} in {what}" for n, (a, b) in found.items() if a != b]
    if wrong:
        text = f"{Path(directory) / TENSORS} differs from {what}: {'; '.join(wrong)}"
        raise ValueError(f"{text}. Build it as it was, a design by load_formulas.")


def check_made(directory: FilePath, there: dict[str, Any], module: Any, what: str) -> None:
    """Raise if ``made_with`` of a module, given as ``what``, says other than a file."""
    for name, own in made_with(module).items():
        if name in there and (found := difference(there[name], own, name)) is not None:
            check_same(directory, {found[0]: found[1]}, {found[0]: found[2]}, what)


@singledispatch
def describe(thing: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON metadata of an HMM or a module; of fits and others where they are read."""
    if isinstance(thing, HMM) and _CHAINS.get(type(thing)) is type(thing.chain):
        return _describe_hmm(thing)
    if type(thing) is BlockHMM:
        return _describe_block_hmm(thing)
    if isinstance(thing, nn.Module):
        made = {n: part for n, part in made_with(thing).items() if n.endswith("columns")}
        meta = {"kind": "module", "class": type(thing).__qualname__, "made": made}
        return dict(thing.state_dict()), meta
    raise TypeError(
        f"thing must be an HMM, a torch.nn.Module, fit or estimator; got {type(thing).__name__}. "
        "Of an HMM of your own class or chain, save hmm.expanded(), the same as a Markov chain, or "
        "the module that builds it."
    )


@describe.register
def _(design: Design) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a design: plain data; its formulas are kept for comparison, as calls of functions."""
    tensors: dict[str, Tensor] = {}
    return tensors, {"kind": "formulas", "parts": pack(design.parts, tensors)}


def load_formulas(directory: FilePath, **parts: str) -> Design:
    """Load a design that was saved, for the formulas that it is of, which are code.

    Args:
        directory: Where ``save(design, directory)`` has put it.
        **parts: The formulas, as they were given to :func:`formulas`; white space may differ.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or have other formulas.

    Example:
        >>> table = {"dose": [0.0, 1.0, 5.0], "sex": ["f", "m", "f"]}
        >>> directory = getfixture("tmp_path") / "design"
        >>> save(formulas(table, loc="~ center(dose) + C(sex)"), directory)
        >>> design = load_formulas(directory, loc="~ center(dose) + C(sex)")
        >>> design.matrix({"dose": [2.0], "sex": ["m"]})
        array([[1., 0., 1.]])
    """
    tensors, meta = read_directory(directory, "formulas")
    kept = {"columns": list, "state": dict, "levels": dict}
    try:
        found = unpack(meta["parts"], tensors)
        there = {name: "".join(part["formula"].split()) for name, part in found.items()}
        design = Design({
            name: {"formula": parts.get(name)} | {key: kept[key](part[key]) for key in kept}
            for name, part in found.items()
        })  # fmt: skip
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        text = f"{Path(directory) / TENSORS} does not describe a design"
        raise ValueError(f"{text}: {error!r}") from error
    here = {name: "".join(text.split()) for name, text in parts.items()}
    check_same(directory, there, here, "the call")
    return design


def restored(tensors: dict[str, Tensor], meta: dict[str, Any]) -> HMM:
    """Rebuild an HMM from tensors and metadata, and raise if a tensor is left over."""
    tensors = dict(tensors)
    build = _build_block_hmm if meta.get("class") == "BlockHMM" else _build_hmm
    hmm = build(tensors, meta)
    if tensors:
        raise ValueError(f"nothing needs the tensors {sorted(tensors)}")
    return hmm


# An HMM --------------------------------------------------------------------------------------

_COMPUTED = {"covariance_matrix", "precision_matrix"}  # from scale_tril
# Of every class the chain that it is built with: HMM.of gives an HMM any other.
_CHAINS: dict[type[HMM], type[Chain]] = {
    HMM: MarkovChain, HSMM: SemiMarkovChain, ContinuousTimeHMM: RateChain,
    FactorialHMM: ProductChain, SecondOrderHMM: SecondOrderChain,
}  # fmt: skip
_OF_DATA = ("lengths", "observed", "allowed")


def _arguments(family: type[HMM]) -> list[inspect.Parameter]:
    """Constructor arguments that describe the chain of an HMM, with ``emission_per_step``."""
    others = ("self", "emission", "validate_args", "num_steps", "data", *_OF_DATA)
    found = dict(inspect.signature(family.__init__).parameters)
    if "data" in found:  # those of every HMM
        found["emission_per_step"] = inspect.signature(HMM._compose).parameters["emission_per_step"]
    return [argument for name, argument in found.items() if name not in others]


def _describe_hmm(hmm: HMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {"kind": "hmm", "class": type(hmm).__name__}
    for name in (*(argument.name for argument in _arguments(type(hmm))), *_OF_DATA):
        value = getattr(hmm, name)
        if isinstance(value, tuple):
            tensors |= {f"{name}.{m}": part for m, part in enumerate(value)}
        elif isinstance(value, bool):
            meta[name] = value
        elif value is not None:
            tensors[name] = value
    meta["validate_args"], meta["num_steps"] = vars(hmm).get("_validate_args"), hmm._num_steps
    meta["emission"] = _describe_part(hmm.emission, "emission", tensors)
    return tensors, meta


def _build_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> HMM:
    """Rebuild an HMM from its metadata; its tensors are taken out of ``tensors``."""
    family = {family.__name__: family for family in _CHAINS}.get(meta.get("class", "HMM"))
    if family is None:
        raise ValueError(f"its class {meta['class']!r} is not one that can be built")
    built: dict[str, Any] = {name: tensors.pop(name, None) for name in _OF_DATA}
    for argument in _arguments(family):
        name = argument.name
        if isinstance(argument.default, bool):
            built[name] = meta.get(name, argument.default)
        elif name in tensors:
            built[name] = tensors.pop(name)
        elif f"{name}.0" in tensors:
            parts = [key for key in tensors if key.startswith(f"{name}.")]
            built[name] = [tensors.pop(f"{name}.{m}") for m in range(len(parts))]
    built["emission"] = _build_part(meta.get("emission"), "emission", tensors)
    hmm = family(**built, validate_args=meta.get("validate_args"))
    num_steps = meta.get("num_steps")
    return hmm if num_steps is None else hmm.replace(num_steps=num_steps)


def _describe_block_hmm(hmm: BlockHMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if hmm.carried is not None:
        raise TypeError("an HMM of continued sequences cannot be saved; save dense().")
    chain, blocks = hmm.transition, hmm.blocks
    tensors = {name: getattr(hmm, name) for name in ("log_initial", "log_emission", "lengths")}
    tensors |= {"symbol_block": blocks.symbol_block, "states": blocks.states}
    found = {"transition": chain, "observed": hmm.observed}
    if isinstance(chain, InnerProductTransition):
        names = ("leave", "enter", "block_logits")
        found |= {"transition": None, **{name: getattr(chain, name) for name in names}}
    tensors |= {name: tensor for name, tensor in found.items() if tensor is not None}
    validation = vars(hmm).get("_validate_args")
    return tensors, {"kind": "hmm", "class": "BlockHMM", "validate_args": validation}


def _build_block_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> BlockHMM:
    """Rebuild a block HMM from its metadata; its tensors are taken out of ``tensors``."""
    initial, emission = tensors.pop("log_initial"), tensors.pop("log_emission")
    states = tensors.pop("states")
    blocks = Blocks(tensors.pop("symbol_block"), (states >= 0).sum(-1))
    if not torch.equal(states, blocks.states):
        text = "its blocks must not overlap; these do, as in version 0.5 alone"
        raise ValueError(f"{text}. Fit the model again")
    transition: Any = tensors.pop("transition", None)
    if transition is None:
        vectors = tensors.pop("leave"), tensors.pop("enter")
        transition = InnerProductTransition(*vectors, blocks, tensors.pop("block_logits", None))
    further: Any = {name: tensors.pop(name, None) for name in ("lengths", "observed")}
    further["validate_args"] = meta.get("validate_args")
    return BlockHMM(initial, transition, emission, blocks, **further)


def _describe_part(part: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a distribution for JSON; its tensors are put into ``tensors`` under ``path``."""
    if isinstance(part, list | tuple):
        return [_describe_part(item, f"{path}.{i}", tensors) for i, item in enumerate(part)]
    family = type(part)
    if _classes().get(family.__name__) is not family:
        raise TypeError(
            f"{path} is a {family.__module__}.{family.__qualname__}, which cannot be saved. Add it "
            "to pyrohmm.io.persistence.BUILT_FROM, or save the module that builds the HMM."
        )
    options: dict[str, float | None] = {}
    parts: list[Any] = []
    for name, value in arguments_of(part).items():
        if isinstance(value, Tensor):
            tensors[f"{path}.{name}"] = value
        elif isinstance(value, float | int | None):
            options[name] = value
        else:
            inner = f"{path}.{ATTRIBUTES.get(name, name)}"
            parts.append(_describe_part(value, inner, tensors))
    node = {"class": family.__name__, "validate_args": vars(part).get("_validate_args")}
    return node | {"options": options, "parts": parts}


def _build_part(
    node: Any, path: str, tensors: dict[str, Tensor]
) -> TorchDistribution | list[TorchDistribution]:
    """Rebuild a distribution from its description; its tensors are taken out of ``tensors``."""
    if isinstance(node, list):
        return [_build_part(item, f"{path}.{i}", tensors) for i, item in enumerate(node)]
    family = _classes().get(node["class"])
    if family is None:
        raise ValueError(f"{path} is of class {node['class']}, which is not one that can be built")
    names = argument_names(family)
    there = [name for name in names if f"{path}.{name}" in tensors]
    given: dict[str, Any] = {name: tensors.pop(f"{path}.{name}") for name in there}
    either: Any = {name: given.pop(name) for name in ("probs", "logits") if name in given}
    for name in _COMPUTED & given.keys():  # of files of version 0.4
        del given[name]
    for name, inner in zip(names, node["parts"]):
        given[name] = _build_part(inner, f"{path}.{ATTRIBUTES.get(name, name)}", tensors)
    first = dict(list(either.items())[:1])
    built = family(**given, **first, **node["options"], validate_args=node.get("validate_args"))
    if either:
        _restore(holder_of(built), either, path)
    return built


def _restore(holder: Any, either: dict[str, Tensor], path: str) -> None:
    """Replace the probabilities that the constructor normalised again by the saved ones.

    Files of version 0.4 may have both ``probs`` and ``logits``.
    """
    held = vars(holder)
    for name in ("probs", "logits"):
        held.pop(name, None)
    held.update(either)
    name = built_from(holder)
    is_binary = not isinstance(holder, torch.distributions.Categorical)
    if len(either) == 2:
        held.pop("logits" if name == "probs" else "probs")
    if "_param" in held:  # torch keeps there what a distribution was built from
        held["_param"] = held[name]
    probs = held[name] if name == "probs" else logits_to_probs(held[name], is_binary)
    wrong = (probs < 0) | (probs > 1 + 1e-4)
    if not is_binary:
        sums = (held[name] if name == "probs" else held[name].exp()).sum(-1, keepdim=True)
        wrong = wrong | ((sums - 1).abs() > 1e-4)
    if bool(wrong.any()):
        raise ValueError(f"{path}.{name} must be probabilities that sum to one, or their logs")


def _classes() -> dict[str, type]:
    """Distribution classes that a file may name, by name."""
    kinds = [*BUILT_FROM, *(kind for kind in FAMILIES if issubclass(kind, TorchDistributionMixin))]
    return {kind.__name__: kind for kind in kinds}
