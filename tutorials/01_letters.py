# %% [markdown]
# # 1. Vowels, consonants and the space, found in plain text
#
# A hidden Markov model with two states is fitted to plain text, and separates vowels from
# consonants. With five states it also learns where words begin and end. We define the model in one
# line, fit it by maximum a posteriori (MAP) estimation, and inspect what each state emits.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $x_{1:T}$ | `data.values` | letters a to z and the space |
# | $K$ | `num_states` | 2, then 5 |
# | $A_{ij} = p(z_{t+1}=j \mid z_t=i)$ | `hmm.log_transition` | row = from, column = to |
# | $B_{iv} = p(x_t=v \mid z_t=i)$ | `hmm.emission.probs` | one row of letters per state |
#
# The text is Python's own help pages, which come with every installation.

# %%
import os
import textwrap
from pathlib import Path

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import MarginalModel, TabularHMM, categorical, datasets, fit_map, metrics, plots

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps

letters = datasets.english_letters(4_000 if SMOKE else 40_000, chunk=200)
data, symbols = letters.data, letters.vocabulary
names = ["␣" if symbol == " " else symbol for symbol in symbols]
print(data)
print("".join(symbols.decode(data.values[0])))

# %% [markdown]
# ## Model and fit
#
# `TabularHMM` puts flat Dirichlet priors on all rows of its tables. `MarginalModel` is the Pyro
# model in which the states are summed out exactly. MAP finds a local optimum, so we fit from
# several random starts and keep the best.


# %%
def best_of(num_states, num_steps, seeds):
    fits = []
    for seed in seeds[:1] if SMOKE else seeds:
        pyro.set_rng_seed(seed)
        model = MarginalModel(TabularHMM(num_states, categorical(len(symbols))))
        steps = 5 if SMOKE else num_steps
        fits.append(fit_map(model, data, num_iterations=steps, learning_rate=0.2))
    return min(fits, key=lambda fit: fit.losses[-1])


two = best_of(num_states=2, num_steps=150, seeds=(0, 1, 2))
print(two.summary())

# %% [markdown]
# Which letters belong to which state? By Bayes' rule, with the stationary distribution $\pi$ of the
# chain as prior, $p(z \mid x) \propto \pi_z B_{zx}$.


# %%
def letters_of(hmm):
    joint = hmm.stationary().unsqueeze(-1) * hmm.emission.probs  # (K, V)
    state_of_letter = joint.argmax(0)
    groups = []
    for k in range(hmm.num_states):
        order = hmm.emission.probs[k].argsort(descending=True)
        groups.append(" ".join(names[v] for v in order if state_of_letter[v] == k))
    return groups


hmm = two.hmm(data)
for k, group in enumerate(letters_of(hmm)):
    print(f"state {k}: {group}")

# %% [markdown]
# One state emits the vowels. The model was not told what a vowel is; it uses only the fact that
# vowels seldom follow each other.
#
# ## Five states

# %%
five = best_of(num_states=5, num_steps=240, seeds=(0, 1))
hmm = five.hmm(data)
print(five.summary())
unigram = torch.bincount(data.values[data.observed], minlength=27).double()
unigram = (unigram / unigram.sum()).clamp(min=1e-12)
print(f"one state   perplexity {torch.exp(-(unigram * unigram.log()).sum()):.2f}")
print(f"two states  {metrics.perplexity(two, data)}")
print(f"five states {metrics.perplexity(five, data)}")

# %% [markdown]
# ## What the states are
#
# `viterbi` computes the most probable sequence of states; the colours below are the states.

# %%
path = hmm.viterbi(data.values)[0]
text = "".join(symbols.decode(data.values[0]))


def kind(state):
    """What a state mostly emits, or that a space mostly follows it."""
    emitted = hmm.emission.probs[state].tolist()
    vowels = sum(emitted[names.index(letter)] for letter in "aeiou")
    space = emitted[-1]
    if space > 0.5:
        return "space"
    follows = hmm.log_transition[state].exp() @ hmm.emission.probs[:, -1]
    if follows > 0.5:
        return "word end"
    return "vowel" if vowels > 0.5 else "consonant"


kinds = [f"{k}: {kind(k)}" for k in range(hmm.num_states)]

figure = plt.figure(figsize=(9, 7), layout="constrained")
grid = figure.add_gridspec(2, 2, height_ratios=[3, 1], width_ratios=[2.2, 1])
cells = grid[0, 0].subgridspec(hmm.num_states, 1)
for k, row in enumerate(hmm.emission.probs.detach()):
    axes = figure.add_subplot(cells[k])  # each on a scale of its own
    axes.bar(names, row, color=f"C{k}")
    axes.set_ylabel(kinds[k], rotation=0, ha="right", va="center")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    if k == 0:
        axes.set_title("emission probabilities, each state on its own scale", fontsize=10)
    if k < hmm.num_states - 1:
        axes.set_xticks([])
axes = plots.transition(hmm, axes=figure.add_subplot(grid[0, 1]))
axes.set_title("transition probabilities", fontsize=10)

axes = figure.add_subplot(grid[1, :])
axes.set_axis_off()
axes.set_title("Viterbi path: the state of each letter", fontsize=10)
lines = textwrap.wrap(text[:400], 66, drop_whitespace=False)[:3]
first = 0
for row, line in enumerate(lines):
    for column, letter in enumerate(line):
        color = f"C{int(path[first + column])}"
        box = plt.Rectangle((column, -row), 1, 0.85, color=color, alpha=0.55, linewidth=0)
        axes.add_patch(box)
        axes.text(column + 0.5, 0.4 - row, letter, ha="center", va="center", family="monospace")
    first += len(line)
axes.set_xlim(0, 66)
axes.set_ylim(-2.1, 1)
if Path("figures").is_dir() and not SMOKE:
    figure.savefig("figures/letters.png", dpi=150)
    print("the picture is figures/letters.png")
plt.show()
