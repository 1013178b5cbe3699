"""The recursions of Markov chains as torch operations, on any device, of any number of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from ..._choices import CHUNKS, CLOSE, NARROW, SHARED, WIDEST
from ..._sync import exceeds
from ..backends import TRITON, compiled, pick
from ..log_space import end_masks, step_mask
from ..products import accumulated
from .chain import Gradient, Groups


def best_paths(chain: Groups, count: int) -> tuple[Tensor, Tensor]:
    """Most probable paths ``(G, n, C, T)``, zeros at padded steps; which of them there are.

    By the list Viterbi algorithm: the best paths into each state are kept at each step.
    """
    likelihood, num_states = chain.likelihood, chain.initial.size(-1)
    exists = step_mask(chain.lengths, chain.num_steps, likelihood.device)
    scores = likelihood.new_full((*chain.initial.shape, count), -torch.inf)
    scores[..., 0] = chain.initial + likelihood[..., 0, :]
    same = torch.arange(num_states * count, device=likelihood.device)
    pointers = []  # where each of the K C paths came from, among those of the step before
    for t in range(1, chain.num_steps):
        matrix = chain.transition[min(t, len(chain.transition)) - 1].unsqueeze(1)
        extended = matrix.mT.unsqueeze(-1) + scores.unsqueeze(-3)  # (G, n, to, from, C)
        ranked, order = extended.flatten(-2).sort(descending=True, stable=True)
        here = exists[..., t, None, None]
        arrived = ranked[..., :count] + likelihood[..., t, :, None]
        scores = torch.where(here, arrived, scores)
        pointers.append(torch.where(here[..., 0], order[..., :count].flatten(-2), same))
    ranked, order = scores.flatten(-2).sort(descending=True, stable=True)
    path = [order[..., :count]]
    for pointer in reversed(pointers):
        path.append(pointer.gather(-1, path[-1]))
    paths = torch.stack(path[::-1], -1) // count
    return paths.masked_fill(~exists.unsqueeze(-2), 0), ~ranked[..., :count].isneginf()


def scaled(
    chain: Groups, dtype: torch.dtype, differentiable: bool, each: bool
) -> tuple[Tensor, Tensor | None, Gradient]:
    """Scaled forward algorithm: log evidence, where nothing has underflowed, and its gradient.

    Returns:
        Log evidence ``(G, n)`` in float64; where it is exact, ``(G, n)``, or None if everywhere;
        and the gradient.
    """
    initial, transition = chain.initial.to(dtype), chain.transition.to(dtype)
    on_cpu, limits = initial.device.type == "cpu", torch.finfo(dtype)
    weight, peak, last, padded = _weigh(chain, dtype)
    steps, num_states = len(weight), weight.size(-1)
    back = differentiable or not on_cpu or not _is_safe(chain, dtype)
    # products are made in the precision in which they are summed
    wide = torch.float64 if num_states < NARROW and not (on_cpu or each) else dtype
    messages = alpha, *_, probs = _messages(initial, transition, weight, last, back)
    logs, mass, onward, moved = _joined(messages, weight, peak, padded, back, wide)
    exact, least = None, num_states * limits.tiny / limits.eps * (3 * steps if back else 1)
    if not exceeds(mass.amin(), least):
        exact = (mass > least).all(0).squeeze(-1)
    if back and exact is not None:
        lost = ~exact.unsqueeze(-1)
        alpha, onward, moved = (x.masked_fill(lost, 0.0) for x in (alpha, onward, moved))

    def gradient(weights: Tensor) -> tuple[Tensor, ...]:
        held, states = (torch.empty_like(moved, dtype=x) for x in (wide, dtype))
        torch.mul(alpha, weights.to(dtype).unsqueeze(-1), out=held)
        torch.mul(held, onward, out=states)
        states = hardshrink(states, limits.tiny) if on_cpu else states  # weights have any sign
        counts = _transitions(held, moved, probs, each)
        return states[0], counts, chain.by_logs(states.movedim(0, 2))

    return logs.sum((0, -1)), exact, gradient


def _joined(
    messages: tuple[Tensor, Tensor, Tensor, Tensor], weight: Tensor, peak: Tensor,
    padded: Tensor | None, back: bool, wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Join forward and backward messages, in the memory of these and of ``weight``.

    Returns:
        Logarithms that sum to the evidence, in float64, and how far from underflow each step is,
        both ``(T, G, n, 1)``; the factors ``(T, G, n, K)`` of forward messages in posteriors, and
        of those of the step before, with probabilities, in transitions, in ``wide``.
    """
    alpha, total, beta, probs = messages
    largest = probs.amax() if probs.numel() else probs.new_ones(())
    if back and (kernels := _kernels(weight)):
        return kernels.joined(alpha, total, beta, weight, peak, padded, largest, wide)
    if padded is not None:
        total = total.masked_fill(padded, 1.0)
    logs, mass = total.double().log().add_(peak), total
    if back:
        agreement = (alpha * beta).sum(-1, keepdim=True)
        if padded is not None:
            agreement.masked_fill_(padded, torch.inf)
        mass = total * agreement
        beta = beta.div_(agreement)
        weight = _normal(weight.mul_(beta).div_(total))  # a product of divisors may overflow
    return logs, mass / largest.clamp(min=1.0), beta, weight.to(wide)


def _kernels(weight: Tensor) -> Any:
    """Kernels of Triton, where they do what is asked of likelihoods ``(T, G, n, K)``."""
    fits = 0 < weight.numel() and weight.size(-1) <= WIDEST
    return compiled("dense._triton") if pick(weight.device, fits) is TRITON else None


def _weigh(
    chain: Groups, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Likelihoods over their largest ``(T, G, n, K)``, and log of that, ``(T, G, n, 1)``.

    Both are one and zero at padded steps. And booleans ``(T, G, n, 1)``, True from the last step of
    each sequence on, and after it; None if all sequences have T steps.
    """
    likelihood = chain.likelihood.to(dtype).movedim(2, 0)
    last = padded = None
    if bool((chain.lengths < len(likelihood)).any()):
        last, padded = end_masks(chain.lengths, len(likelihood), likelihood.device)
        likelihood = likelihood.masked_fill(padded, 0.0)
    peak = likelihood.amax(-1, keepdim=True)
    return _normal((likelihood - peak).exp_()).contiguous(), peak, last, padded


def _normal(probs: Tensor) -> Tensor:
    """Flush subnormal probabilities to zero in place, on the CPU.

    Exponentials of torch, and its other threads, do not do what :func:`.flushed` asks for.
    """
    on_cpu = probs.device.type == "cpu"
    return torch.threshold_(probs, torch.finfo(probs.dtype).tiny, 0.0) if on_cpu else probs


def _is_safe(chain: Groups, dtype: torch.dtype) -> bool:
    """Whether underflow is negligible for any observations."""
    tables = [part.to(dtype) for part in (chain.initial, chain.transition) if part.numel()]
    least = torch.stack([part.amin() for part in tables]).amin().exp()
    most = torch.stack([part.amax() for part in tables]).amax().exp().clamp(min=1.0)
    limits = torch.finfo(dtype)
    slack = most.double() * chain.initial.size(-1) * limits.tiny / limits.eps
    return bool(least.double().square() >= slack)


def _messages(
    log_initial: Tensor, log_transition: Tensor, weight: Tensor, last: Tensor | None, back: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled messages, in one kernel, by parallel chunks of few long sequences, or step by step."""
    steps, groups, size, num_states = weight.shape
    if kernels := _kernels(weight):
        return kernels.messages(log_initial, log_transition, weight, last, back)
    narrow = steps >= CHUNKS[0] and groups * size * num_states**2 <= CHUNKS[1]
    if narrow and last is None and len(log_transition) == 1:
        found = _by_chunks(log_initial, log_transition, weight, back)
        if found is not None:
            return found
    return _by_steps(log_initial, log_transition, weight, last, back)


def _by_chunks(
    log_initial: Tensor, log_transition: Tensor, weight: Tensor, back: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Scaled messages by parallel chunks of steps; None if rounding spoils them.

    A first pass goes through each chunk from every state, so K times as much. A prefix sum
    (associative scan) over what it finds has the messages at the ends of chunks.
    """
    steps, groups, size, num_states = weight.shape
    length = round(min(steps**0.5, max(8, num_states * (groups * size) ** 0.5 / 2)))
    chunks = -(-steps // length)
    padding = weight.new_ones(chunks * length - steps, groups, size, num_states)
    inside = torch.cat([weight, padding]).unflatten(0, (chunks, length))
    inside = inside.permute(1, 2, 0, 3, 4).contiguous()  # (L, G, C, n, K)
    lengths = torch.full((1, chunks, 1), length)  # the last chunk may be shorter
    lengths[:, -1] -= len(padding)
    masks = end_masks(lengths, length, weight.device)
    last = masks[0].expand(-1, groups, -1, size, -1).flatten(2, 3)
    start, matrix = log_initial.double().exp(), log_transition[0].double().exp().unsqueeze(1)
    operators = _operators(matrix, inside.double(), masks[1])
    later = _scaled(matrix @ operators[1:])
    filters = prefixes((start.unsqueeze(-2) @ operators[0]).squeeze(-2), later)  # (C, G, n, K)
    after_all = prefixes(torch.ones_like(start), later.flip(0).mT).flip(0)  # (C, G, n, K)
    begin = torch.cat([start.unsqueeze(0), filters[:-1] @ matrix.squeeze(1)])
    after = after_all.clamp(min=(num_states + 2) * torch.finfo(weight.dtype).tiny)
    begin, after = (part.transpose(0, 1).flatten(1, 2).to(weight) for part in (begin, after))
    inside = inside.flatten(2, 3)
    *found, probs = _by_steps(begin.log(), log_transition, inside, last, back, after)
    alpha, total, beta = (  # of (L, G, C n, *)
        part.unflatten(2, (chunks, size)).movedim(2, 0).flatten(0, 1)[:steps] for part in found
    )
    if not _agree(alpha[length - 1 :: length], filters[: steps // length]):
        return None
    if back:
        here = beta[length::length] * weight[length::length]
        onward = (here / here.sum(-1, keepdim=True)) @ probs[0].mT
        if not _agree(onward / onward.sum(-1, keepdim=True), after_all[:-1]):
            return None
    return alpha, total, beta, probs


def _agree(messages: Tensor, scanned: Tensor) -> bool:
    """Whether messages by chunks agree with those of the scan, relative to each entry.

    Relative to the entry: what is all but impossible may turn out to be what matters.
    """
    limits = torch.finfo(messages.dtype)
    wrong = (messages - scanned).abs() / (scanned + limits.tiny / limits.eps)
    return exceeds(-wrong.amax(), -CLOSE * limits.eps)  # NaN does not


def _operators(matrix: Tensor, weight: Tensor, padded: Tensor) -> Tensor:
    """Rescaled products of transition and likelihood matrices per chunk, ``(C, G, n, K, K)``.

    Args:
        matrix: ``(G, 1, K, K)``, probabilities.
        weight: ``(L, G, C, n, K)``.
        padded: ``(L, 1, C, 1, 1)``, True after the last step of a chunk.
    """
    rows = torch.diag_embed(weight[0])
    for here, over in zip(weight[1:], padded[1:].unsqueeze(-1)):
        arrived = rows @ matrix.unsqueeze(1) * here.unsqueeze(-2)
        rows = _scaled(torch.where(over, rows, arrived))
    return rows.movedim(1, 0)


def _scaled(operators: Tensor) -> Tensor:
    """Matrices ``(*, K, K)`` up to a factor each; their largest entry is one."""
    return operators / operators.amax((-2, -1), keepdim=True)


def prefixes(first: Tensor, operators: Tensor) -> Tensor:
    """Vectors v_0 to v_C that sum to one, with v_c = v_{c-1} M_c, in 2 log C products.

    Pairs of operators are multiplied to half as many, which give every other vector (Blelloch,
    1990).

    Args:
        first: ``(*, K)``, v_0 up to a factor.
        operators: ``(C, *, K, K)``, M up to a factor each.
    """
    first = first / first.sum(-1, keepdim=True)
    count = len(operators)
    if count == 0:
        return first.unsqueeze(0)
    pairs = _scaled(operators[: count - 1 : 2] @ operators[1::2])
    even, odd = prefixes(first, pairs), operators[::2]
    between = (even[: len(odd)].unsqueeze(-2) @ odd).squeeze(-2)
    out = first.new_empty(count + 1, *first.shape)
    out[::2], out[1::2] = even, between / between.sum(-1, keepdim=True)
    return out


def _by_steps(
    log_initial: Tensor,
    log_transition: Tensor,
    weight: Tensor,
    last: Tensor | None,
    back: bool,
    after: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled forward and backward messages, four kernels a step.

    On that way each probability is larger by as much as a product may lose, so that no message is
    too small.

    Args:
        log_initial: ``(G, n, K)``.
        log_transition: ``(S, G, K, K)``.
        weight: ``(T, G, n, K)``; one at padded steps.
        last: ``(T, G, n, 1)`` booleans, True from the last step of each sequence on; None if all
            have T steps.
        back: Whether to go back too.
        after: What follows last steps, ``(G, n, K)`` with ``last``, or one if it is nothing.

    Returns:
        Forward messages ``(T, G, n, K)`` and their norms ``(T, G, n, 1)``; backward messages,
        ``(T, G, n, K)``, or none of them, ``(T, 0, n, K)``; transition probabilities.
    """
    steps, groups, num_states, _ = log_transition.shape
    ways = 1 + back
    matrices = log_transition.new_empty(steps, ways * groups, num_states, num_states)
    transition, floor = matrices[:, :groups], (num_states + 2) * torch.finfo(weight.dtype).tiny
    _normal(torch.exp(log_transition, out=transition))
    if back:
        there = transition if steps == 1 else transition.flip(0)
        torch.add(there, floor, out=matrices[:, groups:].mT)
    seen, restart = torch.cat([weight, weight.flip(0)], 1) if back else weight, None
    if back and last is not None:  # a sequence begins anew at its last step
        going, ending = weight.masked_fill(last, 0.0), (weight * after).masked_fill(~last, 0.0)
        seen = torch.cat([weight, going.flip(0)], 1)
        restart = torch.cat([torch.zeros_like(weight), ending.flip(0)], 1)
    arrived, state = torch.empty_like(seen), torch.empty_like(seen)
    norm = seen.new_empty(*seen.shape[:-1], 1)
    torch.exp(log_initial, out=arrived[0, :groups])
    arrived[0, groups:].fill_(1.0)
    shared = state[0].numel() >= SHARED and torch.get_num_threads() > 1
    before, last_matrix = state[0], len(matrices) - 1
    for t in range(len(weight)):
        reached, here, total = arrived[t], state[t], norm[t]
        if t > 0:
            torch.bmm(before, matrices[min(t - 1, last_matrix)], out=reached)
        if restart is None:
            torch.mul(reached, seen[t], out=here)
        else:
            torch.addcmul(restart[t], reached, seen[t], out=here)
        torch.sum(here, -1, keepdim=True, out=total)
        before = here.div_(total)
        if shared:
            _normal(here)
    beta = arrived[:, groups:].flip(0)
    if back and last is not None:
        beta = torch.where(last, after, beta)
    return state[:, :groups], norm[:, :groups], beta, transition


def _transitions(alpha: Tensor, message: Tensor, probs: Tensor, each: bool) -> Tensor:
    """Joint distributions of adjacent states, summed per transition matrix or sequence.

    ``(S, G, K, K)``, or ``(S, G n, K, K)``.
    """
    if each:  # of each sequence as a group
        probs = probs.repeat_interleave(alpha.size(2), 1)
        alpha, message = (part.flatten(1, 2).unsqueeze(2) for part in (alpha, message))
    before, after = alpha[:-1].transpose(0, 1), message[1:].transpose(0, 1)  # (G, T - 1, n, K)
    if len(probs) > 1:
        return accumulated(before, after, cancels=False).transpose(0, 1) * probs
    before, after = before.flatten(1, 2), after.flatten(1, 2)
    sums = accumulated(before, after, cancels=False).unsqueeze(0)
    if each or len(alpha[0]) > 1:  # which may be added up
        return sums * probs
    return torch.mul(sums, probs, out=torch.empty_like(probs))


def filtered(chain: Groups, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Filtered log-probabilities ``(G, n, T, K)``, and the mask of exact sequences, ``(G, n)``."""
    weight, _, _, padded = _weigh(chain, dtype)
    exact = torch.zeros(chain.lengths.shape, dtype=torch.bool, device=weight.device)
    if not _is_safe(chain, dtype):
        return weight.movedim(0, 2), exact
    tables = chain.initial.to(dtype), chain.transition.to(dtype)
    state, norm, *_ = _messages(*tables, weight, None, back=False)
    limits = torch.finfo(dtype)
    right = norm.squeeze(-1) >= weight.size(-1) * limits.tiny / limits.eps
    right = right if padded is None else right | padded.squeeze(-1)
    return state.log_().movedim(0, 2), right.all(0)
