# %% [markdown]
# # 18. A transformer that keeps to a constraint
#
# A neural language model writes well and obeys badly: asked for a sentence with certain words in
# it, it may forget them. A hidden Markov model distilled from it can say, before every token, how
# probable it is that the constraint will still be met. Multiplied into the transformer's
# probabilities that steers it without any training (Zhang et al. 2024, [Adaptable Logical Control
# for Large Language Models](https://arxiv.org/abs/2406.13892)):
#
# $$q(v \mid x_{1:t}) \propto p_\mathrm{LM}(v \mid x_{1:t}) \,
# p_\mathrm{HMM}(\text{constraint} \mid x_{1:t}, v).$$
#
# | on paper | in code |
# | --- | --- |
# | $p_\mathrm{LM}$ | a small transformer, trained below |
# | $p_\mathrm{HMM}$ | `fit_em(TabularHMM(K, categorical(V)), samples)` |
# | constraint | `automata.must_contain(...)`, `automata.template(...)`, `&`, `\|`, `~` |
# | $q$ | `language.ConstraintProcessor`, a `LogitsProcessor` of `transformers` |
#
# With a model of `transformers`, only the last part is needed: see the
# [guide](https://pyrohmm.readthedocs.io/en/latest/guide/control.html).

# %%
import math
import os
import time

import pyro
import torch
from matplotlib import pyplot as plt
from torch import nn

from pyrohmm import Sequences, TabularHMM, automata, categorical, datasets, fit_em
from pyrohmm.language import ConstraintProcessor, over_tokens

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
LONGEST = 16  # tokens of a sentence, without its end

corpus = datasets.english_words(1000)
vocabulary = corpus.vocabulary
end, unknown = vocabulary.index("<eos>"), vocabulary.index("<unk>")
short = corpus.data.lengths <= LONGEST + 1
sentences = corpus.data.values[short, : LONGEST + 1]
exists = corpus.data.exists[short, : LONGEST + 1]
print(f"{len(sentences)} sentences of Python's own help pages, {len(vocabulary)} words")

# %% [markdown]
# ## The language model
#
# Two layers of attention, enough to learn a little of how these pages speak. The mark at the end of
# a sentence also begins it.

# %%


class Transformer(nn.Module):
    def __init__(self, num_tokens, dim=96):
        super().__init__()
        self.words = nn.Embedding(num_tokens, dim)
        self.places = nn.Embedding(LONGEST + 2, dim)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        """Log-probabilities of what follows each token, (N, T, V)."""
        size = tokens.size(1)
        later = torch.full((size, size), -math.inf).triu(1)
        inputs = self.words(tokens) + self.places(torch.arange(size))
        logits = self.layers(inputs, mask=later) @ self.words.weight.mT
        logits[..., unknown] = -math.inf  # it shall write words
        return logits.log_softmax(-1)


def with_start(tokens):
    """Sentences with the mark before them."""
    return torch.cat([torch.full((len(tokens), 1), end), tokens], 1)


transformer = Transformer(len(vocabulary))
optimizer = torch.optim.AdamW(transformer.parameters(), 2e-3, weight_decay=0.1)
exists &= sentences != unknown
start_time = time.process_time()
for _ in range(1 if SMOKE else 15):
    for rows in torch.randperm(len(sentences)).split(64 if not SMOKE else 512):
        logs = transformer(with_start(sentences[rows])[:, :-1])
        here = exists[rows]
        targets = sentences[rows].masked_fill(~here, end).unsqueeze(-1)
        loss = -logs.gather(-1, targets).squeeze(-1)[here].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
transformer.eval()
print(f"{loss.exp():.1f} of perplexity; {time.process_time() - start_time:.0f} s of processor time")

# %% [markdown]
# Like the models of `transformers`, it is asked for one token after the other, and each
# distribution passes through a processor, if there is one.

# %%


@torch.no_grad()
def generate(count, processor=None, prompt=""):
    """Tokens ``(count, T)`` after a prompt; the end is repeated where a sentence has ended."""
    first = with_start(vocabulary.encode(prompt.split()).reshape(1, -1)).expand(count, -1)
    tokens, ended = first, torch.zeros(count, dtype=torch.bool)
    for _ in range(LONGEST + 2 - first.size(1)):
        logs = transformer(tokens)[:, -1]
        logs = logs if processor is None else processor(tokens[:, 1:], logs)  # without the mark
        new = torch.multinomial(logs.softmax(-1), 1).squeeze(1).masked_fill(ended, end)
        ended |= new == end
        tokens = torch.cat([tokens, new.unsqueeze(1)], 1)
    return tokens[:, 1:]


def lines(tokens):
    return [" ".join(vocabulary[w] for w in row if w != end) for row in tokens.tolist()]


for line in lines(generate(4)):
    print(line)

# %% [markdown]
# ## Distillation
#
# The HMM learns from texts that the transformer writes, as many as one likes. How well it predicts
# them is the Kullback-Leibler divergence from the transformer, per token.

# %%
with torch.no_grad():
    samples = torch.cat([generate(500) for _ in range(1 if SMOKE else 12)])
is_end = (samples == end).cumsum(1).cumsum(1)  # 1 at the first end
lengths = (is_end <= 1).sum(1)
texts = Sequences(samples, lengths)
held_out, training = texts[:500], texts[500:] if not SMOKE else texts
module = TabularHMM(8 if SMOKE else 128, categorical(len(vocabulary), concentration=1.01))
start_time = time.process_time()
fit = fit_em(module, training, num_iterations=2 if SMOKE else 30)
print(f"{time.process_time() - start_time:.0f} s of processor time")

hmm = fit.hmm(held_out)
with torch.no_grad():
    logs = transformer(with_start(held_out.values)[:, :-1])
    logs = logs.gather(-1, held_out.values.unsqueeze(-1)).squeeze(-1)
    own = logs.masked_fill(~held_out.exists, 0.0).sum(-1)
    distilled = hmm.log_prob(held_out.values)
tokens = int(held_out.lengths.sum())
for name, total in (("the transformer", own), ("the HMM", distilled)):
    print(f"perplexity of the samples by {name}: {(-total.sum() / tokens).exp():.1f}")
print(f"divergence: {(own - distilled).sum() / tokens:.2f} nats a token")

# %% [markdown]
# ## Words that must occur
#
# A constraint is made for the words of the text, and a processor for each constraint. It computes
# its backward pass once, and then costs one step of the HMM a token.

# %%
wanted = automata.must_contain("object") & automata.must_contain("class")
wanted = wanted & automata.must_not_contain("the")
processor = ConstraintProcessor(hmm, wanted, vocabulary, LONGEST, end=end)
for line in lines(generate(5, processor)):
    print(line)

# %% [markdown]
# Every one of them satisfies the constraint. Two other ways to the same end: to write until a
# sentence happens to satisfy it, and a prompt, by which each sentence begins with the two words.
# How natural the results are is their perplexity by the transformer itself.

# %%


@torch.no_grad()
def perplexity(tokens):
    """By the transformer, of each of its tokens and the end."""
    logs = transformer(with_start(tokens)[:, :-1]).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    seen = (tokens == end).cumsum(1).cumsum(1) <= 1
    return (-logs[seen].mean()).exp()


over = over_tokens(wanted, vocabulary)


def share(tokens):
    """How many satisfy the constraint."""
    kept = [[w for w in row if w != end] for row in tokens.tolist()]
    return sum(map(over.accepts, kept)) / len(kept)


count = 50 if SMOKE else 500
free, prompted = generate(count), generate(count, prompt="class object")
steered = generate(count, processor)
ways = {"as it writes": free, "by a prompt": prompted, "steered": steered}
print(f"{'':15s} satisfied  perplexity")
for name, tokens in ways.items():
    print(f"{name:15s} {share(tokens):8.1%} {perplexity(tokens):11.1f}")
accepted = share(samples)
tries = f"{1 / accepted:.0f}" if accepted else f"more than {len(samples)}"
print(f"by rejection, one sentence in {tries}")

# %% [markdown]
# ## Between two sentences, and a length
#
# A gap of any length between given words, and a sentence of exactly eight words:

# %%
gap = automata.template("the", ..., "is", ..., "object") & automata.of_length(8)
for line in lines(generate(4, ConstraintProcessor(hmm, gap, vocabulary, LONGEST, end=end))):
    print(len(line.split()), line)

# %% [markdown]
# ## What the HMM expects
#
# The probability that the constraint will be met, after each word of a sentence: it rises with
# each word that is wanted, and falls as the sentence grows long without it.

# %%
line = max(lines(steered), key=lambda text: len(text.split()))
expected = processor.log_prob(vocabulary.encode(line.split())).exp()

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
axes.semilogy(expected, "o-", color="tab:blue")
axes.set(ylabel="p(constraint | words so far)", ylim=(None, 1.5))
axes.set_xticks(range(len(expected)), ["start", *line.split()], rotation=45, ha="right")
plt.show()

# %% [markdown]
# More states predict the transformer better. The time of a token grows with their square, or less
# where states are in blocks: the [guide](https://pyrohmm.readthedocs.io/en/latest/guide/control.html)
# has measurements with 4,096 states and 50,257 tokens.
