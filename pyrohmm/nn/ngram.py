"""``NGramMixture``: a neural HMM in blocks mixed with an n-gram of the words before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._checks import check_shape, check_size
from .._imports import imported
from ..data.batches import cut_by_steps
from ..data.sequences import Sequences
from ..distributions.block_hmm import BlockHMM
from ..distributions.ngram_block_hmm import NGramBlockHMM, NGramProbs, NGramWeights
from .base import HMMModule, in_mode

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # of each: both classes, the block before, its block


class NGramMixture(HMMModule):
    r"""A :class:`NeuralHMM` in blocks mixed with an n-gram; exact, at the same cost.

    It builds an :class:`~pyrohmm.distributions.NGramBlockHMM`, whose module has the density. The
    n-gram, or any other distribution of a word given those before it, comes with the data: as
    ``covariates`` of four columns, those of
    :class:`~pyrohmm.distributions.ngram_block_hmm.NGramProbs`, classes as whole numbers.
    Covariates are finite: the logarithm of a probability of zero is a number such as -1000. Fits,
    validation and metrics hand them on.

    Train ``words`` alone, then the weights by :meth:`fit_weights` on text that neither ``words``
    nor the n-gram has seen. If a fit trains both together, on text that the n-gram has not seen,
    fit the weights anew after it: those of the training text may not suit other text.

    The logit of each weight is the sum of a parameter of the class and one of the block.

    Args:
        words: Builds a :class:`pyrohmm.BlockHMM` of disjoint blocks, such as a
            :class:`pyrohmm.NeuralHMM`, whose ``blocks`` it has.
        num_block_classes: L, number of classes of what is before a word.
        num_symbol_classes: M, the same for the choice of the word in its block.
        weight: Initial weight of the n-gram.

    Raises:
        ValueError: If ``words`` has no blocks, or they overlap; or a number is out of range.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> module = NGramMixture(NeuralHMM(4, 3, hidden_dim=4, blocks=two))
        >>> probs = torch.tensor([[0.5, 0.9], [0.5, 1.0]])  # of the block, and of the word in it
        >>> columns = torch.cat([probs.log(), torch.zeros(2, 2)], -1)
        >>> data = Sequences.from_list([[0, 2]], covariates=[columns])
        >>> module.fit_weights(data)(data.lengths, None, data.covariates)
        NGramBlockHMM(4 states in 2 blocks; 3 symbols; batch shape (1,), up to 2 steps)
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
        if blocks is None or not blocks.disjoint:
            raise ValueError(
                "words must have blocks that are disjoint, such as a NeuralHMM(..., "
                "blocks=blocks.from_clusters(...))."
            )
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
        if words._validate_args or covariates.device.type == "cpu":
            for column, each, row in zip((2, 3), classes, (self.block_class, self.symbol_class)):
                _check_classes(column, each, len(row))
        ngram = NGramProbs(log_block, log_symbol, *(each.long() for each in classes))
        return NGramBlockHMM(words, ngram, self.weights())

    def weights(self) -> NGramWeights:
        """Logits of the weights of the n-gram."""
        return NGramWeights(
            self.block_class.unsqueeze(-1) + self.block_before,
            self.symbol_class.unsqueeze(-1) + self.symbol_block,
        )

    def fit_weights(
        self, data: Sequences, num_rounds: int = 3, batch_tokens: int = 8192
    ) -> NGramMixture:
        r"""Fit the weights to held-out text, under a standard normal prior; ``words`` stays.

        In each round the gradient g of the evidence by the weight w of each word is computed; to
        change that weight alone to v would multiply the likelihood by 1 + (v - w) g. The product of
        this over all words is maximised by L-BFGS. A round that does not raise the joint density
        is undone and ends the fit. Parameters that require no gradient stay, too.

        Args:
            data: Sequences with the n-gram as covariates, on which neither ``words`` nor the n-gram
                was trained. Some hundreds suffice.
            num_rounds: Largest number of rounds.
            batch_tokens: Steps of sequences whose evidence is computed at once.

        Returns:
            The module itself.
        """
        own = self.block_class, self.block_before, self.symbol_class, self.symbol_block
        fitted = [part for part in own if part.requires_grad]
        best, kept = -math.inf, list[Tensor]()
        for number in range(num_rounds + 1):
            evidence, words, slopes = self._slopes(data, batch_tokens)
            density = evidence + _log_normal(fitted).item()
            if not density > best:
                for part, value in zip(fitted, kept):
                    part.data.copy_(value)
                break
            best, kept = density, [part.detach().clone() for part in fitted]
            if number < num_rounds:
                self._maximize(fitted, words, slopes)
        return self

    def _maximize(self, fitted: list[nn.Parameter], words: Words, slopes: list[Tensor]) -> None:
        """Find the weights of one round, given the slopes of the evidence by the old ones."""
        old = [each.detach().sigmoid() for each in _at_words(self.weights(), words)]
        imported("torch._dynamo")  # an optimizer would, with signals
        optimizer = torch.optim.LBFGS(fitted, max_iter=60, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -_log_normal(fitted)
            for new, weight, slope in zip(_at_words(self.weights(), words), old, slopes):
                value = value - (1 + (new.sigmoid() - weight) * slope).log().double().sum()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        optimizer.zero_grad()

    def _slopes(self, data: Sequences, batch_tokens: int) -> tuple[float, Words, list[Tensor]]:
        """The evidence; of each word what its weights depend on, and the slopes by them."""
        evidence, found = 0.0, []
        for index in cut_by_steps(data.lengths, data.lengths.argsort(stable=True), batch_tokens):
            part = data[index]
            with torch.no_grad(), in_mode(False, self):
                hmm = self(part.lengths, None, part.covariates)
            here = hmm.blocks.symbol_block.to(part.values.device)[part.values]
            before = here.roll(1, 1)
            before[:, 0] = hmm.blocks.num_blocks
            words = hmm.ngram.block_class, hmm.ngram.symbol_class, before, here
            logits = [each.requires_grad_() for each in _at_words(hmm.weights, words)]
            tables = NGramWeights(
                *(each.reshape(-1, 1).expand(-1, table.size(1))
                  for each, table in zip(logits, hmm.weights))
            )  # fmt: skip
            places = torch.arange(here.numel(), device=here.device).reshape(here.shape)
            ngram = hmm.ngram._replace(block_class=places, symbol_class=places)
            with torch.enable_grad():
                total = NGramBlockHMM(hmm.words, ngram, tables).log_prob(part.values).double().sum()
                slopes = torch.autograd.grad(total, logits)
            evidence += total.item()
            found.append([each[part.exists] for each in (*words, *map(_by_weight, logits, slopes))])
        block_class, symbol_class, before, here, *of = map(torch.cat, zip(*found))
        return evidence, (block_class, symbol_class, before, here), of


def _by_weight(logit: Tensor, slope: Tensor) -> Tensor:
    """The slope of the evidence by a weight, from that by its logit; zero where it is 0 or 1."""
    weight = logit.detach().sigmoid()
    share = (weight + slope).clamp(0, 1)  # probability that the n-gram chose
    return ((share - weight) / (weight * (1 - weight))).nan_to_num(0.0, 0.0, 0.0)


def _log_normal(parts: list[nn.Parameter]) -> Tensor:
    """Log-density of standard normal numbers, less a constant."""
    return torch.stack([-0.5 * part.double().square().sum() for part in parts]).sum()


def _at_words(weights: NGramWeights, words: Words) -> list[Tensor]:
    """Logits of the weight in the choice of the block of each word, and of the word in it."""
    block_class, symbol_class, before, here = words
    return [weights.block[block_class, before], weights.symbol[symbol_class, here]]


def _check_classes(column: int, classes: Tensor, size: int) -> None:
    """Raise unless a column of covariates holds whole numbers below ``size``."""
    wrong = ~((classes >= 0) & (classes < size) & (classes == classes.round()))  # also NaN
    if bool(wrong.any()):
        raise ValueError(
            f"covariates must hold classes in column {column}, whole numbers from 0 to {size - 1}; "
            f"got {classes[wrong][0].item():g}. NGramMixture takes the numbers of classes."
        )
