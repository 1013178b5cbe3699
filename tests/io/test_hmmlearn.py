"""Conversion: hmmlearn and pyrohmm agree on the same data, whichever way a model is converted."""

import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from pyrohmm import HMM, Sequences, from_hmmlearn, to_hmmlearn

library = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed")

SIZES = [(1, 1), (3, 2)]  # states, components of an observation


def rows(rng, *shape):
    return rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])


def chain(rng, model, zeros):
    """Give ``model`` a random chain; with ``zeros``, left to right only."""
    size = model.n_components
    model.startprob_, model.transmat_ = rows(rng, size), rows(rng, size, size)
    if zeros:
        model.startprob_ = np.eye(size)[0]
        model.transmat_ = np.triu(model.transmat_)
        model.transmat_ /= model.transmat_.sum(1, keepdims=True)
    return model


def covariance(rng, *batch, dim):
    root = rng.normal(size=(*batch, dim, dim))
    return root @ root.swapaxes(-1, -2) + 0.3 * np.eye(dim)


def symbols(rng, size, dim, zeros):
    model = chain(rng, library.CategoricalHMM(size), zeros)
    model.emissionprob_ = rows(rng, size, 4)
    if zeros:
        model.emissionprob_[0] = [0.5, 0.0, 0.25, 0.25]
    return model, lambda count: rng.integers(4, size=(count, 1))


def counts(rng, size, dim, zeros):
    model = chain(rng, library.PoissonHMM(size), zeros)
    model.lambdas_ = rng.uniform(0.5, 4.0, size=(size, dim))
    return model, lambda count: rng.poisson(2.0, size=(count, dim))


def gaussian(kind):
    def build(rng, size, dim, zeros):
        model = chain(rng, library.GaussianHMM(size, covariance_type=kind), zeros)
        model.means_ = rng.normal(size=(size, dim))
        model.covars_ = {
            "diag": lambda: rng.uniform(0.3, 2.0, size=(size, dim)),
            "spherical": lambda: rng.uniform(0.3, 2.0, size=size),
            "full": lambda: covariance(rng, size, dim=dim),
            "tied": lambda: covariance(rng, dim=dim),
        }[kind]()
        return model, lambda count: rng.normal(size=(count, dim))

    return build


def mixture(kind, parts=2):
    def build(rng, size, dim, zeros):
        model = chain(rng, library.GMMHMM(size, parts, covariance_type=kind), zeros)
        model.weights_ = rows(rng, size, parts)
        model.means_ = rng.normal(size=(size, parts, dim))
        model.covars_ = {
            "diag": lambda: rng.uniform(0.3, 2.0, size=(size, parts, dim)),
            "spherical": lambda: rng.uniform(0.3, 2.0, size=(size, parts)),
            "full": lambda: covariance(rng, size, parts, dim=dim),
            "tied": lambda: covariance(rng, size, dim=dim),
        }[kind]()
        return model, lambda count: rng.normal(size=(count, dim))

    return build


KINDS = {"symbols": symbols, "counts": counts, "mixture of one": mixture("diag", parts=1)}
for each in ("diag", "spherical", "full", "tied"):
    KINDS |= {f"gaussian {each}": gaussian(each), f"mixture {each}": mixture(each)}


def padded(model, joined, lengths):
    pieces = np.split(joined, np.cumsum(lengths)[:-1])
    if isinstance(model, library.CategoricalHMM):
        pieces = [piece[:, 0] for piece in pieces]
    return Sequences.from_list([torch.as_tensor(piece) for piece in pieces]).values


def check_same(model, hmm, joined, lengths):
    """Evidence, posterior and best path of ``hmm`` are those of ``model``.

    Of sequences that cannot occur there is only the evidence: hmmlearn makes up a posterior.
    """
    values = padded(model, joined, lengths)
    if not isinstance(model, library.CategoricalHMM):
        values = values.double()
    evidence = hmm.log_prob(values)
    assert evidence.dtype == torch.float64
    np.testing.assert_allclose(evidence.sum(), model.score(joined, lengths), rtol=1e-9)
    occur = evidence.isfinite()
    if not occur.all():
        with pytest.raises(ValueError, match="possible under the model"):
            hmm.posterior(values)
    if not occur.any():
        return
    some = hmm.with_lengths(torch.tensor(lengths)[occur])
    exists = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    possible = occur.unsqueeze(-1).expand_as(exists)[exists].numpy()
    seen = exists[occur][:, : some.num_steps]
    found = some.posterior(values[occur]).state_probs[seen].numpy()
    expected = model.predict_proba(joined, lengths)
    np.testing.assert_allclose(found, expected[possible], atol=1e-9)
    _, path = model.decode(joined, lengths)
    np.testing.assert_array_equal(some.viterbi(values[occur])[seen].numpy(), path[possible])


@pytest.mark.parametrize("lengths", [[1], [3, 1, 6]])
@pytest.mark.parametrize(("size", "dim"), SIZES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_libraries_agree_in_both_directions(kind, zeros, size, dim, lengths):
    rng = np.random.default_rng([size, dim, zeros, sum(lengths)])
    model, draw = KINDS[kind](rng, size, dim, zeros)
    joined = draw(sum(lengths))
    hmm = from_hmmlearn(model, lengths)
    check_same(model, hmm, joined, lengths)
    again = to_hmmlearn(hmm)
    assert type(again) is type(model)
    check_same(again, hmm, joined, lengths)
    check_same(again, from_hmmlearn(again, lengths), joined, lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_zeros_are_exact_on_both_sides(kind):
    model, _ = KINDS[kind](np.random.default_rng(0), 3, 2, True)
    hmm = from_hmmlearn(model, [2])
    again = to_hmmlearn(hmm)
    for name, logs in (("startprob_", hmm.log_initial), ("transmat_", hmm.log_transition)):
        zero = getattr(model, name) == 0
        assert zero.any()
        assert (np.isneginf(logs.numpy()) == zero).all()
        assert ((getattr(again, name) == 0) == zero).all()
    if kind == "symbols":
        assert again.emissionprob_[0, 1] == 0
        assert hmm.emission.logits[0, 1] == -torch.inf


@pytest.mark.parametrize("kind", KINDS)
def test_the_converted_model_can_be_fitted_further(kind):
    """From its parameters: the first iteration does not begin anew."""
    model, draw = KINDS[kind](np.random.default_rng(0), 2, 2, False)
    joined = draw(40)
    again = to_hmmlearn(from_hmmlearn(model, [40]))
    before = again.score(joined)
    again.n_iter = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.fit(joined)
    np.testing.assert_allclose(again.monitor_.history[0], before, rtol=1e-9)


@pytest.mark.parametrize(
    "emission",
    [
        dist.Normal(torch.randn(2), torch.rand(2) + 0.5),
        dist.Poisson(torch.rand(2) + 0.5),
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2, 3)), dist.Normal(torch.randn(2, 3), torch.ones(2, 3))
        ),
    ],
)
def test_scalars_become_vectors_of_one_component(emission):
    emission = emission.expand((2,))
    initial, matrix = torch.tensor([0.5, 0.5]).log(), torch.tensor([[0.9, 0.1], [0.0, 1.0]]).log()
    hmm = HMM(initial, matrix, emission, torch.tensor([4]))
    values = emission.sample((4,))[:, 0].abs().unsqueeze(0)
    score = to_hmmlearn(hmm).score(values.mT.reshape(4, 1).numpy())
    torch.testing.assert_close(hmm.log_prob(values).sum().item(), score, rtol=1e-5, atol=1e-6)
