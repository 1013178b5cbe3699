# %% [markdown]
# # 6. Diverse states: a DPP prior in one line
#
# Nothing in an ordinary hidden Markov model keeps two states from becoming the same one twice. The
# diversified HMM (Qiao et al., 2015, [paper](https://arxiv.org/abs/1904.03170)) adds a prior that
# wants the rows of the transition matrix to differ: a power of the determinant of their kernel,
#
# $$p(A) \propto \det(\tilde K_A)^\alpha, \qquad
#   \tilde K_{ij} = \sum_x \sqrt{A_{ix} A_{jx}},$$
#
# which is one if no two rows share a next state, and zero if two rows are equal (a *determinantal
# point process*, DPP, over distributions). In this package it is one argument, of models and of
# fits alike. This tutorial shows what it does, what it really favours, and when to leave it alone.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import init_to_value

from pyrohmm import (
    DiversityPrior,
    MarginalModel,
    TabularHMM,
    datasets,
    dpp,
    fit_em,
    fit_map,
    metrics,
    msteps,
    normal,
    sticky,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
torch.set_printoptions(precision=2, sci_mode=False)

# %% [markdown]
# ## The one line
#
# The data are those of the paper's own experiment: five states, each with a next state of its own
# that it likes; numbers around 1, 2, 3, 4 and 5; 300 short sequences.

# %%
toy = datasets.diverse_toy(generator=torch.Generator().manual_seed(0))
truth, data = toy.labels, toy.without_labels()
module = TabularHMM(5, normal(0, rate=0.01))

fit = fit_em(module, data, log_prior=DiversityPrior(5.0))  # by EM, or
model = MarginalModel(module, log_prior=DiversityPrior(5.0))  # as a Pyro model
start = init_to_value(values=fit.start)
again = fit_map(model, data, init=start, num_steps=20, learning_rate=0.001)
print(f"loss by EM {fit.losses[-1]:.2f}, and after some gradient steps {again.losses[-1]:.2f}")

# %% [markdown]
# In the model it is one `pyro.factor` outside every plate. In EM nothing changes but the M-step of
# the transition matrix, whose optimum has a form worth knowing: with $c_{ij}$ expected moves,
#
# $$A_{ij} = \frac{c_{ij} + \alpha M_{ij}}{n_i + \alpha}, \qquad M = S \circ S^{-\mathsf T},
#   \quad S = \sqrt{A}.$$
#
# The prior adds $\alpha$ pseudo-counts to each row; where they go, the other rows decide. So
# $\alpha$ is to be judged against the number of moves out of a state: here about 300, and 5 is
# a whisper.

# %% [markdown]
# ## What it favours
#
# With two states there are two numbers to a transition matrix, and the prior can be drawn:

# %%
grid = torch.linspace(0.005, 0.995, 100)
first, second = torch.meshgrid(grid, grid, indexing="ij")
matrices = torch.stack([torch.stack([first, 1 - first], -1), torch.stack([second, 1 - second], -1)])
heights = dpp.log_diversity(matrices.permute(1, 2, 0, 3)).exp()

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for panel, alpha in zip(axes, (1, 5, 50)):
    panel.pcolormesh(grid, grid, heights.T**alpha, rasterized=True)
    panel.set_title(f"det$^\\alpha$, α = {alpha}")
    panel.set_xlabel("p(stay in 1)")
axes[0].set_ylabel("p(go from 2 to 1)")
plt.show()

# %% [markdown]
# It is high in two corners: *stay for ever*, and *change every time*. These are the two permutation
# matrices, and this is the prior's mode for any number of states: each state has one successor, and
# each another. Without data the M-step goes there:

# %%
start = 0.2 / 3 + 0.8 * torch.eye(4)[[1, 2, 3, 0]]
start = start / start.sum(-1, keepdim=True)
alone = msteps.FixedPoint()(start[None], torch.zeros(1, 4, 4), DiversityPrior(1.0))
print(alone[0])

# %% [markdown]
# So "diverse" means *deterministic*. It is a prior for chains that go through states in turn, and
# no remedy against states that are superfluous.
#
# ## What it does to a fit
#
# From poor starts, as the paper has them: means drawn from a standard normal law, although the
# numbers lie between 1 and 5. Every weight gets the same starts; states are compared with the true
# ones after the best renaming.

# %%
num = 3 if SMOKE else 10
poor = {
    "initial": torch.distributions.Dirichlet(torch.full((num, 5), 3.0)).sample(),
    "transition": torch.distributions.Dirichlet(torch.full((num, 5, 5), 3.0)).sample(),
    "emission.loc": torch.randn(num, 5),
    "emission.variance": torch.ones(num, 5),
}


def judged(fit):
    """Accuracy and mean distance of rows, for each restart."""
    accuracies, distances = [], []
    for run in range(num):
        values = {name: each[run] for name, each in fit.restarts.values.items()}
        hmm = pyro.condition(fit.model, data=values)(data)
        accuracies.append(metrics.one_to_one_accuracy(hmm.viterbi(data.values), truth))
        distances.append(metrics.diversity(hmm.log_transition.exp()).item())
    return torch.tensor(accuracies), torch.tensor(distances)


results = {}
for alpha in (0.0, 0.5, 5.0, 50.0, 500.0):
    fit = fit_em(
        module, data, start=poor, restarts=num, log_prior=DiversityPrior(alpha),
        num_steps=10 if SMOKE else 500,
    )  # fmt: skip
    results[alpha] = fit, *judged(fit)
    _, accuracies, distances = results[alpha]
    best = fit.restarts.final.argmin()
    print(
        f"α = {alpha:5g}: accuracy {accuracies.mean():.3f} ± {accuracies.std():.3f}, of the best "
        f"start {accuracies[best]:.3f}; distance of rows {distances.median():.2f}"
    )

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
shown = {"true": torch.tensor(datasets.DIVERSE_TRANSITION)}
for alpha in (0.0, 50.0, 500.0):
    fit = results[alpha][0]
    hmm = fit.draw(data)
    order = metrics.align(hmm.viterbi(data.values), truth, 5).argsort()
    shown[f"α = {alpha:g}"] = hmm.log_transition.exp()[order][:, order].detach()
for panel, (name, matrix) in zip(axes, shown.items()):
    panel.imshow(matrix, vmin=0, vmax=1)
    panel.set_title(name)
    panel.set_xticks([])
    panel.set_yticks([])
plt.show()

# %% [markdown]
# Small weights change little: what differs here is within the noise of ten starts, and over a
# hundred pairs of fits there is no gain (`figures/diversified_toy.py`). Large ones make rows more
# different than they are, until the matrix is a permutation and labels suffer. What helps against
# poor starts is better starts: many of them, or k-means, the default for numbers.

# %%
plain = fit_em(module, data)
print("k-means:", metrics.one_to_one_accuracy(plain.draw(data).viterbi(data.values), truth))

# %% [markdown]
# ## How strong?
#
# By the evidence of data that were held out, as for any other prior. Here are the two neighbours of
# this prior as well: a *sticky* Dirichlet prior, for chains that like to stay, and a flat one with
# pseudo-counts.

# %%
train, test = data[:60], data[60:]
priors = {
    "none": (module, None),
    "diverse, α = 1": (module, DiversityPrior(1.0)),
    "diverse, α = 10": (module, DiversityPrior(10.0)),
    "diverse, α = 100": (module, DiversityPrior(100.0)),
    "Dirichlet, 2": (TabularHMM(5, normal(0, rate=0.01), 1.0, 2.0), None),
    "sticky, 10": (TabularHMM(5, normal(0, rate=0.01), 1.0, sticky(5, 10.0)), None),
}
for name, (each, prior) in priors.items():
    pyro.set_rng_seed(0)
    fit = fit_em(each, train, log_prior=prior, num_steps=10 if SMOKE else 200)
    evidence = metrics.log_evidence(fit, test).sum() / test.num_observed
    print(f"{name:18s} {evidence:.4f} nats per held-out number")

# %% [markdown]
# Sixty sequences are few, and pseudo-counts that are spread evenly help; those that the determinant
# hands out make it worse, the more the larger $\alpha$. The true matrix has no two equal rows, but
# is far from a permutation.

# %% [markdown]
# ## The posterior of the matrix
#
# As a proper density, the determinant times Dirichlet rows, the prior can be sampled. NUTS needs
# nothing but the model; `DiverseDirichlet` is a distribution like any other. Twenty moves of a
# chain whose states are seen:

# %%
moves = torch.tensor([[3.0, 3.0, 1.0], [2.0, 3.0, 2.0], [1.0, 2.0, 3.0]])


def chain(alpha):
    rows = pyro.sample("rows", dpp.DiverseDirichlet(torch.ones(3, 3), alpha))
    pyro.factor("moves", (moves * rows.log()).sum())


figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
proposals = torch.distributions.Dirichlet(moves + 1).sample((1_000_000,))  # for α = 0
for panel, alpha in zip(axes, (0.0, 1.0, 4.0)):
    weights = (alpha * dpp.log_diversity(proposals)).exp()
    panel.hist(proposals[:, 0, 1], bins=20, range=(0, 1), density=True, weights=weights, alpha=0.4)
    for seed in range(2):
        pyro.set_rng_seed(seed)
        sampler = MCMC(
            NUTS(chain), num_samples=20 if SMOKE else 300, warmup_steps=10 if SMOKE else 100,
            disable_progbar=True,
        )  # fmt: skip
        sampler.run(alpha)
        rows = sampler.get_samples()["rows"]
        panel.hist(rows[:, 0, 1], bins=20, range=(0, 1), density=True, histtype="step")
    panel.set_title(f"p(1 → 2), α = {alpha:g}")
plt.show()

# %% [markdown]
# Filled are draws of the posterior without the prior, weighted by the determinant, which is exact;
# lines are two chains of NUTS each. With a strong prior chains disagree: between two permutations
# lies a border where the determinant is zero, and a chain stays on the side where it began. It is
# the same for EM and MAP, which never cross it. Run several, and compare their evidence.

# %% [markdown]
# ## When to use it
#
# - The chain is nearly deterministic, states are visited in turn, and there are few data: then it
#   says what you know.
# - Not to find the number of states, and not to repair poor starts: use restarts, k-means, labels.
# - Not where several states *should* have the same successors, as letters of one class in text.
# - Judge $\alpha$ against the moves out of a state, choose it on held-out data, and be wary of a
#   result that needs one above a tenth of them.
#
# The paper's $\alpha$ is twice the one here, as the gradient that it follows is half the right one:
# `DiversityPrior.as_in_paper(100)` has a weight of 50.
