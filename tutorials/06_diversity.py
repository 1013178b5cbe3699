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
from functools import partial

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import init_to_value

from pyrohmm import (
    HMM,
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    dpp,
    fit_em,
    fit_map,
    freeze,
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
    hmm = fit.hmm(data)
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
print("k-means:", metrics.one_to_one_accuracy(plain.hmm(data).viterbi(data.values), truth))

# %% [markdown]
# EM under the prior has many local optima, and an entry that has become zero stays zero, unless the
# M-step leaves it, as those of `msteps` do where the prior gains by it: use `restarts`, as above.
#
# ## How strong?
#
# As any other prior: by the evidence of data that were held out, here by cross-validation of the
# sixty sequences that there are to learn from. Test data are looked at once, with the prior that
# was chosen. All of it is done for several sets of data, as sixty sequences are few, and one set
# says little. Two neighbours are there as well: Dirichlet rows, whose pseudo-counts are spread
# evenly, and *sticky* ones, for chains that like to stay.


# %%
def rows(concentration):
    return TabularHMM(5, normal(0, rate=0.01), 1.0, concentration)


priors = {
    "none": (module, None),
    "diverse, α = 1": (module, DiversityPrior(1.0)),
    "diverse, α = 10": (module, DiversityPrior(10.0)),
    "diverse, α = 100": (module, DiversityPrior(100.0)),
    "Dirichlet, 2": (rows(2.0), None),
    "Dirichlet, 4": (rows(4.0), None),
    "sticky, 3": (rows(sticky(5, 3.0)), None),
}
num_sets, num_steps = (2, 5) if SMOKE else (5, 200)


def fitted(name, part):
    own, prior = priors[name]
    pyro.set_rng_seed(0)  # the same starts for all
    return fit_em(own, part, log_prior=prior, restarts=2, num_steps=num_steps)


inside, chosen, gains = [], [], []
for seed in range(num_sets):
    drawn = datasets.diverse_toy(360, generator=torch.Generator().manual_seed(seed))
    train, test = drawn.without_labels()[:60], drawn.without_labels()[60:]
    scores = {}
    for name in priors:
        folds = torch.Generator().manual_seed(seed)  # the same for all
        found = metrics.cross_validate(partial(fitted, name), train, num_folds=3, generator=folds)
        scores[name] = found.log_evidence.sum().item() / found.num_observed
    inside.append(list(scores.values()))
    chosen.append(max(scores, key=scores.get))
    tested = [metrics.log_evidence(fitted(name, train), test) for name in (chosen[-1], "none")]
    gains.append((tested[0] - tested[1]).sum().item() / test.num_observed)

inside = torch.tensor(inside)
inside = inside - inside[:, :1]
print("nats a number more than without a prior, in cross-validation; mean and sd over sets")
for name, gain in zip(priors, inside.T):
    print(f"{name:17s} {gain.mean():6.3f} ± {gain.std():.3f}, chosen {chosen.count(name)} times")
print("the chosen one on test data, set by set:", *(f"{gain:.3f}" for gain in gains))

# %% [markdown]
# Pseudo-counts that are spread evenly help, and are chosen every time; on test data that is worth
# much for some sets, where the fit without a prior is poor, and next to nothing for others. Those
# that the determinant hands out gain nothing beyond the spread over sets, and a large $\alpha$
# makes it worse: the true matrix has no two equal rows, but is far from a permutation.
#
# `figures/diversified_beyond.png` repeats this on four data sets, ten draws each: on all four a
# plain Dirichlet prior gained more than the diversity prior (here 0.24 against 0.03 nats, on a ring
# 0.06 against 0.01, on a chain that stays 0.14 against −0.01, and on English letters 0.008 against
# 0.003, which is within the error); sticky and sparse priors stand beside them.

# %% [markdown]
# ## The posterior of the matrix
#
# The determinant times Dirichlet rows is a proper density (`dpp.DiverseDirichlet` is it, as a
# distribution), and a model that has it can be sampled as it stands. Two hidden states, each of
# which shows its own face four times in five, and twenty sequences of ten faces. The matrix is all
# that is not known, so that NUTS, with the states summed out, can be held against the exact
# posterior: the evidence of each matrix of the first picture.

# %%
lengths, even = torch.full((20,), 10), torch.full((2,), 0.5)
shows = torch.tensor([[0.8, 0.2], [0.2, 0.8]])
moves = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
pyro.set_rng_seed(0)
chain = HMM(even.log(), moves.log(), torch.distributions.Categorical(shows), lengths)
faces = Sequences(chain.sample(), lengths)

small = TabularHMM(2, categorical(2))
freeze(small, "initial", even)
freeze(small, "emission.probs", shows)

every = matrices.permute(1, 2, 0, 3)  # (100, 100, 2, 2)
posed = HMM(even.log(), every[:, :, None].log(), chain.emission, lengths)
evidence = posed.log_prob(faces.values).sum(-1)  # (100, 100)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for panel, alpha in zip(axes, (0.0, 4.0)):
    exact = (evidence + alpha * dpp.log_diversity(every)).flatten().softmax(0).reshape(100, 100)
    panel.pcolormesh(grid, grid, exact.T, rasterized=True)
    leave, back = ((1 - first) * exact).sum(), (second * exact).sum()
    print(f"α = {alpha:g}, exact: p(1 → 2) {leave:.2f}, p(2 → 1) {back:.2f};", end=" ")
    print(f"below the diagonal {exact[first > second].sum():.4f}")
    for begin in (0.8, 0.2):
        pyro.set_rng_seed(0)
        model = MarginalModel(small, log_prior=DiversityPrior(alpha))
        stay = torch.tensor([[begin, 1 - begin], [1 - begin, begin]])
        sampler = MCMC(
            NUTS(model, init_strategy=init_to_value(values={"module.transition": stay})),
            num_samples=20 if SMOKE else 80, warmup_steps=10 if SMOKE else 40, disable_progbar=True,
        )  # fmt: skip
        sampler.run(faces)
        drawn = sampler.get_samples()["module.transition"]
        panel.plot(drawn[:, 0, 0], drawn[:, 1, 0], ".", label=f"from p(stay) = {begin}")
        mean, spread = drawn.mean(0), drawn.std(0)
        below = (drawn[:, 0, 0] > drawn[:, 1, 0]).float().mean()
        print(
            f"  NUTS from p(stay) = {begin}: p(1 → 2) {mean[0, 1]:.2f} ± {spread[0, 1]:.2f}, "
            f"p(2 → 1) {mean[1, 0]:.2f} ± {spread[1, 0]:.2f}; below the diagonal {below:.2f}"
        )
    panel.plot(moves[0, 0], moves[1, 0], "r*", markersize=12, label="true")
    panel.set_title(f"α = {alpha:g}")
    panel.set_xlabel("p(stay in 1)")
axes[0].set_ylabel("p(go from 2 to 1)")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Where the two rows are equal, on the diagonal, the prior is zero. The data alone leave a twentieth
# of the posterior above it, the prior next to nothing: it says for certain that state 1 is more
# likely after itself than after state 2. And it pushes to the corner: both rates of change are
# nearly halved, to about half of the true ones (stars). NUTS agrees with the exact posterior where
# it begins on the right side. Begun on the other, with the prior, most of its draws stay there, and
# the rest repeat themselves: the diagonal is a border that is hard to cross, for EM and MAP too.
# Run several, from different starts, and compare their evidence.

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
