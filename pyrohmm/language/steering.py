r"""Exact sampling of sentences under a constraint, by the probability that it will hold.

The tokens before a step determine the state q of the automaton, so that

.. math:: h_t(z, q) = p(\text{the whole text satisfies the constraint} \mid z_{t+1} = z, q)

follows from :math:`h_{t+1}` by a sum over transitions and one over classes of tokens, since those
of a class lead from q to the same state.

References:
    Adaptable Logical Control for Large Language Models (Zhang et al., 2024),
    https://arxiv.org/abs/2406.13892
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_kind, check_size
from .._precision import full_precision
from ..data.vocabulary import Vocabulary
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..ops.automata import Automaton
from ..ops.blocks.transitions import Transitions
from ..ops.log_space import finite_or_zero
from .text import END, choose, emitted_by, encode, next_states

AT_ONCE = 64  # sentences that are sampled as one batch
LARGE = 0.02  # share of all tokens from which on a class of tokens has sums of its own
TILE = 1024  # tokens of one product of matrices, whose rows of probabilities stay near


class Emissions:
    """Probabilities of V tokens in K states, by blocks of tokens with the states that emit them.

    Tokens are sorted by block, and in a block by class.

    Args:
        hmm: Its states emit symbols; without blocks all is one block.
        classes: ``(V,)``, of tokens.
        dtype: Of the probabilities; that of the HMM by default.

    Attributes:
        blocks: For each its first token (as they are sorted), states, and ``(V_b, K_b)`` numbers.
        segments: Of sorted tokens the first, their states, their class, which is -1 for all small
            ones, and their numbers, a part of those of a block.
    """

    def __init__(self, hmm: HMM, classes: Tensor, dtype: torch.dtype | None = None) -> None:
        check_kind("hmm", hmm, HMM, "an HMM, as fit.hmm(data)")
        self.num_states, self.device = hmm.num_states, hmm.log_initial.device
        in_blocks = isinstance(hmm, BlockHMM)
        if any(hmm.chain.batch_shape) or not (in_blocks or is_categorical(hmm.emission)):
            text = f"hmm must emit symbols and have no batch of parameters; got {hmm}"
            raise ValueError(f"{text}. Choose one restart or sample of a Categorical emission.")
        table = hmm.log_emission if in_blocks else hmm.emission.probs.mT  # (V, width)
        self.num_tokens, self.classes = len(table), classes
        if len(classes) != len(table):
            raise ValueError(
                f"hmm must have the {len(classes)} tokens of the vocabulary; it has {len(table)}. "
                "Use that of its data."
            )
        owner, sizes = torch.zeros_like(classes), torch.tensor([self.num_states])
        if in_blocks:
            owner, sizes = hmm.blocks.symbol_block, hmm.blocks.sizes
        large = classes.bincount() > LARGE * len(classes)
        kinds = classes.where(large[classes], -1)
        self.order = torch.from_numpy(np.lexsort((classes, kinds, owner)))
        self.places = self.order.argsort()
        self._owner = owner
        self.blocks: list[tuple[int, slice, Tensor]] = []
        self.segments: list[tuple[int, slice, int, Tensor]] = []
        first = state = 0
        for count, size in zip(owner.bincount(minlength=len(sizes)).tolist(), sizes.tolist()):
            tokens, states = self.order[first : first + count], slice(state, state + size)
            probs = table.index_select(0, tokens.to(self.device))[:, :size]
            probs = (probs.exp() if in_blocks else probs).to(dtype or probs.dtype)
            self.blocks.append((first, states, probs))
            state = states.stop
            kind_of, counts = kinds[tokens].unique_consecutive(return_counts=True)
            for kind, members in zip(kind_of.tolist(), probs.split(counts.tolist())):
                for part in members.split(TILE):
                    self.segments.append((first, states, kind, part))
                    first += len(part)

    def of_classes(self, count: int) -> Tensor:
        """Emission probability of each token class in each state, a sum over tokens, (count, K)."""
        mass = torch.zeros(count, self.num_states, dtype=torch.float64, device=self.device)
        for first, states, _, probs in self.segments:
            kinds = self.classes[self.order[first : first + len(probs)]].to(self.device)
            mass[:, states].index_add_(0, kinds, probs.double())
        return mass

    def column(self, tokens: Tensor) -> Tensor:
        """Probability of each of some tokens ``(n,)`` in each state, ``(n, K)``."""
        places, probs = self.places[tokens], self.blocks[0][2]
        if len(self.blocks) == 1:
            return probs.index_select(0, places.to(self.device))
        found = probs.new_zeros(len(tokens), self.num_states)
        for row, block, place in zip(found, self._owner[tokens], places.tolist()):
            first, states, probs = self.blocks[block]
            row[states] = probs[place - first]
        return found

    def log_sums(self, free: Tensor, weights: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Logs of weighted sums over states of token probabilities, free and constrained, (n, V).

        Args:
            free: ``(n, K)``, weights for all tokens: those of the first result.
            weights: ``(P, K)``.
            pairs: ``(n, C)``, which of these each class of tokens has: those of the second result.
        """
        count, dtype = len(free), self.blocks[0][2].dtype
        columns = {-1: torch.cat([free, weights]).to(dtype).mT.contiguous()}
        found = free.new_empty(self.num_tokens, 2 * count, dtype=dtype)
        with full_precision(found):
            for first, states, kind, probs in self.segments:
                if kind not in columns:
                    own = weights.index_select(0, pairs[:, kind].to(self.device))
                    columns[kind] = torch.cat([free, own]).to(dtype).mT.contiguous()
                here, rows = columns[kind][states], found[first : first + len(probs)]
                if kind >= 0:
                    torch.mm(probs, here, out=rows)
                    continue
                chosen = pairs[:, self.classes[self.order[first : first + len(probs)]]]
                sums = probs @ here
                rows[:, :count] = sums[:, :count]
                rows[:, count:] = sums.gather(1, count + chosen.mT.to(self.device))
        found = found.log_().index_select(0, self.places.to(self.device)).mT.contiguous()
        return found[:count], found[count:]


class Lookahead:
    """Log-probability that a constraint will hold, before and after each possible next token.

    It holds of a text of at most ``max_tokens`` tokens, the end not counted. What does not depend
    on a prompt is computed once, in O(K² Q) a step with K states and the Q states that the
    automaton may be in, and takes K Q float64 numbers a step.

    Args:
        hmm: Its states emit symbols, the tokens.
        constraint: Its automaton.
        classes: ``(V,)``, the column of each token in the table of the automaton.
        end: The token that ends a text; None if all have ``max_tokens`` tokens.
        max_tokens: n, of a text.
        must_end: Whether ``end`` must follow; otherwise a text may also be cut after n tokens.
        dtype: Of the sums over states.

    Attributes:
        alive: For each number of tokens so far the states of the automaton that can be reached, and
            from which a text can still satisfy the constraint.
        column: ``(Q,)`` for each number of tokens: where a state is among these, at their end if
            it is not.

    Raises:
        ValueError: If no text of so many tokens satisfies the constraint.
    """

    def __init__(
        self,
        hmm: HMM,
        constraint: Automaton,
        classes: Tensor,
        end: int | None,
        max_tokens: int,
        must_end: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.constraint, self.max_tokens = constraint, max_tokens
        self.end, self.must_end = end, must_end
        self.classes, self.end_class = classes.clone(), constraint.table.size(1)
        if end is not None:
            self.classes[end] = self.end_class
        self.emissions = Emissions(hmm, self.classes, dtype)
        self.device = hmm.log_initial.device
        self._set_alive()
        if not len(self.alive[0]):
            raise ValueError(
                f"constraint must hold for some text of at most {max_tokens} words or tokens; "
                f"{constraint.name} does for none. Allow more of them, ask for less, or look "
                "whether its words can be written with these tokens."
            )
        if isinstance(hmm, BlockHMM):
            self.transitions = hmm.chain.transitions()
        else:
            self.transitions = Transitions.of_matrix(hmm.log_transition)
        self.log_mass = self.emissions.of_classes(self.end_class + 1).log()
        self._set_pairs()
        self.after = [torch.empty(0)] * (max_tokens + 1)
        for t in range(max_tokens, 0, -1):
            here = self.transitions.back_from_all(self.here(t))
            self.after[t] = pad(here, (0, 0, 0, 1), value=-inf)

    def _set_alive(self) -> None:
        table, accepting = self.constraint.table, self.constraint.accepting
        kinds = self.classes.unique()
        follows = table[:, kinds[kinds != self.end_class]]  # classes may have no other token
        can_end = accepting if self.end is not None else torch.zeros_like(accepting)
        ends = [accepting]
        for _ in range(self.max_tokens):
            ends.append(can_end | ends[-1][follows].any(-1))
        reached = torch.zeros_like(accepting)
        reached[0] = True
        self.alive: list[Tensor] = []
        self.column: list[Tensor] = []
        for end in reversed(ends):
            alive = reached & end
            states = alive.nonzero().squeeze(-1)
            self.alive.append(states)
            self.column.append((alive.cumsum(0) - 1).masked_fill(~alive, len(states)))
            reached = torch.zeros_like(reached)
            reached[follows[states].flatten()] = True

    def _set_pairs(self) -> None:
        """Set the pairs of successive automaton states, with the token probability of each."""
        table = self.constraint.table
        size = len(table)
        cells = (torch.arange(size).unsqueeze(1) * size + table).flatten()
        pairs, place = cells.unique(return_inverse=True)
        self._source, self._target = pairs // size, pairs % size
        mass = self.log_mass[:-1].exp().repeat(size, 1)
        sums = mass.new_zeros(len(pairs), mass.size(1)).index_add_(0, place.to(self.device), mass)
        self._log_mass_of_pairs = sums.log()

    def here(self, t: int) -> Tensor:
        """Log-probability of the constraint given automaton and HMM state, log h_t, ``(L, K)``."""
        alive = self.alive[t]
        found = self.log_mass.new_full((len(alive), self.emissions.num_states), -inf)
        accepting = self.constraint.accepting[alive].to(self.device)
        if t == self.max_tokens and not self.must_end:
            return found.masked_fill(accepting.unsqueeze(-1), 0.0)
        if self.end is not None:
            found[accepting] = self.log_mass[-1]
        if t == self.max_tokens:
            return found
        source, target = self.column[t][self._source], self.column[t + 1][self._target]
        some = ((source < len(alive)) & (target < len(self.alive[t + 1]))).nonzero().squeeze(-1)
        source, target = source[some].to(self.device), target[some].to(self.device)
        terms = self.after[t + 1][target] + self._log_mass_of_pairs[some.to(self.device)]
        cells = source.unsqueeze(-1).expand_as(terms)
        peak = finite_or_zero(found.scatter_reduce(0, cells, terms, "amax"))
        sums = (found - peak).exp().index_add_(0, source, (terms - peak[source]).exp())
        return sums.log() + peak

    def log_joint(self, log_states: Tensor, state: int, t: int) -> float:
        """Log-probability that the constraint holds, after t tokens.

        Args:
            log_states: ``(K,)``, log-probabilities of the next state.
            state: That of the automaton.
            t: Number of tokens so far.
        """
        column = int(self.column[t][state])
        if column == len(self.alive[t]):
            return -inf
        return min(0.0, float((log_states + self.here(t)[column]).logsumexp(-1)))

    def of_tokens(self, probs: Tensor, states: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of each next token, jointly with the constraint and alone, ``(n, V)``.

        Args:
            probs: ``(n, K)``, probabilities of the next state.
            states: ``(n,)``, of the automaton.
            t: Number of tokens so far, of all.
        """
        weights, pairs, peaks = self._weights(probs, states, t)
        free, joint = self.emissions.log_sums(probs, weights, pairs)
        joint = joint + peaks.to(joint)[:, self.classes.to(self.device)]
        if self.end is not None:
            accepting = self.constraint.accepting[states].to(self.device)
            joint[:, self.end] = free[:, self.end].masked_fill(~accepting, -inf)
        return joint, free

    def possible(self, states: Tensor, t: int) -> Tensor:
        """Log mask of the tokens after which the constraint may hold, ``(n, V)``: 0 or -inf."""
        accepting = self.constraint.accepting[states].unsqueeze(1)
        found = torch.zeros(len(states), self.end_class + 1, dtype=torch.bool)
        if t < self.max_tokens:
            after = self.column[t + 1][self.constraint.table[states]]
            found[:, :-1] = after < len(self.alive[t + 1])
        if self.end is not None:
            found[:, -1:] = accepting
        return found.index_select(1, self.classes).double().log()

    def _weights(self, probs: Tensor, states: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of states in the sum over them for each next token that does not end the text.

        Returns:
            ``(P, K)`` weights for each pair of a row and a next state of its automaton, the place
            of each class of tokens among them ``(n, C + 1)``, and the logarithm of the factor
            that it lacks, of the same shape.
        """
        if t == self.max_tokens:
            none = torch.zeros(len(states), self.end_class + 1, dtype=torch.long)
            return torch.zeros_like(probs[:1]), none, none.to(probs)
        after = self.after[t + 1]  # the last row is that of all that are not alive
        dead = len(after) - 1
        columns = pad(self.column[t + 1][self.constraint.table[states]], (0, 1), value=dead)
        keys = columns + len(after) * torch.arange(len(states)).unsqueeze(-1)
        keys, pairs = keys.unique(return_inverse=True)
        row, column = (keys // len(after)).to(self.device), (keys % len(after)).to(self.device)
        peak = finite_or_zero(after.amax(-1))
        weights = probs[row] * (after[column] - peak[column].unsqueeze(-1)).exp()
        return weights, pairs, peak[columns.to(self.device)]


class Steering:
    r"""Sentences of a :class:`LanguageModel` given that they satisfy a constraint.

    Made by :meth:`LanguageModel.steer`. Sentences have at most ``max_words`` words: where this says
    "the constraint holds", it means that the sentence ends by then, and satisfies the constraint.
    What does not depend on a prompt is computed once, in O(K² Q) a step with K states and the Q
    states that the automaton may be in, and takes K Q float64 numbers a step.

    Args:
        hmm: Of inner products; it stays as it is now.
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
        r"""Log-probability that the constraint holds, given the first words and each next word.

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
        """Sample independent sentences given the constraint, exactly, without ``<eos>``.

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
                found += self._sample(first, state, place, min(AT_ONCE, count - done), generator)
        lines = (" ".join(self.vocabulary.decode(codes)) for codes in found)
        return [f"{prompt} {line}".strip() for line in lines]

    # Joining them with a prompt

    def _begin(self, prompt: str) -> tuple[Tensor, int, int]:
        """Next-state log-probabilities ``(K,)``, automaton state and word count after a prompt."""
        codes = encode([prompt], self.vocabulary, "prompt").values[0, :-1]
        if len(codes) > self.max_words:
            text = f"prompt must have at most max_words = {self.max_words} words; got {len(codes)}"
            raise ValueError(f"{text}. Shorten it, or give a larger max_words.")
        state = 0
        for kind in self._class[codes].tolist():
            state = int(self.constraint.table[state, kind])
        with torch.no_grad():
            return next_states(self._hmm, codes).double(), state, len(codes)

    def _of_words(self, first: Tensor, state: int, t: int) -> tuple[Tensor, Tensor]:
        """Log-probability of each next word jointly with the constraint, and alone, ``(V,)``."""
        joint, free = self._ahead.of_tokens(first.exp().unsqueeze(0), torch.tensor([state]), t)
        return joint[0].cpu(), free[0].cpu()

    def _check_possible(self, first: Tensor, state: int, t: int, prompt: str) -> None:
        if self._ahead.log_joint(first, state, t) == -inf:
            raise ValueError(
                f"prompt must leave the constraint possible within max_words = {self.max_words} "
                f"words; {self.constraint.name} cannot hold after {prompt!r}. "
                "Give a larger max_words, or another prompt."
            )

    def _sample(
        self, first: Tensor, state: int, begin: int, count: int, generator: torch.Generator | None
    ) -> list[Tensor]:
        """Sample codes of words that follow a prompt, given the constraint; without ``<eos>``."""
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
        """Unnormalised log-probabilities of the class of the next word, ``(n, C + 1)``."""
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
    """Symbol class in the automaton of each word of the vocabulary, ``(V,)``."""
    classes = torch.zeros(len(vocabulary), dtype=torch.long)
    for symbol, number in constraint.classes.items():
        code: Any = vocabulary.index(symbol) if symbol in vocabulary else symbol
        if not isinstance(code, int) or code >= len(vocabulary) or vocabulary[code] == END:
            raise ValueError(
                f"constraint must be of words of the vocabulary, {END} not among them; {symbol!r} "
                f"is none of its {len(vocabulary)}."
            )
        if classes[code]:
            raise ValueError(
                f"constraint must name {vocabulary[code]!r} by word or by code, not by both."
            )
        classes[code] = number
    return classes
