# %% [markdown]
# # 17. How many states?
#
# More states always fit better; the question is whether they fit what will be seen next. Two ways
# answer it, and both are a loop over the number of states $K$: BIC pays for each parameter,
# cross-validation tries each model on sequences that it was not fitted to. We use them where the
# truth is known, where the emission is wrong, and on a text, where there is no true number.
#
# | on paper | in code |
# | --- | --- |
# | BIC: $-2 \log p(x) + m \log n$, with m parameters and n observations | `metrics.bic` |
# | AIC: $-2 \log p(x) + 2 m$ | `metrics.aic` |
# | $\log p(x_\mathrm{fold})$ under the fit to all other folds | `metrics.cross_validate` |
#
# All of them are shown below in nats per observation, so that they can be compared; less is better.

# %%
import os
import time

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.distributions import Gamma, Normal

from pyrohmm import (
    HMM,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    gamma,
    metrics,
    normal,
    plots,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
RESTARTS = 1 if SMOKE else 5


def simulate(emission, number, steps=60):
    """Sequences of a chain that stays in its state with probability 0.9."""
    num_states = emission.batch_shape[0]
    stay = 0.9 * torch.eye(num_states) + 0.1 * (1 - torch.eye(num_states)) / (num_states - 1)
    start = torch.full((num_states,), 1 / num_states)
    hmm = HMM(start.log(), stay.log(), emission, torch.full((number,), steps))
    return Sequences(hmm.sample(), hmm.lengths), hmm


levels = Normal(torch.tensor([-2.5, 0.0, 2.5]), 1.0)  # three states
data, truth = simulate(levels, 8 if SMOKE else 24)
new, new_truth = simulate(levels, 20 if SMOKE else 500)
print(data)


# %% [markdown]
# ## The loop
#
# For each K: a fit to all data for BIC and AIC, and a fit to the other folds for each fold. The
# likelihood of an HMM has many maxima, so each fit runs several restarts and keeps the best; folds
# are the same for every K. Since the data are simulated, we can also judge each model by 500 new
# sequences.


# %%
def compare(family, data, sizes, num_folds=4):
    """Criteria by K, in nats per observation; cross-validation also by sequence."""
    fits, scores, by_sequence = {}, {"AIC": {}, "BIC": {}, "cross-validation": {}}, {}
    for num_states in sizes:

        def fitted(part, num_states=num_states):
            steps = 5 if SMOKE else 200
            return fit_em(
                TabularHMM(num_states, family), part, restarts=RESTARTS, num_iterations=steps
            )

        fits[num_states] = fitted(data)
        found = metrics.cross_validate(fitted, data, num_folds=num_folds)
        by_sequence[num_states] = found.log_evidence
        count = data.num_observed
        scores["AIC"][num_states] = metrics.aic(fits[num_states], data) / (2 * count)
        scores["BIC"][num_states] = metrics.bic(fits[num_states], data) / (2 * count)
        scores["cross-validation"][num_states] = -found.log_evidence.sum().item() / count
    return fits, scores, by_sequence


def show(scores):
    """A line for each K; the least of each column has a star."""
    print(" K" + "".join(f"{name:>19s}" for name in scores))
    for size in next(iter(scores.values())):
        cells = ""
        for column in scores.values():
            mark = "*" if column[size] == min(column.values()) else " "
            cells += f"{column[size]:18.4f}{mark}"
        print(f"{size:2d}{cells}")


sizes = range(1, 4 if SMOKE else 7)
fits, scores, by_sequence = compare(normal(0), data, sizes)
scores["new data"] = {
    size: -metrics.log_evidence(fit, new).sum().item() / new.num_observed
    for size, fit in fits.items()
}
show(scores)
best = -new_truth.log_prob(new.values).sum() / new.num_observed
print(f"the true model on the new data: {best:.4f}")

figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
plots.criterion(scores, "nats per observation", axes=axes)
plt.show()

# %% [markdown]
# The curves fall steeply up to the truth and rise slowly after it. All criteria choose three
# states here. BIC rises fastest, since it pays most for a parameter. AIC and cross-validation are
# closer to what new data say, and choose a state too many more often, at hardly any cost. If you
# want to *interpret* the states, prefer BIC; if you want to *predict*, prefer cross-validation.
#
# ## How sure is the choice?
#
# Cross-validation gives a number for each sequence, so that the gain of one more state has a
# standard error: that of the sum of differences by sequence. A gain that is not twice its error is
# none.

# %%
for size in list(sizes)[1:]:
    gains = by_sequence[size] - by_sequence[size - 1]
    error = gains.std() * len(gains) ** 0.5
    print(f"{size - 1} to {size} states: gain {gains.sum():7.1f} nats, standard error {error:.1f}")

# %% [markdown]
# ## When the emission is wrong
#
# Waiting times of two states, gamma distributed in each. With normal emissions the criteria ask for
# more than two states: the additional ones mend the shape of the distribution, and mean nothing.
# More states than expected are often a sign of this. With the right family two are enough.

# %%
waits, _ = simulate(Gamma(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 0.25])), 8 if SMOKE else 24)
tried = {}
for name, family in (("normal", normal(0)), ("gamma", gamma(0))):
    _, tried[name], _ = compare(family, waits, range(1, 3 if SMOKE else 6))
    print(name)
    show(tried[name])

figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
plots.criterion({f"{name}, BIC": tried[name]["BIC"] for name in tried}, "nats per wait", axes=axes)
plt.show()

# %% [markdown]
# Before you count states, look at how each of them emits (`check_model` and
# `plots.emission` of a fit), and whether durations or a dependence on the observation before are
# what the additional states stand for.
#
# ## A text
#
# The letters of an English text, 27 symbols. Nobody knows how many states there are, and the
# question has no answer: language is no HMM. A Dirichlet concentration above one keeps every letter
# possible in every state, which held-out text needs.

# %%
letters = datasets.english_letters(4_000 if SMOKE else 20_000, chunk=100)
sizes = (1, 2, 3) if SMOKE else (1, 2, 3, 4, 6, 8, 12, 16)
start = time.process_time()
fits, scores, by_sequence = compare(categorical(27, 1.1), letters.data, sizes, num_folds=3)
show(scores)
print(f"{4 * len(sizes)} fits in {time.process_time() - start:.0f} s")

figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
plots.criterion(scores, "nats per letter", axes=axes)
plt.show()

# %% [markdown]
# Every criterion still falls at sixteen states, by less and less for each state: English was not
# made by an HMM, and no number is the true one. For prediction take as many states as you can
# afford. For interpretation few are enough. Two already have a meaning:

# %%
probs = fits[2].hmm(letters.data).emission.probs
usage = fits[2].hmm(letters.data).posterior(letters.data.values).state_probs.sum((0, 1))
joint = probs * (usage / usage.sum())[:, None]
state_of = joint.argmax(0)
for state in (0, 1):
    found = [letters.vocabulary[k] for k in range(27) if state_of[k] == state]
    print(state, " ".join(symbol.replace(" ", "space") for symbol in found))

# %% [markdown]
# The guide has more: a model of more states than needed that switches off those it does not use
# (`StickyHDPHMM`), and fits that go on from a state split in two (`split_state`), which takes fewer
# restarts.
