# %% [markdown]
# # 8. A language model with thousands of states, on your laptop
#
# A hidden Markov model with $K$ states has a transition matrix of $K^2$ entries, and each word
# costs $K^2$ multiplications. Chiu and Rush (2020, [Scaling Hidden Markov Language
# Models](https://aclanthology.org/2020.emnlp-main.103)) use tens of thousands of states, with exact
# inference, by three ideas:
#
# - **Block-sparse emissions.** Every word belongs to a cluster, and every cluster has a block of
#   states, the only ones that emit its words. An observed word determines the block of its state,
#   so a step costs the square of the block size instead of $K^2$.
# - **Neural parameterization.** Probabilities are softmaxes of inner products of embeddings that
#   pass through small networks: the number of parameters grows with $K$, not with $K^2$.
# - **State dropout.** Each training step drops half of the states of every block, at random. This
#   regularises the model, and a step costs a quarter.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $K$ | `num_states` | 2,048 states |
# | $C$ | `num_clusters` | 64 clusters of words, one of them `<eos>` alone |
# | $V$ | `len(vocabulary)` | 2,000 words |
# | $D$ | `hidden_dim` | embeddings of 64 dimensions |

# %%
import math
import os
import tempfile
import time

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import LanguageModel, TabularHMM, categorical, datasets, fit_em, language, metrics

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

corpus = datasets.english_words(2000)
vocabulary = corpus.vocabulary
distinct = {tuple(row): number for number, row in enumerate(corpus.data.values.tolist())}
sentences = corpus.data[torch.tensor(sorted(distinct.values()))]
place = torch.arange(len(sentences)) % 10
train, held_out, test = sentences[place < 8], sentences[place == 8], sentences[place == 9]
if SMOKE:
    train, held_out, test = train[:200], held_out[:40], test[:40]
for part in (train, held_out, test):
    print(f"{len(part):5,} sentences, {part.num_observed:6,} words with <eos>")

# %% [markdown]
# The text is Python's own help pages: short, and repetitive. Duplicate sentences are removed, so
# that no test sentence is in the training set.
#
# ## Baselines
#
# Perplexity is `exp` of the mean negative log-probability per word, `<eos>` included. The baselines
# are n-grams (interpolated Kneser-Ney with three discounts, as of KenLM) and a small tabular HMM.

# %%
ngrams = {order: language.ngram(train, len(vocabulary), order) for order in (1, 2, 5)}
small = TabularHMM(32, categorical(len(vocabulary), 1.02), 1.02, 1.02)
small_fit = fit_em(small, train, num_iterations=2 if SMOKE else 20, tolerance=None)
results = {f"{order}-gram": ngram.perplexity(test).value for order, ngram in ngrams.items()}
results["tabular HMM, 32 states"] = metrics.perplexity(small_fit, test).value
for name, value in results.items():
    print(f"{value:6.1f}  {name}")

# %% [markdown]
# ## Clusters
#
# `LanguageModel` combines the parts. It computes Brown clusters, which maximise the mutual
# information between the clusters of adjacent words, puts `<eos>` in a cluster of its own, and
# gives each cluster a block of states. With `two_level` transitions (the default) the model chooses
# the next block first and then a state in it, so no normalisation over all states is needed.

# %%
num_states, num_clusters = (64, 16) if SMOKE else (2048, 64)
model = LanguageModel.from_data(vocabulary, train, num_states, num_clusters, hidden_dim=64)
num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
print(model, f"{num_parameters:,} parameters")
frequency = torch.bincount(train.packed("values"), minlength=len(vocabulary))
block_of_word = model.blocks.symbol_block
for block in torch.bincount(block_of_word, frequency).argsort(descending=True)[:12].tolist():
    size = int((block_of_word == block).sum())
    words = (frequency * (block_of_word == block)).argsort(descending=True)[:size]
    print(f"{block:3d}:", " ".join(vocabulary[word] for word in words[:12].tolist()))

# %% [markdown]
# Words with similar contexts share a cluster. The states of a block then separate the different
# uses of its words: each state has its own transition and emission probabilities.
#
# ## Training
#
# `fit` is `fit_map` with suitable settings: minibatches of a fixed number of words, AdamW, a
# learning rate with warm-up and cosine decay, and the best parameters on held-out sentences.

# %%
start_time = time.process_time()
fit = model.fit(
    train,
    held_out,
    num_epochs=1 if SMOKE else 10,
    batch_tokens=1024,
    learning_rate=0.01,
)
print(f"{time.process_time() - start_time:.0f} s of processor time, {len(fit.losses)} steps")
results[f"neural HMM, {num_states:,} states"] = model.perplexity(test).value
for name, value in results.items():
    print(f"{value:6.1f}  {name}")

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
history = [(report.step, math.exp(report.nats)) for report in fit.validation]
axis.plot(*zip(*history), "o-", label="neural HMM, held out")
for style, (name, value) in zip((":", "-.", "--", "-"), results.items()):
    axis.axhline(value, color="0.3", linestyle=style, linewidth=1.2, label=f"{name}, test")
axis.set_xlabel("steps")
axis.set_ylabel("perplexity")
axis.set_yscale("log")
axis.set_yticks([100, 150, 200, 300], [100, 150, 200, 300])
axis.minorticks_off()
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# Many states with block-sparse emissions and state dropout predict new sentences better than the
# small tabular HMM. The n-grams are better still: thirty thousand words are few for a neural model,
# and the text repeats many phrases. (Of a million words it is the other way round: see the end.)
#
# ## Where it helps: mixed with the n-gram
#
# An n-gram remembers phrases, the HMM what kind of word comes next: they err in different places.
# An `NGramMixture` lets the n-gram take part in the choice of the next block and of the word in it,
# and stays exact. Only its weights are fitted, to sentences that the n-gram has not counted.

# %%
counted = ngrams[5]
mixture = language.NGramMixture(model.module, counted.num_classes, counted.num_classes)
mixture.fit_weights(counted.with_blocks(held_out, model.blocks))
data = counted.with_blocks(test, model.blocks)
with torch.no_grad():
    log_probs = mixture.eval()(data.lengths, None, data.covariates).log_prob(data.values)
results["neural HMM and 5-gram"] = math.exp(-log_probs.sum() / test.num_observed)
for name, value in results.items():
    print(f"{value:6.1f}  {name}")

# %% [markdown]
# The mixture is below both of its parts.
#
# ## What the states represent
#
# The posterior of a state given the whole sentence is nonzero only within the block of the word.
# Summed over the training set, it gives the expected number of uses of each state, of the words it
# emits, and of the words before and after. The most used states:

# %%
with torch.no_grad():
    hmm = model.module.eval()(train.lengths)
    posterior = hmm.block_posterior(train.values)
block_states = posterior.states.clamp(min=0)  # (N, T, w), states of the block of each word
state_probs = posterior.probs


def uses(values, mask):
    """Expected counts of states with the words ``values`` ``(N, T)``: (K, V)."""
    table = torch.zeros(num_states, len(vocabulary))
    word = values.unsqueeze(-1).expand_as(block_states)
    return table.index_put_((block_states[mask], word[mask]), state_probs[mask], accumulate=True)


def top_words(row, number=5):
    best = row.topk(number).indices[row.topk(number).values > 0.5]
    return " ".join(vocabulary[word] for word in best.tolist())


emitted = uses(train.values, train.exists)
inside = train.exists.clone()
inside[:, 0] = False
before = uses(train.values.roll(1, 1), inside)
inside = torch.arange(train.num_steps) < train.lengths.unsqueeze(-1) - 1
after = uses(train.values.roll(-1, 1), inside)
used = emitted.sum(1)
print(f"{int((used > 1).sum())} of {num_states} states are used more than once")
for state in used.argsort(descending=True)[:16].tolist():
    print(f"{used[state]:6.0f} times: {top_words(emitted[state], 4)}")
    print(f"{'after':>20} {top_words(before[state])}")
    print(f"{'before':>20} {top_words(after[state])}")

# %% [markdown]
# ## Scoring and generating sentences
#
# The log-probability of a sentence is exact. Sampling is ancestral: a state, a word, a transition,
# until `<eos>`. Only the rows of the visited states are computed.

# %%
plain = "the value of the expression is returned by the function"
for line in (plain, " ".join(sorted(plain.split()))):
    print(f"{model.score([line]).item():7.1f} nats: {line}")
print()
for line in model.generate(8, torch.Generator().manual_seed(0), max_words=40):
    print(line)

# %% [markdown]
# ## Saving and loading
#
# `save` writes tensors and plain data. Loading them cannot execute code.

# %%
with tempfile.TemporaryDirectory() as directory:
    model.save(f"{directory}/help")
    print(sorted(os.listdir(f"{directory}/help")))
    loaded = LanguageModel.load(f"{directory}/help")
print(loaded.perplexity(test))

# %% [markdown]
# ## The same on your own text
#
# Files with one sentence per line, for instance the Penn Treebank, and more states:
#
# ```sh
# python -m pyrohmm.language train ptb.train.txt --valid ptb.valid.txt --score ptb.test.txt \
#     --save ptb_model --checkpoint ptb.checkpoint --states 4096 --clusters 128
# python -m pyrohmm.language generate ptb_model 10
# ```
#
# The command reports the held-out perplexity after every epoch, resumes from its checkpoint after
# an interruption, and trains data-parallel with `torchrun --nproc-per-node 2 -m` in place of
# `python -m`. On the Penn Treebank, a million words, a model of 8,192 states reaches a test
# perplexity of 129 and one of 32,768 states 115; a Kneser-Ney 5-gram has 141
# (`figures/language_models.json`, `figures/language_model_baselines.json`).
