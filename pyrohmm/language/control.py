r"""Steering any language model by an HMM of the same tokens, so that a constraint holds.

At each step the probability of a token is multiplied by that which the HMM gives to the constraint,

.. math:: q(v \mid x_{1:t}) \propto p(v \mid x_{1:t}) \, p_\mathrm{HMM}(\text{constraint} \mid
          x_{1:t}, v),

so that the constraint holds in the end, whatever the model.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_kind, check_size
from ..distributions.hmm import HMM
from ..ops.automata import Automaton
from .steering import Lookahead
from .tokens import over_tokens, token_texts


class ConstraintProcessor:
    r"""A ``LogitsProcessor`` of ``transformers`` with which every text satisfies a constraint.

    ``model.generate(..., max_new_tokens=max_tokens, logits_processor=[processor])``, with samples
    or beams, a batch of any prompts, padded on the left. The constraint is of the tokens after the
    prompt. It holds for each text that has ended, or has ``max_tokens`` tokens. Special tokens that
    it does not name are never written, but for ``end``. Assisted generation is refused: tokens that
    it rejects look like other prompts. The backward pass over states of the HMM and of the
    automaton is computed here, once for any number of texts.

    Args:
        hmm: An HMM of the same tokens, whose states emit symbols; such as one that is fitted to
            texts of the model: ``fit_em(TabularHMM(K, categorical(V)), texts, batch_size=256)``.
        constraint: Over words, made by the functions of ``automata``; or over codes of tokens.
        tokenizer: As for :func:`token_texts`.
        max_tokens: Largest number of tokens after the prompt, the end not counted.
        end: Code of the token that ends a text; by default ``tokenizer.eos_token_id``, or None, and
            every text has ``max_tokens`` tokens.
        padding: Code of the token to the left of shorter prompts; by default
            ``tokenizer.pad_token_id``.
        must_end: Whether ``end`` must follow in time; otherwise a text may be cut after
            ``max_tokens`` tokens, where the constraint holds.
        read_prompt: Whether the HMM reads the prompt, too.
        ignore_case: As for :func:`over_tokens`.

    Raises:
        ValueError: If the HMM has other tokens than the tokenizer, no text of so many tokens
            satisfies the constraint, or as :func:`over_tokens`.

    Example:
        >>> tokens = ["the", " cat", " sat", "."]
        >>> even = torch.full((2, 2), 0.5).log()
        >>> emission = Categorical(torch.tensor([[0.4, 0.1, 0.4, 0.1], [0.2, 0.1, 0.2, 0.5]]))
        >>> hmm = HMM(even[0], even, emission, torch.tensor(3))
        >>> wanted = automata.must_contain("cat") & automata.must_not_contain("sat")
        >>> processor = ConstraintProcessor(hmm, wanted, tokens, max_tokens=2)
        >>> scores = torch.zeros(1, 4)  # of a model for which all tokens are equally probable
        >>> processor(torch.tensor([[0]]), scores).softmax(-1)
        tensor([[0.1667, 0.6667, 0.0000, 0.1667]])
    """

    def __init__(
        self,
        hmm: HMM,
        constraint: Automaton,
        tokenizer: Any,
        max_tokens: int,
        *,
        end: int | None = None,
        padding: int | None = None,
        must_end: bool = False,
        read_prompt: bool = True,
        ignore_case: bool = False,
    ) -> None:
        check_size("max_tokens", max_tokens)
        wanted = "an Automaton, such as automata.must_contain('word')"
        check_kind("constraint", constraint, Automaton, wanted)
        end = getattr(tokenizer, "eos_token_id", None) if end is None else end
        self.padding = getattr(tokenizer, "pad_token_id", None) if padding is None else padding
        self.read_prompt = read_prompt
        texts = token_texts(tokenizer)
        if not constraint.classes or any(isinstance(symbol, str) for symbol in constraint.classes):
            constraint = over_tokens(constraint, texts, ignore_case)
        codes: list[Any] = [*constraint.classes, *([] if end is None else [end])]
        if codes and not 0 <= min(codes) <= max(codes) < len(texts):
            raise ValueError(
                f"codes in constraint and end must be of the {len(texts)} tokens of tokenizer, "
                f"from 0; got {min(codes)} to {max(codes)}."
            )
        classes = torch.zeros(len(texts), dtype=torch.long)
        special = {n for n, text in enumerate(texts) if text is None} - {end, *constraint.classes}
        if special:  # whatever was complemented, or is over codes
            no_special = Automaton([0, 1], [dict.fromkeys(sorted(special), 1), {}], [0])
            constraint = (constraint & no_special)._named(constraint.name)
        for code, number in constraint.classes.items():
            classes[int(code)] = number
        with torch.no_grad():
            self.lookahead = Lookahead(
                hmm, constraint, classes, end, max_tokens, must_end and end is not None
            )
        self._log_initial = hmm.log_initial
        self.reset()

    def reset(self) -> None:
        """Forget the texts of earlier calls, so that the next call begins with prompts."""
        self._texts: list[tuple[Tensor, int]] = []  # of the last two prompts, and their lengths

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of the next tokens ``(n, V)`` with the log-probability of the constraint added.

        Args:
            input_ids: ``(n, T)``, prompts and what has been generated.
            scores: ``(n, V)``, logits or log-probabilities.

        Raises:
            ValueError: If there are fewer scores than tokens or texts, a text is longer than
                ``max_tokens``, or one cannot satisfy the constraint any more, with the tokens that
                have scores; or if tokens have been taken back.
        """
        count = self.lookahead.emissions.num_tokens
        if scores.size(-1) < count or len(scores) != len(input_ids):
            raise ValueError(
                f"scores must be of {len(input_ids)} texts and the {count} tokens of the HMM; got "
                f"shape {tuple(scores.shape)}. The language model, the tokenizer and the HMM must "
                "have the same vocabulary."
            )
        with torch.no_grad():
            self._read(input_ids.cpu())
            running = (self._states >= 0).nonzero().squeeze(-1)
            if not len(running):
                return scores
            ahead = self._ahead(running).to(scores)
            ahead = pad(ahead, (0, scores.size(-1) - count), value=-inf)
            found = scores.index_add(0, running.to(scores.device), ahead)
        if not bool((found.amax(-1)[running.to(found.device)] > -inf).all()):  # NaN also
            raise ValueError(
                f"scores must leave a token after which {self.lookahead.constraint.name} can hold; "
                "all are -inf, or NaN. Look at the model, and at processors before this one."
            )
        return found

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-probability by the HMM of the constraint, before a text and after each token.

        Args:
            tokens: ``(T,)``, codes of a text without its end, and without a prompt.

        Returns:
            ``(T + 1,)``, in nats; -inf where it cannot hold any more.

        Raises:
            ValueError: If there are more than ``max_tokens`` tokens, or the end is among them.

        Example:
            >>> even = torch.full((1, 1), 0.0)
            >>> hmm = HMM(even[0], even, Categorical(torch.ones(1, 2)), torch.tensor(1))
            >>> processor = ConstraintProcessor(hmm, automata.must_contain("b"), [" a", " b"], 2)
            >>> processor.log_prob(torch.tensor([0, 1])).exp()
            tensor([0.7500, 0.5000, 1.0000])
        """
        ahead, state = self.lookahead, 0
        if tokens.numel() > ahead.max_tokens or ahead.end in tokens.tolist():
            raise ValueError(
                f"tokens must be at most max_tokens = {ahead.max_tokens}, without the end; got "
                f"{tokens.tolist()}. Pass a larger max_tokens."
            )
        probs = self._log_initial.exp().unsqueeze(0)
        with torch.no_grad():
            found = [ahead.log_joint(probs[0].log(), state, 0)]
            for t, token in enumerate(tokens.reshape(-1).tolist(), 1):
                state = int(ahead.constraint.table[state, ahead.classes[token]])
                probs = self._step(probs, torch.tensor([token]))
                found.append(ahead.log_joint(probs[0].log(), state, t))
        return torch.tensor(found)

    def _read(self, ids: Tensor) -> None:
        """Update automaton states, -1 after the end, and next-state probabilities of each row."""
        ahead, parents = self.lookahead, self._parents(ids)
        if parents is None:
            probs = self._log_initial.exp().expand(len(ids), -1)
            waiting = torch.ones(len(ids), dtype=torch.bool)
            for tokens in ids.unbind(1) if self.read_prompt else ():
                waiting &= tokens == (-1 if self.padding is None else self.padding)
                probs = torch.where(
                    waiting.to(probs.device)[:, None], probs, self._step(probs, tokens)
                )
            self._probs, self._num_tokens = probs, 0
            self._states = torch.zeros(len(ids), dtype=torch.long)
            self._texts = [(ids, ids.size(1)), *self._texts[:1]]
        else:
            tokens, states = ids[:, -1], self._states[parents]
            ended = (states < 0) | (tokens == (-1 if ahead.end is None else ahead.end))
            known = pad(ahead.constraint.table, (0, 1))  # the last class is that of the end
            self._states = known[states, ahead.classes[tokens]].masked_fill(ended, -1)
            self._probs = self._step(self._probs[parents.to(self._probs.device)], tokens)
            self._num_tokens += 1
            self._texts[0] = (ids, self._texts[0][1])

    def _parents(self, ids: Tensor) -> Tensor | None:
        """Index of the text of the last call that each text continues; None if they are prompts."""
        length = ids.size(1)
        for number, (texts, begin) in enumerate(self._texts):
            if not begin < length <= texts.size(1) + 1:
                continue
            same = (ids[:, None, :-1] == texts[:, : length - 1]).all(-1)
            if not bool(same.any(1).all()):
                continue
            if number or length <= texts.size(1):
                raise ValueError(
                    "input_ids must be prompts, or one token longer than in the last call; these "
                    "go on from an earlier one. Generate without assistant_model, "
                    "prompt_lookup_num_tokens and the like; call reset() before other prompts."
                )
            return same.byte().argmax(1)
        return None

    def _step(self, probs: Tensor, tokens: Tensor) -> Tensor:
        """Filter step: probabilities of the next state after tokens ``(n,)``."""
        joint = probs * self.lookahead.emissions.column(tokens)
        total = joint.sum(-1, keepdim=True)
        # what the HMM cannot emit tells nothing
        return self.lookahead.transitions.forward_from_all(
            torch.where(total > 0, joint / total, probs)
        )

    def _ahead(self, running: Tensor) -> Tensor:
        """Log-probability of the constraint after each next token, of the rows that go on."""
        ahead, t, states = self.lookahead, self._num_tokens, self._states[running]
        if t > ahead.max_tokens or (t == ahead.max_tokens and ahead.end is None):
            raise ValueError(
                f"texts must have at most max_tokens = {ahead.max_tokens} tokens after the prompt; "
                f"got {t}. Generate fewer, or pass a larger max_tokens here; call reset() before "
                "other prompts."
            )
        joint, free = ahead.of_tokens(self._probs[running.to(self._probs.device)], states, t)
        found = torch.where(joint.isneginf(), joint, (joint - free).clamp(max=0.0))
        impossible = found.isneginf().all(-1)
        if bool(impossible.any()):  # for the HMM: any token after which it may hold
            allowed = ahead.possible(states, t).to(found)
            if bool(allowed.isneginf().all(-1).any()):
                text = f"input_ids must leave {ahead.constraint.name} possible; after one it is not"
                raise ValueError(f"{text}. Sample with this processor from the prompt on.")
            found = torch.where(impossible[:, None], allowed, found)
        return found
