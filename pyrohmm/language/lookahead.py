r"""Probability that a text will satisfy a constraint, by state of the chain and of the automaton.

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

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._precision import full_precision
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..ops.automata import Automaton
from ..ops.blocks.transitions import Transitions
from ..ops.log_space import finite_or_zero

FEW = 0.02  # share of all tokens for which sums over all states are computed one by one


class Emissions:
    """Probabilities of V tokens in K states, by blocks of tokens with the states that emit them.

    Args:
        hmm: Its states emit symbols; without disjoint blocks all is one block.
        dtype: Of the probabilities; that of the HMM by default.

    Attributes:
        blocks: For each its tokens ``(V_b,)``, its states, a slice, and ``(V_b, K_b)`` numbers.
    """

    def __init__(self, hmm: HMM, dtype: torch.dtype | None = None) -> None:
        self.num_states, self.device = hmm.num_states, hmm.log_initial.device
        if isinstance(hmm, BlockHMM) and hmm.blocks.disjoint:
            owner, sizes = hmm.blocks.symbol_block, hmm.blocks.sizes
            ends = sizes.cumsum(0)
            tokens = owner.argsort(stable=True).split(owner.bincount(minlength=len(sizes)).tolist())
            states = [slice(a, b) for a, b in zip((ends - sizes).tolist(), ends.tolist())]
            rows = (hmm.log_emission[part.to(self.device)].exp() for part in tokens)
            probs = [part[:, : s.stop - s.start] for part, s in zip(rows, states)]
        else:
            emitted = hmm.emission.probs.mT.contiguous()
            tokens, states, probs = (
                [torch.arange(len(emitted))],
                [slice(0, hmm.num_states)],
                [emitted],
            )
        self.blocks = [(v, s, p.to(dtype or p.dtype)) for v, s, p in zip(tokens, states, probs)]
        self.num_tokens = sum(map(len, tokens))
        self._block = torch.empty(self.num_tokens, dtype=torch.long)
        self._place = self._block.clone()
        for number, members in enumerate(tokens):
            self._block[members], self._place[members] = number, torch.arange(len(members))

    def of_classes(self, classes: Tensor, count: int) -> Tensor:
        """Probability of the tokens of each class in each state, ``(count, K)`` float64."""
        mass = torch.zeros(count, self.num_states, dtype=torch.float64, device=self.device)
        for tokens, states, probs in self.blocks:
            mass[:, states].index_add_(0, classes[tokens].to(self.device), probs.double())
        return mass

    def column(self, tokens: Tensor) -> Tensor:
        """Probability of each of some tokens ``(n,)`` in each state, ``(n, K)``."""
        found = self.blocks[0][2].new_zeros(len(tokens), self.num_states)
        for row, block, place in zip(found, self._block[tokens], self._place[tokens]):
            _, states, probs = self.blocks[block]
            row[states] = probs[place]
        return found

    def sums(self, weights: Tensor) -> Tensor:
        """Sums over states of their weights ``(n, K)`` times the probability of each token."""
        weights = weights.to(self.blocks[0][2].dtype)
        with full_precision(weights):
            if self.is_dense:
                return weights @ self.blocks[0][2].mT
            found = weights.new_empty(len(weights), self.num_tokens)
            for tokens, states, probs in self.blocks:
                found[:, tokens.to(self.device)] = weights[:, states] @ probs.mT
        return found

    @property
    def is_dense(self) -> bool:
        """Whether all states may emit all tokens."""
        return len(self.blocks) == 1

    def sums_of(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Sums over states of ``(K,)`` weights times the probability of some tokens, if dense."""
        probs = self.blocks[0][2]
        return probs[tokens] @ weights.to(probs.dtype)


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
        self.emissions = Emissions(hmm, dtype)
        if self.emissions.num_tokens != len(classes):
            raise ValueError(
                f"hmm must have the {len(classes)} tokens of the vocabulary; it has "
                f"{self.emissions.num_tokens}."
            )
        self.classes, self.end_class = classes.clone(), constraint.table.size(1)
        if end is not None:
            self.classes[end] = self.end_class
        self.device = hmm.log_initial.device
        self._set_alive()
        if not len(self.alive[0]):
            raise ValueError(
                f"constraint must hold for some text of at most {max_tokens} words or tokens; "
                f"{constraint.name} does for none. Allow more of them, or ask for less."
            )
        if isinstance(hmm, BlockHMM):
            self.transitions = hmm.chain.transitions()
        else:
            self.transitions = Transitions.of_matrix(hmm.log_transition)
        self.log_mass = self.emissions.of_classes(self.classes, self.end_class + 1).log()
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
        """Pairs of states of the automaton that follow each other, and the mass of their tokens."""
        table = self.constraint.table
        size = len(table)
        cells = (torch.arange(size).unsqueeze(1) * size + table).flatten()
        pairs, place = cells.unique(return_inverse=True)
        self._source, self._target = pairs // size, pairs % size
        mass = self.log_mass[:-1].exp().repeat(size, 1)
        sums = mass.new_zeros(len(pairs), mass.size(1)).index_add_(0, place.to(self.device), mass)
        self._log_mass_of_pairs = sums.log()

    def here(self, t: int) -> Tensor:
        """Log h_t of the states of the automaton that are alive, ``(L, K)``."""
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
        """Log-probabilities of each next token, with the constraint and without, ``(n, V)``.

        Args:
            probs: ``(n, K)``, probabilities of the next state.
            states: ``(n,)``, of the automaton.
            t: Number of tokens so far, of all.
        """
        free = self.emissions.sums(probs).double()
        joint = torch.full_like(free, -inf)
        if t < self.max_tokens:
            joint = self._of_continued(probs, states, t)
        if self.end is not None:
            ending = free[:, self.end].log()
            accepting = self.constraint.accepting[states].to(self.device)
            joint[:, self.end] = ending.masked_fill(~accepting, -inf)
        return joint, free.log()

    def possible_tokens(self, states: Tensor, t: int) -> Tensor:
        """Whether a text may still satisfy the constraint after each next token, ``(n, V)``."""
        possible = torch.zeros(len(states), self.emissions.num_tokens, dtype=torch.bool)
        if t < self.max_tokens:
            alive = self.column[t + 1] < len(self.alive[t + 1])
            possible = pad(alive[self.constraint.table[states]], (0, 1))[:, self.classes]
        if self.end is not None:
            possible[:, self.end] = self.constraint.accepting[states]
        return possible

    def _of_continued(self, probs: Tensor, states: Tensor, t: int) -> Tensor:
        """Log-probability of each next token that does not end the text, and of the constraint.

        The sum over states is computed for each pair of a row and a next state of its automaton.
        """
        after = self.after[t + 1]  # the last row is that of all that are not alive
        dead, num_tokens = len(after) - 1, self.emissions.num_tokens
        columns = pad(self.column[t + 1][self.constraint.table[states]], (0, 1), value=dead)
        goals = columns[:, self.classes]  # (n, V)
        counts = torch.stack([row.bincount(minlength=dead + 1) for row in goals])
        counts[:, dead] = 0
        row, column = counts.nonzero().unbind(1)
        peak = finite_or_zero(after.amax(-1))[column.to(self.device)]
        weights = (
            probs[row.to(self.device)] * (after[column.to(self.device)] - peak.unsqueeze(-1)).exp()
        )
        together = counts[row, column] > FEW * num_tokens * self.emissions.is_dense
        place = torch.full_like(counts, -1)  # of the sums of each pair; the last is zero
        place[row[together], column[together]] = torch.arange(int(together.sum()))
        place = place.gather(1, goals).to(self.device)
        here = together.to(self.device)
        sums = pad(self.emissions.sums(weights[here]), (0, 0, 0, 1))
        joint = sums[place, torch.arange(num_tokens, device=self.device)].double().log()
        joint += pad(peak[here], (0, 1))[place]
        for number in (~together).nonzero().flatten().tolist():
            i = int(row[number])
            tokens = (goals[i] == column[number]).nonzero().squeeze(-1).to(self.device)
            total = self.emissions.sums_of(tokens, weights[number]).double()
            joint[i, tokens] = total.log() + peak[number]
        return joint
