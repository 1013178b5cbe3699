"""The Pyro models: two forms, one density, and a good citizen of Pyro's own machinery."""

import itertools
from functools import partial

import numpy as np
import oracle
import pyro
import pytest
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.infer import (
    NUTS,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    infer_discrete,
)
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
    AutoRegressiveMessenger,
    AutoStructured,
)
from pyro.nn import PyroModule, PyroSample
from pyro.ops.integrator import potential_grad

from pyrohmm import (
    HMM,
    DenseHMM,
    EnumeratedModel,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    autoregressive_categorical,
    autoregressive_normal,
    bernoulli,
    categorical,
    fit_map,
    left_to_right,
    markov_sample,
    normal,
    normal_full,
    normal_mixture,
    poisson,
    streams,
    tied,
)
from pyrohmm.infer import models
from pyrohmm.nn.dense import rbf

NAN = float("nan")
EXACT = {"rtol": 0.0, "atol": 1e-10}


class Counts(PyroModule):
    """An emission family of a user: counts whose rates have a gamma prior."""

    def __init__(self, num_states):
        super().__init__()
        self.register_buffer("one", torch.ones(num_states))
        self.rate = PyroSample(lambda self: dist.Gamma(2 * self.one, self.one).to_event(1))

    def forward(self):
        return dist.Poisson(self.rate)


class Walker(HMMModule):
    """A module of a user: points and random variables, other matrices, emissions at each step."""

    def __init__(self, num_steps, num_states=2):
        super().__init__()
        self.start = torch.nn.Parameter(torch.randn(num_states))
        self.transition = torch.nn.Parameter(torch.randn(num_steps - 1, num_states, num_states))
        self.register_buffer("zero", torch.zeros(num_steps, num_states))
        self.loc = PyroSample(lambda self: dist.Normal(self.zero, 1.0).to_event(2))

    def forward(self, lengths, observed=None):
        return HMM(
            self.start.log_softmax(-1),
            self.transition.log_softmax(-1),
            dist.Normal(self.loc, 1.0),
            lengths,
            observed,
            transition_per_step=True,
            emission_per_step=True,
        )


class Driven(HMMModule):
    """A module of a user: transitions and emissions depend on a covariate of each step."""

    def __init__(self, num_states=2):
        super().__init__()
        self.register_buffer("zero", torch.zeros(num_states, num_states))
        self.base = PyroSample(lambda self: dist.Normal(self.zero, 1.0).to_event(2))
        self.tilt = PyroSample(lambda self: dist.Normal(self.zero, 1.0).to_event(2))
        self.slope = torch.nn.Parameter(torch.randn(num_states))

    def forward(self, lengths, observed=None, covariates=None):
        drive = covariates[:, 1:, :, None] * self.tilt.unsqueeze(-3)  # (*B, T-1, K, K)
        transition = self.base.unsqueeze(-3) + drive
        return HMM(
            self.zero[0].log_softmax(-1),
            transition.log_softmax(-1),
            dist.Normal(self.slope * covariates, 1.0),
            lengths,
            observed,
            transition_per_step=True,
            emission_per_step=True,
        )


def symbols():
    """Four sequences, the first with a gap, the third without any observed step."""
    values = torch.tensor([[0, 9, 2, 1], [1, 1, 9, 9], [9, 9, 9, 9], [2, 0, 1, 9]])
    return Sequences(values, torch.tensor([4, 2, 1, 3]), values < 9)


def numbers():
    return Sequences.from_list([[0.3, NAN, -1.2, 0.7], [NAN, 2.0], [0.1], [NAN, NAN, 1.0]])


def vectors():
    rows = [torch.randn(length, 2) for length in (4, 2, 1)]
    rows[0][1], rows[1][1, 0] = NAN, NAN
    return Sequences.from_list(rows)


def counts():
    return Sequences.from_list([[3.0, NAN, 0.0, 1.0], [NAN, 2.0], [5.0]])


def known_in_part(width=2, transform=lambda values: values):
    """Vectors: a whole step is missing, and single components of others."""
    rows = [transform(torch.randn(length, width)) for length in (4, 2, 1)]
    rows[0][1], rows[0][2, 0], rows[1][1, -1] = NAN, NAN, NAN
    return Sequences.from_list(rows)


def beside_each_other():
    """A symbol, a vector and a count at each step, and what is missing of them."""
    data = known_in_part(4)
    data.values[..., 0] = (data.values[..., 0] > 0).where(~data.values[..., 0].isnan(), NAN)
    data.values[..., 3] = (data.values[..., 3].abs() * 3).floor()
    return data


def labelled(data, labels):
    return Sequences(data.values, data.lengths, data.observed, labels)


def known_to_the_end():
    """Vectors, the last of one sequence missing: nothing observed depends on what is not."""
    rows = [torch.randn(length, 2) for length in (4, 3, 1)]
    rows[1][2] = NAN
    return Sequences.from_list(rows)


def symbols_to_the_end():
    values = torch.tensor([[0, 1, 2, 9], [1, 1, 9, 9], [2, 0, 1, 1]])
    return Sequences(values, torch.tensor([4, 2, 4]), values < 9)


def with_sets_of_labels():
    data = symbols()
    allowed = torch.ones(4, 4, 2).bool()
    allowed[0, 1, 0] = allowed[0, 2, 1] = allowed[3, 0, 1] = False
    allowed[1, 3] = False  # padding
    return labelled(data, allowed)


def with_covariates():
    return Sequences.from_list(
        [[0.3, NAN, -1.2, 0.7], [NAN, 2.0], [0.1]],
        covariates=[torch.randn(length, 1) for length in (4, 2, 1)],
    )


def with_zeros():
    """From left to right; a state that emits one symbol only, and one that none can reach."""
    hmm = HMM(
        torch.tensor([1.0, 0.0, 0.0, 0.0]).log(),
        torch.tensor([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]).log(),
        dist.Categorical(torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1], [1, 0, 0]])),
        torch.tensor([4, 2, 1]),
    )
    return TabularHMM.from_hmm(hmm)


CASES = {
    "hard zeros": (with_zeros, lambda: Sequences.from_list([[0, 1, 1, 2], [0, 1], [1]])),
    "ones and zeros": (
        lambda: TabularHMM(2, bernoulli(2)),
        lambda: known_in_part(2, lambda values: (values > 0).double()),
    ),
    "full covariance": (lambda: TabularHMM(2, normal_full(3)), lambda: known_in_part(3)),
    "mixture": (lambda: TabularHMM(2, normal_mixture(2, num_components=3)), known_in_part),
    "streams": (
        lambda: TabularHMM(2, streams(categorical(2), normal_full(2), poisson())),
        beside_each_other,
    ),
    "shared emissions": (lambda: TabularHMM(3, tied(categorical(3), [0, 1, 0])), symbols),
    "left to right": (
        lambda: TabularHMM(
            3,
            categorical(3),
            initial_allowed=torch.tensor([True, True, False]),
            transition_allowed=left_to_right(3, 1),
        ),
        symbols,
    ),
    "labels": (
        lambda: TabularHMM(2, categorical(3)),
        lambda: labelled(
            symbols(),
            torch.tensor([[0, 1, -1, -1], [-1, 1, 9, 9], [-1, -1, 9, 9], [0, 0, 0, 9]]),
        ),
    ),
    "sets of labels": (lambda: TabularHMM(2, categorical(3)), with_sets_of_labels),
    "covariates": (Driven, with_covariates),
    "dense": (lambda: DenseHMM(3, 3, 2, symbol_dim=1), symbols),
    "dense, stationary": (lambda: DenseHMM(3, 3, 1, stationary=True, kernel=rbf(0.7)), symbols),
    "dense with vectors": (lambda: DenseHMM(2, None, 2, emission=normal_full(2)), known_in_part),
    "categorical": (lambda: TabularHMM(2, categorical(3)), symbols),
    "scalar": (lambda: TabularHMM(3, normal(0)), numbers),
    "vector": (lambda: TabularHMM(2, normal(2)), vectors),
    "class of a user": (lambda: TabularHMM(2, Counts), counts),
    "autoregressive vectors": (
        lambda: TabularHMM(2, autoregressive_normal(2, 2)),
        known_to_the_end,
    ),
    "autoregressive symbols": (
        lambda: TabularHMM(2, autoregressive_categorical(3)),
        symbols_to_the_end,
    ),
    "one step": (lambda: TabularHMM(2, categorical(3)), lambda: Sequences.from_list([[1], [0]])),
    "one of each": (lambda: TabularHMM(1, normal(1)), lambda: Sequences.from_list([[[0.5]]])),
    "per step": (lambda: Walker(4), numbers),
    "per step, one step": (lambda: Walker(1), lambda: Sequences.from_list([[1.0], [NAN]])),
}


def share_of(data: Sequences, more: int = 7) -> Sequences:
    """The same sequences as a minibatch of a larger set."""
    return Sequences(
        data.values, data.lengths, data.observed, data.labels, len(data) + more, data.covariates
    )


def stickiness(hmm: HMM) -> torch.Tensor:
    """A log-prior with one value for each particle, as vectorised particles ask for."""
    stay = hmm.log_transition.exp().diagonal(dim1=-2, dim2=-1).sum(-1)
    if hmm.transition_per_step:
        stay = stay.sum(-1)
        if hmm.log_transition.dim() > 3 and hmm.log_transition.size(-4) > 1:  # of each sequence
            stay = stay.sum(-1, keepdim=stay.dim() > 1)
    return 2.0 * stay


def both(module, log_prior=None):
    """The two forms of one model."""
    return MarginalModel(module, log_prior), EnumeratedModel(module, log_prior)


def ready(make_guide, model, data):
    """A guide of the parameters, which exist; states are left to enumeration."""
    guide = make_guide(poutine.block(model, hide_fn=lambda site: "_state_" in site["name"]))
    guide(data)
    return guide


def loss_and_gradients(model, guide, data, particles=1):
    """The loss of one form and its gradient by every parameter, after one seed."""
    elbo = TraceEnum_ELBO if isinstance(model, EnumeratedModel) else Trace_ELBO
    elbo = elbo(particles, max_plate_nesting=1, vectorize_particles=particles > 1)
    pyro.set_rng_seed(1)
    objective = elbo(model, guide)
    loss = objective(data)
    parameters = dict(objective.named_parameters())
    given = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), dict(zip(parameters, given))


def seen(emission, value):
    """Log-density ``(K,)`` of the components that are not NaN."""
    known = ~value.isnan() if value.is_floating_point() else torch.ones(value.shape).bool()
    if known.all():
        return emission.log_prob(value.unsqueeze(0))
    base = emission.base_dist
    return dist.Normal(base.loc, base.scale).log_prob(value.nan_to_num())[..., known].sum(-1)


def log_evidence_by_paths(hmm: HMM, data: Sequences, n: int) -> torch.Tensor:
    """Log-probability of sequence n by its definition; for unbatched parameters."""
    length, total = int(data.lengths[n]), []
    for path in itertools.product(range(hmm.num_states), repeat=length):
        score = hmm.log_initial[path[0]]
        for t in range(1, length):
            score = score + hmm.log_transition[path[t - 1], path[t]]
        for t in range(length):
            if data.observed[n, t]:
                score = score + seen(hmm.emission, data.values[n, t])[path[t]]
        total.append(score)
    return torch.stack(total).logsumexp(0)


# Two forms, one density


@pytest.mark.parametrize("case", CASES)
def test_both_forms_agree_in_loss_and_every_gradient(case):
    """Of a minibatch, with a log-prior, and three particles."""
    make_module, make_data = CASES[case]
    models, data = both(make_module(), stickiness), share_of(make_data())
    guide = ready(AutoDelta if case == "hard zeros" else AutoNormal, models[0], data)
    particles = 1 if case == "hard zeros" else 3  # it has no variables to sample
    marginal, enumerated = (loss_and_gradients(m, guide, data, particles) for m in models)
    assert marginal[0].isfinite()
    torch.testing.assert_close(enumerated[0], marginal[0], **EXACT)
    assert enumerated[1].keys() == marginal[1].keys()
    for name, gradient in marginal[1].items():
        other = enumerated[1][name]
        if gradient is None or other is None:  # without elements: one step has no transition
            assert all(given is None or not given.numel() for given in (gradient, other)), name
        else:
            assert gradient.isfinite().all(), name
            torch.testing.assert_close(other, gradient, **EXACT)


@pytest.mark.parametrize("case", ["categorical", "vector"])
def test_the_loss_is_prior_and_scaled_likelihood_by_definition(case):
    """Sum over paths for the likelihood, once per sequence; priors and log_prior once."""
    make_module, make_data = CASES[case]
    model, data = MarginalModel(make_module(), stickiness), share_of(make_data())
    guide = ready(AutoDelta, model, data)
    loss, _ = loss_and_gradients(model, guide, data)
    trace = poutine.trace(poutine.replay(model, poutine.trace(guide).get_trace(data)))
    trace = trace.get_trace(data)
    hmm = trace.nodes["_RETURN"]["value"]
    prior = sum(
        trace.nodes[name]["fn"].log_prob(trace.nodes[name]["value"])
        for name in trace.nodes
        if name.startswith("module.")
    )
    likelihood = sum(log_evidence_by_paths(hmm, data, n) for n in range(len(data)))
    expected = prior + stickiness(hmm) + data.total / len(data) * likelihood
    torch.testing.assert_close(loss, -expected.detach(), **EXACT)


@pytest.mark.parametrize("form", [MarginalModel, EnumeratedModel])
def test_values_of_missing_and_padded_steps_change_nothing(form):
    data = numbers()
    filled = data.values.masked_fill(~data.observed, 1e6)
    model = form(TabularHMM(2, normal(0)))
    guide = ready(AutoDelta, model, data)
    expected = loss_and_gradients(model, guide, data)
    for values in (filled, data.values.masked_fill(~data.observed, NAN)):
        found = loss_and_gradients(model, guide, Sequences(values, data.lengths, data.observed))
        assert torch.equal(found[0], expected[0])
        for name, gradient in expected[1].items():
            torch.testing.assert_close(found[1][name], gradient, **EXACT)


# markov_sample in a model of one's own


def no_guide(*args):
    pass


def test_markov_sample_works_in_two_plates():
    """Groups of sequences, each group with its own transition matrix."""
    lengths = torch.tensor([[3, 1], [2, 3], [3, 3]])  # (G, N)
    scores = torch.randn(3, 1, 2, 2).requires_grad_()
    emission = dist.Normal(torch.tensor([-1.0, 1.0]), 1.0)
    obs = torch.randn(3, 2, 3)

    def model(spelled):
        hmm = HMM(torch.tensor([0.3, 0.7]).log(), scores.log_softmax(-1), emission, lengths)
        with pyro.plate("groups", 3, dim=-2), pyro.plate("data", 2, dim=-1):
            markov_sample("y", hmm, obs=obs) if spelled else pyro.sample("y", hmm, obs=obs)

    spelled = TraceEnum_ELBO(max_plate_nesting=2).differentiable_loss(model, no_guide, True)
    short = Trace_ELBO().differentiable_loss(model, no_guide, False)
    torch.testing.assert_close(spelled, short, **EXACT)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, scores)[0] for loss in (spelled, short)), **EXACT
    )


@pytest.mark.parametrize(
    ("emission", "event"),
    [
        (dist.Categorical(torch.ones(3, 4)), ()),
        (dist.Normal(torch.zeros(3, 2, 5), 1.0).to_event(2), (2, 5)),
    ],
    ids=["categorical", "matrix"],
)
def test_markov_sample_draws_what_is_not_observed(emission, event):
    """Shapes, dtype and names as pyro.sample gives them; states are sites too."""
    even = torch.full((3, 3), 1 / 3).log()
    hmm = HMM(even[0], even, emission, torch.tensor([4, 2]))

    def spelled():
        with pyro.plate("data", 2):
            return markov_sample("y", hmm)

    def short():
        with pyro.plate("data", 2):
            return pyro.sample("y", hmm)

    trace = poutine.trace(spelled).get_trace()
    drawn = trace.nodes["_RETURN"]["value"]
    assert drawn.shape == short().shape == (2, 4, *event)
    assert drawn.dtype == short().dtype
    for t in range(4):
        assert trace.nodes[f"y_state_{t}"]["value"].shape == (2,)
        assert trace.nodes[f"y_{t}"]["value"].equal(drawn[:, t])
    for parallel in (False, True):
        found = Predictive(spelled, num_samples=3, parallel=parallel, return_sites=["y_1"])()
        assert found["y_1"].shape == (3, 2, *event)
        found = Predictive(short, num_samples=3, parallel=parallel)()
        assert found["y"].shape == (3, 2, 4, *event)


def decoded(hmm: HMM, values: torch.Tensor) -> torch.Tensor:
    """The most probable path by Pyro's own machinery, zero at padded steps."""

    @partial(infer_discrete, first_available_dim=-2, temperature=0)
    def model():
        with pyro.plate("data", len(values)):
            markov_sample("y", hmm, obs=values)

    trace = poutine.trace(model).get_trace()
    path = [trace.nodes[f"y_state_{t}"]["value"] for t in range(hmm.num_steps)]
    exists = torch.arange(hmm.num_steps) < hmm.lengths.unsqueeze(-1)
    return torch.stack(path, -1).masked_fill(~exists, 0)


def test_infer_discrete_is_not_swayed_by_padding():
    """T4: state 0 is likelier, and state 1 would win if the padding took part in the maximum."""
    stay = torch.tensor([[0.50, 0.50], [0.01, 0.99]]).log()
    blank = dist.Categorical(probs=torch.ones(2, 1))
    hmm = HMM(torch.tensor([0.6, 0.4]).log(), stay, blank, torch.tensor([1, 3]))
    values = torch.zeros(2, 3, dtype=torch.long)
    assert decoded(hmm, values).equal(hmm.viterbi(values))


# A model of one's own, in ten lines, with everything Pyro brings


def ours(module, plate="data"):
    """A user's model: a latent of its own, a factor, and an HMM in a plate."""

    def model(data):
        weight = pyro.sample("weight", dist.Gamma(2.0, 1.0))
        hmm = module(data.lengths, data.observed)
        stay = hmm.log_transition.exp().diagonal(dim1=-2, dim2=-1).sum(-1)
        pyro.factor("sticky", weight * stay)
        with pyro.plate(plate, len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    return model


SHAPES = {"weight": (), "initial": (2,), "transition": (2, 2), "emission.probs": (2, 3)}


def two_guides(model):
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["initial", "transition"])))
    guide.append(AutoNormal(poutine.block(model, expose=["weight", "emission.probs"])))
    return guide


def flow(model):
    layer = dist.transforms.block_autoregressive
    return AutoNormalizingFlow(model, partial(dist.transforms.iterated, 1, layer))


GUIDES = {
    "AutoDelta": AutoDelta,
    "AutoNormal": AutoNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoNormalizingFlow": flow,
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
    "AutoStructured": partial(AutoStructured, conditionals="mvn", dependencies="linear"),
    "AutoGuideList": two_guides,
    "AutoRegressiveMessenger": AutoRegressiveMessenger,
}


@pytest.mark.parametrize("name", GUIDES)
def test_every_autoguide_can_be_trained_and_drawn_from(name):
    data = symbols()
    model = ours(TabularHMM(2, categorical(3)))
    guide = GUIDES[name](model)
    objective = Trace_ELBO()(model, guide)
    objective(data)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
    before = [parameter.detach().clone() for parameter in objective.parameters()]
    loss = objective(data)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    assert any(not old.equal(new) for old, new in zip(before, objective.parameters()))
    drawn = poutine.trace(guide).get_trace(data)
    assert {n: tuple(drawn.nodes[n]["value"].shape) for n in SHAPES} == SHAPES
    drawn = Predictive(guide, num_samples=3)(data)
    posterior = {n: drawn[n].reshape(3, *shape) for n, shape in SHAPES.items()}
    drawn = Predictive(poutine.uncondition(model), posterior)(data)
    assert drawn["x"].shape == (3, 4, 4)
    assert len({tuple(sequences.flatten().tolist()) for sequences in drawn["x"]}) > 1


def test_parallel_predictions_use_the_sample_they_belong_to():
    """Sample s emits symbol s only."""
    data = Sequences(torch.zeros(4, 2, dtype=torch.long), torch.tensor([2, 1, 2, 2]))
    draws = {
        "weight": torch.ones(3, 1),
        "initial": torch.full((3, 1, 2), 0.5),
        "transition": torch.full((3, 1, 2, 2), 0.5),
        "emission.probs": torch.eye(3).reshape(3, 1, 1, 3).expand(3, 1, 2, 3),
    }
    model = poutine.uncondition(ours(TabularHMM(2, categorical(3))))
    drawn = Predictive(model, draws, parallel=True)(data)["x"]
    assert drawn.equal(torch.arange(3).reshape(3, 1, 1).expand(3, 4, 2))


# Markov chain Monte Carlo


def test_both_forms_have_the_same_potential_for_hamiltonian_monte_carlo():
    data, points, found = symbols(), None, []
    for model in both(TabularHMM(2, categorical(3))):
        kernel = NUTS(model, max_plate_nesting=1)
        kernel.setup(0, data)
        points = points or kernel.initial_params
        found.append(potential_grad(kernel.potential_fn, points))
    (slopes, value), (others, other) = found
    torch.testing.assert_close(other, value, **EXACT)
    for name, slope in slopes.items():
        torch.testing.assert_close(others[name], slope, **EXACT)


def test_a_prior_on_the_posterior_of_states_is_fitted_to_its_optimum():
    """A share of the time in state 0; slopes at the end by differences of sums over all paths."""
    symbols = torch.tensor([[0, 0, 1, 2, 2, 1], [2, 0, 0, 1, 1, 2], [0, 1, 0, 0, 2, 2]])
    data, share, weight = Sequences(symbols), 0.8, 300.0
    paths = oracle.all_paths(2, 6)

    def log_prior(hmm):
        found = hmm.posterior(data.values).state_probs[..., 0].mean()
        return -weight * (found - share) ** 2

    def log_joint(initial, transition, probs):
        evidence, time = 0.0, []
        for row in symbols.numpy():
            emitted = np.log(probs[:, row]).T
            logs = oracle.joint(np.log(initial), np.log(transition)[None], emitted, paths)
            evidence += np.logaddexp.reduce(logs)
            time.append(np.exp(logs - np.logaddexp.reduce(logs)) @ (paths == 0).mean(1))
        priors = np.log(initial).sum() + np.log(transition).sum() + np.log(probs).sum()
        return evidence + priors - weight * (np.mean(time) - share) ** 2

    module = TabularHMM(2, categorical(3, 2.0), 2.0, 2.0)
    fit = fit_map(MarginalModel(module, log_prior), data, num_iterations=1000, tolerance=1e-12)
    names = ("module.initial", "module.transition", "module.emission.probs")
    end = [fit.parameters[name].double().numpy() for name in names]
    slopes = []
    for place, part in enumerate(end):
        for row in np.ndindex(part.shape[:-1]):
            for entry in range(1, part.shape[-1]):
                step = np.zeros_like(part)
                step[(*row, 0)], step[(*row, entry)] = 1e-5, -1e-5
                ends = [[*end[:place], part + sign * step, *end[place + 1 :]] for sign in (1, -1)]
                slopes.append((log_joint(*ends[0]) - log_joint(*ends[1])) / 2e-5)
    assert np.abs(slopes).max() < 1e-2  # of numbers of some tens
    assert log_prior(fit.hmm(data)) > -1.0


def test_values_changed_in_place_are_read_again():
    """What a model has prepared of its data is that of the values as they were."""
    data = Sequences(torch.randn(2, 9), torch.tensor([9, 4]))
    module = TabularHMM.from_hmm(
        HMM(torch.zeros(1), torch.zeros(1, 1), dist.Normal(torch.zeros(1), 1.0), data.lengths)
    )
    for _ in range(3):
        known = models.build(module, data).log_prob(data.values)
        other = Sequences(data.values.clone(), data.lengths)
        torch.testing.assert_close(known, models.build(module, other).log_prob(other.values))
        data.values[0, 0] += 3.0
