# %% [markdown]
# # 6. Diverse states: a DPP prior in one line
#
# Nothing in a standard hidden Markov model prevents two states from being nearly equal. The
# diversified HMM (Qiao et al., 2015, [paper](https://arxiv.org/abs/1904.03170)) adds a prior that
# favours different rows of the transition matrix: a power of the determinant of their kernel,
#
# $$p(A) \propto \det(\tilde K_A)^\alpha, \qquad
#   \tilde K_{ij} = \sum_x \sqrt{A_{ix} A_{jx}},$$
#
# The determinant is one if no two rows share a next state, and zero if two rows are equal (a
# *determinantal point process*, DPP, over distributions). The prior is one argument of models and
# of fits. This tutorial shows what it does, what it favours, and when not to use it.

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
# ## One argument
#
# The data are those of the paper's experiment: five states, each with a preferred successor, normal
# observations with means 1 to 5, and 300 short sequences.

# %%
toy = datasets.diverse_toy(generator=torch.Generator().manual_seed(0))
truth, data = toy.labels, toy.without_labels()
module = TabularHMM(5, normal(0, rate=0.01))

fit = fit_em(module, data, log_prior=DiversityPrior(5.0))  # by EM, or
model = MarginalModel(module, log_prior=DiversityPrior(5.0))  # as a Pyro model
start = init_to_value(values=fit.start)
again = fit_map(model, data, start=start, num_iterations=20, learning_rate=0.001)
print(f"loss by EM {fit.losses[-1]:.2f}, after gradient steps from there {again.losses[-1]:.2f}")

# %% [markdown]
# In the model the prior is one `pyro.factor` outside every plate. In EM only the M-step of the
# transition matrix changes. Its optimum is a fixed point: with expected transition counts $c_{ij}$
# and $n_i = \sum_j c_{ij}$,
#
# $$A_{ij} = \frac{c_{ij} + \alpha M_{ij}}{n_i + \alpha}, \qquad M = S \circ S^{-\mathsf T},
#   \quad S = \sqrt{A}.$$
#
# The prior adds $\alpha$ pseudo-counts to each row, distributed according to the other rows. So
# $\alpha$ should be compared with the number of transitions out of a state: here about 300, so
# $\alpha = 5$ is weak.

# %% [markdown]
# ## What it favours
#
# With two states the transition matrix has two free parameters, and the prior can be plotted:

# %%
grid = torch.linspace(0.005, 0.995, 100)
first, second = torch.meshgrid(grid, grid, indexing="ij")
matrices = torch.stack([torch.stack([first, 1 - first], -1), torch.stack([second, 1 - second], -1)])
heights = dpp.log_diversity(matrices.permute(1, 2, 0, 3)).exp()

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for panel, alpha in zip(axes, (1, 5, 50)):
    image = panel.pcolormesh(grid, grid, heights.T**alpha, vmin=0, vmax=1, rasterized=True)
    panel.set_title(f"det$^\\alpha$, α = {alpha}")
    panel.set_xlabel("p(1 → 1)")
axes[0].set_ylabel("p(2 → 1)")
figure.colorbar(image, ax=axes, label="density, not normalised")
plt.show()

# %% [markdown]
# The density is high in two corners, *always stay* and *always change*. These are the two
# permutation matrices. For any number of states the modes of the prior are permutation matrices,
# and without data the M-step converges to one:

# %%
start = 0.2 / 3 + 0.8 * torch.eye(4)[[1, 2, 3, 0]]
start = start / start.sum(-1, keepdim=True)
mode = msteps.FixedPoint()(start[None], torch.zeros(1, 4, 4), DiversityPrior(1.0))
print(mode[0])

# %% [markdown]
# So "diverse" means *deterministic*. The prior suits chains that visit their states in turn. It
# does not remove superfluous states.
#
# ## Effect on a fit
#
# We start EM from the poor initial values of the paper: means sampled from a standard normal
# distribution, although the observations lie between 1 and 5. All values of $\alpha$ use the same
# initial values. States are matched to the true states by the best permutation.

# %%
num = 3 if SMOKE else 10
poor = {
    "initial": torch.distributions.Dirichlet(torch.full((num, 5), 3.0)).sample(),
    "transition": torch.distributions.Dirichlet(torch.full((num, 5, 5), 3.0)).sample(),
    "emission.loc": torch.randn(num, 5),
    "emission.variance": torch.ones(num, 5),
}


def judged(fit):
    """Accuracy and mean Bhattacharyya distance of rows, for each restart."""
    accuracies, distances = [], []
    for run in range(num):
        values = {name: value[run] for name, value in fit.restarts.parameters.items()}
        hmm = pyro.condition(fit.model, data=values)(data)
        accuracies.append(metrics.one_to_one_accuracy(hmm.viterbi(data.values), truth))
        distances.append(metrics.diversity(hmm.log_transition.exp()).item())
    return torch.tensor(accuracies), torch.tensor(distances)


results = {}
for alpha in (0.0, 0.5, 5.0, 50.0, 500.0):
    fit = fit_em(
        module, data, start=poor, restarts=num, log_prior=DiversityPrior(alpha),
        num_iterations=10 if SMOKE else 500,
    )  # fmt: skip
    results[alpha] = fit, *judged(fit)
    _, accuracies, distances = results[alpha]
    best = fit.restarts.final.argmin()
    print(
        f"α = {alpha:5g}: accuracy {accuracies.mean():.3f} ± {accuracies.std():.3f}, of the best "
        f"start {accuracies[best]:.3f}; distance of rows {distances.median():.2f}"
    )

# %%
figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
shown = {"true": torch.tensor(datasets.DIVERSE_TRANSITION)}
for alpha in (0.0, 50.0, 500.0):
    fit = results[alpha][0]
    hmm = fit.hmm(data)
    order = metrics.align(hmm.viterbi(data.values), truth, 5).argsort()
    shown[f"α = {alpha:g}"] = hmm.log_transition.exp()[order][:, order].detach()
for panel, (name, matrix) in zip(axes, shown.items()):
    image = panel.imshow(matrix, vmin=0, vmax=1, cmap="Blues")
    panel.set(title=name, xlabel="to state", xticks=range(5), yticks=range(5))
axes[0].set_ylabel("from state")
figure.colorbar(image, ax=axes, label="transition probability", aspect=12)
plt.show()

# %% [markdown]
# Small weights change little: the differences are within the noise of ten restarts, and over a
# hundred paired fits there is no gain (`figures/diversified_toy.py`). Large weights push the matrix
# towards a permutation, and accuracy falls. Better initial values help against poor ones: more
# restarts, or k-means, the default for real-valued observations.

# %%
plain = fit_em(module, data)
print("k-means:", metrics.one_to_one_accuracy(plain.hmm(data).viterbi(data.values), truth))

# %% [markdown]
# EM under the prior has many local optima. An entry that has become zero stays zero, unless the
# M-step can leave the boundary, as those of `msteps` do where this raises the objective. Use
# `restarts`, as above.
#
# ## Choosing the weight
#
# The weight is chosen like that of any prior, by held-out evidence, here by cross-validation on
# sixty training sequences. The test data are used once, with the chosen prior. We repeat this on
# several data sets, because a single set of sixty sequences is noisy. For comparison there are two
# other priors: Dirichlet rows, whose pseudo-counts are uniform, and *sticky* rows, which favour
# self-transitions.


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
    hmm_module, prior = priors[name]
    pyro.set_rng_seed(0)  # the same starts for all
    return fit_em(hmm_module, part, log_prior=prior, restarts=2, num_iterations=num_steps)


inside, chosen, gains = [], [], []
for seed in range(num_sets):
    dataset = datasets.diverse_toy(360, generator=torch.Generator().manual_seed(seed))
    train, test = dataset.without_labels()[:60], dataset.without_labels()[60:]
    scores = {}
    for name in priors:
        folds = torch.Generator().manual_seed(seed)  # the same for all
        result = metrics.cross_validate(partial(fitted, name), train, num_folds=3, generator=folds)
        scores[name] = result.log_evidence.sum().item() / result.num_observed
    inside.append(list(scores.values()))
    chosen.append(max(scores, key=scores.get))
    tested = [metrics.log_evidence(fitted(name, train), test) for name in (chosen[-1], "none")]
    gains.append((tested[0] - tested[1]).sum().item() / test.num_observed)

inside = torch.tensor(inside)
inside = inside - inside[:, :1]
print("gain over no prior in cross-validation, nats per observation; mean and sd over sets")
for name, gain in zip(priors, inside.T):
    print(f"{name:17s} {gain.mean():6.3f} ± {gain.std():.3f}, chosen {chosen.count(name)} times")
print("gain of the chosen prior on test data, by set:", *(f"{gain:.3f}" for gain in gains))

# %% [markdown]
# Uniform pseudo-counts help and are chosen every time. On test data the gain is large for some
# sets, where the fit without a prior is poor, and negligible for others. The gain of the diversity
# prior is within the spread over sets, and a large $\alpha$ lowers the score: the true matrix has
# distinct rows, but is far from a permutation.
#
# `figures/diversified_beyond.png` repeats this on four data sets with ten seeds each. On three of
# them a Dirichlet prior gains more than the diversity prior (0.24 against 0.03 nats here, 0.06
# against 0.01 on a ring, and 0.14 against −0.01 on a sticky chain); on English letters the two
# agree within the error (0.008 against 0.003). The figure also shows sticky and sparse priors.

# %% [markdown]
# ## Posterior of the transition matrix
#
# The determinant times Dirichlet rows is a proper density, so a model with this prior can be
# sampled. We take two states, each of which emits its own symbol with probability 0.8, and twenty
# sequences of ten symbols. Only the transition matrix is unknown, so NUTS, with the states summed
# out, can be compared with the exact posterior on a grid.

# %%
lengths, uniform = torch.full((20,), 10), torch.full((2,), 0.5)
emission = torch.tensor([[0.8, 0.2], [0.2, 0.8]])
transition = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
pyro.set_rng_seed(0)
chain = HMM(uniform.log(), transition.log(), torch.distributions.Categorical(emission), lengths)
faces = Sequences(chain.sample(), lengths)

small = TabularHMM(2, categorical(2))
freeze(small, "initial", uniform)
freeze(small, "emission.probs", emission)

grid_matrices = matrices.permute(1, 2, 0, 3)  # (100, 100, 2, 2)
grid_hmm = HMM(uniform.log(), grid_matrices[:, :, None].log(), chain.emission, lengths)
evidence = grid_hmm.log_prob(faces.values).sum(-1)  # (100, 100)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for panel, alpha in zip(axes, (0.0, 4.0)):
    log_prior = alpha * dpp.log_diversity(grid_matrices) if alpha else 0.0  # -∞ on the diagonal
    log_density = evidence + log_prior
    exact = log_density.flatten().softmax(0).reshape(100, 100)
    panel.pcolormesh(grid, grid, exact.T, cmap="Greys", rasterized=True)
    p_12, p_21 = ((1 - first) * exact).sum(), (second * exact).sum()
    print(f"α = {alpha:g}, exact: p(1 → 2) {p_12:.2f}, p(2 → 1) {p_21:.2f};", end=" ")
    print(f"below the diagonal {exact[first > second].sum():.4f}")
    for stay in (0.8, 0.2):
        pyro.set_rng_seed(0)
        model = MarginalModel(small, log_prior=DiversityPrior(alpha))
        start = torch.tensor([[stay, 1 - stay], [1 - stay, stay]])
        sampler = MCMC(
            NUTS(model, init_strategy=init_to_value(values={"module.transition": start})),
            num_samples=20 if SMOKE else 80, warmup_steps=10 if SMOKE else 40, disable_progbar=True,
        )  # fmt: skip
        sampler.run(faces)
        samples = sampler.get_samples()["module.transition"]
        panel.plot(samples[:, 0, 0], samples[:, 1, 0], ".", label=f"from p(stay) = {stay}")
        mean, spread = samples.mean(0), samples.std(0)
        below = (samples[:, 0, 0] > samples[:, 1, 0]).float().mean()
        print(
            f"  NUTS from p(stay) = {stay}: p(1 → 2) {mean[0, 1]:.2f} ± {spread[0, 1]:.2f}, "
            f"p(2 → 1) {mean[1, 0]:.2f} ± {spread[1, 0]:.2f}; below the diagonal {below:.2f}"
        )
    panel.plot(transition[0, 0], transition[1, 0], "r*", markersize=12, label="true")
    panel.set_title(f"α = {alpha:g}; grey: exact posterior")
    panel.set_xlabel("p(1 → 1)")
axes[0].set_ylabel("p(2 → 1)")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# On the diagonal the two rows are equal and the prior is zero. Without the prior, less than a tenth
# of the posterior lies on the diagonal or above it; with it, next to nothing: the prior makes it
# certain that state 1 is more likely after itself than after state 2. It also moves the mass
# towards the corner:
# both probabilities of a change are nearly halved, to about half of the true ones (stars). NUTS
# agrees with the exact posterior if it starts below the diagonal. Started above it, with the prior,
# most of its samples stay there, because the density vanishes on the diagonal. The same holds for
# EM and MAP. Run several chains or restarts from different initial values, and compare their
# evidence. `figures/common/row_permutations.py` has a NUTS that samples both sides.

# %% [markdown]
# ## When to use it
#
# - Use it if the chain is nearly deterministic, its states are visited in turn, and data are few.
# - Do not use it to find the number of states, or against poor initial values: use restarts,
#   k-means or labels.
# - Do not use it where several states *should* have the same successors, as letters of one class
#   in text.
# - Compare $\alpha$ with the number of transitions out of a state, and choose it on held-out data.
#   Distrust a result that needs more than a tenth of that number.
#
# The paper's $\alpha$ is twice the one here, because the gradient it uses is half of the correct
# one: `DiversityPrior.as_in_paper(100)` has a weight of 50.
