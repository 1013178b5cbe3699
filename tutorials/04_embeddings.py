# %% [markdown]
# # 4. Dense embeddings of states and symbols
#
# A standard hidden Markov model has one parameter for every pair of states and for every pair of a
# state and a symbol. A DenseHMM gives each state and each symbol a few embedding vectors instead,
# and its probabilities are softmaxes of their inner products:
#
# $$A_{ij} = \frac{\exp(z_i \cdot u_j)}{\sum_{j'} \exp(z_i \cdot u_{j'})} \qquad
#   B_{iv} = \frac{\exp(w_i \cdot v_v)}{\sum_{v'} \exp(w_i \cdot v_{v'})} \qquad
#   \pi_i = \frac{\exp(z_0 \cdot u_i)}{\sum_{i'} \exp(z_0 \cdot u_{i'})}$$
#
# | on paper | in code | shape | what it embeds |
# | --- | --- | --- | --- |
# | $z_i$ | `leave` | $(K, D)$ | a state as the source of a transition |
# | $u_j$ | `enter` | $(K, D)$ | a state as the target of a transition |
# | $w_i$ | `emit` | $(K, D')$ | a state as it emits |
# | $v_v$ | `symbol` | $(V, D')$ | a symbol |
# | $z_0$ | `start` | $(D,)$ | the start of a sequence |
#
# There are fewer parameters, and they can be plotted: symbols with similar emission probabilities
# have similar embeddings. (Sicking et al., 2020, [DenseHMM](https://arxiv.org/abs/2012.09783).)

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
# your own. Its embeddings have normal priors with standard deviation `scale`. Twelve states and 27
# symbols in two dimensions:

# %%
num_states, num_symbols, dim = 12, len(symbols), 2
module = DenseHMM(num_states, num_symbols, dim)
standard = num_states**2 + num_states * (num_symbols - 1) - 1
print(f"parameters of the embeddings  {metrics.num_parameters(module, train)}")
print(f"parameters, standard HMM      {standard}")

# %% [markdown]
# The logits of $A$ are a product of two matrices with $D$ columns, so their rank is at most $D$;
# $A$ itself has full rank in general, because of the softmax. With $D = K - 1$ every positive $A$
# can be represented. No probability can be exactly zero.
#
# ## Fit to co-occurrences
#
# The frequencies of adjacent pairs of letters form a table of 27 by 27 numbers. The model predicts
# the same table: if $\pi$ is the stationary distribution of its chain, it is $B^\top
# \mathrm{diag}(\pi) A B$. `fit_cooccurrence` minimises a distance between the two. The pairs are
# counted once, so the cost of a step does not depend on the length of the text. Restarts run as one
# batch.

# %%
pairs = fit_cooccurrence(
    module, train, num_symbols, loss=cooccurrence.cross_entropy,
    num_iterations=20 if SMOKE else 600, restarts=4,
)  # fmt: skip
print(pairs.summary())
print(metrics.perplexity(pairs, test), "(held out)")

# %% [markdown]
# ## MAP and EM, initialised from the co-occurrence fit
#
# Adjacent pairs are only part of the information in a text. MAP and EM use whole sequences, and a
# co-occurrence fit is a good initialisation for them. Latent variables have the same names in all
# fits, so the values of one fit can initialise another.

# %%
steps = 5 if SMOKE else 150
model = MarginalModel(module)
fits = {
    "co-occurrence": pairs,
    "MAP": fit_map(model, train, num_iterations=steps),
    "MAP from co-occurrence": fit_map(
        model, train, num_iterations=steps, start=init_to_value(values=pairs.start)
    ),
    "EM from co-occurrence": fit_em(
        module, train, num_iterations=2 if SMOKE else 15, start=pairs.parameters
    ),
    "EM, standard HMM": fit_em(
        TabularHMM(num_states, categorical(num_symbols)), train, num_iterations=2 if SMOKE else 60
    ),
}
for name, fit in fits.items():
    print(f"{name:24s}{fit.seconds:6.1f} s  {metrics.perplexity(fit, test)}")

# %% [markdown]
# The standard HMM has several times as many parameters and predicts better; the text is long enough
# to estimate them. Embeddings give a smaller model, and one that can be plotted.
#
# ## The embeddings
#
# Only inner products matter: a joint rotation of `emit` and `symbol`, or a shift of all symbols,
# does not change the model, so axes and origin have no meaning. A symbol is likely in a state whose
# arrow points towards it.

# %%
best = fits["EM from co-occurrence"]
symbol, emit = best.parameters["module.symbol"], best.parameters["module.emit"]
symbol = symbol - symbol.mean(0)
stationary = best.hmm(train[:1]).stationary()

figure, axes = plt.subplots(figsize=(7, 6), layout="constrained")
for name, (x, y) in zip(symbols, symbol.tolist()):
    vowel = name in "aeiou"
    axes.text(
        x, y, "␣" if name == " " else name, color="C3" if vowel else "black", fontsize=14,
        ha="center", va="center",
    )  # fmt: skip
reach = 1.1 * symbol.norm(dim=-1).max().item()
for weight, (x, y) in zip(stationary.tolist(), (normalize(emit, dim=-1) * reach * 0.9).tolist()):
    axes.annotate(
        "", (x, y), (0, 0),
        arrowprops={"arrowstyle": "->", "color": "C0", "lw": 0.5 + 20 * weight, "alpha": 0.35},
    )  # fmt: skip
axes.set_xlim(-reach, reach)
axes.set_ylim(-reach, reach)
axes.set_aspect("equal")
axes.set_title("letters (vowels in red) and directions of the states")
plt.show()

# %% [markdown]
# ## Words
#
# For words the table of pairs is large but sparse. Neither the counts nor the predictions are
# stored densely: a step costs $O(V K^2 + n K)$, where $n$ is the number of distinct pairs.
#
# Which words have similar embeddings? Angles between `symbol` vectors are not identified: scaling
# them along one direction, and `emit` inversely, changes no probability. We compare their inner
# products with the `emit` vectors of the states, which are identified up to a shift.

# %%
corpus = datasets.english_words(300 if SMOKE else 2000)
words = corpus.vocabulary
module = DenseHMM(num_states=32, num_symbols=len(words), dim=12)
fit = fit_cooccurrence(
    module, corpus.data, len(words), loss=cooccurrence.cross_entropy, learning_rate=0.1,
    num_iterations=5 if SMOKE else 400,
)  # fmt: skip
print(fit.summary())

counts = corpus.data.values[corpus.data.observed].bincount(minlength=len(words))
frequent = (counts >= 50).nonzero().flatten().tolist()
names = [words[index] for index in frequent]

stationary = fit.hmm(corpus.data[:1]).stationary()
symbol, emit = fit.parameters["module.symbol"], fit.parameters["module.emit"]
emit = emit - (stationary.unsqueeze(-1) * emit).sum(0)
profiles = (symbol - symbol.mean(0)) @ emit.mT * stationary.sqrt()
points = normalize(profiles, dim=-1)[frequent]


def neighbours(word, count=6):
    """The frequent words with the highest cosine similarity to ``word``."""
    nearest = (points @ points[names.index(word)]).argsort(descending=True)
    return ", ".join(names[index] for index in nearest[1 : count + 1])


for word in ("a", "must", "list", "is", "by", "method"):
    print(f"{word:9s}{neighbours(word)}")

# %% [markdown]
# Articles and auxiliary verbs are grouped although the model knows nothing of grammar. (The text is
# small. With two million words the neighbours of *Monday* are the days of the week, see
# `figures/densehmm_embeddings.json`.)
#
# ## Other kernels, and shared embeddings
#
# `kernel=` replaces the exponential by another positive function of two vectors: `dense.rbf(1.0)`,
# `dense.sigmoid`, or your own. `tied=True` gives each state a single vector for `leave`, `enter`
# and `emit`; the chain is then reversible. `freeze(module, "enter", value)` fixes embeddings.
# `emission=normal(2)` combines the dense transition matrix with another emission.

# %%
for name, options in {
    "exponential": {},
    "radial": {"kernel": dense.rbf(1.0)},
    "one vector per state": {"tied": True},
}.items():
    module = DenseHMM(num_states, num_symbols, dim, **options)
    fit = fit_map(MarginalModel(module), train, num_iterations=steps)
    count = metrics.num_parameters(module, train)
    print(f"{name:21s}{count:4d} parameters  {metrics.perplexity(fit, test)}")
