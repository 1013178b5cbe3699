"""Counting, encoding and sampling of sentences; each ends in ``<eos>``, a word."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .._checks import check_kind, check_range, check_size
from ..data.parts import StoredSequences, parts_of
from ..data.readers import FilePath
from ..data.sequences import Sequences
from ..data.vocabulary import Vocabulary
from ..distributions.block_hmm import BlockHMM
from ..ops.blocks.inner_products import InnerProductTransition

END = "<eos>"
UNKNOWN = "<unk>"
Sentences = Sequences | StoredSequences
AT_ONCE = 10_000  # lines that are encoded as one batch


def count_words(
    lines: Iterable[str], min_count: int = 1, max_size: int | None = None
) -> Vocabulary:
    """Vocabulary of the words of some lines by falling count, after ``<unk>`` and ``<eos>``.

    Args:
        lines: Sentences, their words separated by white space.
        min_count: Words that occur less often are left out: ``<unk>`` stands for them.
        max_size: Largest V, with ``<unk>`` and ``<eos>``; the rarest words give way.

    Raises:
        TypeError: If ``lines`` is a single string.
        ValueError: If there is no line, or ``max_size`` leaves no room for a word.

    Example:
        >>> list(count_words(["a rose is a rose", "is a rose"], min_count=3))
        ['<unk>', '<eos>', 'a', 'rose']
    """
    rows = split_words("lines", lines)
    check_size("min_count", min_count)
    if max_size is not None:
        check_size("max_size", max_size, 3)  # the marks and a word
    counts: Counter[str] = Counter()
    for words in rows:
        counts.update(words)
        counts[END] += 1
    if not counts:
        raise ValueError("lines is empty; wanted at least one sentence. Look at the file.")
    counts[END] = counts.total() + min_count  # first, and never left out
    return Vocabulary.from_counts(counts, min_count, max_size, UNKNOWN)


def encode(lines: Iterable[str], vocabulary: Vocabulary, name: str = "lines") -> Sequences:
    """Encode sentences, each with ``<eos>`` at its end; a blank line is an empty sentence.

    Args:
        lines: Their words are separated by white space.
        vocabulary: Of the words, ``<eos>`` among them.
        name: Of the argument, in errors.

    Raises:
        TypeError: If ``lines`` is a single string, or does not hold strings.
        ValueError: If there is no line, ``<eos>`` is written in one, or a word is not in a
            vocabulary that has nothing for the unknown.

    Example:
        >>> encode(["a rose", ""], count_words(["a rose is a rose"])).values
        tensor([[2, 3, 1],
                [1, 0, 0]])
    """
    parts = [*_encoded(name, lines, vocabulary)]
    if not parts:
        raise ValueError(f"{name} is empty; wanted at least one sentence. Look at the file.")
    codes, lengths = zip(*parts)
    return Sequences.from_concatenated(torch.cat(codes), torch.cat(lengths))


def write_corpus(path: FilePath, lines: Iterable[str], vocabulary: Vocabulary) -> StoredSequences:
    """Encode sentences into a file of four bytes a token, read from there by :func:`open_corpus`.

    Lines may be those of an open file: only some are in memory at a time. Of several processes one
    writes, and all open the file.

    Args:
        path: The file, which is replaced.
        lines: Their words are separated by white space.
        vocabulary: As for :func:`encode`.

    Raises:
        TypeError, ValueError: As :func:`encode`.

    Example:
        >>> import os, tempfile
        >>> lines = ["a rose", ""]
        >>> path = os.path.join(tempfile.mkdtemp(), "roses.tokens")
        >>> data = language.write_corpus(path, lines, language.count_words(lines))
        >>> len(data), data.num_observed, os.path.getsize(path)
        (2, 4, 16)
    """
    begun = f"{os.fspath(path)}.part"
    with open(begun, "wb") as file:
        for codes, _ in _encoded("lines", lines, vocabulary):
            file.write(codes.int().numpy().tobytes())
    os.replace(begun, path)
    return open_corpus(path, vocabulary)


def open_corpus(path: FilePath, vocabulary: Vocabulary) -> StoredSequences:
    """Sentences in a file of codes, which is mapped into memory and not read as a whole.

    Args:
        path: 32-bit integers, one sentence after the other, each with that of ``<eos>`` at its end:
            as :func:`write_corpus` writes them.
        vocabulary: That they were encoded with.

    Raises:
        ValueError: If there is no sentence, or something after the last ``<eos>``.
    """
    codes = np.memmap(path, np.int32, "r")
    ends = np.flatnonzero(codes == vocabulary.index(END))
    return StoredSequences(codes, np.diff(ends, prepend=-1))


def _encoded(
    name: str, lines: Iterable[str], vocabulary: Vocabulary
) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes and lengths of some sentences at a time."""
    rows, done = split_words(name, lines), 0
    while some := list(islice(rows, AT_ONCE)):
        for number, words in enumerate(some, done + 1):
            if END in words:
                raise ValueError(
                    f"{name} must not have {END} in them, which is added at the end of each; "
                    f"sentence {number} has. Take it out."
                )
            words.append(END)
        done += len(some)
        lengths = torch.tensor([*map(len, some)])
        yield vocabulary.encode(word for words in some for word in words), lengths


def as_text(data: Sequences, num_pieces: int = 1) -> Sequences:
    """Concatenate the tokens of all sequences, and cut them into pieces of equal length.

    Args:
        data: Sequences without gaps.
        num_pieces: The last may be shorter than the others.

    Example:
        >>> as_text(Sequences.from_list([[3, 1], [4, 5, 1]]), 2).values
        tensor([[3, 1, 4],
                [5, 1, 0]])
    """
    tokens, _ = data.to_concatenated()
    return Sequences.from_list(tokens.split(-(-len(tokens) // num_pieces)))


def stored_text(data: StoredSequences) -> StoredSequences:
    """The tokens of all sequences as one text, of which no more than a piece is in memory."""
    size, most = int(data.lengths.sum()), data.max_steps
    sizes = [min(most, size - begin) for begin in range(0, size, most)]
    return StoredSequences(data.values, sizes, max_steps=most)


def split_words(name: str, lines: Iterable[str]) -> Iterator[list[str]]:
    """Split each line into words; raise at a single string, whose letters would be lines."""
    text = f"{name} must be lines of text, such as a list of str; got a"
    if isinstance(lines, str | bytes):
        raise TypeError(f"{text} single {type(lines).__name__}. Put it into a list.")
    for line in lines:
        if not isinstance(line, str):
            raise TypeError(f"{text} {type(line).__name__} in it. Join words: ' '.join(words).")
        yield line.removeprefix("\ufeff").split()  # a byte-order mark may begin a file


def check_ends(name: str, vocabulary: Vocabulary, data: Sentences) -> None:
    """Raise unless each sentence ends in ``<eos>``, has none before, and lacks no step."""
    check_kind(name, data, Sequences | StoredSequences, "Sequences, as encode makes them")
    for part in parts_of(data):
        if part.has_gaps:
            text = f"{name} must have no missing steps"
            raise ValueError(f"{text}. Take out the sentences with some.")
        codes, lengths = part.to_concatenated()
        check_range(f"codes of words in {name}", codes, len(vocabulary), "V - 1")
        ends = codes == vocabulary.encode([END]).to(codes.device)
        last = ends[part.firsts + lengths - 1]
        if int(ends.sum()) != len(part) or not bool(last.all()):
            raise ValueError(
                f"{name} must have {END} at the end of each sentence, and only there. Make them "
                "with encode, or with readers.read_sentences."
            )


# Given words before ------------------------------------------------------------------------------


def next_states(hmm: BlockHMM, codes: Tensor) -> Tensor:
    """Log-probabilities of the next state ``(K,)`` after words ``(n,)``, n = 0 included."""
    if not len(codes):
        return hmm.log_initial
    transition = cast(InnerProductTransition, hmm.transition)
    values = codes.unsqueeze(0).to(hmm.log_initial.device)
    alone = cast(BlockHMM, hmm.replace(lengths=torch.tensor([len(codes)])))
    ending = alone.final_state(values)
    possible = ending.states[0] >= 0
    rows = transition.rows(ending.states[0][possible])  # (n, K)
    log_probs = ending.log_probs[0][possible].unsqueeze(-1)
    return (log_probs.to(rows) + rows).logsumexp(0).log_softmax(-1)


def sample_sentences(
    hmm: BlockHMM, log_first: Tensor, max_words: int, end: int, generator: torch.Generator | None
) -> tuple[list[Tensor], Tensor]:
    """Sample sentences as codes, in a batch; only rows of A in use are computed.

    Args:
        hmm: Its transitions are inner products.
        log_first: ``(n, K)``, log-probabilities of the first state of each of n sentences.
        max_words: Sentences that have not ended after so many words are cut off.
        end: Code of ``<eos>``, which is left out of them.
        generator: Source of randomness on the CPU; torch's global one by default.

    Returns:
        The n sentences, and the last state of each ``(n,)``, which emitted ``<eos>`` if it ended.
    """
    count = len(log_first)
    words = torch.full((count, max_words), end)
    unfinished = torch.arange(count)  # sentences that have not ended
    states = choose(log_first, generator)
    last = states.clone()
    for step in range(max_words):
        if step > 0:
            rows = hmm.transition.rows(states)  # type: ignore[union-attr]
            states = choose(rows, generator)
        words[unfinished, step] = choose(emitted_by(hmm, states), generator)
        last[unfinished] = states
        continues = words[unfinished, step] != end
        unfinished, states = unfinished[continues], states[continues]
        if len(unfinished) == 0:
            break
    lengths = (words != end).sum(-1)
    return [row[:length] for row, length in zip(words, lengths.tolist())], last


def emitted_by(hmm: BlockHMM, states: Tensor) -> Tensor:
    """Log-probabilities of all words in some states ``(n,)`` on the CPU, ``(n, V)``."""
    owner = hmm.blocks.owner[states]
    place = states - hmm.blocks.starts[owner]
    emitted = hmm.log_emission[:, place.to(hmm.log_emission.device)].mT
    impossible = hmm.blocks.symbol_block != owner.unsqueeze(-1)
    return emitted.masked_fill(impossible.to(emitted.device), -torch.inf)


def choose(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample a column for each row of unnormalised log-probabilities, ``(n,)`` on the CPU."""
    return torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator).squeeze(-1)
