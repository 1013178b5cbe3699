"""``Backend``: the operations on which recursions rest, by torch, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import torch_chain, torch_chunks, torch_segments
from .chain import Chain
from .log_space import finite_or_zero
from .masks import exists
from .segment_chain import SegmentChain

CHUNK = 1 << 24, 1 << 17  # numbers in float64 at once, on a device and in the cache of a core


class Backend:
    """The operations by torch, one step at a time; a subclass may have faster ones.

    Tensors of dense chains are time-major: T steps of G groups of n sequences with K states, and
    each group has transition matrices ``(S, G, K, K)`` with S = 1 or T - 1 (:class:`.chain.Chain`).
    Results are written into the tensors that are named last.
    """

    def take_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows ``(M, K)`` of ``table`` ``(V, K)`` at the integers ``rows`` ``(M,)``."""
        return table.index_select(0, rows)

    def add_rows(self, values: Tensor, rows: Tensor, out: Tensor) -> None:
        """Add each of ``values`` ``(M, K)`` to the row of ``out`` ``(V, K)`` that ``rows`` says."""
        out.index_add_(0, rows, values.to(out.dtype))

    def add_products(self, weights: Tensor, rows: Tensor, out: Tensor) -> None:
        """Add the products of ``weights`` ``(*S, N, K)`` and ``rows`` ``(*S, N, F)``, over all N.

        They are of float32, and ``out`` ``(*S, K, F)`` and every sum of float64.
        """
        width = out.shape[:-2].numel() * (weights.size(-1) + rows.size(-1))
        size = max(32, CHUNK[rows.device.type == "cpu"] // max(width, 1))
        for weight, part in zip(weights.split(size, -2), rows.split(size, -2)):
            out += weight.double().mT @ part.double()

    def forward(
        self, initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor,
        limits: tuple[float, float, float], alpha: Tensor, total: Tensor, evidence: Tensor,
        exact: Tensor,
    ) -> Tensor:  # fmt: skip
        """Scaled forward messages: see :class:`.message_passing.Messages`.

        Args:
            initial: ``(G, n, K)``, probabilities.
            transition: ``(S, G, K, K)``, probabilities.
            likelihood: ``(T, G, n, K)``, log.
            lengths: ``(G, n)``, on the CPU.
            limits: Smallest positive probability of the chain, or -1 if no step is watched; twice
                the smallest normal number, above which nothing was raised to it; what a product
                must be above to be surely exact.
            alpha: ``(T, G, n, K)``, filtered probabilities; zero where padded or not exact.
            total: ``(T, G, n)``, norms of the steps.
            evidence: ``(G, n)``, log, float64.
            exact: ``(G, n)``, set to False where numbers left their range.

        Returns:
            The likelihoods in the form in which :meth:`backward` reads them.
        """
        watched = limits[0] >= 0
        weight, peak = _weigh(likelihood, watched)
        chunked = not watched and torch_chunks.chunk_length(transition, weight, lengths)
        solve = torch_chunks.forward_by_chunks if chunked else torch_chain.forward_by_steps
        solve(initial, transition, weight, lengths, limits, alpha, total, exact)
        if not bool(exact.all()):
            alpha.masked_fill_(~exact.unsqueeze(-1), 0.0)
            total.masked_fill_(~exact, 1.0)
        logs = total.double().log() + peak
        if bool((lengths < len(logs)).any()):
            padded = ~exists(lengths, len(logs), logs.device).movedim(-1, 0)
            logs = logs.masked_fill(padded, 0.0)
        torch.sum(logs, 0, out=evidence)
        return weight

    def backward(
        self, transition: Tensor, seen: Tensor, lengths: Tensor, watched: bool,
        factor: Tensor | None, alpha: Tensor, total: Tensor, exact: Tensor, gamma: Tensor,
        message: Tensor,
    ) -> None:  # fmt: skip
        """Smoothed marginals ``gamma`` and backward messages, both times ``factor`` ``(G, n)``.

        ``seen``, ``alpha``, ``total`` are those of :meth:`forward`; ``exact`` is cleared, and the
        results are zero, where numbers leave their range.
        """
        chunked = not watched and torch_chunks.chunk_length(transition, seen, lengths)
        solve = torch_chunks.backward_by_chunks if chunked else torch_chain.backward_by_steps
        solve(transition, seen, lengths, alpha, total, exact, gamma, message)
        if not bool(exact.all()):
            gamma.masked_fill_(~exact.unsqueeze(-1), 0.0)
            message.masked_fill_(~exact.unsqueeze(-1), 0.0)
        if factor is not None:
            gamma.mul_(factor.unsqueeze(-1))
            message.mul_(factor.unsqueeze(-1))

    def log_space(
        self, chain: Chain, with_posterior: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Evidence, posterior and counts in log space, for a chain in float64."""
        num_states, size = chain.likelihood.size(-1), chain.lengths.size(1)
        with torch.enable_grad():
            single = Chain(
                chain.initial.reshape(-1, 1, num_states),
                chain.transition.repeat_interleave(size, 1).requires_grad_(),  # one per sequence
                chain.likelihood.reshape(len(chain.likelihood), -1, 1, num_states).requires_grad_(),
                chain.lengths.reshape(-1, 1),
            )
            evidence, messages = torch_chain.log_space_by_steps(*single)
            counts, gamma = torch.autograd.grad(
                evidence.sum(), (single.transition, single.likelihood), materialize_grads=True
            )
        shape = chain.likelihood.shape
        messages = messages.detach().reshape(shape)
        return evidence.detach().flatten(), gamma.reshape(shape), counts, messages

    def viterbi(self, chain: Chain, best: Tensor) -> None:
        """Most probable paths ``best`` ``(T, G, n)``; zeros at padded steps are left there."""
        torch_chain.viterbi_by_steps(*chain, best)

    def sample_states(
        self, messages: Tensor, transposed: Tensor, lengths: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        """Sample paths ``states`` ``(S, T, G, n)`` backwards, from log filtered ``messages``.

        ``transposed`` is log p(z_{t+1} | z_t) with row = to; ``uniform`` ``(S, T, G, n)`` numbers
        from 0 to 1 decide.
        """
        torch_chain.sample_by_steps(messages, transposed, lengths, uniform, states)

    def segment_forward(self, chain: SegmentChain, filtering: bool) -> tuple[Tensor, ...]:
        """Forward messages of a chain with durations, in logarithms.

        Args:
            chain: The arguments.
            filtering: Whether to filter states: as if each step were the last, by the weights
                ``right_censored`` and ``both_censored``.

        Returns:
            Of segments that begin at each step and of those that end there, both together with
            the observations before and in them, ``(N, T, K)``; the log evidence ``(N,)``; and log
            p(x_{1:t}, z_t) ``(N, T, K)``, or an empty tensor. Padded steps hold anything.
        """
        return torch_segments.forward(chain, filtering)

    def segment_backward(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, evidence: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        """Derivatives of the evidences times ``weight`` ``(N,)`` by the tensors of the chain.

        ``arrive``, ``ends`` and ``evidence`` are those of :meth:`segment_forward`.
        """
        return torch_segments.backward(chain, arrive, ends, evidence, weight)

    def segment_viterbi(self, chain: SegmentChain, best: Tensor) -> None:
        """Most probable paths ``best`` ``(N, T)``; zeros at padded steps are left there."""
        torch_segments.viterbi(chain, best)

    def segment_sample(
        self, chain: SegmentChain, arrive: Tensor, ends: Tensor, uniform: Tensor, states: Tensor
    ) -> None:
        """Sample paths ``states`` ``(S, N, T)`` backwards, from the messages of the forward pass.

        ``uniform`` ``(S, N, T, 2)``, numbers from 0 to 1, decide on state and duration.
        """
        torch_segments.sample_states(chain, arrive, ends, uniform, states)


def _weigh(likelihood: Tensor, watched: bool) -> tuple[Tensor, Tensor]:
    """Likelihoods over their peak ``(T, G, n, K)``, and the logarithms of the peaks."""
    peak = finite_or_zero(likelihood.amax(-1, keepdim=True))
    weight = likelihood - peak
    tiny = torch.finfo(likelihood.dtype).tiny
    floor = math.log(tiny) + 0.1  # exp takes long at the end of its range, and beyond
    low = weight < floor
    weight.clamp_(min=floor).exp_().masked_fill_(low, tiny if watched else 0.0)
    if watched:  # only hard zeros may be zero
        weight.masked_fill_(likelihood.isneginf(), 0.0)
    return weight, peak.squeeze(-1)


TORCH = Backend()
