"""How long an epoch of training takes with thousands of states, beside the straightforward way.

A neural HMM of 128 Brown clusters on the Penn Treebank (929,589 tokens), state dropout 0.5,
float32, two threads, AdamW, by ``fit_map``. *One level* is the paper's parameterization, *two
levels* moves to a block first. The straightforward way is what one writes first: the whole matrix
of the kept states by a log-softmax, for each batch of 512 tokens; log-potentials for each token;
the forward algorithm in logarithms, and autograd through it. Emission and networks are the same.

Seconds per epoch are those of a step times the number of steps in an epoch. Ours and the other are
measured in turn, in five rounds, the first steps of each round left out; ``low`` and ``high`` are
the fastest and the slowest round. ``scaling`` are ours alone, by the number of states and by the
number of tokens in a batch; its ``gigabytes`` are the peak of the process.

Writes ``large_hmm_speed.json`` and ``large_hmm_speed.png``.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import pyro
import torch
from common import FOLDER, arguments, earlier, write
from common.text import Text, brown, read
from torch import Tensor, nn

from pyrohmm import MarginalModel, NeuralHMM, Sequences, blocks, fit_map
from pyrohmm.batches import cut_by_steps
from pyrohmm.neural import draw_states

CLUSTERS, ROUNDS, BATCH, SMALL = 128, 5, 8192, 512
TARGETS = {4096: (40.0, 10.0), 32768: (300.0, 15.0)}  # seconds an epoch, and times faster


class Watch(torch.optim.AdamW):
    """AdamW that notes when its steps end."""

    ends: list[float]

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3, weight_decay=0.0, fused=True)
        Watch.ends = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        result = super().step(*args, **kwargs)
        Watch.ends.append(time.perf_counter())
        return result


def ours(module: NeuralHMM, data: Sequences, tokens: int, steps: int) -> list[float]:
    """Seconds of ``steps`` steps."""
    fit_map(
        MarginalModel(module), data, num_steps=steps + 3, batch_tokens=tokens, optimizer=Watch,
        clip_norm=5.0, tolerance=None, progress=False,
    )  # fmt: skip
    return [b - a for a, b in zip(Watch.ends[2:], Watch.ends[3:])]


def per_epoch(data: Sequences, tokens: int) -> int:
    """Steps in an epoch."""
    return len(cut_by_steps(data.lengths, data.lengths.argsort(), tokens))


def plain_loss(module: NeuralHMM, batch: Sequences) -> Tensor:
    """The negative log evidence per token, straightforwardly."""
    states = draw_states(module.num_states, module.blocks, module.dropout)
    assert module.blocks is not None
    kept = module.blocks.keep(states)
    hmm = module._build(states, kept, batch.lengths, None)
    transition = (hmm.transition.leave @ hmm.transition.enter.mT).log_softmax(-1)
    own = kept.states[kept.symbol_block[batch.values]]  # (N, T, k)
    seen = hmm.log_emission[batch.values]
    alpha = hmm.log_initial[own[:, 0]] + seen[:, 0]
    potentials = transition[own[:, :-1].unsqueeze(-1), own[:, 1:].unsqueeze(-2)]
    potentials = potentials + seen[:, 1:].unsqueeze(-2)
    for t in range(1, batch.num_steps):
        moved = (alpha.unsqueeze(-1) + potentials[:, t - 1]).logsumexp(-2)
        alpha = torch.where((t < batch.lengths).unsqueeze(-1), moved, alpha)
    return -alpha.logsumexp(-1).sum() / batch.num_observed


def plain(
    module: NeuralHMM, data: Sequences, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Seconds of ``steps`` steps of the straightforward way, on batches of 512 tokens."""
    parts = cut_by_steps(data.lengths, data.lengths.argsort(), SMALL)
    taken = []
    for i in torch.randint(len(parts), (steps + 1,)).tolist():
        begun = time.perf_counter()
        loss = plain_loss(module, data.batch(parts[i]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    return taken[1:]


def model(clusters: Tensor, words: int, states: int, two_level: bool) -> NeuralHMM:
    """A neural HMM of so many states."""
    pyro.set_rng_seed(0)
    each = blocks.from_clusters(clusters, states // CLUSTERS)
    return NeuralHMM(states, words, 256, blocks=each, two_level=two_level, dropout=0.5)


def compare(text: Text, clusters: Tensor, states: int, quick: bool) -> list[dict[str, Any]]:
    """Ours, on one and two levels, and the straightforward way, in turn."""
    data, words = text.train, len(text.words)
    modules = {name: model(clusters, words, states, name == "two levels")
               for name in ("two levels", "one level")}  # fmt: skip
    simple = model(clusters, words, states, False)
    optimizer = torch.optim.AdamW(simple.parameters(), lr=1e-3, fused=True)
    large = states > 8192
    steps = {"two levels": 10, "one level": 4 if large else 10, "plain": 2 if large else 10}
    if quick:
        steps = dict.fromkeys(steps, 1)
    epochs: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 if quick else ROUNDS):
        for name, module in modules.items():
            taken = ours(module, data, BATCH, steps[name])
            epochs[name].append(sum(taken) / len(taken) * per_epoch(data, BATCH))
        taken = plain(simple, data, optimizer, steps["plain"])
        epochs["plain"].append(sum(taken) / len(taken) * per_epoch(data, SMALL))
    rows = []
    for name, found in epochs.items():
        ratios = [b / a for a, b in zip(found, epochs["plain"])]
        target, faster = TARGETS.get(states, (None, None))
        rows.append(
            {
                "part": "compare", "states": states, "way": name, "steps": steps[name] * len(found),
                "tokens": SMALL if name == "plain" else BATCH, "seconds_per_epoch": median(found),
                "low": min(found), "high": max(found), "times_faster": median(ratios),
                "target_seconds": target if name == "two levels" else None,
                "target_times_faster": faster if name == "two levels" else None,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def one(task: tuple[Tensor, int, int, int, bool, Text, int]) -> dict[str, Any]:
    """Ours alone, in a process of its own."""
    clusters, words, states, tokens, two_level, text, steps = task
    torch.set_num_threads(2)
    module = model(clusters, words, states, two_level)
    taken = ours(module, text.train, tokens, steps)
    count = per_epoch(text.train, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "part": "scaling", "states": states, "tokens": tokens,
        "way": "two levels" if two_level else "one level", "steps": len(taken),
        "seconds_per_epoch": median(taken) * count, "low": min(taken) * count,
        "high": max(taken) * count, "gigabytes": peak,
    }  # fmt: skip


def scaling(text: Text, clusters: Tensor, quick: bool) -> list[dict[str, Any]]:
    """By states, and by tokens in a batch."""
    sizes = [1024, 4096] if quick else [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    tasks = [(states, BATCH, True) for states in sizes]
    tasks += [(states, BATCH, False) for states in sizes if states <= 32768]
    if not quick:
        tasks += [(8192, tokens, True) for tokens in (512, 1024, 2048, 4096, 16384)]
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for states, tokens, two_level in tasks:
            steps = 1 if quick else 4 if states > 8192 and not two_level else 12
            task = (clusters, len(text.words), states, tokens, two_level, text, steps)
            rows.append(pool.apply(one, (task,)))
            print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """The picture."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for way, mark in (("two levels", "o-"), ("one level", "s-")):
        found = [row for row in rows if row["part"] == "scaling" and row["way"] == way]
        found = sorted((row["states"], row["seconds_per_epoch"]) for row in found
                       if row["tokens"] == BATCH)  # fmt: skip
        left.plot(*zip(*found), mark, label=f"pyrohmm, {way}")
    plain_rows = [row for row in rows if row["way"] == "plain"]
    found = sorted((row["states"], row["seconds_per_epoch"]) for row in plain_rows)
    left.plot(*zip(*found), "x--", label="straightforward, one level")
    left.set(xscale="log", yscale="log", xlabel="states", ylabel="seconds per epoch")
    left.set_xscale("log", base=2)
    left.set_title(f"Penn Treebank, batches of {BATCH:,} tokens")
    left.legend()
    found = sorted((row["tokens"], row["seconds_per_epoch"]) for row in rows
                   if row["part"] == "scaling" and row["states"] == 8192
                   and row["way"] == "two levels")  # fmt: skip
    right.plot(*zip(*found), "o-")
    right.set_xscale("log", base=2)
    right.set(xlabel="tokens in a batch", ylabel="seconds per epoch", ylim=(0, None))
    right.set_title("8,192 states, two levels")
    figure.savefig(FOLDER / "large_hmm_speed.png", dpi=150)


def main() -> None:
    options = arguments(__doc__, ["compare", "scaling"])
    torch.set_num_threads(2)
    text = read("letters" if options.quick else "ptb")
    clusters, _ = brown(text, CLUSTERS)
    rows = [row for row in earlier("large_hmm_speed") if row["part"] not in options.only]
    if "compare" in options.only:
        for states in (1024,) if options.quick else (4096, 32768):
            rows += compare(text, clusters, states, options.quick)
    if "scaling" in options.only:
        rows += scaling(text, clusters, options.quick)
    if not options.quick:
        write("large_hmm_speed", rows, threads=2)
        draw(rows)


if __name__ == "__main__":
    main()
