# %% [markdown]
# # 12. Steering sentences: words that must occur, gaps that are filled
#
# A language model writes what is probable; often one wants a sentence that is probable *and* has
# certain words in it, or none of some others, or a certain length. For a hidden Markov model the
# conditional distribution is exact: no search, no rejected samples. And because the model can say
# how probable it is that a constraint *will* hold, it can steer other language models, too (Zhang
# et al. 2024, [Adaptable Logical Control for Large Language
# Models](https://arxiv.org/abs/2406.13892)).
#
# A constraint is a finite automaton that reads the words: after each word it is in one of $Q$
# states, which say what is still to come. Given the state $z$ of the chain, the state $q$ of the
# automaton and the number of words so far, the probability that all ends well does not depend on
# anything else, so that one backward pass over pairs $(z, q)$ has all of them:
#
# $$h_t(z, q) = \sum_w B_{zw} \sum_{z'} A_{zz'} h_{t+1}(z', \delta(q, w)) + B_{z,\mathrm{eos}}\,
# [q \text{ accepts}].$$
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $\delta(q, w)$, accepting $q$ | `automata.must_contain(...)`, `&`, `\|`, `~` | a few states |
# | $h_t(z, q)$ | inside of `model.steer(constraint, max_words)` | at most 12 words |
# | $p(\text{constraint} \mid x_{1:t})$ | `steering.log_prob(prompt)` | |
# | $p(\text{constraint} \mid x_{1:t}, w)$ | `steering.lookahead(prompt)` | each next word $w$ |

# %%
import math
import os
import time

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import LanguageModel, automata, datasets

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

corpus = datasets.english_words(1500)
vocabulary = corpus.vocabulary
distinct = {tuple(row): number for number, row in enumerate(corpus.data.values.tolist())}
sentences = corpus.data[torch.tensor(sorted(distinct.values()))]
if SMOKE:
    sentences = sentences[:200]
num_states, num_clusters = (64, 16) if SMOKE else (1024, 64)
model = LanguageModel.from_data(vocabulary, sentences, num_states, num_clusters, hidden_dim=64)
start_time = time.process_time()
model.fit(sentences, num_epochs=1 if SMOKE else 8, batch_tokens=1024, learning_rate=0.01)
print(model, f"{time.process_time() - start_time:.0f} s of processor time")
print(f"perplexity of what it has read: {model.perplexity(sentences).value:.1f}")

# %% [markdown]
# The text is Python's own help pages, as in tutorial 8. Sentences that the model writes by itself:

# %%
LONGEST = 12
for line in model.generate(5, torch.Generator().manual_seed(0), LONGEST):
    print(line)

# %% [markdown]
# ## Words that must occur
#
# `must_contain` takes words and phrases; constraints are combined by `&`, `|` and `~`. What comes
# back from `steer` has the backward pass done: any number of samples, and answers to prompts, cost
# little more.

# %%
wanted = (
    automata.must_contain("function", "value")
    & automata.must_not_contain("<unk>")
    & automata.of_length(5, LONGEST)
)
print(wanted)
steering = model.steer(wanted, max_words=LONGEST)
print(f"probability {math.exp(steering.log_prob()):.1e}")
generator = torch.Generator().manual_seed(0)
for line in steering.sample(8, generator):
    print(line)

# %% [markdown]
# By rejection one would wait for about $1/p$ sentences for each of these. For a constraint that is
# not rare the two ways can be compared: the share of free sentences that satisfy it is the
# probability that `log_prob` computes.

# %%
common = automata.must_contain("is") & automata.of_length(1, LONGEST)
exact = math.exp(model.steer(common, LONGEST).log_prob())
count = 200 if SMOKE else 4000
free = model.generate(count, generator, LONGEST + 1)
share = sum(map(common.accepts, free)) / count
error = math.sqrt(exact * (1 - exact) / count)
print(f"computed {exact:.4f}, counted {share:.4f} of {count} sentences (± {error:.4f})")

# %% [markdown]
# ## How probable it is, word by word
#
# `log_prob(prompt)` is the probability that the constraint will hold, given the first words. Along
# a free sentence it falls as words are used up; along a steered one it ends at one. It is a
# martingale: under the model it neither rises nor falls on average.

# %%
figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
steered = steering.sample(3, generator)
for lines, style in ((steered, "o-"), (free[:3], "x:")):
    for line in lines:
        words = line.split()[:LONGEST]
        logs = [steering.log_prob(" ".join(words[:t])) for t in range(len(words) + 1)]
        ended = 0.0 if wanted.accepts(words) else -math.inf
        probs = [math.exp(log) for log in [*logs, ended]]
        axis.plot(probs, style, markersize=4, label=" ".join(words[:7]) + " ...")
axis.set_yscale("log")
axis.set_xlabel("words so far, the end counted as one")
axis.set_ylabel("probability that it will hold")
axis.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## Gaps
#
# `template` has fixed words with gaps: `None` is one word and `...` any number of them. `fill`
# samples a sentence of which some words are missing, given all others, those behind the gap too.
# For one missing word `next_word` has the exact probabilities.

# %%
for line in model.fill(["the", None, "of", "the", None, "is", None], 5, generator):
    print(line)
gap = model.steer(automata.template("the", None, "is", "called"), 4)
blind = model.steer(automata.template(...), LONGEST).next_word("the").exp()
seeing = gap.next_word("the").exp()
for name, probs in (("after 'the'", blind), ("between 'the' and 'is called'", seeing)):
    best = probs.topk(6)
    shown = ", ".join(f"{vocabulary[w]} {p:.2f}" for p, w in zip(best.values, best.indices))
    print(f"{name}: {shown}")

# %% [markdown]
# ## Another model, steered
#
# A bigram model knows nothing of what is to come. Multiplied word by word with the HMM's
# probability that the constraint will hold, `lookahead`, it writes sentences that satisfy it,
# always. Any model of the same words can stand here, such as a neural network: the HMM is then the
# part of it that can be asked about the future.

# %%
end = vocabulary.index("<eos>")
before = torch.cat([torch.full((len(sentences), 1), end), sentences.values[:, :-1]], 1)
pairs = before[sentences.exists], sentences.values[sentences.exists]
bigrams = torch.full((len(vocabulary),) * 2, 1e-4).index_put_(pairs, torch.tensor(1.0), True)
log_bigrams = (bigrams / bigrams.sum(1, keepdim=True)).log().double()


def write(steering):
    """A sentence of the bigram model, which looks ahead with the HMM."""
    words = []
    while True:
        last = vocabulary.index(words[-1]) if words else end
        logits = log_bigrams[last] + steering.lookahead(" ".join(words))
        word = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        if word == end:
            return " ".join(words)
        words.append(vocabulary[word])


for _ in range(4):
    line = write(steering)
    print(line, "|", wanted.accepts(line))

# %% [markdown]
# ## Your own automaton
#
# For each state: the next one by default, and after some words. This one accepts sentences with an
# even number of *the*, two at least.

# %%
even = automata.Automaton([0, 1, 2], [{"the": 1}, {"the": 2}, {"the": 1}], [2], "an even number")
for line in model.steer(even, LONGEST).sample(4, generator):
    print(line.split().count("the"), line)

# %% [markdown]
# The command does it, too:
#
# ```sh
# python -m pyrohmm.language generate DIR 5 --must function "the value" --longest 12
# ```
#
# With 8,192 states a sentence of twenty words takes about a tenth of a second of one
# processor, where sixteen share a backward pass (`figures/steering.json`).
