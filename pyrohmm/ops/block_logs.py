"""Chains in blocks of states, in logarithms, by torch: for any device, and always exact."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .block_plan import BlockChain, Scores
from .kept import kept_on
from .log_space import finite_or_zero, log_softmax_of_parts, logsumexp


def sample_places(scores: Tensor) -> Tensor:
    """Sample a place in the last dimension by logarithms of weights; beyond it if all are zero."""
    mass = (scores - finite_or_zero(scores.amax(-1, keepdim=True))).exp().cumsum(-1)
    uniform = torch.rand(mass.shape[:-1], dtype=mass.dtype, device=mass.device)
    return (mass <= uniform.unsqueeze(-1) * mass[..., -1:]).sum(-1)


class BlockLogs:
    """Messages of a chain in blocks, as logarithms.

    Args:
        chain: The chain.
        leaving: ``(M, w)``, log-factor of each state in the transition to the next token; none by
            default.
    """

    def __init__(self, chain: BlockChain, leaving: Tensor | None = None) -> None:
        self.leaving = leaving
        self.plan, self.first, self.seen = chain.plan, chain.log_first, chain.log_seen
        self.sizes, self.device = chain.states.sizes, chain.log_seen.device
        leave, enter, log_block_probs = chain.leave, chain.enter, chain.log_block_probs
        scores = Scores(chain)
        self._place(chain.plan.base, chain.plan.stride)
        if enter is None:
            self._place(scores.base, scores.stride)
            self.log_probs = scores()
            return
        assert log_block_probs is not None
        parts = [self.seen.new_zeros(0)]
        for rows, targets, _ in scores.sources():
            logits = (leave[rows] @ scores.entered(targets).mT).to(self.seen.dtype)
            weights = log_block_probs[rows][:, targets.to(self.device)]
            parts.append(log_softmax_of_parts(logits, self.sizes[targets], weights).flatten())
        self.log_probs = torch.cat(parts)

    def _place(self, base: Tensor, stride: Tensor) -> None:
        """Note, on the device, where the probabilities of pairs are, and their numbers of states.

        From these few numbers a step computes its indices there.
        """
        sizes, source, target, self.pair, base, stride = (
            kept_on(self.device, part)
            for part in (
                self.sizes,
                self.plan.source,
                self.plan.target,
                self.plan.pair,
                base,
                stride,
            )
        )
        # (P, 4); of no pair, where no sequence has a second step, nothing is read
        self.layout = torch.stack([base, stride, sizes[source], sizes[target]], -1)

    def matrices(self, step: slice | Tensor) -> Tensor:
        """Log transition probabilities to some tokens from those before, ``(m, w, w)``."""
        places = torch.arange(self.seen.size(-1), device=self.device)
        layout = self.layout.index_select(0, self.pair[step])
        base, stride, height, breadth = layout.unsqueeze(-1).unsqueeze(-1).unbind(1)
        rows = places.unsqueeze(-1)
        beyond = (rows >= height) | (places >= breadth)
        cells = (base + rows * stride + places).masked_fill(beyond, 0)
        log_probs = self.log_probs.index_select(0, cells.flatten()).view_as(cells)
        log_probs = log_probs.masked_fill(beyond, -torch.inf)
        if self.leaving is None:
            return log_probs
        return log_probs + self.leaving[self.plan.before[step].to(self.device)].unsqueeze(-1)

    def steps(self) -> list[slice]:
        """The tokens of each step."""
        ends = [*self.plan.begins.tolist(), len(self.plan.where)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def messages(self) -> tuple[list[Tensor], list[Tensor]]:
        """Log p(x_{1:t}, z_t) less the largest, of the tokens of each step, ``(n_t, w)``.

        And what was subtracted, ``(n_t,)`` float64: logarithms of thousands of steps have no digits
        left for the probability of a state.
        """
        messages: list[Tensor] = []
        subtracted: list[Tensor] = []
        for step in self.steps():
            seen = self.seen[step]
            if not messages:
                message, before = self.first + seen, seen.new_zeros(len(seen), dtype=torch.float64)
            else:
                log_probs = self.matrices(step)
                alpha, before = messages[-1][: len(seen)], subtracted[-1][: len(seen)]
                message = logsumexp(alpha.unsqueeze(-1) + log_probs, -2) + seen
            peak = finite_or_zero(message.detach().amax(-1))
            messages.append(message - peak.unsqueeze(-1))
            subtracted.append(before + peak.double())
        return messages, subtracted

    def ends(self, steps: list[Tensor]) -> Tensor:
        """Of the results of each step, those of the sequences that end there, ``(N, ...)``."""
        pairs = zip(steps, [*steps[1:], steps[0][:0]])
        return torch.cat([now[len(then) :] for now, then in pairs][::-1])

    def log_evidence(self) -> Tensor:
        """Log evidence ``(N,)`` in the order of the plan."""
        messages, subtracted = self.messages()
        value = logsumexp(self.ends(messages), -1)
        return (value.double() + self.ends(subtracted)).to(value.dtype)

    def final_state(self) -> Tensor:
        """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``; -inf where that is impossible."""
        logs = self.ends(self.messages()[0])
        total = logs.logsumexp(-1, keepdim=True)
        return torch.where(total.isneginf(), -torch.inf, logs - total)

    def predictive(self) -> Tensor:
        """Log p(x_t | x_{1:t-1}) of each token, ``(M,)``; -inf from where it is impossible."""
        messages, subtracted = self.messages()
        total = torch.cat(messages).logsumexp(-1).double() + torch.cat(subtracted)
        first = torch.zeros_like(total[: len(messages[0])])
        before = torch.cat([first, total[self.plan.before[len(first) :].to(total.device)]])
        return torch.where(total.isneginf(), -torch.inf, total - finite_or_zero(before))

    def pairs(self, probs: Tensor) -> Tensor:
        """Posterior of the states before and at each token after the first, ``(M - N, w, w)``.

        Args:
            probs: ``(M, w)``, posterior of the state at each token.
        """
        messages = self.messages()[0]
        later = slice(len(messages[0]), len(self.plan.where))
        before = torch.cat(messages)[self.plan.before[later].to(self.device)]
        joint = before.unsqueeze(-1) + self.matrices(later)
        arrived = finite_or_zero(joint.logsumexp(-2, keepdim=True))
        return (joint - arrived).exp() * probs[later].unsqueeze(-2)

    def entropy(self) -> Tensor:
        """Entropy of the posterior over paths in nats, ``(N,)``; 0 where none is possible."""
        messages, steps = self.messages()[0], self.steps()
        entropies = [torch.zeros_like(messages[0])]  # of the states before, given that of the token
        for message, step in zip(messages, steps[1:]):
            log_probs = self.matrices(step)
            joint = message[: len(log_probs)].unsqueeze(-1) + log_probs
            share = (joint - finite_or_zero(joint.logsumexp(-2, keepdim=True))).exp()
            before = entropies[-1][: len(log_probs)].unsqueeze(-1)
            entropies.append((share * before + torch.special.entr(share)).sum(-2))
        last = self.ends(messages)
        last = (last - finite_or_zero(last.logsumexp(-1, keepdim=True))).exp()
        return (last * self.ends(entropies) + torch.special.entr(last)).sum(-1).clamp(min=0.0)

    def k_best(self, count: int) -> tuple[Tensor, Tensor]:
        """The C best paths: places in the blocks of tokens ``(C, M)``, and log p(x, z) ``(N, C)``.

        Where fewer are possible the rest have -inf, and hold places that mean nothing.
        """
        width, steps = self.seen.size(-1), self.steps()
        first = self.first + self.seen[steps[0]]
        none = first.new_full((*first.shape, count - 1), -torch.inf)
        scores, origins = [torch.cat([first.unsqueeze(-1), none], -1)], []  # (n, w, C)
        for step in steps[1:]:
            log_probs = self.matrices(step)
            before = scores[-1][: len(log_probs)]
            extended = log_probs.mT.unsqueeze(-1) + before.unsqueeze(-3)  # (n, to, from, C)
            ranked, order = extended.flatten(-2).sort(dim=-1, descending=True, stable=True)
            origins.append(order[..., :count].flatten(-2))
            scores.append(ranked[..., :count] + self.seen[step].unsqueeze(-1))
        ends = [each.flatten(-2).sort(dim=-1, descending=True, stable=True) for each in scores]
        path: list[Tensor] = []  # (n, C), places among the w C paths at a token
        for t in range(len(scores) - 1, -1, -1):
            place = ends[t].indices[..., :count]
            if path:
                after = origins[t].gather(-1, path[-1])
                place = torch.cat([after, place[len(after) :]])
            path.append(place)
        best = self.ends([each.values[..., :count] for each in ends])
        return (torch.cat(path[::-1]) // count).clamp(max=width - 1).mT, best

    def viterbi(self) -> Tensor:
        """The place in its block of each token's state on the most probable path, ``(M,)``."""
        scores, origins = [self.first + self.seen[self.steps()[0]]], []
        for step in self.steps()[1:]:
            log_probs = self.matrices(step)
            best = (scores[-1][: len(log_probs)].unsqueeze(-1) + log_probs).max(-2)
            origins.append(best.indices)
            score = best.values + self.seen[step]
            scores.append(score - finite_or_zero(score.amax(-1, keepdim=True)))
        path: list[Tensor] = []
        for t in range(len(scores) - 1, -1, -1):
            place = scores[t].argmax(-1)
            if path:
                after = origins[t].gather(-1, path[-1].unsqueeze(-1)).squeeze(-1)
                place = torch.cat([after, place[len(after) :]])
            path.append(place)
        return torch.cat(path[::-1])

    def sample(self, count: int) -> Tensor:
        """Sample paths from the posterior: places in the blocks, ``(count, M)``."""
        (messages, _), steps = self.messages(), self.steps()
        paths: list[Tensor] = []
        for t in range(len(steps) - 1, -1, -1):
            score = messages[t].expand(count, *messages[t].shape)
            if paths:
                after = paths[-1]  # (count, n)
                log_probs = self.matrices(steps[t + 1])
                index = after.mT.unsqueeze(-2).expand(-1, log_probs.size(-2), -1)
                onward = log_probs.gather(-1, index).permute(2, 0, 1)  # (count, n, w)
                ending = torch.zeros_like(score[:, after.size(1) :])
                score = score + torch.cat([onward, ending], 1)
            places = sample_places(score)
            last = self.sizes[self.plan.block[steps[t]]].to(places.device) - 1
            paths.append(places.minimum(last))  # also where no path is possible
        return torch.cat(paths[::-1], -1)
