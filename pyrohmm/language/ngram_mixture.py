r"""``NGramMixture``: a neural HMM in blocks mixed with an n-gram; exact, at the same cost.

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

import math
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from .._checks import check_range, check_shape, check_size
from .._imports import imported
from .._precision import full_precision
from ..chains.blocks import BlockChain, BlockLikelihood
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..distributions.block_hmm import BlockHMM, BlockSymbols
from ..distributions.hmm import HMM
from ..nn.base import HMMModule, in_mode
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.log_space import logsumexp, step_mask
from ..ops.products import take_rows


class NGramProbs(NamedTuple):
    r"""Log-probabilities of each block and symbol under an n-gram; anything at padded steps.

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
    r"""Logits of the mixture weights of the n-gram; -inf leaves it out.

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


def _refusing(query: str) -> Any:
    """Method that refuses a ``query``, whatever its arguments are."""
    return lambda *_: _refuse(query)


class _Chain(BlockChain):
    """Chain whose transitions depend on past symbols, thus without a transition matrix."""

    log_transition = property(_refusing("log_transition"))
    transitions = _refusing("a step without the n-gram")
    sample_prior = _refusing("sampling")

    def check_constant(self, purpose: str) -> NoReturn:
        _refuse(purpose)


class _Symbols(BlockSymbols):
    """Symbol distribution of the states in blocks, mixed with an n-gram."""

    def __init__(self, words: BlockSymbols, ngram: NGramProbs, weights: NGramWeights) -> None:
        super().__init__(words.log_probs, words.blocks)
        self.words, self.ngram, self.weights = words, ngram, weights

    def likelihood(
        self, values: Tensor, lengths: Tensor, observed: Tensor | None = None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Block of each symbol, and its log-likelihoods there, mixed with the n-gram."""
        if observed is not None:
            _refuse("a missing step")
        blocks, alone = super().likelihood(values, lengths, None, check)
        _, log_symbol, _, classes = self.of_rows(len(blocks))
        with full_precision(alone):
            logits = _at(self.weights.symbol, classes, blocks.to(alone.device))
            mixed = _mixed(alone, log_symbol, logits)
        beyond = (self.blocks.states[blocks] < 0).to(alone.device)
        return blocks, mixed.masked_fill(beyond, -torch.inf)

    def of_rows(self, count: int) -> NGramProbs:
        """Repeat the n-gram's log-probabilities to N rows, each ``(N, T)``."""
        parts = (part.reshape(-1, part.size(-1)) for part in self.ngram)
        return NGramProbs(*(part.repeat(count // len(part), 1) for part in parts))

    distribution = property(_refusing("emission"))
    sample = _refusing("sampling")


class NGramBlockHMM(BlockHMM):
    """A :class:`pyrohmm.BlockHMM` mixed with an n-gram; the same cost a step.

    ``log_prob`` and its gradient and the queries of given, fully observed sequences are those of
    the mixture. What needs probabilities of symbols that are not given is refused; :attr:`words`,
    the chain without the n-gram, answers for itself.

    Args:
        words: With an :class:`InnerProductTransition`; all steps are observed.
        ngram: What the n-gram says of the sequences.
        weights: Logits of its weights.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be; see
            :meth:`HMM.restrict`, which takes labels.

    Example:
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> even = block_hmm.InnerProductTransition(torch.zeros(4, 1), torch.zeros(4, 1), two)
        >>> emission = torch.tensor([[0.9, 0.2], [0.1, 0.8], [1.0, 1.0]]).log()
        >>> words = BlockHMM(torch.full((4,), 0.25).log(), even, emission, two, torch.tensor(1))
        >>> log_probs, only = torch.tensor([[0.9], [0.3]]).log(), torch.tensor([0])
        >>> ngram = language.NGramProbs(*log_probs, only, only)
        >>> weights = language.NGramWeights(torch.zeros(1, 3), torch.zeros(1, 2))  # one half
        >>> NGramBlockHMM(words, ngram, weights).log_prob(torch.tensor([0])).exp()
        tensor(0.2975)
        >>> round((0.5 + 0.9) / 2 * (0.55 + 0.3) / 2, 4)
        0.2975
    """

    _emission: _Symbols

    def __init__(
        self,
        words: BlockHMM,
        ngram: NGramProbs,
        weights: NGramWeights,
        allowed: Tensor | None = None,
    ) -> None:
        if not isinstance(words.transition, InnerProductTransition) or words.observed is not None:
            raise ValueError(
                "words must have an InnerProductTransition and be observed at every step: what an "
                "n-gram says after a missing symbol is a sum over that symbol."
            )
        padded = ~words.exists  # what is there is not read, by gradients neither
        log_probs = [each.masked_fill(padded, 0.0) for each in ngram[:2]]
        classes = [each.long().masked_fill(padded, 0) for each in ngram[2:]]
        chain = _Chain(words.log_initial, words.transition, words.blocks)
        symbols = _Symbols(words.symbols, NGramProbs(*log_probs, *classes), weights)
        self._compose(chain, symbols, words.lengths, validate_args=False, allowed=allowed)
        words._validated_alike(self)

    @property
    def words(self) -> BlockHMM:
        """Block HMM without the n-gram."""
        symbols, data = self._emission.words, self.lengths
        hmm = BlockHMM(self.log_initial, self.transition, symbols, self.blocks, data)
        return cast(BlockHMM, self._validated_alike(hmm))

    @property
    def ngram(self) -> NGramProbs:
        """Log-probabilities of the n-gram for the sequences; zeros at padded steps."""
        return self._emission.ngram

    @property
    def weights(self) -> NGramWeights:
        """Logits of the mixture weights of the n-gram."""
        return self._emission.weights

    def replace(self, **changes: Any) -> HMM:
        """Copy with changed arguments, such as labels; lengths must stay those of the n-gram."""
        lengths = changes.get("lengths", self.lengths)
        inner = lengths[(0,) * max(0, lengths.dim() - self.lengths.dim())]
        if inner.shape != self.lengths.shape or bool((lengths.cpu() != self.lengths).any()):
            raise ValueError(
                f"lengths must be those of the n-gram, {self.lengths.tolist()}; got "
                f"{lengths.tolist()}. Build an NGramBlockHMM for others."
            )
        return super().replace(**changes)

    continue_from = _refusing("continue_from")

    def _read(
        self, values: Tensor, check: bool = False, with_labels: bool = True
    ) -> BlockLikelihood:
        """Block log-likelihoods and block-transition probabilities, mixed with the n-gram."""
        seen = super()._read(values, check, with_labels)
        block = seen.blocks.to(seen.logs.device)
        log_block, _, classes, _ = self._emission.of_rows(len(block))
        shares = cast(InnerProductTransition, self.transition).log_block_probs
        with full_precision(seen.logs):
            begins = torch.full_like(block[:, 0], self.blocks.num_blocks)
            logits = _at(self.weights.block, classes[:, 0], begins)
            first = self._first(block[:, 0], log_block[:, 0], logits)
            states = self.blocks.states[seen.blocks[:, :-1]].clamp(min=0).to(block.device)
            own = _at(shares, states, block[:, 1:, None]).to(seen.logs.dtype)
            logits = _at(self.weights.block, classes[:, 1:], block[:, :-1])
            exists = step_mask(seen.lengths, block.size(1), block.device)
            entered = _mixed(own, log_block[:, 1:], logits).masked_fill(~exists[:, 1:, None], 0.0)
        return seen._replace(first=first, leaving=pad(entered, (0, 0, 0, 1)))

    def _first(self, block: Tensor, log_block: Tensor, logits: Tensor) -> Tensor:
        """Log-probabilities ``(N, w)`` of the first state within given blocks ``(N,)``.

        A block of probability zero has no distribution within; the n-gram enters it uniformly.
        """
        rows = self.blocks.states.to(block.device)
        initial = self.log_initial[rows.clamp(min=0)].masked_fill(rows < 0, -torch.inf)  # (B, w)
        shares = logsumexp(initial, -1)
        never = shares.isneginf().unsqueeze(-1)
        within = initial.masked_fill(never & (rows >= 0), 0.0).log_softmax(-1)
        return within[block] + _mixed(shares[block].unsqueeze(-1), log_block, logits)


def _at(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Look up entries of a table, with gradients accumulated in float64."""
    return take_rows(table.reshape(-1, 1), rows * table.size(1) + columns).squeeze(-1)


def _mixed(log_chain: Tensor, log_ngram: Tensor, logits: Tensor) -> Tensor:
    """Log of the mixture (1 - w) p + w q, with p ``(*, n)``, and q and the logits of w ``(*)``."""
    log_ngram, logits = (each.to(log_chain).unsqueeze(-1) for each in (log_ngram, logits))
    parts = logsigmoid(-logits) + log_chain, logsigmoid(logits) + log_ngram
    return logsumexp(torch.stack(torch.broadcast_tensors(*parts), -1), -1)


class NGramMixture(HMMModule):
    r"""A :class:`NeuralHMM` in blocks mixed with an n-gram; exact, at the same cost.

    It builds an :class:`~pyrohmm.language.NGramBlockHMM`, whose module has the density. The
    n-gram, or any other distribution of a word given those before it, comes with the data: as
    ``covariates`` of four columns, those of
    :class:`NGramProbs`, classes as whole numbers.
    Covariates are finite: the logarithm of a probability of zero is a number such as -1000. Fits,
    validation and metrics hand them on.

    Train ``words`` alone, then the weights by :meth:`fit_weights` on text that neither ``words``
    nor the n-gram has seen. If a fit trains both together, on text that the n-gram has not seen,
    fit the weights anew after it: those of the training text may not suit other text.

    The logit of each weight is the sum of a parameter of the class and one of the block.

    Args:
        words: Builds a :class:`pyrohmm.BlockHMM`, such as a
            :class:`pyrohmm.NeuralHMM`, whose ``blocks`` it has.
        num_block_classes: L, number of classes of what is before a word.
        num_symbol_classes: M, the same for the choice of the word in its block.
        weight: Initial weight of the n-gram.

    Raises:
        ValueError: If ``words`` has no blocks; or a number is out of range.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> module = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=two))
        >>> probs = torch.tensor([[0.5, 0.9], [0.5, 1.0]])  # of the block, and of the word in it
        >>> columns = torch.cat([probs.log(), torch.zeros(2, 2)], -1)
        >>> data = Sequences.from_list([[0, 2]], covariates=[columns])
        >>> hmm = module.fit_weights(data)(data.lengths, None, data.covariates)
        >>> hmm.log_prob(data.values).shape
        torch.Size([1])
    """

    def __init__(
        self,
        words: HMMModule,
        num_block_classes: int = 1,
        num_symbol_classes: int = 1,
        weight: float = 0.3,
    ) -> None:
        super().__init__()
        blocks = getattr(words, "blocks", None)
        if blocks is None:
            raise ValueError("words must have blocks, such as a NeuralHMM(..., blocks=...).")
        check_size("num_block_classes", num_block_classes)
        check_size("num_symbol_classes", num_symbol_classes)
        if not 0 < weight < 1:
            raise ValueError(f"weight must lie between 0 and 1; got {weight}.")
        self.words = words
        logit, count = math.log(weight / (1 - weight)), blocks.num_blocks
        self.block_class = nn.Parameter(torch.full((num_block_classes,), logit))
        self.block_before = nn.Parameter(torch.zeros(count + 1))  # the last: of the first step
        self.symbol_class = nn.Parameter(torch.full((num_symbol_classes,), logit))
        self.symbol_block = nn.Parameter(torch.zeros(count))

    def forward(
        self, lengths: Tensor, observed: Tensor | None = None, covariates: Tensor | None = None
    ) -> NGramBlockHMM:
        """Build the HMM for sequences of ``lengths``, with the n-gram ``(*B, T, 4)``."""
        if covariates is None:
            raise ValueError("covariates must be given, the columns of NGramProbs.")
        words: BlockHMM = self.words(lengths, observed)
        shape = (*lengths.shape, words.num_steps, 4)
        cure = "Its columns are NGramProbs, of sequences of these lengths."
        check_shape("covariates", covariates, shape, "(*B, T, 4)", cure)
        log_block, log_symbol, *classes = covariates.unbind(-1)
        classes = [each.masked_fill(~words.exists, 0.0) for each in classes]
        rows = self.block_class, self.symbol_class
        for each, row in zip(classes, rows) if covariates.device.type == "cpu" else ():
            check_range("classes in covariates", each.long(), len(row), "the number of classes - 1")
        ngram = NGramProbs(log_block, log_symbol, *(each.long() for each in classes))
        return NGramBlockHMM(words, ngram, self.weights())

    def weights(self) -> NGramWeights:
        """Logits of the mixture weights of the n-gram."""
        return NGramWeights(
            self.block_class.unsqueeze(-1) + self.block_before,
            self.symbol_class.unsqueeze(-1) + self.symbol_block,
        )

    def fit_weights(
        self, data: Sequences, num_rounds: int = 30, batch_tokens: int = 8192
    ) -> NGramMixture:
        r"""Fit the weights to held-out text, under a standard normal prior; ``words`` stays.

        The joint density is maximised by L-BFGS. Parameters that require no gradient stay, too.

        Args:
            data: Sequences with the n-gram as covariates, on which neither ``words`` nor the n-gram
                was trained. Some hundreds suffice.
            num_rounds: Largest number of iterations; of each the data are read about once.
            batch_tokens: Steps of sequences whose evidence is computed at once.

        Returns:
            The module itself.
        """
        own = self.block_class, self.block_before, self.symbol_class, self.symbol_block
        fitted = [part for part in own if part.requires_grad]
        order = data.lengths.argsort(stable=True)
        parts = [data[index] for index in cut_by_steps(data.lengths, order, batch_tokens)]
        with torch.no_grad(), in_mode(False, self):
            hmms = [self(part.lengths, None, part.covariates) for part in parts]
        imported("torch._dynamo")  # an optimizer would, with signals
        optimizer = torch.optim.LBFGS(
            fitted, max_iter=num_rounds, max_eval=2 * num_rounds, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            total = torch.stack([part.double().square().sum() / 2 for part in fitted]).sum()
            total.backward()
            for part, hmm in zip(parts, hmms):
                mixed = NGramBlockHMM(hmm.words, hmm.ngram, self.weights())
                nats = -mixed.log_prob(part.values).double().sum()
                nats.backward(inputs=fitted)
                total = total.detach() + nats.detach()
            return total

        with torch.enable_grad():
            optimizer.step(loss)
        optimizer.zero_grad()
        return self
