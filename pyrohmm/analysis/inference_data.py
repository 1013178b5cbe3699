r"""Conversion to ArviZ: R-hat, effective sample sizes, leave-one-out, predictive checks.

The result is ArviZ's container: an ``InferenceData`` of ArviZ before 1.0, an ``xarray.DataTree``
since. (``arviz.from_pyro`` leaves the likelihood of an HMM out without a word.)

What to leave out
-----------------
Sequences are exchangeable: to leave one out and predict it from the others is well defined. The
steps of a sequence are not. To leave out a step in the middle would be to predict it from its
future too, and ``x_step`` does not do that: it predicts each step from its past, with parameters
fitted to the whole sequence. It shows *where* in a sequence a model predicts badly, and compares
two models step by step. Its sum for a new sequence under parameters that have not seen it, which is
what leaving out sequences estimates, is the score for predicting steps to come; divide it by
``data.num_observed`` for nats per step. With a single long sequence, cut it, or hold out its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from pyro.infer import MCMC
from torch import Tensor

from .._checks import names_checked
from .._imports import imported
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.results import Fit
from .draws import PosteriorDraws, invariants
from .queries import predictive_log_prob

if TYPE_CHECKING:
    import xarray as xr

INVARIANTS = ("log_evidence", "effective_states", "transition_entropy", "occupancy")
SAMPLE = ("chain", "draw")  # ArviZ's names

Variables = dict[str, tuple[tuple[str, ...], Tensor]]  # dimensions and values by name


@names_checked
def to_arviz(
    posterior: Fit | MCMC | Mapping[str, Tensor] | PosteriorDraws,
    data: Sequences,
    model: Callable[..., Any] | None = None,
    *,
    num_draws: int = 1000,
    per_step: bool = False,
    num_predictive: int = 0,
    batch_size: int | None = None,
) -> Any:
    r"""Convert a fit, a sampler's run or posterior samples to ArviZ.

    Groups:

    - ``posterior``: the latent variables by name, and the quantities of
      :func:`pyrohmm.draws.invariants`, which do not depend on the order of states.
    - ``log_likelihood``: ``x``, :math:`\log p(x_n | \theta)` of each sequence, which is what
      ``arviz.loo`` takes by default. With ``per_step`` also ``x_step``,
      :math:`\log p(x_{n,t} | x_{n,1:t-1}, \theta)`, NaN where nothing is observed; its sum over
      steps is ``x``. Then say ``arviz.loo(..., var_name="x")``; see the top of this module.
    - ``sample_stats``: ``lp``, the log joint density; ``diverging`` of a sampler; ``log_guide``,
      the log-density of the guide, of SVI.
    - ``posterior_predictive``: ``x``, data sets of the same lengths, with the same gaps.
    - ``observed_data``: ``x``. Where nothing is observed it is NaN, as are those above.

    Samples are converted some at a time: C S N numbers are kept, with ``per_step`` C S N T.

    Args:
        posterior: What :meth:`PosteriorDraws.of` takes, but for fits by MAP and EM; such as
            ``PosteriorDraws.of(fit).aligned(data)``, in which a state has one number throughout.
        data: The sequences that were fitted. Their labels, if any, count as observed.
        model: The Pyro model; needed only if ``posterior`` does not know it.
        num_draws: How many samples to take from a guide.
        per_step: Whether to add ``x_step``.
        num_predictive: From how many samples of each chain to sample a data set.
        batch_size: How many samples to convert at a time; see :meth:`PosteriorDraws.map`.

    Returns:
        An ``arviz.InferenceData``, or an ``xarray.DataTree`` if ArviZ is of version 1 or later.

    Raises:
        TypeError, ValueError: As :meth:`PosteriorDraws.of` and :meth:`PosteriorDraws.hmm`; or if
            ``posterior`` is a single point.

    Example:
        >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
        >>> model = MarginalModel(TabularHMM(2, categorical(6)))
        >>> fit = fit_svi(model, pyro.infer.autoguide.AutoNormal(model), data, num_iterations=5)
        >>> to_arviz(fit, data)["log_likelihood"]["x"].sizes["sequence"]
        5
    """
    samples = PosteriorDraws.of(posterior, model, num_draws=num_draws, data=data)
    if samples.shape.numel() == 1:
        raise ValueError("posterior must hold samples; it is a point: use fit_mcmc or fit_svi.")
    groups = _fitted_groups(samples, data, per_step, batch_size)
    event = tuple(f"x_dim_{i}" for i in range(data.values.dim() - 2))
    if num_predictive:
        values = samples.thin(num_predictive).map(data, lambda hmm: hmm.sample(), batch_size)
        names = (*SAMPLE, "sequence", "step", *event)
        groups["posterior_predictive"] = {"x": (names, _blank(values, data))}
    groups["observed_data"] = {"x": (("sequence", "step", *event), _blank(data.values, data))}
    datasets = {name: _dataset(group) for name, group in groups.items()}
    arviz: Any = imported("arviz")
    if int(arviz.__version__.split(".")[0]) >= 1:
        return imported("xarray").DataTree.from_dict(datasets)
    return arviz.InferenceData(**datasets)


def _fitted_groups(
    samples: PosteriorDraws, data: Sequences, per_step: bool, batch_size: int | None
) -> dict[str, Variables]:
    """Variables of the groups ``posterior``, ``log_likelihood`` and ``sample_stats``."""

    def assess(hmm: HMM) -> dict[str, Tensor]:
        scores = invariants(hmm, data.values) | {"x": hmm.log_prob(data.values).double()}
        if per_step:
            steps = predictive_log_prob(hmm, data.values)
            scores["x_step"] = steps.masked_fill(~data.observed, torch.nan)
        return scores

    names = samples.named_dims(data)
    scores = samples.map(data, assess, batch_size)
    names |= dict.fromkeys(INVARIANTS, ()) | {"occupancy": ("rank",)}
    quantities = samples.parameters | {n: scores[n] for n in INVARIANTS if n in scores}
    posterior: Variables = {n: ((*SAMPLE, *names[n]), value) for n, value in quantities.items()}
    likelihood: Variables = {"x": ((*SAMPLE, "sequence"), scores["x"])}
    if per_step:
        likelihood["x_step"] = ((*SAMPLE, "sequence", "step"), scores["x_step"])
    stats = {"lp": samples.log_prior(data) + scores["x"].sum(-1)} | samples.stats
    marks: Variables = {name: (SAMPLE, value) for name, value in stats.items()}
    return {"posterior": posterior, "log_likelihood": likelihood, "sample_stats": marks}


def summary(converted: Any, **options: Any) -> Any:
    """ArviZ's table of the quantities that do not depend on the order of states.

    Its columns of R-hat and effective sample size are those to judge a sampler by: of parameters
    that belong to states they are meaningful only after the states have been aligned, and of
    embeddings, which can be rotated, not even then.

    Args:
        converted: What :func:`to_arviz` returns.
        **options: Those of ``arviz.summary``.

    Returns:
        A ``pandas.DataFrame``.
    """
    arviz = imported("arviz")
    known = [name for name in INVARIANTS if name in converted["posterior"].data_vars]
    with numpy.errstate(invalid="ignore", divide="ignore"):  # of one state, what is constant
        return arviz.summary(converted, var_names=known, **options)


def _blank(values: Tensor, data: Sequences) -> Tensor:
    """Replace unobserved steps of ``values`` ``(*, N, T, *E)`` by NaN."""
    if bool(data.observed.all()):
        return values
    seen = data.observed.reshape(data.observed.shape + (1,) * (data.values.dim() - 2))
    floats = values if values.dtype.is_floating_point else values.to(torch.get_default_dtype())
    return floats.masked_fill(~seen, torch.nan)


def _dataset(group: Variables) -> xr.Dataset:
    xarray = imported("xarray")
    variables = {name: (dims, value.cpu().numpy()) for name, (dims, value) in group.items()}
    sizes = {name: size for dims, value in group.values() for name, size in zip(dims, value.shape)}
    return xarray.Dataset(variables, {name: range(size) for name, size in sizes.items()})
