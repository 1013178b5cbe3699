"""Every query of every chain is differentiable as a whole: against central differences."""

import pyro
import pytest
import torch
from pyro.distributions import Normal
from pyro.infer import Trace_ELBO
from test_every_chain import HMMS, LENGTHS, in_blocks

from pyrohmm import HMM, ContinuousTimeHMM, Filter, LinearChainCRF, queries


def leaves_of(found):
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found
    return [leaf for part in parts if part is not None for leaf in leaves_of(part)]


def ahead(hmm):
    if isinstance(hmm, ContinuousTimeHMM):
        return hmm.times[..., -1:] + torch.tensor([0.5, 1.5])
    return 2


def of_dwell_times(hmm, values):
    return (
        queries.dwell_time_mean(hmm),
        queries.dwell_time_log_prob(hmm, 3).exp(),
        queries.dwell_time_log_survival(hmm, 3).exp(),
    )


QUERIES = {
    "posterior": lambda hmm, x: hmm.posterior(x),
    "expected counts": lambda hmm, x: hmm.expected_counts(x),
    "filtered": lambda hmm, x: hmm.filtered(x),
    "marginals": lambda hmm, x: (
        m := queries.observation_marginals(hmm, x), [m.mean, m.variance, m.log_prob(x)]
    )[1],
    "entropy": lambda hmm, x: queries.path_entropy(hmm, x),
    "visits": lambda hmm, x: queries.expected_visits(hmm, x),
    "best paths": lambda hmm, x: queries.k_best(hmm, x, 2)[1].exp(),
    "predictive": lambda hmm, x: queries.predictive_log_prob(hmm, x),
}  # fmt: skip
OF_THE_FUTURE = {
    "forecast": lambda hmm, x: (
        m := hmm.forecast(x, ahead(hmm)), [m.mean, m.variance, m.log_prob(x[:, :2])]
    )[1],
    "continuation": lambda hmm, x: queries.continuation(hmm, x, ahead(hmm)).log_prob(x[:, :2]),
}  # fmt: skip


def asked(name, query):
    if query in QUERIES:
        return True
    if query == "dwell times":
        return not any(word in name for word in ("step", "pairs", "times"))
    ends = query == "forecast" and ("end" in name or "whole" in name)
    return "step" not in name and not ends


def parts_of(hmm, values):
    """The inputs, with gradients, and the HMM and values that are made of them."""
    chain = {name: table.double() for name, table in hmm.chain.parameters.items()}
    inputs = chain | {"loc": hmm.emission.loc.double() + 0.1, "values": values.double()}

    def made(inputs):
        new = hmm.chain.replace(**{name: inputs[name] for name in chain})
        emission = Normal(inputs["loc"], 1.5, validate_args=False)
        return HMM.of.__func__(type(hmm), new, emission, LENGTHS, hmm.observed, False), inputs[
            "values"
        ]

    return inputs, made


def weighted(found):
    """One number of all that a query returns, with weights that tell its parts apart."""
    torch.manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_of(found):
        if leaf.is_floating_point():
            usable = leaf.isfinite()
            weights = torch.randn(leaf.shape, dtype=torch.float64)
            total = total + (leaf.double().masked_fill(~usable, 0.0) * weights).sum()
    return total


def by_differences(function, inputs, directions, step=1e-5):
    ends = []
    for sign in (1, -1):
        moved = {n: x + sign * step * directions[n] for n, x in inputs.items()}
        ends.append(function(moved))
    return (ends[0] - ends[1]) / (2 * step)


def direction_of(name, table):
    """A direction in which hard zeros stay."""
    torch.manual_seed(5)
    if name == "rates":
        steps = table * (0.5 + torch.rand(table.shape, dtype=table.dtype))
        steps = steps - steps.diagonal(dim1=-2, dim2=-1).diag_embed()
        return steps - steps.sum(-1).diag_embed()
    drawn = torch.randn(table.shape, dtype=torch.float64)
    return drawn.masked_fill(~table.isfinite(), 0.0)


@pytest.mark.parametrize("query", [*QUERIES, *OF_THE_FUTURE, "dwell times"])
@pytest.mark.parametrize("name", HMMS)
def test_gradients_of_a_query_are_central_differences(name, query):
    """By each parameter and the values; ragged, with missing steps and T = 1."""
    if not asked(name, query):
        pytest.skip("is not asked of this chain")
    ask = (QUERIES | OF_THE_FUTURE | {"dwell times": of_dwell_times})[query]
    hmm = HMMS[name]()
    values = hmm.sample()
    inputs, made = parts_of(hmm, values)

    def function(inputs):
        return weighted(ask(*made(inputs)))

    tracked = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    value = function(tracked)
    slopes = torch.autograd.grad(value, list(tracked.values()), allow_unused=True)
    for (part, table), slope in zip(inputs.items(), slopes):
        directions = {n: torch.zeros_like(x) for n, x in inputs.items()}
        directions[part] = direction_of(part, table)
        wanted = by_differences(function, inputs, directions)
        slope = torch.zeros_like(table) if slope is None else slope
        assert slope.isfinite().all(), part
        found = (slope * directions[part]).sum()
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("query", ["posterior", "expected counts", "filtered", "entropy"])
@pytest.mark.parametrize("name", ["markov", "durations", "product", "pairs"])
def test_no_graph_of_the_steps_is_kept(name, query):
    """What is saved for the way back does not grow with the steps by more than the evidence."""
    hmm = HMMS[name]()
    inputs, made = parts_of(hmm, hmm.sample())

    def kept(ask, inputs, made):
        count = [0]

        def pack(tensor):
            count[0] += 1
            return tensor

        tracked = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ask(*made(tracked))
        return count[0]

    few = kept(QUERIES[query], inputs, made)
    hmm = hmm.replace(lengths=torch.full((3,), 40), observed=None)
    values = hmm.sample()
    inputs = inputs | {"values": values.double()}

    def longer(inputs):
        chain = hmm.chain.replace(**{n: inputs[n] for n in hmm.chain.parameters})
        return type(hmm).of(chain, Normal(inputs["loc"], 1.5), hmm.lengths), inputs["values"]

    assert kept(QUERIES[query], inputs, longer) <= few + 4


def test_in_blocks_a_query_has_no_part_of_a_gradient():
    hmm = in_blocks()
    values = torch.tensor([[0, 1, 1, 3, 0]] * 3)
    with torch.enable_grad():
        leave = hmm.transition.leave.clone().requires_grad_()
        kind = type(hmm.transition)
        table = hmm.log_emission.clone().requires_grad_()
        moving = kind(leave, hmm.transition.enter, hmm.blocks)
        hmm = type(hmm)(hmm.log_initial, moving, table, hmm.blocks, LENGTHS, validate_args=False)
        for found in (
            hmm.posterior(values).state_probs,
            hmm.filtered(values),
            hmm.forecast(values, 2).probs,
            hmm.state_probs_ahead(values, 2),
            queries.observation_marginals(hmm, values).probs,
            queries.continuation(hmm, values, 2).log_prob(values[:, :2]),
            queries.predictive_log_prob(hmm, values),
        ):
            assert not found.requires_grad
        assert hmm.log_prob(values).requires_grad


def test_a_stream_has_no_part_of_a_gradient():
    loc = torch.zeros(2, requires_grad=True)
    even = torch.full((2, 2), 0.5).log()
    stream = Filter(HMM(even[0], even, Normal(loc, 1.0), torch.tensor(1)))
    stream.update(torch.tensor(0.3))
    assert not stream.predict().mean.requires_grad


def test_scores_of_labels_are_trained_by_any_query():
    """And results are of the dtype of the scores."""
    lengths = torch.tensor([4, 1])
    scores, matrix = torch.randn(2, 4, 3).double(), torch.randn(3, 3).double()
    matrix[0, 2] = -torch.inf
    asks = [
        lambda crf: crf.marginals(),
        lambda crf: crf.pairwise_marginals(),
        lambda crf: crf.path_entropy(),
        lambda crf: crf.k_best(3)[1].exp(),
    ]
    for ask in asks:

        def function(inputs, ask=ask):
            return weighted(ask(LinearChainCRF(*inputs.values(), lengths=lengths)))

        inputs = {"scores": scores, "matrix": matrix, "first": torch.randn(3).double()}
        tracked = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        slopes = torch.autograd.grad(function(tracked), list(tracked.values()))
        directions = {n: direction_of(n, x) for n, x in inputs.items()}
        found = sum((s * d).sum() for s, d in zip(slopes, directions.values()))
        wanted = by_differences(function, inputs, directions)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        assert ask(LinearChainCRF(scores.float(), matrix.float())).dtype == torch.float32


def test_the_share_of_states_as_a_regressor_has_its_whole_gradient():
    """A second site of a model that reads the posterior of the first."""
    hmm = HMMS["markov"]()
    values = hmm.sample()
    level = torch.tensor([0.4, 1.2, 2.5], dtype=torch.float64)

    def model(loc):
        now = hmm.replace(emission=Normal(loc, 1.5))
        with pyro.plate("sequences", 3):
            pyro.sample("x", now, obs=values)
            share = now.posterior(values).state_probs[..., 0].sum(-1) / LENGTHS
            pyro.sample("y", Normal(share, 0.1), obs=torch.tensor([0.3, 0.1, 0.8]))

    def loss(loc):
        return Trace_ELBO().differentiable_loss(model, lambda loc: None, loc)

    leaf = level.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    for k in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[k] = 1e-5
        wanted = (loss(level + step) - loss(level - step)) / 2e-5
        torch.testing.assert_close(
            slope[k].double(), torch.as_tensor(wanted).double(), rtol=1e-5, atol=1e-5
        )
