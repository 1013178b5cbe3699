"""``LanguageModel``: probabilities of sentences, and new sentences.

A vocabulary, Brown clusters of its words and a :class:`pyrohmm.NeuralHMM` whose blocks of states
belong to the clusters, with one way to fit, evaluate, sample and keep them. Every sentence ends in
``<eos>``, which is predicted and counted like any word, and has a cluster of its own. N sentences
are made of V words in C clusters; there are K states.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import all_names_checked, check_kind, check_size
from ..analysis.metrics import Perplexity
from ..analysis.queries import predictive_log_prob
from ..data.batches import batches_in_round, cut_by_steps
from ..data.sequences import Sequences
from ..data.vocabulary import Vocabulary, word_classes
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..infer.results import Fit
from ..io.files import TENSORS, FilePath, read_directory, write_directory
from ..nn.base import in_mode
from ..nn.neural import LinearDropout, NeuralHMM
from ..ops.automata import Automaton, template
from ..ops.blocks import states as state_blocks
from ..ops.blocks.states import Blocks
from . import clusters, text
from .steering import Steering
from .text import (
    END,
    UNKNOWN,
    Sentences,
    as_text,
    check_ends,
    next_states,
    sample_sentences,
    split_words,
)
from .training import DefaultDropout, fit_sentences, in_words

PADDED = 64  # largest number of states, those of all blocks padded, for each number in a file
CLASSES = {"function": "word_classes"}  # the function for unknown words, in a file
STEPS = 8192  # that are evaluated at once
WINDOW = 1024  # tokens of one text that are evaluated at once
AT_ONCE = 256  # sentences that are sampled as one batch


class LanguageModel:
    """Language model of sentences: a neural HMM that emits words until ``<eos>``.

    :meth:`from_data` finds clusters and builds a model from them, :meth:`load` reads one. The
    module is on the CPU; after ``model.module.to("cuda")`` everything is computed there.

    Args:
        vocabulary: The V words, ``<eos>`` among them.
        blocks: Which states may emit which word.
        hidden_dim: D, of embeddings.
        two_level: A transition chooses the block first, which is faster; see
            :class:`pyrohmm.NeuralHMM`.
        dropout: Share of the states of each block that is left out at each training step, or a
            :class:`pyrohmm.nn.LinearDropout`. By default none in a fit of few epochs of the text,
            and in more 0.5, which falls to 0.25: :func:`pyrohmm.language.default_dropout`.
        contiguous: Sentences are read as one text: the state goes on from each to the next.

    Attributes:
        vocabulary: The V words.
        blocks: Which states may emit which word.
        module: The :class:`pyrohmm.NeuralHMM`, whose ``dropout`` is that of the last fit.

    Raises:
        ValueError: If what stands in the vocabulary for the unknown is a function other than
            :func:`pyrohmm.readers.word_classes`, which could not be saved; or if blocks have
            other words.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> lines = ["a rose is a rose", "a daisy is a daisy", "is a rose a rose"] * 9
        >>> vocabulary = language.count_words(lines)
        >>> data = language.encode(lines, vocabulary)
        >>> model = LanguageModel.from_data(vocabulary, data, 16, 4, hidden_dim=16, dropout=0.25)
        >>> model
        LanguageModel(6 words; 16 states in 4 blocks of 4; dropout 0.25)
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
        dropout: float | LinearDropout | None = None,
        contiguous: bool = False,
    ) -> None:
        check_kind("vocabulary", vocabulary, Vocabulary, "a Vocabulary", "Call count_words(lines).")
        unknown = vocabulary.unknown
        if not (unknown is None or isinstance(unknown, str) or unknown is word_classes):
            raise ValueError(
                "vocabulary must have as unknown one of its words, readers.word_classes or None, "
                f"which can be saved; got {getattr(unknown, '__name__', unknown)}."
            )
        if blocks.num_symbols != len(vocabulary):
            raise ValueError(
                f"blocks must be of the {len(vocabulary)} words of the vocabulary; "
                f"got {blocks}. Make them with blocks.from_clusters."
            )
        self.vocabulary, self.blocks, self.contiguous = vocabulary, blocks, contiguous
        self._options = {"hidden_dim": hidden_dim, "two_level": two_level, "dropout": dropout,
                         "contiguous": contiguous}  # fmt: skip
        self.module = NeuralHMM(
            blocks.num_states, len(vocabulary), hidden_dim,
            blocks=blocks, two_level=two_level,
            dropout=DefaultDropout(0.0, 0.0, 1) if dropout is None else dropout,
        )  # fmt: skip

    @classmethod
    def from_data(
        cls,
        vocabulary: Vocabulary,
        data: Sentences,
        num_states: int = 4096,
        num_clusters: int = 128,
        hidden_dim: int = 256,
        **options: Any,
    ) -> LanguageModel:
        """Build an untrained model whose blocks of states belong to Brown clusters of the words.

        Args:
            vocabulary: The V words.
            data: Sentences that end in ``<eos>``, as :func:`encode` or :func:`write_corpus` makes
                them; they determine clusters and their sizes only.
            num_states: K, divided among the clusters.
            num_clusters: C, of words, as for :func:`find_clusters`; that of ``<eos>`` is one.
            hidden_dim: D, of embeddings.
            **options: ``two_level``, ``dropout`` and ``contiguous`` of :class:`LanguageModel`.

        Raises:
            TypeError: If ``data`` are not :class:`Sequences` of integers.
            ValueError: As :func:`find_clusters`; or if there are more clusters than states.
        """
        check_size("num_states", num_states, num_clusters)  # finding clusters takes minutes
        assignment = clusters.find_clusters(data, vocabulary, num_clusters)
        sizes = clusters.allocate(num_states, assignment)
        return cls(vocabulary, state_blocks.from_clusters(assignment, sizes), hidden_dim, **options)

    def __repr__(self) -> str:
        low, high = int(self.blocks.sizes.min()), self.blocks.width
        parts = [
            f"{len(self.vocabulary):,} words", f"{self.blocks.num_states:,} states in "
            f"{self.blocks.num_blocks} blocks of {low if low == high else f'{low} to {high}'}",
            in_words(self.module.dropout),
        ]  # fmt: skip
        return f"LanguageModel({'; '.join(filter(None, parts))})"

    # Fitting

    def fit(
        self,
        data: Sentences,
        validation: Sequences | None = None,
        *,
        num_epochs: int = 10,
        batch_tokens: int = 2048,
        num_streams: int = 16,
        learning_rate: float = 0.004,
        weight_decay: float = 0.0,
        clip_norm: float | None = 1.0,
        **options: Any,
    ) -> Fit:
        """Maximise the likelihood by AdamW, from the current parameters.

        A round of minibatches has each sentence once. How many of them there are varies a little
        from round to round; the fit takes ``num_epochs`` times as many steps as a typical round
        has, so that the last round may lack a few or be followed by a few.

        The learning rate rises for the first steps, one in twenty, and falls as a cosine to zero at
        the end. With ``validation``, the parameters that predicted it best are kept.

        A contiguous model reads the sentences as one text that is divided into streams; a minibatch
        is the next window of each, and goes on from the state at the end of the one before
        (truncated backpropagation, see :class:`pyrohmm.StatefulModel`). A corpus in a file is cut
        into texts of a million tokens.

        Args:
            data: Sentences to learn from, as :func:`encode` or :func:`write_corpus` makes them.
            validation: Held-out sentences, evaluated after every round and after the last step.
            num_epochs: Number of rounds, about.
            batch_tokens: Largest number of tokens in a minibatch, padding included.
            num_streams: Parts of a contiguous text that are read side by side, in windows of
                ``batch_tokens / num_streams``.
            learning_rate: The largest of AdamW.
            weight_decay: Of AdamW.
            clip_norm: Largest norm of the gradient, per token.
            **options: Further arguments: :class:`pyrohmm.FitOptions` explains them.

        Raises:
            FloatingPointError: If the loss or a parameter becomes infinite or NaN, or the first
                sentences take ten times the nats of uniform guessing at the end; the parameters are
                then those that predicted ``validation`` best, or those before the fit.
            TypeError, ValueError: As :func:`pyrohmm.fit_svi`.
        """
        return fit_sentences(
            self, data, validation, (num_epochs, batch_tokens, num_streams),
            {"clip_norm": clip_norm, **options}, lr=learning_rate, weight_decay=weight_decay,
        )  # fmt: skip

    def num_iterations(
        self, data: Sentences, num_epochs: int = 10, batch_tokens: int = 2048, num_streams: int = 16
    ) -> int:
        """The number of gradient steps of :meth:`fit` with these arguments."""
        if not self.contiguous:
            return num_epochs * batches_in_round(data.lengths, batch_tokens)
        steps = max(1, batch_tokens // num_streams)
        return num_epochs * math.ceil(math.ceil(data.num_observed / num_streams) / steps)

    # Evaluation and sampling

    def encode(self, lines: Iterable[str]) -> Sequences:
        """Encode sentences by the vocabulary, each with ``<eos>`` at its end."""
        return text.encode(lines, self.vocabulary)

    def num_unknown(self, lines: Iterable[str]) -> int:
        """Number of words of some lines that are not in the vocabulary, counting repetitions."""
        rows = split_words("lines", lines)
        return sum(word not in self.vocabulary for words in rows for word in words)

    def score(self, sentences: Iterable[str] | Sequences) -> Tensor:
        """Log-probability of each sentence with its ``<eos>``, ``(N,)`` float64, in nats.

        That of a contiguous model is given all the sentences before it.

        Args:
            sentences: Lines, or what :meth:`encode` makes of them.

        Raises:
            TypeError: If it is a single string, or does not hold strings.
            ValueError: As :func:`encode`; or if a sentence does not end in ``<eos>``, or has steps
                that are missing.
        """
        data = self._coded(sentences)
        if self.contiguous:
            return -torch.stack([nats.sum() for nats in self.surprisal(data)])
        scores = torch.empty(len(data), dtype=torch.float64)
        with torch.no_grad(), in_mode(False, self.module):
            for chosen, hmm, values in _parts(self.module, data):
                scores[chosen] = hmm.log_prob(values).double().cpu()
        return scores

    def surprisal(self, sentences: Iterable[str] | Sequences) -> list[Tensor]:
        r"""Surprisal :math:`-\log p(w_t \mid w_{1:t-1})` of each word of each sentence, in nats.

        Those of a sentence sum to minus its :meth:`score`.

        Returns:
            For each sentence its words and ``<eos>``, ``(num_words + 1,)`` float64.
        """
        data = self._coded(sentences)
        found: list[Tensor] = [torch.empty(0)] * len(data)
        with torch.no_grad(), in_mode(False, self.module):
            if self.contiguous:
                nats = _surprisal_of_text(self.module, as_text(data).values[0])
                return list(nats.split(data.lengths.tolist()))
            for chosen, hmm, values in _parts(self.module, data):
                logs = predictive_log_prob(hmm, values).cpu()
                for place, row, length in zip(chosen.tolist(), logs, data.lengths[chosen].tolist()):
                    found[place] = -row[:length]
        return found

    def perplexity(self, sentences: Iterable[str] | Sequences) -> Perplexity:
        """Perplexity of sentences per token, ``<eos>`` included."""
        data = self._coded(sentences)
        return Perplexity.of(self.score(data).sum().item(), data.num_observed)

    def generate(
        self,
        count: int,
        generator: torch.Generator | None = None,
        max_words: int = 100,
        prompt: str = "",
        constraint: Automaton | None = None,
    ) -> list[str]:
        """Sample sentences, without their ``<eos>``; those of a contiguous model are one text.

        With a ``constraint`` they are exact samples given that they satisfy it and end in time.

        Args:
            count: Number of sentences.
            generator: Source of randomness on the CPU; torch's global one by default.
            max_words: After the prompt; longer ones are cut off, or none with a constraint.
            prompt: Words with which each sentence begins, or of a contiguous text the first one;
                the others are sampled given these.
            constraint: What each whole sentence satisfies; see :meth:`steer`.

        Raises:
            ValueError: As :meth:`encode` of the prompt, and as :meth:`steer`; or if the model is
                contiguous and there is a constraint.
        """
        check_size("count", count)
        check_size("max_words", max_words)
        _warn_of_unknown(prompt, self.vocabulary)
        if constraint is not None:
            if self.contiguous:
                raise ValueError(
                    "constraint must be None for a contiguous text; see model.steer for first ones."
                )
            steering = self.steer(constraint, max_words + len(prompt.split()))
            return steering.sample(count, generator, prompt)
        with torch.no_grad(), in_mode(False, self.module):
            hmm: Any = self.module(torch.tensor([1]))
            codes = _samples(hmm, self, count, generator, max_words, prompt)
        lines = [" ".join(self.vocabulary.decode(each)) for each in codes]
        first = 1 if self.contiguous else count  # those that begin with the prompt
        return [f"{prompt} {line}".strip() for line in lines[:first]] + lines[first:]

    def steer(self, constraint: Automaton, max_words: int = 100) -> Steering:
        """Condition sentences on a constraint, for exact samples and probabilities.

        Args:
            constraint: What a sentence, without its ``<eos>``, satisfies: a finite automaton over
                words, made by the functions of ``automata`` and ``&``, ``|``, ``~``.
            max_words: Largest number of words of a sentence, with those of a prompt.

        Raises:
            ValueError: If no such sentence is possible, or a word of it is not listed.

        Example:
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> wanted = automata.must_contain("rose") & automata.of_length(3)
            >>> all(wanted.accepts(line) for line in model.steer(wanted, 3).sample(5))
            True
        """
        with torch.no_grad(), in_mode(False, self.module):
            hmm: Any = self.module(torch.tensor([1]))
            return Steering(hmm, self.vocabulary, constraint, max_words)

    def fill(
        self,
        sentence: Sequence[str | None],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> list[str]:
        """Sample the missing words of a sentence exactly, given the others.

        Args:
            sentence: Words, None for each that is missing. The probabilities of a single one are
                those of :meth:`Steering.next_word`.
            count: Number of samples.
            generator: Source of randomness on the CPU; torch's global one by default.

        Raises:
            TypeError, ValueError: If it is a single string, or empty; as :meth:`steer`.

        Example:
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> model.fill(["a", None, "is"])[0].split()[::2]
            ['a', 'is']
        """
        if isinstance(sentence, str | bytes):
            raise TypeError("sentence must be a list of words, None for missing ones: .split().")
        words = [each for item in sentence for each in ([None] if item is None else item.split())]
        check_size("the number of words of sentence", len(words))
        return self.steer(template(*words), len(words)).sample(count, generator)

    def _coded(self, sentences: Iterable[str] | Sequences) -> Sequences:
        if not isinstance(sentences, Sequences):
            return text.encode(sentences, self.vocabulary, "sentences")
        check_ends("sentences", self.vocabulary, sentences)
        return sentences

    # Saving and loading

    def save(self, directory: FilePath) -> None:
        """Save vocabulary, blocks and parameters to a directory, as :func:`pyrohmm.save` does."""
        write_directory(directory, *_saved(self))

    @classmethod
    def load(cls, directory: FilePath) -> LanguageModel:
        """Load a saved model from ``directory``, on the CPU, bit for bit.

        Raises as :func:`pyrohmm.load_hmm`.
        """
        tensors, meta = read_directory(directory, "language model")
        try:
            return _model_of(tensors, meta)
        except Exception as error:
            path = Path(directory) / TENSORS
            raise ValueError(f"{path} does not describe a language model: {error}") from error


def _warn_of_unknown(prompt: str, vocabulary: Vocabulary) -> None:
    """Warn of words of a prompt that another word stands for."""
    check_kind("prompt", prompt, str, "a str", "Join words: ' '.join(words).")
    unknown = [word for word in prompt.split() if word not in vocabulary]
    if unknown and vocabulary.unknown is not None:
        text = f"the model does not know {', '.join(map(repr, unknown))} of the prompt"
        warnings.warn(f"{text}, and takes it for {UNKNOWN}.", stacklevel=3)


def _samples(
    hmm: Any,
    model: LanguageModel,
    count: int,
    generator: torch.Generator | None,
    max_words: int,
    prompt: str,
) -> list[Tensor]:
    """Sample codes of sentences after a prompt, without ``<eos>``, or of one contiguous text."""
    end, at_once = model.vocabulary.index(END), 1 if model.contiguous else AT_ONCE
    log_first = next_states(hmm, model.encode([prompt]).values[0, :-1]).unsqueeze(0)
    found: list[Tensor] = []
    for done in range(0, count, at_once):
        rows = log_first.expand(min(at_once, count - done), -1)
        codes, last = sample_sentences(hmm, rows, max_words, end, generator)
        found += codes
        if model.contiguous:
            log_first = hmm.transition.rows(last)
    return found


def _parts(module: NeuralHMM, data: Sequences) -> Iterator[tuple[Tensor, HMM, Tensor]]:
    """Iterate over batches of sequences of similar length: indices, HMM and values."""
    device = next(module.parameters()).device
    for chosen in cut_by_steps(data.lengths, data.lengths.argsort(), STEPS):
        part = data[chosen].to(device)
        yield chosen, module(part.lengths), part.values


def _surprisal_of_text(module: NeuralHMM, tokens: Tensor) -> Tensor:
    """Surprisal of each token of one text ``(T,)``, a window at a time."""
    hmm: Any = module(torch.tensor([1]))
    log_first, found = hmm.log_initial, []
    for values in tokens.to(log_first.device).split(WINDOW):
        window = BlockHMM(
            log_first, hmm.transition, hmm.symbols, hmm.blocks, torch.tensor([len(values)]),
            validate_args=False,
        )  # fmt: skip
        found.append(-predictive_log_prob(window, values.unsqueeze(0))[0].cpu())
        log_first = next_states(window, values)
    return torch.cat(found)


def _saved(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"module.{name}": tensor for name, tensor in model.module.state_dict().items()}
    tensors |= {"symbol_block": model.blocks.symbol_block, "block_sizes": model.blocks.sizes}
    unknown = model.vocabulary.unknown
    meta = {
        "kind": "language model",
        "words": list(model.vocabulary),
        "unknown": CLASSES if unknown is word_classes else unknown,
        **model._options,
        "dropout": _as_saved(model._options["dropout"]),
        "dropout_of_fit": _as_saved(model.module.dropout),
    }
    return tensors, meta


def _model_of(tensors: dict[str, Tensor], meta: dict[str, Any]) -> LanguageModel:
    unknown = word_classes if meta["unknown"] == CLASSES else meta["unknown"]
    symbol_block, sizes = tensors.pop("symbol_block"), tensors.pop("block_sizes")
    state = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    count, there = int(sizes.sum()), sum(tensor.numel() for tensor in tensors.values())
    padded = len(sizes) * int(sizes.max())  # before any memory is taken
    if state["start_vectors.state"].size(0) != count or max(count, padded / PADDED) > there:
        claimed = f"{count} states in {len(sizes)} blocks are claimed"
        raise ValueError(f"{claimed}; the file has no room")
    blocks, dropout = state_blocks.from_clusters(symbol_block, sizes), meta["dropout"]
    with torch.device("meta"):  # until shapes have been compared
        model = LanguageModel(
            Vocabulary(meta["words"], unknown),
            blocks,
            meta["hidden_dim"],
            two_level=meta["two_level"],
            dropout=LinearDropout(**dropout) if isinstance(dropout, dict) else dropout,
            contiguous=meta.get("contiguous", False),  # older files have none
        )
    if dropout is None:
        model.module.dropout = DefaultDropout(**meta["dropout_of_fit"])
    model.module.load_state_dict(state, assign=True)
    return model


def _as_saved(dropout: float | LinearDropout | None) -> object:
    return asdict(dropout) if isinstance(dropout, LinearDropout) else dropout


all_names_checked(globals())
