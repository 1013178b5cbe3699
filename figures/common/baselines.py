"""Baseline language models: a feed-forward n-gram and an LSTM.

A text is ``(T,)`` symbols, sentence after sentence, each ended by ``eos``. ``eos`` is predicted
like any other symbol, and as context it marks the start of a sentence: the n-gram does not
condition on anything before it, while the LSTM keeps its state across sentences. Perplexities are
per symbol, ``eos`` included. V is the number of symbols.

References:
    A Neural Probabilistic Language Model (Bengio et al., 2003)
    Recurrent Neural Network Regularization (Zaremba et al., 2014),
    https://arxiv.org/abs/1409.2329
    Using the Output Embedding to Improve Language Models (Press and Wolf, 2017),
    https://arxiv.org/abs/1608.05859, for the tied embeddings
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HALVINGS = 9  # of the learning rate of a network, before its training ends


class FeedForward(nn.Module):
    """A feed-forward n-gram: embeddings of the context, two layers, tied output embeddings.

    Args:
        num_symbols: V.
        eos: Ends each sentence.
        order: One more than the number of symbols it sees; at least 3.
        dim: Of embeddings and of the layers.
        dropout: Of the embeddings and of both layers.
    """

    def __init__(
        self, num_symbols: int, eos: int, order: int = 4, dim: int = 256, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.eos, self.order = eos, order
        self.output = _Output(num_symbols, dim)
        self.layers = nn.Sequential(
            nn.Dropout(dropout), nn.Linear((order - 1) * dim, dim), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, inputs: Tensor, earlier: Any = None) -> tuple[Tensor, Any]:
        """Logits ``(N, T, V)`` of the symbols after ``inputs`` ``(N, T)``, and the next state.

        Args:
            inputs: Symbols.
            earlier: State passed on by the previous window of text; None if there is none.
        """
        further = self.order - 2
        if earlier is None:
            earlier = inputs.new_full((len(inputs), further), self.eos)
        known = torch.cat([earlier, inputs], -1)
        seen = [inputs]
        for n in range(1, further + 1):
            shifted = known[:, further - n : known.size(1) - n]
            seen.append(torch.where(seen[-1] == self.eos, self.eos, shifted))
        vectors = self.output.embedding(torch.stack(seen, -1)).flatten(-2)
        return self.output(self.layers(vectors)), known[:, -further:]


class LSTM(nn.Module):
    """LSTM layers between tied input and output embeddings.

    Args:
        num_symbols: V.
        dim: Of embeddings and of the layers.
        num_layers: How many.
        dropout: Of the embeddings and of each layer.
    """

    def __init__(
        self, num_symbols: int, dim: int = 256, num_layers: int = 2, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.output = _Output(num_symbols, dim)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(dim, dim, num_layers, batch_first=True, dropout=dropout)

    def forward(self, inputs: Tensor, earlier: Any = None) -> tuple[Tensor, Any]:
        """As of :class:`FeedForward`."""
        vectors, state = self.lstm(self.dropout(self.output.embedding(inputs)), earlier)
        return self.output(self.dropout(vectors)), tuple(part.detach() for part in state)


class _Output(nn.Module):
    """Logits of symbols: inner products with their embeddings, plus a bias."""

    def __init__(self, num_symbols: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.bias = nn.Parameter(torch.zeros(num_symbols))

    def forward(self, vectors: Tensor) -> Tensor:
        return F.linear(vectors, self.embedding.weight, self.bias)


def streams(text: Tensor, eos: int, num_streams: int) -> tuple[Tensor, Tensor]:
    """Cut ``text`` into rows: symbols before ``(N, T)``, and what follows each, -1 at the end."""
    missing = -len(text) % num_streams
    before = F.pad(text[:-1], (1, missing), value=eos)
    after = F.pad(text, (0, missing), value=-1)
    return before.view(num_streams, -1), after.view(num_streams, -1)


@torch.no_grad()
def perplexity(model: nn.Module, text: Tensor, eos: int, num_streams: int = 10) -> float:
    """Perplexity per symbol of ``text``; leaves the model in evaluation mode.

    The text is read in ``num_streams`` rows, each of which starts without context.
    """
    model.eval()
    nats, earlier = 0.0, None
    rows = (part.split(32, 1) for part in streams(text, eos, num_streams))
    for inputs, targets in zip(*rows):
        scores, earlier = model(inputs, earlier)
        nats += _cross_entropy(scores, targets, "sum").item()
    return math.exp(nats / len(text))


def _cross_entropy(scores: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction
    )


class Training(NamedTuple):
    """Summary of a training.

    Attributes:
        epochs: Number of passes through the text.
        minutes: Wall time, validation and earlier runs included.
        valid: Best perplexity of the validation text, that of the final parameters.
        stopped: Reason: "rate", "epochs" or "minutes".
    """

    epochs: float
    minutes: float
    valid: float
    stopped: str


def train(
    name: str,
    model: nn.Module,
    text: Tensor,
    held_out: Tensor,
    eos: int,
    minutes: float = math.inf,
    epochs: int = 60,
    rate: float = 2e-3,
    checkpoint: Path | None = None,
    num_streams: int = 20,
    window: int = 35,
) -> Training:
    """Train a network by AdamW and keep the parameters with the best perplexity of ``held_out``.

    ``held_out`` is evaluated twice per epoch. Unless its perplexity is one thousandth below the
    best so far, the rate is halved; the ``HALVINGS``th time, or at a limit, the training ends.

    Args:
        name: Printed at each evaluation.
        model: The network.
        text: ``(T,)``.
        held_out: ``(T',)``, the validation text.
        eos: Ends each sentence.
        minutes: Time limit, earlier runs included.
        epochs: Maximal number of passes through ``text``.
        rate: Initial learning rate.
        checkpoint: File that is kept up to date; if it exists, the training resumes from it, and on
            a CPU it ends with the same bits as an uninterrupted one.
        num_streams: N, the number of rows into which the text is cut.
        window: Symbols of each row in a step of AdamW.
    """
    batches = list(zip(*(part.split(window, 1) for part in streams(text, eos, num_streams))))
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    best, least, step, halvings, seconds = model.state_dict(), math.inf, 0, 0, 0.0
    model.train()
    earlier: Any = None
    if checkpoint is not None and checkpoint.exists():
        kept = torch.load(checkpoint, map_location=text.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"].cpu())
        best, earlier = kept["best"], kept["earlier"]
        least, step, halvings, seconds = kept["numbers"]
    start_time, losses = time.perf_counter() - seconds, []
    while True:
        limits = {
            "rate": halvings == HALVINGS,
            "epochs": step >= epochs * len(batches),
            "minutes": seconds >= 60 * minutes,
        }
        if any(limits.values()):
            break
        place = step % len(batches)
        inputs, targets = batches[place]
        scores, earlier = model(inputs, earlier if place else None)
        loss = _cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        seconds = time.perf_counter() - start_time
        if step % len(batches) not in (0, len(batches) // 2) and seconds < 60 * minutes:
            continue
        valid = perplexity(model, held_out, eos)
        model.train()
        if valid > 0.999 * least:
            halvings += 1
            optimizer.param_groups[0]["lr"] = rate / 2**halvings
        if valid < least:
            least, best = valid, {key: x.clone() for key, x in model.state_dict().items()}
        seconds = time.perf_counter() - start_time
        print(
            f"{name}: {step / len(batches):.2f} epochs, {seconds / 60:.1f} minutes, perplexity "
            f"{math.exp(sum(losses) / len(losses)):.1f} in training, {valid:.2f} held out, "
            f"{halvings} halvings",
            flush=True,
        )
        losses = []
        if checkpoint is not None:
            partial = checkpoint.with_suffix(".partial")
            kept = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(), "best": best, "earlier": earlier,
                "numbers": (least, step, halvings, seconds),
            }  # fmt: skip
            torch.save(kept, partial)
            os.replace(partial, checkpoint)
    model.load_state_dict(best)
    stopped = next(limit for limit, reached in limits.items() if reached)
    return Training(step / len(batches), seconds / 60, least, stopped)
