"""Figure 4 of the DenseHMM paper: MAD and NLL on samples from known HMMs.

There are as many symbols as states, and the rows of the true matrices are sampled from a Dirichlet
distribution with concentration 0.1; ten sequences of 200 steps for training and ten for testing.
See ``common/densehmm.py`` for the models, the measures and the two protocols. Writes
``densehmm_synthetic.json`` and ``densehmm_synthetic.png``.
"""

from __future__ import annotations

import torch
from common import arguments
from common.densehmm import (
    DENSE_EM,
    DIRECT,
    FAIR,
    MODELS,
    STANDARD,
    Claim,
    Halves,
    Medians,
    Source,
    everywhere,
    greatest,
    least,
    mostly,
    reproduce,
    standard_leads,
    within,
)
from common.dirichlet_toy import dirichlet_toy

from pyrohmm import cooccurrence


def draw(num_states: int, generator: torch.Generator) -> Halves:
    """A random HMM and data sampled from it."""
    toy = dirichlet_toy(num_states, num_states, generator=generator)
    pair_probs = cooccurrence.predicted(toy.initial, toy.transition.log(), toy.emission)
    return Halves(toy.train.without_labels(), toy.test.without_labels(), pair_probs)


def lead_at_least_states(medians: Medians) -> tuple[float, bool]:
    """The direct model's MAD relative to the next best one's, at the least n."""
    shares = {
        cell: medians.of("MAD", DIRECT, cell) / min(medians.others("MAD", DIRECT, cell))
        for cell in medians.cells
    }
    means = [
        sum(share for (n, _), share in shares.items() if n == size)
        / sum(n == size for n, _ in shares)
        for size in medians.sizes
    ]
    return means[0], means[0] == min(means)


CLAIMS = [
    Claim("MAD: direct is best (in 3 of 4 cells)", mostly(least("MAD", DIRECT), everywhere)),
    Claim(
        "MAD from the true distribution, as the paper has it: direct is best (in 3 of 4 cells)",
        mostly(least("MAD from the true distribution", DIRECT), everywhere),
    ),
    Claim("MAD: its lead is clearest at n = 3 (MAD over the next best)", lead_at_least_states),
    Claim(
        "MAD: standard and fair are close (within 15 %, in 3 of 4 cells)",
        mostly(within("MAD", (STANDARD, FAIR), 0.15), everywhere),
    ),
    Claim(
        "MAD: dense EM is worst (in 3 of 4 cells)", mostly(greatest("MAD", DENSE_EM), everywhere)
    ),
    Claim(
        "NLL: all four are comparable (within 10 %, in 3 of 4 cells)",
        mostly(within("NLL", MODELS, 0.10), everywhere),
    ),
    Claim(
        "NLL: the standard HMM is slightly better than both dense ones (in 3 of 4 cells)",
        mostly(standard_leads, everywhere),
    ),
]

SYNTHETIC = Source("synthetic", "synthetic", lambda n: n, draw, CLAIMS, anew=True)

if __name__ == "__main__":
    reproduce("densehmm_synthetic", [SYNTHETIC], arguments(__doc__))
