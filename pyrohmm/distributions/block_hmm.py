"""``BlockHMM``: an HMM of symbols whose states emit only the symbols of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    check_booleans,
    check_floats,
    check_integers,
    check_no_nan,
    check_same_device,
    check_shape,
)
from .._precision import full_precision
from ..chains.base import ExpectedCounts
from ..ops import masks, recursions
from ..ops.blocks import paths, queries
from ..ops.blocks import recursions as block_recursions
from ..ops.blocks.inner_products import InnerProductTransition as InnerProductTransition
from ..ops.blocks.states import Blocks
from ..ops.recursions import Posterior
from ..ops.sampling import sample_path
from .block_factors import BlockFactors, at_steps, log_chain
from .block_symbols import BlockSymbols
from .carried_state import CarriedState
from .hmm import HMM


class BlockPosterior(NamedTuple):
    r"""Smoothed posterior of the states, each step within the block of its symbol.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        probs: ``(*B, T, w)``, :math:`p(z_t \mid x_{1:T})` of the states of the block; zero at
            padded steps.
        states: ``(*B, T, w)`` integers, which states these are; -1 where the block has fewer than
            w, and at padded steps.
    """

    log_evidence: Tensor
    probs: Tensor
    states: Tensor


class FinalState(NamedTuple):
    r"""Distribution :math:`p(z_T \mid x_{1:T})` of the last state of each sequence.

    Attributes:
        states: ``(N, w)`` integers, the states of the block of its last symbol; -1 beyond them.
        log_probs: ``(N, w)``.
    """

    states: Tensor
    log_probs: Tensor


class BlockHMM(BlockFactors):
    """An HMM of symbols whose states emit only the symbols of their blocks.

    It is the same distribution as an :class:`HMM` with zeros elsewhere, and answers the same
    queries. ``log_prob`` and its gradient, ``posterior``, ``viterbi``, ``sample_states``,
    ``filtered`` and ``block_posterior``, a :class:`Filter`, and of :mod:`pyrohmm.queries` those of
    prediction, continuation, best paths and entropy visit only states that can emit a symbol.
    Where steps are missing they visit all states there, without a K x K matrix, and so do
    ``impute``, and ``pseudo_residuals`` at each step. With labels and for everything else,
    :meth:`dense` answers, at the cost of K x K matrices; for ``log_prob`` also where blocks overlap
    and are large. Parameters have no batch dimensions.

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        transition: :class:`InnerProductTransition`, or ``(K, K)`` log-probabilities.
        log_emission: ``(V, w)``, log-probability of each symbol in each state of its block, in the
            order of the block; what is beyond the block is not read. Or a :class:`BlockSymbols`.
        blocks: Which states may emit which symbol.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        carried: The state before the first step, where sequences continue from others; for
            lengths ``(N,)`` and an :class:`InnerProductTransition`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) probabilities do not
            sum to one.

    Example:
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> half = torch.full((4, 2), 0.5).log()
        >>> even = torch.full((4, 4), 0.25).log()
        >>> emission = torch.tensor([[0.9, 0.2], [0.1, 0.8], [1.0, 1.0]]).log()
        >>> hmm = BlockHMM(even[0], even, emission, two, torch.tensor(3))
        >>> hmm.log_prob(torch.tensor([0, 2, 1])).exp()  # 1/8 of 0.55 times 0.45
        tensor(0.0309)
        >>> hmm.dense().log_prob(torch.tensor([0, 2, 1])).exp()
        tensor(0.0309)
    """

    _of_transition = "transition"

    def __init__(
        self,
        log_initial: Tensor,
        transition: InnerProductTransition | Tensor,
        log_emission: Tensor | BlockSymbols,
        blocks: Blocks,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        carried: CarriedState | None = None,
    ) -> None:
        check_floats("log_initial", log_initial)
        size = blocks.num_states
        check_shape("log_initial", log_initial, (size,), "(K,)")
        if isinstance(log_emission, BlockSymbols):
            symbols = log_emission
        else:
            symbols = BlockSymbols(log_emission, blocks)
        if isinstance(transition, Tensor):
            check_floats("transition", transition)
            check_shape("transition", transition, (size, size), "(K, K)")
        elif not isinstance(transition, InnerProductTransition):
            raise TypeError(
                "transition must be InnerProductTransition or a matrix of log-probabilities; got "
                f"{type(transition).__name__}."
            )
        elif not (blocks.disjoint and torch.equal(transition.blocks.sizes, blocks.sizes)):
            raise ValueError(
                f"the blocks of transition must be those of the HMM, {blocks!r}; got "
                f"{transition.blocks!r}."
            )
        check_integers("lengths", lengths)
        if observed is not None:
            check_booleans("observed", observed)
            if observed.dim() == 0 or observed.shape[:-1] != lengths.shape:
                raise ValueError(
                    f"observed must have shape (*B, T) with the shape {tuple(lengths.shape)} of "
                    f"lengths as *B; got shape {tuple(observed.shape)}."
                )
        leave = transition if isinstance(transition, Tensor) else transition.leave
        check_same_device(
            {"log_initial": log_initial, "log_emission": symbols.log_probs, "transition": leave}
        )
        super().__init__(log_initial, transition, symbols, lengths, observed, validate_args)
        self.transition, self.symbols, self.blocks = transition, symbols, blocks
        self.carried = carried
        if self._validate_args:
            symbols.check_sums()

    @property
    def log_emission(self) -> Tensor:
        """``(V, w)``, log-probability of each symbol in each state of its block."""
        return self.symbols.log_probs

    def dense(self) -> HMM:
        """HMM of equal distribution whose parameters are dense, without blocks."""
        initial = self.log_initial
        if self.carried is not None:
            initial = self.carried.log_initial(initial, self._inner_products)
        return self._validated_alike(
            HMM(
                initial, self.log_transition, self.emission, self.lengths, self.observed,
                validate_args=False,
            )
        )  # fmt: skip

    def replace(self, **changes: Any) -> HMM:
        """A copy with some arguments changed; dense where blocks cannot say it."""
        other = set(changes) - {"lengths", "observed", "allowed"}
        if other or changes.get("allowed") is not None:
            return self.dense().replace(**changes)
        lengths = changes.get("lengths", self.lengths)
        observed = changes.get("observed", self.observed)
        if self.carried is not None and not (  # it belongs to these sequences
            observed is None and torch.equal(lengths, self.lengths)
        ):
            return self.dense().replace(**changes)
        return self._validated_alike(self._for_sequences(lengths, observed, self.carried))

    def continue_from(self, carried: CarriedState) -> BlockHMM:
        """Copy for sequences that continue from others."""
        new = self._for_sequences(self.lengths, self.observed, carried)
        self._validated_alike(new)
        return new

    def _for_sequences(
        self, lengths: Tensor, observed: Tensor | None, carried: CarriedState | None
    ) -> BlockHMM:
        """The same parameters in blocks; a subclass that has more of them overrides this."""
        return BlockHMM(
            self.log_initial, self.transition, self.symbols, self.blocks, lengths, observed,
            validate_args=False, carried=carried,
        )  # fmt: skip

    # Queries given values (*B, T, *E)

    def log_prob(self, values: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats; exact."""
        if self.observed is not None and (self.carried is not None or self._is_crowded):
            return self.dense().log_prob(values)
        factors = self._factors(values)
        with full_precision(self.log_initial):
            if self.observed is None and self._is_crowded:
                evidence = recursions.log_evidence(*self._dense_chain(factors))
            else:
                chain: Any = *self._block_chain(factors, trim=True), self.log_initial
                evidence = block_recursions.log_evidence(*chain)
        if self._validate_args:
            cure = "Look for NaN in the parameters."
            check_no_nan("the log-likelihood of values", evidence, cure)
        return evidence.reshape(factors.batch)

    def block_posterior(self, values: Tensor) -> BlockPosterior:
        r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})` within the block of each symbol.

        Raises:
            ValueError: If steps are missing, where the state may be in any block.
        """
        self._check_observed("block_posterior", " Call posterior.")
        with torch.no_grad(), full_precision(self.log_initial):
            factors = self._factors(values)
            chain: list[Any] = [
                part.detach() if isinstance(part, Tensor) else part
                for part in self._block_chain(factors)
            ]
        with torch.inference_mode(False), torch.enable_grad(), full_precision(chain[-1]):
            chain = [
                part.clone() if isinstance(part, Tensor) and part.is_inference() else part
                for part in chain
            ]
            chain[-1].requires_grad_()
            evidence = block_recursions.log_evidence(*chain)
            (probs,) = torch.autograd.grad(evidence.sum(), chain[-1])
        if self.carried is not None:  # the step before the first is none of these
            steps = self.carried.continues.long().unsqueeze(-1) + torch.arange(self.num_steps)
            steps = steps.to(probs.device).unsqueeze(-1).expand(-1, -1, self.blocks.width)
            probs = probs.gather(1, steps)
        exists = masks.exists(factors.lengths, self.num_steps)
        states = self.blocks.states[factors.blocks].masked_fill(~exists.unsqueeze(-1), -1)
        shape = (*factors.batch, self.num_steps, self.blocks.width)
        return BlockPosterior(
            evidence.detach().reshape(factors.batch),
            probs.reshape(shape),
            states.to(probs.device).reshape(shape),
        )

    def final_state(self, values: Tensor) -> FinalState:
        r"""Distribution :math:`p(z_T \mid x_{1:T})` of the last state, values ``(N, T)``."""
        self._check_observed("final_state")
        with torch.no_grad(), full_precision(self.log_initial):
            factors = self._factors(values)
            log_probs = block_recursions.final_state_log_probs(*self._block_chain(factors))
        last = factors.blocks.gather(1, factors.lengths.unsqueeze(-1) - 1).squeeze(-1)
        states = self.blocks.states[last].to(log_probs.device)
        return FinalState(states, log_probs[:, : self.blocks.width])

    def _check_observed(self, query: str, cure: str = "") -> None:
        if self.observed is not None:
            raise ValueError(
                f"{query} needs every step to be observed; some are not, and their states may be "
                f"in any block.{cure}"
            )

    def posterior(self, values: Tensor) -> Posterior:
        r"""Smoothed posterior, as :meth:`HMM.posterior`: :math:`p(z_t \mid x_{1:T})` and others.

        With many states, :meth:`block_posterior` takes a fraction of the memory.
        """
        if self.carried is not None:
            return self.dense().posterior(values)
        evidence = self.log_prob(values).detach()
        with torch.no_grad():
            chain, shape = log_chain(self, values)
            filtered = chain.filtered()
            smoothed = chain.smoothed(filtered)
            states = queries.all_states(chain, smoothed, shape.numel()).reshape(*shape, -1)
            counts = queries.transition_counts(chain, filtered, smoothed)
        return Posterior(evidence, states, counts.reshape(*evidence.shape, *counts.shape[1:]))

    def filtered(self, values: Tensor) -> Tensor:
        r"""Filtered probabilities :math:`p(z_t \mid x_{1:t})`, ``(*B, T, K)``; 0 where padded."""
        if self.carried is not None:
            return self.dense().filtered(values)
        with torch.no_grad():
            chain, shape = log_chain(self, values)
            return queries.all_states(chain, chain.filtered(), shape.numel()).reshape(*shape, -1)

    def viterbi(self, values: Tensor) -> Tensor:
        r"""Best path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, ``(*B, T)``; 0 where padded."""
        if self.carried is not None:
            return self.dense().viterbi(values)
        self._refuse_nan()
        with torch.no_grad():
            chain, shape = log_chain(self, values, torch.float64)
            states = at_steps(chain, paths.k_best(chain, 1)[0], shape)
        return states.squeeze(0).to(self.log_initial.device)

    def sample_states(self, values: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T} \mid x_{1:T})`, ``(*S, *B, T)``; 0 where padded."""
        if self.carried is not None:
            return self.dense().sample_states(values, sample_shape)
        self._refuse_nan()
        outer = torch.Size(sample_shape)
        with torch.no_grad():
            chain, shape = log_chain(self, values)
            states = at_steps(chain, paths.sample(chain, outer.numel()), shape)
        return states.reshape(outer + shape).to(self.log_initial.device)

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``.

        Only the rows of the states that occur are computed.
        """
        initial = self.log_initial
        if self.carried is not None:
            initial = self.carried.log_initial(initial, self._inner_products)
        matrix = self.transition if isinstance(self.transition, Tensor) else None
        initial = torch.atleast_2d(initial)  # one for all, or for each sequence
        states = sample_path(
            torch.multinomial(initial.exp(), shape.numel() // len(initial), True).mT.flatten(),
            self.num_steps,
            lambda _, states: torch.multinomial(
                (matrix[states] if matrix is not None else self._inner_products.rows(states)).exp(),
                1,
            ).squeeze(-1),
        )
        return states.reshape(*shape, self.num_steps)

    def sample_observations(self, states: Tensor) -> Tensor:
        """Sample observations given states; only the symbols of these states are read."""
        check_integers("states", states)
        with torch.no_grad():
            return self.symbols.sample(states)

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` with one path ``(*B, T)``; ``(*B)``, in nats."""
        if self.carried is not None:
            return self.dense().log_joint(values, states)
        return super().log_joint(values, states)

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        """Expected counts given ``values``, of all K states: the E-step."""
        if self.carried is not None:
            return self.dense().expected_counts(values)
        return super().expected_counts(values)

    def log_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of the joint density over all K states: see :meth:`HMM.log_factors`."""
        if self.carried is not None:
            return self.dense().log_factors(values, check)
        return super().log_factors(values, check)
