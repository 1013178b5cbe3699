"""Dwell times: how long a chain stays in a state, and the visits of a path as a table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .._checks import (
    broadcast_shapes,
    check_broadcast,
    check_integers,
    check_kind,
    check_lengths,
    check_range,
    check_shape,
    check_size,
)
from ..chains.semi_markov import log_mean_duration, log_survival
from ..data.steps import padded
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from ..ops.log_space import logsumexp, step_mask


class Segment(NamedTuple):
    """A maximal run of one state in one sequence.

    Attributes:
        sequence: Number of the sequence.
        state: The state.
        first: Its first step, from 0.
        last: Its last step, which belongs to it.
        length: Number of steps.
    """

    sequence: int
    state: int
    first: int
    last: int
    length: int


def segments(states: Tensor, lengths: Tensor | None = None) -> list[Segment]:
    """List the runs of equal states of each path, in order.

    ``pandas.DataFrame(segments(path))`` is a table with the columns of :class:`Segment`. Of an
    :class:`HSMM`, whose states never follow themselves, runs are its segments; those of chain m of
    a :class:`FactorialHMM` are the runs of ``hmm.chain_states(path)[..., m]``.

    Args:
        states: ``(T,)`` or ``(N, T)`` integers, paths such as those of :meth:`HMM.viterbi`, with -1
            where there is no step; or packed ``(M,)``, with lengths: those of ``fit.predict``.
        lengths: ``(N,)``, steps of each sequence, such as ``hmm.lengths``. One path has T steps by
            default, and several need them, unless there are -1.

    Example:
        >>> for segment in segments(torch.tensor([[0, 0, 1], [2, 0, 0]]), torch.tensor([3, 1])):
        ...     print(*segment)
        0 0 0 1 2
        0 1 2 2 1
        1 2 0 0 1
    """
    states, lengths = paths_of(states, lengths)
    check_shape("lengths", lengths.reshape(-1), (states.shape[:-1].numel(),), "(N,)")
    found = (part.tolist() for part in _runs(states, lengths))
    return [Segment(n, state, t, t + length - 1, length) for n, state, t, length in zip(*found)]


def paths_of(states: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Paths ``(N, T)``, or ``(T,)``, and their lengths, of padded or packed states."""
    check_kind("states", states, Tensor, "a tensor", "Ask fit.predict(data).")
    if lengths is None:
        if states.dim() > 1 and len(states) > 1 and not bool((states < 0).any()):
            raise ValueError("lengths must be given of several paths, lest 0, with which shorter "
                             "ones are padded, be taken for a state: data.lengths.")  # fmt: skip
        return states, (states >= 0).sum(-1).cpu()
    if states.dim() == 1 and lengths.numel() > 1 and int(lengths.sum()) == len(states):
        return padded(states, lengths, -1), lengths
    return states, lengths


def _runs(states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence, state, first step and number of steps of each run in paths ``(*B, T)``."""
    check_integers("states", states)
    check_integers("lengths", lengths)
    num_steps = states.size(-1)
    check_lengths(lengths, num_steps)
    batch = check_broadcast({"states": states.shape[:-1], "lengths": lengths.shape})
    states = states.detach().long().expand(*batch, num_steps).reshape(-1, num_steps)
    exists = step_mask(lengths.to(states.device).expand(batch).reshape(-1), num_steps)
    if bool((states[exists] < 0).any()):
        text = f"states must not be negative; got {int(states[exists].min())}"
        raise ValueError(f"{text}. Where sequences are padded, give lengths.")
    starts = exists.clone()
    starts[:, 1:] &= states[:, 1:] != states[:, :-1]
    sequence, first = starts.nonzero().unbind(-1)
    run = starts.flatten().cumsum(0) - 1  # numbers the runs of all paths
    return sequence, states[starts], first, run[exists.flatten()].bincount()


def dwell_time_mean(hmm: HMM) -> Tensor:
    r"""Mean number of steps that a visit to each state lasts, shape ``(*B, K)``.

    .. math:: 1 / (1 - A_{kk})

    It is infinite for a state that is never left. Of an :class:`HSMM` it is the mean of its
    durations, and of a :class:`FactorialHMM` that of its product states.

    Args:
        hmm: The model; its ``log_transition`` must not change with the step.

    Raises:
        ValueError: If ``log_transition`` changes with the step.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.0, 1.0]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrix.log(), coins, torch.tensor(5))
        >>> dwell_time_mean(hmm)
        tensor([10., inf])
    """
    if isinstance(hmm, HSMM):
        return log_mean_duration(hmm.log_duration).exp()
    return (-_log_leave(hmm)).exp()


def dwell_time_log_prob(hmm: HMM, num_steps: int) -> Tensor:
    r"""Log-probability that a visit to a state lasts 1, 2, ... steps, in nats.

    .. math:: \log p(d | k) = (d - 1) \log A_{kk} + \log (1 - A_{kk})

    Of an :class:`HSMM` it is its ``log_duration``, and -inf beyond.

    Args:
        hmm: The model; its ``log_transition`` must not change with the step.
        num_steps: The longest visit to score, D.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of a visit of d steps. A state that is never left has
        -inf throughout.

    Raises:
        TypeError: If ``num_steps`` is not an int.
        ValueError: If ``num_steps`` is less than one, or ``log_transition`` changes with the step.

    Example:
        >>> matrix = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrix.log(), coins, torch.tensor(5))
        >>> dwell_time_log_prob(hmm, 3).exp()
        tensor([[0.5000, 0.2500, 0.1250],
                [1.0000, 0.0000, 0.0000]])
    """
    check_size("num_steps", num_steps)
    if isinstance(hmm, HSMM):
        return _cut(hmm.log_duration, num_steps)
    return _log_stays(hmm, num_steps) + _log_leave(hmm).unsqueeze(-1)


def dwell_time_log_survival(hmm: HMM, num_steps: int) -> Tensor:
    r"""Log-probability that a visit to a state lasts at least 1, 2, ... steps, in nats.

    .. math:: \log S(d | k) = \log \sum_{d' \ge d} p(d' | k)

    The hazard p(d | k) / S(d | k) is the probability that a visit which has lasted d steps ends.

    Args:
        hmm: The model, an HSMM or one whose ``log_transition`` does not change with the step.
        num_steps: The longest visit to score, D.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of at least d steps.

    Raises:
        TypeError: If ``num_steps`` is not an int.
        ValueError: If ``num_steps`` is less than one, or ``log_transition`` changes with the step.

    Example:
        >>> matrix = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrix.log(), coins, torch.tensor(5))
        >>> dwell_time_log_survival(hmm, 3).exp()
        tensor([[1.0000, 0.5000, 0.2500],
                [1.0000, 0.0000, 0.0000]])
    """
    check_size("num_steps", num_steps)
    if isinstance(hmm, HSMM):
        return _cut(log_survival(hmm.log_duration), num_steps)
    _log_leave(hmm)  # raises if there is not one matrix
    return _log_stays(hmm, num_steps)


def dwell_time_hazard(states: Tensor, lengths: Tensor, num_states: int) -> tuple[Tensor, Tensor]:
    r"""Empirical hazard of dwell times: of visits of at least d steps, the share that ends after d.

    Visits that the end of a path cuts off count as long as they are seen, and not as ended (Kaplan
    and Meier, 1958, Nonparametric estimation from incomplete observations).

    Args:
        states: ``(*B, T)`` integers, paths.
        lengths: ``(*B)`` integers, the number of steps of each path.
        num_states: K.

    Returns:
        ``(K, T)`` shares, zero where there are no visits; and ``(K, T)``, how many visits lasted at
        least so long. Entry d - 1 is that of d steps.

    Raises:
        TypeError, ValueError: As :func:`dwell_counts`.

    Example:
        >>> shares, visits = dwell_time_hazard(torch.tensor([0, 0, 1, 0, 0, 0]), torch.tensor(6), 2)
        >>> visits[0], shares[0]
        (tensor([2, 2, 1, 0, 0, 0]), tensor([0.0000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000]))
    """
    ended = dwell_counts(states, lengths, num_states, complete=True)
    visits = dwell_counts(states, lengths, num_states).flip(-1).cumsum(-1).flip(-1)
    return ended / visits.clamp(min=1), visits


def dwell_counts(
    states: Tensor, lengths: Tensor, num_states: int, *, complete: bool = False
) -> Tensor:
    """Histogram of dwell times in paths that were decoded or sampled.

    Args:
        states: ``(*B, T)`` integers, paths.
        lengths: ``(*B)`` integers, the number of steps of each path.
        num_states: K.
        complete: Whether to leave out each path's last visit, which its end cuts off.

    Returns:
        ``(K, T)`` integers: entry ``[k, d - 1]`` is the number of visits to state k that lasted d
        steps, over all paths.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If states or lengths are out of range, or their shapes disagree.

    Example:
        >>> dwell_counts(torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 0, 0]]), torch.tensor([5, 3]), 2)
        tensor([[0, 2, 0, 0, 0],
                [1, 0, 1, 0, 0]])
    """
    check_size("num_states", num_states)
    sequence, state, first, count = _runs(states, lengths)
    check_range("states", state, num_states, "K - 1", "Give the number of states of the model.")
    num_steps = states.size(-1)
    place = state * num_steps + count - 1
    if complete:
        ends = lengths.to(state.device).expand(broadcast_shapes(states.shape[:-1], lengths.shape))
        place = place[first + count < ends.reshape(-1)[sequence]]
    return place.bincount(minlength=num_states * num_steps).reshape(num_states, num_steps)


class Prevalence(NamedTuple):
    """Numbers of sequences in each state at H times.

    Attributes:
        times: ``(H,)``, since the first step of each sequence.
        observed: ``(H, K)`` integers.
        expected: ``(H, K)``.
    """

    times: Tensor
    observed: Tensor
    expected: Tensor


def prevalence(hmm: ContinuousTimeHMM, states: Tensor, times: Tensor) -> Prevalence:
    """Observed and expected prevalence: numbers of sequences in each state at some times.

    At each time since their first steps the sequences are counted that last so long, or have ended
    in a state that is never left, in the state of their last step until then. Expected are as many
    from the states at the first steps, by the rates. A fit is poor where the two differ by more
    than by chance; the expected ones are a function of the HMM, and have intervals.

    Args:
        hmm: The model, with the lengths and times of N sequences.
        states: ``(N, T)`` integers, such as observations without errors, or ``hmm.viterbi(data)``;
            padding may be anything.
        times: ``(H,)``, not negative.

    Raises:
        ValueError: If shapes disagree, times or states are out of range, or rates change with the
            step or differ between sequences.

    References:
        Gentleman, Lawless, Lindsey and Yan (1994), Multi-state Markov models for analysing
        incomplete disease history data with illustrations for HIV disease.

    Example:
        >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
        >>> hmm = ContinuousTimeHMM(torch.tensor([0.0, -torch.inf]), decay,
        ...                         Categorical(torch.eye(2)), torch.tensor([2, 2]),
        ...                         torch.tensor([[0.0, 1.0], [0.0, 2.0]]))
        >>> prevalence(hmm, torch.tensor([[0, 1], [0, 0]]), torch.tensor([0.0, 1.0, 3.0]))[1:]
        (tensor([[2, 0],
                [1, 1],
                [0, 1]]), tensor([[2.0000, 0.0000],
                [0.7358, 1.2642],
                [0.0498, 0.9502]]))
    """
    if not isinstance(hmm, ContinuousTimeHMM) or states.dim() != 2:
        text = "hmm must be a ContinuousTimeHMM, and states of shape (N, T)"
        raise ValueError(
            f"{text}; got {type(hmm).__name__} and {tuple(states.shape)}. Give fit.hmm(data) and "
            "its states."
        )
    check_shape("states", states, tuple(hmm.times.shape), "that of times")
    hmm.chain.check_rates("prevalence")
    check_shape("rates", hmm.rates, (hmm.num_states,) * 2, "(K, K)", "Take those of equal rates.")
    states = states.masked_fill(~hmm.exists.to(states.device), 0)
    check_range("states", states, hmm.num_states, "K - 1", "Give the states of the model.")
    times = torch.as_tensor(times)
    if times.dim() != 1 or not bool((times >= 0).all()):
        raise ValueError(f"times must be (H,) and not negative, of 0 at first steps; got {times}.")
    elapsed = hmm.times - hmm.times[:, :1]
    last = (hmm.lengths - 1).to(elapsed.device).unsqueeze(-1)
    end, final = elapsed.gather(1, last), states.gather(1, last)
    wanted = times.to(elapsed).expand(len(states), -1).contiguous()
    place = torch.searchsorted(elapsed.masked_fill(~hmm.exists, torch.inf), wanted, right=True)
    present = (wanted <= end) | hmm.sojourn_times.isinf()[final]
    seen = one_hot(states.gather(1, place - 1), hmm.num_states)  # (N, H, K)
    observed = (seen * present.unsqueeze(-1)).sum(0)
    matrices = hmm.transition_at(times)
    begins = one_hot(states[:, 0], hmm.num_states).to(matrices).mean(0)
    return Prevalence(times, observed, observed.sum(-1, keepdim=True) * (begins @ matrices))


def _cut(table: Tensor, num_steps: int) -> Tensor:
    """Cut or pad ``table`` ``(*B, K, D)`` to ``num_steps`` columns, with -inf beyond D."""
    more = max(num_steps - table.size(-1), 0)
    return torch.nn.functional.pad(table[..., :num_steps], (0, more), value=-torch.inf)


def _log_stays(hmm: HMM, num_steps: int) -> Tensor:
    """Log-probability of 0, 1, ... self-transitions in succession, ``(*B, K, num_steps)``."""
    stay = hmm.log_transition.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    more = torch.arange(num_steps, device=stay.device)
    return (more * stay).masked_fill(more == 0, 0.0)  # 0 times -inf is NaN


def _log_leave(hmm: HMM) -> Tensor:
    """Log-probability of leaving each state, without the cancellation in 1 - p(stay)."""
    if hmm.chain.order > 1:
        hmm.chain.check_markov("the dwell time of a Markov chain")
    hmm.chain.check_constant("the dwell time")
    matrix = hmm.log_transition
    diagonal = torch.eye(matrix.size(-1), dtype=torch.bool, device=matrix.device)
    return logsumexp(matrix.masked_fill(diagonal, -torch.inf), -1)
