r"""Conversion to ArviZ: R-hat, effective sample sizes, leave-one-out, predictive checks.

What is returned is ArviZ's own container: an ``InferenceData`` of ArviZ before 1.0, an
``xarray.DataTree`` since. (``arviz.from_pyro`` leaves the likelihood of an HMM out without a word.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from pyro.infer import MCMC
from torch import Tensor

from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.results import Fit
from .draws import PosteriorDraws, invariants
from .prediction import predictive_log_prob

if TYPE_CHECKING:
    import xarray as xr

INVARIANTS = ("log_evidence", "effective_states", "move_entropy", "occupancy")


def to_arviz(
    posterior: Fit | MCMC | Mapping[str, Tensor] | PosteriorDraws,
    data: Sequences,
    model: Callable[..., Any] | None = None,
    *,
    num_draws: int = 1000,
    dims: Mapping[str, Sequence[str]] | None = None,
    align: bool = False,
    per_step: bool = False,
    num_predictive: int = 0,
    batch_size: int | None = None,
) -> Any:
    r"""Convert a fit, a sampler's run or draws to ArviZ.

    Groups:

    - ``posterior``: the latent variables by name, and beside them the quantities of
      :func:`pyrohmm.draws.invariants`, which do not depend on names of states.
    - ``log_likelihood``: ``x``, :math:`\log p(x_n | \theta)` of each sequence, which is what
      ``arviz.loo`` takes by default. With ``per_step`` also ``x_step``,
      :math:`\log p(x_{n,t} | x_{n,1:t-1}, \theta)`, NaN where nothing is observed; its sum over
      steps is ``x``. Then say ``arviz.loo(..., var_name="x")``.
    - ``sample_stats``: ``lp``, the log joint density; ``diverging`` of a sampler; ``log_guide``,
      the log-density of the guide, of SVI.
    - ``posterior_predictive``: ``x``, data sets of the same lengths, with the same gaps.
    - ``observed_data``: ``x``. Where nothing is observed it is NaN, as are those above.

    Sequences are exchangeable: to leave one out and predict it from the others is a question that
    has an answer. The steps of a sequence are not. To leave out a step in the middle would be to
    predict it from its future too, and ``x_step`` does not do that: it predicts each step from its
    past, with parameters that have seen the whole sequence. It shows *where* in a sequence a model
    is surprised, and compares two models step by step. Its sum for a new sequence under parameters
    that have not seen it, which is what leaving out sequences estimates, is the honest score for
    predicting steps to come; divide it by ``data.num_observed`` for nats per step. With a single
    long sequence, cut it, or hold out its end.

    Memory is bounded: draws are gone through some at a time. What is kept is
    C S N numbers, with ``per_step`` C S N T.

    Args:
        posterior: What :meth:`PosteriorDraws.of` takes: a :class:`Fit`, Pyro's ``MCMC``, draws by
            name
            ``(C, S, ...)``, or :class:`PosteriorDraws`.
        data: The sequences that were fitted. Their labels, if any, count as observed.
        model: The Pyro model; needed only if ``posterior`` does not know it.
        num_draws: How many draws to take from a guide.
        dims: Names of the dimensions of a variable, by its name; see :class:`PosteriorDraws`.
        align: Whether to rename states such that a name means one thing in all draws; see
            :meth:`PosteriorDraws.align`.
        per_step: Whether to add ``x_step``.
        num_predictive: From how many draws of each chain to draw a data set.
        batch_size: How many draws to work on at a time; see :meth:`PosteriorDraws.map`.

    Returns:
        An ``arviz.InferenceData``, or an ``xarray.DataTree`` if ArviZ is of version 1 or later.

    Raises:
        TypeError, ValueError: As :meth:`PosteriorDraws.of`, :meth:`PosteriorDraws.hmm` and
            :meth:`PosteriorDraws.permute_states`.

    Example:
        >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
        >>> found = to_arviz(fit_em(TabularHMM(2, categorical(6)), data, num_steps=5), data)
        >>> found["log_likelihood"]["x"].sizes["sequence"]
        5
    """
    draws = PosteriorDraws.of(posterior, model, num_draws=num_draws, dims=dims)
    draws = draws.aligned(data) if align else draws
    names = draws.named_dims(data)
    groups: dict[str, dict[str, Any]] = {"posterior": {}, "log_likelihood": {}}
    for name, value in draws.values.items():
        groups["posterior"][name] = (("chain", "draw", *names[name]), value)

    def assess(hmm: HMM) -> dict[str, Tensor]:
        found = invariants(hmm, data.values) | {"x": hmm.log_prob(data.values).double()}
        if per_step:
            steps = predictive_log_prob(hmm, data.values)
            found["x_step"] = steps.masked_fill(~data.observed, torch.nan)
        return found

    found = draws.map(data, assess, batch_size)
    for name in INVARIANTS:
        if name in found:
            own = ("rank",) if name == "occupancy" else ()
            groups["posterior"][name] = (("chain", "draw", *own), found[name])
    each = ("chain", "draw", "sequence")
    groups["log_likelihood"]["x"] = (each, found["x"])
    if per_step:
        groups["log_likelihood"]["x_step"] = ((*each, "step"), found["x_step"])
    joint = draws.log_prior(data) + found["x"].sum(-1)
    groups["sample_stats"] = {
        name: (("chain", "draw"), value) for name, value in ({"lp": joint} | draws.stats).items()
    }
    place = tuple(f"x_dim_{i}" for i in range(data.values.dim() - 2))
    if num_predictive:
        few = draws.thin(num_predictive)
        drawn = few.map(data, lambda hmm: hmm.sample(), batch_size)
        drawn = _blank(drawn, data)
        groups["posterior_predictive"] = {"x": ((*each, "step", *place), drawn)}
    groups["observed_data"] = {"x": (("sequence", "step", *place), _blank(data.values, data))}
    return _container({name: _dataset(group) for name, group in groups.items()})


def summary(found: Any, **options: Any) -> Any:
    """ArviZ's table of the quantities that do not depend on names of states.

    Its columns of R-hat and effective sample size are those to judge a sampler by: of parameters
    that belong to states they are meaningful only after the states have been aligned, and of
    embeddings, which can be rotated, not even then.

    Args:
        found: What :func:`to_arviz` returns.
        **options: Those of ``arviz.summary``.

    Returns:
        A ``pandas.DataFrame``.
    """
    import arviz

    known = [name for name in INVARIANTS if name in found["posterior"].data_vars]
    with numpy.errstate(invalid="ignore", divide="ignore"):  # of one state, what is constant
        return arviz.summary(found, var_names=known, **options)


def _blank(values: Tensor, data: Sequences) -> Tensor:
    """``values`` ``(*, N, T, *E)`` with NaN where ``data`` hold nothing; unchanged if they do."""
    if bool(data.observed.all()):
        return values
    seen = data.observed.reshape(data.observed.shape + (1,) * (data.values.dim() - 2))
    floats = values if values.dtype.is_floating_point else values.to(torch.get_default_dtype())
    return floats.masked_fill(~seen, torch.nan)


def _dataset(group: Mapping[str, tuple[tuple[str, ...], Tensor]]) -> xr.Dataset:
    import xarray

    variables = {name: (dims, value.cpu().numpy()) for name, (dims, value) in group.items()}
    sizes = {name: size for dims, value in group.values() for name, size in zip(dims, value.shape)}
    return xarray.Dataset(variables, {name: range(size) for name, size in sizes.items()})


def _container(groups: dict[str, xr.Dataset]) -> Any:
    import arviz
    import xarray

    if int(arviz.__version__.split(".")[0]) >= 1:
        return xarray.DataTree.from_dict(groups)
    container: Any = arviz.InferenceData
    return container(**groups)
