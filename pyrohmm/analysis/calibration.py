"""Simulation-based calibration of fits that give samples of a posterior."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .._checks import check_size
from ..data.sequences import Sequences
from ..infer.models import MarginalModel
from ..infer.objective import latent_sites
from ..nn.base import HMMModule


class Calibration(NamedTuple):
    """Ranks of the truth among samples of its posterior, by the name of each variable.

    Attributes:
        ranks: ``(R,)`` integers from 0 to S of each, for R data sets.
        num_samples: S.
    """

    ranks: dict[str, Tensor]
    num_samples: int

    def p_values(self, num_bins: int = 8) -> dict[str, float]:
        """P-values of chi-square tests that ranks are uniform; small where samples are wrong.

        Args:
            num_bins: Of equal width; a divisor of S + 1, with five or more data sets a bin.

        Raises:
            ValueError: If it is no divisor.
        """
        check_size("num_bins", num_bins, 2)
        if (self.num_samples + 1) % num_bins:
            raise ValueError(f"num_bins must divide S + 1 = {self.num_samples + 1}; got {num_bins}")
        found = {}
        for name, ranks in self.ranks.items():
            bins = ranks * num_bins // (self.num_samples + 1)
            counts, expected = bins.bincount(minlength=num_bins).double(), len(ranks) / num_bins
            square = ((counts - expected).square() / expected).sum() / 2
            degrees = torch.tensor((num_bins - 1) / 2, dtype=torch.double)
            found[name] = torch.special.gammaincc(degrees, square).item()
        return found


def calibrate(
    model: Any,
    sample: Callable[[Any, Sequences], Mapping[str, Tensor]],
    like: Tensor | Sequences,
    num_data_sets: int = 100,
) -> Calibration:
    """Simulation-based calibration: ranks of parameters of the prior among posterior samples.

    For each data set, parameters are sampled from the prior and data from them. If what samples
    the posterior is right, the rank of the truth among S independent samples is uniform on 0 to S.
    The statistic of a variable is a weighted sum of its entries. If all variables are sampled, "lp"
    is a further one: the log joint density, which sees the data as well (Modrák et al., 2023).
    Ranks of samples that lie too close together are piled up at both ends. Priors must be those of
    the model, not of the data. Variables that their prior fixes, such as the probability of one
    outcome, have no ranks.

    Args:
        model: A Pyro model that returns an HMM, or a module, whose :class:`MarginalModel` is meant.
        sample: Called with a copy of the model or module and data, returns S independent samples
            ``(S, ...)`` of some variables by their names: ``fit.samples()`` of a guide, or of
            chains of one sample each.
        like: ``(N,)`` integers, the steps of the simulated sequences; or sequences, whose lengths,
            missing steps, covariates and times they have.
        num_data_sets: R.

    Raises:
        ValueError: If numbers of samples or variables differ between data sets, samples are not
            finite or of another shape than their variable, or a variable is none of the model.

    References:
        Talts, Betancourt, Simpson, Vehtari and Gelman (2018), Validating Bayesian inference
        algorithms with simulation-based calibration.

    Example:
        >>> def exact(module, data):  # of one state, in closed form
        ...     counts = data.values[data.observed].bincount(minlength=2)
        ...     return {"emission.probs": Dirichlet(1.0 + counts).sample((15,))}
        >>> _ = pyro.set_rng_seed(0)
        >>> found = calibrate(TabularHMM(1, categorical(2)), exact, torch.tensor([4, 2]), 40)
        >>> found.p_values()["emission.probs"] > 0.01
        True
    """
    check_size("num_data_sets", num_data_sets)
    if isinstance(like, Tensor):
        like = Sequences(torch.zeros(len(like), int(like.max())), like)
    ranks: dict[str, list[int]] = {}
    truths: dict[str, set[float]] = {}
    sizes = set()
    for _ in range(num_data_sets):
        own = copy.deepcopy(model)
        joint, prefix = (MarginalModel(own), "module.") if isinstance(own, HMMModule) else (own, "")
        with torch.no_grad():
            trace = poutine.trace(joint).get_trace(like)
            values = trace.nodes["_RETURN"]["value"].sample()
        data = Sequences(
            values, like.lengths, like.observed, covariates=like.covariates, times=like.times
        )
        truth = {n.removeprefix(prefix): trace.nodes[n]["value"] for n in latent_sites(trace)[0]}
        samples = {name.removeprefix(prefix): v for name, v in sample(own, data).items()}
        numbers = {}
        for name, value in samples.items():
            if name not in truth:
                raise ValueError(
                    f"sample must return variables of the model, {list(truth)}; got {name!r}."
                )
            weights = torch.arange(1.0, 1 + truth[name].numel(), dtype=torch.double).cos()
            both = torch.cat([truth[name].unsqueeze(0), _shaped(name, value, truth[name])])
            samples[name], numbers[name] = both, both.double().flatten(1) @ weights
            sizes.add(len(value))
        if len(sizes) != 1:
            raise ValueError(f"sample must return S samples of each variable; got {sorted(sizes)}.")
        if samples.keys() == truth.keys():
            each = ({prefix + n: v[s] for n, v in samples.items()} for s in range(max(sizes) + 1))
            numbers["lp"] = torch.stack([_log_joint(joint, values, data) for values in each])
        for name, row in numbers.items():
            truths.setdefault(name, set()).add(float(row[0]))
            ranks.setdefault(name, []).append(int((row[1:] < row[0]).sum()))
    found = {name: len(row) for name, row in ranks.items()}
    if set(found.values()) != {num_data_sets}:
        raise ValueError(f"sample must return the same variables for all data sets; got {found}.")
    varied = {n: torch.tensor(r) for n, r in ranks.items() if len(truths[n]) > 1 or len(r) == 1}
    return Calibration(varied, sizes.pop())


def _log_joint(model: Any, values: Mapping[str, Tensor], data: Sequences) -> Tensor:
    """Log joint density of variables and data."""
    with torch.no_grad(), pyro.validation_enabled(False):
        trace = poutine.trace(poutine.condition(model, dict(values))).get_trace(data)
        return torch.as_tensor(trace.log_prob_sum())


def _shaped(name: str, samples: Tensor, truth: Tensor) -> Tensor:
    """Samples of a variable, ``(S, ...)`` of the shape of its true value, checked."""
    size = truth.numel()
    if samples.dim() == 0 or samples.numel() != len(samples) * size:
        raise ValueError(
            f"sample must return {name!r} as (S, ...), with {size} entries each; got shape "
            f"{tuple(samples.shape)}."
        )
    if not bool(samples.isfinite().all()):
        raise ValueError(f"samples of {name!r} must be finite; there are NaN or infinite ones.")
    return samples.detach().to(truth.dtype).reshape(len(samples), *truth.shape)
