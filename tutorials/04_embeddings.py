# %% [markdown]
# # 4. Dense embeddings of states and symbols
#
# An ordinary hidden Markov model has a number of its own for every pair of states and for every
# pair of a state and a symbol. In a DenseHMM each state and each symbol has a few vectors instead,
# and a probability says how well two vectors go together:
#
# $$A_{ij} = \frac{\exp(z_i \cdot u_j)}{\sum_{j'} \exp(z_i \cdot u_{j'})} \qquad
#   B_{iv} = \frac{\exp(w_i \cdot v_v)}{\sum_{v'} \exp(w_i \cdot v_{v'})} \qquad
#   \pi_i = \frac{\exp(z_0 \cdot u_i)}{\sum_{i'} \exp(z_0 \cdot u_{i'})}$$
#
# | on paper | in code | shape | what it is |
# | --- | --- | --- | --- |
# | $z_i$ | `leave` | $(K, D)$ | a state that the chain leaves |
# | $u_j$ | `enter` | $(K, D)$ | a state that it enters |
# | $w_i$ | `emit` | $(K, D')$ | a state that emits |
# | $v_v$ | `symbol` | $(V, D')$ | a symbol |
# | $z_0$ | `start` | $(D,)$ | where sequences begin |
#
# There are fewer parameters, and they can be looked at: symbols that are used alike lie close to
# each other. (Sicking et al., 2020, [DenseHMM](https://arxiv.org/abs/2012.09783).)

# %%
import os

import pyro
from matplotlib import pyplot as plt
from pyro.infer.autoguide import init_to_value
from torch.nn.functional import normalize

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    TabularHMM,
    categorical,
    cooccurrence,
    datasets,
    dense,
    fit_cooccurrence,
    fit_em,
    fit_map,
    metrics,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

letters = datasets.english_letters(8_000 if SMOKE else 100_000, chunk=200)
symbols = letters.vocabulary
num_train = len(letters.data) * 4 // 5
train, test = letters.data[:num_train], letters.data[num_train:]
print(train)

# %% [markdown]
# ## The module, and what it can express
#
# `DenseHMM` is used like any other module: in a `MarginalModel`, with a guide, or in a model of
# your own. Its embeddings have normal priors; `scale` is their standard deviation. Twelve states
# and 27 symbols in two dimensions:

# %%
num_states, num_symbols, dim = 12, len(symbols), 2
module = DenseHMM(num_states, num_symbols, dim)
standard = num_states**2 + num_states * (num_symbols - 1) - 1
print(f"numbers in the embeddings   {metrics.num_parameters(module, train)}")
print(f"that vary independently     {dense.degrees_of_freedom(num_states, num_symbols, dim)}")
print(f"of a standard HMM           {standard}")

# %% [markdown]
# The logits of $A$ are a product of two matrices of $D$ columns, so their rank is $D$ at most; the
# softmax gives $A$ itself full rank in general. In $K - 1$ dimensions every positive $A$ can be
# written so. The price is that no probability is exactly zero.
#
# ## By co-occurrence
#
# How often each letter follows each other one is a table of 27 by 27 numbers. The model predicts
# such a table too: if $\pi$ is the stationary law of its chain, it is $B^\top \mathrm{diag}(\pi) A
# B$. `fit_cooccurrence` brings the two together. It counts once, and never looks at the text again,
# so a step costs the same for a thousand letters and for a billion. Restarts run side by side.

# %%
pairs = fit_cooccurrence(
    module, train, num_symbols, loss=cooccurrence.cross_entropy, num_steps=20 if SMOKE else 600,
    restarts=4,
)  # fmt: skip
print(pairs.summary())
print(metrics.perplexity(pairs, test), "(held out)")

# %% [markdown]
# ## By MAP and by EM, from there
#
# Pairs of neighbours are not all there is in a text. MAP and EM see whole sequences; a fit by
# co-occurrence is a good place for them to begin. Latent variables have the same names in all
# fits, so that the values of one are the start of another.

# %%
steps = 5 if SMOKE else 150
model = MarginalModel(module)
fits = {
    "co-occurrence": pairs,
    "MAP": fit_map(model, train, num_steps=steps),
    "MAP from co-occurrence": fit_map(
        model, train, num_steps=steps, init=init_to_value(values=pairs.start)
    ),
    "EM from co-occurrence": fit_em(
        module, train, num_steps=2 if SMOKE else 15, start=pairs.values
    ),
    "EM, standard HMM": fit_em(
        TabularHMM(num_states, categorical(num_symbols)), train, num_steps=2 if SMOKE else 60
    ),
}
for name, fit in fits.items():
    print(f"{name:24s}{fit.seconds:6.1f} s  {metrics.perplexity(fit, test)}")

# %% [markdown]
# The standard HMM has several times as many parameters and predicts a little better: there is text
# enough for them. What the embeddings have to offer is smaller models, and a picture.
#
# ## The picture
#
# Only inner products matter, so that a rotation of `emit` and `symbol` together changes nothing,
# and neither does a shift of all symbols: axes and origin mean nothing. A symbol is likely in a
# state whose arrow points its way.

# %%
best = fits["EM from co-occurrence"]
symbol, emit = best.values["module.symbol"], best.values["module.emit"]
symbol = symbol - symbol.mean(0)
share = best.hmm(train[:1]).stationary()

figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
for name, (x, y) in zip(symbols, symbol.tolist()):
    vowel = name in "aeiou"
    axes.text(
        x, y, "␣" if name == " " else name, color="C3" if vowel else "black", fontsize=14,
        ha="center", va="center",
    )  # fmt: skip
reach = 1.1 * symbol.norm(dim=-1).max().item()
for weight, (x, y) in zip(share.tolist(), (normalize(emit, dim=-1) * reach * 0.9).tolist()):
    axes.annotate(
        "", (x, y), (0, 0),
        arrowprops={"arrowstyle": "->", "color": "C0", "lw": 0.5 + 20 * weight, "alpha": 0.35},
    )  # fmt: skip
axes.set_xlim(-reach, reach)
axes.set_ylim(-reach, reach)
axes.set_aspect("equal")
axes.set_title("letters (vowels red), and the directions of the states that emit them")
plt.show()

# %% [markdown]
# ## Words
#
# With words the table of pairs is large, but nearly empty. Counts are kept sparsely, and neither
# they nor the prediction are ever written out: a step costs $O(V K^2 + n K)$, where $n$ is the
# number of different pairs.
#
# Which words are used alike? Angles between `symbol` vectors alone would not say: to stretch them
# along a direction, and `emit` as much the other way, changes no probability. We compare the inner
# products of symbols with the states' vectors, which are the same whatever the axes.

# %%
corpus = datasets.english_words(300 if SMOKE else 2000)
words = corpus.vocabulary
module = DenseHMM(num_states=32, num_symbols=len(words), dim=12)
fit = fit_cooccurrence(
    module, corpus.data, len(words), loss=cooccurrence.cross_entropy, learning_rate=0.1,
    num_steps=5 if SMOKE else 400,
)  # fmt: skip
print(fit.summary())

counts = corpus.data.values[corpus.data.observed].bincount(minlength=len(words))
frequent = (counts >= 50).nonzero().flatten().tolist()
names = [words[index] for index in frequent]

law = fit.hmm(corpus.data[:1]).stationary()
symbol, emit = fit.values["module.symbol"], fit.values["module.emit"]
emit = emit - (law.unsqueeze(-1) * emit).sum(0)
points = normalize((symbol - symbol.mean(0)) @ emit.mT * law.sqrt(), dim=-1)[frequent]


def neighbours(word, count=6):
    """The frequent words that states see from the angles closest to that of ``word``."""
    nearest = (points @ points[names.index(word)]).argsort(descending=True)
    return ", ".join(names[index] for index in nearest[1 : count + 1])


for word in ("a", "must", "list", "is", "by", "method"):
    print(f"{word:9s}{neighbours(word)}")

# %% [markdown]
# Nobody told the model what an article is, or an auxiliary verb. (The text is small; with two
# million words the neighbours of *Monday* are the days of the week, see
# `figures/densehmm_embeddings.json`.)
#
# ## Other kernels, fewer embeddings
#
# `kernel=` exchanges the exponential for another positive function of two vectors:
# `dense.rbf(1.0)`, `dense.sigmoid`, or one of your own. `tied=True` gives each state a single
# vector, which leaves, enters and emits; the chain is then reversible. `freeze(module, "enter",
# value)` holds vectors constant. `emission=normal(2)` puts a dense chain under other emissions.

# %%
for name, options in {
    "exponential": {},
    "radial": {"kernel": dense.rbf(1.0)},
    "one vector a state": {"tied": True},
}.items():
    module = DenseHMM(num_states, num_symbols, dim, **options)
    fit = fit_map(MarginalModel(module), train, num_steps=steps)
    count = metrics.num_parameters(module, train)
    print(f"{name:20s}{count:4d} numbers  {metrics.perplexity(fit, test)}")
