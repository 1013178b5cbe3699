"""Fixed cost of a small HMM: how much of evidence and gradient is spent around the recursion.

Processor time of one thread, in microseconds, of evidence and gradient: by :class:`HMM`, built anew
from its parameters as a fit does at each step, with Pyro's default validation; by the function of
:mod:`pyrohmm.ops.recursions` on prepared tensors; and of the same graph of torch where the
recursion computes nothing. What is timed runs in turns, in bursts, of which the fastest counts.
Writes ``fixed_cost.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, write
from pyro.distributions import Categorical, Normal
from torch import Tensor

from pyrohmm import HMM
from pyrohmm.ops import recursions

SHAPES = [(1, 64, 16), (8, 64, 16), (32, 64, 4)]  # sequences, steps, states
NUM_SYMBOLS = 64


class Nothing(torch.autograd.Function):
    """Zero evidence, whose gradients are its arguments: the cost of torch alone."""

    @staticmethod
    def forward(ctx: Any, initial: Tensor, transition: Tensor, logs: Tensor) -> Tensor:
        """Zero."""
        ctx.save_for_backward(initial, transition, logs)
        return logs.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        """The arguments."""
        return ctx.saved_tensors


def methods(shape: tuple[int, int, int], symbols: bool) -> dict[str, Callable[[], object]]:
    """What is timed for one shape, by name."""
    num_sequences, num_steps, num_states = shape
    lengths = torch.full((num_sequences,), num_steps)
    sizes = [(num_states,), (num_states, num_states)]
    sizes += [(num_states, NUM_SYMBOLS)] if symbols else [(num_states,), (num_states,)]
    leaves = [torch.randn(size).requires_grad_() for size in sizes]
    values = torch.randn(num_sequences, num_steps)
    if symbols:
        values = torch.randint(NUM_SYMBOLS, (num_sequences, num_steps))

    def by_hmm() -> object:
        initial, transition, *rest = leaves
        emission = Categorical(logits=rest[0]) if symbols else Normal(rest[0], rest[1].exp())
        chain = initial.log_softmax(-1), transition.log_softmax(-1)
        loss = HMM(*chain, emission, lengths).log_prob(values).sum()
        return torch.autograd.grad(loss, leaves)

    def prepared() -> tuple[Tensor, Tensor, Tensor]:
        initial, transition, *rest = leaves
        chain = initial.log_softmax(-1), transition.log_softmax(-1).unsqueeze(-3)
        if symbols:
            return *chain, rest[0].log_softmax(-1)
        apart = (values.unsqueeze(-1) - rest[0]) / rest[1].exp()
        return *chain, torch.addcmul(-rest[1], apart, apart, value=-0.5)

    def by_recursion() -> object:
        if symbols:
            evidence = recursions.log_evidence(*prepared(), lengths, values)
        else:
            evidence = recursions.log_evidence(*prepared(), lengths)
        return torch.autograd.grad(evidence.sum(), leaves)

    def by_torch() -> object:
        return torch.autograd.grad(Nothing.apply(*prepared()).sum(), leaves)

    return {"hmm": by_hmm, "recursion": by_recursion, "torch": by_torch}


def microseconds(method: Callable[[], object], calls: int) -> float:
    """Processor time of a call, of a burst of them."""
    start_time = time.process_time()
    for _ in range(calls):
        method()
    return 1e6 * (time.process_time() - start_time) / calls


def measure(shape: tuple[int, int, int], symbols: bool, calls: int, bursts: int) -> dict[str, Any]:
    """One row."""
    timed = methods(shape, symbols)
    for method in timed.values():
        microseconds(method, calls)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(bursts):
        for name, method in timed.items():
            times[name].append(microseconds(method, calls))
    best = {name: min(taken) for name, taken in times.items()}
    return {
        "sequences": shape[0],
        "steps": shape[1],
        "states": shape[2],
        "observations": "symbols" if symbols else "numbers",
        **{f"microseconds_{name}": taken for name, taken in best.items()},
        "around_the_recursion": (best["hmm"] - best["recursion"]) / best["hmm"],
        "bursts": bursts,
        "calls": calls,
    }


def main() -> None:
    """Measure all rows."""
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    calls, bursts = (2, 2) if options.quick else (100, 15)
    rows = []
    for shape in SHAPES:
        for symbols in (True, False):
            rows.append(measure(shape, symbols, calls, bursts))
            print(rows[-1], flush=True)
    if not options.quick:
        write("fixed_cost", rows)


if __name__ == "__main__":
    main()
