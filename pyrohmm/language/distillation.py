"""An HMM distilled from a language model: fitted to texts which that has written.

References:
    Online EM for Unsupervised Models (Liang and Klein, 2009)
    Tractable Control for Autoregressive Language Generation (Zhang et al., 2023),
    https://arxiv.org/abs/2304.07438
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pyro.distributions import Categorical
from torch import Tensor

from .._checks import check_range, check_size
from ..distributions.hmm import HMM
from ..io.files import FilePath, read_directory, write_directory


class Distillation(NamedTuple):
    """A distilled HMM.

    Attributes:
        hmm: Of the tokens of the language model, for :class:`ConstraintProcessor`.
        perplexities: Per token, of the texts of each round, each batch before it was learnt from.
    """

    hmm: HMM
    perplexities: list[float]


def distil(
    texts: Tensor | Sequence[Tensor | FilePath],
    num_states: int,
    num_tokens: int,
    *,
    num_rounds: int = 5,
    batch_size: int = 256,
    pseudocount: float = 0.001,
    power: float = 0.6,
    delay: float = 2.0,
    generator: torch.Generator | None = None,
    checkpoint: FilePath | None = None,
    report: Callable[[float], object] | None = None,
) -> Distillation:
    r"""Fit an HMM to texts sampled from a language model, by stepwise EM.

    After batch k the expected counts become :math:`(1 - s_k) \mu + s_k \mu_k`, with the step size
    :math:`s_k = (k + d)^{-a}`; the parameters maximise them with a Dirichlet prior.

    Args:
        texts: ``(N, T)`` tokens, or several such parts, tensors or ``.npy`` files, which are read
            one at a time and need not fit into memory together.
        num_states: K.
        num_tokens: V, of the tokenizer.
        num_rounds: How often each text is read.
        batch_size: Texts in a batch.
        pseudocount: Added to the expected count of each token and transition in all texts.
        power: a, above a half and at most one.
        delay: d, at least one.
        generator: Source of randomness on the CPU, of the first parameters.
        checkpoint: A directory, written after each part, from which the same call goes on.
        report: Called with the perplexity of each round.

    Raises:
        ValueError: If a size is less than one, or a token is not one of 0 to V - 1.

    Example:
        >>> texts = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]).repeat(20, 1)
        >>> found = distil(texts, 3, 3, num_rounds=20, batch_size=30,
        ...                generator=torch.Generator().manual_seed(0))
        >>> found.perplexities[-1] < 1.6 < 2.5 < found.perplexities[0]
        True
    """
    for name, size in (("num_states", num_states), ("num_rounds", num_rounds)):
        check_size(name, size)
    check_size("batch_size", batch_size)
    parts = [texts] if isinstance(texts, Tensor) else list(texts)
    total = sum(len(_read(part)) for part in parts)
    counts, done, sums, batches = _first_counts(num_states, num_tokens, generator), 0, [0.0, 0.0], 0
    perplexities: list[float] = []
    if checkpoint is not None and Path(checkpoint).exists():
        counts, meta = read_directory(checkpoint, "distillation")
        if [num_states, num_tokens, len(parts)] != meta["sizes"]:
            raise ValueError(f"checkpoint {checkpoint} is of other states, tokens or parts.")
        done, batches, sums = meta["done"], meta["batches"], meta["sums"]
        perplexities = meta["perplexities"]
    for number in range(done, num_rounds * len(parts)):
        for values in _batches(_read(parts[number % len(parts)]), batch_size):
            check_range("tokens of texts", values, num_tokens, "V - 1")
            found, log_evidence = _expected(_hmm(counts, total, pseudocount), values, num_tokens)
            share = 1.0 if batches == 0 else (batches + delay) ** -power
            for name, count in found.items():
                counts[name] = counts[name].lerp(count / len(values), share)
            batches += 1
            sums = [sums[0] + log_evidence, sums[1] + values.numel()]
        if (number + 1) % len(parts) == 0:
            perplexities.append(math.exp(-sums[0] / sums[1]))
            sums = [0.0, 0.0]
            if report is not None:
                report(perplexities[-1])
        if checkpoint is not None:
            sizes = [num_states, num_tokens, len(parts)]
            meta = {"kind": "distillation", "sizes": sizes, "done": number + 1, "batches": batches,
                    "sums": sums, "perplexities": perplexities}  # fmt: skip
            write_directory(checkpoint, counts, meta)
    return Distillation(_hmm(counts, total, pseudocount), perplexities)


def _read(part: Tensor | FilePath) -> Tensor | np.ndarray:
    """Texts ``(n, T)``; those of a file are read when they are used."""
    return part if isinstance(part, Tensor) else np.load(part, mmap_mode="r")


def _batches(part: Tensor | np.ndarray, size: int) -> Iterator[Tensor]:
    for first in range(0, len(part), size):
        values = part[first : first + size]
        yield torch.as_tensor(
            values if isinstance(values, Tensor) else np.array(values, int)
        ).long()


def _first_counts(
    num_states: int, num_tokens: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    shapes = {"initial": (num_states,), "transition": (num_states,) * 2,
              "emission": (num_states, num_tokens)}  # fmt: skip
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def _hmm(counts: dict[str, Tensor], total: int, pseudocount: float) -> HMM:
    """The HMM that maximises mean expected counts of so many texts with the prior."""
    logs = {name: (total * count + pseudocount).log() for name, count in counts.items()}
    initial, transition = logs["initial"].log_softmax(-1), logs["transition"].log_softmax(-1)
    emission = Categorical(logits=logs["emission"], validate_args=False)
    return HMM(initial, transition, emission, torch.tensor(1), validate_args=False)


def _expected(hmm: HMM, values: Tensor, num_tokens: int) -> tuple[dict[str, Tensor], float]:
    """Expected counts in a batch of texts, and their log-probability."""
    lengths = torch.full((len(values),), values.size(1))
    found = hmm.replace(lengths=lengths).expected_counts(values)
    emission = found.states.new_zeros(num_tokens, hmm.num_states)
    emission.index_add_(0, values.flatten(), found.states.flatten(0, 1))
    counts = {
        "initial": found.counts["log_initial"],
        "transition": found.counts["log_transition"],
        "emission": emission.mT,
    }
    return counts, found.log_evidence.double().sum().item()
