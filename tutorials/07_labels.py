# %% [markdown]
# # 7. Supervised and semi-supervised labelling
#
# If the states have a meaning (letters, tags, phases), some sequences may come with labels. Labels
# are part of the data: every fit conditions on the labels that are present and sums over the other
# states. So *supervised*, *semi-supervised* and *unsupervised* learning are the same call on
# different data.
#
# The task: English is typed with errors, and a quarter of the letters are replaced by a
# neighbouring key. The states are the intended letters, the observations the typed keys.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import (
    DiversityPrior,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    freeze,
    metrics,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

english = datasets.english_letters(20_000 if SMOKE else 200_000, chunk=50)
letters = english.vocabulary
meant = english.data.values  # (N, T)

rows = ["qwertyuiop", "asdfghjkl", "zxcvbnm"]
place = {key: (y, x + 0.4 * y) for y, row in enumerate(rows) for x, key in enumerate(row)}


def near(a, b):
    if " " in (a, b) or a == b:
        return 0.0
    (y, x), (v, u) = place[a], place[b]
    return float((y - v) ** 2 + (x - u) ** 2 < 1.7)


key_probs = torch.tensor([[near(a, b) for b in letters] for a in letters])
key_probs = 0.75 * torch.eye(27) + 0.25 * key_probs / key_probs.sum(-1, keepdim=True).clamp(min=1)
key_probs[letters.index(" "), letters.index(" ")] = 1.0
typed = torch.distributions.Categorical(key_probs[meant]).sample()
for line in range(3):
    print("typed:", "".join(letters[k] for k in typed[line].tolist()))
    print("meant:", "".join(letters[k] for k in meant[line].tolist()), "\n")

# %% [markdown]
# ## All labels: one step
#
# With all states observed there is nothing to sum over, and EM converges in one step: it counts. A
# concentration of 1.1 adds 0.1 pseudo-counts to every transition and every emission (additive
# smoothing). Without it, a transition that is absent from the training data would have probability
# zero.

# %%
lengths = english.data.lengths
num_test = len(typed) // 5
test, truth = Sequences(typed[:num_test], lengths[:num_test]), meant[:num_test]
train = Sequences(typed[num_test:], lengths[num_test:], labels=meant[num_test:])


def module():
    return TabularHMM(27, categorical(27, 1.1), 1.1, 1.1)


def accuracy(fit):
    """Share of steps at which the state of highest posterior marginal is right."""
    decoded = fit.hmm(test).posterior(test.values).state_probs.argmax(-1)
    return (decoded == truth)[test.exists].double().mean().item()


full = fit_em(module(), train)
print(full.reason, "after", len(full.losses) - 1, "steps;", *full.notes)
print(f"as typed {(test.values == truth)[test.exists].double().mean():.3f}, "
      f"decoded {accuracy(full):.3f}")  # fmt: skip
path = full.hmm(test).viterbi(test.values)
for line in range(3):
    print("typed:", "".join(letters[k] for k in test.values[line].tolist()))
    print("path: ", "".join(letters[k] for k in path[line].tolist()))
    print("meant:", "".join(letters[k] for k in truth[line].tolist()), "\n")

# %% [markdown]
# `viterbi` computes the most probable path as a whole; the posterior marginals give the most
# probable state at each step. The path contains slightly more words, the marginals slightly more
# correct letters:


# %%
def words(states):
    """The complete words: not those cut at an end of a sequence."""
    lines = ["".join(letters[k] for k in line) for line in states.tolist()]
    return [word for line in lines for word in line.split()[1:-1]]


known = set(words(train.labels))
best = full.hmm(test).posterior(test.values).state_probs.argmax(-1)
for name, states in {"viterbi": path, "posterior": best, "meant": truth}.items():
    right = (states == truth)[test.exists].double().mean()
    in_training = sum(word in known for word in words(states)) / len(words(states))
    print(f"{name:9s}: {right:.4f} of letters right, {in_training:.3f} of words occur in training")

# %% [markdown]
# ## Few labels and many unlabelled sequences
#
# A label of -1 marks an unknown state; single steps or whole sequences may be labelled. The same
# call conditions on the known labels and sums over the rest. Initialised at the supervised fit, the
# states keep their meaning at first. We begin with all parameters free:


# %%
def with_labels(share):
    """The sequences that keep their labels, and the whole training set with those labels."""
    known = torch.rand(len(train)) < share
    labels = torch.where(known[:, None], train.labels, -1)
    few = train[known.nonzero().flatten()]
    return few, Sequences(train.values, train.lengths, labels=labels)


few, partial = with_labels(0.01)
alone = fit_em(module(), few)
print(f"{len(few)} labelled sequences only: {accuracy(alone):.3f}")
for num_steps in (1, 5) if SMOKE else (1, 3, 10, 30):
    both = fit_em(
        module(), partial, start=alone.parameters, num_iterations=num_steps, tolerance=None
    )
    nats = -metrics.log_evidence(both, test).sum() / test.num_observed
    print(f"semi-supervised, {num_steps:2d} steps: {accuracy(both):.3f}, {nats:.3f} nats per key")

# %% [markdown]
# The likelihood of new text rises while the accuracy falls. This is no failure of the fit: maximum
# likelihood has no reason to use the 27 states for letters. It is well known for tagging (Merialdo,
# 1994): a few steps may help, and more only if something keeps the states tied to their meaning.
#
# Here that is easy. The error probabilities of the keys are known, so the emission need not be
# learned: `freeze` fixes it, and the unlabelled sequences are used to learn the transitions.

# %%
emission_probs = key_probs.clamp(min=1e-6) / key_probs.clamp(min=1e-6).sum(-1, keepdim=True)


def fixed():
    """A module with the emission fixed at the true one."""
    module = TabularHMM(27, categorical(27), 1.1, 1.1)
    freeze(module, "emission.probs", emission_probs)
    return module


results = {}
for share in (0.0025, 0.01, 0.1, 1.0):
    few, partial = with_labels(share)
    pyro.set_rng_seed(0)
    fits = {
        "labelled only": fit_em(module(), few),
        "labelled only, emission known": fit_em(fixed(), few),
    }
    start = fits["labelled only, emission known"].parameters
    steps = 5 if SMOKE else 30
    fits["all, emission known"] = fit_em(fixed(), partial, start=start, num_iterations=steps)
    results[share] = {name: accuracy(fit) for name, fit in fits.items()}
    print(f"{share:6.2%}, {len(few):4d} sequences:", results[share])

unlabelled = fit_em(fixed(), train.without_labels(), num_iterations=10 if SMOKE else 60)
print(f"no labels, emission known: {accuracy(unlabelled):.3f}")

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
names = [f"{share:.2%}" for share in results]
for name in results[1.0]:
    axis.plot(names, [scores[name] for scores in results.values()], "o-", label=name)
axis.axhline(
    (test.values == truth)[test.exists].double().mean(), color="k", linewidth=0.8, label="as typed"
)
axis.set_xlabel("share of sequences with labels")
axis.set_ylabel("share of letters right")
axis.legend()
plt.show()

# %% [markdown]
# With the emission known, eight labelled sequences and three thousand unlabelled ones do nearly as
# well as labels on all, and so do unlabelled sequences alone. With a tenth of the labels or more,
# unlabelled sequences add nothing: their likelihood is not quite the same objective as accuracy.

# %% [markdown]
# ## A diversity prior
#
# Supervised fits under a diversity prior (tutorial 6) use the same call. `anchor` is the penalty
# with which Qiao et al. (2015) keep the matrix near the counts. We measure whether the prior helps:

# %%
counts = full.hmm(test).log_transition.exp()
for alpha in (1.0, 10.0, 100.0):
    free = fit_em(module(), train, log_prior=DiversityPrior(alpha))
    anchored = DiversityPrior(alpha, anchor=counts, anchor_weight=1e5)
    close = fit_em(module(), train, log_prior=anchored)
    print(f"α = {alpha:3g}: {accuracy(free):.4f}; anchored at the counts: {accuracy(close):.4f}")
print(f"no prior: {accuracy(full):.4f}")
print("mean distance of rows:", f"{metrics.diversity(counts):.2f} nats")

# %% [markdown]
# It does not: letters *share* their successors, and with several hundred counts in each row the
# prior has little influence. More labels, or more unlabelled text, are worth far more.
