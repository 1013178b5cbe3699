# %% [markdown]
# # 8. A language model with thousands of states, on your laptop
#
# A hidden Markov model with $K$ states has a table of $K^2$ moves, and each word costs $K^2$
# multiplications. Chiu and Rush (2020, [Scaling Hidden Markov Language
# Models](https://aclanthology.org/2020.emnlp-main.103)) go to tens of thousands of states, and sum
# over all of them exactly, by three ideas:
#
# - **Blocks.** Every word belongs to a cluster, and every cluster has a block of states, which
#   alone emit its words. A word then says in which block the state is, and a step costs the square
#   of a block's size, not of $K$.
# - **Networks.** Probabilities are softmaxes of inner products of embeddings that have gone through
#   small networks: parameters grow with $K$, not with $K^2$.
# - **Dropout.** At each training step half of the states of every block are left out, at random.
#   States cannot rely on single others, and a step costs a quarter.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $K$ | `num_states` | 2,048 states |
# | $C$ | `num_clusters` | 64 clusters of words, `<eos>` has one of its own |
# | $V$ | `len(vocabulary)` | 2,000 words |
# | $D$ | `hidden_dim` | embeddings of 64 numbers |

# %%
import math
import os
import tempfile
import time

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import LanguageModel, TabularHMM, categorical, datasets, fit_em, metrics

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

corpus = datasets.english_words(2000)
vocabulary = corpus.vocabulary
once = {tuple(row): number for number, row in enumerate(corpus.data.values.tolist())}
sentences = corpus.data[torch.tensor(sorted(once.values()))]
place = torch.arange(len(sentences)) % 10
train, held_out, test = sentences[place < 8], sentences[place == 8], sentences[place == 9]
if SMOKE:
    train, held_out, test = train[:200], held_out[:40], test[:40]
for part in (train, held_out, test):
    print(f"{len(part):5,} sentences, {part.num_observed:6,} words with <eos>")

# %% [markdown]
# The text is what Python's `help()` knows: a small one, and rather dry. It says some sentences in
# several places; each is kept once, so that none of the test is in the training set.
#
# ## What there is to beat
#
# The perplexity is `exp` of the mean surprise per word, `<eos>` included: among how many equally
# probable words one would have to guess. Three yardsticks: how often each word occurs; pairs of
# words, whose counts are discounted so that unseen pairs keep something; and a small HMM with
# tables.


# %%
def count(data):
    """How often each word follows each, or (last row) begins a sentence: (V + 1, V)."""
    num_words = len(vocabulary)
    before = torch.cat([torch.full((len(data), 1), num_words), data.values[:, :-1]], 1)
    table = torch.zeros(num_words + 1, num_words)
    pairs = before[data.exists], data.values[data.exists]
    return table.index_put_(pairs, torch.tensor(1.0), accumulate=True)


def perplexity(probs, data):
    counts = count(data)
    return math.exp(-(counts * probs.log()).sum() / counts.sum())


seen = count(train)
single = (seen.sum(0) + 0.1) / (seen.sum() + 0.1 * len(vocabulary))
total = seen.sum(1, keepdim=True)


def pairs(discount):
    left = torch.where(total > 0, discount * (seen > 0).sum(1, keepdim=True) / total, 1.0)
    return (seen - discount).clamp(min=0) / total.clamp(min=1) + left * single


discount = min((0.5, 0.6, 0.7, 0.8, 0.9), key=lambda each: perplexity(pairs(each), held_out))
small = TabularHMM(32, categorical(len(vocabulary), 1.02), 1.02, 1.02)
small_fit = fit_em(small, train, num_steps=2 if SMOKE else 20, tolerance=None)
results = {
    "single words": perplexity(single, test),
    "pairs of words": perplexity(pairs(discount), test),
    "HMM with tables, 32 states": metrics.perplexity(small_fit, test).value,
}
for name, value in results.items():
    print(f"{value:6.1f}  {name}")

# %% [markdown]
# ## Clusters
#
# `LanguageModel` puts everything together: it finds Brown clusters, which are such that the cluster
# of a word says much about the cluster of the next, takes `<eos>` out of them, and gives each
# cluster a block of states. `two_level` moves (its default) draw the next block first and then a
# state of it, so that no sum over all states is ever needed.

# %%
num_states, num_clusters = (64, 16) if SMOKE else (2048, 64)
model = LanguageModel.from_data(vocabulary, train, num_states, num_clusters, hidden_dim=64)
print(model, f"{sum(each.numel() for each in model.module.parameters()):,} parameters")
often = seen.sum(0)
owner = model.blocks.symbol_block
for block in torch.bincount(owner, often).argsort(descending=True)[:12].tolist():
    words = (often * (owner == block)).argsort(descending=True)[: int((owner == block).sum())]
    print(f"{block:3d}:", " ".join(vocabulary[word] for word in words[:12].tolist()))

# %% [markdown]
# Words that are used alike are together. What a block adds is that a word may be used in several
# ways: each of its states has moves, and words, of its own.
#
# ## Training
#
# `fit` is `fit_map` with what such models need: minibatches of so many words, AdamW, a learning
# rate that rises shortly and then falls, and the best parameters on held-out sentences.

# %%
start_time = time.process_time()
fit = model.fit(
    train,
    held_out,
    num_epochs=1 if SMOKE else 10,
    batch_tokens=1024,
    learning_rate=0.01,
)
print(f"{time.process_time() - start_time:.0f} s of a processor, {len(fit.losses)} steps")
found = model.perplexity(test)
results[f"neural HMM, {num_states:,} states"] = found.value
for name, value in results.items():
    print(f"{value:6.1f}  {name}")

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
history = [(each.step, math.exp(each.nats)) for each in fit.validation]
axis.plot(*zip(*history), "o-", label="neural HMM, held out")
for colour, (name, value) in zip(("0.7", "0.4", "0.0"), results.items()):
    axis.axhline(value, color=colour, linewidth=0.9, label=f"{name}, test")
axis.set_xlabel("steps")
axis.set_ylabel("perplexity")
axis.set_yscale("log")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# Many states, tied to words and dropped while they learn, predict new sentences better than a few
# that are free. Counts of pairs predict them better still: thirty thousand words of one dry text
# are few, and the same words stand beside each other again and again.
#
# ## What states have learnt
#
# The posterior of a state, given a whole sentence, lies within the block of each word. Summed over
# the training set, it says how often each state is used, for which words, and after and before
# which words. The most used states that share their words with others:

# %%
with torch.no_grad():
    hmm = model.module.eval()(train.lengths)
    posterior = hmm.block_posterior(train.values)
place = posterior.states.clamp(min=0)  # (N, T, w), states of the block of each word
chance = posterior.probs


def uses(values, mask):
    """How often a state meets each of the words ``values`` ``(N, T)``: (K, V)."""
    table = torch.zeros(num_states, len(vocabulary))
    word = values.unsqueeze(-1).expand_as(place)
    return table.index_put_((place[mask], word[mask]), chance[mask], accumulate=True)


def shown(row, number=5):
    best = row.topk(number).indices[row.topk(number).values > 0.5]
    return " ".join(vocabulary[word] for word in best.tolist())


own = uses(train.values, train.exists)
inside = train.exists.clone()
inside[:, 0] = False
before = uses(train.values.roll(1, 1), inside)
inside = torch.arange(train.num_steps) < train.lengths.unsqueeze(-1) - 1
after = uses(train.values.roll(-1, 1), inside)
used = own.sum(1)
print(f"{int((used > 1).sum())} of {num_states} states are used more than once")
for state in used.argsort(descending=True)[:16].tolist():
    print(f"{used[state]:6.0f} times: {shown(own[state], 4)}")
    print(f"{'after':>20} {shown(before[state])}")
    print(f"{'before':>20} {shown(after[state])}")

# %% [markdown]
# ## Sentences
#
# The log-probability of a sentence is exact, and so are draws: a state, a word of it, a move, until
# `<eos>`. Only the rows of states that are visited are ever computed.

# %%
plain = "the value of the expression is returned by the function"
for line in (plain, " ".join(sorted(plain.split()))):
    print(f"{model.score([line]).item():7.1f} nats: {line}")
print()
for line in model.generate(8, torch.Generator().manual_seed(0), max_words=40):
    print(line)

# %% [markdown]
# ## Keeping it
#
# `save` writes tensors and plain data, which cannot run anything when they are read.

# %%
with tempfile.TemporaryDirectory() as directory:
    model.save(f"{directory}/help")
    print(sorted(os.listdir(f"{directory}/help")))
    again = LanguageModel.load(f"{directory}/help")
print(again.perplexity(test))

# %% [markdown]
# ## The same on your own text
#
# Files with one sentence a line, for instance the Penn Treebank, with more states:
#
# ```sh
# python -m pyrohmm.language ptb.train.txt --valid ptb.valid.txt --score ptb.test.txt \
#     --save ptb_model --checkpoint ptb.checkpoint --states 4096 --clusters 128
# python -m pyrohmm.language --load ptb_model --generate 10
# ```
#
# It shows the perplexity of the held-out text after every epoch, goes on from its checkpoint if it
# was stopped, and runs in several processes after `torchrun --nproc-per-node 2 -m` in place of
# `python -m`. On that million words a model of 8,192 states reaches a test perplexity of 129, and
# one of 32,768 states 115, where a Kneser-Ney 5-gram has 141 (`figures/language_models.json`,
# `figures/language_model_baselines.json`).
