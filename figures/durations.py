"""Explicit durations: seconds for loss and gradient, against the chain over states and durations.

A hidden semi-Markov model of K states and durations of up to D steps, and the same distribution as
an HMM of K D states, both with their gradients by all parameters, in float64; seconds of processor
time on one thread, the best of some runs, compilation excluded. The large chain is measured on as
many sequences of two small lengths, and goes on as the straight line through both times; its
evidence and gradient on the shorter ones are compared too. Writes ``durations.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import arguments, write
from torch import Tensor
from torch.distributions import Normal

from pyrohmm import HSMM

# states, longest duration, sequences, steps of each, steps of each for the large chain
CASES = [
    (4, 50, 100, 1000, (50, 100)),
    (16, 50, 100, 1000, (10, 40)),
    (16, 200, 100, 1000, (10, 40)),
]
QUICK = [(3, 5, 4, 20, (5, 10))]
TARGET = 20.0  # times faster, with 16 states and 200 steps


def parameters(num_states: int, longest: int) -> list[Tensor]:
    """Initial, transition and duration log-probabilities, and means of the observations."""
    stay = torch.eye(num_states, dtype=torch.bool)
    parts = (
        torch.randn(num_states),
        torch.randn(num_states, num_states).masked_fill(stay, -torch.inf),
        torch.randn(num_states, longest),
    )
    return [*(part.log_softmax(-1) for part in parts), torch.randn(num_states)]


def loss_and_gradient(
    parts: list[Tensor], values: Tensor, expanded: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Minus the log evidence, and its derivatives by the parameters."""
    leaves = [part.clone().requires_grad_() for part in parts]
    initial, transition, duration, means = leaves
    lengths = torch.full((len(values),), values.size(1))
    hsmm = HSMM(initial, transition, duration, Normal(means, 1.0), lengths, validate_args=False)
    loss = -(hsmm.expanded() if expanded else hsmm).log_prob(values).sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def seconds(function: Callable[[], object], runs: int) -> float:
    """The least time of some runs, after one that is not counted."""
    function()
    times = []
    for _ in range(runs):
        start_time = time.process_time()
        function()
        times.append(time.process_time() - start_time)
    return min(times)


def measure(
    num_states: int, longest: int, count: int, num_steps: int, few: tuple[int, int], runs: int
) -> dict[str, object]:
    """One size."""
    parts = parameters(num_states, longest)
    values = torch.randn(count, num_steps)
    some = values[:, : few[0]]
    pairs = [loss_and_gradient(parts, some, expanded) for expanded in (False, True)]
    apart = [
        float((found - wanted)[wanted != 0].abs().max() / wanted.abs().max())
        for found, wanted in zip(pairs[0][1], pairs[1][1])
    ]
    ours = seconds(lambda: loss_and_gradient(parts, values, False), runs)
    large = []
    for steps in few:
        cut = values[:, :steps]
        large.append(seconds(lambda cut=cut: loss_and_gradient(parts, cut, True), runs))
    each = (large[1] - large[0]) / (few[1] - few[0])
    whole = large[1] + (num_steps - few[1]) * each
    target = TARGET if (num_states, longest) == (16, 200) else None
    return {
        "states": num_states,
        "longest_duration": longest,
        "steps": values.numel(),
        "seconds": ours,
        "expanded_states": num_states * longest,
        "expanded_steps": list(few),
        "expanded_measured_seconds": large,
        "expanded_seconds": whole,
        "times_faster": whole / ours,
        "target_times_faster": target,
        "largest_relative_difference": max(
            *apart, float((pairs[0][0] - pairs[1][0]).abs() / pairs[1][0].abs())
        ),
    }


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for case in QUICK if options.quick else CASES:
        rows.append(measure(*case, runs=1 if options.quick else 2))
        print(rows[-1], flush=True)
    if not options.quick:
        write("durations", rows)


if __name__ == "__main__":
    main()
