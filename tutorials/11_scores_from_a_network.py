# %% [markdown]
# # 11. Scores from a network
#
# A recurrent network reads a sentence and gives each tag of each word a score. A softmax at each
# step makes independent choices of them; a conditional random field (CRF) chooses the tags of a
# whole sentence together, with a score for each pair of neighbours:
#
# $$p(y_{1:T} \mid x) = \frac{1}{Z(x)} \exp \Big( \sum_{t=1}^T e_t(y_t; x) + \sum_{t=2}^T
# a(y_{t-1}, y_t) \Big)$$
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $x_t$, $y_t$ | `values`, `labels` | a word, its tag |
# | $e_t$ | `emission_scores` | the output of an LSTM |
# | $a$ | `transition_scores` | a parameter |
# | $\log Z$ | `crf.log_partition()` | summed over all $K^T$ taggings, exactly |
#
# The loop is plain torch, with a `DataLoader`. When is the CRF better than the softmax, and when is
# it not?

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt
from torch.utils.data import DataLoader

from pyrohmm import HMM, LinearChainCRF, Sequences, plots

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## Names in text
#
# The tags mark names by their first word (B), the words within (I) and all others (O), so that I
# never follows O. Words are symbols of a made language: each tag has words of its own, but many
# words stand within names and outside of them alike.

# %%
TAGS = ["O", "B", "I"]
num_words = 60
transition = torch.tensor([[0.75, 0.25, 0.00], [0.15, 0.05, 0.80], [0.30, 0.05, 0.65]])
words = torch.zeros(3, num_words)
words[:, :20] = 0.6 * torch.rand(20)  # of any tag
for tag in range(3):
    words[tag, 20 + 10 * tag : 30 + 10 * tag] = torch.rand(10)
words[1:, 50:] = torch.rand(10)  # of B and I
words /= words.sum(-1, keepdim=True)


def speak(count):
    """Sentences of 5 to 25 words, with their tags as labels."""
    lengths = torch.randint(5, 26, (count,))
    emission = pyro.distributions.Categorical(words)
    language = HMM(torch.tensor([0.7, 0.3, 0.0]).log(), transition.log(), emission, lengths)
    values, tags = language.sample_with_states()
    return Sequences(values, lengths, labels=tags), language


train, _ = speak(40 if SMOKE else 200)
test, truth = speak(100 if SMOKE else 500)
first = test[:1]
print(" ".join(f"{word}/{TAGS[tag]}" for word, tag in zip(first.values[0], first.labels[0])))

# %% [markdown]
# ## Two taggers, one network
#
# `Sequences` are a torch `Dataset`, and their `collate` pads a minibatch. The two taggers differ in
# a line: `LinearChainCRF` with transition scores of zero *is* the softmax at each step.


# %%
class Tagger(torch.nn.Module):
    """A bidirectional LSTM whose outputs are scores of tags."""

    def __init__(self, with_transitions, size=24):
        super().__init__()
        self.embedding = torch.nn.Embedding(num_words, size)
        self.lstm = torch.nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.scores = torch.nn.Linear(2 * size, len(TAGS))
        self.transition = torch.nn.Parameter(
            torch.zeros(len(TAGS), len(TAGS)), requires_grad=with_transitions
        )

    def forward(self, data):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.embedding(data.values), data.lengths, batch_first=True, enforce_sorted=False
        )
        outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=data.num_steps
        )
        return LinearChainCRF(self.scores(outputs), self.transition, lengths=data.lengths)


def fit(with_transitions, data, num_epochs=6):
    pyro.set_rng_seed(1)
    tagger = Tagger(with_transitions)
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=data.collate)
    optimizer = torch.optim.Adam(tagger.parameters(), 0.01)
    losses = []
    for _ in range(2 if SMOKE else num_epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = -tagger(batch).log_prob(batch.labels).sum()
            (loss / len(batch)).backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / data.num_observed)
    return tagger.eval(), losses


taggers, losses = {}, {}
for name, with_transitions in (("softmax", False), ("CRF", True)):
    taggers[name], losses[name] = fit(with_transitions, train)
    print(f"{name}: {losses[name][-1]:.3f} nats per word in training")

# %% [markdown]
# ## Which is better?
#
# Accuracy counts words; for names it is better to count whole names that are found, neither longer
# nor shorter (F1), and taggings that are no taggings, in which I follows O. The upper bound is the
# language itself: an HMM whose states are the tags.


# %%
def names_in(tags, length):
    """Where names begin and end, in one sentence."""
    tags = tags[:length].tolist()
    starts = [t for t, tag in enumerate(tags) if tag == 1]
    return {(t, next((s for s in range(t + 1, length) if tags[s] != 2), length)) for t in starts}


def report(name, tags):
    right = (tags == test.labels)[test.exists].double().mean().item()
    found = [names_in(row, n) for row, n in zip(tags, test.lengths.tolist())]
    wanted = [names_in(row, n) for row, n in zip(test.labels, test.lengths.tolist())]
    both = sum(len(a & b) for a, b in zip(found, wanted))
    f1 = 2 * both / (sum(map(len, found)) + sum(map(len, wanted)))
    broken = ((tags[:, :-1] == 0) & (tags[:, 1:] == 2) & test.exists[:, 1:]).any(-1)
    results[name] = right, f1
    print(f"{name:22s} accuracy {right:.4f}, names (F1) {f1:.4f}, "
          f"sentences with an I after O: {broken.double().mean():.1%}")  # fmt: skip


results = {}
with torch.no_grad():
    for name, tagger in taggers.items():
        crf = tagger(test)
        report(name, crf.viterbi())
        print(f"{'':22s} {-crf.log_prob(test.labels).sum() / test.num_observed:.3f} nats per word")
    report("CRF, by marginals", crf.marginals().argmax(-1))
    report("true language", truth.viterbi(test.values))

# %% [markdown]
# Per word the two are close, within a point of accuracy, and with another seed they may be
# closer: a bidirectional LSTM sees the neighbours too, and accuracy asks for no more than the
# best tag of each word. What the softmax lacks is agreement among the tags: it begins names with
# I. The CRF decides on all of them together, which shows in whole names and in the
# log-probability of whole taggings. Both know the training sentences better than new ones, and
# neither comes up to the language itself.
#
# If a model is correct, the tags that are most probable one by one (by marginals) have the most
# words right, and may break the rule; here, where it is not, the best path is no worse.
#
# ## What the CRF has learnt
#
# Only differences of scores matter, so each row is shown as probabilities of its own.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for name, curve in losses.items():
    axes[0].plot(range(1, len(curve) + 1), curve, "o-", ms=3, label=name)
axes[0].set(xlabel="epoch", ylabel="training loss, nats per word")
axes[0].legend()
scores = taggers["CRF"].transition.detach()
even = torch.zeros(3).log_softmax(-1)
shown = HMM(even, scores.log_softmax(-1), pyro.distributions.Categorical(words), torch.tensor(1))
plots.transition(shown, TAGS, axes=axes[1])
axes[1].set_title("transition scores, as shares")
plt.show()

# %% [markdown]
# That I never follows O is known beforehand. A score of minus infinity says so, and no tagging
# breaks the rule any more:

# %%
with torch.no_grad():
    crf = taggers["CRF"](test)
    rule = crf.transition_scores.clone()
    rule[0, 2] = -torch.inf
    start = torch.tensor([0.0, 0.0, -torch.inf])
    sure = LinearChainCRF(crf.emission_scores, rule, start, test.lengths)
    report("CRF with the rule", sure.viterbi())

# %% [markdown]
# ## Labels that are known in part
#
# Tags of -1 are summed out, so half-annotated sentences train as they are, by the same loss. Here
# every second tag of the training set is hidden.

# %%
hidden = torch.rand(train.labels.shape) < 0.5
half = Sequences(train.values, train.lengths, labels=train.labels.masked_fill(hidden, -1))
tagger, _ = fit(True, half)
with torch.no_grad():
    report("CRF, half of the tags", tagger(test).viterbi())
