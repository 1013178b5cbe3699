"""``ContinuousTimeHMM``: the distribution over sequences observed at irregular times."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._arguments import checked
from .._checks import (
    check_booleans,
    check_broadcast,
    check_floats,
    check_integers,
    check_log_simplex,
    check_real,
    check_same_device,
    check_shape,
    check_tensor,
    check_times,
    check_trailing,
)
from .._transforms import refuse_transforms, transforming
from ..ops import masks, recursions
from ..ops import stationary as stationary_ops
from ..ops.continuous_time import log_transitions
from ..ops.log_space import log
from ..ops.lookup import take_rows
from ..ops.recursions import ExpectedCounts
from .autoregressive import Autoregressive
from .forecast import Forecast
from .hmm import HMM


class Gaps(NamedTuple):
    """Lengths of time between steps.

    Attributes:
        distinct: ``(U,)``, each length once.
        place: ``(*B, T-1)`` integers, which of them lies before each step but the first; or
            ``(1,)``, if all are equal.
    """

    distinct: Tensor
    place: Tensor


class ContinuousTimeHMM(HMM):
    r"""Sequences emitted by a Markov chain in continuous time, observed at times of their own.

    .. math:: p(z_{t+1} = j \mid z_t = i) = \bigl(e^{Q (\tau_{t+1} - \tau_t)}\bigr)_{ij}

    The chain stays in state i for an exponential time of mean :math:`-1 / q_{ii}`, and goes to j
    with probability :math:`-q_{ij} / q_{ii}`; what happens between two observations is summed out.
    With gaps of one it is an :class:`HMM` with the transitions :math:`e^Q`.

    It is an ``HMM`` whose transitions change with the step, ``(*B, T-1, K, K)``, and has its
    queries. Exponentials are computed once for each distinct gap of the batch, unless sequences
    have rates of their own. A step that is not observed may stand at any time: the posterior there
    is that of the state between observations.

    Args:
        log_initial: ``(K,)``, log-probabilities of the state at the first step.
        rates: ``(K, K)``, the rate of transitions from row to column, in the unit of ``times``;
            the diagonal is minus the sum of the others. Zeros stay zero: a row of zeros is of a
            state that is never left.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        times: ``(*B, T)``, when each step is, increasing along a sequence; padding may be anything.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.
        exact_entry: ``(K,)`` booleans, True for states that are never left and whose entry is
            always seen at its very time, such as a death: at such a step the evidence has the
            density :math:`\sum_{r \ne j} (e^{Q \Delta})_{ir} q_{rj}` of entering j from i, per unit
            of time, in place of a probability. The observation must tell these states from
            others, and at a step that is not observed nothing was entered. Then ``log_transition``
            holds such densities, and there are no samples at given times.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) a rate is negative,
            rows of rates do not sum to zero, a state of ``exact_entry`` is left, or times do not
            increase.

    Example:
        >>> rates = torch.tensor([[-0.1, 0.1], [0.5, -0.5]])
        >>> coins = Categorical(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> times = torch.tensor([0.0, 0.5, 10.0])
        >>> hmm = ContinuousTimeHMM(torch.zeros(2).log_softmax(-1), rates, coins, torch.tensor(3),
        ...                         times)
        >>> hmm.log_transition.exp()
        tensor([[[0.9568, 0.0432],
                 [0.2160, 0.7840]],
        <BLANKLINE>
                [[0.8339, 0.1661],
                 [0.8305, 0.1695]]])
        >>> hmm.log_prob(torch.tensor([1, 1, 0])).exp()
        tensor(0.2079)
        >>> hmm.sojourn_times
        tensor([10.,  2.])
    """

    @checked()
    def __init__(
        self,
        log_initial: Tensor,
        rates: Tensor,
        emission: TorchDistribution,
        lengths: Tensor,
        times: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
        exact_entry: Tensor | None = None,
    ) -> None:
        check_integers("lengths", lengths)
        _check(log_initial, rates, times, int(lengths.max()) if lengths.numel() else 0)
        for name, mask, place in (("observed", observed, -1), ("allowed", allowed, -2)):
            if mask is not None and mask.shape[place:][:1] != times.shape[-1:]:
                raise ValueError(
                    f"{name} and times must have the same steps T; got {name} of shape "
                    f"{tuple(mask.shape)} and times of shape {tuple(times.shape)}."
                )
        check_broadcast({"times": times.shape[:-1], "lengths": lengths.shape})
        self.rates, self.times = rates, times.to(rates.device).double()
        exists = masks.exists(lengths.cpu().long(), times.size(-1), rates.device)
        self._gaps = _gaps(self.times, exists)
        if exact_entry is not None:
            check_booleans("exact_entry", exact_entry)
            check_shape("exact_entry", exact_entry, rates.shape[-1:], "(K,)")
            exact_entry = exact_entry.to(rates.device)
        self.exact_entry = exact_entry
        self._complete(
            {"log_initial": log_initial, "emission": emission, "lengths": lengths,
             "observed": observed, "validate_args": validate_args, "allowed": allowed,
             "emission_per_step": emission_per_step},
            _between_steps(rates, self._gaps, exact_entry, observed),
        )  # fmt: skip
        if self._validate_args:
            check_log_simplex("log_initial", log_initial)
            check_times(self.times, exists)
            _check_rates(rates, exact_entry)

    def _complete(self, arguments: dict[str, Any], matrices: Tensor) -> None:
        """Become the ``HMM`` whose transitions are ``matrices``, ``(*b, 1|T-1, K, K)``."""
        self._matrices = matrices
        steps = (*matrices.shape[:-3], self.times.size(-1) - 1, *matrices.shape[-2:])
        validate = arguments.pop("validate_args", False)
        super().__init__(
            log_transition=matrices.expand(steps), transition_per_step=True, validate_args=False,
            **arguments,
        )  # fmt: skip
        del self._validate_args  # rows sum to one: that was not to be read
        if validate is not None:
            self._validate_args = validate

    # The same model for other sequences, or with other parameters

    def replace(self, **changes: Any) -> ContinuousTimeHMM:
        """A copy with some arguments changed: see :meth:`HMM.replace`."""
        names = ("log_initial", "emission", "lengths", "observed", "emission_per_step", "allowed")
        arguments = {name: getattr(self, name) for name in names}
        own = {"rates": self.rates, "times": self.times, "exact_entry": self.exact_entry}
        matters = {*own, "lengths"} | ({"observed"} if self.exact_entry is not None else set())
        if matters & changes.keys():
            arguments |= own
            new = ContinuousTimeHMM(**(arguments | changes), validate_args=False)
        else:
            new = object.__new__(ContinuousTimeHMM)
            new.rates, new.times, new._gaps = self.rates, self.times, self._gaps
            new.exact_entry = self.exact_entry
            new._complete(arguments | changes, self._matrices)
        self._validated_alike(new)
        return new

    def with_lengths(
        self, lengths: Tensor, observed: Tensor | None = None, times: Tensor | None = None
    ) -> ContinuousTimeHMM:
        """The same parameters for other sequences: see :meth:`HMM.with_lengths`.

        Args:
            lengths: ``(*B)`` integers.
            observed: ``(*B, T)`` booleans; all by default.
            times: ``(*B, T)``; those of this distribution by default.
        """
        times = self.times if times is None else times
        return self.replace(lengths=lengths, observed=observed, times=times, allowed=None)

    def permute_states(self, order: Tensor) -> ContinuousTimeHMM:
        """The same with its states in another order: see :meth:`HMM.permute_states`."""
        chain: Any = HMM(
            self.log_initial, self.log_transition, self.emission, self.lengths, self.observed,
            validate_args=False, transition_per_step=True, allowed=self.allowed,
            emission_per_step=self.emission_per_step,
        ).permute_states(order)  # fmt: skip
        order = order.to(self.rates.device).long()
        return self.replace(
            log_initial=chain.log_initial,
            rates=self.rates[..., order, :][..., order],
            emission=chain.emission,
            allowed=chain.allowed,
            exact_entry=None if self.exact_entry is None else self.exact_entry[order],
        )

    # The chain between observations

    @property
    def sojourn_times(self) -> Tensor:
        """Mean time from entering each state to leaving it, ``(*B, K)``; inf if it never is."""
        return -1 / self.rates.diagonal(dim1=-2, dim2=-1).masked_fill(self._absorbing, -0.0)

    @property
    def next_state_probs(self) -> Tensor:
        """Probabilities ``(*B, K, K)`` of the next state; rows of states never left are zero."""
        leave = -self.rates.diagonal(dim1=-2, dim2=-1).masked_fill(self._absorbing, -1.0)
        return (self.rates / leave.unsqueeze(-1)).masked_fill(_diagonal(self.rates), 0.0)

    @property
    def _absorbing(self) -> Tensor:
        return self.rates.diagonal(dim1=-2, dim2=-1) == 0

    def transition_at(self, gaps: Tensor) -> Tensor:
        """Probabilities of the state after each of some lengths of time, ``(*B, *g, K, K)``.

        Args:
            gaps: ``(*g)``, not negative.

        Example:
            >>> even = torch.zeros(2).log_softmax(-1)
            >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(even, decay, Normal(torch.zeros(2), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.transition_at(torch.tensor(2.0))
            tensor([[0.1353, 0.8647],
                    [0.0000, 1.0000]])
        """
        check_real("gaps", gaps)
        if self._validate_args and not transforming():
            wrong = ~((gaps >= 0) & (gaps < torch.inf))
            if bool(wrong.any()):
                raise ValueError(
                    f"gaps must be finite and not negative; got {gaps[wrong][0].item():g}."
                )
        rates = self.rates.reshape(
            *self.rates.shape[:-2], *(1,) * gaps.dim(), *self.rates.shape[-2:]
        )
        return log_transitions(rates, gaps).exp()

    def stationary(self) -> Tensor:
        r"""Stationary distribution :math:`\pi Q = 0` of the states, ``(*B, K)``."""
        fastest = -self.rates.diagonal(dim1=-2, dim2=-1).amin(-1)[..., None, None]
        step = 0.5 / torch.where(fastest > 0, fastest, 1.0)  # so that each state may stay
        stays = torch.eye(self.num_states).to(self.rates)
        return stationary_ops.stationary(log(stays + step * self.rates))

    def check_constant(self, purpose: str, markov: bool = True) -> NoReturn:
        """Raise: steps do not lie at equal distances."""
        raise ValueError(
            f"{purpose} needs an hmm that does not change with the step; the steps of a "
            "ContinuousTimeHMM have times of their own. Call filtered or posterior, with times to "
            "come as steps that are not observed, or forecast(values, times)."
        )

    def check_probabilities(self, purpose: str) -> None:
        """Raise if transitions have densities in place of probabilities: see ``exact_entry``."""
        if self.exact_entry is not None:
            raise ValueError(
                f"{purpose} needs probabilities of the states at each step; this ContinuousTimeHMM "
                "has densities of entries at exact times. Take hmm.replace(exact_entry=None), of "
                "which an entry is seen at the next step."
            )

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``."""
        self.check_probabilities("a sample")
        return super().sample_prior_states(shape)

    # Parameters and data as the recursions read them

    def _log_transitions(self) -> Tensor:
        return self._matrices

    @property
    def counted_per_step(self) -> bool:
        """False: the rates are those of all steps."""
        return False

    def counted_transitions(self) -> Tensor:
        """What the counts of :meth:`expected_counts` multiply, ``(*b, 1, K, K)``.

        Logarithms of rates, and on the diagonal the rates of leaving with a minus sign.
        """
        diagonal = _diagonal(self.rates)
        logs = log(self.rates.masked_fill(diagonal, 1.0))
        return torch.where(diagonal, self.rates, logs).unsqueeze(-3)

    def counted_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, ...]:
        """As :meth:`HMM.counted_factors`; the second is :meth:`counted_transitions`."""
        initial, _, likelihood = self.log_factors(values, check)
        return initial, self.counted_transitions(), likelihood

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        r"""Expected counts given ``values``: the E-step.

        ``transitions``, as ``rates`` with one dimension more, ``(*b, 1, K, K)``, hold the expected
        number of transitions, those between observations too, and on the diagonal the expected
        time spent in each state: sufficient statistics of a chain in continuous time. They are the
        gradient of the log evidence by :math:`\log q_{ij}` and :math:`q_{ii}` (Fisher's identity).
        """
        counts = self.counts_of(self.log_factors(values, check=False)[2])
        self._check_evidence(counts.log_evidence, values)
        return counts

    def counts_of(self, likelihood: Tensor) -> ExpectedCounts:
        """The same given log-likelihoods ``(*B, T, K)``, those of the observations or others."""
        refuse_transforms("expected counts of a chain in continuous time")
        counts = recursions.expected_counts(
            self.log_initial, self._matrices, likelihood, self.lengths
        )
        with torch.inference_mode(False), torch.enable_grad():
            # tensors made in inference mode cannot be kept for a gradient
            gaps = Gaps(*(each.clone() if each.is_inference() else each for each in self._gaps))
            logs = self.counted_transitions().squeeze(-3).detach().clone().requires_grad_()
            rates = torch.where(_diagonal(logs), logs, logs.exp())
            seen = None if self.observed is None else self.observed.clone()
            matrices = _between_steps(rates, gaps, self.exact_entry, seen)
            (pulled,) = torch.autograd.grad(matrices, logs, counts.transitions)
        return counts._replace(transitions=pulled.unsqueeze(-3))

    def uniform(self) -> ContinuousTimeHMM:
        """The same where all that is possible is equally probable, at about a transition a gap."""
        initial = torch.zeros_like(self.log_initial)
        initial = initial.masked_fill(self.log_initial.isneginf(), -torch.inf).log_softmax(-1)
        gaps = self._gaps.distinct[self._gaps.place]
        possible = ((self.rates > 0) & ~_diagonal(self.rates)).to(self.rates)
        leave = possible.sum(-1, keepdim=True).clamp(min=1.0)
        rates = possible / (leave * (gaps.mean().to(self.rates) if gaps.numel() else 1.0))
        return self.replace(log_initial=initial, rates=rates - rates.sum(-1).diag_embed())

    # Queries given values (*B, T, *E)

    def forecast(self, values: Tensor, times: Tensor) -> Forecast:  # type: ignore[override]
        r"""Predictive distributions :math:`p(x_\tau \mid x_{1:T})` at times to come.

        Args:
            values: ``(*B, T, *E)``, observations.
            times: ``(*B, H)``, none before the last step of its sequence.

        Returns:
            A distribution of batch shape ``(*B, H)``; its ``states`` ``(*B, H, K)`` are the
            probabilities of the states at these times.

        Raises:
            ValueError: If a time lies before the last step, parameters change with the step, or the
                emission depends on earlier observations; or (with ``validate_args``) a sequence
                has probability zero.

        Example:
            >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(torch.tensor([1.0, 0.0]).log(), decay,
            ...                         Normal(torch.tensor([0.0, 1.0]), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.forecast(torch.zeros(1), torch.tensor([0.5, 2.0])).mean
            tensor([0.3935, 0.8647])
        """
        check_real("times", times)
        check_broadcast({"times": times.shape[:-1], "HMM": self.batch_shape})
        if self.emission_per_step or isinstance(self.emission, Autoregressive):
            self.check_constant("forecast of this emission")
        now = self._last_filtered(values)
        last = (self.lengths - 1).to(self.times.device).unsqueeze(-1)
        shape = check_broadcast({"times": self.times.shape[:-1], "lengths": self.lengths.shape})
        ends = self.times.expand(*shape, self.num_steps).gather(-1, last.expand(*shape, 1))
        gaps = times.to(ends) - ends
        wrong = ~((gaps >= 0) & (gaps < torch.inf))
        if self._validate_args and not transforming() and bool(wrong.any()):
            raise ValueError(
                "times must be finite, and not lie before the last step of a sequence; got "
                f"{-gaps[wrong][0].item():g} before it. Of the states between observations ask the "
                "posterior, with steps that are not observed."
            )
        matrices = _over_gaps(self.rates, Gaps(*gaps.unique(return_inverse=True))).exp()
        states = (now[..., None, None, :] @ matrices.to(now.dtype)).squeeze(-2)
        return Forecast(states, self.emission)


def _diagonal(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.size(-1), dtype=torch.bool, device=matrix.device)


def _gaps(times: Tensor, exists: Tensor) -> Gaps:
    """The gaps before the steps that exist; those in the padding are taken from others."""
    lasts = times.diff(dim=-1)
    real = exists[..., 1:]
    if times.dim() == 1:
        real = real.reshape(real.shape[:-1].numel(), real.size(-1)).any(0)
    longest = torch.where(real, lasts, 0.0).amax() if lasts.numel() else lasts.new_zeros(())
    distinct, place = torch.where(real, lasts, longest).unique(return_inverse=True)
    if len(distinct) == 1:
        place = place.new_zeros(1)
    return Gaps(distinct, place)


def _over_gaps(rates: Tensor, gaps: Gaps) -> Tensor:
    """Log-probabilities of transitions ``(*b, *p, K, K)``, with ``(*p)`` the shape of places."""
    inner = gaps.place.dim() - 1
    lead, matrix = rates.shape[:-2], rates.shape[-2:]
    outer = max(len(lead) - inner, 0)
    if any(size > 1 for size in lead[outer:]):  # sequences with rates of their own
        return log_transitions(rates.unsqueeze(-3), gaps.distinct[gaps.place])
    shared = rates.reshape(*lead[:outer], 1, *matrix)
    each = log_transitions(shared, gaps.distinct)
    first = torch.arange(lead[:outer].numel(), device=rates.device) * len(gaps.distinct)
    rows = gaps.place + first.reshape(*lead[:outer], *(1,) * gaps.place.dim())
    return take_rows(each.flatten(-2).flatten(0, -2), rows).unflatten(-1, matrix)


def _between_steps(
    rates: Tensor, gaps: Gaps, exact_entry: Tensor | None, observed: Tensor | None
) -> Tensor:
    """As :func:`_over_gaps`, with densities of entering the states of ``exact_entry``."""
    matrices = _over_gaps(rates, gaps)
    if exact_entry is None:
        return matrices
    others = rates.masked_fill(_diagonal(rates), 0.0).double().unsqueeze(-3)
    enter = log(matrices.double().exp() @ others).to(matrices)
    if observed is not None:
        enter = enter.masked_fill(~observed[..., 1:, None, None], -torch.inf)
    return torch.where(exact_entry & ~_diagonal(rates), enter, matrices)


def _check(log_initial: Tensor, rates: Tensor, times: Tensor, longest: int) -> None:
    """Raise unless rates and times are of the right types and shapes."""
    check_floats("log_initial", log_initial)
    check_floats("rates", rates)
    size = log_initial.size(-1) if log_initial.dim() else 1
    check_trailing("rates", rates, (size, size), "(K, K)", "K is that of log_initial.")
    check_same_device({"log_initial": log_initial, "rates": rates})
    check_tensor("times", times)
    check_real("times", times)
    if times.dim() == 0 or times.size(-1) < max(longest, 1):
        raise ValueError(
            f"times must have shape (*B, T) with T at least {max(longest, 1)}, the largest of "
            f"lengths; got {tuple(times.shape)}."
        )


def _check_rates(rates: Tensor, exact_entry: Tensor | None) -> None:
    """Raise unless rates are those of a chain in continuous time."""
    if transforming():
        return
    others = rates.detach().masked_fill(_diagonal(rates), 0.0)
    leave = others.sum(-1)
    wrong = (rates.detach().sum(-1).abs() > 1e-4 * leave).any()
    if bool(wrong) or not bool((others >= 0).all()) or not bool(leave.isfinite().all()):
        raise ValueError(
            "rates must be finite, not negative off the diagonal, and sum to zero in each row. "
            "From a matrix of rates with anything on the diagonal: rates = rates.fill_diagonal_(0);"
            " rates = rates - rates.sum(-1).diag_embed()."
        )
    if exact_entry is not None and bool(leave[..., exact_entry].any()):
        raise ValueError(
            "rates must be zero in the rows of the states of exact_entry, which are never left. "
            "Leave other states out of exact_entry."
        )
