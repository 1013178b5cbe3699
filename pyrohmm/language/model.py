r"""``LanguageModel``: sentences in, their probabilities and new sentences out.

A vocabulary, Brown clusters of its words and a :class:`pyrohmm.NeuralHMM` whose blocks of states
belong to the clusters, with one way to fit, evaluate, sample and keep them. Every sentence ends in
``<eos>``, which is predicted and counted like any word, and has a cluster of its own. N sentences
are made of V words in C clusters; there are K states.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from ..analysis.metrics import Perplexity
from ..data import pair_counts
from ..data.batches import batches_in_round, cut_by_steps
from ..data.sequences import Sequences
from ..data.vocabulary import Vocabulary, word_classes
from ..distributions.block_hmm import BlockHMM
from ..infer.map import fit_map
from ..infer.models import MarginalModel
from ..infer.results import Fit
from ..io.persistence import TENSORS, check_directory, read_directory, write_directory
from ..nn.base import in_mode
from ..nn.neural import NeuralHMM
from ..ops import blocks as state_blocks
from ..ops.blocks import Blocks
from . import clusters

END = "<eos>"
UNKNOWN = "<unk>"
AT_ONCE = 256  # sentences that are drawn side by side
STEPS = 8192  # that are evaluated at once
CLASSES = {"function": "word_classes"}  # what stands for the unknown, in a file
WARM = 0.05  # share of all steps in which the learning rate rises


def count_words(
    lines: Iterable[str], min_count: int = 1, max_size: int | None = None
) -> Vocabulary:
    """The words of some lines by falling count, after ``<unk>`` and ``<eos>``, which are always in.

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
    rows = _words("lines", lines)
    check_size("min_count", min_count)
    if max_size is not None and max_size < 3:
        raise ValueError(f"max_size must be at least 3, for {UNKNOWN}, {END} and a word; got "
                         f"{max_size}.")  # fmt: skip
    counts: Counter[str] = Counter()
    for words in rows:
        counts.update(words)
        counts[END] += 1
    if not counts:
        raise ValueError("lines is empty; wanted at least one sentence.")
    counts[END] = counts.total() + min_count  # first, and never left out
    return Vocabulary.from_counts(counts, min_count, max_size, UNKNOWN)


class LanguageModel:
    """Sentences of words, each the path of a neural HMM until it emits ``<eos>``.

    :meth:`from_data` finds clusters and builds a model from them, :meth:`load` reads one. The
    module is on the CPU; ``model.module.to("cuda")`` moves it, and everything follows.

    Args:
        vocabulary: The V words, ``<eos>`` among them.
        blocks: Which states may emit which word; disjoint.
        hidden_dim: D, of embeddings.
        two_level: Whether a move draws the block first; see :class:`pyrohmm.NeuralHMM`.
        dropout: Share of the states of each block that is left out at each training step. It saves
            time, and small texts are not learnt by heart so soon. Of a large text, in a few rounds,
            more is learnt without (``figures/language_models.json``, "no dropout").

    Attributes:
        vocabulary: The V words.
        blocks: Which states may emit which word.
        module: The :class:`pyrohmm.NeuralHMM`.

    Raises:
        ValueError: If ``<eos>`` is not in the vocabulary, or what stands there for the unknown is a
            function other than :func:`pyrohmm.readers.word_classes`, which could not be saved; or
            if blocks overlap or have other words.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> lines = ["a rose is a rose", "a daisy is a daisy", "is a rose a rose"] * 9
        >>> vocabulary = language.count_words(lines)
        >>> data = language.encode(lines, vocabulary)
        >>> model = LanguageModel.from_data(vocabulary, data, 16, 4, hidden_dim=16, dropout=0.25)
        >>> model
        LanguageModel(6 words; 16 states in 4 blocks of 4)
        >>> fit = model.fit(data, num_epochs=20, batch_tokens=80, learning_rate=0.02)
        >>> model.perplexity(["is a daisy a daisy"]).value < 3.5
        True
        >>> set(" ".join(model.generate(4)).split()) <= set(vocabulary)
        True
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        blocks: Blocks,
        hidden_dim: int = 256,
        *,
        two_level: bool = True,
        dropout: float = 0.5,
    ) -> None:
        if END not in vocabulary:
            raise ValueError(f"vocabulary must have {END}, the end of a sentence, among its words.")
        unknown = vocabulary.unknown
        if not (unknown is None or isinstance(unknown, str) or unknown is word_classes):
            raise ValueError(
                "vocabulary must have as unknown one of its words, readers.word_classes or None, "
                f"which can be saved; got {getattr(unknown, '__name__', unknown)}."
            )
        if not blocks.disjoint or blocks.num_symbols != len(vocabulary):
            raise ValueError(
                f"blocks must be disjoint, and of the {len(vocabulary)} words of the vocabulary; "
                f"got {blocks}. Make them with blocks.from_clusters."
            )
        self.vocabulary, self.blocks = vocabulary, blocks
        self._options = {"hidden_dim": hidden_dim, "two_level": two_level, "dropout": dropout}
        self.module = NeuralHMM(
            blocks.num_states, len(vocabulary), hidden_dim,
            blocks=blocks, two_level=two_level, dropout=dropout,
        )  # fmt: skip

    @classmethod
    def from_data(
        cls,
        vocabulary: Vocabulary,
        data: Sequences,
        num_states: int = 4096,
        num_clusters: int = 128,
        hidden_dim: int = 256,
        *,
        mass_power: float = 0.0,
        two_level: bool = True,
        dropout: float = 0.5,
    ) -> LanguageModel:
        """A model that knows nothing yet, whose blocks belong to Brown clusters of the words.

        Args:
            vocabulary: The V words.
            data: Sentences that end in ``<eos>``, as :func:`encode` makes them; only clusters and
                their sizes are found from them.
            num_states: K, divided among the clusters.
            num_clusters: C, as for :func:`find_clusters`.
            hidden_dim: As for the class.
            mass_power: From 0, equally many states for each cluster, to 1, in proportion to how
                often its words occur; see :func:`pyrohmm.clusters.allocate`. With 0.5 the words of
                the Penn Treebank are predicted better, in longer time (one row of
                ``figures/language_models.json``).
            two_level: The same.
            dropout: The same.

        Raises:
            TypeError: If ``data`` are not :class:`Sequences` of integers.
            ValueError: As :func:`find_clusters` and :func:`pyrohmm.clusters.allocate`; or if there
                are more clusters than states.
        """
        check_size("num_clusters", num_clusters)
        if num_clusters > num_states:
            raise ValueError(
                f"num_clusters must be at most num_states = {num_states}; got {num_clusters}."
            )
        assignment = find_clusters(data, vocabulary, num_clusters)
        counts = torch.bincount(data.values[data.exists], minlength=len(vocabulary))
        sizes = clusters.allocate(num_states, assignment, counts, mass_power)
        blocks = state_blocks.from_clusters(assignment, sizes)
        return cls(vocabulary, blocks, hidden_dim, two_level=two_level, dropout=dropout)

    def __repr__(self) -> str:
        low, high = int(self.blocks.sizes.min()), self.blocks.width
        return (
            f"LanguageModel({len(self.vocabulary):,} words; {self.blocks.num_states:,} states in "
            f"{self.blocks.num_blocks} blocks of {low if low == high else f'{low} to {high}'})"
        )

    # Fitting

    def fit(
        self,
        data: Sequences,
        validation: Sequences | None = None,
        *,
        num_epochs: int = 10,
        batch_tokens: int = 2048,
        learning_rate: float = 0.004,
        weight_decay: float = 0.0,
        clip_norm: float | None = 1.0,
        **options: Any,
    ) -> Fit:
        """Maximise the likelihood by AdamW, from where the parameters are.

        A round of minibatches has each sentence once. How many of them there are varies a little
        from round to round; the fit takes ``num_epochs`` times as many steps as a typical round
        has, so that the last round may lack a few or be followed by a few.

        The learning rate rises for the first steps, one in twenty, and falls as a cosine to zero at
        the end. With ``validation``, the parameters that predicted it best are kept. The optimizer
        is torch's fused one, which takes less time.

        Args:
            data: Sentences to learn from, as :func:`encode` makes them.
            validation: Held-out sentences, evaluated after every round and after the last step.
            num_epochs: How many rounds to take, about.
            batch_tokens: Largest number of tokens in a minibatch, padding included.
            learning_rate: The largest.
            weight_decay: Of AdamW.
            clip_norm: As in :func:`pyrohmm.fit_svi`, per token.
            **options: Others of :func:`pyrohmm.fit_svi`: ``validate_every``, ``patience``,
                ``report``, ``checkpoint``, ``average``, ``generator``, ``progress``.

        Raises:
            FloatingPointError: If the loss becomes infinite or NaN.
            TypeError, ValueError: As :func:`pyrohmm.fit_svi`; or if an option is one that this
                method chooses.
        """
        check_size("num_epochs", num_epochs)
        check_size("batch_tokens", batch_tokens)
        own = sorted({"num_steps", "tolerance", "optimizer", "schedule"} & set(options))
        if own:
            raise TypeError(
                f"fit chooses {', '.join(own)} itself. For another, call fit_map with "
                "MarginalModel(model.module)."
            )
        for name, each in (("data", data), ("validation", validation)):
            if each is not None:
                _check_ends(name, self.vocabulary, each)
        num_steps = num_epochs * batches_in_round(data.lengths, batch_tokens)
        return fit_map(
            MarginalModel(self.module),
            data,
            num_steps=num_steps,
            tolerance=None,
            batch_tokens=batch_tokens,
            validation=validation,
            clip_norm=clip_norm,
            optimizer=partial(
                torch.optim.AdamW, lr=learning_rate, weight_decay=weight_decay, fused=True
            ),
            schedule=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=WarmupCosine(num_steps)),
            **options,
        )

    # What it says of sentences

    def encode(self, lines: Iterable[str]) -> Sequences:
        """Codes of sentences, each with ``<eos>`` at its end: :func:`encode`."""
        return encode(lines, self.vocabulary)

    def num_unknown(self, lines: Iterable[str]) -> int:
        """How many words of some lines are not in the vocabulary, each as often as it occurs."""
        rows = _words("lines", lines)
        return sum(word not in self.vocabulary for words in rows for word in words)

    def score(self, sentences: Iterable[str] | Sequences) -> Tensor:
        """Log-probability of each sentence with its ``<eos>``, ``(N,)`` float64, in nats.

        Args:
            sentences: Lines, or what :meth:`encode` makes of them.

        Raises:
            TypeError: If it is a single string, or does not hold strings.
            ValueError: As :func:`encode`; or if a sentence does not end in ``<eos>``, or has steps
                that are missing.
        """
        data = self._coded(sentences)
        _check_ends("sentences", self.vocabulary, data)
        scores = torch.empty(len(data), dtype=torch.float64)
        device = next(self.module.parameters()).device
        with torch.no_grad(), in_mode(False, self.module):
            for chosen in cut_by_steps(data.lengths, data.lengths.argsort(), STEPS):
                part = data[chosen].to(device)
                scores[chosen] = self.module(part.lengths).log_prob(part.values).double().cpu()
        return scores

    def perplexity(self, sentences: Iterable[str] | Sequences) -> Perplexity:
        """Perplexity per token, ``<eos>`` included.

        Args:
            sentences: Lines, or what :meth:`encode` makes of them.

        Raises:
            TypeError, ValueError: As :meth:`score`.
        """
        data = self._coded(sentences)
        return Perplexity.of(self.score(data).sum().item(), data.num_observed)

    def generate(
        self, count: int, generator: torch.Generator | None = None, max_words: int = 100
    ) -> list[str]:
        """Draw sentences, without their ``<eos>``: state by state and word by word, exactly.

        Args:
            count: How many.
            generator: Source of randomness on the CPU; torch's global one by default.
            max_words: Sentences that have not ended after so many words are cut off.
        """
        check_size("count", count)
        check_size("max_words", max_words)
        with torch.no_grad(), in_mode(False, self.module):
            hmm: Any = self.module(torch.tensor([1]))
            parts = [
                _draw(hmm, min(AT_ONCE, count - first), max_words, self._end, generator)
                for first in range(0, count, AT_ONCE)
            ]
        return [" ".join(self.vocabulary.decode(codes)) for part in parts for codes in part]

    def _coded(self, sentences: Iterable[str] | Sequences) -> Sequences:
        if isinstance(sentences, Sequences):
            return sentences
        return _encode("sentences", sentences, self.vocabulary)

    @property
    def _end(self) -> int:
        return int(self.vocabulary.encode([END]))

    # Keeping it

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save everything to a directory, in place of what was saved there before.

        Its two files are those of :func:`pyrohmm.save`: tensors, and plain data for people to read.

        Args:
            directory: A directory that does not exist, is empty, or holds what was saved before.
                The one above it must exist.

        Raises:
            ValueError: If the directory holds something else.
            OSError: If the files cannot be written.
        """
        check_directory(directory)
        tensors = {f"module.{name}": each for name, each in self.module.state_dict().items()}
        tensors |= {"symbol_block": self.blocks.symbol_block, "block_sizes": self.blocks.sizes}
        unknown = self.vocabulary.unknown
        words = {
            "words": list(self.vocabulary),
            "unknown": CLASSES if unknown is word_classes else unknown,
        }
        write_directory(directory, tensors, {"kind": "language model", **words, **self._options})

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> LanguageModel:
        """The model that was saved to ``directory``, on the CPU, every bit as it was.

        Raises:
            FileNotFoundError: If nothing was saved there.
            ValueError: If the files are damaged, hold something else, or come from a newer version.
        """
        tensors, meta = read_directory(directory, "language model")
        try:
            unknown = word_classes if meta["unknown"] == CLASSES else meta["unknown"]
            vocabulary = Vocabulary(meta["words"], unknown)
            blocks = state_blocks.from_clusters(
                tensors.pop("symbol_block"), tensors.pop("block_sizes")
            )
            state = {name.removeprefix("module."): each for name, each in tensors.items()}
            with torch.random.fork_rng(devices=[]):  # what it begins with is replaced
                model = cls(
                    vocabulary, blocks, meta["hidden_dim"],
                    two_level=meta["two_level"], dropout=meta["dropout"],
                )  # fmt: skip
            model.module.to(state["bias"].dtype).load_state_dict(state)
        except Exception as error:
            path = Path(directory) / TENSORS
            raise ValueError(f"{path} does not describe a language model: {error}") from error
        return model


def encode(lines: Iterable[str], vocabulary: Vocabulary) -> Sequences:
    """Codes of sentences, each with ``<eos>`` at its end; a blank line is an empty sentence.

    Args:
        lines: Their words are separated by white space.
        vocabulary: Of the words, ``<eos>`` among them.

    Raises:
        TypeError: If ``lines`` is a single string, or does not hold strings.
        ValueError: If there is no line, ``<eos>`` is written in one, or a word is not in a
            vocabulary that has nothing for the unknown.

    Example:
        >>> encode(["a rose", ""], count_words(["a rose is a rose"])).values
        tensor([[2, 3, 1],
                [1, 0, 0]])
    """
    return _encode("lines", lines, vocabulary)


def _encode(name: str, lines: Iterable[str], vocabulary: Vocabulary) -> Sequences:
    rows = []
    for number, words in enumerate(_words(name, lines), 1):
        if END in words:
            raise ValueError(
                f"{name} must not have {END} in them, which is added at the end of each; sentence "
                f"{number} has. Take it out."
            )
        rows.append(vocabulary.encode([*words, END]))
    if not rows:
        raise ValueError(f"{name} is empty; wanted at least one sentence.")
    return Sequences.from_list(rows)


def find_clusters(
    data: Sequences, vocabulary: Vocabulary, num_clusters: int, progress: bool | None = None
) -> Tensor:
    """Brown clusters of words, the last of which is ``<eos>`` alone: ``(V,)`` long.

    They are C - 1 clusters by :func:`pyrohmm.clusters.brown`, out of which ``<eos>`` is taken.
    Where it has been alone, one would be missing; they are C clusters then, and if it is not alone
    among these, the two of them that are deepest in the tree are joined.

    Args:
        data: Sentences that end in ``<eos>``, as :func:`encode` makes them.
        vocabulary: The V words.
        num_clusters: C, at least 2. Where fewer words than that occur, ``<eos>`` among them, there
            are fewer clusters.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Raises:
        TypeError: If ``data`` are not :class:`Sequences` of integers.
        ValueError: If a sentence does not end in ``<eos>``, or has it earlier; no sentence has a
            word; or there are fewer than two clusters.

    Example:
        >>> vocabulary = count_words(lines := ["a cat", "a dog", "the cat"])
        >>> found = find_clusters(encode(lines, vocabulary), vocabulary, 3)
        >>> dict(zip(vocabulary, found.tolist()))  # <unk> does not occur
        {'<unk>': 1, '<eos>': 2, 'a': 0, 'cat': 1, 'dog': 1, 'the': 0}
    """
    check_size("num_clusters", num_clusters)
    if num_clusters < 2:
        raise ValueError(
            f"num_clusters must be at least 2, one of them for {END}; got {num_clusters}."
        )
    _check_ends("data", vocabulary, data)
    if data.num_steps < 2:
        raise ValueError("data must have a word in some sentence; all sentences are empty.")
    pairs = pair_counts.count_pairs(data, len(vocabulary))
    present = len(torch.cat([pairs.first, pairs.second]).unique())
    end = vocabulary.encode([END])
    found = clusters.brown(pairs, min(num_clusters - 1, present), progress=progress)
    if num_clusters <= present and _is_alone(end, found.assignment):
        found = clusters.brown(pairs, num_clusters, progress=progress)
        if not _is_alone(end, found.assignment):
            deepest = max(range(num_clusters), key=lambda n: len(found.paths[n]))
            found.assignment[found.assignment == deepest + 1] = deepest  # its sister comes next
    return clusters.with_own(found.assignment, end)


def _is_alone(word: Tensor, assignment: Tensor) -> bool:
    return int((assignment == assignment[word]).sum()) == 1


class WarmupCosine:
    """Share of the largest learning rate at a step: a short rise, then half a cosine, to zero.

    An object, so that ``LambdaLR.state_dict()`` and with it checkpoints tell the number of steps.

    Args:
        num_steps: Of the whole fit.

    Example:
        >>> [round(WarmupCosine(100)(step), 2) for step in (0, 4, 50, 99)]
        [0.2, 1.0, 0.5, 0.0]
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def __call__(self, step: int) -> float:
        """That of a ``step``, from 0."""
        rise = (step + 1) / max(1.0, WARM * self.num_steps)
        return min(1.0, rise) * (1.0 + math.cos(math.pi * min(1.0, step / self.num_steps))) / 2.0


def _words(name: str, lines: Iterable[str]) -> Iterator[list[str]]:
    """The words of each line; raise at a single string, whose letters would be taken for lines."""
    if isinstance(lines, str | bytes) or not isinstance(lines, Iterable):
        got = type(lines).__name__
        got = f"a single {got}. Put it into a list" if isinstance(lines, str | bytes) else got
        raise TypeError(f"{name} must be lines of text, such as a list of str; got {got}.")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise TypeError(f"{name} must hold str; item {number} is {type(line).__name__}.")
        yield line.split()


def _check_ends(name: str, vocabulary: Vocabulary, data: Sequences) -> None:
    """Raise unless each sentence ends in ``<eos>``, has none before, and lacks no step."""
    if not isinstance(data, Sequences):
        raise TypeError(
            f"{name} must be Sequences, as encode makes them; got {type(data).__name__}."
        )
    if data.observed is not None and not bool((data.observed | ~data.exists).all()):
        raise ValueError(f"{name} must have no missing steps. Take out the sentences with some.")
    codes = data.values[data.exists]
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= len(vocabulary):
        raise ValueError(
            f"{name} must hold codes of words, from 0 to V - 1 = {len(vocabulary) - 1}; got values "
            f"from {low} to {high}."
        )
    ends = (data.values == vocabulary.encode([END]).to(data.values.device)) & data.exists
    last = ends[torch.arange(len(data)), data.lengths - 1]
    if int(ends.sum()) != len(data) or not bool(last.all()):
        raise ValueError(
            f"{name} must have {END} at the end of each sentence, and only there. Make them with "
            "encode, or with readers.read_sentences."
        )


def _draw(
    hmm: BlockHMM, count: int, max_words: int, end: int, generator: torch.Generator | None
) -> list[Tensor]:
    """Draw the words of sentences side by side; only rows of the current states are computed."""
    sizes = hmm.blocks.sizes
    owner = torch.arange(hmm.blocks.num_blocks).repeat_interleave(sizes)
    place = torch.arange(hmm.blocks.num_states) - (sizes.cumsum(0) - sizes)[owner]
    words = torch.full((count, max_words), end)
    going = torch.arange(count)  # sentences that have not ended
    states = _choose(hmm.log_initial.expand(count, -1), generator)
    for step in range(max_words):
        if step > 0:
            law = hmm.transition.rows(states)  # type: ignore[union-attr]  # blocks are disjoint
            states = _choose(law, generator)
        emitted = hmm.log_emission[:, place[states].to(hmm.log_emission.device)].mT  # (n, V)
        apart = hmm.blocks.symbol_block != owner[states].unsqueeze(-1)
        words[going, step] = _choose(
            emitted.masked_fill(apart.to(emitted.device), -torch.inf), generator
        )
        stays = words[going, step] != end
        going, states = going[stays], states[stays]
        if len(going) == 0:
            break
    lengths = (words != end).sum(-1)
    return [row[:length] for row, length in zip(words, lengths.tolist())]


def _choose(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One of the columns for each row, ``(n,)``, on the CPU."""
    return torch.multinomial(log_probs.exp().cpu(), 1, generator=generator).squeeze(-1)
