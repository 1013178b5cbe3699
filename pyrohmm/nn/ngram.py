"""``NGramMixture``: a neural HMM in blocks mixed with an n-gram of the words before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._checks import check_floats, check_shape, check_size
from ..distributions.block_hmm import BlockHMM
from ..distributions.ngram_block_hmm import NGramBlockHMM, NGramProbs, NGramWeights
from .base import HMMModule


class NGramMixture(HMMModule):
    r"""A module in blocks, mixed with what an n-gram says of the words; exact, and as sparse.

    It builds an :class:`~pyrohmm.distributions.NGramBlockHMM`, whose module has the density. The
    n-gram, or any other distribution of a word given those before it, comes with the data: as
    ``covariates`` of four columns, those of
    :class:`~pyrohmm.distributions.ngram_block_hmm.NGramProbs`, classes as whole numbers.
    Covariates are finite: the logarithm of a probability of zero is a number such as -1000. Fits,
    validation and metrics hand them on. The n-gram must not have been trained on the text on which
    the weights are: give training text the probabilities of n-grams that have not seen it, such as
    of those trained on the other folds.

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
        >>> fit = fit_map(MarginalModel(module), data, num_steps=2)
        >>> fit.hmm(data)
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
                f"blocks=blocks.from_clusters(...)); got {type(words).__name__} with "
                f"{'none' if blocks is None else 'others'}."
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
            raise ValueError(
                "covariates must be given: the columns of NGramProbs. Build the data with "
                "Sequences(..., covariates=...)."
            )
        check_floats("covariates", covariates)
        words: BlockHMM = self.words(lengths, observed)
        shape = (*lengths.shape, words.num_steps, 4)
        cure = "Its columns are NGramProbs, of sequences of these lengths."
        check_shape("covariates", covariates, shape, "(*B, T, 4)", cure)
        log_block, log_symbol, *classes = covariates.unbind(-1)
        classes = [each.masked_fill(~words.exists, 0.0) for each in classes]
        if words._validate_args or covariates.device.type == "cpu":
            for column, each, size in zip((2, 3), classes, self._num_classes):
                _check_classes(column, each, size)
        ngram = NGramProbs(log_block, log_symbol, *(each.long() for each in classes))
        return NGramBlockHMM(words, ngram, self.weights())

    @property
    def _num_classes(self) -> tuple[int, int]:
        return len(self.block_class), len(self.symbol_class)

    def weights(self) -> NGramWeights:
        """Logits of the weights of the n-gram."""
        return NGramWeights(
            self.block_class.unsqueeze(-1) + self.block_before,
            self.symbol_class.unsqueeze(-1) + self.symbol_block,
        )


def _check_classes(column: int, classes: Tensor, size: int) -> None:
    """Raise unless a column of covariates holds whole numbers below ``size``."""
    wrong = ~((classes >= 0) & (classes < size) & (classes == classes.round()))  # also NaN
    if bool(wrong.any()):
        raise ValueError(
            f"covariates must hold classes in column {column}, whole numbers from 0 to {size - 1}; "
            f"got {classes[wrong][0].item():g}. NGramMixture takes the numbers of classes."
        )
