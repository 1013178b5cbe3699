r"""``RegressionHMM``: chains of all kinds whose parameters depend on linear predictors.

``data.covariates`` holds the columns of all design matrices: see :func:`pyrohmm.formulas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_booleans, check_shape, check_size
from .._transforms import transforming
from ..chains.rates import diagonal
from ..data.formulas import Columns, as_columns
from ..data.sequences import Sequences
from ..data.steps import begins
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from ..ops import newton
from ..ops.log_space import log, step_mask
from .base import HMMModule
from .closed_form import Counted, Prior, Statistics, inside, under
from .durations import truncated_log_probs
from .family import EmissionFamily, build_emission
from .regression import Linear, RegressionEmission, after_zero, mode_of
from .tabular_times import given_times

NEVER = -1e300  # the logit of an outcome that is impossible: a count of zero times it is zero


class RegressionHMM(HMMModule):
    r"""HMM of any chain whose transitions, first states and emissions depend on covariates.

    .. math:: p(z_{t+1} = j \mid z_t = i) = \frac{\exp(x_t^\top \beta_{ij})}
              {\sum_k \exp(x_t^\top \beta_{ik})}, \quad \beta_{ii} = 0

    a multinomial logit against staying, with the covariates of the step that is left, as in
    depmixS4 and hmmTMB. With ``rates`` it is a chain in continuous time
    (:class:`ContinuousTimeHMM`) of log-linear rates, constant between observations, as in msm:

    .. math:: q_{ij}(t) = \exp(x_t^\top \beta_{ij}), \quad i \ne j

    With ``durations`` it is a semi-Markov chain (:class:`HSMM`): d - 1 has a distribution whose
    parameters are linked to linear predictors, and transitions are logits against the first state
    that may follow. Their covariates must be constant along each sequence.

    Sites or parameters: ``transition.coefficients``, or ``rates.coefficients``, ``(K, K - 1, P)``,
    row i for the transitions from i to the other states in their order; ``initial.coefficients``
    ``(K - 1, P)``, of logits against the first state; ``duration.NAME.coefficients`` ``(K, P)``;
    and those of ``emission``. They are points without priors, and fits are
    of maximum likelihood; with ``prior_scale`` they have normal priors.

    Args:
        num_states: K.
        emission: An emission family; with covariates that of :func:`regression`.
        transition: Columns of the covariates, from :func:`pyrohmm.formulas` or as numbers; None
            for an intercept alone.
        initial: The same, for the first state; read at the first step.
        prior_scale: Standard deviation of a normal prior of the coefficients; None for no prior.
            Of those of ``emission`` and ``durations``, too, if these have none of their own.
        rates: Columns of log rates, in place of ``transition``; data must have times.
        durations: Distribution of d - 1, such as ``regression(Poisson, rate=...)``.
        max_duration: D of ``durations``; what is longer has no probability.
        transition_allowed: ``(K, K)`` booleans, which transitions are possible; all by default.
            Staying is, except with ``durations``.
        transition_free: ``(K, K - 1, P)`` booleans, False where a coefficient of the transitions is
            zero; all are free by default. ``transition.coefficients`` are then ``(F,)``, the free
            ones in their order, as they are with ``transition_allowed`` or ``durations``.
        exact_entry: ``(K,)`` booleans, of ``rates``: see :class:`ContinuousTimeHMM`.

    Raises:
        TypeError: If ``durations`` is not made by :func:`regression`.
        ValueError: If booleans are of another shape, staying is not allowed, no state may follow a
            state with durations, or arguments exclude or need each other.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> x = torch.randn(1, 200, 1)
        >>> covariates = torch.cat([torch.ones(1, 200, 1), x], -1)
        >>> counts = Poisson((1.0 + 0.5 * x[..., 0]).exp()).sample()
        >>> data = Sequences(counts, torch.tensor([200]), covariates=covariates)
        >>> module = RegressionHMM(1, regression(Poisson, rate=[0, 1]))
        >>> fit = fit_map(MarginalModel(module), data, num_iterations=300)
        >>> (module.emission.rate.coefficients - torch.tensor([1.0, 0.5])).abs().max() < 0.1
        tensor(True)
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        transition: Columns | Sequence[int] | None = None,
        initial: Columns | Sequence[int] | None = None,
        prior_scale: float | None = None,
        *,
        rates: Columns | Sequence[int] | None = None,
        durations: EmissionFamily | None = None,
        max_duration: int | None = None,
        transition_allowed: Tensor | None = None,
        transition_free: Tensor | None = None,
        exact_entry: Tensor | None = None,
    ) -> None:
        super().__init__()
        emission, durations = (_under(prior_scale, family) for family in (emission, durations))
        check_size("num_states", num_states, 1 if durations is None else 2)
        if rates is not None and (transition is not None or durations is not None):
            raise ValueError("rates are in place of transition and durations: give one of them.")
        alone = exact_entry is not None and rates is None
        if alone or (durations is None) != (max_duration is None):
            raise ValueError("durations need max_duration, and exact_entry needs rates.")
        check_size("max_duration", 1 if max_duration is None else max_duration)
        self.num_states, self.max_duration = num_states, max_duration or 0
        shape = num_states, num_states - 1
        others = ~torch.eye(num_states, dtype=torch.bool)
        self.register_buffer("place", others.cumsum(-1) * others)
        self.register_buffer("exact_entry", exact_entry)
        name = "transition" if rates is None else "rates"
        columns = as_columns(name, transition if rates is None else rates)
        size = *shape, max(len(columns.indices), 1)
        allowed = torch.ones_like(others) if transition_allowed is None else transition_allowed
        for label, mask, wanted, meaning in (
            ("transition_free", transition_free, size, "(K, K - 1, P)"),
            ("transition_allowed", allowed, others.shape, "(K, K)"),
            ("exact_entry", exact_entry, shape[:1], "(K,)"),
        ):
            if mask is not None:
                check_booleans(label, mask)
                check_shape(label, mask, wanted, meaning)
        possible = allowed[others].reshape(*shape, 1)
        if durations is not None:  # logits against the first state that may follow
            allowed = allowed & others
            if not bool(allowed.any(-1).all()):
                text = "transition_allowed must leave a next state to every state"
                raise ValueError(f"{text}. Set a True in each row.")
            possible = possible & (possible.cumsum(1) > 1)
        elif not bool(allowed.diagonal().all()):
            raise ValueError(
                "transition_allowed must be True on its diagonal, for staying. Call "
                ".fill_diagonal_(True)."
            )
        of_all = possible.expand(size).clone()
        free: Any = of_all if transition_free is None else possible & transition_free
        free = None if transition_free is None and bool(possible.all()) else free
        self.register_buffer("barred", None if bool(allowed.all()) else ~allowed)
        self.moved_by = name
        setattr(self, name, Linear(columns, shape, prior_scale, free))
        self.initial = Linear(as_columns("initial", initial), shape[1:], prior_scale)
        self.duration: Any = None if durations is None else build_emission(durations, num_states)
        if durations is not None:
            kind: Any = getattr(self.duration, "kind", None)
            counts = getattr(getattr(kind, "support", None), "is_discrete", False)
            if not (counts and isinstance(self.duration, RegressionEmission)):
                raise TypeError("durations must be regression(...) of counts, as of a Poisson.")
        self.emission = build_emission(emission, num_states)

    @property
    def transition_predictors(self) -> Linear:
        """Linear predictors of the transition logits, or of the log rates."""
        part: Linear = getattr(self, self.moved_by)
        return part

    def forward(
        self,
        lengths: Tensor,
        observed: Tensor | None = None,
        covariates: Tensor | None = None,
        times: Tensor | None = None,
    ) -> HMM:
        """Build the HMM for ``covariates`` ``(*B, T, C)``; of rates also ``times`` ``(*B, T)``."""
        if covariates is None:
            raise ValueError(
                "data has no covariates, which this module needs: Sequences(..., covariates=)."
            )
        first = covariates[..., 0, :]
        start = after_zero(self.initial(first)).log_softmax(-1)
        per_step = isinstance(self.emission, RegressionEmission)
        emission = self.emission(covariates) if per_step else self.emission()
        rest: dict[str, Any] = {"emission": emission, "lengths": lengths, "observed": observed,
                                "emission_per_step": per_step}  # fmt: skip
        if self.duration is not None:
            self._check_constant(covariates, step_mask(lengths, covariates.size(-2), first.device))
            lasts = truncated_log_probs(self.duration(first), self.max_duration)
            return HSMM(start, self._logits(first).log_softmax(-1), lasts, **rest)
        logits = self._logits(covariates[..., :-1, :])
        if self.moved_by == "transition":
            return HMM(start, logits.log_softmax(-1), transition_per_step=True, **rest)
        rest |= {"times": given_times(times), "exact_entry": self.exact_entry}
        rates = logits.exp().masked_fill(diagonal(logits), 0.0)
        rates = rates - rates.sum(-1).diag_embed()
        return ContinuousTimeHMM(start, rates, rates_per_step=True, **rest)

    def _logits(self, covariates: Tensor) -> Tensor:
        """Transition logits or log rates ``(*, K, K)``; a possible diagonal is the reference."""
        logits = after_zero(self.transition_predictors(covariates))
        logits = logits.gather(-1, self.place.expand(logits.shape))
        return logits if self.barred is None else logits.masked_fill(self.barred, -torch.inf)

    def _check_constant(self, covariates: Tensor, exists: Tensor) -> None:
        """Raise if covariates of durations or of their transitions change along a sequence."""
        if transforming():
            return
        parts = [self.transition, *self.duration.children()]
        names = {i: n for x in parts for i, n in zip(x.columns.indices, x.columns.names)}
        moved = (covariates != covariates[..., :1, :]) & exists.unsqueeze(-1)
        for i in sorted(names):
            if bool(moved[..., i].any()):
                raise ValueError(f"covariates of durations must be constant along each sequence; "
                                 f"{names[i]!r} changes.")  # fmt: skip

    def emission_module(self) -> PyroModule | None:
        """The emission, if it does not depend on covariates."""
        return None if isinstance(self.emission, RegressionEmission) else self.emission

    @property
    def by_steps(self) -> list[str]:
        """Names of the parameters that :meth:`maximize` returns; none if a prior is a user's."""
        own = {n: part for n, part in self.named_modules() if isinstance(part, Linear)}
        if not all(isinstance(p, Prior) for x in own.values() for p in x._pyro_samples.values()):
            return []
        parts = ["coefficients", "smooth"]
        return [f"{name}.{x}" for name, part in own.items() for x in parts[: 1 + bool(part.terms)]]

    def entry_names(self) -> dict[str, list[str]]:
        """Names of the coefficients for tables: ``"transition 0 → 1: dose"``, by parameter."""
        found: dict[str, list[str]] = {}
        for name, part in self.named_modules():
            if not isinstance(part, Linear):
                continue
            free = torch.ones(*part.shape, len(part.columns.names), dtype=torch.bool)
            if part.free is not None:
                free[..., : part.width] = part.free[..., : part.width]
            for *place, column in free.nonzero().tolist():
                key = f"{name}.{'coefficients' if column < part.width else 'smooth'}"
                if part is self.transition_predictors:  # by the states entered, not their order
                    place[1] += place[1] >= place[0]
                elif part is self.initial:
                    place[0] += 1
                where = " → ".join(map(str, place))
                found.setdefault(key, []).append(f"{name} {where}: {part.columns.names[column]}")
        return found

    def maximize(self, parts: list[Counted], current: Statistics) -> Statistics:
        """M-step: mode of the coefficients, by Newton's method on rows without padding."""
        size, restarts, found = self.num_states, len(current["initial.coefficients"]), Statistics()
        pieces = [self._rows(*part, restarts) for part in parts]
        rows = {n: torch.cat([piece[n] for piece in pieces], 1).double() for n in pieces[0]}
        if size > 1:
            value = partial(_of_rows, counts=rows["initial"].mT)
            start = {"initial.coefficients": self.initial}
            found |= mode_of(start, current, 0, rows["first"][0], value)
        if size > 1 and rows["pairs"].size(1):
            found |= self._transition_mode(rows["left"][0], rows["pairs"], current)
        if self.duration is not None:
            lasted = rows["log_duration"].movedim(1, 2).flatten(0, 1)  # (R K, N, D)

            def terms(distribution: Any, rows: slice) -> Tensor:
                logs, counts = truncated_log_probs(distribution, self.max_duration), lasted[:, rows]
                return torch.where(counts > 0, counts * logs, 0.0).sum(-1)

            own = self.duration.mode(rows["first"][0], terms, inside(current, "duration."))
            found |= under("duration.", own)
        if isinstance(self.emission, RegressionEmission):
            seen = rows["values"][0], rows["seen"][0], rows["states"]
            own = self.emission.maximize(*seen, inside(current, "emission."))
            found |= under("emission.", own)
        return found

    def _rows(self, data: Sequences, counts: Statistics, restarts: int) -> Statistics:
        """Counts ``(R, M, *)`` of M sequences or steps, and their covariates ``(1, M, C)``."""
        size, covariates = self.num_states, cast("Tensor", data.packed("covariates"))[None]
        first = covariates[:, data.firsts]
        found = {"first": first, "initial": counts["log_initial"].reshape(restarts, -1, size)}
        if self.duration is not None:
            pairs, lasted = counts["log_transition"], counts["log_duration"]
            found |= {"left": first, "pairs": pairs.reshape(restarts, -1, size, size)}
            found["log_duration"] = lasted.reshape(restarts, -1, size, self.max_duration)
        else:
            pairs = counts["rates" if self.moved_by == "rates" else "log_transition"]
            left = data.exists[:, 1:]
            found["pairs"] = pairs.reshape(restarts, *left.shape, size, size)[:, left]
            found["left"] = covariates[:, ~begins(data.lengths).roll(-1)]
        if isinstance(self.emission, RegressionEmission):
            seen, states = data.observed, counts["states"]
            found["states"] = states.reshape(restarts, *seen.shape, size)[:, seen]
            found |= {"seen": covariates[:, data.known], "values": data.known_values[None]}
        return found

    def _transition_mode(
        self, covariates: Tensor, pairs: Tensor, current: Statistics
    ) -> Statistics:
        """M-step: mode of the coefficients of transitions or rates; counts ``(R, M, K, K)``."""
        order = self.place.argsort(-1)  # staying first
        rows = pairs.movedim(1, -1)  # (R, K, K, M)
        rows = rows.gather(2, order.unsqueeze(-1).expand(rows.shape)).flatten(0, 1)
        barred = self.barred
        if barred is not None:
            barred = barred.gather(-1, order).repeat(len(pairs), 1).unsqueeze(-1)
        terms = _of_rates if self.moved_by == "rates" else _of_rows
        value = partial(terms, counts=rows, barred=barred)
        parts = {f"{self.moved_by}.coefficients": self.transition_predictors}
        return mode_of(parts, current, 1, covariates, value)

    def begin_at(self, hmm: HMM) -> RegressionHMM:
        """Set the intercepts to the parameters of an HMM without covariates, and the rest to zero.

        The likelihood has many optima, and few of them are good: fit a model without covariates
        first, with restarts. The first column of each part must be the intercept, and coefficients
        be points.

        Args:
            hmm: An HMM with the emission that these coefficients are of, without covariates.

        Returns:
            The module itself.
        """
        with torch.no_grad():
            if self.moved_by == "rates":
                logs = log(hmm.rates.clamp(min=0.0)).clamp(min=-20.0)
            else:
                logs = hmm.log_transition.clamp(min=-20.0)
                base = diagonal(logs) if self.duration is None else ~self.barred
                logs = logs - logs.gather(-1, base.byte().argmax(-1, keepdim=True))
            self._set(self.transition_predictors, logs[self.place > 0].reshape(self.num_states, -1))
            start = hmm.log_initial.clamp(min=-20.0)
            self._set(self.initial, start[1:] - start[0])
            if self.duration is not None:
                for name, value in self._lasting(hmm.log_duration.exp()).items():
                    self._set(getattr(self.duration, name), value)
            if isinstance(self.emission, RegressionEmission):
                for name, value in self.emission.predictors_of(hmm.emission).items():
                    self._set(getattr(self.emission, name), value)
        return self

    def _lasting(self, probs: Tensor) -> dict[str, Tensor]:
        """Duration predictors ``(K,)``, by parameter, of least KL divergence from ``(K, D)``."""
        probs, names = probs.double(), self.duration.names

        def value(predictors: Tensor) -> Tensor:
            logs = truncated_log_probs(self.duration.of_predictors(predictors), probs.size(-1))
            return torch.where(probs > 0, probs * logs, 0.0).sum(-1)

        start = probs.new_zeros(len(probs), len(names))
        best = newton.maximized(value, newton.of_function(value), start)
        return dict(zip(names, best.unbind(-1)))

    def _set(self, part: Linear, intercepts: Tensor) -> None:
        if not part.columns.names[0].startswith(("Intercept", "column ")):
            raise ValueError("begin_at needs an intercept as first column of all parts.")
        value = torch.zeros(*part.shape, part.width).to(part.coefficients)
        value[..., 0] = intercepts
        part.coefficients = value if part.free is None else value[part.free[..., : part.width]]


def _of_rows(
    predictors: Tensor, rows: slice, counts: Tensor, barred: Tensor | None = None
) -> Tensor:
    """Expected multinomial log-likelihood ``(B, m)``; the first outcome is the reference.

    Args:
        predictors: ``(B, m, K - 1)``, of the other outcomes.
        rows: Which of the M observations they are of.
        counts: ``(B, K, M)``.
        barred: ``(B, K, 1)`` booleans, outcomes that are impossible.
    """
    logits = torch.nn.functional.pad(predictors.mT, (0, 0, 1, 0))
    if barred is not None:
        logits = logits.masked_fill(barred, NEVER)
    return (counts[..., rows] * logits.log_softmax(1)).sum(1)


def _of_rates(
    predictors: Tensor, rows: slice, counts: Tensor, barred: Tensor | None = None
) -> Tensor:
    """Expected log-likelihood ``(B, m)`` of paths in continuous time, given log rates.

    Args:
        predictors: ``(B, m, K - 1)``, of the other states.
        rows: Which of the M observations they are of.
        counts: ``(B, K, M)``, the time in the state, and numbers of transitions to the others.
        barred: ``(B, K, 1)`` booleans, transitions that are impossible.
    """
    time, number = counts[:, :1, rows].mT, counts[:, 1:, rows].mT
    total = number * predictors - time * predictors.exp()
    return (total if barred is None else total.masked_fill(barred[:, 1:].mT, 0.0)).sum(-1)


def _under(prior_scale: float | None, family: Any) -> Any:
    """A family of regressions with this prior, unless it has one; another as it is."""
    regresses = getattr(family, "func", None) is RegressionEmission
    if prior_scale is None or not regresses or family.keywords["prior_scale"] is not None:
        return family
    return partial(family, prior_scale=prior_scale)
