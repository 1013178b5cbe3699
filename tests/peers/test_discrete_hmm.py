"""What ``pyro.distributions.DiscreteHMM`` does, asked of an HMM in its place."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta

from pyrohmm import HMM

K, T = 3, 4


def in_its_place(initial, transition, emission):
    """The HMM of the arguments of a DiscreteHMM, which makes a transition before it emits.

    The first state here is that after its first transition; what depends on the step is one step
    later in its place.
    """
    initial, transition = initial.log_softmax(-1), transition.log_softmax(-1)
    per_step = transition.dim() > 2 and transition.size(-3) > 1
    first = transition[..., 0, :, :] if transition.dim() > 2 else transition
    return HMM(
        (initial.unsqueeze(-1) + first).logsumexp(-2),
        transition[..., 1:, :, :] if per_step else first,
        emission,
        None,
        num_steps=T,
        transition_per_step=per_step,
        emission_per_step=len(emission.batch_shape) > 1,
    )


EMISSIONS = {
    "symbols": lambda *shape: dist.Categorical(logits=torch.randn(*shape, 5)),
    "numbers": lambda *shape: dist.Normal(torch.randn(shape), 1.0),
    "independent numbers": lambda *shape: dist.Normal(torch.randn(*shape, 2), 1.0).to_event(1),
    "vectors": lambda *shape: dist.MultivariateNormal(torch.randn(*shape, 2), torch.eye(2)),
}


@pytest.fixture(params=EMISSIONS)
def emission(request):
    return EMISSIONS[request.param]


SHAPES = [
    [(K,), (K, K), (K,)],
    [(2, K), (K, K), (K,)],
    [(K,), (1, K, K), (T, K)],
    [(K,), (T, K, K), (K,)],
    [(K,), (T, K, K), (T, K)],
    [(K,), (2, T, K, K), (T, K)],
    [(5, 1, K), (2, T, K, K), (T, K)],
    [(5, 1, K), (T, K, K), (2, T, K)],
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_densities_and_filtered_states(shapes, emission):
    initial, transition = (torch.randn(shape, requires_grad=True) for shape in shapes[:2])
    emitted = emission(*shapes[2])
    pyros = dist.DiscreteHMM(initial, transition, emitted, duration=T)
    ours = in_its_place(initial, transition, emitted)
    assert ours.batch_shape == pyros.batch_shape
    assert ours.event_shape == (T, *emitted.event_shape)
    assert ours.event_dim == pyros.event_dim
    values = ours.sample()
    assert values.shape == ours.shape() == ours.batch_shape + ours.event_shape
    assert bool(ours.support.check(values).all())
    one, other = ours.log_prob(values), pyros.log_prob(values)
    torch.testing.assert_close(one, other)
    for mine, its in zip(*(torch.autograd.grad(each.sum(), (initial, transition))
                           for each in (one, other))):  # fmt: skip
        torch.testing.assert_close(mine, its)
    torch.testing.assert_close(ours.filtered(values)[..., -1, :], pyros.filter(values).probs)
    wide = torch.Size([7, *ours.batch_shape])
    assert ours.expand(wide).batch_shape == pyros.expand(wide).batch_shape == wide
    torch.testing.assert_close(ours.expand(wide).log_prob(values), other.expand(wide))


@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[4]])
def test_samples_have_one_distribution(shapes):
    logits = torch.randn(*shapes[2], 2)
    arguments = torch.randn(shapes[0]), torch.randn(shapes[1]), dist.Categorical(logits=logits)
    count, counts = 4000, []
    for each in (dist.DiscreteHMM(*arguments, duration=T), in_its_place(*arguments)):
        codes = (each.sample((count,)) * 2 ** torch.arange(T)).sum(-1)
        counts.append(torch.bincount(codes, minlength=2**T).double())
    both, difference = sum(counts), counts[0] - counts[1]
    statistic = (difference**2 / both.clamp(min=1)).sum()  # of 15 degrees of freedom
    assert statistic < 15 + 4 * 30**0.5


def test_it_stands_in_a_pyro_model_as_the_other_does():
    """The same losses of the same steps."""
    values = torch.randn(6, T)

    def model(build):
        initial = pyro.sample("initial", dist.Normal(torch.zeros(K), 1.0).to_event(1))
        transition = pyro.sample("transition", dist.Normal(torch.zeros(K, K), 1.0).to_event(2))
        loc = pyro.sample("loc", dist.Normal(torch.zeros(K), 1.0).to_event(1))
        with pyro.plate("sequences", 6):
            pyro.sample("x", build(initial, transition, dist.Normal(loc, 1.0)), obs=values)

    losses = []
    for build in (in_its_place, dist.DiscreteHMM):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        svi = SVI(model, AutoDelta(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
        losses.append([svi.step(build) for _ in range(20)])
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses))


def test_its_emissions_and_transitions_broadcast_over_a_plate():
    transition, values = torch.randn(2, 1, T, K, K), torch.randn(2, 5, T)
    arguments = torch.randn(K), transition, dist.Normal(torch.randn(5, 1, K).expand(5, T, K), 1.0)
    found = in_its_place(*arguments).log_prob(values)
    torch.testing.assert_close(found, dist.DiscreteHMM(*arguments).log_prob(values))
