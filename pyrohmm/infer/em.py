r"""EM: closed-form or gradient M-steps after an exact E-step; the log joint density never falls.

Components define their own sufficient statistics and M-step, priors included: see
:mod:`pyrohmm.nn.closed_form`. Transitions under a diversity prior have M-steps of their own
(:mod:`pyrohmm.infer.msteps`); what has no closed form follows :class:`GradientStep`. With
minibatches, sufficient statistics are averaged with decaying step sizes (Cappé and Moulines, 2009,
On-line EM for latent data models), from those of all the data under the first parameters: a
symbol that the first batch lacks keeps its probability.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from pyro.distributions.util import is_validation_enabled
from torch import Tensor

from .._checks import check_kind, check_size, check_tolerance, names_checked, warn_caller
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..io.files import digits, identity_of
from ..nn.base import HMMModule
from ..nn.closed_form import TransitionCounts, with_priors
from ..nn.regression import Linear
from ..nn.tabular import module_of
from .iterations import Loop
from .laplace import fit_smooth
from .maximization import Maximization
from .maximization import expected_log_joint as expected_log_joint
from .models import LogPrior, MarginalModel, check_module, exclusive, remarks, unweighted
from .msteps import GradientStep, TransitionPrior, TransitionStep
from .parameters import Parameters, Values, fitted_in
from .plates import Point
from .process_group import ProcessGroup
from .results import Fit, Restarts
from .starts import Start, StartSearch


@names_checked
@exclusive(gradients=False)  # M-steps that need them ask for themselves
def fit_em(
    module: HMMModule | HMM,
    data: Sequences | Iterable[Sequences],
    *,
    num_iterations: int = 500,
    tolerance: float | None = 1e-6,
    start: Start | Values | Fit | None = None,
    restarts: int | None = None,
    batch_size: int | None = None,
    decay: float = 0.7,
    log_prior: LogPrior | None = None,
    transition_step: TransitionStep | None = None,
    gradient_step: GradientStep | None = None,
    acceleration: bool | None = None,
    priors: bool = True,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    name: str | None = None,
    group: Any = None,
    sharded: bool | None = None,
) -> Fit:
    r"""Find the most probable parameters, :math:`\max_\theta \log p(x, \theta)`, by EM.

    The density is that in the space of the probabilities, means and covariances themselves, as in
    :func:`fit_map`. The module is copied; nothing is written back into it.

    Args:
        module: Builds the HMM, such as a :class:`TabularHMM`, and holds the priors. An :class:`HMM`
            is a start without priors: the fit is one of maximum likelihood.
        data: The sequences. Labels restrict the states. Or an iterable of ``Sequences``, such as
            :class:`pyrohmm.data.StoredSequences`, of data larger than memory: each iteration passes
            over it once, and adds what the parts contribute, or takes a minibatch of the next part.
            A ``start`` sees the first part alone.
        num_iterations: Largest number of iterations.
        tolerance: End when the loss would fall by less than this share of itself until
            convergence, by Aitken's estimate, in every restart. None runs all steps as they are.
        start: The first parameters: ``starts.from_prior``, ``starts.by_kmeans``,
            ``starts.sticky()``, ``starts.from_hmm(hmm)``, a function like these, or values by name,
            or another fit. By default restarts take in turn k-means, blocks of steps in time,
            samples of the prior and sticky ones; for symbols and for emissions without a closed
            form, which k-means does not suit, the prior comes first. Parameters without a prior
            start at their values.
        restarts: R, the number of batched restarts; every parameter must have a prior, but for
            coefficients of regressions, which are fitted one after the other. After each
            20 iterations the better half goes on, and the first restart, so that R restarts end
            no higher than one; with ``tolerance=None`` all do. The best is kept, all are in
            ``Fit.restarts``, as they were last. Without a ``start``, R > 1 restarts are the first
            and the best others of 24 or more after some iterations on part of the data. By default
            some of these go on, unless there is a ``start``, a parameter without a prior, an
            optimizer, ``tolerance=None``, a single iteration without a ``checkpoint``, one state,
            or a label at every step, or if one of several starts fails: then there is one restart.
            One goes on, too, with minibatches, and of a very large model.
        log_prior: A further log-density of the HMM built. A :class:`DiversityPrior`, or another
            :class:`msteps.TransitionPrior`, leaves the closed forms of all but the transitions;
            with any other function, which may depend on anything, all follow gradient steps.

    Other Arguments:
        batch_size: Number of sequences in a minibatch; all by default, and if there are no more.
            The M-step must need sums over observations alone, as for symbols and in closed forms.
            One pass over all data comes before the first iteration, and one after the last. Losses
            are those of the batches, scaled to the whole set, but for the last, which is that of
            all data; all steps are taken.
        decay: With minibatches, iteration t = 1, 2, ... averages the statistics with a step of
            :math:`(t + 1)^{-d}`; between 0.5 and 1.
        transition_step: M-step of the transitions of a :class:`TabularHMM` under a
            :class:`DiversityPrior`: ``msteps.FixedPoint()``, the default for its usual exponent,
            or ``msteps.LogitGradient()``, that for others; both climb from 100 points where nine
            in ten steps or more are labelled.
        gradient_step: How parameters without a closed form are maximised.
        acceleration: Whether to extrapolate after every third iteration (SQUAREM), which takes
            fewer iterations where states are hard to tell apart. Parameters that are not better are
            undone at the cost of an E-step, so that the loss never rises. By default it begins
            where iterations have become slow, if there is a ``tolerance``.
        priors: False for maximum likelihood: densities of priors are left out, and variances have a
            floor. All modules and fits that have this argument mean the same.
        generator: Source of randomness for minibatches; torch's global one by default.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have.
        group: The ranks that fit this model: see :class:`pyrohmm.infer.descent.RunOptions`.
        sharded: Whether each of several processes gives ``data`` of its own: see
            :class:`FitOptions`.

    Where ``torch.distributed`` has been initialised, each rank computes the E-step of a shard of
    the data, which all of them are given whole; all ranks return the fit of one process.

    Returns:
        The fit. ``losses`` are minus log joint densities, one before each iteration and one at the
        end; ``notes`` report a loss that was still falling at the last step, states that are not
        visited, variances at their floor, priors that move estimates by more than half of their
        standard errors, and a loss that has risen by more than rounding.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range; a sequence has probability zero; a prior has no
            mode; or the module cannot be fitted as asked.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_em(TabularHMM(2, categorical(2)), data)
        >>> fit.hmm(data).log_prob(data.values).sum().round(decimals=1)  # 2 log 1/2
        tensor(-1.4000)
    """
    if isinstance(start, Fit):
        start = start.start | start.parameters  # which may be zero
    # for checkpoints, with ``module`` as given: an HMM is a start, too
    arguments = dict(locals())
    module = module_of(module) if isinstance(module, HMM) else module
    with ProcessGroup.of(group) as ranks:
        arguments["data"] = data = ranks.own(data, sharded)
        if unweighted(module):
            return fit_smooth(fit_em, **arguments)
        _check(**arguments | {"module": module})
        ranks.check_alike(arguments, data)
        if restarts is not None and restarts > 1 and _without_priors(module):
            return _one_after_another(**arguments | {"module": module})
        # what is fitted, and how
        module = with_priors(copy.deepcopy(module), priors)
        longer = num_iterations > 1 or checkpoint is not None  # one may be resumed for more
        several_tried = start is None and tolerance is not None and longer
        for tried in (several_tried, False):  # if several fail, one start names what is wrong
            parameters = Parameters(module, data, restarts or 1, log_prior, ranks)
            maximize = Maximization(parameters, transition_step, gradient_step)
            plan = StartSearch(parameters, maximize, start, restarts, tried, batch_size is None)
            loop = Loop(parameters, maximize, ranks, arguments, plan.large)
            # begin, or resume; iterate; the best restart
            identity = partial(_identity, arguments, parameters)
            if loop.resume(identity, parameters.points):
                break
            if ranks.from_first(torch.tensor(plan.begin())):
                break
    loop.run()
    fit = _finish(loop)
    fit.notes += plan.notes
    return fit


def _without_priors(module: HMMModule) -> bool:
    """Whether all parameters without a prior are coefficients of linear predictors."""
    lines = [
        x for x in module.modules() if isinstance(x, Linear) and not x.has_prior("coefficients")
    ]
    own = {id(point) for part in lines for point in part.parameters()}
    return bool(own) and all(id(point) in own for _, point in fitted_in(module))


def _one_after_another(module: HMMModule, restarts: int, checkpoint: Any, **arguments: Any) -> Fit:
    """Fit from several first values of coefficients without priors, which no batch has room for."""
    if checkpoint is not None:
        text = "checkpoint must be None where restarts of parameters without priors are fitted one"
        raise ValueError(f"{text} after the other. Give prior_scale=, or fit once for each start.")
    fits, wrong = [], None
    for number in range(restarts):
        each = copy.deepcopy(module)
        for part in each.modules() if number else ():
            if isinstance(part, Linear) and fitted_in(part):
                part.redraw()
        try:
            fits.append(fit_em(each, restarts=None, **arguments))
        except ValueError as error:  # of numbers out of range
            wrong = error
    if not fits:
        raise cast(ValueError, wrong)
    final = torch.stack([fit.losses[-1] for fit in fits])
    best, longest = int(final.argmin()), max(len(fit.losses) for fit in fits)
    rows = [torch.cat([x, x[-1:].expand(longest - len(x))]) for x in (fit.losses for fit in fits)]
    fit = fits[best]
    fit.seconds = sum(each.seconds for each in fits)
    values = {n: torch.stack([each.parameters[n] for each in fits]) for n in fit.parameters}
    fit.restarts = Restarts(fit.model, torch.stack(rows), final, values, best)
    return fit


def _identity(arguments: dict[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Fingerprint of the fit, for checkpoints."""
    module = parameters.module
    if isinstance(arguments["module"], HMM):  # whose parameters are a start that the user chose
        start = {name: digits([value]) for name, value in module.named_parameters()}
        arguments = arguments | {"module": module, "start": start}
    kind = f"EM on {type(module).__name__}"
    own = {"latent variables": list(parameters.sites)}
    return identity_of(kind, module.state_dict().values(), arguments) | own


def _check(
    *, module: Any, log_prior: Any, transition_step: Any, tolerance: Any, decay: Any, **others: Any
) -> None:
    """Raise unless arguments of :func:`fit_em` are of their types and in their ranges."""
    check_tolerance(tolerance)
    if not 0.5 <= decay <= 1.0:
        text = f"decay must lie between 0.5 and 1, so that EM converges; got {decay}"
        raise ValueError(f"{text}. 0.7 suits most data.")
    for name in ("num_iterations", "restarts", "batch_size"):
        if others[name] is not None:
            check_size(name, others[name])
    check_module(module, log_prior=log_prior)
    cure = "Of a seed give torch.Generator().manual_seed(seed)."
    check_kind("generator", others["generator"], torch.Generator | None, "a torch.Generator", cure)
    fits = isinstance(module, TransitionCounts) and isinstance(log_prior, TransitionPrior)
    if transition_step is not None and not fits:
        raise ValueError(
            "transition_step is for a TabularHMM with log_prior=DiversityPrior(...); other "
            "transitions have a closed form, or follow gradient_step. Leave it out."
        )


def _risen(loop: Loop, history: Tensor) -> list[str]:
    """Warn, and note, if the loss increased in an iteration by more than rounding."""
    maximize, parameters = loop.maximize, loop.parameters
    if loop.decay is not None or maximize.notes or not maximize.gradient.step.guard:
        return []  # a floor may raise the loss, and has been noted
    tensors = [*parameters.values.values(), *parameters.points]
    single = torch.float32 in map(attrgetter("dtype"), tensors)
    # parts of a loss may cancel: each observation adds some nats, as terms that may be of 1e8 nats
    share, each = (1e-6, 1) if single else (1e-10, 500)
    slack = share * (1 + history.abs().amax().item() + each * parameters.data.num_observed)
    alive = history[history.isfinite().all(1)]  # a restart that has failed has no losses
    rise = alive.diff(dim=1).max().item() if alive.numel() > len(alive) else 0.0
    if rise <= slack or rise <= slack + parameters.data.num_observed * _rounding(parameters):
        return []
    note = (
        f"the loss rose by {rise:.3g} nats in one iteration, which EM must not do: an m_step "
        "does not return the mode"
    )
    warn_caller(note, RuntimeWarning)
    return [note]


def _rounding(parameters: Parameters) -> float:
    """Bound on the rounding error of an observation's loss that is due to means far from zero."""
    with torch.no_grad():
        emission: Any = parameters.build(parameters.data[:1])[0].emission
    try:
        mean, variance = emission.mean, emission.variance
    except NotImplementedError:
        return 0.0
    if not mean.dtype.is_floating_point:
        return 0.0
    rounded = (torch.finfo(mean.dtype).eps * mean) ** 2 / variance
    return rounded.nan_to_num(0.0, 0.0).sum().item()


def _unsettled(loop: Loop, history: Tensor, final: Tensor) -> list[str]:
    """Note if the loss was still falling, or one restart alone came near the best."""
    alone = int((final < final.min() + 1.0).sum()) == 1 < len(final)
    if loop.reason is not None and alone and not loop.large:
        return [
            f"one of {len(final)} restarts came within 1 nat of the best: more of them may find "
            "more probable parameters"
        ]
    if loop.tolerance is None or loop.reason is not None or history.size(1) < 2:
        return []
    falls, ends = history[:, -2] - history[:, -1], history[:, -1]
    if not bool((falls > 0).any()):  # of a loss near zero no share is small
        return []
    apart = f"; restarts end {ends.max() - ends.min():.3g} nats apart" if len(ends) > 1 else ""
    return [
        f"the loss was still falling, by {falls.max():.3g} nats in the last iteration{apart}: "
        "more num_iterations, or acceleration=True, may find more probable parameters"
    ]


def _finish(loop: Loop) -> Fit:
    """Fit of the best restart, with all restarts in ``Fit.restarts``."""
    parameters, data = loop.parameters, loop.parameters.data
    losses, priors = torch.stack(loop.losses, 1), torch.stack(loop.log_priors, 1)  # (R, steps)
    loop.keep_values()
    if is_validation_enabled():
        for name, support in parameters.supports.items():
            if not bool(support.check(parameters.values[name]).all()):
                text = f"m_step must return {name} in its support, {support}; some values are not"
                raise ValueError(f"{text}. Clamp them there.")
    place = int(losses[loop.alive, -1].argmin())  # among the restarts that go on
    best = int(loop.alive[place])  # among all
    going = losses[loop.alive]
    notes = remarks(data, parameters.module) + loop.maximize.remarks(place)
    if parameters.sites:
        notes += loop.maximize.moved(loop.last, place)
    notes += _risen(loop, going) + _unsettled(loop, going, losses[:, -1])
    history = {"log_likelihood": -losses[best] - priors[best], "log_prior": priors[best]}
    model = MarginalModel(parameters.module, parameters.log_prior)
    stacked = {f"module.{name}": value for name, value in loop.values.items()}
    values = {name: value[best] for name, value in stacked.items()}
    restarts = None
    if len(losses) > 1:
        restarts = Restarts(model, losses, losses[:, -1], stacked, best)
    return Fit(
        model, Point(values), losses[best], loop.reason is not None,
        loop.reason or loop.ended, loop.seconds,
        data.num_observed, list(values), notes=notes, restarts=restarts, method="EM", window=1,
        supports={f"module.{name}": space for name, space in parameters.supports.items()},
        parameters=values, history=history,
    )  # fmt: skip
