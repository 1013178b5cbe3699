"""``BlockHMM``: an HMM of symbols whose states emit only the symbols of their blocks."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import (
    broadcast_shapes,
    check_floats,
    check_integers,
    check_range,
    check_same_device,
    check_shape,
    check_tensor,
    check_trailing,
)
from .._transforms import refuse_transforms
from ..chains.blocks import BlockChain, BlockLikelihood, CarriedState
from ..ops.blocks.inner_products import InnerProductTransition as InnerProductTransition
from ..ops.blocks.states import Blocks
from ..ops.log_space import step_mask
from ..ops.products import take_rows
from ..ops.tensor_cache import cached, lazy
from .hmm import HMM


class BlockSymbols:
    """Emission of symbols, each emitted only by the states of its block.

    Args:
        log_probs: ``(V, w)``, log-probability of each symbol in each state of its block, in the
            order of the block; what is beyond the block is not read.
        blocks: Which states may emit which symbol.

    Raises:
        TypeError: If ``log_probs`` are not floating point.
        ValueError: If shapes disagree.
    """

    event_shape = torch.Size()
    log_missing: Tensor | None = None  # (K,), log-likelihood of states at missing steps, if not 0

    def __init__(self, log_probs: Tensor, blocks: Blocks) -> None:
        check_floats("log_emission", log_probs)
        check_shape("log_emission", log_probs, (blocks.num_symbols, blocks.width), "(V, w)")
        self.blocks, self.log_probs = blocks, blocks.without_others(log_probs)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the emission, ``(K,)``."""
        return torch.Size((self.blocks.num_states,))

    @property
    def support(self) -> constraints.Constraint:
        """Support: the symbols 0 to V - 1."""
        return constraints.integer_interval(0, self.blocks.num_symbols - 1)

    @lazy
    def distribution(self) -> TorchDistribution:
        """Dense categorical emission of all K states, computed on access; -inf for other blocks."""
        size = self.blocks.num_states
        wide = self.log_probs.new_full((self.blocks.num_symbols, size + 1), -torch.inf)
        logits = wide.scatter(1, self.columns(), self.log_probs)[:, :-1].mT
        return Categorical(logits=logits, validate_args=False)  # sums are checked with the HMM

    def columns(self) -> Tensor:
        """State of each entry of ``log_probs``, ``(V, w)``; K for entries beyond the block."""
        return self.blocks.places[self.blocks.symbol_block].to(self.log_probs.device)

    def check_sums(self) -> None:
        """Raise unless the emission probabilities of each state sum to one."""
        sums = self.log_probs.new_zeros(self.blocks.num_states + 1)
        sums.index_add_(0, self.columns().flatten(), self.log_probs.detach().exp().flatten())
        low, high = (end.item() for end in torch.aminmax(sums[:-1]))
        if not 1 - 1e-4 <= low <= high <= 1 + 1e-4:
            raise ValueError(
                "log_emission must hold log-probabilities that sum to one over the symbols of each "
                f"state; got sums from {low:.6g} to {high:.6g}. Subtract the log-sum-exp of each "
                "state."
            )

    def likelihood(
        self, values: Tensor, lengths: Tensor, observed: Tensor | None = None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of symbols in the states of their blocks.

        Args:
            values: ``(N, T)`` integers, symbols; anything at padded and missing steps.
            lengths: ``(N,)``, on the CPU.
            observed: ``(N, T)`` booleans; all by default.
            check: Whether to read the symbols of an accelerator in order to check them.

        Returns:
            The block of each step ``(N, T)``, on the CPU, and the log-likelihood of the step in the
            states of that block ``(N, T, w)``; at padded steps they mean nothing.

        Raises:
            TypeError: If ``values`` are not integers.
            ValueError: If a symbol is not below V.
        """
        check_integers("values", values)
        known = step_mask(lengths, values.size(1), values.device)
        known = known if observed is None else known & observed
        symbols = values.long().masked_fill(~known, 0)
        return self._of(symbols, None if observed is not None else values, lengths, check)

    def _of(
        self, symbols: Tensor, values: Tensor | None, lengths: Tensor, check: bool
    ) -> tuple[Tensor, Tensor]:
        """Blocks of ``symbols``, cached by the tensor ``values``, and log-likelihoods within them.

        While these values live and are not written to, an accelerator is not asked for the symbols
        again; if they are None it always is.
        """
        table = self.blocks.symbol_block
        if check or symbols.device.type == "cpu":
            check_range(
                "values", symbols, len(table), "V - 1",
                "Mark steps without a symbol by observed=False.",
            )  # fmt: skip
        if values is None or symbols.device.type == "cpu":
            blocks = table[symbols.cpu()]
        else:
            parts = table, lengths.numpy().tobytes()
            blocks = cached(values, lambda: table[symbols.cpu()], *parts)
        return blocks, take_rows(self.log_probs, symbols)

    def sample(self, states: Tensor) -> Tensor:
        """Sample a symbol from each of ``states``, integers of any shape; only those are read."""
        kinds, rows = states.unique(return_inverse=True)
        wanted = torch.zeros(self.blocks.num_states + 1, dtype=torch.bool, device=states.device)
        wanted[kinds] = True
        owner = self.columns().flatten()
        cells = wanted[owner].nonzero().squeeze(-1)  # of the (V, w) that belong to these states
        owner, order = torch.searchsorted(kinds, owner[cells]).sort(stable=True)
        cells = cells[order]
        sums = self.log_probs.flatten()[cells].double().exp().cumsum(0)
        last = torch.bincount(owner, minlength=len(kinds)).cumsum(0) - 1
        high = sums[last]
        low = torch.cat([high.new_zeros(1), high])[:-1]
        uniform = torch.rand(states.shape, dtype=sums.dtype, device=sums.device) * (1 - 1e-9)
        place = torch.searchsorted(sums, torch.lerp(low[rows], high[rows], uniform), right=True)
        return cells[place.minimum(last[rows])] // self.blocks.width


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


class BlockHMM(HMM):
    """An HMM of symbols whose states emit only the symbols of their blocks.

    It is the same distribution as an :class:`HMM` with zeros elsewhere, and answers the same
    queries: a :class:`~pyrohmm.chains.BlockChain` with :class:`BlockSymbols`. ``log_prob`` and its
    gradient, ``posterior``, ``viterbi``, ``sample_states``, ``filtered`` and ``block_posterior``,
    labels, a :class:`Filter`, and of :mod:`pyrohmm.queries` those of prediction, continuation, best
    paths and entropy visit only states that can emit a symbol. Where steps are missing they visit
    all states there, and so does ``impute``. For everything else, :meth:`dense` answers, at the
    cost of K x K matrices. Parameters have no batch dimensions.

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

    chain: BlockChain
    _emission: BlockSymbols

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
        symbols = log_emission
        if not isinstance(symbols, BlockSymbols):
            symbols = BlockSymbols(symbols, blocks)
        chain = BlockChain(log_initial, transition, blocks, carried)
        self._compose(chain, symbols, lengths, observed, validate_args)
        if self._validate_args:
            symbols.check_sums()

    @property
    def transition(self) -> InnerProductTransition | Tensor:
        """Transition log-probabilities: an :class:`InnerProductTransition`, or ``(K, K)``."""
        return self.chain.transition

    @property
    def symbols(self) -> BlockSymbols:
        """Emission of the symbols, stored by blocks."""
        return self._emission

    @property
    def blocks(self) -> Blocks:
        """Block structure: which states may emit which symbol."""
        return self.chain.blocks

    @property
    def carried(self) -> CarriedState | None:
        """Distribution of the state before the first step, where sequences continue others."""
        return self.chain.carried

    @property
    def log_emission(self) -> Tensor:
        """Log-probability of each symbol in each state of its block, ``(V, w)``."""
        return self.symbols.log_probs

    def dense(self) -> HMM:
        """HMM of equal distribution whose parameters are dense, without blocks."""
        return self._copied(chain=self.chain.replace(), emission=self.emission)

    def replace(self, **changes: Any) -> HMM:
        """A copy with some arguments changed; dense where blocks cannot represent it."""
        lengths = changes.get("lengths", self.lengths)
        if set(changes) - {"lengths", "observed", "allowed", "num_steps"} or (
            self.carried is not None and lengths.shape != self.lengths.shape
        ):
            return self.dense().replace(**changes)
        return self._copied(**changes)

    def continue_from(self, carried: CarriedState) -> Self:
        """Copy that starts from a carried state, for sequences that continue others."""
        chain = self.chain
        chain = BlockChain(chain.log_initial, chain.transition, chain.blocks, carried)
        return self._copied(chain=chain)

    # Parameters and data, in blocks

    def _read(
        self, values: Tensor, check: bool = False, with_labels: bool = True
    ) -> BlockLikelihood:
        """Emission log-likelihoods in the states of each symbol's block."""
        refuse_transforms(
            "a model with states in blocks", "hmm.dense() can be transformed, if it is not large."
        )
        values = self.values_of(values)
        check_tensor("values", values)
        check_same_device({"values": values, "log_initial": self.log_initial})
        cure = "Pair words with tags: tagged(data)." if len(self.event_shape) > 1 else ""
        check_trailing("values", values, tuple(self.event_shape), "(T, *E)", cure)
        outer = values.shape[: values.dim() - len(self.event_shape)]
        self.refuse_one_series(outer)
        batch = broadcast_shapes(outer, self.batch_shape)
        lengths, observed = self.lengths.expand(batch).reshape(-1), self.observed
        if values.shape != (len(lengths), *self.event_shape):
            values = values.expand(*batch, *self.event_shape).reshape(-1, *self.event_shape)
        steps = len(lengths), self.num_steps
        if observed is not None:
            observed = observed.expand(*batch, -1).reshape(steps)
        blocks, logs = self.symbols.likelihood(values, lengths, observed, self._validate_args)
        if observed is not None:
            blocks = blocks.masked_fill(~observed.cpu(), self.blocks.num_blocks)
        missing = self.symbols.log_missing
        if self.allowed is not None and with_labels:
            allowed = self.allowed.expand(*batch, -1, -1).reshape(*steps, -1)
            states = self.blocks.states[blocks.clamp(max=self.blocks.num_blocks - 1)]
            states = states.clamp(min=0).to(logs.device)
            logs = logs.masked_fill(~allowed.gather(-1, states), -torch.inf)
            missing = logs.new_zeros(1) if missing is None else missing
            missing = torch.where(allowed, missing, -torch.inf)
        if check:
            self.check_labels(values)
        return BlockLikelihood(blocks, logs, lengths, batch, missing)

    def log_likelihood(self, values: Tensor) -> Tensor:
        """Emission log-likelihoods in all K states: see :meth:`HMM.log_likelihood`."""
        return self.chain.widened(self._read(values, check=True))[0]

    def log_factors(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log factors of the joint density over all K states: see :meth:`HMM.log_factors`."""
        return self.chain.all_initial(), self.chain.matrices, self.log_likelihood(values)

    # Queries given values (*B, T, *E)

    def block_posterior(self, values: Tensor) -> BlockPosterior:
        r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})` within the block of each symbol.

        It has no gradient, nor have ``posterior``, ``filtered``, and what follows from them, in
        blocks: ``dense()`` has.

        Raises:
            ValueError: If steps are missing, where the state may be in any block; or (with
                ``validate_args``) a sequence has probability zero.
        """
        seen = self._read(values, check=True)
        self._check_observed(seen, "block_posterior", " Call posterior.")
        evidence, probs = self.chain.within_blocks(seen)
        self._check_possible(evidence)
        exists = step_mask(seen.lengths, self.num_steps).unsqueeze(-1)
        states = self.blocks.states[seen.blocks].masked_fill(~exists, -1).to(probs.device)
        return BlockPosterior(evidence, probs, states.reshape(probs.shape))

    def final_state(self, values: Tensor) -> FinalState:
        r"""Distribution :math:`p(z_T \mid x_{1:T})` of the last state, values ``(N, T)``."""
        seen = self._read(values)
        self._check_observed(seen, "final_state")
        last = seen.blocks.gather(1, seen.lengths.unsqueeze(-1) - 1).squeeze(-1)
        log_probs = self.chain.final_state(seen)
        return FinalState(self.blocks.states[last].to(log_probs.device), log_probs)

    def _check_observed(self, seen: BlockLikelihood, query: str, cure: str = "") -> None:
        if self.chain.has_gaps(seen):
            raise ValueError(
                f"{query} needs every step to be observed; some are not, and their states may be "
                f"in any block.{cure}"
            )
