"""The largest singular values of a transition matrix whose rows are computed some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyrohmm import HMM, BlockHMM
from pyrohmm.ops.blocks.inner_products import InnerProductTransition

CHUNK = 1 << 22  # transition probabilities that exist at one time


class TransitionSpectrum(NamedTuple):
    r"""The largest singular values of a transition matrix A.

    Attributes:
        singular_values: ``(n,)`` float64, falling.
        squares: The sum of the squares of all K, :math:`\lVert A \rVert_F^2`.
    """

    singular_values: Tensor
    squares: float

    @property
    def stable_rank(self) -> float:
        """Sum of the squared singular values over the largest square: from 1 to the rank of A."""
        return self.squares / float(self.singular_values[0]) ** 2

    def effective_rank(self, share: float = 0.99) -> int | None:
        """Number of singular values with this share of the sum of squares; None if more than n.

        Args:
            share: Above 0, at most 1.
        """
        reached = self.singular_values.square().cumsum(0) / self.squares >= share - 1e-12
        return int(reached.byte().argmax()) + 1 if bool(reached.any()) else None


def transition_spectrum(
    hmm: HMM,
    num_values: int = 256,
    num_iterations: int = 4,
    generator: torch.Generator | None = None,
) -> TransitionSpectrum:
    """Singular values of the transition matrix, whose rows are computed some at a time.

    Subspace iteration from a random start (Halko, Martinsson and Tropp, 2011,
    https://arxiv.org/abs/0909.4061): K² D operations for each iteration, and memory for
    2 K (n + 10) numbers. Singular values are exact where K is at most n + 10, and are never
    overestimated otherwise: those that are close to the first one left out come out too small.

    Args:
        hmm: Without batch dimensions, and with one transition matrix for all steps.
        num_values: n, how many singular values are wanted; all K if there are fewer.
        num_iterations: More make the smallest of them more accurate.
        generator: Source of randomness on the CPU; torch's global one by default.

    Raises:
        ValueError: If there are several transition matrices.

    Example:
        >>> sticky, even = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log(), torch.full((2,), 0.5).log()
        >>> hmm = HMM(even, sticky, Categorical(torch.eye(2)), torch.tensor([1]))
        >>> found = transition_spectrum(hmm)  # eigenvalues 1 and 0.8
        >>> found.singular_values, round(found.stable_rank, 2), found.effective_rank(0.9)
        (tensor([1.0000, 0.8000], dtype=torch.float64), 1.64, 2)
    """
    rows, size = _rows_of(hmm), hmm.num_states
    width = min(size, num_values + 10)
    with torch.no_grad():
        basis = torch.randn(size, width, dtype=torch.float64, generator=generator)
        basis = basis.to(hmm.log_initial.device)
        for _ in range(num_iterations):
            basis = torch.linalg.qr(basis).Q
            basis = sum(part.mT @ (part @ basis) for part in _parts(rows, size))  # A^T A
        basis = torch.linalg.qr(basis).Q
        images, squares = [], 0.0
        for part in _parts(rows, size):
            images.append(part @ basis)
            squares += float(part.square().sum())
        values = torch.linalg.svdvals(torch.cat(images))[:num_values]
    return TransitionSpectrum(values.cpu(), squares)


def _rows_of(hmm: HMM) -> Callable[[Tensor], Tensor]:
    """A function that computes log-probabilities ``(n, K)`` of transitions from some states."""
    if isinstance(hmm, BlockHMM) and isinstance(hmm.transition, InnerProductTransition):
        hmm.check_constant("transition_spectrum")
        return hmm.transition.rows
    matrix = hmm.log_transition
    if matrix.dim() != 2:
        raise ValueError(
            f"hmm must have one transition matrix (K, K); its shape is {tuple(matrix.shape)}."
        )
    return lambda states: matrix[states]


def _parts(rows: Callable[[Tensor], Tensor], size: int) -> Iterator[Tensor]:
    """Consecutive rows of the matrix of probabilities, in float64."""
    for states in torch.arange(size).split(max(1, CHUNK // size)):
        yield rows(states).double().exp()
