"""Saving and loading HMMs and modules: tensors and descriptions in files that can run nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions.utils import logits_to_probs, probs_to_logits

from ..chains.base import Chain
from ..chains.markov import MarkovChain
from ..chains.product import ProductChain
from ..chains.rates import RateChain
from ..chains.second_order import SecondOrderChain
from ..chains.semi_markov import SemiMarkovChain
from ..distributions.block_hmm import BlockHMM
from ..distributions.context_tables import AutoregressiveCategorical
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.factorial_hmm import FactorialHMM
from ..distributions.hard_zeros import built_from
from ..distributions.hmm import HMM
from ..distributions.hsmm import HSMM
from ..distributions.observation import Streams, Tied, is_spherical, is_tied
from ..distributions.second_order_hmm import SecondOrderHMM
from ..distributions.vector_autoregression import AutoregressiveNormal
from ..nn.circular import Angle
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.states import Blocks
from .files import TENSORS, FilePath, read_directory, write_directory


class Arguments(NamedTuple):
    """The arguments that a distribution is built from: ``cls(*parts, **tensors, **options)``.

    All are names of attributes; those of tensors and options are names of arguments as well.

    Attributes:
        tensors: Tensors of any shape.
        probs_or_logits: Whether it is built from ``probs`` or ``logits`` besides; the one it was
            built from is saved.
        options: Integers and booleans.
        parts: Distributions, or lists of them; passed by position.
        cached: Functions of the tensors that it may keep, because it was given them or has
            computed them; kept ones are saved too, for a second computation may round otherwise.
    """

    tensors: tuple[str, ...] = ()
    probs_or_logits: bool = False
    options: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()


# Every class that is ever built from a file. An entry here is all that a further one needs, if it
# takes validate_args; programs may add their own.
BUILT_FROM: dict[type, Arguments] = {
    **dict.fromkeys(
        (dist.Cauchy, dist.Gumbel, dist.Laplace, dist.LogNormal, dist.Logistic,
         dist.NanMaskedNormal, dist.Normal, dist.SoftLaplace),
        Arguments(("loc", "scale")),
    ),
    **dict.fromkeys(
        (dist.Bernoulli, dist.Categorical, dist.Geometric, dist.OneHotCategorical),
        Arguments(probs_or_logits=True),
    ),
    **dict.fromkeys(
        (dist.Gamma, dist.GammaPoisson, dist.InverseGamma), Arguments(("concentration", "rate"))
    ),
    **dict.fromkeys(
        (dist.MultivariateNormal, dist.NanMaskedMultivariateNormal),
        Arguments(("loc", "scale_tril"), cached=("covariance_matrix", "precision_matrix")),
    ),
    **dict.fromkeys((dist.Binomial, dist.NegativeBinomial), Arguments(("total_count",), True)),
    **dict.fromkeys((dist.Dirichlet, dist.ProjectedNormal), Arguments(("concentration",))),
    **dict.fromkeys((dist.HalfCauchy, dist.HalfNormal), Arguments(("scale",))),
    dist.AsymmetricLaplace: Arguments(("loc", "scale", "asymmetry")),
    dist.Beta: Arguments(("concentration1", "concentration0")),
    dist.BetaBinomial: Arguments(("concentration1", "concentration0", "total_count")),
    dist.Delta: Arguments(("v", "log_density"), options=("event_dim",)),
    dist.DirichletMultinomial: Arguments(("concentration", "total_count"), options=("is_sparse",)),
    dist.Exponential: Arguments(("rate",)),
    dist.Independent: Arguments(options=("reinterpreted_batch_ndims",), parts=("base_dist",)),
    dist.LowRankMultivariateNormal: Arguments(("loc", "cov_factor", "cov_diag")),
    dist.MixtureSameFamily: Arguments(parts=("mixture_distribution", "component_distribution")),
    dist.Multinomial: Arguments(probs_or_logits=True, options=("total_count",)),
    dist.MultivariateStudentT: Arguments(("df", "loc", "scale_tril")),
    dist.Pareto: Arguments(("scale", "alpha")),
    dist.Poisson: Arguments(("rate",), options=("is_sparse",)),
    dist.StudentT: Arguments(("df", "loc", "scale")),
    dist.Uniform: Arguments(("low", "high")),
    **dict.fromkeys((dist.VonMises, Angle), Arguments(("loc", "concentration"))),
    dist.Weibull: Arguments(("scale", "concentration")),
    AutoregressiveCategorical: Arguments(("history",), parts=("initial", "tables")),
    AutoregressiveNormal: Arguments(("weights", "origin", "history"), parts=("initial", "base")),
    Streams: Arguments(parts=("parts",)),
    Tied: Arguments(("index",), parts=("base",)),
}  # fmt: skip


def save(thing: HMM | nn.Module, directory: FilePath) -> None:
    """Save an HMM or a module to a directory, in place of what was saved there before.

    Of a module its ``state_dict()`` is saved, not its code: :func:`load_into` puts it into a module
    that was built in the same way. Variables that have a prior are no part of it: save the HMM that
    a fit has found, ``fit.hmm(data)``, for other data ``load_hmm(directory).with_lengths(...)``.
    An HMM is saved whole: see :func:`load_hmm`. No gradient information is saved.

    At any moment there is the old content or the new one, whole. Two files are written:
    ``tensors.safetensors``, and ``pyrohmm.json``, a copy of its description to be read by people.

    Args:
        thing: An :class:`HMM`, :class:`HSMM`, :class:`FactorialHMM`, :class:`SecondOrderHMM`,
            :class:`ContinuousTimeHMM` or
            :class:`BlockHMM`, or a ``torch.nn.Module`` such as an :class:`HMMModule`.
        directory: A directory that does not exist, is empty, or holds what was saved before. The
            one above it must exist.

    Raises:
        TypeError: If it is neither, or the emission of the HMM is of a class that is not in
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
    """The HMM that was saved to ``directory``, on the CPU, every bit as it was.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    tensors, meta = read_directory(directory, "hmm")
    try:
        hmm = restored(tensors, meta)
    except Exception as error:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} does not describe an HMM: {error}") from error
    return hmm


def load_into(module: nn.Module, directory: FilePath) -> None:
    """Put what was saved of a module into ``module``, all of it or nothing.

    Parameters stay the objects they are, on their devices, so that optimisers keep them.

    Args:
        module: Of the class that was saved, with parameters and buffers of the same names, shapes
            and dtypes.
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
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
    tensors, meta = read_directory(directory, "module")
    state = _state(module)
    differences = _differences(module, state, tensors, meta)
    if differences:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} differs from module: {'; '.join(differences)}.")
    before = {name: tensor.clone() for name, tensor in state.items()}
    try:
        module.load_state_dict(tensors)
    except BaseException:
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(before[name])
        raise


def describe(thing: HMM | nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``thing``, and what else there is to say of it."""
    if isinstance(thing, HMM) and _CHAINS.get(type(thing)) is type(thing.chain):
        return _describe_hmm(thing)
    if type(thing) is BlockHMM:
        return _describe_block_hmm(thing)
    if isinstance(thing, nn.Module):
        return _state(thing), {"kind": "module", "class": type(thing).__qualname__}
    raise TypeError(
        "thing must be an HMM, HSMM, FactorialHMM, SecondOrderHMM, ContinuousTimeHMM, BlockHMM or "
        f"torch.nn.Module; got {type(thing).__name__}. Of a fit, save fit.hmm(data); of an HMM of "
        "another class, or of HMM.of(chain), the module that builds it."
    )


def restored(tensors: dict[str, Tensor], meta: dict[str, Any]) -> HMM:
    """The HMM that :func:`describe` described."""
    tensors = dict(tensors)
    build = _build_block_hmm if meta.get("class") == "BlockHMM" else _build_hmm
    hmm = build(tensors, meta)
    if tensors:
        raise ValueError(f"nothing needs the tensors {sorted(tensors)}")
    return hmm


def _state(module: nn.Module) -> dict[str, Tensor]:
    """The state of ``module``; raise unless it is tensors that exist."""
    state = dict(module.state_dict())
    for name, value in state.items():
        if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
            raise TypeError(
                f"{name} of {type(module).__name__} must be a tensor; got {type(value).__name__}. "
                "Call a lazy module once; keep extra state elsewhere."
            )
    return state


def _differences(
    module: nn.Module, state: dict[str, Tensor], saved: dict[str, Tensor], meta: dict[str, Any]
) -> list[str]:
    """What keeps ``saved`` from being the state of ``module``, in words."""
    found, wanted = meta.get("class"), type(module).__qualname__
    differences = [] if found == wanted else [f"class {found} in the file, {wanted} in module"]
    for name in sorted(state.keys() | saved.keys()):
        if name not in saved:
            differences.append(f"{name} is not in the file")
        elif name not in state:
            differences.append(f"{name} is not in module")
        elif state[name].shape != saved[name].shape or state[name].dtype != saved[name].dtype:
            differences.append(
                f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the file, "
                f"{tuple(state[name].shape)} {state[name].dtype} in module"
            )
    return differences


# An HMM --------------------------------------------------------------------------------------

_EITHER = ("probs", "logits")


# Of every class the chain that it is built with: HMM.of gives an HMM any other.
_CHAINS: dict[type[HMM], type[Chain]] = {
    HMM: MarkovChain,
    HSMM: SemiMarkovChain,
    ContinuousTimeHMM: RateChain,
    FactorialHMM: ProductChain,
    SecondOrderHMM: SecondOrderChain,
}
_OF_DATA = ("lengths", "observed", "allowed")


def _arguments(family: type[HMM]) -> list[inspect.Parameter]:
    """The arguments that describe the chain of an HMM, and how it is joined with its emission."""
    others = ("self", "emission", "validate_args", *_OF_DATA)
    found = inspect.signature(family.__init__).parameters
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
    meta["validate_args"] = vars(hmm).get("_validate_args")
    meta["emission"] = _describe_part(hmm.emission, "emission", tensors)
    return tensors, meta


def _build_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> HMM:
    """What :func:`_describe_hmm` described; the tensors it needs are taken out of ``tensors``."""
    families = {family.__name__: family for family in _CHAINS}
    name = meta.get("class", "HMM")
    if name not in families:
        raise ValueError(f"its class {name!r} is none of {', '.join(families)}, BlockHMM")
    built: dict[str, Any] = {name: tensors.pop(name, None) for name in _OF_DATA}
    for argument in _arguments(families[name]):
        name = argument.name
        if isinstance(argument.default, bool):
            built[name] = _flag(meta, name)
        elif name in tensors:
            built[name] = tensors.pop(name)
        elif f"{name}.0" in tensors:
            parts = [key for key in tensors if key.startswith(f"{name}.")]
            built[name] = [tensors.pop(f"{name}.{m}") for m in range(len(parts))]
    emission = _build_part(meta.get("emission"), "emission", tensors)
    return families[meta.get("class", "HMM")](
        **built, emission=emission, validate_args=_validation(meta)
    )


def _describe_block_hmm(hmm: BlockHMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if hmm.carried is not None:
        raise TypeError("an HMM of continued sequences cannot be saved; save dense().")
    tensors = {
        "log_initial": hmm.log_initial,
        "log_emission": hmm.log_emission,
        "lengths": hmm.lengths,
        "symbol_block": hmm.blocks.symbol_block,
        "states": hmm.blocks.states,
    }
    if isinstance(hmm.transition, Tensor):
        tensors["transition"] = hmm.transition
    else:
        tensors |= {"leave": hmm.transition.leave, "enter": hmm.transition.enter}
        if hmm.transition.block_logits is not None:
            tensors["block_logits"] = hmm.transition.block_logits
    if hmm.observed is not None:
        tensors["observed"] = hmm.observed
    validation = vars(hmm).get("_validate_args")
    return tensors, {"kind": "hmm", "class": "BlockHMM", "validate_args": validation}


def _build_block_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> BlockHMM:
    """As :func:`_build_hmm`."""
    initial, emission = tensors.pop("log_initial"), tensors.pop("log_emission")
    states = [row[row >= 0] for row in tensors.pop("states")]
    blocks = Blocks(tensors.pop("symbol_block"), states, len(initial))
    if "transition" in tensors:
        transition: InnerProductTransition | Tensor = tensors.pop("transition")
    else:
        vectors = tensors.pop("leave"), tensors.pop("enter")
        transition = InnerProductTransition(*vectors, blocks, tensors.pop("block_logits", None))
    return BlockHMM(
        initial, transition, emission, blocks, tensors.pop("lengths"),
        tensors.pop("observed", None), validate_args=_validation(meta),
    )  # fmt: skip


def _describe_part(part: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What a distribution is built from; its tensors are put into ``tensors`` under ``path``."""
    if isinstance(part, list | tuple):
        return [_describe_part(item, f"{path}.{i}", tensors) for i, item in enumerate(part)]
    family = type(part)
    arguments = BUILT_FROM.get(family)
    if arguments is None:
        raise TypeError(
            f"{path} is a {family.__module__}.{family.__qualname__}, which cannot be saved; these "
            f"classes of pyro.distributions can: {', '.join(sorted(_classes()))}. Enter yours into "
            "pyrohmm.io.persistence.BUILT_FROM, or save the module that builds the HMM."
        )
    for name in arguments.tensors:
        tensors[f"{path}.{name}"] = getattr(part, name)
    # what was built with one number for several is built so again
    if isinstance(part, dist.Normal) and is_spherical(part):
        tensors[f"{path}.scale"] = part.scale[..., :1]
    if isinstance(part, dist.MultivariateNormal) and part.batch_shape and is_tied(part):
        tensors[f"{path}.scale_tril"] = part.scale_tril[..., :1, :, :]
    held = vars(part)  # reading an attribute would compute it
    tensors.update({f"{path}.{name}": held[name] for name in arguments.cached if name in held})
    if arguments.probs_or_logits:
        name = built_from(_holder(part))
        tensors[f"{path}.{name}"] = getattr(_holder(part), name)
    return {
        "class": family.__name__,
        "validate_args": vars(part).get("_validate_args"),
        "options": {name: getattr(part, name) for name in arguments.options},
        "parts": [
            _describe_part(getattr(part, name), f"{path}.{name}", tensors)
            for name in arguments.parts
        ],
    }


def _build_part(
    node: Any, path: str, tensors: dict[str, Tensor]
) -> TorchDistribution | list[TorchDistribution]:
    """What :func:`_describe_part` described; its tensors are taken out of ``tensors``."""
    if isinstance(node, list):
        return [_build_part(item, f"{path}.{i}", tensors) for i, item in enumerate(node)]
    if not isinstance(node, dict) or not isinstance(node.get("class"), str):
        raise ValueError(f"{path} must be described by an object with a class")
    family = _classes().get(node["class"])
    if family is None:
        raise ValueError(f"{path} is of class {node['class']}, which is not one that can be built")
    arguments = BUILT_FROM[family]
    options, parts = node.get("options"), node.get("parts")
    if not isinstance(options, dict) or options.keys() != set(arguments.options):
        raise ValueError(f"{path} must have the options {arguments.options}; got {options}")
    if not all(isinstance(option, int) for option in options.values()):
        raise ValueError(f"{path} must have integers or booleans as options; got {options}")
    if not isinstance(parts, list) or len(parts) != len(arguments.parts):
        raise ValueError(f"{path} must have the parts {arguments.parts}")
    direct = {name: tensors.pop(f"{path}.{name}") for name in arguments.tensors}
    keys = {name: f"{path}.{name}" for name in (*arguments.cached, *_EITHER)}
    saved = {name: tensors.pop(key) for name, key in keys.items() if key in tensors}
    either = {name: saved.pop(name) for name in _EITHER if name in saved}
    if arguments.probs_or_logits != bool(either):
        raise ValueError(f"{path} must have what it is built from; got {sorted(either)}")
    built = family(
        *(_build_part(p, f"{path}.{name}", tensors) for p, name in zip(parts, arguments.parts)),
        **direct,
        **dict(list(either.items())[:1]),
        **options,
        validate_args=_validation(node),
    )
    if either:
        _restore(_holder(built), either, path)
    for name, tensor in saved.items():
        _check_agreement(getattr(built, name), tensor, f"{path}.{name}")
        setattr(built, name, tensor)
    return built


def _restore(holder: Any, either: dict[str, Tensor], path: str) -> None:
    """Put saved probabilities where the constructor has put ones it normalised once more.

    Files of version 0.4 may have both ``probs`` and ``logits``, which must agree then.
    """
    held = vars(holder)
    for name in _EITHER:
        held.pop(name, None)
    held.update(either)
    name = built_from(holder)
    is_binary = not isinstance(holder, torch.distributions.Categorical)
    if len(either) == 2:
        other = "logits" if name == "probs" else "probs"
        convert = probs_to_logits if name == "probs" else logits_to_probs
        _check_agreement(convert(held[name], is_binary), held.pop(other), f"{path}.{other}")
    if "_param" in held:  # torch keeps there what a distribution was built from
        held["_param"] = held[name]
    probs = held[name] if name == "probs" else logits_to_probs(held[name], is_binary)
    wrong = (probs < 0) | (probs > 1 + 1e-4)
    if not is_binary:
        sums = (held[name] if name == "probs" else held[name].exp()).sum(-1, keepdim=True)
        wrong = wrong | ((sums - 1).abs() > 1e-4)
    if bool(wrong.any()):
        raise ValueError(
            f"{path}.{name} must be probabilities that sum to one, or their logarithms"
        )


def _check_agreement(computed: Tensor, saved: Tensor, name: str) -> None:
    """Raise unless what was saved is what its distribution computes, up to rounding."""
    scale = float(computed.abs().nan_to_num(0.0, 0.0, 0.0).max()) if computed.numel() else 0.0
    alike = computed.shape == saved.shape and computed.dtype == saved.dtype
    if not (alike and torch.allclose(computed, saved, 1e-3, 1e-4 * scale, equal_nan=True)):
        raise ValueError(f"{name} disagrees with the parameters beside it")


def _classes() -> dict[str, type]:
    return {family.__name__: family for family in BUILT_FROM}


def _holder(distribution: Any) -> Any:
    """What has the probabilities as attributes: the distribution, or a categorical one within."""
    return getattr(distribution, "_categorical", distribution)


def _flag(node: dict[str, Any], name: str) -> bool:
    value = node.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")
    return value


def _validation(node: dict[str, Any]) -> bool | None:
    """Whether values are to be checked; None leaves it to Pyro's setting."""
    return None if node.get("validate_args") is None else _flag(node, "validate_args")
