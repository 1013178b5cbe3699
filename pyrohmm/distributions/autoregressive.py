r"""Autoregressive emissions: their base class, symbols, and normal vectors.

Past observations are known, so inference stays exact: the recursions are those of other emissions,
and only log-likelihoods differ. The first L observations of a sequence have a distribution of their
own in each state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from pyro.distributions import Categorical as PyroCategorical
from pyro.distributions import MultivariateNormal as PyroNormal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import MultivariateNormal, constraints

from .._checks import (
    CheckedCalls,
    OwnChecks,
    broadcast_shapes,
    check_broadcast,
    check_floats,
    check_kind,
    check_size,
    check_tensor,
    check_trailing,
)
from ..ops.products import look_up, squared_norms
from .hard_zeros import log_probs
from .observation import is_categorical, log_prob_per_state, marginal_log_prob, permuted


class Autoregressive(CheckedCalls, OwnChecks):
    r"""Emission whose distribution depends on the last L observations: :math:`p(x_t | z_t, c_t)`.

    The context :math:`c_t = (x_{t-L}, ..., x_{t-1})` is of the same sequence. Observations 1 to L,
    whose context is not complete, have the distribution ``initial``.

    Subclasses define :meth:`given`. An observation that is missing, or of which a component is,
    must not be in the context of one that is observed: values with gaps are refused, unless nothing
    is observed after the gap.

    Args:
        initial: Distribution of each of the first L observations, batched over the K states.
        lags: L, at least 1.
        batch_shape: ``(*b, K)``, of the parameters of the subclass.
        history: ``(*B, L, *E)``, observations before the first, the last one last; then
            ``initial`` plays no part. None, ``(0, *E)``, by default.

    Example:
        Counts that go up with the one before.

        >>> class Contagious(distributions.Autoregressive):
        ...     def __init__(self, base, share):
        ...         super().__init__(Poisson(base), 1, base.shape)
        ...         self.base, self.share = base, share
        ...
        ...     def given(self, context):  # (*A, 1) to (*A, K)
        ...         return Poisson(self.base + self.share * context)
        >>> emission = Contagious(torch.tensor([1.0, 5.0]), torch.tensor([0.1, 0.5]))
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, emission, torch.tensor(3))
        >>> hmm.log_prob(torch.tensor([1.0, 4.0, 8.0]))
        tensor(-6.7650)
    """

    def __init__(
        self,
        initial: TorchDistribution,
        lags: int,
        batch_shape: Sequence[int],
        history: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_size("lags", lags)
        event = initial.event_shape
        history = torch.empty(0, *event) if history is None else history
        check_tensor("history", history)
        lead = history.shape[: history.dim() - len(event)]
        if history.shape[len(lead) :] != event or lead[-1:] not in ((0,), (lags,)):
            text = f"history must be (*B, L, *E), L = {lags}; got {tuple(history.shape)}"
            raise ValueError(f"{text}. Pass the last L steps.")
        self.initial, self.lags = initial, lags
        self._history = history if lead[-1] else None
        self._own_batch = torch.Size(batch_shape)
        batch = check_broadcast({"initial": initial.batch_shape, "batch_shape": self._own_batch,
                                 "history": torch.Size([*lead[:-1], 1])})  # fmt: skip
        super().__init__(batch, event, validate_args=validate_args)

    # What a subclass defines

    def given(self, context: Tensor) -> TorchDistribution:
        """Emission distribution ``(*A, K)`` of an observation given the L before it.

        Args:
            context: ``(*A, L, *E)``, the last one last.
        """
        text = f"{type(self).__name__} must define given(context)"
        raise NotImplementedError(f"{text}. It returns the emission after these values.")

    def permuted(self, order: Tensor) -> Autoregressive:
        """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
        text = f"{type(self).__name__} must define permuted(order)"
        raise NotImplementedError(f"{text}. It returns a copy with permuted states.")

    # Log-densities

    @property
    def support(self) -> constraints.Constraint:
        """Support of one observation."""
        return self.initial.support

    @property
    def history(self) -> Tensor:
        """Observations before the first step, ``(*B, L, *E)``; ``(0, *E)`` without a history."""
        return torch.empty(0, *self.event_shape) if self._history is None else self._history

    @property
    def num_first(self) -> int:
        """Number of observations with the distribution ``initial``: L, or none after a history."""
        return self.lags - self.history.size(-1 - len(self.event_shape))

    def windows(self, values: Tensor) -> Tensor:
        """Sliding windows ``(*A, T, L+1, *E)``: the L observations before each, then itself.

        Before the first, without a history, stand NaN, or -1 if observations are integers.

        Args:
            values: ``(*A, T, *E)``, observations.
        """
        before = self.history
        if self.num_first:
            nothing = torch.nan if values.dtype.is_floating_point else -1
            before = values.new_full((self.lags, *self.event_shape), nothing)
        joined = self._joined(before, values)
        at = joined.dim() - 1 - len(self.event_shape)
        return joined.unfold(at, self.lags + 1, 1).movedim(-1, at + 1)

    def _joined(self, before: Tensor, values: Tensor) -> Tensor:
        """Concatenate ``before`` and ``values`` ``(*A, t, *E)`` in time; batches broadcast."""
        events = 1 + len(self.event_shape)
        parts = before.to(values), values
        lead = broadcast_shapes(*(part.shape[: part.dim() - events] for part in parts))
        wide = [part.expand(*lead, *part.shape[part.dim() - events :]) for part in parts]
        return torch.cat(wide, len(lead))

    def log_likelihood(self, values: Tensor) -> Tensor:
        """Log-density ``(*A, T, K)`` of each of ``values`` ``(*A, T, *E)`` given those before it.

        The batch dimensions of the parameters broadcast with A from the right.
        """
        windows = self.windows(values)
        at = windows.dim() - 1 - len(self.event_shape)  # of a window
        windows = windows.movedim(at - 1, 0)  # time first: the batch of the parameters is last
        now, context = windows.select(at, self.lags), windows.narrow(at, 0, self.lags)
        size, parts = self.num_first, []
        if size:
            parts.append(log_prob_per_state(self.initial, now[:size]))
        if len(now) > size:
            parts.append(self._log_prob_given(now[size:], context[size:]))
        shape = broadcast_shapes(*(part.shape[1:] for part in parts))
        return torch.cat([part.expand(len(part), *shape) for part in parts]).movedim(0, -2)

    def _log_prob_given(self, values: Tensor, context: Tensor) -> Tensor:
        """Log-density ``(*A, K)`` of ``values`` ``(*A, *E)`` given contexts ``(*A, L, *E)``."""
        return marginal_log_prob(self.given(context), values.unsqueeze(-1 - len(self.event_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Raise: a single observation has no log-density without those before it."""
        text = f"{type(self).__name__} has no log_prob of one observation, which depends on others"
        raise ValueError(f"{text}. Call log_likelihood(values) of a sequence.")

    # One step after the other

    def next(self, past: Tensor) -> TorchDistribution:
        """The distribution of the next observation in each state, ``(*A, K)``.

        Args:
            past: ``(*A, t, *E)``, the observations so far, which may be none; not the history.
        """
        joined = self._joined(self.history, past)
        at = joined.dim() - 1 - len(self.event_shape)
        if joined.size(at) < self.lags:
            return self.initial
        return self.given(joined.narrow(at, joined.size(at) - self.lags, self.lags))

    def after(self, values: Tensor, known: Tensor | None, lengths: Tensor) -> Autoregressive:
        """Emission for the steps that follow ``values``, the last L of which are its history.

        Args:
            values: ``(*B, T, *E)``, observations.
            known: ``(*B, T)`` booleans, which steps exist and are observed; None if all.
            lengths: ``(*B)`` integers, the number of steps of each sequence.

        Raises:
            ValueError: If a sequence has fewer than L steps, or its last L are not all observed.
        """
        event = self.event_shape
        lead = values.shape[: values.dim() - 1 - len(event)]
        last = lengths.to(values.device).expand(lead).unsqueeze(-1)
        last = last - self.lags + torch.arange(self.lags, device=values.device)  # (*B, L)
        seen = last >= 0
        if known is not None:
            seen &= known.expand(*lead, -1).gather(-1, last.clamp(min=0))
        if not bool(seen.all()):
            wrong = int((~seen.all(-1)).sum())
            raise ValueError(
                f"the last {self.lags} steps of every sequence must exist and be observed; {wrong} "
                f"of {seen[..., 0].numel()} sequences lack some. Drop those sequences, or fill in "
                "the steps."
            )
        index = last.reshape(*last.shape, *(1,) * len(event)).expand(*last.shape, *event)
        other, history = copy.copy(self), values.gather(len(lead), index)
        checked, batch = vars(self).get("_validate_args"), self._own_batch
        Autoregressive.__init__(other, self.initial, self.lags, batch, history, checked)
        return other

    def check_context(self, values: Tensor | None, known: Tensor | None) -> None:
        """Raise if an observation depends on a missing one.

        Args:
            values: ``(*B, T, *E)``, with something of the support where they are not known; None
                if they are not to be read.
            known: ``(*B, T)`` booleans, which steps exist and are observed; None if all that exist.
        """
        if values is not None and values.dtype.is_floating_point and bool(values.isnan().any()):
            raise ValueError("values must have no NaN, which later ones depend on: split there.")
        if known is None:
            return
        padded = torch.nn.functional.pad(known, (self.lags, 0), value=True)
        context = padded.unfold(-1, self.lags + 1, 1)[..., :-1].all(-1)
        bad = known & ~context
        if bool(bad.any()):
            *sequence, step = bad.nonzero()[0].tolist()
            raise ValueError(
                f"observed leaves out one of the {self.lags} steps before step {step} of sequence "
                f"{sequence or 0} that it depends on: split the sequence at the gap."
            )


def with_past(emission: TorchDistribution, values: Tensor) -> Tensor:
    """Windows of an autoregressive emission's values; unchanged values of any other emission."""
    return emission.windows(values) if isinstance(emission, Autoregressive) else values


# Symbols ------------------------------------------------------------------------------------------


class AutoregressiveCategorical(Autoregressive):
    r"""Symbols whose distribution in each state depends on the last L symbols: one table.

    .. math:: p(x_t = v | z_t = k, c_t = c) = \mathrm{tables}_{k c v}

    Contexts are numbered as the digits of a number to the base V, the last symbol counting
    least: :math:`c = \sum_l x_{t-l} V^{l-1}`.

    Args:
        initial: ``Categorical`` of batch shape ``(*b, K)``: each of the first L symbols.
        tables: ``Categorical`` of batch shape ``(*b, K, V**L)``.
        history: ``(*B, L)`` integers, symbols before the first: see :class:`Autoregressive`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes disagree, or the number of contexts is no power of V.

    Example:
        A state that repeats the symbol before, and one that changes it.

        >>> tables = torch.tensor([[[0.9, 0.1], [0.1, 0.9]], [[0.2, 0.8], [0.8, 0.2]]])
        >>> first = Categorical(torch.ones(2, 2))
        >>> emission = distributions.AutoregressiveCategorical(first, Categorical(tables))
        >>> sure = torch.eye(2).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sure, emission, torch.tensor(3))
        >>> hmm.posterior(torch.tensor([0, 0, 0])).state_probs[-1]
        tensor([0.9529, 0.0471])
    """

    def __init__(
        self,
        initial: TorchDistribution,
        tables: TorchDistribution,
        history: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not (is_categorical(initial) and is_categorical(tables)):
            kinds = [type(part).__name__ for part in (initial, tables)]
            text = f"initial and tables must be Categorical; got {' and '.join(kinds)}"
            raise TypeError(f"{text}. Wrap probabilities by Categorical(probs).")
        self.num_symbols = tables.param_shape[-1]
        contexts = tables.batch_shape[-1] if tables.batch_shape else 0
        lags = next((n for n in range(1, 64) if self.num_symbols**n == contexts), 0)
        shapes = initial.batch_shape[-1:], tables.batch_shape[-2:-1]
        symbols = initial.param_shape[-1]
        if not lags or shapes[0] != shapes[1] or symbols != self.num_symbols:
            raise ValueError(
                "initial must have batch shape (*b, K) and tables (*b, K, V**L), both of V "
                f"symbols; got {shapes} of {symbols} and {self.num_symbols} symbols."
            )
        self.tables = tables
        super().__init__(initial, lags, tables.batch_shape[:-1], history, validate_args)

    def _context(self, symbols: Tensor) -> Tensor:
        """Row index ``(*A)`` of contexts ``(*A, L)``: their symbols are digits to the base V."""
        place = self.num_symbols ** torch.arange(self.lags - 1, -1, -1, device=symbols.device)
        return (symbols.long() * place).sum(-1)

    def given(self, context: Tensor) -> TorchDistribution:
        """Categorical distribution ``(*A, K)`` of a symbol given the L before it."""
        logs = log_probs(self.tables)
        shape = broadcast_shapes(context.shape[:-1], logs.shape[:-3])
        row = self._context(context).expand(shape)[..., None, None, None]
        logs = logs.expand(*shape, *logs.shape[-3:])
        return PyroCategorical(
            logits=logs.gather(-2, row.expand(*logs.shape[:-2], 1, logs.size(-1))).squeeze(-2)
        )

    def permuted(self, order: Tensor) -> AutoregressiveCategorical:
        """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
        tables = PyroCategorical(logits=log_probs(self.tables).index_select(-3, order))
        return AutoregressiveCategorical(permuted(self.initial, order), tables, self.history)

    # As symbols of a larger alphabet: a symbol with its context is one of V + V ** (L + 1)

    @property
    def log_symbols(self) -> Tensor:
        """Log-probabilities ``(*b, K, V + V ** (L + 1))`` of first symbols, then given contexts."""
        first, rest = log_probs(self.initial), log_probs(self.tables).flatten(-2)
        lead = broadcast_shapes(self.initial.batch_shape, self._own_batch)
        return torch.cat([part.expand(*lead, part.size(-1)) for part in (first, rest)], -1)

    def codes(self, windows: Tensor) -> Tensor:
        """Column index ``(*A)`` in :attr:`log_symbols` of each window ``(*A, L+1)``.

        A symbol that is none of 0 to V - 1 has a column that does not exist.
        """
        windows, count = windows.long(), self.num_symbols
        now, context = windows[..., -1], windows[..., :-1]
        codes = torch.where(context[..., 0] < 0, now, count + self._context(context) * count + now)
        return codes.masked_fill((now < 0) | (now >= count), count + count ** (self.lags + 1))

    def log_likelihood(self, values: Tensor) -> Tensor:
        """Log-probability ``(*A, T, K)`` of each symbol ``(*A, T)`` given those before it."""
        codes = self.codes(self.windows(values))
        return look_up(self.log_symbols, codes.movedim(-1, 0)).movedim(0, -2)

    def probs_ahead(self, states: Tensor, log_transition: Tensor) -> Tensor:
        """Probabilities ``(*B, H, V)`` of each of H symbols after the history, exactly.

        A forward pass over the pairs of state and context.

        Args:
            states: ``(*B, H, K)``, probabilities of the states at these steps.
            log_transition: ``(*b, K, K)``.
        """
        count, size = self.num_symbols, self.num_symbols**self.lags
        here = torch.nn.functional.one_hot(self._context(self.history), size)
        before = states[..., 0, :, None] * here.unsqueeze(-2)  # (*B, K, C)
        probs = []
        for _ in range(states.size(-2)):
            joint = before.unsqueeze(-1) * log_probs(self.tables).exp()  # (*B, K, C, V)
            probs.append(joint.sum((-3, -2)))
            now = joint.unflatten(-2, (count, size // count)).sum(-3).flatten(-2)
            before = torch.einsum("...jk,...jc->...kc", log_transition.exp(), now)
        return torch.stack(probs, -2)


# Vectors ------------------------------------------------------------------------------------------


class AutoregressiveNormal(Autoregressive):
    r"""Switching vector autoregression: vectors that depend linearly on those before.

    .. math:: x_t | z_t = k \sim \mathrm{Normal}\Big(\mu_k + \sum_{l=1}^L
              (x_{t-l} - o) W_{kl}, \; \Sigma_k\Big)

    Vectors are rows: ``weights[k, l - 1, i, j]`` is by how much component i of the l-th observation
    before moves component j (row = from, column = to). The origin o is a constant that keeps
    numbers small; with zeros the mean :math:`\mu` is the usual intercept.

    Args:
        initial: Distribution of each of the first L vectors, batched over the K states.
        base: ``MultivariateNormal`` of batch shape ``(*b, K)``: mean :math:`\mu_k` of a vector
            when those before it are at the origin, and covariance :math:`\Sigma_k`.
        weights: ``(*b, K, L, D, D)``.
        origin: ``(D,)``; zeros by default.
        history: ``(*B, L, D)``, vectors before the first: see :class:`Autoregressive`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes disagree.

    Example:
        >>> start = MultivariateNormal(torch.zeros(2, 1), torch.eye(1))
        >>> noise = MultivariateNormal(torch.tensor([[0.0], [1.0]]), 0.1 * torch.eye(1))
        >>> weights = torch.tensor([0.9, -0.5]).reshape(2, 1, 1, 1)
        >>> emission = distributions.AutoregressiveNormal(start, noise, weights)
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, emission, torch.tensor(3))
        >>> hmm.log_prob(torch.tensor([[0.0], [0.1], [0.9]]))
        tensor(-1.8475)
        >>> hmm.sample().shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        initial: TorchDistribution,
        base: TorchDistribution,
        weights: Tensor,
        origin: Tensor | None = None,
        history: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        cure = "Build one by MultivariateNormal(loc, covariance)."
        check_kind("base", base, MultivariateNormal, "a MultivariateNormal", cure)
        check_floats("weights", weights)
        dim = base.event_shape[0]
        check_trailing("weights", weights, (dim, dim), "(K, L, D, D)", "D is that of base.")
        states = {base.batch_shape[-1:], initial.batch_shape[-1:], weights.shape[-4:-3]}
        if weights.dim() < 4 or len(states) > 1 or initial.event_shape != base.event_shape:
            text = "initial and base must be of K states and D parts, and weights (K, L, D, D)"
            raise ValueError(f"{text}; got {initial.shape()}, {base.loc.shape}, {weights.shape}.")
        origin = weights.new_zeros(dim) if origin is None else origin
        check_trailing("origin", origin, (dim,), "(D,)", "D is that of base.")
        self.base, self.weights, self.origin = base, weights, origin
        batch = check_broadcast({"base": base.batch_shape, "weights": weights.shape[:-3]})
        super().__init__(initial, weights.size(-3), batch, history, validate_args)

    def _shift(self, context: Tensor) -> Tensor:
        """Contexts ``(*A, L, D)`` minus the origin, the last first: as ``weights`` have it."""
        return (context - self.origin).flip(-2)

    def given(self, context: Tensor) -> TorchDistribution:
        """Normal distribution ``(*A, K)`` of a vector given the L before it."""
        past = self._shift(context)
        loc = self.base.loc + torch.einsum("...li,...klij->...kj", past, self.weights.to(past))
        return PyroNormal(loc, scale_tril=self.base.scale_tril.to(loc), validate_args=False)

    def permuted(self, order: Tensor) -> AutoregressiveNormal:
        """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
        base = self.base
        return AutoregressiveNormal(
            permuted(self.initial, order),
            PyroNormal(base.loc[..., order, :], scale_tril=base.scale_tril[..., order, :, :]),
            self.weights.index_select(-4, order), self.origin, self.history,
        )  # fmt: skip

    def _log_prob_given(self, values: Tensor, context: Tensor) -> Tensor:
        """Log-density given the last L vectors, by one product of whitened residuals.

        In float64, for a residual may be far smaller than what it is the difference of.
        """
        one = torch.ones_like(values[..., :1])
        past = self._shift(context).flatten(-2)
        rows = torch.cat([values - self.origin, past, one], -1)
        root, loc = self.base.scale_tril, self.base.loc - self.origin
        eye = torch.eye(root.size(-1), dtype=root.dtype, device=root.device)
        slopes = self.weights.flatten(-3, -2).mT  # (*b, K, D, L D)
        parts = eye, -slopes, -loc.unsqueeze(-1)
        columns = torch.cat([x.expand(*self._own_batch, *x.shape[-2:]) for x in parts], -1)
        whitened = torch.linalg.solve_triangular(root.double(), columns.double(), upper=False)
        scores = -0.5 * squared_norms(rows.double(), whitened)
        log_det = root.diagonal(dim1=-2, dim2=-1).double().log().sum(-1)
        scores = scores - log_det - 0.5 * len(eye) * math.log(2 * math.pi)
        return scores.to(torch.promote_types(values.dtype, root.dtype))

    def moments(self, states: Tensor, log_transition: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance ``(*B, H, D)`` of each of H observations after the history, exactly.

        The joint second moments of context and state obey a linear recursion. It is computed in
        float64, for a variance is the difference of a mean square and the square of a mean.

        Args:
            states: ``(*B, H, K)``, probabilities of the states at these steps.
            log_transition: ``(*b, K, K)``.
        """
        dim, size = self.event_shape[0], 1 + self.lags * self.event_shape[0]
        past = self._shift(self.history.double()).flatten(-2)
        past = torch.cat([torch.ones_like(past[..., :1]), past], -1)
        step, covariance = self._companion(size).double(), self.base.covariance_matrix.double()
        noise = torch.nn.functional.pad(covariance, (1, size - 1 - dim, 1, size - 1 - dim))
        outer = (past.unsqueeze(-1) * past.unsqueeze(-2)).unsqueeze(-3)
        first = states[..., 0, :].double()
        first = first / first.sum(-1, keepdim=True)
        before = first[..., None, None] * outer  # (*B, K, F, F)
        matrix = log_transition.double().softmax(-1)
        means, squares = [], []
        for _ in range(states.size(-2)):
            mass = before[..., :1, :1]
            now = step @ before @ step.mT + mass * noise
            total = now.sum(-3)
            means.append(total[..., 1 : 1 + dim, 0])
            squares.append(total.diagonal(dim1=-2, dim2=-1)[..., 1 : 1 + dim])
            before = torch.einsum("...jk,...jfg->...kfg", matrix, now)
        mean = torch.stack(means, -2)
        variance = torch.stack(squares, -2) - mean.square()
        return (mean + self.origin).to(states.dtype), variance.clamp(min=0.0).to(states.dtype)

    def _companion(self, size: int) -> Tensor:
        """Companion matrices ``(*b, K, F, F)``: from 1 and the last L vectors to a step later."""
        dim, weights = self.event_shape[0], self.weights
        kept = torch.eye(size, dtype=weights.dtype, device=weights.device)
        kept = torch.cat([kept[:1], kept.new_zeros(dim, size), kept[1 : size - dim]])
        loc = (self.base.loc - self.origin).unsqueeze(-1)
        slopes = weights.flatten(-3, -2).mT
        loc, slopes = (part.expand(*self._own_batch, *part.shape[-2:]) for part in (loc, slopes))
        top = torch.nn.functional.pad(torch.cat([loc, slopes], -1), (0, 0, 1, size - 1 - dim))
        return kept + top
