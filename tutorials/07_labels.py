# %% [markdown]
# # 7. Supervised and half-supervised labelling
#
# When the states mean something (letters, tags, phases) some sequences may come with the states
# written beside them. Labels are part of the data: every fit takes those that are there, and sums
# over the rest. So *supervised*, *half-supervised* and *unsupervised* are one call on different
# data.
#
# The task: somebody types English with clumsy fingers, and a quarter of the letters come out as a
# key next to the right one. States are the letters meant, observations the keys hit.

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


slips = torch.tensor([[near(a, b) for b in letters] for a in letters])
slips = 0.75 * torch.eye(27) + 0.25 * slips / slips.sum(-1, keepdim=True).clamp(min=1)
slips[letters.index(" "), letters.index(" ")] = 1.0
typed = torch.distributions.Categorical(slips[meant]).sample()
for line in range(3):
    print("typed:", "".join(letters[k] for k in typed[line].tolist()))
    print("meant:", "".join(letters[k] for k in meant[line].tolist()), "\n")

# %% [markdown]
# ## All labels: one step
#
# With every state known there is nothing to sum over, and EM is done after one step: it counts. A
# concentration of 1.1 adds a tenth of a count to every move and every key; it is the smoothing, and
# it is a choice. Without it a move that was never seen could never be read.

# %%
lengths = english.data.lengths
num_test = len(typed) // 5
test, truth = Sequences(typed[:num_test], lengths[:num_test]), meant[:num_test]
train = Sequences(typed[num_test:], lengths[num_test:], labels=meant[num_test:])


def module():
    return TabularHMM(27, categorical(27, 1.1), 1.1, 1.1)


def accuracy(fit):
    """Of the most probable letter at each step."""
    found = fit.hmm(test).posterior(test.values).states.argmax(-1)
    return (found == truth)[test.exists].double().mean().item()


full = fit_em(module(), train)
print(full.reason, "after", len(full.losses) - 1, "steps;", *full.notes)
print(f"as typed {(test.values == truth)[test.exists].double().mean():.3f}, "
      f"read {accuracy(full):.3f}")  # fmt: skip
path = full.hmm(test).viterbi(test.values)
for line in range(3):
    print("typed:", "".join(letters[k] for k in test.values[line].tolist()))
    print("read: ", "".join(letters[k] for k in path[line].tolist()))
    print("meant:", "".join(letters[k] for k in truth[line].tolist()), "\n")

# %% [markdown]
# `viterbi` is the most probable path as a whole, and the posterior has the state that is best at
# each step. The one makes words more often, the other is right more often, each by a little:


# %%
def words(states):
    """Those that are whole, not cut at an end of a sequence."""
    lines = ["".join(letters[k] for k in line) for line in states.tolist()]
    return [word for line in lines for word in line.split()[1:-1]]


known = set(words(train.labels))
best = full.hmm(test).posterior(test.values).states.argmax(-1)
for name, states in {"viterbi": path, "posterior": best, "meant": truth}.items():
    right = (states == truth)[test.exists].double().mean()
    share = sum(word in known for word in words(states)) / len(words(states))
    print(f"{name:9s}: {right:.4f} of letters right, {share:.3f} of words occur in training")

# %% [markdown]
# ## Few labels, and many sequences without
#
# Labels are -1 where the state is not known; single steps may have labels, or whole sequences. The
# same call counts what is known and sums over what is not. Beginning at the fit to the labels
# alone, states go on meaning what they mean. At first, everything is free:


# %%
def with_labels(share):
    """The training set with that share of its labels, and the part that has them."""
    known = torch.rand(len(train)) < share
    labels = torch.where(known[:, None], train.labels, -1)
    few = train[known.nonzero().flatten()]
    return few, Sequences(train.values, train.lengths, labels=labels)


few, some = with_labels(0.01)
alone = fit_em(module(), few)
print(f"{len(few)} labelled sequences alone: {accuracy(alone):.3f}")
for num_steps in (1, 5) if SMOKE else (1, 3, 10, 30):
    both = fit_em(module(), some, start=alone.values, num_steps=num_steps, tolerance=None)
    nats = -metrics.log_evidence(both, test).sum() / test.num_observed
    print(f"and the others, {num_steps:2d} steps: {accuracy(both):.3f}, {nats:.3f} nats per key")

# %% [markdown]
# The model explains new text better and better, and reads it worse and worse. Nothing is wrong with
# the fit: maximum likelihood has no reason to use its 27 states for letters, and finds better uses.
# That has been known for tagging since Merialdo (1994). A few steps may help; more of them, only if
# something keeps the states to their meaning.
#
# Here that is easy. How fingers slip is known, so the emission is not to be learned: `freeze` holds
# it, and the sequences without labels teach the chain, which is what they can do.

# %%
certain = slips.clamp(min=1e-6) / slips.clamp(min=1e-6).sum(-1, keepdim=True)


def held():
    """A module whose emission is known."""
    module = TabularHMM(27, categorical(27), 1.1, 1.1)
    freeze(module, "emission.probs", certain)
    return module


results = {}
for share in (0.0025, 0.01, 0.1, 1.0):
    few, some = with_labels(share)
    pyro.set_rng_seed(0)
    fits = {"labelled alone": fit_em(module(), few), "labelled, slips known": fit_em(held(), few)}
    start = fits["labelled, slips known"].values
    steps = 5 if SMOKE else 30
    fits["all, slips known"] = fit_em(held(), some, start=start, num_steps=steps)
    results[share] = {name: accuracy(fit) for name, fit in fits.items()}
    print(f"{share:6.2%}, {len(few):4d} sequences:", results[share])

nothing = fit_em(held(), train.without_labels(), num_steps=10 if SMOKE else 60)
print(f"no labels at all, slips known: {accuracy(nothing):.3f}")

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
names = [f"{share:.2%}" for share in results]
for name in results[1.0]:
    axis.plot(names, [found[name] for found in results.values()], "o-", label=name)
axis.axhline(
    (test.values == truth)[test.exists].double().mean(), color="k", linewidth=0.8, label="as typed"
)
axis.set_xlabel("sequences with labels")
axis.set_ylabel("letters read rightly")
axis.legend()
plt.show()

# %% [markdown]
# With slips known, eight labelled sequences and three thousand without labels do nearly as well as
# labels on all, and so do sequences without any labels. From a tenth of the labels on, the others
# have nothing to add: what they are fitted to is still not quite the reading of letters.

# %% [markdown]
# ## A prior on the rows
#
# Supervised fits under a diversity prior (tutorial 6) are the same call again. `anchor` is the
# penalty with which Qiao et al. (2015) hold the matrix at its counts. Whether the prior helps is
# a matter of measuring:

# %%
counts = full.hmm(test).log_transition.exp()
for alpha in (1.0, 10.0, 100.0):
    free = fit_em(module(), train, log_prior=DiversityPrior(alpha))
    anchored = DiversityPrior(alpha, anchor=counts, anchor_weight=1e5)
    close = fit_em(module(), train, log_prior=anchored)
    print(f"α = {alpha:3g}: {accuracy(free):.4f}; held at the counts: {accuracy(close):.4f}")
print(f"without: {accuracy(full):.4f}")
print("mean distance of rows:", f"{metrics.diversity(counts):.2f} nats")

# %% [markdown]
# It does not: letters *share* their successors, and many hundred counts in each row leave little to
# say. Labels, or more text without them, are worth far more.
