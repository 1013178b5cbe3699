"""What the released code of the neural HMM has besides, against slow sums."""

import importlib
import math
from fractions import Fraction
from pathlib import Path

import pyro
import pytest
import torch
from torch import nn

from pyrohmm import (
    HMM,
    MarginalModel,
    NeuralHMM,
    Sequences,
    blocks,
    clusters,
    fit_map,
    recursions,
)
from pyrohmm.distributions.block_hmm import BlockSymbols

FIGURES = Path(__file__).resolve().parents[2] / "figures"
RAGGED = blocks.from_clusters(torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 1, 2]))
OVERLAPPING = blocks.uniform(6, 6, 2, torch.Generator().manual_seed(1))
DATA = Sequences(torch.tensor([[0, 3, 5, 1], [4, 4, 0, 0], [2, 5, 5, 0]]), torch.tensor([4, 1, 3]))


@pytest.fixture
def neural(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.neural_ablations")


# Training noise -----------------------------------------------------------------------------------


def reaches(kept, given):
    """Whether something of every block is kept, in ``(*, K)``."""
    rows = torch.arange(kept.size(-1)).unsqueeze(0) if given is None else given.states
    return (kept[..., rows.clamp(min=0)] & (rows >= 0)).any(-1).all()


@pytest.mark.parametrize("kind", ["NoisyNeuralHMM", "NoisyScalarHMM"])
@pytest.mark.parametrize("given", [None, RAGGED, OVERLAPPING], ids=str)
@pytest.mark.parametrize(
    "noise",
    [{"start": 0.6}, {"transition": 0.5, "column": 0.5}],
    ids=str,
)
def test_noise_leaves_out_transitions_and_first_states_and_normalises_the_rest(
    neural, kind, given, noise
):
    """Against the softmax of the logits that are kept; each block can still be entered."""
    pyro.set_rng_seed(0)
    noisy = neural.TrainingNoise(**noise)
    module = getattr(neural, kind)(6, 6, blocks=given, noise=noisy).double()
    whole, dropped = module.eval()(DATA.lengths), 0
    module.train()
    for _ in range(10):
        part = module(DATA.lengths)
        for name, before in (("log_initial", whole.log_initial),
                             ("log_transition", whole.log_transition)):  # fmt: skip
            found = getattr(part, name)
            kept = found > -math.inf
            wanted = torch.where(kept, before, -math.inf).softmax(-1)
            torch.testing.assert_close(found.exp(), wanted)
            assert reaches(kept, given)
            dropped += int((~kept).sum())
        if "column" in noise and "transition" not in noise:
            assert bool((part.log_transition.isinf() == part.log_transition[0].isinf()).all())
        evidence = part.log_prob(DATA.values)
        dense = HMM(part.log_initial, part.log_transition, part.emission, DATA.lengths)
        torch.testing.assert_close(evidence, dense.log_prob(DATA.values))
        slopes = torch.autograd.grad(evidence.sum(), list(module.parameters()), allow_unused=True)
        assert all(bool(each.isfinite().all()) for each in slopes if each is not None)
    assert dropped > 0


@pytest.mark.parametrize("given", [None, RAGGED, OVERLAPPING], ids=str)
def test_noise_of_words_is_the_mean_over_all_choices_of_words(neural, given):
    """Each of three words with its share uniform over those that the state may emit."""
    pyro.set_rng_seed(0)
    noise = neural.TrainingNoise(word=0.3)
    module = neural.NoisyNeuralHMM(6, 6, 8, blocks=given, noise=noise).double()
    values, lengths = torch.tensor([[0, 3, 5]]), torch.tensor([3])
    whole = module.eval()(lengths)
    allowed = torch.ones(6, 6) if given is None else given.allowed
    uniform = (allowed.double() / allowed.sum(-1, keepdim=True)).log()[:, values[0]].mT
    plain = whole.emission.logits.log_softmax(-1)[:, values[0]].mT
    total = []
    for choice in torch.cartesian_prod(*[torch.tensor([False, True])] * 3):
        seen = torch.where(choice.unsqueeze(-1), uniform, plain)
        chance = (0.7 + choice.double() * -0.4).log().sum()
        chain = whole.log_initial, whole.log_transition.unsqueeze(0), seen, torch.tensor(3)
        total.append(chance + recursions.log_evidence(*chain))
    found = module.train()(lengths).log_prob(values)
    torch.testing.assert_close(found, torch.stack(total).logsumexp(0).reshape(1))


# Emissions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("learnt", [False, True])
def test_projected_vectors_are_a_table_times_a_map(neural, learnt):
    """Logits of emissions are of its rank, less the bias."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(6, 2)) if learnt else torch.randn(6, 2)
    before = table.detach().clone()
    module = NeuralHMM(6, 6, 8, words=neural.ProjectedEmbedding(table, 8))
    torch.testing.assert_close(module.words(), before @ module.words.map)
    logits = module(torch.tensor([1])).emission.logits.detach()
    assert torch.linalg.matrix_rank((logits - logits[:, :1]).diff(dim=0), atol=1e-5) == 2
    fit = fit_map(MarginalModel(module), DATA, num_iterations=20, learning_rate=0.05)
    assert fit.losses[-1] < fit.losses[0]
    assert torch.equal(module.words.table.detach(), before) is not learnt


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("two_level", [False, True])
def test_products_of_experts_are_normalised_products(neural, two_level, dropout):
    """Of p(x | z) and exp(c . E_x), over the words of the block, at each step anew."""
    pyro.set_rng_seed(0)
    context = neural.PreviousSymbols(6, 8)
    options = {"blocks": RAGGED, "two_level": two_level, "dropout": dropout}
    module = neural.ExpertHMM(6, 6, 8, **options, context=context).double()
    values = torch.cartesian_prod(*[torch.arange(6)] * 3)
    hmm = module(torch.full((len(values),), 3))
    plain = BlockSymbols(hmm.log_emission, hmm.blocks).distribution.logits.log_softmax(-1)
    scores = context(values) @ module.words().mT  # (N, T, V)
    product = (plain + scores.unsqueeze(-2)).log_softmax(-1)  # (N, T, K, V), -inf beyond a block
    seen = product.gather(-1, values[..., None, None].expand(*values.shape, hmm.num_states, 1))
    chain = hmm.log_initial, hmm.log_transition.unsqueeze(0), seen.squeeze(-1)
    wanted = recursions.log_evidence(*chain, torch.full((len(values),), 3))
    found = hmm.log_prob(values)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.logsumexp(0), torch.tensor(0.0).double())
    weight, parameters = torch.randn(len(values)).double(), list(module.parameters())
    slopes = [torch.autograd.grad((each * weight).sum(), parameters, retain_graph=True)
              for each in (found, wanted)]  # fmt: skip
    for one, other in zip(*slopes):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    posterior = recursions.posterior(*chain, torch.full((len(values),), 3))
    torch.testing.assert_close(hmm.posterior(values).state_probs, posterior.state_probs)


def test_a_context_sees_only_the_symbols_before(neural):
    torch.manual_seed(0)
    context, symbols = neural.PreviousSymbols(6, 8, lags=2), torch.randint(6, (1, 5))
    before = context(symbols)
    for t in range(5):
        changed = symbols.clone()
        changed[0, t] = (changed[0, t] + 1) % 6
        differs = (context(changed) != before).any(-1)[0]
        assert differs.tolist() == [t < s <= t + 2 for s in range(5)]


# States by how often the words of a cluster occur -------------------------------------------------


def slow_shares(num_states, mass):
    """Largest remainders, with at least one for each, in whole numbers."""
    shares = {}
    rest = dict(enumerate(mass))
    while True:
        left = num_states - len(shares)
        below = [c for c in rest if Fraction(rest[c]) * left < sum(rest.values())]
        if not below:
            break
        for c in below:
            shares[c] = 1
        rest = {c: m for c, m in rest.items() if c not in below}
    quotas = {c: Fraction(m) * left / sum(rest.values()) for c, m in rest.items()}
    shares |= {c: math.floor(quota) for c, quota in quotas.items()}
    most = sorted(quotas, key=lambda c: (math.floor(quotas[c]) - quotas[c], c))
    for c in most[: num_states - sum(shares.values())]:
        shares[c] += 1
    return [shares[c] for c in range(len(mass))]


def test_states_in_proportion_are_those_of_the_largest_remainders(neural):
    """Also in proportion to roots, and in equal shares."""
    torch.manual_seed(0)
    for more in range(60):
        roots = torch.randint(12, (1 + more % 8,))
        roots[0] += 1
        words, num_states = torch.arange(len(roots)), len(roots) + more
        found = neural.allocate(num_states, words, roots)
        assert found.dtype == torch.long
        assert found.tolist() == slow_shares(num_states, roots.tolist())
        assert torch.equal(neural.allocate(num_states, words, roots**2, 0.5), found)
        equal = neural.allocate(num_states, words, roots, 0.0)
        assert torch.equal(equal, clusters.allocate(num_states, words))
