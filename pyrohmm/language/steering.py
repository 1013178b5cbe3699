"""Sentences that satisfy a constraint: exact probabilities, next words and samples."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from .._checks import check_size
from ..data.vocabulary import Vocabulary
from ..distributions.block_hmm import BlockHMM
from ..ops.automata import Automaton
from .generation import choose, emitted_by
from .lookahead import Lookahead
from .scoring import next_states
from .text import END, encode

AT_ONCE = 64  # sentences that are sampled as one batch


class Steering:
    r"""Sentences of a :class:`LanguageModel` given that they satisfy a constraint.

    Made by :meth:`LanguageModel.steer`. Sentences have at most ``max_words`` words: where this says
    "the constraint holds", it means that the sentence ends by then, and satisfies the constraint.
    What does not depend on a prompt is computed once, in O(K² Q) a step with K states and the Q
    states that the automaton may be in, and takes K Q float64 numbers a step.

    Args:
        hmm: Of disjoint blocks and inner products; it stays as it is now.
        vocabulary: The V words, ``<eos>`` among them.
        constraint: Over words of the vocabulary, or their codes.
        max_words: Largest number of words of a sentence, with those of a prompt.

    Raises:
        ValueError: If no sentence of so many words satisfies the constraint, or it has a word that
            the vocabulary does not list.
    """

    def __init__(
        self, hmm: BlockHMM, vocabulary: Vocabulary, constraint: Automaton, max_words: int
    ) -> None:
        check_size("max_words", max_words)
        self.vocabulary, self.constraint, self.max_words = vocabulary, constraint, max_words
        self._hmm = hmm
        self._end = int(vocabulary.encode([END]))
        self._class = _classes_of_words(constraint, vocabulary)
        with torch.no_grad():
            self._ahead = Lookahead(
                hmm, constraint, self._class, self._end, max_words, dtype=torch.float64
            )
            self._class = self._ahead.classes

    def __repr__(self) -> str:
        return f"Steering({self.constraint.name}; at most {self.max_words} words)"

    # Queries given a prompt

    def log_prob(self, prompt: str = "") -> float:
        """Log-probability that the constraint holds, given the first words; in nats.

        Args:
            prompt: Words with which the sentence begins.

        Raises:
            ValueError: If ``prompt`` has more than ``max_words`` words, or as :func:`encode`.

        Example:
            >>> _ = pyro.set_rng_seed(0)
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> steering = model.steer(automata.must_contain("rose"), max_words=9)
            >>> steering.log_prob() < steering.log_prob("is a rose")
            True
        """
        first, state, place = self._begin(prompt)
        return self._ahead.log_joint(first, state, place)

    def next_word(self, prompt: str = "") -> Tensor:
        """Log-probability of each next word given the first ones and that the constraint holds.

        Args:
            prompt: Words with which the sentence begins.

        Returns:
            ``(V,)`` float64, in nats; ``<eos>`` is one of the words.

        Raises:
            ValueError: As :meth:`log_prob`; or if the constraint cannot hold after the prompt.

        Example:
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> probs = model.steer(automata.template("a", None), 2).next_word("a").exp()
            >>> round(probs.sum().item(), 6), probs[vocabulary.index("<eos>")].item()
            (1.0, 0.0)
        """
        first, state, place = self._begin(prompt)
        self._check_possible(first, state, place, prompt)
        return self._of_words(first, state, place)[0].log_softmax(-1)

    def lookahead(self, prompt: str = "") -> Tensor:
        r"""Log-probability that the constraint holds, given the first words and each next one.

        Added to the logits of any other language model of the same words, it makes that model aware
        of the constraint: p(word | prompt) p(constraint | prompt, word), where this model gives the
        second factor.

        Args:
            prompt: Words with which the sentence begins.

        Returns:
            ``(V,)`` float64, in nats; -inf for words after which it cannot hold.

        Raises:
            ValueError: As :meth:`log_prob`.

        Example:
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> steering = model.steer(automata.starts_with("a rose"), 9)
            >>> [w for w, log in zip(vocabulary, steering.lookahead("a").tolist()) if log > -9]
            ['rose']
        """
        first, state, place = self._begin(prompt)
        joint, free = self._of_words(first, state, place)
        return torch.where(joint.isneginf(), joint, (joint - free).clamp(max=0.0))

    def sample(
        self, count: int = 1, generator: torch.Generator | None = None, prompt: str = ""
    ) -> list[str]:
        """Independent exact samples of sentences that satisfy the constraint, without ``<eos>``.

        Args:
            count: Number of sentences.
            generator: Source of randomness on the CPU; torch's global one by default.
            prompt: Words with which each sentence begins.

        Raises:
            ValueError: As :meth:`next_word`.

        Example:
            >>> vocabulary = language.count_words(["a rose is a rose", "is a rose a rose"])
            >>> model = LanguageModel(vocabulary, blocks.from_clusters(torch.arange(5), 2), 8)
            >>> lines = model.steer(automata.must_contain("rose"), 5).sample(3, prompt="is a")
            >>> all("rose" in line.split() for line in lines)
            True
        """
        check_size("count", count)
        first, state, place = self._begin(prompt)
        self._check_possible(first, state, place, prompt)
        found: list[Tensor] = []
        with torch.no_grad():
            for done in range(0, count, AT_ONCE):
                size = min(AT_ONCE, count - done)
                found += self._sample(first, state, place, size, generator)
        lines = (" ".join(self.vocabulary.decode(codes)) for codes in found)
        return [f"{prompt} {line}".strip() for line in lines]

    # Joining them with a prompt

    def _begin(self, prompt: str) -> tuple[Tensor, int, int]:
        """Log-probabilities of the next state ``(K,)``, state of the automaton, words so far."""
        codes = encode([prompt], self.vocabulary, "prompt").values[0, :-1]
        if len(codes) > self.max_words:
            raise ValueError(
                f"prompt must have at most max_words = {self.max_words} words; got {len(codes)}."
            )
        state = 0
        for kind in self._class[codes].tolist():
            state = int(self.constraint.table[state, kind])
        with torch.no_grad():
            return next_states(self._hmm, codes).double(), state, len(codes)

    def _of_words(self, first: Tensor, state: int, t: int) -> tuple[Tensor, Tensor]:
        """Log-probability of each next word with the constraint, and without; ``(V,)``."""
        joint, free = self._ahead.of_tokens(first.exp().unsqueeze(0), torch.tensor([state]), t)
        return joint[0].cpu(), free[0].cpu()

    def _check_possible(self, first: Tensor, state: int, t: int, prompt: str) -> None:
        if self._ahead.log_joint(first, state, t) == -inf:
            raise ValueError(
                f"prompt must leave the constraint possible within max_words = {self.max_words} "
                f"words; {self.constraint.name} cannot hold after {prompt!r}."
            )

    def _sample(
        self, first: Tensor, state: int, begin: int, count: int, generator: torch.Generator | None
    ) -> list[Tensor]:
        """Codes of words after a prompt, without ``<eos>``."""
        words = torch.full((count, self.max_words - begin + 1), self._end)
        unfinished = torch.arange(count)
        automaton = torch.full((count,), state)
        log_states = first.expand(count, -1)
        for t in range(begin, self.max_words + 1):
            here = self._ahead.here(t)[self._ahead.column[t][automaton].to(self._ahead.device)]
            states = choose(log_states + here, generator)
            kind = choose(self._log_classes(states, automaton, t), generator)
            emitted = emitted_by(self._hmm, states)
            other = (self._class != kind.unsqueeze(-1)).to(emitted.device)
            words[unfinished, t - begin] = choose(emitted.masked_fill(other, -inf), generator)
            continues = kind != self._ahead.end_class
            unfinished, states, kind = (part[continues] for part in (unfinished, states, kind))
            if not len(unfinished):
                break
            automaton = self.constraint.table[automaton[continues], kind]
            log_states = self._hmm.transition.rows(states).double()  # type: ignore[union-attr]
        lengths = (words != self._end).sum(-1)
        return [row[:length] for row, length in zip(words, lengths.tolist())]

    def _log_classes(self, states: Tensor, automaton: Tensor, t: int) -> Tensor:
        """Log-probabilities ``(n, C + 1)``, but for a factor, of the class of the next word."""
        ahead = self._ahead
        states = states.to(ahead.device)
        logs = ahead.log_mass[:, states].mT.clone()
        ending = self.constraint.accepting[automaton].to(ahead.device)
        logs[:, -1] = logs[:, -1].masked_fill(~ending, -inf)
        if t == self.max_words:
            logs[:, :-1] = -inf
        else:
            column = ahead.column[t + 1][self.constraint.table[automaton]].to(ahead.device)
            logs[:, :-1] += ahead.after[t + 1][column, states.unsqueeze(-1)]  # (n, C)
        return logs


def _classes_of_words(constraint: Automaton, vocabulary: Vocabulary) -> Tensor:
    """The class of each word of the vocabulary, ``(V,)``."""
    classes = torch.zeros(len(vocabulary), dtype=torch.long)
    named: dict[int, str | int] = {}
    for symbol, number in constraint.classes.items():
        code = symbol if isinstance(symbol, int) else -1
        if isinstance(symbol, str) and symbol in vocabulary:
            code = vocabulary.index(symbol)
        if not 0 <= code < len(vocabulary) or vocabulary[code] == END:
            raise ValueError(
                f"constraint must be of words of the vocabulary, {END} not among them; {symbol!r} "
                f"is none of its {len(vocabulary)}."
            )
        if named.setdefault(code, symbol) != symbol:
            raise ValueError(
                f"constraint must name each word in one way; it has {symbol!r} and {named[code]!r}."
            )
        classes[code] = number
    return classes
