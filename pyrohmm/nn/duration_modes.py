r"""M-steps of parametric durations: Newton steps on the expected log-likelihood of whole durations.

With c_d expected segments of d steps, of which n are first segments that began before the data,
durations of unnormalised probabilities f(d) have the expected complete-data log-likelihood

.. math:: \sum_d c_d \log f(d) - (C - n) \log \sum_d f(d) - n \log \sum_d d \, f(d),
          \quad C = \sum_d c_d

since a moment in time falls into a duration in proportion to its length (Vardi, 1982, Nonparametric
estimation in the presence of length bias). The cut at D is part of f. In shapes, P is the number of
parameters of a state, which are real numbers here, such as the logarithm of a rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BOUND = 30.0  # of real parameters: exp(-30) is no rate and exp(30) longer than any D
LONGEST = 3.0  # step of all parameters together
CLOSE = 1e-11  # length of a step that is not worth taking


class Derivatives(NamedTuple):
    """Of some numbers ``(*B)``, by P parameters."""

    value: Tensor  # (*B)
    slope: Tensor  # (*B, P)
    bend: Tensor  # (*B, P, P)

    def __add__(self, other: tuple[Tensor, ...]) -> Derivatives:  # type: ignore[override]
        return Derivatives(*(a + b for a, b in zip(self, other)))


def _columns(*rows: tuple[Tensor, ...]) -> Tensor:
    """A vector ``(*B, P)`` or, of several rows, a matrix ``(*B, P, P)``."""
    vectors = [torch.stack(torch.broadcast_tensors(*row), -1) for row in rows]
    return vectors[0] if len(vectors) == 1 else torch.stack(vectors, -2)


# Log unnormalised probabilities (*B, D), from parameters (*B, P); D stands before P ---------------


def geometric(parameters: Tensor, max_duration: int) -> Derivatives:
    """By the logit of the probability to leave; what is longer than D counts as D."""
    leave = parameters.sigmoid()
    stays = torch.arange(max_duration, device=leave.device).to(leave)
    leaves = (stays < max_duration - 1).to(leave)
    logit = torch.nn.functional.logsigmoid
    value = leaves * logit(parameters) + stays * logit(-parameters)
    slope = leaves * (1 - leave) - stays * leave
    bend = -leave * (1 - leave) * (leaves + stays)
    return Derivatives(value, slope.unsqueeze(-1), bend[..., None, None])


def poisson(parameters: Tensor, max_duration: int) -> Derivatives:
    """Of d - 1, by the log of its mean; without what does not depend on d."""
    count = torch.arange(max_duration, device=parameters.device).to(parameters)
    value = count * parameters - torch.lgamma(count + 1)
    slope = count.expand(value.shape).unsqueeze(-1)
    return Derivatives(value, slope, torch.zeros_like(slope).unsqueeze(-1))


def negative_binomial(parameters: Tensor, max_duration: int) -> Derivatives:
    """Of d - 1, by the logs of its mean and of its shape."""
    mean, shape = (part.exp() for part in parameters.split(1, -1))
    count = torch.arange(max_duration, device=mean.device).to(mean)
    whole = mean + shape
    part, rest = mean / whole, shape / whole
    value = (
        torch.lgamma(count + shape) - torch.lgamma(shape) - torch.lgamma(count + 1)
        + count * part.log() + shape * rest.log()
    )  # fmt: skip
    above = count - mean
    by_shape = torch.digamma(count + shape) - torch.digamma(shape) + rest.log() - above / whole
    bend = torch.polygamma(1, count + shape) - torch.polygamma(1, shape) + 1 / shape
    bend = bend - 1 / whole + above / whole**2
    mixed = part * rest * above
    return Derivatives(
        value,
        _columns((rest * above, shape * by_shape)),
        _columns((-mixed - rest * mean, mixed), (mixed, shape * by_shape + shape**2 * bend)),
    )


# Log densities of priors, by all parameters ------------------------------------------------------


def gamma(parameters: Tensor, concentration: Tensor, rate: Tensor) -> Derivatives:
    """Of Gamma priors ``(*B, P)`` at the exponentials of the parameters."""
    values = parameters.exp()
    value = ((concentration - 1) * parameters - rate * values).sum(-1)
    return Derivatives(value, concentration - 1 - rate * values, (-rate * values).diag_embed())


def beta(parameters: Tensor, leave: Tensor, stay: Tensor) -> Derivatives:
    """Of Beta priors ``(*B, 1)`` at the sigmoids of the parameters."""
    probs, logit = parameters.sigmoid(), torch.nn.functional.logsigmoid
    value = (leave - 1) * logit(parameters) + (stay - 1) * logit(-parameters)
    bend = -probs * (1 - probs) * (leave + stay - 2)
    slope = (leave - 1) * (1 - probs) - (stay - 1) * probs
    return Derivatives(value.squeeze(-1), slope, bend.unsqueeze(-1))


# Maxima ------------------------------------------------------------------------------------------


def expected_log(counts: Tensor, left_censored: Tensor | None, logs: Derivatives) -> Derivatives:
    """The expected complete-data log-likelihood of this module's docstring.

    Args:
        counts: ``(*B, D)``, expected segments of each whole duration.
        left_censored: ``(*B)``, how many of these are first segments that were there before
            the data; None if there are none.
        logs: Of log f ``(*B, D)``.
    """
    steps = torch.arange(1, counts.size(-1) + 1, device=counts.device).to(counts)

    def averaged(weights: Tensor) -> tuple[Tensor, Tensor]:
        slope = (weights.unsqueeze(-1) * logs.slope).sum(-2)
        return slope, (weights[..., None, None] * logs.bend).sum(-3)

    total = Derivatives((counts * logs.value).sum(-1), *averaged(counts))
    some = counts.new_zeros(()) if left_censored is None else left_censored
    parts = [(counts.sum(-1) - some, torch.zeros_like(steps))]
    for number, weights in parts if left_censored is None else [*parts, (some, steps.log())]:
        scores = logs.value + weights
        shares = scores.softmax(-1)
        mean, bend = averaged(shares)
        apart = logs.slope - mean.unsqueeze(-2)
        spread = torch.einsum("...d,...dp,...dq->...pq", shares, apart, apart)
        size = -number
        total += (
            size * scores.logsumexp(-1), size.unsqueeze(-1) * mean,
            size[..., None, None] * (bend + spread),
        )  # fmt: skip
    return total


def maximum(function: Callable[[Tensor], Derivatives], start: Tensor, free: Tensor) -> Tensor:
    """Parameters ``(*B, P)`` where ``function`` is largest, by Newton steps that only go up.

    A direction in which it bends upwards is followed uphill. A step that leads down is shortened.

    Args:
        function: Each of its values ``(*B)`` depends on the parameters of its own.
        start: ``(S, *B, P)``, S points to start from; the best end is returned.
        free: ``(P,)``, booleans: which parameters are not held fixed.
    """
    held = (~free).to(start).diag_embed()

    def evaluate(point: Tensor) -> Derivatives:
        value, slope, bend = function(point)
        return Derivatives(value, slope * free, bend * free * free.unsqueeze(-1) - held)

    point, scale = start, torch.ones_like(start[..., 0])
    now = evaluate(point)
    for _ in range(200):
        curves, axes = torch.linalg.eigh(-now.bend)
        along = (axes.mT @ now.slope.unsqueeze(-1)).squeeze(-1)
        size = now.slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        step = (axes @ (along / curves.abs().clamp(min=1e-12 * size)).unsqueeze(-1)).squeeze(-1)
        step = step * (LONGEST / step.norm(dim=-1, keepdim=True).clamp(min=LONGEST))
        trial = (point + scale.unsqueeze(-1) * step).clamp(-BOUND, BOUND)
        if bool(((trial - point).abs() <= CLOSE).all()):
            break
        new = evaluate(trial)
        level = (new.value - now.value).abs() <= 1e-13 * now.value.abs()  # rounding
        flatter = new.slope.norm(dim=-1) < now.slope.norm(dim=-1)
        better = torch.where(level, flatter, new.value > now.value)
        point = torch.where(better.unsqueeze(-1), trial, point)
        now = Derivatives(
            *(torch.where(better.reshape(better.shape + (1,) * i), a, b)
              for i, (a, b) in enumerate(zip(new, now)))
        )  # fmt: skip
        scale = torch.where(better, (2 * scale).clamp(max=1.0), scale / 4)
    best = now.value.argmax(0)[None, ..., None].expand(1, *point.shape[1:])
    return point.gather(0, best).squeeze(0)


def free_probs(counts: Tensor, left_censored: Tensor | None) -> Tensor:
    """Probabilities ``(*B, D)`` of free durations, given the counts of :func:`expected_log`.

    They are :math:`c_d / (C - n + u d)`, and u is where they sum to one; NaN without any count.
    """
    if left_censored is None:
        return counts / counts.sum(-1, keepdim=True)
    steps = torch.arange(1, counts.size(-1) + 1, device=counts.device).to(counts)
    others = (counts.sum(-1) - left_censored).clamp(min=0.0).unsqueeze(-1)
    root = left_censored.unsqueeze(-1) / counts.size(-1)  # the sum falls, and is at least one here
    for _ in range(100):  # Newton steps on a convex function, from the left
        probs = counts / (others + root * steps)
        fall = (probs * steps / (others + root * steps)).sum(-1, keepdim=True)
        step = (probs.sum(-1, keepdim=True) - 1) / fall
        if not bool((step > 1e-15 * root).any()):
            break
        root = torch.where(left_censored.unsqueeze(-1) > 0, root + step.clamp(min=0.0), root)
    return probs / probs.sum(-1, keepdim=True)
