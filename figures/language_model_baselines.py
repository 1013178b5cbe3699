"""Baselines for the HMM language models: Kneser-Ney 5-grams and two neural networks.

The networks are those of Table 1 of *Scaling Hidden Markov Language Models*, with 256 dimensions
and tied embeddings: a feed-forward 4-gram and an LSTM of two layers. Perplexities are per token,
``<eos>`` included; ``paper_valid`` and ``paper_test`` are those of that paper (Mikolov's for the
5-gram). N-grams do not condition on earlier sentences; the LSTM does. A row reports after how many
epochs and minutes the training of a network ended, and whether it was because the learning rate had
been halved as often as allowed ("rate") or because of a limit, in which case it has not converged.
``parameters`` of the 5-gram is the number of n-grams of all lengths that occur. ``published`` has
further test perplexities of the paper's table for the Penn Treebank.

``MINUTES`` in the environment limits each training, and ``CHECKPOINTS`` names a folder with the
checkpoints from which interrupted trainings are resumed. Networks are trained on a GPU if there is
one. Writes ``language_model_baselines.json``.

References:
    Scaling Hidden Markov Language Models (Chiu and Rush, 2020), https://arxiv.org/abs/2011.04640
    Statistical Language Models Based on Neural Networks (Mikolov, 2012), Table 4.1
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import alone, arguments, baselines, earlier, public_files, write
from torch import Tensor, nn

from pyrohmm import Sequences, datasets, language, readers

NAME = "language_model_baselines"
SOURCES = {"ptb": "Penn Treebank", "wikitext2": "WikiText-2"}
MODELS = {
    "kneser-ney": "Kneser-Ney 5-gram, interpolated, three discounts",
    "feed-forward": "feed-forward 4-gram",
    "lstm": "LSTM of two layers",
}
PAPER = {  # held-out and test data
    ("kneser-ney", "ptb"): (None, 141.2),
    ("feed-forward", "ptb"): (163.0, 151.0),
    ("lstm", "ptb"): (93.6, 88.8),
    ("feed-forward", "wikitext2"): (209.0, None),
    ("lstm", "wikitext2"): (125.0, None),
}


PUBLISHED = {  # of the Penn Treebank, test data
    "Kneser-Ney 5-gram and cache": 125.7,
    "AWD-LSTM": 57.3,
    "AWD-LSTM and cache": 52.8,
}


class Texts(NamedTuple):
    """Three texts as sequences of symbols."""

    train: Tensor
    valid: Tensor
    test: Tensor
    num_symbols: int
    eos: int
    sentences: tuple[Sequences, ...]  # of the three


def read(source: str) -> Texts:
    """Training, validation and test text; ``quick`` needs no file."""
    if source == "quick":
        corpus = datasets.english_words(300)
        train, rest = corpus.data[:600].split(0.8)
        parts: tuple[Sequences, ...] = (train, *rest.split(0.5))
    else:
        corpus = readers.read_sentences(public_files.find(f"{source}-train"))
        rest = [
            readers.read_sentences(public_files.find(f"{source}-{part}"), corpus.vocabulary).data
            for part in ("valid", "test")
        ]
        parts = (corpus.data, *rest)
    texts = (part.values[part.exists] for part in parts)
    eos = int(corpus.vocabulary.encode(["<eos>"]))
    return Texts(*texts, len(corpus.vocabulary), eos, parts)


def measure(model: str, source: str, quick: bool) -> dict[str, Any]:
    """The row of one model of one text."""
    torch.manual_seed(0)
    texts = read(source)
    sizes = (texts.num_symbols, texts.eos)
    row: dict[str, Any] = {
        "part": f"{model}-{source}",
        "data": SOURCES.get(source, "words of English"),
        "model": MODELS[model],
    }
    if model == "kneser-ney":
        start_time = time.perf_counter()
        ngrams = language.ngram(texts.sentences[0], texts.num_symbols)
        valid, test = (ngrams.perplexity(part).value for part in texts.sentences[1:])
        minutes = (time.perf_counter() - start_time) / 60
        count = sum(len(level.keys) for level in ngrams.levels)
        row |= {"parameters": count, "epochs": 1, "minutes": minutes}
    else:
        dim = 16 if quick else 256
        network: nn.Module
        if model == "lstm":
            network = baselines.LSTM(texts.num_symbols, dim)
        else:
            network = baselines.FeedForward(*sizes, dim=dim)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network.to(device)
        train, held_out, tested = (part.to(device) for part in texts[:3])
        folder = os.environ.get("CHECKPOINTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        training = baselines.train(
            row["part"], network, train, held_out, texts.eos,
            minutes=0.1 if quick else float(os.environ.get("MINUTES", "inf")),
            checkpoint=Path(folder, f"{row['part']}.pt") if folder and not quick else None,
        )  # fmt: skip
        valid, test = training.valid, baselines.perplexity(network, tested, texts.eos)
        row |= {
            "parameters": sum(x.numel() for x in network.parameters()),
            "epochs": training.epochs, "minutes": training.minutes, "stopped": training.stopped,
            "device": device.type,
        }  # fmt: skip
    paper_valid, paper_test = PAPER.get((model, source), (None, None))
    row |= {
        "valid_perplexity": valid, "valid_tokens": len(texts.valid),
        "test_perplexity": test, "test_tokens": len(texts.test),
        "paper_valid": paper_valid, "paper_test": paper_test,
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    """Run the parts; each is written as soon as it is finished."""
    parts = {f"{model}-{source}": (model, source) for source in SOURCES for model in MODELS}
    options = arguments(__doc__, list(parts), picture=False)
    if options.quick:
        for model in MODELS:
            measure(model, "quick", True)
        return
    for part in options.only:
        row = measure(*parts[part], False)
        with alone(NAME):
            rows = {row["part"]: row for row in earlier(NAME)} | {part: row}
            write(NAME, [rows[name] for name in parts if name in rows], published=PUBLISHED)


if __name__ == "__main__":
    main()
