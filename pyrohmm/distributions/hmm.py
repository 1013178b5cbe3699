"""``HMM``: the distribution over whole sequences whose states are summed out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import (
    broadcast_shapes,
    check_broadcast,
    check_integers,
    check_range,
    check_size,
    check_trailing,
    names_checked,
    sample_size,
)
from .._precision import full_precision
from .._sync import with_one_wait
from .._transforms import beside, opaque, transforming
from ..chains.base import Chain, ExpectedCounts
from ..chains.markov import MarkovChain
from ..ops import recursions
from .autoregressive import Autoregressive
from .base import ChainDistribution, SequenceOptions, check_likelihood, check_possible
from .crf import LinearChainCRF
from .forecast import AutoregressiveForecast, Forecast, sample_emission, sample_emission_per_step
from .observation import Tied, permuted
from .values import allowed_states

_PARTS = "emission", "lengths", "observed", "emission_per_step", "allowed", "num_steps"


class HMM(ChainDistribution):
    r"""Hidden Markov model: sequences emitted by a Markov chain of hidden states.

    .. math:: p(x_{1:T}) = \sum_{z_{1:T}} p(z_1) \, p(x_1 | z_1)
              \prod_{t=2}^T p(z_t | z_{t-1}) \, p(x_t | z_t)

    The chain emits at its first state, as in Rabiner (1989). This differs from
    :class:`pyro.distributions.DiscreteHMM`, which makes a transition before it emits.

    A sequence is one event: ``event_shape`` is ``(T, *E)``, with ``E`` the event shape of
    ``emission``, and ``batch_shape`` is what the batch dimensions ``*B`` of all arguments
    broadcast to. Sequences shorter than T are padded on the right with anything.

    The parameters may have batch dimensions (particles, restarts, posterior samples), to the left
    of the dimensions below; ``(R, 1, K, K)`` with lengths ``(N,)`` are R matrices for N sequences.
    Minus infinity in the logs is legal: a transition or a symbol of probability zero.

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_transition: ``(K, K)``, log-probabilities of the next state; row = from, column = to.
            With ``transition_per_step``, ``(T-1, K, K)``: one matrix for each transition.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence, or one integer; None for
            all steps, where another argument says what T is. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed. A step that is not adds
            nothing, whatever ``values`` hold there. Single components of a vector are missing where
            ``values`` are NaN: see :func:`pyrohmm.distributions.marginal_log_prob`.
        validate_args: Whether to read values in order to check them; shapes are always checked.
            Pyro's setting by default.
        transition_per_step: Whether ``log_transition`` has a dimension of steps.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be; see
            :meth:`restrict`, which takes labels.
        num_steps: T, where it shall not be the longest length: shapes that do not change with the
            minibatch.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) a row of
            log-probabilities does not sum to one.

    Example:
        >>> from pyro.distributions import Categorical
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.full((2,), 0.5).log(), sticky.log(), coins, torch.tensor([3, 1]))
        >>> hmm.batch_shape, hmm.event_shape
        (torch.Size([2]), torch.Size([3]))
        >>> hmm.log_prob(torch.tensor([[1, 1, 1], [1, 0, 0]])).exp()
        tensor([0.4057, 0.7000])
    """

    def __init__(
        self,
        log_initial: Tensor,
        log_transition: Tensor,
        emission: TorchDistribution,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        transition_per_step: bool = False,
        **data: Unpack[SequenceOptions],
    ) -> None:
        chain = MarkovChain(log_initial, log_transition, transition_per_step)
        self._compose(chain, emission, lengths, observed, validate_args, **data)

    @classmethod
    @names_checked
    def of(
        cls,
        chain: Chain,
        emission: TorchDistribution,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        **data: Unpack[SequenceOptions],
    ) -> HMM:
        """The HMM of any :class:`~pyrohmm.chains.Chain`, such as one of your own.

        Args:
            chain: The distribution of the states.
            emission: As of :class:`HMM`.
            lengths: As of :class:`HMM`.
            observed: As of :class:`HMM`.
            validate_args: As of :class:`HMM`.
            **data: Other arguments of :class:`HMM`.

        Example:
            >>> from pyro.distributions import Categorical
            >>> from pyrohmm.chains import MarkovChain
            >>> even = torch.full((2, 2), 0.5).log()
            >>> chain = MarkovChain(even[0], even)
            >>> HMM.of(chain, Categorical(logits=even), torch.tensor(3))
            HMM(2 states; Categorical of event shape (); batch shape (), up to 3 steps)
        """
        hmm = object.__new__(cls)
        hmm._compose(chain, emission, lengths, observed, validate_args, **data)
        return hmm

    def __repr__(self) -> str:
        emission = self._emission  # not that of all states, which may be large and not be made yet
        return (
            f"{type(self).__name__}({self.num_states} states; {type(emission).__name__} of "
            f"event shape {tuple(emission.event_shape)}; batch shape "
            f"{tuple(self.batch_shape)}, up to {self.event_shape[0]} steps)"
        )

    # The same model for other sequences, or with other parameters

    def replace(self, **changes: Any) -> HMM:
        """A copy with some arguments changed.

        The new ones are checked as those of a new HMM, but for whether probabilities sum to one.
        """
        data = {name: changes.pop(name) for name in _PARTS if name in changes}
        if "transition_per_step" in changes:
            changes["per_step"] = changes.pop("transition_per_step")
        changes |= {name: part for name, part in data.items() if name in self.chain.options}
        chain = self.chain.replace(**changes) if changes else self.chain
        return self._copied(chain=chain, **data)

    def with_chain(self, chain: Chain) -> HMM:
        """Copy with another chain of the same states."""
        return self._copied(chain=chain)

    def _copied(self, kind: Any = None, **parts: Any) -> Any:
        """Copy, of a ``kind``, with some parts replaced, and the same ``validate_args``."""
        own = {"chain": self.chain, "emission": self._emission}
        own |= {name: getattr(self, name) for name in _PARTS[1:-1]}
        own |= {"num_steps": None if "lengths" in parts else self._num_steps} | parts
        kind = HMM if type(own["chain"]) is MarkovChain else kind or type(self)
        return self._validated_alike(kind.of(**own, validate_args=False))

    def _validated_alike(self, other: HMM) -> HMM:
        """Set ``validate_args`` of ``other`` to that of this HMM, and return it."""
        other._validate_args = self._validate_args
        return other

    def expanded(self) -> HMM:
        """Equivalent HMM whose expanded states form a first-order Markov chain: see its chain."""
        chain, index, allowed = self.chain.expanded(self.lengths, self.num_steps)
        emission, own = self.emission, self.allowed
        if len(index) != self.num_states:
            autoregressive = isinstance(emission, Autoregressive)
            emission = emission.permuted(index) if autoregressive else Tied(emission, index)
        if own is not None:
            own = own[..., index]
            allowed = own if allowed is None else allowed & own
        return self._copied(chain=chain, emission=emission, allowed=allowed)

    def with_lengths(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Copy with the same parameters for other sequences, such as new data.

        Args:
            lengths: ``(*B)`` integers.
            observed: ``(*B, T)`` booleans; all by default.

        Raises:
            ValueError: If parameters have a dimension of steps that does not fit.
        """
        return self.replace(lengths=lengths, observed=observed, allowed=None)

    def expand(self, batch_shape: Sequence[int], _instance: HMM | None = None) -> HMM:
        """Expand to a larger batch; parameters are not copied."""
        shape = torch.Size(batch_shape)
        if shape == self.batch_shape:
            return self
        if check_broadcast({"HMM": self.batch_shape, "batch_shape": shape}) != shape:
            raise ValueError(
                f"batch_shape must be one that {tuple(self.batch_shape)} expands to; got "
                f"{tuple(shape)}. It may add dimensions on the left, or repeat those of size 1."
            )
        observed, allowed = self.observed, self.allowed
        steps = {} if self._num_steps is None else {"num_steps": self._num_steps}
        return self.replace(
            **steps,
            lengths=self.lengths.expand(shape),
            observed=None if observed is None else observed.expand(*shape, observed.size(-1)),
            allowed=None if allowed is None else allowed.expand(*shape, *allowed.shape[-2:]),
        )

    def restrict(self, labels: Tensor) -> HMM:
        r"""Restrict the states of some steps to one or a few, as labels say.

        Its ``log_prob`` is that of the values *and* the labels,
        :math:`\log p(x, z_t \in L_t \text{ for all } t)`; its posterior, best path and samples
        keep to the labels. A missing step may have a label, and the padding's is not read.

        Args:
            labels: ``(*B, T)`` integers, the state of each step, -1 where it is not known; or
                ``(*B, T, K)`` booleans, True for the states that may be.

        Raises:
            TypeError: If labels are neither integers nor booleans.
            ValueError: If a label is not below K, or a step has none that is allowed. With
                ``validate_args``, what reads values raises if no path keeps to the labels, and
                names the first sequence and step where that is so.

        Example:
            >>> from pyro.distributions import Categorical
            >>> even = torch.full((2, 2), 0.5).log()
            >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor(3))
            >>> hmm.restrict(torch.tensor([1, -1, 0])).log_prob(torch.zeros(3).long()).exp()
            tensor(0.0312)
        """
        allowed = allowed_states(labels, self.exists, self.num_states)
        return self.replace(allowed=allowed if self.allowed is None else allowed & self.allowed)

    def permute_states(self, order: Tensor) -> HMM:
        """Reorder the states: state k was ``order[k]``.

        Args:
            order: ``(K,)`` integers, each state once. ``metrics.align(found, truth).argsort()``
                gives the states found the numbers of the true ones.

        Raises:
            ValueError: If ``order`` is not a permutation.
        """
        check_integers("order", order)
        order = order.to(self.log_initial.device).long()
        if not torch.equal(order.sort().values, torch.arange(self.num_states).to(order)):
            raise ValueError(
                f"order must hold each state from 0 to K - 1 = {self.num_states - 1} once; got "
                f"{order.tolist()}. Give a permutation, such as scores.argsort()."
            )
        return self._copied(
            chain=self.chain.permuted(order),
            emission=permuted(self.emission, order),
            allowed=None if self.allowed is None else self.allowed[..., order],
        )

    # Queries given values (*B, T, *E)

    @opaque
    def log_prob(self, values: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats; states are summed out exactly.

        A sequence of probability zero has -inf, and gradient zero. Values may be ``Sequences``, or
        an array, too.
        """
        with full_precision(self.log_initial):
            evidence = with_one_wait(partial(self._log_evidence, values), self.log_initial.device)
        self._check_evidence(evidence, values)
        return evidence

    def _log_evidence(self, values: Tensor) -> Tensor:
        """Log evidence by the chain; of symbols, straight from their table by the recursion.

        Of numbers log-likelihoods of each step and state are made first; of symbols none are, as
        the recursion reads the table.
        """
        if (of_symbols := self.symbol_factors(values)) is not None:
            return recursions.log_evidence(*of_symbols)
        return self.chain.log_evidence(self._read(values), self.lengths)

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        r"""Log joint density :math:`\log p(x_{1:T}, z_{1:T})` of values and a path; ``(*B)``."""
        likelihood = self.log_likelihood(values)
        check_integers("states", states)
        check_trailing("states", states, (self.num_steps,), "(T,)")
        states = states.long().masked_fill(~self.exists, 0)
        if self._validate_args:
            check_range("states", states, self.num_states, "K - 1")
        return self.chain.log_joint(likelihood, self.lengths, states)

    @opaque
    def posterior(self, values: Tensor) -> Any:
        r"""Smoothed posterior: :math:`p(z_t \mid x_{1:T})`, ``(*B, T, K)``, zero at padded steps.

        Also the log evidence ``(*B)``, and the expected number of transitions ``(*B, K, K)``,
        :math:`\sum_t p(z_t, z_{t+1} \mid x_{1:T})`; of other chains than Markov ones see
        :class:`FactorialPosterior` and :class:`SecondOrderPosterior`.
        """
        found = self.chain.posterior(self._read(values, check=True), self.lengths)
        self._check_evidence(found.log_evidence, values)
        self._check_possible(found.log_evidence)
        return found

    @opaque
    def expected_counts(self, values: Tensor, by_symbol: bool = False) -> ExpectedCounts:
        """Expected counts given ``values``, by parameter of the chain: the E-step.

        ``by_symbol``, where :meth:`symbol_factors` has a table of symbols, ``state_probs`` are
        ``(*, V, K)``: expected numbers of steps.
        """
        counts = with_one_wait(partial(self._counts, values, by_symbol), self.log_initial.device)
        self._check_evidence(counts.log_evidence, values)
        return counts

    def _counts(self, values: Tensor, by_symbol: bool) -> ExpectedCounts:
        factors = self.symbol_factors(values) if by_symbol else None
        if factors is None:
            return self.chain.expected_counts(self._read(values), self.lengths)
        initial, transition, table, lengths, symbols, known = factors
        if initial.dim() + transition.dim() > 4:  # parameters, and so counts, of batches
            parts = initial.shape[:-1], transition.shape[:-3], table.shape[:-2]
            table = table.expand(*broadcast_shapes(*parts), *table.shape[-2:])
        found = recursions.expected_counts(initial, transition, table, lengths, symbols, known)
        return found.of_one_matrix()

    @opaque
    def filtered(self, values: Tensor) -> Tensor:
        r"""Filtered probabilities :math:`p(z_t \mid x_{1:t})`, ``(*B, T, K)``; 0 where padded."""
        states = self.chain.filtered(self._read(values, check=True), self.lengths).exp()
        self._check_possible(states.sum(-1).masked_fill(~self.exists, 1.0).amin(-1).log())
        return states

    @opaque
    def viterbi(self, values: Tensor) -> Tensor:
        r"""Best path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, ``(*B, T)``; 0 where padded."""
        likelihood = self._read(values, check=True)
        self.chain.refuse_nan(likelihood)
        states = self.chain.viterbi(likelihood, self.lengths)
        self._check_possible(likelihood, states)
        return states

    @opaque
    def sample_states(self, values: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T} \mid x_{1:T})`, ``(*S, *B, T)``; 0 where padded."""
        shape = sample_size(sample_shape)
        likelihood = self._read(values, check=True)
        self.chain.refuse_nan(likelihood)
        states = self.chain.sample_states(likelihood, self.lengths, shape.numel())
        self._check_possible(likelihood, *states[:1])
        return states.reshape(shape + states.shape[1:])

    def posterior_states(self, values: Tensor) -> LinearChainCRF:
        r"""Posterior :math:`p(z_{1:T} \mid x_{1:T})` as a distribution, of batch shape ``(*B)``.

        Its scores are log-probabilities of the chain and log-likelihoods, so that
        ``log_partition()`` is the log evidence. Its ``log_prob`` of a path is differentiable by
        parameters and values; ``sample``, ``viterbi``, ``marginals`` and ``path_entropy`` are those
        of the states.

        Args:
            values: ``(*B, T, *E)``, observations.

        Raises:
            ValueError: If the chain is not a Markov one: ask ``hmm.expanded()``; or (with
                ``validate_args``) a sequence has probability zero.

        Example:
            >>> from pyro.distributions import Categorical
            >>> even = torch.full((2, 2), 0.5).log()
            >>> coins = Categorical(torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
            >>> states = HMM(even[0], even, coins, 2).posterior_states(torch.tensor([1, 0]))
            >>> states.log_prob(torch.tensor([1, 0])).exp()  # 0.9 / 1.4 * 0.5 / 0.6
            tensor(0.5357)
        """
        self.chain.check_markov("posterior_states")
        initial, _, likelihood = self.log_factors(values)
        found = LinearChainCRF(
            likelihood, self.log_transition, initial, self.lengths, self._validate_args,
            transition_per_step=self.transition_per_step,
        )  # fmt: skip
        if self._validate_args:
            self._check_possible(found.log_partition())
        return found

    def forecast(self, values: Tensor, num_steps: int) -> Forecast:
        r"""Predictive distributions :math:`p(x_{T+h} \mid x_{1:T})` of the next H observations.

        Args:
            values: ``(*B, T, *E)``, observations.
            num_steps: H.

        Returns:
            A distribution of batch shape ``(*B, H)``; see :class:`Forecast`, and
            :class:`AutoregressiveForecast` of an emission that depends on earlier observations.

        Raises:
            ValueError: If ``num_steps`` is less than one, or the model changes with the step,
                so that what follows is not known; or (with ``validate_args``) a sequence has
                probability zero.
        """
        check_size("num_steps", num_steps)
        self.check_constant("forecast", markov=False)
        autoregressive = isinstance(self.emission, Autoregressive)
        if autoregressive:
            self.chain.check_markov("forecast of observations that depend on those before")
        states = self.state_probs_ahead(values, num_steps)[..., 1:, :]
        hmm: Any = beside(states, self)
        if not autoregressive:
            return Forecast(states, hmm.emission)
        emission = hmm.emission.after(*self.prepare_values(values), self.lengths)
        return AutoregressiveForecast(states, emission, hmm.log_transition)

    def state_probs_ahead(self, values: Tensor, num_steps: int) -> Tensor:
        r"""Probabilities :math:`p(z_{T+h} \mid x_{1:T})` for h = 0, ..., H, ``(*B, H + 1, K)``.

        Args:
            values: ``(*B, T, *E)``, observations.
            num_steps: H.

        Raises:
            ValueError: If transitions change with the step and H is not 0, or (with
                ``validate_args``) a sequence has probability zero.
        """
        if num_steps:
            self.chain.check_constant("state_probs_ahead")
        seen, further = self._read(values, check=True), 0
        if num_steps and not self.chain.is_markov:  # it filters on, over steps not observed
            further = num_steps
            seen = seen.masked_fill(~self.exists.unsqueeze(-1), 0.0)
            seen = torch.nn.functional.pad(seen, (0, 0, 0, further))
        states = self.chain.filtered(seen, self.lengths + further).exp()
        batch = states.shape[:-2]
        places = self.lengths.expand(batch).unsqueeze(-1) - 1 + torch.arange(further + 1)
        places = places.to(states.device).unsqueeze(-1)
        states = states.gather(-2, places.expand(*places.shape[:-1], self.num_states))
        self._check_possible(states.sum(-1).amin(-1).log())
        if further < num_steps:
            matrix = beside(states, self).log_transition.exp()
            for _ in range(num_steps):
                states = torch.cat([states, states[..., -1:, :] @ matrix], -2)
        return states

    def stationary(self) -> Tensor:
        r"""Stationary distribution of the states, ``(*B, K)``: share of the time in each."""
        return self.chain.stationary()

    # Sampling

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample sequences ``(*S, *B, T, *E)``; padded steps hold arbitrary values."""
        return self.sample_with_states(sample_shape)[0]

    def sample_with_states(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Sample sequences ``(*S, *B, T, *E)`` and the states ``(*S, *B, T)`` that emitted them."""
        shape = sample_size(sample_shape) + self.batch_shape
        with torch.no_grad():
            states = self.sample_prior_states(shape)
            return self.sample_observations(states), states

    def sample_observations(self, states: Tensor) -> Tensor:
        """Sample an observation ``(*S, *B, T, *E)`` from each of ``states`` ``(*S, *B, T)``."""
        if not isinstance(self._emission, torch.distributions.Distribution):
            with torch.no_grad():
                return self._emission.sample(states)
        sample = sample_emission_per_step if self.emission_per_step else sample_emission
        return sample(self._emission, states)

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``."""
        self.chain.check_samples("a sample")
        self.chain.refuse_nan()
        if self.allowed is None and self.chain.samples_alone:
            return self.chain.sample_prior(shape, self.num_steps)
        logs = self.log_initial.new_zeros(self.num_steps, self.num_states)
        if self.allowed is not None:
            logs = logs.expand(self.allowed.shape).masked_fill(~self.allowed, -torch.inf)
        logs = logs.expand(*self.batch_shape, *logs.shape[-2:])
        impossible = self.chain.log_evidence(logs, self.lengths).isneginf()
        if bool(impossible.any()):
            raise ValueError(
                f"the chain of this {type(self).__name__} and its labels must leave a path of "
                "positive probability, for samples to keep to; none does in sequence "
                f"{impossible.nonzero()[0].tolist()}."
            )
        count = shape[: len(shape) - len(self.batch_shape)].numel()
        return self.chain.sample_states(logs, self.lengths, count).reshape(*shape, self.num_steps)

    def _check_possible(self, evidence: Any, states: Tensor | None = None) -> None:
        """Raise if a log evidence, or the log joint density of a path, is -inf."""
        if self._validate_args and not transforming():
            with torch.no_grad():
                if states is not None:
                    evidence = self.chain.log_joint(evidence, self.lengths, states)
                check_possible(evidence)

    def _check_evidence(self, evidence: Tensor, values: Tensor) -> None:
        if self._validate_args and not transforming():
            check_likelihood(evidence)  # NaN anywhere shows here, and this is a smaller tensor
            if self.allowed is not None and bool(evidence.isneginf().any()):
                self.check_labels(values)
