"""Networks and tables that make embeddings of states and symbols."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from ..ops.blocks.states import Blocks
from ..ops.products import take_rows

USES = ("start", "leave", "enter", "emit")  # of the embedding of a state


class Residual(PyroModule):
    r"""A residual block whose last operation is a layer normalisation (eq. 3).

    .. math:: f(E) = g(\mathrm{ReLU}(E W_1)), \quad
              g(D) = \mathrm{LayerNorm}(\mathrm{ReLU}(D W_2) + D)

    Args:
        dim: D, of what goes in and of what comes out.

    Example:
        >>> Residual(8)(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = PyroModule[nn.Linear](dim, dim)
        self.outer = PyroModule[nn.Linear](dim, dim)
        self.norm = PyroModule[nn.LayerNorm](dim)

    def forward(self, vectors: Tensor) -> Tensor:
        """Transform ``(*, D)``."""
        hidden = self.inner(vectors).relu()
        return self.norm(self.outer(hidden).relu() + hidden)


class StateEmbedding(PyroModule):
    """Embeddings of states: one table, or one of states and one of blocks, half of each.

    Args:
        num_states: K.
        dim: D.
        blocks: With these the embedding is factored: D / 2 numbers of the state, and D / 2 of its
            block, which a :class:`Residual` joins.
        scale: Initial standard deviation; by default :math:`D^{-1/2}`.

    Raises:
        ValueError: If it is to be factored, and D is odd or the blocks overlap.
    """

    def __init__(
        self,
        num_states: int,
        dim: int,
        blocks: Blocks | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        scale = dim**-0.5 if scale is None else scale
        state_dim = dim
        if blocks is not None:
            if dim % 2 or not blocks.disjoint:
                raise ValueError(
                    f"factored embeddings need an even dimension and disjoint blocks; got {dim} "
                    f"and {blocks}."
                )
            state_dim = dim // 2
            self.block = nn.Parameter(scale * torch.randn(blocks.num_blocks, state_dim))
            owner = torch.arange(blocks.num_blocks).repeat_interleave(blocks.sizes)
            self.register_buffer("owner", owner, persistent=False)
        self.state = nn.Parameter(scale * torch.randn(num_states, state_dim))

    def forward(self, states: Tensor | None) -> Tensor:
        """The embeddings of ``states``, or of all, ``(n, D)``."""
        vectors = self.state if states is None else take_rows(self.state, states)
        if "owner" not in self._buffers:
            return vectors
        block = take_rows(self.block, self.owner if states is None else self.owner[states])
        return torch.cat([block, vectors], -1)


class SymbolEmbedding(PyroModule):
    """A vector for each symbol, ``(V, D)``, and nothing else.

    Args:
        num_symbols: V.
        dim: D.
    """

    def __init__(self, num_symbols: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_symbols, dim).uniform_(-1, 1) * dim**-0.5)

    def forward(self) -> Tensor:
        """The vectors."""
        return self.table


class CharCNN(PyroModule):
    r"""A vector for each word, from its letters: convolutions, and a maximum over positions.

    Every word is spelt with a mark before and after it. For each width there are filters of that
    many letters, whose maxima over the word go through tanh. Shorter words are padded with zeros.

    Args:
        words: The V words.
        dim: D.
        char_dim: Of the embeddings of letters.
        widths: Of the filters.
        num_filters: For each width; the values of all filters are then joined, and go through a
            highway layer and a linear map to D numbers. By default there are D for each width, and
            they are summed.

    Example:
        >>> CharCNN(["the", "cat", "cats"], dim=6)().shape
        torch.Size([3, 6])
    """

    def __init__(
        self,
        words: Sequence[str],
        dim: int,
        *,
        char_dim: int = 16,
        widths: Sequence[int] = (1, 2, 3, 4, 5, 6, 7),
        num_filters: int | None = None,
    ) -> None:
        super().__init__()
        if len(words) == 0 or not all(isinstance(word, str) and word for word in words):
            raise ValueError("words must be strings of at least one letter, and at least one word.")
        letters = sorted({letter for word in words for letter in word})
        lengths = torch.tensor([len(word) + 2 for word in words])
        order = lengths.argsort(stable=True)
        self.lengths, self.counts = (part.tolist() for part in lengths.unique(return_counts=True))
        code = {letter: number for number, letter in enumerate(letters, 2)}  # 0, 1: marks
        spelt = [[0, *(code[letter] for letter in words[word]), 1] for word in order.tolist()]
        spellings = torch.tensor([number for word in spelt for number in word])
        self.register_buffer("spellings", spellings, persistent=False)  # shortest words first
        self.register_buffer("place", order.argsort(), persistent=False)
        self.letter = nn.Parameter(torch.randn(len(letters) + 2, char_dim))
        if num_filters is not None:
            total = num_filters * len(widths)
            self.gate = PyroModule[nn.Linear](total, total)
            self.carry = PyroModule[nn.Linear](total, total)
            self.out = PyroModule[nn.Linear](total, dim, bias=False)
        self.joined = num_filters is not None
        self.filters = PyroModule[nn.ModuleList](
            [PyroModule[nn.Conv1d](char_dim, num_filters or dim, width) for width in widths]
        )

    def forward(self) -> Tensor:
        """The vectors, ``(V, D)``."""
        letters = self.letter[self.spellings]
        sizes = [count * length for count, length in zip(self.counts, self.lengths)]
        groups = [
            self._filtered(part.view(count, length, -1).mT)
            for part, count, length in zip(letters.split(sizes), self.counts, self.lengths)
        ]
        joined = torch.cat(groups)[self.place]
        if not self.joined:
            return joined
        gate = self.gate(joined).sigmoid()
        return self.out(gate * self.carry(joined).relu() + (1 - gate) * joined)

    def _filtered(self, letters: Tensor) -> Tensor:
        """Maxima of the filters over words of one length, ``(n, char_dim, L)``."""
        values = []
        for kernel in self.filters:
            short = max(0, kernel.kernel_size[0] - letters.size(-1))
            values.append(kernel(nn.functional.pad(letters, (0, short))).amax(-1).tanh())
        return torch.cat(values, -1) if self.joined else torch.stack(values).sum(0)
