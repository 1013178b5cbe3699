"""Small data sets, simulated or bundled with Python.

They are simulated from known parameters (:func:`casino`, :func:`diverse_toy`), or are the prose
that comes with Python (:func:`english_text`). Whatever is random takes a ``torch.Generator`` on
the CPU; without one it takes torch's global generator.

N sequences have up to T steps, K states, V symbols.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from .._checks import names_checked
from ..ops.markov import sample_path
from .readers import Corpus, Entry, corpus_of, plain, read_characters
from .sequences import Sequences
from .vocabulary import LETTERS, Vocabulary


def english_text() -> str:
    """English prose that comes with Python: the language reference behind ``help()``.

    One paragraph per line, about 300,000 characters. Headings, code and grammar are left out by
    one rule: prose begins with a capital letter and ends as a sentence does. The text differs a
    little between versions of Python.
    """
    from pydoc_data.topics import topics

    paragraphs = (
        " ".join(paragraph.split())
        for topic in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[topic])
    )
    prose = (p for p in paragraphs if re.fullmatch(r"(\* )?[A-Z][^>]*[.:!?]", p))
    return re.sub(r'(?m)^\* |[*"`\u2018\u201c\u201d]', "", "\n".join(prose).replace("\u2019", "'"))


def english_letters(num_characters: int | None = None, chunk: int = 100) -> Corpus:
    """Letters and spaces of :func:`english_text`, 27 symbols, in pieces of equal length.

    Args:
        num_characters: How many, from the beginning; by default, and at most, all.
        chunk: Length T of each piece; the last may be shorter.
    """
    alphabet = LETTERS + " "
    return read_characters(plain(english_text(), alphabet)[:num_characters], alphabet, chunk)


def english_words(max_size: int | None = 2000) -> Corpus:
    """Words of :func:`english_text`, lower-cased, a sentence at a time, without punctuation.

    Each sentence ends in ``<eos>``.

    Args:
        max_size: Size of the vocabulary; words rarer than those in it become ``<unk>``.
    """
    sentences = re.split(r"(?<=[.:!?])\s+(?=[A-Z])", english_text())
    words = (re.findall("[a-z]+(?:'[a-z]+)*", s.lower()) for s in sentences)
    rows = [Entry(line, [*found, "<eos>"]) for line, found in enumerate(words, 1) if found]
    count = functools.partial(Vocabulary.from_counts, max_size=max_size, unknown="<unk>")
    return corpus_of("english_text()", rows, count)


def casino_parameters() -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the dishonest casino: initial, transition ``(2, 2)``, emission ``(2, 6)``.

    State 0 is the fair die. The loaded one shows six every other time. The first die is drawn
    from the stationary distribution, which the book leaves open.

    References:
        Biological Sequence Analysis (Durbin et al., 1998), section 3.2
    """
    initial = torch.tensor([2 / 3, 1 / 3])
    transition = torch.tensor([[0.95, 0.05], [0.1, 0.9]])
    emission = torch.tensor([[1 / 6] * 6, [0.1] * 5 + [0.5]])
    return initial, transition, emission


@names_checked
def casino(
    num_sequences: int, num_steps: int, generator: torch.Generator | None = None
) -> Sequences:
    """Simulate the dice of the dishonest casino, with the hidden states as labels.

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
    return sample_symbols(casino_parameters(), (num_sequences, num_steps), generator)


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
    chain = torch.tensor(DIVERSE_INITIAL), torch.tensor(DIVERSE_TRANSITION)
    states = _sample_states(*chain, (num_sequences, num_steps), generator)
    noise = torch.randn(states.shape, generator=generator)
    values = torch.tensor(DIVERSE_MEANS)[states] + deviation * noise
    return Sequences(values, torch.full((num_sequences,), num_steps), labels=states)


def sample_symbols(
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
    first = torch.multinomial(initial, num_sequences, True, generator=generator)

    def step(_: int, states: Tensor) -> Tensor:
        return torch.multinomial(transition[states], 1, generator=generator).squeeze(-1)

    return sample_path(first, num_steps, step)
