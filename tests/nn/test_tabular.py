"""Properties of ``TabularHMM``, of its emissions and of ``TabularHMM.from_hmm(hmm)``."""

import pyro
import pytest
import torch
from pyro import distributions as dist
from pyro import poutine

from pyrohmm import (
    HMM,
    TabularHMM,
    banded,
    categorical,
    left_to_right,
    normal,
    sticky,
)

LENGTHS = torch.tensor([3, 1])


def sites(module, lengths=LENGTHS):
    trace = poutine.trace(module).get_trace(lengths)
    return {n: trace.nodes[n] for n in trace.stochastic_nodes}


def parts(num_states=2):
    return tuple(torch.randn(*b, num_states).log_softmax(-1) for b in ((), (num_states,)))


# Priors


@pytest.mark.parametrize("num_states", [1, 2, 4])
def test_sites_have_documented_names_and_shapes(num_states):
    found = sites(TabularHMM(num_states, categorical(3)))
    assert {name: tuple(site["value"].shape) for name, site in found.items()} == {
        "initial": (num_states,),
        "transition": (num_states, num_states),
        "emission.probs": (num_states, 3),
    }
    for dim in (0, 1, 2):
        found = sites(TabularHMM(num_states, normal(dim)))
        shape = (num_states, dim) if dim else (num_states,)
        assert list(found) == ["initial", "transition", "emission.variance", "emission.loc"]
        assert found["emission.variance"]["value"].shape == shape
        assert found["emission.loc"]["value"].shape == shape
    assert all(site["fn"].batch_shape == () for site in found.values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2.0, torch.full((2, 2), 2.0)),
        (3, torch.full((2, 2), 3.0)),
        (torch.tensor([1.0, 5.0]), torch.tensor([[1.0, 5.0], [1.0, 5.0]])),
        (torch.tensor([[9.0, 1.0], [2.0, 8.0]]), torch.tensor([[9.0, 1.0], [2.0, 8.0]])),
        (torch.tensor([[9, 1], [2, 8]]), torch.tensor([[9.0, 1.0], [2.0, 8.0]])),
        (torch.tensor([[9.0], [2.0]]), torch.tensor([[9.0, 9.0], [2.0, 2.0]])),
    ],
    ids=["number", "whole number", "row", "matrix", "whole matrix", "column"],
)
def test_a_concentration_is_a_number_a_row_or_a_matrix(given, expected):
    """The prior that is sampled from, against Dirichlet's own density."""
    found = sites(TabularHMM(2, categorical(2, given), 1.0, given))
    for name in ("transition", "emission.probs"):
        value = torch.tensor([[0.3, 0.7], [0.6, 0.4]])
        score = dist.Dirichlet(expected).log_prob(value).sum()
        torch.testing.assert_close(found[name]["fn"].log_prob(value), score)


def test_the_prior_of_the_first_state_is_its_own():
    found = sites(TabularHMM(2, categorical(2), torch.tensor([3.0, 1.0]), 7.0))
    value = torch.tensor([0.3, 0.7])
    expected = dist.Dirichlet(torch.tensor([3.0, 1.0])).log_prob(value)
    torch.testing.assert_close(found["initial"]["fn"].log_prob(value), expected)


# Points made of an HMM

EMISSIONS = {
    "categorical": lambda: dist.Categorical(logits=torch.randn(2, 3)),
    "vector normal": lambda: dist.Normal(torch.randn(2, 3), torch.rand(2, 3) + 0.1).to_event(1),
    "matrix normal": lambda: dist.Normal(torch.randn(2, 3, 2), 1.0).to_event(2),
    "Poisson": lambda: dist.Poisson(torch.rand(2) + 0.5),
    "multivariate normal": lambda: dist.MultivariateNormal(torch.randn(2, 2), spread()),
    "multivariate normal, Cholesky": lambda: dist.MultivariateNormal(
        torch.randn(2, 2), scale_tril=torch.linalg.cholesky(spread())
    ),
    "Bernoulli": lambda: dist.Bernoulli(torch.rand(2, 3)).to_event(1),
    "Student": lambda: dist.StudentT(torch.tensor([3.0, 5.0]), torch.randn(2), torch.rand(2) + 1),
}


def spread():
    root = torch.randn(2, 2, 2)
    return root @ root.mT + torch.eye(2)


@pytest.mark.parametrize("name", EMISSIONS)
def test_a_module_made_of_an_hmm_builds_that_hmm(name):
    """Its values are parameters with gradients. Used distributions hold cached attributes."""
    hmm = HMM(*parts(), EMISSIONS[name](), LENGTHS)
    values = hmm.sample()
    hmm.log_prob(values)
    if isinstance(hmm.emission, dist.MultivariateNormal):
        assert hmm.emission.precision_matrix.shape == (2, 2, 2)
    module = TabularHMM.from_hmm(hmm)
    assert isinstance(module, TabularHMM)
    again = module(LENGTHS)
    torch.testing.assert_close(again.log_initial, hmm.log_initial)
    torch.testing.assert_close(again.log_transition, hmm.log_transition)
    evidence = again.log_prob(values)
    torch.testing.assert_close(evidence, hmm.log_prob(values))
    evidence.sum().backward()
    gradients = {n: parameter.grad for n, parameter in module.named_parameters()}
    assert {"initial_unconstrained", "transition_unconstrained"} < gradients.keys()
    for n, gradient in gradients.items():
        assert gradient is not None, n
        assert gradient.isfinite().all(), n
        assert gradient.abs().max() > 0, n
    assert not sites(module)


def test_draws_of_a_posterior_make_a_module_with_a_batch():
    """R samples in a batch, (R, 1, ...), for N sequences; R = T, so that a mix-up would run."""
    initial, transition = torch.randn(3, 1, 2), torch.randn(3, 1, 2, 2)
    logits, lengths = torch.randn(3, 1, 2, 3), torch.tensor([3, 3])
    initial, transition = initial.log_softmax(-1), transition.log_softmax(-1)
    module = TabularHMM.from_hmm(HMM(initial, transition, dist.Categorical(logits=logits), lengths))
    values = torch.tensor([[0, 1, 2], [2, 0, 0]])
    found = module(lengths).log_prob(values)
    for r in range(3):
        emission = dist.Categorical(logits=logits[r, 0])
        expected = HMM(initial[r, 0], transition[r, 0], emission, lengths).log_prob(values)
        torch.testing.assert_close(found[r], expected)


# A module like any other of torch


@pytest.mark.parametrize("family", [categorical(3), normal(2)])
def test_state_dict_carries_the_priors(family):
    concentration = torch.tensor([[5.0, 1.0], [2.0, 3.0]])
    module = TabularHMM(2, family, 2.0, concentration)
    other = TabularHMM(2, family)
    assert other.load_state_dict(module.state_dict()).missing_keys == []
    torch.testing.assert_close(other.transition_concentration, concentration)
    matrices = []
    for each in (module, other):
        pyro.set_rng_seed(2)
        matrices.append(each(LENGTHS).log_transition)
    assert matrices[0].equal(matrices[1])


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: sticky(0, 1.0), "num_states must be at least 1"),
        (lambda: left_to_right(0), "num_states must be at least 1"),
        (lambda: left_to_right(3, -1), "jump must be at least 0"),
        (lambda: banded(0), "num_states must be at least 1"),
        (lambda: banded(3, -1), "width must be at least 0"),
    ],
)
def test_matrices_without_states_or_transitions_are_refused(make, wanted):
    with pytest.raises(ValueError, match=wanted):
        make()
