"""Four ways of the forward-backward recursion by torch: steps, chunks, a prefix sum, and both.

Evidence and gradient of chains without Numba, one thread, processor time. ``steps`` are taken one
after the other; ``chunks`` are of the square root of T steps, joined one after the other; the
``prefix sum`` (associative scan) multiplies the operators of single steps in pairs; ``both``, which
is what the package takes, joins short chunks by a prefix sum. ``operations`` counts what torch is
called for, which is what takes the time on an accelerator. Writes ``prefix_sum.json`` and
``prefix_sum.png``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from common import FOLDER, arguments, earlier, interleaved, pyplot, ratio, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyrohmm import recursions
from pyrohmm.ops import backends, torch_chunks

NAME = "prefix_sum"
SHAPES = [  # N, T, K; around the switch: N K^3 of a million at most, and 256 steps at least
    (1, 128, 8), (1, 512, 8), (1, 2048, 8), (1, 16384, 8), (8, 2048, 8), (128, 2048, 8),
    (1, 2048, 32), (16, 2048, 32), (1, 2048, 64), (1, 2048, 128), (4, 2048, 128),
]  # fmt: skip
TAKEN = torch_chunks.chunk_length


class Count(TorchDispatchMode):
    """How many operations are called."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def one_by_one(first: Tensor, operators: Tensor) -> Tensor:
    """The vectors of :func:`torch_chunks.prefixes`, one after the other."""
    vectors = [first]
    for operator in operators:
        vector = (vectors[-1].unsqueeze(-2) @ operator).squeeze(-2)
        vectors.append(vector / vector.sum(-1, keepdim=True))
    return torch.stack(vectors)


def evidence(chain: list[Tensor], length: int, prefixes: Callable[..., Tensor]) -> list[Tensor]:
    """Evidence and gradient with chunks of so many steps; 0 is step by step."""
    with (
        backends.use(backends.TORCH),
        mock.patch.object(torch_chunks, "chunk_length", return_value=length),
        mock.patch.object(torch_chunks, "prefixes", prefixes),
    ):
        value = recursions.log_evidence(*chain).sum()
        return [value.detach(), *torch.autograd.grad(value, chain[:3])]


def measure(shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """A row for each way, which all agree."""
    num_sequences, num_steps, num_states = shape
    torch.manual_seed(0)
    sizes = (num_states,), (1, num_states, num_states), (num_sequences, num_steps, num_states)
    logits = [torch.randn(size) for size in sizes]
    chain = [*(part.log_softmax(-1).requires_grad_() for part in logits[:2]),
             logits[2].requires_grad_(), torch.full((num_sequences,), num_steps)]  # fmt: skip
    matrix = torch.empty(1, 1, num_states, num_states, device="meta")
    weight = torch.empty(num_steps, 1, num_sequences, num_states, device="meta")
    taken, root = TAKEN(matrix, weight, chain[3]), round(num_steps**0.5)
    scan = torch_chunks.prefixes
    ways = {
        "steps": partial(evidence, chain, 0, scan),
        "chunks": partial(evidence, chain, root, one_by_one),
        "prefix sum": partial(evidence, chain, 1, scan),
        "both": partial(evidence, chain, torch_chunks.best_length(weight.shape), scan),
    }
    wanted, operations = ways["steps"](), {}
    for name, way in ways.items():
        with Count() as count:
            found = way()
        operations[name] = count.total
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * num_sequences)
    times = interleaved(ways, rounds, 10.0, time.process_time)
    rows = [
        {
            "shape N, T, K": shape, "method": name, "milliseconds": 1e3 * median(times[name]),
            "times_slower_than_both": ratio(times, name, "both"), "operations": operations[name],
            "runs": len(times[name]), "taken": "both" if taken else "steps",
        }
        for name in ways
    ]  # fmt: skip
    print(*rows, sep="\n", flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Time by shape, a bar for each way."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(10, 3.8), layout="constrained")
    ways = list(dict.fromkeys(row["method"] for row in rows))
    for number, way in enumerate(ways):
        found = [row for row in rows if row["method"] == way]
        places = [place + 0.2 * (number - 1.5) for place in range(len(found))]
        axis.bar(places, [row["milliseconds"] for row in found], 0.2, label=way)
    shapes = [", ".join(map(str, row["shape N, T, K"])) for row in rows if row["method"] == ways[0]]
    axis.set_xticks(range(len(shapes)), shapes, rotation=20)
    axis.set(yscale="log", xlabel="N, T, K", ylabel="ms of a processor")
    axis.legend(ncols=4)
    figure.savefig(FOLDER / f"{NAME}.png", dpi=150)
    plt.close(figure)


def main() -> None:
    options = arguments(__doc__)
    if options.draw:
        draw(earlier(NAME))
        return
    torch.set_num_threads(1)
    if options.quick:
        measure((1, 300, 2), 2)
        return
    rows = [row for shape in SHAPES for row in measure(shape, 9)]
    write(NAME, rows)
    draw(rows)


if __name__ == "__main__":
    main()
