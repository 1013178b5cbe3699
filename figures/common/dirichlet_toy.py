"""A hidden Markov model drawn at random, and data drawn from it, as in the papers' experiments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrohmm import Sequences
from pyrohmm.data.datasets import sample_symbols
from pyrohmm.ops.markov import stationary


class DirichletToy(NamedTuple):
    """An HMM drawn at random and data drawn from it.

    Attributes:
        initial: ``(K,)``, the stationary distribution.
        transition: ``(K, K)``, row = from, column = to.
        emission: ``(K, V)``.
        train: Values and labels ``(N, T)``.
        test: The same, drawn independently.
    """

    initial: Tensor
    transition: Tensor
    emission: Tensor
    train: Sequences
    test: Sequences


def dirichlet_toy(
    num_states: int,
    num_symbols: int,
    concentration: float = 0.1,
    num_sequences: int = 10,
    num_steps: int = 200,
    generator: torch.Generator | None = None,
) -> DirichletToy:
    """Draw an HMM as the synthetic experiments of the DenseHMM do, and data from it.

    Rows of both matrices come from a symmetric Dirichlet distribution, and the chain is
    stationary. All is drawn anew, at most 100 times, until every symbol occurs in the training
    and in the test set: co-occurrences could otherwise not be compared.

    Args:
        num_states: K.
        num_symbols: V.
        concentration: Parameter of the Dirichlet distribution; rows are sparse below one.
        num_sequences: N, in each of the two sets.
        num_steps: T.
        generator: Source of randomness.

    Raises:
        ValueError: If no draw shows every symbol.

    References:
        DenseHMM: Learning Hidden Markov Models by Learning Dense Representations
        (Sicking et al., 2020), https://arxiv.org/abs/2012.09783
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    random = np.random.default_rng(seed)  # torch's Dirichlet knows only the global generator
    for _ in range(100):
        transition, emission = (
            torch.from_numpy(random.dirichlet([concentration] * size, num_states))
            for size in (num_states, num_symbols)
        )
        initial = stationary(transition.log(), check=False)
        if not initial.isfinite().all():
            continue  # several recurrent classes
        dtype = torch.get_default_dtype()
        hmm = initial.to(dtype), transition.to(dtype), emission.to(dtype)
        train, test = (sample_symbols(hmm, (num_sequences, num_steps), generator) for _ in range(2))
        if all(len(data.values.unique()) == num_symbols for data in (train, test)):
            return DirichletToy(*hmm, train, test)
    raise ValueError(
        f"in 100 draws of {num_sequences} sequences of {num_steps} steps none showed all "
        f"{num_symbols} symbols in both sets. Raise num_sequences, num_steps or concentration."
    )
