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
from ..infer.models import MarginalModel, exclusive
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


@exclusive(gradients=False)
def calibrate(
    model: Any,
    sample: Callable[..., Mapping[str, Tensor]],
    like: Tensor | Sequences,
    num_data_sets: int = 100,
    together: int = 1,
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
        together: D, how many data sets ``sample`` is called for at once. If not for one, its third
            argument are the observations of all, ``(D, N, T, *E)``, and it returns ``(D S, ...)``,
            first those of the first, as ``fit_gibbs(values=)`` does.

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
    check_size("together", together)
    if isinstance(like, Tensor):
        like = Sequences(torch.zeros(len(like), int(like.max())), like)
    rows: dict[str, list[Tensor]] = {}
    for first in range(0, num_data_sets, together):
        own = copy.deepcopy(model)
        joint, prefix = (MarginalModel(own), "module.") if isinstance(own, HMMModule) else (own, "")
        sets = [_simulated(joint, like) for _ in range(min(together, num_data_sets - first))]
        several = () if together == 1 else (torch.stack([data.values for _, data in sets]),)
        samples = sample(own, sets[0][1], *several)
        if any(value.dim() and len(value) % len(sets) for value in samples.values()):
            got = {name: tuple(value.shape) for name, value in samples.items()}
            raise ValueError(f"sample must return (D S, ...), of {len(sets)} data sets; got {got}.")
        parts = {prefix + n.removeprefix(prefix): v.chunk(len(sets)) for n, v in samples.items()}
        for number, (truth, data) in enumerate(sets):
            some = {name: part[number] for name, part in parts.items()}
            for name, row in _statistics(joint, truth, some, data).items():
                rows.setdefault(name.removeprefix(prefix), []).append(row)
    sizes = {len(row) - 1 for each in rows.values() for row in each}
    if len(sizes) != 1:
        raise ValueError(f"sample must return S samples of each variable; got {sorted(sizes)}.")
    found = {name: len(each) for name, each in rows.items()}
    if set(found.values()) != {num_data_sets}:
        raise ValueError(f"sample must return the same variables for all data sets; got {found}.")
    tables = {name: torch.stack(each) for name, each in rows.items()}  # (R, 1 + S)
    varied = {n for n, t in tables.items() if len(t) == 1 or bool((t[:, 0] != t[0, 0]).any())}
    ranks = {n: (t[:, 1:] < t[:, :1]).sum(1) for n, t in tables.items() if n in varied}
    return Calibration(ranks, sizes.pop())


def _simulated(model: Any, like: Sequences) -> tuple[dict[str, Tensor], Sequences]:
    """Parameters of the prior by name, and data of them."""
    data = like.with_total(like.total)
    with torch.no_grad():
        trace = poutine.trace(model).get_trace(data)
        data.values = trace.nodes["_RETURN"]["value"].sample()
    return {name: trace.nodes[name]["value"] for name in latent_sites(trace)[0]}, data


def _statistics(
    model: Any, truth: dict[str, Tensor], samples: dict[str, Tensor], data: Sequences
) -> dict[str, Tensor]:
    """Numbers ``(1 + S,)`` of the truth and of samples, by the name of the variable."""
    found = {}
    for name, value in samples.items():
        if name not in truth:
            raise ValueError(f"sample must return variables, {list(truth)}; got {name!r}.")
        true, size = truth[name], truth[name].numel()
        if value.numel() != len(value) * size:
            raise ValueError(
                f"sample must return {name!r} as (S, ...), with {size} entries each; got shape "
                f"{tuple(value.shape)}."
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"samples of {name!r} must be finite; there are NaN or infinite ones.")
        shaped = value.detach().to(true.dtype).reshape(len(value), *true.shape)
        samples[name] = both = torch.cat([true.unsqueeze(0), shaped])
        weights = torch.arange(1.0, 1 + size, dtype=torch.double).cos()
        found[name] = both.double().reshape(-1, size) @ weights
    if samples.keys() == truth.keys() and len(set(map(len, found.values()))) == 1:
        scores = []
        for values in zip(*samples.values()):
            known = poutine.condition(model, dict(zip(samples, values)))
            with torch.no_grad(), pyro.validation_enabled(False):
                scores.append(poutine.trace(known).get_trace(data).log_prob_sum())
        found["lp"] = torch.stack(scores)
    return found
