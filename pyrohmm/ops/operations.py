"""``Backend``: the operations that torch and Numba implement.

Tensors of dense chains are time-major: T steps of G groups of n sequences with K states, and each
group has transition matrices ``(S, G, K, K)`` with S = 1 or T - 1 (:class:`.chain.Chain`).
Results are written into the tensors that are named last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from .blocks.plan import BlockChain
from .chain import Chain
from .numpy_clusters import Tables, Terms, Words
from .segment_chain import SegmentChain


class Backend(ABC):
    """One implementation of each operation."""

    @abstractmethod
    def take_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows ``(M, K)`` of ``table`` ``(V, K)`` at the integers ``rows`` ``(M,)``."""

    @abstractmethod
    def add_rows(self, values: Tensor, rows: Tensor, out: Tensor) -> None:
        """Add each of ``values`` ``(M, K)`` to the row of ``out`` ``(V, K)`` that ``rows`` says."""

    @abstractmethod
    def add_products(self, weights: Tensor, rows: Tensor, out: Tensor) -> None:
        """Add the products of ``weights`` ``(*S, N, K)`` and ``rows`` ``(*S, N, F)``, over all N.

        They are of float32, and ``out`` ``(*S, K, F)`` and every sum of float64.
        """

    @abstractmethod
    def forward(
        self, initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor,
        limits: tuple[float, float, float], alpha: Tensor, total: Tensor, evidence: Tensor,
        exact: Tensor,
    ) -> Tensor:  # fmt: skip
        """Scaled forward messages: see :class:`.message_passing.Messages`.

        Args:
            initial: ``(G, n, K)``, probabilities.
            transition: ``(S, G, K, K)``, probabilities.
            likelihood: ``(T, G, n, K)``, log.
            lengths: ``(G, n)``, on the CPU.
            limits: Smallest positive probability of the chain, or -1 if no step is watched; twice
                the smallest normal number, above which nothing was raised to it; what a product
                must be above to be surely exact.
            alpha: ``(T, G, n, K)``, filtered probabilities; zero where padded or not exact.
            total: ``(T, G, n)``, norms of the steps.
            evidence: ``(G, n)``, log, float64.
            exact: ``(G, n)``, set to False where numbers left their range.

        Returns:
            The likelihoods in the form in which :meth:`backward` reads them.
        """

    @abstractmethod
    def backward(
        self, transition: Tensor, seen: Tensor, lengths: Tensor, watched: bool,
        factor: Tensor | None, alpha: Tensor, total: Tensor, exact: Tensor, gamma: Tensor,
        message: Tensor,
    ) -> None:  # fmt: skip
        """Smoothed marginals ``gamma`` and backward messages, both times ``factor`` ``(G, n)``.

        ``seen``, ``alpha``, ``total`` are those of :meth:`forward`; ``exact`` is cleared, and the
        results are zero, where numbers leave their range.
        """

    @abstractmethod
    def log_space(
        self, chain: Chain, with_posterior: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As :func:`.message_passing.in_log_space`, for a chain in float64."""

    @abstractmethod
    def viterbi(self, chain: Chain, best: Tensor) -> None:
        """Most probable paths ``best`` ``(T, G, n)``; zeros at padded steps are left there."""

    @abstractmethod
    def sample_states(
        self, messages: Tensor, transposed: Tensor, lengths: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        """Sample paths ``states`` ``(S, T, G, n)`` backwards, from log filtered ``messages``.

        ``transposed`` is log p(z_{t+1} | z_t) with row = to; ``uniform`` ``(S, T, G, n)`` numbers
        from 0 to 1 decide.
        """

    @abstractmethod
    def segment_forward(self, chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
        """Forward messages of a chain with durations, in logarithms.

        Args:
            chain: The arguments.
            filtering: Whether to filter states: as if each step were the last, by the weights
                ``final`` and ``entire``.

        Returns:
            Of segments that begin at each step and of those that end there, both together with
            the observations before and in them, ``(N, T, K)``; the log evidence ``(N,)``; and log
            p(x_{1:t}, z_t) ``(N, T, K)``, or an empty tensor. Padded steps hold anything.
        """

    @abstractmethod
    def segment_backward(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        """Derivatives of the evidences times ``weight`` ``(N,)`` by the tensors of the chain.

        ``arrive``, ``ends`` and ``evidence`` are those of :meth:`segment_forward`.
        """

    @abstractmethod
    def segment_viterbi(self, chain: SegmentChain, best: Tensor) -> None:
        """Most probable paths ``best`` ``(N, T)``; zeros at padded steps are left there."""

    @abstractmethod
    def segment_sample(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        """Sample paths ``states`` ``(S, N, T)`` backwards, from the messages of the forward pass.

        ``uniform`` ``(S, N, T, 2)``, numbers from 0 to 1, decide on state and duration.
        """

    @abstractmethod
    def block_evidence(self, chain: BlockChain) -> tuple[Tensor, Tensor]:
        """Log evidence ``(N,)`` in the order of the plan, and where it is exact; differentiable."""

    @abstractmethod
    def block_final_state(self, chain: BlockChain) -> Tensor:
        """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``, in the order of the plan."""

    @abstractmethod
    def enter_cluster(self, tables: Tables, terms: Terms, slot: int) -> None:
        """Update ``tables`` for a new cluster whose counts stand in ``slot``."""

    @abstractmethod
    def merge_clusters(self, tables: Tables, terms: Terms, keep: int, gone: int) -> None:
        """Merge cluster ``gone`` into ``keep``, of lower rank."""

    @abstractmethod
    def best_merge(self, tables: Tables, terms: Terms) -> tuple[int, int]:
        """The pair whose merge loses least; the one with the more frequent word first."""

    @abstractmethod
    def sweep_clusters(
        self, words: Words, labels: np.ndarray, counts: np.ndarray, marginals: np.ndarray,
        sizes: np.ndarray, terms: Terms,
    ) -> int:  # fmt: skip
        """Give each word in turn its best cluster; return the number that changed."""
