"""Models of hmmlearn and of Ctrl-G as HMMs, and back.

hmmlearn keeps all sequences end to end in one array ``(sum of lengths, D)``; here they are padded
to ``(N, T, D)``, or ``(N, T)`` for symbols: see :meth:`Sequences.from_list`. Both let the first
state emit, and read a matrix by rows: row = from, column = to.

Ctrl-G (Zhang et al., Adaptable Logical Control for Large Language Models, NeurIPS 2024) keeps an
HMM of tokens in a directory, as ``from_pretrained`` reads it: ``alpha_exp`` are transition
probabilities, row = from; ``beta`` log-probabilities of tokens; ``gamma`` log-probabilities of the
first state, or ``gamma_exp`` its probabilities.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from pyro.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import check_kind
from .._imports import imported
from ..distributions.hard_zeros import is_spherical, is_tied, log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from .files import check_regular, replace_file


def from_hmmlearn(model: Any, lengths: Sequence[int] | Tensor) -> HMM:
    """Convert a fitted model of hmmlearn to an HMM, in float64.

    ``CategoricalHMM`` has symbols ``(N, T)``; ``GaussianHMM``, ``GMMHMM`` and ``PoissonHMM`` have
    vectors ``(N, T, D)``. Hard zeros stay exact, and :func:`fit_em` keeps covariances of type
    ``spherical`` or ``tied`` so. It refuses a ``GMMHMM`` of type ``full`` or ``tied``, for which
    there is no emission family.

    Args:
        model: Of one of these classes, fitted, or with all its parameters set.
        lengths: ``(N,)`` integers, the number of steps of each sequence, as in hmmlearn.

    Raises:
        ImportError: If hmmlearn is not installed.
        TypeError: If the model is of another class.
        ValueError: If the model has not been fitted, or its probabilities do not sum to one.

    Example:
        >>> import numpy
        >>> from hmmlearn.hmm import PoissonHMM
        >>> model = PoissonHMM(2)
        >>> model.startprob_ = numpy.array([1.0, 0.0])
        >>> model.transmat_ = numpy.array([[0.5, 0.5], [0.0, 1.0]])
        >>> model.lambdas_ = numpy.array([[1.0], [2.0]])
        >>> hmm = from_hmmlearn(model, [2, 1])
        >>> values = torch.tensor([[[0.0], [3.0]], [[1.0], [0.0]]])
        >>> same = model.score([[0], [3], [1]], [2, 1])
        >>> math.isclose(hmm.log_prob(values).sum(), same, rel_tol=1e-6)
        True
    """
    library = imported("hmmlearn.hmm")
    emissions = {
        library.CategoricalHMM: lambda m: Categorical(logits=_tensor(m, "emissionprob_").log()),
        library.GaussianHMM: _gaussian,
        library.GMMHMM: _mixture,
        library.PoissonHMM: lambda m: Poisson(_tensor(m, "lambdas_")).to_event(1),
    }
    build = emissions.get(type(model))
    if build is None:
        known = ", ".join(cls.__name__ for cls in emissions)
        raise TypeError(f"model must be one of {known} of hmmlearn; got {type(model).__name__}.")
    initial, transition = (_tensor(model, name).log() for name in ("startprob_", "transmat_"))
    return HMM(initial, transition, build(model), torch.as_tensor(lengths))


def to_hmmlearn(hmm: HMM, **options: Any) -> Any:
    """Convert an HMM to a model of hmmlearn.

    The class follows from the emission: ``CategoricalHMM`` for symbols, ``PoissonHMM`` for counts,
    ``GaussianHMM`` for (vectors of) normal numbers, with covariances of type ``diag`` if they are
    independent and ``full`` if not, and ``GMMHMM`` for mixtures of either. They are of type
    ``spherical`` if built with one scale ``(K, 1)`` for all components, and ``tied`` if built with
    one covariance ``(D, D)`` for all states (of a mixture, for all its parts). Scalars become
    vectors of one component. Lengths are left out: hmmlearn takes them with the data.

    A fit of the model starts from these parameters.

    Args:
        hmm: The HMM.
        **options: Of the class in hmmlearn, such as ``n_iter`` and ``tol``.

    Raises:
        ImportError: If hmmlearn is not installed.
        TypeError: If hmmlearn has no such emission.
        ValueError: If ``hmm`` has batches of parameters, parameters per step, missing steps, or
            labels.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
        >>> model = to_hmmlearn(HMM(even[0], even, coins, torch.tensor([3])))
        >>> model.emissionprob_
        array([[0.5 , 0.5 ],
               [0.25, 0.75]])
    """
    library = imported("hmmlearn.hmm")
    check_kind("hmm", hmm, HMM, "an HMM", "Give fit.hmm(data).")
    hmm.check_constant("to_hmmlearn")
    batches = any(hmm.chain.batch_shape) or any(hmm.emission.batch_shape[:-1])
    if batches or hmm.observed is not None or hmm.allowed is not None:
        text = "hmm must have one set of parameters, and no missing steps or labels"
        raise ValueError(
            f"{text}. Choose one entry; call hmm.replace(observed=None, allowed=None)."
        )
    model = _model(library, hmm.num_states, hmm.emission, {"init_params": "", **options})
    model.startprob_ = _probabilities(hmm.log_initial)
    model.transmat_ = _probabilities(hmm.log_transition)
    return model


# From hmmlearn -------------------------------------------------------------------------------


def _tensor(model: Any, name: str) -> Tensor:
    """Copy a parameter of a model to a tensor in float64."""
    if not hasattr(model, name):
        raise ValueError(f"model has no {name}: call its fit, or set its parameters.")
    return torch.tensor(np.asarray(getattr(model, name)), dtype=torch.float64)


def _gaussian(model: Any) -> TorchDistribution:
    means = _tensor(model, "means_")  # (K, D)
    model = copy.copy(model)
    model.n_features = means.size(-1)  # without it, the covariances cannot be read before a fit
    matrices = _tensor(model, "covars_")  # (K, D, D) for all types; spherical after a fit (KD,)
    matrices = matrices.reshape(len(means), -1, *matrices.shape[-2:])[:, 0]
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    forms = {"spherical": diagonal[:, 0], "diag": diagonal, "tied": matrices[0]}
    return normals_of(means, forms.get(model.covariance_type, matrices), model.covariance_type)


def _mixture(model: Any) -> TorchDistribution:
    means, covariances = _tensor(model, "means_"), _tensor(model, "covars_")  # (K, M, D)
    weights = Categorical(logits=_tensor(model, "weights_").log())
    return MixtureSameFamily(weights, normals_of(means, covariances, model.covariance_type))


def normals_of(means: Tensor, covars: Tensor, kind: str) -> TorchDistribution:
    """Multivariate normals of means ``(*L, D)`` and covariances in hmmlearn's form of a type.

    Args:
        means: ``(*L, D)``, where L may be states, or states and parts of their mixtures.
        covars: ``(*L)`` if ``spherical``, ``(*L, D)`` if ``diag``, ``(*L, D, D)`` if ``full``, and
            without the last dimension of L if ``tied``.
        kind: One of these four.
    """
    if kind in ("full", "tied"):
        return MultivariateNormal(means, covars.unsqueeze(-3) if kind == "tied" else covars)
    variances = covars.unsqueeze(-1) if kind == "spherical" else covars
    return Normal(means, variances.sqrt()).to_event(1)


def _covariances(normals: Any) -> tuple[str, Tensor]:
    """Covariance type of multivariate normals in hmmlearn's words, and covariances in its form."""
    if isinstance(normals, torch.distributions.MultivariateNormal):
        matrices = normals.covariance_matrix
        return ("tied", matrices.select(-3, 0)) if is_tied(normals) else ("full", matrices)
    if is_spherical(normals.base_dist):
        return "spherical", normals.variance[..., 0]
    return "diag", normals.variance


# To hmmlearn ---------------------------------------------------------------------------------


def _model(library: Any, num_states: int, emission: Any, options: dict[str, Any]) -> Any:
    """Model of hmmlearn with the parameters of ``emission``."""
    part: Any = _as_vectors(emission)
    is_mixture = isinstance(part, torch.distributions.MixtureSameFamily)
    normal = _as_vectors(part.component_distribution) if is_mixture else part
    full = isinstance(normal, torch.distributions.MultivariateNormal)
    if isinstance(part, torch.distributions.Categorical):
        model = library.CategoricalHMM(num_states, **options)
        model.emissionprob_ = _probabilities(log_probs(part))
        model.n_features = log_probs(part).size(-1)
    elif _is_independent(part, torch.distributions.Poisson):
        model = library.PoissonHMM(num_states, **options)
        model.lambdas_ = _array(part.base_dist.rate)
        model.n_features = part.event_shape[0]
    elif full or _is_independent(normal, torch.distributions.Normal):
        kind, covariances = _covariances(normal)
        if is_mixture:
            count = normal.batch_shape[-1]
            model = library.GMMHMM(num_states, count, covariance_type=kind, **options)
            model.weights_ = _probabilities(log_probs(part.mixture_distribution))
        else:
            model = library.GaussianHMM(num_states, covariance_type=kind, **options)
        model.means_ = _array(normal.mean)
        model.covars_ = _array(covariances)
        model.n_features = normal.event_shape[0]
    else:
        came = f"{type(emission).__name__} with event shape {tuple(emission.event_shape)}"
        raise TypeError(
            "emission must be Categorical, vectors of Poisson, Normal or MultivariateNormal, or a "
            f"mixture of the latter two; got {came}."
        )
    return model


def _as_vectors(emission: Any) -> Any:
    """Convert distributions of numbers to ones of vectors with one component; others stay."""
    if isinstance(emission, torch.distributions.Poisson):
        return Poisson(emission.rate.unsqueeze(-1)).to_event(1)
    if isinstance(emission, torch.distributions.Normal):
        return Normal(emission.loc.unsqueeze(-1), emission.scale.unsqueeze(-1)).to_event(1)
    return emission


def _is_independent(part: Any, family: type) -> bool:
    """Whether an observation is a vector of independent members of ``family``."""
    vectors = isinstance(part, torch.distributions.Independent) and len(part.event_shape) == 1
    return vectors and isinstance(part.base_dist, family)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy().copy()


def _probabilities(logits: Tensor) -> np.ndarray:
    """Normalise rows in float64, as hmmlearn wants them; zeros stay exact."""
    return _array(logits.double().softmax(-1))


# Ctrl-G --------------------------------------------------------------------------------------

CTRLG_TENSORS, CTRLG_CONFIG = "model.safetensors", "config.json"


def from_ctrlg(directory: str | Path) -> HMM:
    """Convert a model of Ctrl-G to an HMM for one sequence of one step.

    For other sequences take ``HMM.with_lengths``.

    Args:
        directory: With ``model.safetensors``, as downloaded by ``huggingface_hub``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it lacks a tensor, or their shapes disagree.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(torch.tensor([[0.9, 0.1], [0.2, 0.8]])),
        ...           torch.tensor(1))
        >>> path = getfixture("tmp_path") / "model"
        >>> to_ctrlg(hmm, path, end=1)
        >>> from_ctrlg(path).emission.probs
        tensor([[0.9000, 0.1000],
                [0.2000, 0.8000]])
    """
    check_regular(Path(directory) / CTRLG_TENSORS)
    tensors = safetensors.torch.load_file(Path(directory) / CTRLG_TENSORS)
    if "gamma_exp" in tensors:
        tensors["gamma"] = tensors.pop("gamma_exp").log()
    if missing := {"alpha_exp", "beta", "gamma"} - tensors.keys():
        raise ValueError(f"{CTRLG_TENSORS} lacks {', '.join(sorted(missing))}.")
    initial = tensors["gamma"].float().flatten().log_softmax(-1)
    transition = tensors["alpha_exp"].float()
    transition = (transition / transition.sum(-1, keepdim=True)).log()
    return HMM(initial, transition, Categorical(logits=tensors["beta"].float()), torch.tensor(1))


def to_ctrlg(hmm: HMM, directory: str | Path, end: int) -> None:
    """Write an HMM of tokens as a model of Ctrl-G, which its ``HMM.from_pretrained`` reads.

    Args:
        hmm: Its states emit symbols; without batches, constant.
        directory: Where to write ``model.safetensors`` and ``config.json``.
        end: The token that ends a text.

    Raises:
        ValueError: If states do not emit symbols, parameters have batches or steps, or ``end`` is
            none of the V symbols.

    Example:
        See :func:`from_ctrlg`.
    """
    hmm.check_constant("to_ctrlg")
    if not is_categorical(hmm.emission) or any(hmm.chain.batch_shape):
        text = f"hmm must emit symbols and have no batch of parameters; got {hmm}"
        raise ValueError(f"{text}. Choose one restart or sample of a Categorical emission.")
    tensors = {"alpha_exp": hmm.log_transition.exp(), "gamma": hmm.log_initial}
    tensors["beta"] = log_probs(hmm.emission)
    count = tensors["beta"].size(-1)
    if not 0 <= end < count:
        text = f"end must be one of the symbols 0 to V - 1 = {count - 1}; got {end}"
        raise ValueError(f"{text}. Count symbols from 0.")
    config = {"hidden_states": hmm.num_states, "vocab_size": count, "eos_token_id": end}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    ready = {n: tensor.detach().cpu().float().contiguous() for n, tensor in tensors.items()}
    replace_file(folder / CTRLG_TENSORS, safetensors.torch.save(ready))
    replace_file(folder / CTRLG_CONFIG, json.dumps(config).encode())
