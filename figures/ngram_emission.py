"""A large word model mixed with an n-gram, exactly: Penn Treebank, 32,768 states in 128 blocks.

The best plain model of ``language_models.py`` (its checkpoint, named after its settings, is read
from the folder ``CHECKPOINTS``; without one it is trained first) and an interpolated Kneser-Ney
5-gram are mixed as :class:`pyrohmm.language.NGramMixture` says: the n-gram helps to choose the
block of the next word in the transition, and the word within its block in the emission. The weights
depend on the block and on a class of what is before: the length of the longest known context, and
the weight with which the n-gram backs off from it; for the word, the longest context in which a
word of its block is known, and its share of the probability of the block.

``plain`` is the model alone, as ``language_models.json`` has it, ``n-gram`` the n-gram alone. In
``emission`` the weights of the transition are zero, in ``emission and transition`` they are not;
the network stays as it is, and the weights are fitted to 600 sentences of the first half of the
held-out text by ``NGramMixture.fit_weights``. In ``trained
jointly`` network and weights are trained together for some more of the training text (``epochs``),
of which each tenth has the probabilities of an n-gram of the other nine; then the weights alone, as
before. ``fitted`` is the first half of the held-out text, which also chose the epoch of the plain
model, ``unseen`` the second half, to which nothing was fitted. Perplexities are per token,
``<eos>`` included, with sentences independent but for the cache.

Rows are computed one by one (``--only``); fits go on from their checkpoints. Writes
``ngram_emission.json`` and ``ngram_emission.png``.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import language_models
import numpy as np
import pyro
import torch
from common import alone, arguments, earlier, pyplot, save, write
from common.text import Text, read
from language_models import BEST, SIDE_BY_SIDE, Model, blocks_of, trained
from safetensors import safe_open
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pyrohmm import MarginalModel, NeuralHMM, Sequences, fit_map
from pyrohmm.data.batches import batches_in_round, cut_by_steps
from pyrohmm.language import NGramBlockHMM, NGramMixture, NGramWeights, WarmupCosine, ngram
from pyrohmm.nn import LinearDropout
from pyrohmm.ops.blocks import Blocks

NAME = "ngram_emission"
ORDER, FOLDS = 5, 10
CLASSES = 4 * ORDER
MODEL = BEST["annealed-ptb"][0]
CHAINS = {name.split()[0] + " chains": models for name, models, _ in SIDE_BY_SIDE.values()}
CACHE = "a cache"
ROWS = (
    "plain", "n-gram", "emission", "emission and transition", "trained jointly", *CHAINS, CACHE,
    f"three chains and {CACHE}",
)  # fmt: skip
WINDOWS, SHARES = (200, 500, 1000, 2000), (0.02, 0.05, 0.08, 0.12, 0.16)
PARTS = ("fitted", "unseen", "test")
Row = dict[str, Any]


class Settings(NamedTuple):
    """Sizes of a run."""

    model: Model = MODEL
    sentences: int = 600  # to which the weights are fitted
    rounds: int = 30
    epochs: float = 0.35
    rate: float = 0.002  # of the joint training
    batch_tokens: int = 40_000  # of an evaluation


def recent(text: np.ndarray, block: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Share of each word, and of its block, among as many words before it."""
    words, blocks = np.zeros(len(block)), np.zeros(block.max() + 1)
    shares = np.zeros((2, len(text)))
    for place, word in enumerate(text):
        shares[:, place] = words[word], blocks[block[word]]
        words[word] += 1
        blocks[block[word]] += 1
        if place >= window:
            old = text[place - window]
            words[old] -= 1
            blocks[block[old]] -= 1
    count = np.minimum(np.arange(len(text)), window).clip(min=1)
    return shares[0] / count, shares[1] / count


def with_cache(columns: np.ndarray, shares: tuple[np.ndarray, np.ndarray], weight: float) -> Any:
    """The columns of an n-gram mixed with the shares of recent words and blocks."""
    of_block = (1 - weight) * np.exp(columns[:, 0]) + weight * shares[1]
    both = (1 - weight) * np.exp(columns[:, :2].sum(-1)) + weight * shares[0]
    return np.stack([np.log(of_block), np.log(both / of_block), *columns[:, 2:].T], -1)


def cached(
    parts: dict[str, Sequences], block: np.ndarray
) -> tuple[dict[str, Sequences], dict[str, Any]]:
    """The parts of the text with an n-gram that has a cache; and what was chosen for it.

    The first word of a text is the only one without words before it: the shares are zero there.
    """

    def columns(part: Sequences) -> np.ndarray:
        return part.covariates[part.exists].double().numpy()

    fitted, words = columns(parts["fitted"]), flat(parts["fitted"])
    losses = {}
    for window in WINDOWS:
        shares = recent(words, block, window)
        for weight in SHARES:
            losses[window, weight] = -with_cache(fitted, shares, weight)[:, :2].sum()
    window, weight = min(losses, key=losses.__getitem__)
    held_out = np.concatenate([words, flat(parts["unseen"])])
    shares = recent(held_out, block, window), recent(flat(parts["test"]), block, window)
    half = len(words)
    pieces = {
        "fitted": tuple(share[:half] for share in shares[0]),
        "unseen": tuple(share[half:] for share in shares[0]),
        "test": shares[1],
    }
    mixed = {
        name: with_columns(parts[name], with_cache(columns(parts[name]), piece, weight))
        for name, piece in pieces.items()
    }
    return mixed, {"cache_words": window, "cache_weight": weight}


def flat(data: Sequences) -> np.ndarray:
    """All words, one sentence after the other."""
    return data.values[data.exists].numpy()


def with_columns(data: Sequences, columns: np.ndarray) -> Sequences:
    """The same sentences with what the n-gram says of them."""
    covariates = torch.zeros(*data.values.shape, columns.shape[1])
    covariates[data.exists] = torch.from_numpy(columns).to(covariates)
    return Sequences(data.values, data.lengths, covariates=covariates)


def mixed_text(text: Text, partition: Blocks, whole: bool) -> dict[str, Sequences]:
    """The parts of the text with what the n-gram says; of the training text only if ``whole``."""
    size, half = len(text.words), len(text.valid) // 2
    counted = ngram(text.train, size, ORDER)
    parts = {"fitted": text.valid[:half], "unseen": text.valid[half:], "test": text.test}
    found = {name: counted.with_blocks(part, partition) for name, part in parts.items()}
    if whole:
        fold = torch.arange(len(text.train)) % FOLDS
        columns = torch.zeros(*text.train.values.shape, 4)
        for number in range(FOLDS):
            own = fold == number
            part = ngram(text.train[~own], size, ORDER).with_blocks(text.train[own], partition)
            columns[own, : part.num_steps] = part.covariates
        found["train"] = Sequences(text.train.values, text.train.lengths, covariates=columns)
    return found


def network(model: Model, text: Text, partition: Blocks) -> NeuralHMM:
    """The plain model with the best parameters of its training, and the dropout of its end."""
    if not language_models.file_of(model).exists():
        return cast(NeuralHMM, trained(model, model.epochs, text, partition)[1])
    dropout = LinearDropout(model.dropout, model.last_dropout or model.dropout, 1)
    module = NeuralHMM(
        model.states, len(text.words), model.dim, blocks=partition, dropout=dropout,
        two_level=model.two_level, factored=model.factored,
    )  # fmt: skip
    module.num_drawn.fill_(dropout.num_steps)
    with safe_open(language_models.file_of(model), "pt") as file, torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(file.get_tensor(f"state.held_out.best.{number}"))
    return module


def joint(neural: NeuralHMM, parts: dict[str, Sequences], settings: Settings) -> NGramMixture:
    """Network and weights, trained together."""
    data, model = parts["train"], settings.model
    steps = max(1, round(batches_in_round(data.lengths, model.tokens) * settings.epochs))
    module = NGramMixture(neural, CLASSES, CLASSES)
    folder = os.environ.get("CHECKPOINTS", tempfile.gettempdir())
    fit_map(
        MarginalModel(module), data, num_iterations=steps, batch_tokens=model.tokens,
        optimizer=partial(
            torch.optim.AdamW, lr=settings.rate, weight_decay=model.decay, fused=True
        ),
        schedule=partial(LambdaLR, lr_lambda=WarmupCosine(steps)), clip_norm=5.0, tolerance=None,
        checkpoint=None if model.panel == "quick"
        else Path(folder, f"{NAME}-joint-{settings.epochs}-{settings.rate}.fit"),
        precision=torch.bfloat16 if model.bfloat16 else None,
    )  # fmt: skip
    return module


def hmm_of(module: NGramMixture, data: Sequences) -> NGramBlockHMM:
    """The distribution of some sentences."""
    return module(data.lengths, None, data.covariates)


def at_words(weights: NGramWeights, hmm: NGramBlockHMM, data: Sequences) -> list[Tensor]:
    """The logits of both weights at each step, ``(N, T)``."""
    block = hmm.blocks.symbol_block[data.values]
    before = block.roll(1, 1)
    before[:, 0] = hmm.blocks.num_blocks
    return [
        weights.block[hmm.ngram.block_class, before],
        weights.symbol[hmm.ngram.symbol_class, block],
    ]


@torch.no_grad()
def log_probs(module: NGramMixture, data: Sequences, tokens: int) -> Tensor:
    """Log-probability of each sentence, those of like length together."""
    module.eval()
    found = torch.zeros(len(data), dtype=torch.float64)
    for index in cut_by_steps(data.lengths, data.lengths.argsort(stable=True), tokens):
        some = data[index]
        found[index] = hmm_of(module, some).log_prob(some.values).double()
    return found


def evaluate(modules: list[NGramMixture], parts: dict[str, Sequences], tokens: int) -> Row:
    """Perplexity and tokens of each part; each sentence has one of the modules."""
    row = {}
    for name in PARTS:
        data = parts[name]
        each = torch.stack([log_probs(module, data, tokens) for module in modules])
        nats = -(each.logsumexp(0) - math.log(len(modules))).sum().item()
        row[f"{name}_tokens"] = data.num_observed
        row[f"{name}_perplexity"] = math.exp(nats / data.num_observed)
    return row


def mean_weights(module: NGramMixture, data: Sequences) -> dict[str, float]:
    """Mean weight of the n-gram at the words of some sentences."""
    with torch.no_grad():
        logits = at_words(module.weights(), hmm_of(module, data), data)
    names = "block_weight", "word_weight"
    return {name: each[data.exists].sigmoid().mean().item() for name, each in zip(names, logits)}


def measured(model: Model) -> Row:
    """The row of the model alone, from the results of ``language_models.py``."""
    key = {name: getattr(model, name) for name in ("panel", "name", "data", "states")}
    (found,) = (row for row in earlier("language_models") if key.items() <= row.items())
    row = {f"{part}_{what}": found[f"{part}_{what}"]
           for part in PARTS[1:] for what in ("tokens", "perplexity")}  # fmt: skip
    nats = {
        part: found[f"{part}_tokens"] * math.log(found[f"{part}_perplexity"])
        for part in ("valid", "unseen")
    }
    row["fitted_tokens"] = found["valid_tokens"] - found["unseen_tokens"]
    row["fitted_perplexity"] = math.exp((nats["valid"] - nats["unseen"]) / row["fitted_tokens"])
    return row


def compute(
    name: str,
    neural: Callable[[Model], NeuralHMM],
    parts: Any,
    block: np.ndarray,
    settings: Settings,
) -> Row:
    """One row."""
    row: Row = {"name": name}
    if name == "plain" and settings.model.panel != "quick":
        return row | measured(settings.model)
    if name == "n-gram":
        for part in PARTS:
            data = parts[part]
            nats = -data.covariates[data.exists][:, :2].double().sum().item()
            row[f"{part}_tokens"] = data.num_observed
            row[f"{part}_perplexity"] = math.exp(nats / data.num_observed)
        return row
    if CACHE in name:
        parts, chosen = cached(parts, block)
        row |= chosen
    models = CHAINS.get(name.split(" and ")[0], (settings.model,))
    if settings.model.panel == "quick":
        models = tuple(settings.model for _ in models)
    modules = [NGramMixture(neural(model), CLASSES, CLASSES) for model in models]
    if name == "plain":
        modules[0].block_class.data.fill_(-torch.inf)
        modules[0].symbol_class.data.fill_(-torch.inf)
        return row | evaluate(modules, parts, settings.batch_tokens)
    if name == "trained jointly":
        modules = [joint(modules[0].words, parts, settings)]
        row |= {"epochs": settings.epochs, "rate": settings.rate}
    fitted = parts["fitted"][: settings.sentences]
    for module in modules:
        if name == "emission":
            module.block_class.data.fill_(-torch.inf)
            module.block_class.requires_grad_(False)
        module.fit_weights(fitted, settings.rounds)
    row |= {"weights_fitted_to_tokens": fitted.num_observed, "rounds": settings.rounds}
    row |= mean_weights(modules[0], parts["unseen"][:100])
    return row | evaluate(modules, parts, settings.batch_tokens)


def draw(rows: list[Row], baselines: list[dict[str, Any]]) -> None:
    """The perplexities of each row."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9.5, 4.2), layout="constrained")
    lstm = [row for row in baselines if row["data"] == "Penn Treebank" and "LSTM" in row["model"]]
    for number, part in enumerate(PARTS[1:]):
        heights = [row[f"{part}_perplexity"] for row in rows]
        places = [place + 0.2 * (number - 0.5) for place in range(len(rows))]
        label = {"unseen": "held-out text, second half", "test": "test text"}[part]
        axis.plot(places, heights, "os"[number], ms=8, label=label)
        for x, y in zip(places, heights):
            below = {"xytext": (0, -8), "va": "top"}
            place = below if part == "unseen" else {"xytext": (0, 7)}
            box = {"facecolor": "white", "linewidth": 0, "pad": 0.3}
            axis.annotate(f"{y:.1f}", (x, y), **place, textcoords="offset points", ha="center",
                          bbox=box)  # fmt: skip
    for row in lstm:
        axis.axhline(
            row["test_perplexity"], color="0.3", ls="--", lw=1, label=f"{row['model']}, test text"
        )
    axis.set_xticks(range(len(rows)), [row["name"].replace(" and ", " and\n") for row in rows])
    axis.set(
        ylabel="perplexity", title="Penn Treebank: an HMM of 32,768 states, mixed with an n-gram"
    )
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper right")
    save(figure, NAME)


def main() -> None:
    options = arguments(__doc__, list(ROWS))
    baselines = earlier("language_model_baselines")
    if options.draw:
        draw(earlier(NAME), baselines)
        return
    torch.set_num_threads(1)
    settings, wanted = Settings(), [name for name in ROWS if name in options.only]
    if options.quick:
        small = Model("quick", "", "letters", 64, 8, dim=16, epochs=0.2, tokens=512)
        settings = Settings(small, 20, 2, 0.1, batch_tokens=2000)
    text = read(settings.model.data)
    partition = blocks_of(settings.model, text, {})
    if partition is None:
        raise ValueError("the model must have blocks")
    block = partition.symbol_block.numpy()
    parts = mixed_text(text, partition, "trained jointly" in wanted)

    for name in wanted:
        pyro.set_rng_seed(0)
        neural = partial(network, text=text, partition=partition)
        row = compute(name, neural, parts, block, settings)
        print(row, flush=True)
        if options.quick:
            continue
        with alone(NAME):  # after each row
            rows = [other for other in earlier(NAME) if other["name"] != name]
            rows = sorted([*rows, row], key=lambda each: ROWS.index(each["name"]))
            write(NAME, rows, states=settings.model.states, blocks=settings.model.clusters)
            draw(rows, baselines)


if __name__ == "__main__":
    main()
