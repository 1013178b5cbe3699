r"""``NGramBlockHMM``: states in blocks, mixed with an n-gram; exact, at the same cost.

With :math:`b_t` the block of state :math:`z_t` and of symbol :math:`x_t`, and q an n-gram, or any
other distribution of a symbol given those before it,

.. math::
    p(z_t | z_{t-1}, x_{<t}) &= [(1 - \mu) \, p(b_t | z_{t-1}) + \mu \, q(b_t | x_{<t})]
        \; p(z_t | z_{t-1}, b_t), \\
    p(x_t | z_t, x_{<t}) &= (1 - \nu) \, p(x_t | z_t) + \nu \, q(x_t | x_{<t}, b_t).

What is mixed in has been observed, so that the states are summed out as before; the symbol says in
which block the state is, so that a step costs as much as before; and the probabilities of all
sequences of one length sum to one. :math:`\mu` may depend on the block before and on a class of
what is before; :math:`\nu` on the block and on a class of what is before.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .._checks import check_floats, check_integers, check_range, check_same_device, check_shape
from .._precision import full_precision
from ..chains.blocks import BlockChain, BlockLikelihood, CarriedState
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.log_space import logsumexp, step_mask
from ..ops.products import take_rows
from .block_hmm import BlockHMM
from .block_symbols import BlockSymbols, ContextSymbols


class NGramProbs(NamedTuple):
    r"""Probabilities of each symbol under an n-gram; anything at padded steps.

    Attributes:
        log_block: ``(*B, T)``, :math:`\log q(b_t | x_{<t})` of the block of the symbol.
        log_symbol: ``(*B, T)``, :math:`\log q(x_t | x_{<t}, b_t)`.
        block_class: ``(*B, T)`` integers below L, of which class the symbols before are, such as by
            how often the n-gram has seen them. It must not depend on the symbol itself.
        symbol_class: ``(*B, T)`` integers below M. It may depend on the block of the symbol, too.
    """

    log_block: Tensor
    log_symbol: Tensor
    block_class: Tensor
    symbol_class: Tensor


class NGramWeights(NamedTuple):
    r"""Logits of the weight of the n-gram; -inf leaves it out.

    Attributes:
        block: ``(L, B + 1)``, of :math:`\mu`, for each class and block before; the last column is
            for the first step.
        symbol: ``(M, B)``, of :math:`\nu`, for each class and block.
    """

    block: Tensor
    symbol: Tensor


def _refuse(query: str) -> NoReturn:
    raise NotImplementedError(
        f"{query} is not possible for a chain mixed with an n-gram, of which only the "
        "probabilities of the given symbols are known. hmm.words is the chain without the "
        "n-gram, which can."
    )


class _NGramChain(BlockChain):
    """A chain whose transitions depend on the symbols before: it is known within blocks alone."""

    @property
    def log_transition(self) -> NoReturn:
        """Refused: it depends on the symbols before."""
        _refuse("log_transition")

    def check_constant(self, purpose: str) -> NoReturn:
        """Raise: it changes with the symbols before."""
        _refuse(purpose)

    def transitions(self) -> NoReturn:
        """Refused: they depend on the symbols before."""
        _refuse("a step without the n-gram")

    def going_on(self, carried: CarriedState) -> NoReturn:
        """Refused: what the n-gram says of the first symbols is not known."""
        _refuse("continue_from")

    def sample_prior(self, shape: torch.Size, num_steps: int) -> NoReturn:
        """Refused: it depends on the symbols before."""
        _refuse("sampling")

    def first(self, block: Tensor, log_block: Tensor, logits: Tensor) -> Tensor:
        """Log-probabilities ``(N, w)`` of the first state, in the blocks ``(N,)``.

        A block of probability zero has no distribution within; the n-gram enters it uniformly.
        """
        rows = self.blocks.states.to(block.device)
        initial = self.log_initial[rows.clamp(min=0)].masked_fill(rows < 0, -torch.inf)  # (B, w)
        shares = logsumexp(initial, -1)
        never = shares.isneginf().unsqueeze(-1)
        within = initial.masked_fill(never & (rows >= 0), 0.0).log_softmax(-1)
        return within[block] + _mixed(shares[block].unsqueeze(-1), log_block, logits)


class NGramSymbols(ContextSymbols):
    """Symbols of the states of their blocks, mixed with an n-gram's probabilities.

    Args:
        words: The symbols of the states.
        ngram: What the n-gram says of the sequences.
        weights: Logits of its weights.
    """

    kind = "a chain mixed with an n-gram"

    def __init__(self, words: BlockSymbols, ngram: NGramProbs, weights: NGramWeights) -> None:
        super().__init__(words.log_probs, words.blocks)
        self.words, self.ngram, self.weights = words, ngram, weights

    def _of(
        self, symbols: Tensor, values: Tensor | None, lengths: Tensor, check: bool
    ) -> tuple[Tensor, Tensor]:
        blocks, alone = super()._of(symbols, values, lengths, check)
        _, log_symbol, _, classes = self.of_rows(len(symbols))
        with full_precision(alone):
            logits = _at(self.weights.symbol, classes, blocks.to(alone.device))
            mixed = _mixed(alone, log_symbol, logits)
        beyond = (self.blocks.states[blocks] < 0).to(alone.device)
        return blocks, mixed.masked_fill(beyond, -torch.inf)

    def of_rows(self, count: int) -> NGramProbs:
        """Log-probabilities of the n-gram for N rows ``(N, T)``: its sequences, repeated."""
        parts = (part.reshape(-1, part.size(-1)) for part in self.ngram)
        return NGramProbs(*(part.repeat(count // len(part), 1) for part in parts))


class NGramBlockHMM(BlockHMM):
    r"""A :class:`pyrohmm.BlockHMM` mixed with an n-gram of the symbols before.

    See :mod:`pyrohmm.distributions.ngram_block_hmm` for the density. ``log_prob`` and its gradient,
    ``posterior``, ``block_posterior``, ``filtered``, ``viterbi``, ``sample_states``, labels, and of
    :mod:`pyrohmm.queries` ``predictive_log_prob``, ``k_best`` and ``path_entropy`` are exact, and
    visit only states that can emit a symbol. What needs the n-gram's distribution of symbols that
    are not given (samples, forecasts, filters, missing steps) is refused.

    Args:
        words: The chain: of disjoint blocks, with an :class:`InnerProductTransition`, every step
            observed.
        ngram: What the n-gram says of the sequences.
        weights: Logits of its weights.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be; see
            :meth:`HMM.restrict`, which takes labels.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If ``words`` is another chain, shapes or devices disagree, a class is not one of
            those that have weights, or (with ``validate_args``) a log-probability is above zero.

    Example:
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> even = block_hmm.InnerProductTransition(torch.zeros(4, 1), torch.zeros(4, 1), two)
        >>> emission = torch.tensor([[0.9, 0.2], [0.1, 0.8], [1.0, 1.0]]).log()
        >>> words = BlockHMM(torch.full((4,), 0.25).log(), even, emission, two, torch.tensor(1))
        >>> log_probs, only = torch.tensor([[0.9], [0.3]]).log(), torch.tensor([0])
        >>> ngram = NGramProbs(*log_probs, only, only)
        >>> weights = NGramWeights(torch.zeros(1, 3), torch.zeros(1, 2))  # one half
        >>> NGramBlockHMM(words, ngram, weights).log_prob(torch.tensor([0])).exp()
        tensor(0.2975)
        >>> round((0.5 + 0.9) / 2 * (0.55 + 0.3) / 2, 4)
        0.2975
    """

    chain: _NGramChain
    _emission: NGramSymbols

    def __init__(
        self,
        words: BlockHMM,
        ngram: NGramProbs,
        weights: NGramWeights,
        allowed: Tensor | None = None,
    ) -> None:
        _check_words(words)
        shape, width = (*words.batch_shape, words.num_steps), words.blocks.num_blocks
        for name, tensor in ngram._asdict().items():
            (check_integers if name.endswith("class") else check_floats)(name, tensor)
            check_shape(name, tensor, shape, "(*B, T)", "That of the lengths.")
        check_floats("weights.block", weights.block)
        check_shape("weights.block", weights.block, (len(weights.block), width + 1), "(L, B + 1)")
        check_floats("weights.symbol", weights.symbol)
        check_shape("weights.symbol", weights.symbol, (len(weights.symbol), width), "(M, B)")
        parts = {"weights.block": weights.block, "weights.symbol": weights.symbol}
        check_same_device({**ngram._asdict(), **parts, "log_initial": words.log_initial})
        padded = ~words.exists  # what is there is not read, by gradients neither
        log_probs = [each.masked_fill(padded, 0.0) for each in ngram[:2]]
        classes = [each.long().masked_fill(padded, 0) for each in ngram[2:]]
        if words._validate_args or padded.device.type == "cpu":
            for name, each, table in zip(("block_class", "symbol_class"), classes, weights):
                check_range(name, each, len(table), "the number of rows of its weights - 1")
        if words._validate_args:
            _check_log_probs(*log_probs)
        chain = _NGramChain(words.log_initial, words.transition, words.blocks)
        symbols = NGramSymbols(words.symbols, NGramProbs(*log_probs, *classes), weights)
        self._compose(chain, symbols, words.lengths, validate_args=False, allowed=allowed)
        words._validated_alike(self)

    @property
    def words(self) -> BlockHMM:
        """The chain without the n-gram."""
        hmm = BlockHMM(
            self.log_initial, self.transition, self._emission.words, self.blocks, self.lengths,
            validate_args=False,
        )  # fmt: skip
        return cast(BlockHMM, self._validated_alike(hmm))

    @property
    def ngram(self) -> NGramProbs:
        """Log-probabilities of the n-gram for the sequences; zeros at padded steps."""
        return self._emission.ngram

    @property
    def weights(self) -> NGramWeights:
        """Logits of the weights of the n-gram."""
        return self._emission.weights

    def __repr__(self) -> str:
        return (
            f"NGramBlockHMM({self.num_states} states in {self.blocks.num_blocks} blocks; "
            f"{self.blocks.num_symbols} symbols; batch shape {tuple(self.batch_shape)}, up to "
            f"{self.num_steps} steps)"
        )

    def _read(
        self, values: Tensor, check: bool = False, with_labels: bool = True
    ) -> BlockLikelihood:
        """Log-likelihoods, and the choice of each block, mixed with the n-gram."""
        seen = super()._read(values, check, with_labels)
        block, logs = seen.blocks.to(seen.logs.device), seen.logs
        log_block, _, classes, _ = self._emission.of_rows(len(block))
        shares = cast(InnerProductTransition, self.transition).log_block_probs
        with full_precision(logs):
            begins = torch.full_like(block[:, 0], self.blocks.num_blocks)
            logits = _at(self.weights.block, classes[:, 0], begins)
            first = self.chain.first(block[:, 0], log_block[:, 0], logits)
            states = self.blocks.states[seen.blocks[:, :-1]].clamp(min=0).to(block.device)
            logits = _at(self.weights.block, classes[:, 1:], block[:, :-1])
            entered = _mixed(
                _at(shares, states, block[:, 1:, None]).to(logs.dtype), log_block[:, 1:], logits
            )
            exists = step_mask(seen.lengths, block.size(1), block.device)
            entered = entered.masked_fill(~exists[:, 1:, None], 0.0)
            leaving = torch.nn.functional.pad(entered, (0, 0, 0, 1))
        return seen._replace(first=first, leaving=leaving)

    def replace(self, **changes: Any) -> NGramBlockHMM:
        """A copy for labels, or for more batch dimensions: the n-gram is that of its sequences."""
        lengths, allowed = (changes.pop(n, getattr(self, n)) for n in ("lengths", "allowed"))
        check_integers("lengths", lengths)
        inner = lengths.shape[max(0, lengths.dim() - self.lengths.dim()) :]
        if inner != self.lengths.shape or bool((lengths.cpu() != self.lengths).any()):
            raise ValueError(
                f"lengths must be those of the sequences of the n-gram, {self.lengths.tolist()}; "
                f"got {lengths.tolist()}. Build an NGramBlockHMM for others."
            )
        for name, part in changes.items():
            if part is not None:
                raise ValueError(
                    f"{name} cannot be changed in a chain mixed with an n-gram. Build an "
                    "NGramBlockHMM with it."
                )
        return cast(NGramBlockHMM, super().replace(lengths=lengths, allowed=allowed))


def _at(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of a table, whose gradient is added up in float64."""
    return take_rows(table.reshape(-1, 1), rows * table.size(1) + columns).squeeze(-1)


def _mixed(log_chain: Tensor, log_ngram: Tensor, logits: Tensor) -> Tensor:
    """Log of (1 - w) p + w q, with p ``(*, n)``, and q and the logits of w ``(*)``."""
    dtype = log_chain.dtype
    log_ngram, logits = log_ngram.to(dtype).unsqueeze(-1), logits.to(dtype).unsqueeze(-1)
    parts = logsigmoid(-logits) + log_chain, logsigmoid(logits) + log_ngram
    return logsumexp(torch.stack(torch.broadcast_tensors(*parts), -1), -1)


def _check_log_probs(log_block: Tensor, log_symbol: Tensor) -> None:
    """Raise if a probability is above one by more than rounding."""
    for name, logs in (("log_block", log_block), ("log_symbol", log_symbol)):
        above = logs > 1e-3
        if bool(above.any()):
            raise ValueError(
                f"{name} must hold log-probabilities, none above 0; got {logs[above][0].item():g}. "
                "Of probabilities take the logarithm."
            )


def _check_words(words: BlockHMM) -> None:
    """Raise unless an n-gram can be mixed in."""
    if not isinstance(words, BlockHMM) or type(words) is not BlockHMM:
        raise TypeError(f"words must be a BlockHMM; got {type(words).__name__}.")
    if not isinstance(words.transition, InnerProductTransition):
        raise ValueError(
            "words must have an InnerProductTransition, of disjoint blocks; its transition is a "
            "matrix of log-probabilities."
        )
    if words.observed is not None:
        raise ValueError(
            "words must be observed at every step: what an n-gram says after a missing symbol is a "
            "sum over that symbol. Leave such sequences out, or give the n-gram none of the weight."
        )
    if words.carried is not None:
        raise ValueError("words must begin with the sequences, not continue from others.")
