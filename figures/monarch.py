"""Monarch transitions: is a product of two block-diagonal matrices better than one dense matrix?

HMMs whose states emit any word, on the sentences of the Penn Treebank, by minibatch EM from random
parameters, in equal processor time (one thread), by exact counts: with a dense K x K matrix; with
Monarch transitions (Zhang et al., 2025, Scaling Probabilistic Circuits via Monarch Matrices), of
which each factor has sqrt(K) blocks of sqrt(K) x sqrt(K) probabilities, so that a step takes
2 K^1.5 products in place of K^2. Beside them the package's own: a neural HMM with as many states in
128 blocks that belong to Brown clusters, by gradient steps in the same time (clusters are not
counted). Perplexity is per token with ``<eos>``, on validation and test text.

Writes ``monarch.json``, after each row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pyro
import torch
from common import arguments, earlier, write
from common.text import Text, read
from torch import Tensor

from pyrohmm import Sequences, language
from pyrohmm.data.batches import Batches, cut_by_steps

PARTS = ["dense", "small", "large", "blocks"]
SECONDS = 200.0  # of training, for each
TOKENS = 4096  # in a batch of the E-step
EVERY = 8  # such batches between two M-steps
DECAY = 0.7


class Chain:
    """Tables of an HMM, whose transition is one matrix or a product of block-diagonal ones.

    Each of ``stages`` is ``(m, b, c)``, m blocks of b x c probabilities; states are then exchanged
    so that the next has c blocks.
    """

    def __init__(self, num_states: int, shares: Tensor, monarch: bool) -> None:
        side = math.isqrt(num_states)
        shapes = [(side, side, side)] * 2 if monarch else [(1, num_states, num_states)]
        self.initial = torch.randn(num_states).softmax(-1)
        self.stages = [torch.randn(shape).softmax(-1) for shape in shapes]
        self.emission = shares.unsqueeze(1) * torch.randn(len(shares), num_states).exp()  # (V, K)
        self.emission /= self.emission.sum(0)

    def tables(self) -> list[Tensor]:
        """All of them, columns summing to one for the emission, rows for others."""
        return [self.initial, *self.stages, self.emission]

    def through(self, probs: Tensor) -> list[Tensor]:
        """Probabilities before each stage ``(m, n, b)``, and after all ``(n, K)``."""
        found = []
        for stage in self.stages:
            found.append(probs.view(len(probs), stage.size(0), -1).transpose(0, 1))
            probs = (found[-1] @ stage).permute(1, 2, 0).reshape(len(probs), -1)
        return [*found, probs]

    def back(self, values: Tensor) -> list[Tensor]:
        """Sums over what follows: values after each stage ``(m, n, c)``, and before all."""
        found = []
        for stage in reversed(self.stages):
            found.append(values.view(len(values), -1, stage.size(0)).permute(2, 0, 1))
            values = (found[-1] @ stage.mT).transpose(0, 1).reshape(len(values), -1)
        return [values, *found][::-1]

    def forward(self, words: Tensor, exists: Tensor) -> tuple[list[Tensor], Tensor]:
        """Filtered probabilities by step, and log-scales (N, T), of words (N, T)."""
        predicted, filtered, scales = self.initial.expand(len(words), -1), [], []
        for t in range(words.size(1)):
            joint = predicted * self.emission[words[:, t]]
            total = joint.sum(-1, keepdim=True)
            filtered.append(joint / total)
            scales.append(total)
            if t + 1 < words.size(1):
                predicted = self.through(filtered[-1])[-1]
        return filtered, torch.cat(scales, 1).where(exists, 1.0)

    def add_counts(self, words: Tensor, exists: Tensor, counts: list[Tensor]) -> float:
        """Add the expected counts of a batch; its log evidence."""
        filtered, scales = self.forward(words, exists)
        after = torch.ones_like(filtered[0])
        for t in reversed(range(words.size(1))):
            here = exists[:, t]
            smoothed = (filtered[t] * after)[here]
            counts[-1].index_add_(0, words[here, t], smoothed)
            if t == 0:
                counts[0] += smoothed.sum(0)
                break
            values = self.emission[words[here, t]] * after[here] / scales[here, t, None]
            *seen, _ = self.through(filtered[t - 1][here])
            *ahead, before = self.back(values)
            for count, stage, one, two in zip(counts[1:], self.stages, seen, ahead):
                count += (one.mT @ two) * stage
            after[here] = before
        return scales.log().sum().item()

    def perplexity(self, data: Sequences) -> float:
        """Per token of held-out text."""
        total = 0.0
        for rows in cut_by_steps(data.lengths, data.lengths.argsort(), TOKENS):
            part = data[rows]
            total -= self.forward(part.values, part.exists)[1].double().log().sum().item()
        return math.exp(total / data.num_observed)


def by_em(name: str, num_states: int, monarch: bool, text: Text, seconds: float) -> dict[str, Any]:
    """Minibatch EM for so many seconds of processor time."""
    pyro.set_rng_seed(0)
    shares = torch.bincount(text.train.values[text.train.exists], minlength=len(text.words)) + 0.1
    shares = shares / shares.sum()
    chain = Chain(num_states, shares, monarch)
    size, tokens, steps = text.train.num_observed, 0, 0
    averages = [each / num_states for each in chain.tables()]
    batches, used = Batches(text.train, batch_tokens=TOKENS), time.process_time()
    while time.process_time() - used < seconds:
        counts, seen = [torch.zeros_like(each) for each in averages], 0
        for _ in range(EVERY):
            batch = batches.take()
            chain.add_counts(batch.values, batch.exists, counts)
            seen += batch.num_observed
        steps, tokens = steps + 1, tokens + seen
        rate = (steps + 1.0) ** -DECAY
        for average, count in zip(averages, counts):
            average.mul_(1 - rate).add_(count, alpha=rate / seen)
        prior = 0.1 / size  # of each cell, against sums of one
        chain.initial = averages[0] + prior
        chain.initial = chain.initial / chain.initial.sum()
        chain.stages = [each + prior for each in averages[1:-1]]
        chain.stages = [each / each.sum(-1, keepdim=True) for each in chain.stages]
        chain.emission = averages[-1] + 100 * prior * shares.unsqueeze(1)
        chain.emission = chain.emission / chain.emission.sum(0)
    return {
        "model": name,
        "states": num_states,
        "transition_parameters": sum(each.numel() for each in chain.stages),
        "seconds": time.process_time() - used,
        "epochs": tokens / size,
        "tokens_a_second": tokens / (time.process_time() - used),
        "valid": chain.perplexity(text.valid),
        "test": chain.perplexity(text.test),
    }


def in_blocks(num_states: int, text: Text, seconds: float, clusters: int) -> dict[str, Any]:
    """A neural HMM in blocks; as many rounds as fit into the time."""
    model = language.LanguageModel.from_data(text.words, text.train, num_states, clusters)
    part = text.train[: max(64, len(text.train) // 20)]
    used = time.process_time()
    model.fit(part, num_epochs=1, progress=False)
    epoch = (time.process_time() - used) * text.train.num_observed / part.num_observed
    pyro.set_rng_seed(0)
    epochs = max(1, round(seconds / epoch))
    fresh = language.LanguageModel(text.words, model.blocks)
    used = time.process_time()
    fresh.fit(text.train, num_epochs=epochs, progress=False)
    used = time.process_time() - used
    return {
        "model": f"{clusters} blocks, neural",
        "states": num_states,
        "seconds": used,
        "epochs": epochs,
        "tokens_a_second": epochs * text.train.num_observed / used,
        "valid": fresh.perplexity(text.valid).value,
        "test": fresh.perplexity(text.test).value,
    }


def main() -> None:
    options = arguments(__doc__, PARTS, picture=False)
    torch.set_num_threads(1)
    text = read("letters" if options.quick else "ptb")
    seconds, small, large = (0.5, 16, 64) if options.quick else (SECONDS, 1024, 4096)
    tasks: dict[str, Callable[[], dict[str, Any]]] = {
        "dense": lambda: by_em("dense", small, False, text, seconds),
        "small": lambda: by_em("Monarch", small, True, text, seconds),
        "large": lambda: by_em("Monarch", large, True, text, seconds),
        "blocks": lambda: in_blocks(large, text, seconds, 4 if options.quick else 128),
    }
    rows = [row for row in earlier("monarch") if row["part"] not in options.only]
    for part in options.only:
        rows.append({"part": part, **tasks[part]()})
        print(rows[-1], flush=True)
        if not options.quick:
            write("monarch", sorted(rows, key=lambda row: PARTS.index(row["part"])))


if __name__ == "__main__":
    main()
