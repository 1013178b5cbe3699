"""Data sets that are simulated: the casino, and the toys of the papers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops.sampling import sample_path
from ..ops.stationary import stationary
from .sequences import Sequences


def casino_parameters() -> tuple[Tensor, Tensor, Tensor]:
    """Initial ``(2,)``, transition ``(2, 2)`` and emission ``(2, 6)`` of the dishonest casino.

    State 0 is the fair die. The loaded one shows six every other time. The first die is drawn
    from the stationary distribution, which the book leaves open.

    References:
        Biological Sequence Analysis (Durbin et al., 1998), section 3.2
    """
    initial = torch.tensor([2 / 3, 1 / 3])
    transition = torch.tensor([[0.95, 0.05], [0.1, 0.9]])
    emission = torch.tensor([[1 / 6] * 6, [0.1] * 5 + [0.5]])
    return initial, transition, emission


def casino(
    num_sequences: int, num_steps: int, generator: torch.Generator | None = None
) -> Sequences:
    """Roll the dice of :func:`casino_parameters`.

    Args:
        num_sequences: N.
        num_steps: T.
        generator: Source of randomness.

    Returns:
        Values ``(N, T)``, faces from 0 to 5; labels ``(N, T)``, 1 where the die was loaded.

    Example:
        >>> casino(2, 300, torch.Generator().manual_seed(0))
        Sequences(2 sequences of up to 300 steps, 600 observed, values torch.int64 (2, 300) on cpu)
    """
    return _sample(casino_parameters(), (num_sequences, num_steps), generator)


DIVERSE_INITIAL = (0.0101, 0.0912, 0.2421, 0.0652, 0.5914)
DIVERSE_MEANS = (1.0, 2.0, 3.0, 4.0, 5.0)
DIVERSE_TRANSITION = (  # rows are 0.5307 apart, Bhattacharyya's distance averaged over pairs
    (0.80, 0.05, 0.05, 0.05, 0.05),
    (0.40, 0.05, 0.05, 0.05, 0.45),
    (0.05, 0.80, 0.05, 0.05, 0.05),
    (0.05, 0.05, 0.80, 0.05, 0.05),
    (0.05, 0.05, 0.05, 0.80, 0.05),
)


def diverse_toy(
    num_sequences: int = 300,
    num_steps: int = 6,
    deviation: float = 0.025**0.5,
    generator: torch.Generator | None = None,
) -> Sequences:
    """Draw the toy data of the diversified HMM: five states, normal emissions around 1 to 5.

    The paper shows its transition matrix as a picture only. ``DIVERSE_TRANSITION`` is ours: it
    has the paper's mean distance between rows, 0.531, and with ``DIVERSE_INITIAL``, which is the
    paper's, the five states are about equally frequent in six steps, as they are there.

    Args:
        num_sequences: N.
        num_steps: T.
        deviation: Standard deviation of the emissions. The paper prints 0.025 for what it calls
            variances, so the default is its root; its sweep goes up to a variance of 4.925.
        generator: Source of randomness.

    Returns:
        Values ``(N, T)``, real; labels ``(N, T)``, 0 to 4.

    References:
        Diversified Hidden Markov Models for Sequential Labeling (Qiao et al., 2015),
        https://arxiv.org/abs/1904.03170
    """
    initial, transition = torch.tensor(DIVERSE_INITIAL), torch.tensor(DIVERSE_TRANSITION)
    states = _sample_states(initial, transition, (num_sequences, num_steps), generator)
    noise = torch.randn(states.shape, generator=generator)
    values = torch.tensor(DIVERSE_MEANS)[states] + deviation * noise
    return Sequences(values, torch.full((num_sequences,), num_steps), labels=states)


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
    if min(num_states, num_symbols) < 1 or not concentration > 0:
        raise ValueError(
            "num_states, num_symbols and concentration must be positive; got "
            f"{num_states}, {num_symbols} and {concentration}."
        )
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    random = np.random.default_rng(seed)  # torch's Dirichlet knows only the global generator
    for _ in range(100):
        transition, emission = (
            torch.from_numpy(random.dirichlet([concentration] * size, num_states))
            for size in (num_states, num_symbols)
        )
        probs = stationary(transition.log(), check=False), transition, emission
        if not probs[0].isfinite().all():
            continue  # several recurrent classes
        dtype = torch.get_default_dtype()
        hmm = probs[0].to(dtype), transition.to(dtype), emission.to(dtype)
        train, test = (_sample(hmm, (num_sequences, num_steps), generator) for _ in range(2))
        if all(len(data.values.unique()) == num_symbols for data in (train, test)):
            return DirichletToy(*hmm, train, test)
    raise ValueError(
        f"in 100 draws of {num_sequences} sequences of {num_steps} steps none showed all "
        f"{num_symbols} symbols in both sets. Raise num_sequences, num_steps or concentration."
    )


def _sample(
    hmm: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], generator: torch.Generator | None
) -> Sequences:
    """Symbols ``(N, T)`` of an HMM with (initial, transition, emission); labels are the states."""
    states = _sample_states(*hmm[:2], shape, generator)
    symbols = torch.multinomial(hmm[2][states.flatten()], 1, generator=generator)
    return Sequences(symbols.view(shape), torch.full(shape[:1], shape[1]), labels=states)


def _sample_states(
    initial: Tensor, transition: Tensor, shape: tuple[int, int], generator: torch.Generator | None
) -> Tensor:
    """Paths of a Markov chain, ``shape`` (N, T)."""
    num_sequences, num_steps = shape
    if min(shape) < 1:
        raise ValueError(
            f"num_sequences and num_steps must be at least 1; got {num_sequences} and {num_steps}."
        )
    return sample_path(
        torch.multinomial(initial, num_sequences, True, generator=generator),
        num_steps,
        lambda _, states: torch.multinomial(transition[states], 1, generator=generator).squeeze(-1),
    )
